"""The reference of a preference run: what its log-probabilities depend on, what is computed again and what is not."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from conftest import finetune, metrics, train_alone
from safetensors.torch import load_file, save_file
from usual import usual

from finetune.data.dataset import Dataset, build_training
from finetune.errors import RunFailure, UserError
from finetune.models.base_model import Base
from finetune.models.tokenizer import load_tokenizer
from finetune.recipe import load_recipe
from finetune.training.reference_files import cache_folder, key_of, model_dependencies

Values = dict[str, Any]
Write = Callable[..., Path]


@pytest.fixture
def pairs(recipe: Values, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Values:
    """A recipe of DPO, on a model of its own to change, with an empty cache."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    shutil.copytree(made / "llama", tmp_path / "llama")
    tiny.write_rows(tmp_path / "pairs.jsonl", tiny.preferences(40))
    source = {"path": str(tmp_path / "pairs.jsonl"), "format": "preference"}
    data = {"train": [source], "max_length": 96}
    return {**recipe, "model": {"name": str(tmp_path / "llama")}, "data": data, "objective": {"name": "dpo"}}


def key(path: Path, *overrides: str) -> str:
    recipe = load_recipe(path, overrides)
    data = build_training(recipe, Base.of(recipe).renderer(recipe.objective))
    assert isinstance(data, Dataset)
    return key_of(model_dependencies(recipe, Base.of(recipe).config), data)


def log_probs(run: Path) -> np.ndarray:
    return np.load(run / "reference" / "train" / "log_probs.npy", allow_pickle=False)


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in metrics(run) if "loss" in line]


