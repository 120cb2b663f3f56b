"""Distillation from a model: `finetune reference` runs the teacher alone, training finds what it predicts."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import numpy as np
import parity
import pytest
import tiny
import torch
from conftest import metrics, train_alone
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.data.dataset import Dataset, build_training
from finetune.data.predictions import IDS, LOG_PROBS
from finetune.errors import UserError
from finetune.models.base_model import Base
from finetune.recipe import load_recipe
from finetune.training.run import compute_reference
from finetune.training.signals import StopRequest
from finetune.training.teacher import with_teacher

Write = Callable[..., Path]
K = 5
# Of this teacher's log probabilities in fp32: its logits reach 14, and plain transformers is this far from fp64.
ROUNDING = 5e-6


def predict_here(path: Path, *overrides: str) -> str:
    console = Console(file=io.StringIO(), width=400)
    compute_reference(load_recipe(path, overrides), str(path), StopRequest(), console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def predictions_of(path: Path, *overrides: str) -> Dataset:
    recipe = load_recipe(path, overrides)
    base = Base.of(recipe)
    taught = with_teacher(recipe, build_training(recipe, base.renderer(recipe.objective)), base)
    assert isinstance(taught, Dataset)
    return taught


@pytest.fixture(scope="module")
def teacher(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_teacher(made / "qwen3", tmp_path_factory.mktemp("teacher"))


@pytest.fixture
def distilling(recipe: dict[str, Any], write_recipe: Write, teacher: Path, tmp_path: Path, monkeypatch: Any) -> Path:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    objective = {"name": "distill", "teacher": str(teacher), "top_k": K, "temperature": 2.0}
    return write_recipe({**recipe, "objective": objective})


def test_a_model_teaches(distilling: Path, teacher: Path) -> None:
    """What is computed is what plain transformers says of each document alone; training needs it, and is better for
    it."""
    with pytest.raises(
        UserError, match=r"has no predictions of this data under these settings\. Fix: run `python -m finetune refe"
    ):
        train_alone(distilling)
    assert "computed for 120 examples" in predict_here(distilling)
    assert "in the cache already" in predict_here(distilling)
    model = AutoModelForCausalLM.from_pretrained(teacher)
    for example in predictions_of(distilling).examples:
        (sequence,) = example.sequences
        with torch.no_grad():
            logits = model(torch.from_numpy(sequence.input_ids)[None].long(), use_cache=False).logits[0, :-1]
        log_p = torch.log_softmax(logits[sequence.loss_mask[1:]] / 2.0, 1)
        columns = {name: torch.from_numpy(values) for name, values in example.target_columns.items()}
        torch.testing.assert_close(columns[LOG_PROBS], log_p.topk(K).values, rtol=0, atol=1e-5)
        torch.testing.assert_close(log_p.gather(1, columns[IDS]), columns[LOG_PROBS], rtol=0, atol=1e-5)
    train_alone(distilling, "train.max_steps=8", "optimizer.lr=1e-2")
    lines = [line for line in metrics(distilling.parent / "runs/run") if "loss" in line]
    assert lines[-1]["divergence"] < 0.8 * lines[0]["divergence"]
    assert lines[0]["loss"] == pytest.approx(4 * lines[0]["divergence"])  # T^2
    with pytest.raises(UserError, match="has no predictions of this data under these settings"):
        train_alone(distilling, "objective.temperature=1")


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_a_model_has_nothing_to_learn_from_itself(distilling: Path, made: Path, divergence: str) -> None:
    own = (f"objective.teacher={made / 'llama'}", f"objective.divergence={divergence}", "train.max_steps=1")
    predict_here(distilling, *own)
    train_alone(distilling, *own)
    first = next(line for line in metrics(distilling.parent / "runs/run") if "loss" in line)
    assert abs(first["divergence"]) < 1e-6
    assert first["nll"] > 5


def test_held_out_rows_are_not_the_teachers_either(distilling: Path, made: Path) -> None:
    """Of `data.eval: {share}` no prediction is computed, and the student finds those of the others."""
    source = f"{{path: {made / 'rows.jsonl'}, format: messages, limit: 20}}"
    share = (f"data.train=[{source}]", "data.eval={share: 0.2}", "train.max_steps=1")
    assert "computed for 16 examples" in predict_here(distilling, *share)
    assert len(predictions_of(distilling, *share).examples) == 16


def test_examples_of_later_epochs_are_taught_too(distilling: Path, made: Path) -> None:
    source = f"{{path: {made / 'rows.jsonl'}, format: messages, limit: 20, weight: 0.4}}"
    parts = (f"data.train=[{source}]", "train={epochs: 2}")
    assert "computed for 16 examples" in predict_here(distilling, *parts)
    assert len(predictions_of(distilling, *parts).examples) == 16


def test_draws_follow_from_the_example(distilling: Path, teacher: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """The same ones in another order and in other micro-batches; their mean is the teacher's."""
    draws = ("objective.top_k=null", "objective.samples=400", "objective.temperature=1")
    predict_here(distilling, *draws)
    first = {(e.path, e.row): e.target_columns for e in predictions_of(distilling, *draws).examples}
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "another"))
    predict_here(distilling, *draws, "batch.rows_per_device=1", "data.packing=false")
    again = predictions_of(distilling, *draws, "data.packing=false").examples
    same = [(one.target_columns[IDS] == first[one.path, one.row][IDS]).ravel() for one in again]
    assert np.concatenate(same).mean() > 0.999  # but where rounding moves a border: 4 of 177,200 on one processor
    one = next(iter(first.values()))
    teacher_says = np.exp(one[LOG_PROBS][0].astype(np.float64))
    assert np.mean(teacher_says) == pytest.approx(_expected(teacher, predictions_of(distilling, *draws)), rel=0.2)


