"""Runs on videos against plain transformers, one document at a time: losses step by step, the result, its answers."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import filming
import numpy as np
import pytest
import torch
import yaml
from conftest import train_here
from rich.console import Console
from transformers import AutoModelForMultimodalLM, AutoTokenizer
from usual import usual

from finetune.data.dataset import build_training, on_disk, questions
from finetune.data.examples import Examples, media_reader
from finetune.data.samples import Sequence
from finetune.features import load_recipe
from finetune.models.base_model import Base
from finetune.release.export.commands import ExportOptions, export_run

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
    for section, keys in changes.items():
        recipe[section] = {**recipe.get(section, {}), **keys} if isinstance(keys, dict) else keys
    path = folder / f"{recipe['run']['name']}.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    train_here(path)
    return Path(recipe["run"]["dir"]) / recipe["run"]["name"]


def metrics(run: Path, key: str) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line[key] for line in lines if key in line]


class Plain:
    """The examples of a run, each alone through plain transformers."""

    def __init__(self, run: Path):
        recipe = load_recipe(run / "recipe.yaml")
        base = Base.of(recipe)
        self.examples: Examples = on_disk(build_training(recipe, base.renderer(recipe.objective))).examples
        self.reader: Any = media_reader(base.media)

    def losses(self, model: Any, one: Sequence) -> torch.Tensor:  # (S,)
        ids = torch.from_numpy(one.input_ids[None].astype(np.int64))
        inputs = self.reader.plain_inputs(one.media, ids)
        logits = model(input_ids=ids, use_cache=False, **inputs).logits[0, :-1]
        targets = torch.from_numpy(one.loss_mask[1:])
        return torch.nn.functional.cross_entropy(logits[targets], ids[0, 1:][targets], reduction="none")

    def loss(self, model: Any) -> float:
        with torch.no_grad():
            return float(torch.cat([self.losses(model, one.sequences[0]) for one in self.examples]).mean())


def own_loop(run: Path, base: Path, parts: list[str]) -> list[float]:
    """The losses of a loop over plain transformers on the rows of the run's steps, one document at a time."""
    plain, model = Plain(run), AutoModelForMultimodalLM.from_pretrained(base)
    named = [(name, p) for name, p in model.named_parameters() if parts == WHOLE or ".visual." not in name]
    groups = [[p for _, p in named if (p.ndim >= 2) == matrices] for matrices in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": params, "weight_decay": decay} for params, decay in zip(groups, (0.1, 0.0), strict=True)],
        lr=3e-3,
        betas=(0.9, 0.95),
    )
    by_row = {f"{example.path}:{example.row}": example.sequences[0] for example in plain.examples}
    losses = []
    for line in (run / "samples" / "rank-00000.jsonl").read_text(encoding="utf-8").splitlines():
        nll = torch.cat([plain.losses(model, by_row[row]) for row in json.loads(line)["rows"]]).mean()
        optimizer.zero_grad()
        nll.backward()
        optimizer.step()
        losses.append(nll.item())
    return losses


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
    assert metrics(run, "loss") == pytest.approx(own_loop(run, base, parts), rel=2e-6)
    result = AutoModelForMultimodalLM.from_pretrained(run / "model")
    assert metrics(run, "eval_loss")[-1] == pytest.approx(Plain(run).loss(result), rel=2e-6)
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
    assert metrics(run, "loss") == pytest.approx(own_loop(run, films / f"{name}_films", WHOLE), rel=2e-6)


@pytest.mark.long
@pytest.mark.parametrize("name", filming.FILMING)
def test_batches_by_tokens(name: str, films: Path) -> None:
    run = train_on_films(films, name, "tokens", data={"packing": False}, batch={"rows": 5, "tokens_per_device": 300})
    assert metrics(run, "loss") == pytest.approx(own_loop(run, films / f"{name}_films", WHOLE), rel=2e-6)


@pytest.mark.long
@pytest.mark.parametrize("name", filming.FILMING)
def test_adapters_in_all_parts_are_exported(name: str, films: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    run = train_on_films(films, name, "lora", mode="lora", lora={"rank": 2, "alpha": 4.0})
    base = AutoModelForMultimodalLM.from_pretrained(films / f"{name}_films")
    plain, result = Plain(run), PeftModel.from_pretrained(base, run / "model").eval()
    keys = {part for key in result.state_dict() if "lora_" in key for part in key.split(".")}
    assert {"visual", "merger", "language_model"} <= keys
    assert metrics(run, "eval_loss")[-1] == pytest.approx(plain.loss(result), rel=2e-6)
    out = tmp_path / "export"
    compared = export_run(run, ExportOptions(out=out), Console(quiet=True))
    assert compared["kl_mean"] < 1e-9
    written = AutoModelForMultimodalLM.from_pretrained(out)
    assert plain.loss(written) == pytest.approx(plain.loss(result), rel=2e-6)
    settings = json.loads((out / "video_preprocessor_config.json").read_text(encoding="utf-8"))
    assert (settings["max_frames"], settings["fps"]) == (6, 2.0)