def change(file: Path, name: str, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(file)
    save_file({**tensors, name: call(tensors[name])}, file, {"format": "pt"})


def test_epochs_of_different_examples_have_the_reference_of_each(pairs, write_recipe, tmp_path):
    """Computed of each once beforehand, as without the adapters in each step; the last epoch is half as long."""
    pairs["data"]["train"][0]["weight"] = 0.6
    pairs |= {"mode": "lora", "lora": {"rank": 2}, "train": {**pairs["train"], "max_steps": None, "epochs": 2.5}}
    path = write_recipe(pairs)
    train_alone(path, "run.name=before", "objective.reference=precomputed")
    train_alone(path, "run.name=within", "objective.reference=adapters_off")
    before, within = (losses(tmp_path / "runs" / name) for name in ("before", "within"))
    assert len(log_probs(tmp_path / "runs" / "before")) == 2 * 40
    assert len(before) > 3
    assert before == pytest.approx(within, rel=1e-6)


# --- the key


OTHER = [
    "data.max_length=80",
    "data.packing=false",
    "data.train=[{path: PAIRS, format: preference, limit: 30}]",
    "data.train=[{path: PAIRS, format: preference, weight: 2}]",
    "model.chat_template=chatml",
    "train.precision=bf16",
]
SAME = [
    "run={name: other, seed: 42}",
    "mode=lora lora={rank: 2}",
    "mode=lora lora={rank: 8, dora: true, targets: [q_proj]}",
    "batch={rows: 8, rows_per_device: 4}",
    "optimizer.lr=1e-5",
    "objective.beta=0.5",
    "objective.loss=ipo",
    "train.max_steps=3",
    "model.attention=sdpa",
    "model.cross_entropy=plain",
]


@pytest.mark.parametrize("override", OTHER)
def test_key_of_other_numbers(pairs: Values, write_recipe: Write, tmp_path: Path, override: str) -> None:
    path = write_recipe(pairs)
    assert key(path, override.replace("PAIRS", str(tmp_path / "pairs.jsonl"))) != key(path)


@pytest.mark.parametrize("overrides", SAME)
def test_key_of_the_same_numbers(pairs: Values, write_recipe: Write, overrides: str) -> None:
    path = write_recipe(pairs)
    assert key(path, *re.split(r" (?=\w+=)", overrides)) == key(path)


def test_key_of_four_bits(pairs: Values, write_recipe: Write) -> None:
    path, lora = write_recipe(pairs), ("mode=qlora", "lora={rank: 2}")
    keys = [key(path, *lora, f"quantization={{type: {kind}}}") for kind in ("nf4", "fp4")]
    assert len({key(path), *keys}) == 3


def test_key_of_products_in_eight_bits(pairs: Values, write_recipe: Write) -> None:
    path = write_recipe(pairs)
    assert key(path, "train.precision=fp8") != key(path, "train.precision=bf16")


def test_key_of_random_weights(pairs: Values, write_recipe: Write) -> None:
    shape = json.dumps(tiny.MODELS["llama"])
    path = write_recipe({**pairs, "model": {"config": json.loads(shape), "tokenizer": pairs["model"]["name"]}})
    assert key(path) != key(path, "run.seed=1")
    assert key(path) != key(path, "model.config.initializer_range=0.1")


def test_key_of_other_weights(pairs: Values, write_recipe: Write, tmp_path: Path) -> None:
    path = write_recipe(pairs)
    before = key(path)
    shutil.copytree(tmp_path / "llama", tmp_path / "copy")
    assert key(path, f"model.name={tmp_path / 'copy'}") == before  # wherever they are
    change(tmp_path / "llama" / "model.safetensors", "model.norm.weight", lambda weight: weight * 1.0001)
    assert key(path) != before


def test_key_of_other_rows(pairs: Values, write_recipe: Write, tmp_path: Path) -> None:
    path = write_recipe(pairs)
    before = key(path)
    rows = tiny.preferences(40)
    rows[3]["chosen"], rows[4]["chosen"] = rows[4]["chosen"], rows[3]["chosen"]
    tiny.write_rows(tmp_path / "pairs.jsonl", rows)
    assert key(path) != before


# --- files


def test_found_again(pairs: Values, write_recipe: Write, tmp_path: Path) -> None:
    path = write_recipe(pairs)
    assert "computed in" in train_alone(path)
    assert "from the cache" in train_alone(path, "run.name=second", "mode=lora", "lora={rank: 2}")
    shutil.rmtree(tmp_path / "cache" / "data")
    again = train_alone(path, "run.name=second", "checkpoint.resume=never", "mode=lora", "lora={rank: 2}")
    assert f"from {tmp_path / 'runs' / 'second' / 'reference' / 'train'}" in again


@pytest.mark.parametrize(
    "damage", usual(("cut", "nan", "other type", "no report", "other key", "pickle"), "cut", "other key", "pickle")
)
def test_bad_files_are_computed_again(pairs: Values, write_recipe: Write, tmp_path: Path, damage: str) -> None:
    path, run = write_recipe(pairs), tmp_path / "runs" / "run"
    train_alone(path, "train.max_steps=1")
    expected = log_probs(run)
    for folder in (run / "reference" / "train", cache_folder(key(path))):
        file, report = folder / "log_probs.npy", folder / "report.json"
        if damage == "cut":
            file.write_bytes(file.read_bytes()[:-8])
        elif damage == "nan":
            np.save(file, np.where(np.arange(80) == 7, np.nan, expected))
        elif damage == "other type":
            np.save(file, expected.astype(np.float32))
        elif damage == "no report":
            report.unlink()
        elif damage == "other key":
            report.write_text(json.dumps({**json.loads(report.read_text()), "key": "f" * 64}))
        else:
            np.save(file, np.array([{}] * 80, dtype=object), allow_pickle=True)
    assert "computed in" in train_alone(path, "train.max_steps=1", "checkpoint.resume=never")
    np.testing.assert_array_equal(log_probs(run), expected)


@pytest.mark.parametrize("damaged", [False, True])
def test_stopped_pass_goes_on(pairs: Values, write_recipe: Write, tmp_path: Path, damaged: bool) -> None:
    """From the step in which the disk has changed a bit, if there is one."""
    path, run = write_recipe(pairs), tmp_path / "runs" / "run"
    train_alone(path, "train.max_steps=1")
    expected = log_probs(run)
    recipe = load_recipe(path)
    data = build_training(recipe, Base.of(recipe).renderer(recipe.objective))
    assert isinstance(data, Dataset)
    first_step = np.concatenate([data.rows[row] for row in range(recipe.batch.rows)])
    computed = np.sort(np.concatenate([2 * first_step, 2 * first_step + 1]))
    assert 0 < len(computed) < 80
    shutil.rmtree(tmp_path / "cache" / "data")
    shutil.rmtree(run / "reference" / "train")
    so_far = np.full(80, np.nan)
    so_far[computed] = expected[computed] - 1  # so that it shows where they come from
    copies = np.stack([so_far, so_far])
    copies.view(np.uint64)[0, computed[3]] ^= np.uint64(damaged)
    np.save(run / "reference" / f"{key(path)}.npy", copies)
    train_alone(path, "train.max_steps=1", "checkpoint.resume=never")
    if damaged:
        np.testing.assert_array_equal(log_probs(run), expected)
        return
    rest = np.setdiff1d(np.arange(80), computed)
    np.testing.assert_array_equal(log_probs(run)[computed], expected[computed] - 1)
    np.testing.assert_array_equal(log_probs(run)[rest], expected[rest])
    assert [file.name for file in (run / "reference").iterdir()] == ["train"]


def test_rows_that_give_no_number_are_named(pairs: Values, write_recipe: Write, tmp_path: Path) -> None:
    path, rows = write_recipe(pairs), tiny.preferences(40)
    rows[6]["rejected"][0]["content"] = "zzz"  # in no other row
    tiny.write_rows(tmp_path / "pairs.jsonl", rows)
    ids = torch.tensor(load_tokenizer(load_recipe(path).model)("zzz").input_ids)
    weights = tmp_path / "llama" / "model.safetensors"
    change(weights, "model.embed_tokens.weight", lambda table: table.index_fill(0, ids, math.nan))
    with pytest.raises(RunFailure, match=r"not finite\. Rows in question: \S*pairs\.jsonl:7\. Fix: check"):
        train_alone(path)


def test_examples_taken_twice_have_the_same(pairs: Values, write_recipe: Write, tmp_path: Path) -> None:
    pairs["data"]["train"][0]["weight"] = 2.0
    train_alone(write_recipe(pairs), "train.max_steps=1")
    first, again = np.split(log_probs(tmp_path / "runs" / "run"), 2)
    np.testing.assert_allclose(first, again, rtol=1e-6)


# --- a run that goes on


def stopped(path: Path, runs: Path) -> list[float]:
    """Runs six steps, and leaves the run's folder as it was after the third; returns all losses."""
    train_alone(path, "checkpoint.every_steps=3")
    whole = losses(runs / "run")
    shutil.rmtree(runs / "run" / "checkpoints" / "step-00000006")
    return whole


@pytest.mark.parametrize("lost", usual(("nothing", "cache", "everything"), "everything"))
def test_goes_on_with_the_initial_model(pairs: Values, write_recipe: Write, tmp_path: Path, lost: str) -> None:
    path, runs = write_recipe(pairs), tmp_path / "runs"
    whole = stopped(path, runs)
    if lost != "nothing":
        shutil.rmtree(tmp_path / "cache" / "data")
    if lost == "everything":
        shutil.rmtree(runs / "run" / "reference")
    printed = train_alone(path, "checkpoint.every_steps=3")
    assert "step 3 of 6" in printed
    assert ("computed in" in printed) == (lost == "everything")
    assert losses(runs / "run") == whole


def test_does_not_go_on_with_other_weights(pairs: Values, write_recipe: Write, tmp_path: Path) -> None:
    path = write_recipe(pairs)
    stopped(path, tmp_path / "runs")
    change(tmp_path / "llama" / "model.safetensors", "model.norm.weight", lambda weight: weight * 2)
    for resume in ("auto", "step-00000003"):
        with pytest.raises(UserError, match=r"not those that this run began with\. .*restore them, or start over"):
            train_alone(path, "checkpoint.every_steps=3", f"checkpoint.resume={resume}")


def test_column_is_no_part_of_what_identifies_the_data(pairs: Values, write_recipe: Write) -> None:
    recipe = load_recipe(write_recipe(pairs))
    data = build_training(recipe, Base.of(recipe).renderer(recipe.objective))
    assert isinstance(data, Dataset)
    more = Dataset(data.examples.with_columns({"reference_log_probs": np.zeros(80)}), data.rows)
    assert (more.summary(), more.identity()) == (data.summary(), data.identity())


# --- another model as the reference


def test_another_model(pairs: Values, write_recipe: Write, tmp_path: Path) -> None:
    path, runs = write_recipe(pairs), tmp_path / "runs"
    tiny.save_model(tmp_path, "llama_tied")
    another = f"objective.reference_model={tmp_path / 'llama_tied'}"
    with pytest.raises(
        UserError,
        match=r"has no log-probabilities of this data under these settings.*run `python -m finetune reference`",
    ):
        train_alone(path, another)
    done = finetune("reference", path, another)
    assert done.returncode == 0, done.stderr
    assert "computed in" in done.stdout
    assert not (runs / "run" / "metrics.jsonl").exists()
    assert "from the cache" in train_alone(path, another)
    train_alone(path, f"model.name={tmp_path / 'llama_tied'}", "run.name=itself", "train.max_steps=1")
    np.testing.assert_array_equal(log_probs(runs / "run"), log_probs(runs / "itself"))
    assert losses(runs / "run")[0] != pytest.approx(math.log(2), abs=1e-4)


def test_command_for_the_initial_model(pairs: Values, write_recipe: Write) -> None:
    path = write_recipe(pairs)
    assert finetune("reference", path).returncode == 0
    assert "from the cache" in train_alone(path, "train.max_steps=1")
    done = finetune("reference", path, "objective={name: orpo}")
    assert (done.returncode, "nothing to compute" in done.stderr) == (2, True)


def test_another_vocabulary(pairs: Values, write_recipe: Write, tmp_path: Path) -> None:
    other = tiny.save_with_exchanged_tokens(tmp_path / "other")
    for command in ("train", "reference"):
        done = finetune(command, write_recipe(pairs), f"objective.reference_model={other}")
        assert done.returncode == 2
        assert "has another vocabulary than the model that is trained" in done.stderr


# --- dropout


def test_dropout_only_where_asked(pairs: Values, write_recipe: Write, tmp_path: Path) -> None:
    path, runs = write_recipe(pairs), tmp_path / "runs"
    train_alone(path, "train.max_steps=1", "run.name=without")
    file = tmp_path / "llama" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "attention_dropout": 0.5}), encoding="utf-8")
    for name, asked in (("off", "false"), ("on", "true")):
        train_alone(path, "train.max_steps=1", f"run.name={name}", f"objective.dropout={asked}")
        np.testing.assert_allclose(
            log_probs(runs / name), log_probs(runs / "without"), rtol=1e-6
        )  # never in the reference
        assert (losses(runs / name)[0] == np.float32(math.log(2))) == (name == "off")
        result = json.loads((runs / name / "model" / "config.json").read_text())
        assert result["attention_dropout"] == 0.5  # is the base's, whatever was trained with
        shutil.rmtree(tmp_path / "cache" / "data")
