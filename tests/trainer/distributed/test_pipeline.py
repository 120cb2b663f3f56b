"""A pipeline of two processes with two stages each goes on from one process, and one process from it: on the same
rows, with the same losses, evaluations and generations, to the same weights."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import parity
import pytest
from conftest import launch, metrics, train_alone

STEPS = 9
RELATIVE = 5e-6  # as scripts/proofs/parity_matrix.py


@pytest.fixture
def values(made: Path, recipe: dict[str, Any]) -> dict[str, Any]:
    recipe["model"]["name"] = str(made / "llama_deep")
    recipe["batch"] = {"rows": 4, "rows_per_device": 1}
    recipe["train"]["max_steps"] = STEPS
    recipe["checkpoint"] = {"every_steps": 3, "keep": 5}
    recipe["evaluate"] = {"at_start": False, "generate": 3, "exact_match": 3, "max_new_tokens": 6}
    recipe["tracking"] = {"samples": True}
    return recipe


def go_on_from(run: Path, step: int, name: str) -> None:
    """A run directory as it was when that checkpoint was written."""
    checkpoint = f"checkpoints/step-{step:08d}"
    shutil.copytree(run / checkpoint, run.parent / name / checkpoint)


def lines(run: Path, key: str, after: int) -> list[tuple[int, float]]:
    return [(line["step"], line[key]) for line in metrics(run) if key in line and line["step"] > after]


def rows(run: Path, after: int) -> dict[int, list[str]]:
    """Of every step, over all ranks that name them."""
    found: dict[int, list[str]] = {}
    for file in (run / "samples").glob("*.jsonl"):
        for line in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
            found.setdefault(line["step"], []).extend(line["rows"])
    return {step: sorted(of_step) for step, of_step in found.items() if step > after}


def generations(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines() if re.search(r"│ (yes|no ) ", line)]


def same(reference: Path, other: Path, after: int) -> None:
    for key in ("loss", "grad_norm", "eval_loss"):
        expected = lines(reference, key, after)
        found = lines(other, key, after)
        assert [step for step, _ in found] == [step for step, _ in expected] != []
        assert [x for _, x in found] == pytest.approx([x for _, x in expected], rel=RELATIVE)
    assert lines(other, "exact_match", after) == lines(reference, "exact_match", after)
    assert rows(other, after) == rows(reference, after)
    assert parity.parameter_difference(reference / "model", other / "model") < parity.PARAMETER


@pytest.mark.long
def test_stopped_and_going_on_elsewhere(values: dict[str, Any], write_recipe: Any, tmp_path: Path) -> None:
    path, runs = write_recipe(values), tmp_path / "runs"
    straight = train_alone(path, "run.name=straight")
    go_on_from(runs / "straight", 3, "pipeline")
    config = parity.config_file(tmp_path, "pp_interleaved")
    done = launch(config, 2, "train", path, "run.name=pipeline", COLUMNS="400")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resuming from" in done.stdout
    same(runs / "straight", runs / "pipeline", after=3)
    go_on_from(runs / "pipeline", 6, "back")
    assert "resuming from" in train_alone(path, "run.name=back")
    same(runs / "straight", runs / "back", after=6)
    assert generations(done.stdout) == generations(straight)
    assert len(generations(straight)) == 3
    plan = json.loads((runs / "pipeline" / "plan.json").read_text(encoding="utf-8"))
    assert plan["division"] == {"schedule": "interleaved", "layers_of_stages": [1] * 4, "bubble_share": 1 / 9}
    assert "stages of 1 + 1 + 1 + 1 layers, interleaved" in done.stdout
    shares = [json.loads(line) for line in (runs / "pipeline" / "metrics.jsonl").read_text().splitlines()]
    assert all("share/communication" in line for line in shares if "loss" in line)
