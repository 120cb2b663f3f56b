"""Runs that are killed end as if they had not been: a short scripts/proofs/crash_test.py, and what it compares by."""

from __future__ import annotations

import json
from pathlib import Path

import bitwise
import forks
import pytest
import torch
from repository import ROOT
from safetensors.torch import save_file

SCRIPT = ROOT / "scripts" / "proofs" / "crash_test.py"


@pytest.mark.long
@pytest.mark.parametrize(
    ("configs", "launched_kills"),
    [
        pytest.param(["ddp"], 0, id="forked"),
        pytest.param(["fsdp2"], 1, id="launched", marks=pytest.mark.long),
    ],
)
def test_killed_at_random_and_during_a_save(tmp_path: Path, configs: list[str], launched_kills: int) -> None:
    report = tmp_path / "report.json"
    kills = 2 * len(configs)
    command = [SCRIPT, "--only", *configs, "--kills", kills, "--launched-kills", launched_kills]
    command += ["--seed", 1, "--folder", tmp_path, "--json", report]
    done = forks.python(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    trials = json.loads(report.read_text())["cells"]
    assert {trial["config"] for trial in trials} == set(configs)
    assert all(trial["passed"] for trial in trials)
    hit = [kill for trial in trials for kill in trial["kills"]]
    assert len(hit) >= kills
    assert sum(kill["during_save"] for kill in hit) >= kills // 2
    assert any(kill["how"].startswith("launched") for kill in hit) == (launched_kills > 0)


# --- what counts as the same


def made_up_run(folder: Path, weight: float = 1.0, loss: float = 0.5, rows: tuple[str, ...] = ("a:1", "a:2")) -> Path:
    """Two steps on two ranks, with one checkpoint."""
    checkpoint = folder / "checkpoints" / "step-00000002"
    checkpoint.mkdir(parents=True)
    save_file({"exp_avg|0|w": torch.tensor([weight])}, checkpoint / "rank-00000-of-00002.safetensors")
    counts = {
        "step": 2,
        "tokens": 9,
        "supervised_tokens": 4,
        "tokens_by_source": {},
        "row_position": 8,
        "metrics": {},
        "loss_scale": {},
    }
    state = {**counts, "scalars": {"w": {"step": 2.0}}, "written": {"where": str(folder)}}
    (checkpoint / "state.json").write_text(json.dumps(state))
    lines = [{"step": 1, "loss": 0.7, "step_s": weight}, {"step": 2, "loss": loss, "tokens_per_s": loss}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "samples").mkdir()
    for rank, row in enumerate(rows):
        line = json.dumps({"step": 1, "rows": [row]}) + "\n"
        (folder / "samples" / f"rank-{rank:05d}.jsonl").write_text(line)
    return folder


def test_times_names_and_the_rank_of_a_row_do_not_count(tmp_path: Path) -> None:
    one, other = made_up_run(tmp_path / "one"), made_up_run(tmp_path / "other", rows=("a:2", "a:1"))
    lines = (other / "metrics.jsonl").read_text()
    (other / "metrics.jsonl").write_text(lines.replace('"step_s": 1.0', '"step_s": 7.0'))
    assert bitwise.differences(one, other) == []


def test_the_last_bit_counts(tmp_path: Path) -> None:
    one = made_up_run(tmp_path / "one")
    other = made_up_run(tmp_path / "other", weight=1.0000001, loss=0.5000000000000001)
    assert bitwise.differences(one, other) == [
        "checkpoints/step-00000002/rank-00000-of-00002.safetensors: exp_avg|0|w",
        "metrics.jsonl: 2",
    ]


@pytest.mark.parametrize(
    "rows", [("a:1", "a:3"), ("a:1", "a:1"), ("a:1", "a:2", "a:2")], ids=["another row", "a row twice", "one too many"]
)
def test_rows_are_counted(tmp_path: Path, rows: tuple[str, ...]) -> None:
    one, other = made_up_run(tmp_path / "one"), made_up_run(tmp_path / "other", rows=rows)
    assert "rows trained on, by step: 1" in bitwise.differences(one, other)


def test_a_line_twice_and_files_left_over_or_missing(tmp_path: Path) -> None:
    one, other = made_up_run(tmp_path / "one"), made_up_run(tmp_path / "other")
    metrics = other / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + metrics.read_text().splitlines()[1] + "\n")
    (other / "model.partial").touch()
    (other / "checkpoints" / "step-00000002" / "state.json").unlink()
    assert bitwise.differences(one, other) == [
        "checkpoints/step-00000002/state.json is missing",
        "model.partial is left over",
        "metrics.jsonl: 3",
    ]