def _expected(teacher: Path, data: Dataset) -> float:
    """The teacher's own expectation of its probability, at the first target."""
    (sequence,) = data.examples[0].sequences
    model = AutoModelForCausalLM.from_pretrained(teacher)
    with torch.no_grad():
        logits = model(torch.from_numpy(sequence.input_ids)[None].long(), use_cache=False).logits[0, :-1]
    return logits[sequence.loss_mask[1:]][0].softmax(0).square().sum().item()


def test_teachers_that_are_none(distilling: Path, teacher: Path, tmp_path: Path) -> None:
    other = shutil.copytree(teacher, tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<|another|>"])
    tokenizer.save_pretrained(other)

    def compute_or_train(*arguments: Any) -> None:
        predict_here(*arguments)
        train_alone(*arguments)

    for overrides, message in (
        ([f"objective.teacher={other}"], "objective.teacher: .* has another vocabulary .*'<|another|>' is id"),
        (["objective.top_k=384"], "objective.top_k: 384 is not below the vocabulary of 384. Fix: set a lower one"),
        (
            ["objective.teacher=none.parquet"],
            "objective.teacher: none.parquet is a file, so there is nothing to compute",
        ),
    ):
        with pytest.raises(UserError, match=message):
            compute_or_train(distilling, *overrides)


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "processes"),
    [
        *(pytest.param(config, 2, marks=pytest.mark.long) for config in ("ddp", "ulysses", "pp", "cp")),
        ("zero3", 2),
    ],
)
def test_a_teacher_on_several_processes(distilling: Path, tmp_path: Path, config: str, processes: int) -> None:
    """Whichever way it is spread, it predicts what it does on one."""
    predict_here(distilling)
    alone = {(e.path, e.row): e.target_columns for e in predictions_of(distilling).examples}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FINETUNE_CACHE", str(tmp_path / config))
        file = parity.config_file(tmp_path, config)
        done = forks.accelerate_launch(file, processes, "-m", "finetune", "reference", str(distilling))
        assert done.returncode == 0, done.stdout
        for example in predictions_of(distilling).examples:
            ours, theirs = example.target_columns, alone[example.path, example.row]
            np.testing.assert_allclose(ours[LOG_PROBS], theirs[LOG_PROBS], rtol=0, atol=ROUNDING)
            assert (ours[IDS] == theirs[IDS]).mean() > 0.99


@pytest.mark.long
def test_a_run_goes_on_with_its_teacher_and_with_no_other(distilling: Path, made: Path, tmp_path: Path) -> None:
    keep = ("checkpoint.every_steps=2", "train.max_steps=4", "checkpoint.keep=2")
    predict_here(distilling)
    train_alone(distilling, *keep)
    run = tmp_path / "runs/run"
    whole = [line for line in metrics(run) if "loss" in line]
    shutil.rmtree(next((run / "checkpoints").glob("step-*4")))
    other = f"objective.teacher={made / 'qwen3'}"
    predict_here(distilling, other)
    with pytest.raises(UserError, match="data: teacher: "):
        train_alone(distilling, *keep, other)
    train_alone(distilling, *keep)
    again = [line for line in metrics(run) if "loss" in line]
    assert [line["step"] for line in again] == [1, 2, 3, 4]
    assert [line["loss"] for line in again] == [line["loss"] for line in whole]
