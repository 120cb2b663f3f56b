"""Runs on files of several kinds, in one row, against plain transformers, one document at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import filming
import parity
import pytest
import several
from conftest import launch, train_with
from plain_documents import Plain, metric, own_loop
from transformers import AutoModelForMultimodalLM

WHOLE = ["language", "projector", "tower"]
RUNS = {  # of a model: the kinds of files of a run
    "gemma4 image": ("image",),
    "gemma4_whole image video": ("image", "video"),
    "gemma4 video": ("video",),
    "gemma4 image audio": ("image", "audio"),
    "gemma4 image audio video": ("image", "audio", "video"),
    "qwen3_vl_films image video": ("image", "video"),
}
VIDEO = {"max_frames": 2}  # of 70 tokens each, of Gemma 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several-runs")
    several.save_gemma4(folder)
    several.save_gemma4(folder, "gemma4_whole", whole=True)
    filming.save_filming(folder, "qwen3_vl")
    for kinds in {*RUNS.values()}:
        several.write_rows(folder, "_".join(kinds), 12, kinds, numbers=(0, 1, 1, 2))
        several.write_rows(folder, f"rare_{'_'.join(kinds)}", 16, kinds, seed=3, numbers=(0,) * 3 + (1,))
    return folder


def train_on(folder: Path, name: str, label: str, rows: str = "", **changes: Any) -> Path:
    """Returns the folder of the run. changes: of the recipe's sections; keys of a section."""
    kinds = RUNS[name]
    source = [{"path": str(folder / f"{rows}{'_'.join(kinds)}.jsonl"), "format": "messages"}]
    files = {kind: dict(VIDEO) if kind == "video" else {} for kind in kinds}
    recipe: dict[str, Any] = {
        "run": {"name": f"{name.replace(' ', '-')}-{label}", "dir": str(folder / "runs")},
        "model": {"name": str(folder / name.split()[0]), "train": WHOLE},
        "mode": "full",
        "data": {"train": source, "eval": source, "max_length": 600, **files},
        "batch": {"rows": 2},
        "optimizer": {"lr": 3e-3, "weight_decay": 0.1, "max_grad_norm": None, "betas": [0.9, 0.95]},
        "schedule": {"name": "constant"},
        "train": {"max_steps": 3, "precision": "fp32"},
        "evaluate": {"at_start": False, "generate": 2, "max_new_tokens": 2},
        "tracking": {"samples": True},
    }
    return train_with(folder, recipe, changes)


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("last", ["tower", "language"])
def test_losses_are_those_of_plain_transformers(name: str, last: str, folder: Path) -> None:
    parts = WHOLE if last == "tower" else ["language"]
    base = folder / name.split()[0]
    # AdamW divides each gradient by its own size: with 1e-8 it makes steps of gradients that are rounding alone.
    eps = 1e-6 if "whole" in name and parts == WHOLE else 1e-8
    run = train_on(folder, name, last, model={"train": parts, "name": str(base)}, optimizer={"eps": eps})
    assert metric(run, "loss") == pytest.approx(own_loop(run, base, parts, eps), rel=2e-6)
    result = AutoModelForMultimodalLM.from_pretrained(run / "model")
    assert metric(run, "eval_loss")[-1] == pytest.approx(Plain(run).loss(result), rel=2e-6)
    tower = json.loads((run / "plan.json").read_text())["parts"]["tower"]
    assert (tower[1] > 0) == (parts == WHOLE)
    logged = (run / "generations.jsonl").read_text(encoding="utf-8")
    assert "<|image|>" not in logged
    assert "<|image_pad|>" not in logged


@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma4 image audio video", "gemma4_whole image video", "qwen3_vl_films image video"])
@pytest.mark.parametrize("config", ["ddp", "fsdp2", "zero3_gathering", "tp"])
def test_two_processes_compute_what_one_does(config: str, name: str, folder: Path) -> None:
    """In most steps the rows of the ranks have files of other kinds, or none. `zero3_gathering` gathers every weight
    where it is used, so that ranks which call modules in another order wait for each other."""
    changes = {"batch": {"rows": 4}, "train": {"max_steps": 5}, "data": {"packing": False}}
    alone = train_on(folder, name, f"one-{config}", "rare_", **changes)
    done = launch(
        parity.config_file(folder, config), 2, "train", folder / f"{alone.name}.yaml", f"run.name={alone.name}-of-two"
    )
    assert done.returncode == 0, done.stdout[-3000:]
    both = alone.parent / f"{alone.name}-of-two"
    for key in ("loss", "grad_norm", "eval_loss"):
        assert metric(both, key) == pytest.approx(metric(alone, key), rel=1e-5 if key == "grad_norm" else 2e-6), key


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
def test_steps_leave_the_towers_that_they_do_not_use(name: str, folder: Path) -> None:
    """As plain torch does, whose gradients are None there: no decay, no momentum."""
    changes = {"data": {"packing": False}, "batch": {"rows": 1}, "train": {"max_steps": 10}}
    run = train_on(folder, name, "rare", "rare_", **changes)
    assert metric(run, "loss") == pytest.approx(own_loop(run, folder / name.split()[0], WHOLE), rel=2e-6)
