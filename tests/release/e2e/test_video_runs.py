"""Runs on videos against plain transformers, one document at a time: losses step by step, the result, its answers."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import filming
import pytest
import torch
from conftest import train_with
from plain_documents import Plain, metric, own_loop
from rich.console import Console
from transformers import AutoModelForMultimodalLM, AutoTokenizer
from usual import usual

from finetune.data.dataset import questions
from finetune.release.export.commands import ExportOptions, export_run, verify_run

WHOLE = ["language", "projector", "tower"]


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("video-runs")
    for name in filming.FILMING:
        filming.save_filming(folder, name)
    filming.write_films(folder, "films", 20, listed=True)
    filming.write_films(folder, "rare", 20, seed=3, numbers=(0,) * 5 + (1,), listed=True)
    return folder


def sources(folder: Path, rows: str) -> list[dict[str, str]]:
    return [{"path": str(folder / f"{rows}.jsonl"), "format": "messages"}]


def train_on_films(folder: Path, name: str, label: str, rows: str = "films", **changes: Any) -> Path:
    """Returns the folder of the run. changes: of the recipe's sections; keys of a section."""
    recipe: dict[str, Any] = {
        "run": {"name": f"{name}-{label}", "dir": str(folder / "runs")},
        "model": {"name": str(folder / f"{name}_films"), "train": WHOLE},
        "mode": "full",
        "data": {
            "train": sources(folder, rows),
            "eval": sources(folder, rows),
            "max_length": 256,
            "video": {"max_frames": 6},
        },
        "batch": {"rows": 3},
        "optimizer": {"lr": 3e-3, "weight_decay": 0.1, "max_grad_norm": None, "betas": [0.9, 0.95]},
        "schedule": {"name": "constant"},
        "train": {"max_steps": 4, "precision": "fp32"},
        "evaluate": {"at_start": False, "generate": 4, "max_new_tokens": 3},
        "tracking": {"samples": True},
    }
    return train_with(folder, recipe, changes)


def plain_answers(run: Path, model: Any, prompts: int, count: int) -> list[list[int]]:
    """The likeliest next tokens of the first prompts, by whole forwards without a cache."""
    plain, answers = Plain(run), []
    for question in islice(questions(plain.examples, ()), prompts):
        ids = list(question.prompt)
        for _ in range(count):
            tokens = torch.tensor([ids])
            with torch.no_grad():
                logits = model(
                    input_ids=tokens, use_cache=False, **plain.reader.plain_inputs(question.media, tokens)
                ).logits
            ids.append(int(logits[0, -1].argmax()))
        answers.append(ids[len(question.prompt) :])
    return answers


@pytest.mark.parametrize("name", usual(filming.FILMING, "qwen3_vl"))
@pytest.mark.parametrize("last", usual(["tower", "language"], "tower"))
def test_losses_are_those_of_plain_transformers(name: str, last: str, films: Path) -> None:
    parts = WHOLE if last == "tower" else ["language"]
    base = films / f"{name}_films"
    run = train_on_films(films, name, parts[-1], model={"train": parts, "name": str(base)})
    assert metric(run, "loss") == pytest.approx(own_loop(run, base, parts), rel=2e-6)
    result = AutoModelForMultimodalLM.from_pretrained(run / "model")
    assert metric(run, "eval_loss")[-1] == pytest.approx(Plain(run).loss(result), rel=2e-6)
    tower = (json.loads((run / "plan.json").read_text())["parts"])["tower"]
    assert (tower[1] > 0) == (parts == WHOLE)
    settings = json.loads((run / "model" / "video_preprocessor_config.json").read_text(encoding="utf-8"))
    assert settings["max_frames"] == 6  # who loads it sees as many frames as the run
    (logged,) = map(json.loads, (run / "generations.jsonl").read_text(encoding="utf-8").splitlines())
    assert "[video 1: " in str(logged)
    assert "<|video_pad|>" not in str(logged)
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    for answer, row in zip(plain_answers(run, result, 4, 3), logged["rows"], strict=True):
        assert tokenizer.decode(answer, skip_special_tokens=True).startswith(row[1])


@pytest.mark.long
@pytest.mark.parametrize("name", filming.FILMING)
def test_steps_without_a_video_leave_tower_and_projector(name: str, films: Path) -> None:
    """As plain torch does, whose gradients are None there: no decay, no momentum."""
    run = train_on_films(
        films, name, "rare", "rare", data={"packing": False}, batch={"rows": 2}, train={"max_steps": 8}
    )
    assert metric(run, "loss") == pytest.approx(own_loop(run, films / f"{name}_films", WHOLE), rel=2e-6)


@pytest.mark.long
@pytest.mark.parametrize("name", filming.FILMING)
def test_batches_by_tokens(name: str, films: Path) -> None:
    run = train_on_films(films, name, "tokens", data={"packing": False}, batch={"rows": 5, "tokens_per_device": 300})
    assert metric(run, "loss") == pytest.approx(own_loop(run, films / f"{name}_films", WHOLE), rel=2e-6)


@pytest.mark.long
@pytest.mark.parametrize("name", filming.FILMING)
def test_adapters_in_all_parts_are_exported(name: str, films: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    run = train_on_films(films, name, "lora", mode="lora", lora={"rank": 2, "alpha": 4.0})
    base = AutoModelForMultimodalLM.from_pretrained(films / f"{name}_films")
    plain, result = Plain(run), PeftModel.from_pretrained(base, run / "model").eval()
    keys = {part for key in result.state_dict() if "lora_" in key for part in key.split(".")}
    assert {"visual", "merger", "language_model"} <= keys
    assert metric(run, "eval_loss")[-1] == pytest.approx(plain.loss(result), rel=2e-6)
    out = tmp_path / "export"
    compared = export_run(run, ExportOptions(out=out), Console(quiet=True))
    assert compared["kl_mean"] < 1e-9
    for verified in (out, run / "model"):  # the adapter by itself as well
        assert verify_run(verified, run, None, None, 4, Console(quiet=True))
    written = AutoModelForMultimodalLM.from_pretrained(out)
    assert plain.loss(written) == pytest.approx(plain.loss(result), rel=2e-6)
    settings = json.loads((out / "video_preprocessor_config.json").read_text(encoding="utf-8"))
    assert (settings["max_frames"], settings["fps"]) == (6, 2.0)
