"""`runs` and `logs`: what the files of runs say, whole, half written and silent."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from finetune.desk.view.run_log import follow
from finetune.errors import UserError
from finetune.plan.run_list import list_runs, runs_as_json, show_runs


def write_run(folder: Path, status: str | None, steps: int, done: int, **plan: Any) -> Path:
    """Files of a run whose steps take half a minute, evaluations included."""
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = [
        {
            "step": step,
            "loss": 2.0 / step,
            "tokens_per_s": 100.0,
            "step_s": 20.0,
            "time/forward": 20.0,
            "time/other": 10.0,
        }
        for step in range(1, done + 1)
    ]
    lines.append({"step": done, "eval_loss": 0.25, "eval_loss/chat": 0.5, "exact_match": 0.75})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"step": 99, "lo', encoding="utf-8")  # as a killed run leaves it
    (folder / "plan.json").write_text(json.dumps({"steps": steps, "world_size": 2, "device": "cpu", **plan}))
    if status is not None:
        (folder / "status.json").write_text(json.dumps({"status": status, "step": done, "steps": steps}))
    return folder


def test_runs_are_listed_with_time_and_price(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "done", "finished", 4, 4)
    write_run(tmp_path / "going", "running", 124, 4, device="NVIDIA H100 80GB HBM3")
    silent = write_run(tmp_path / "silent", "running", 8, 4)
    for file in silent.iterdir():
        os.utime(file, (time.time() - 7200,) * 2)
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "status.json").write_text("{")  # being written
    runs = {Path(run.folder).name: run for run in list_runs(tmp_path)}
    assert list(runs)[-1] == "silent"
    done, going = runs["done"], runs["going"]
    assert (done.status, done.step, done.steps, done.loss, done.hours_left, done.price) == (
        "finished",
        4,
        4,
        0.5,
        None,
        None,
    )
    assert done.evaluation == {"eval_loss": 0.25, "exact_match": 0.75}
    assert done.hours == pytest.approx(120 / 3600)
    assert going.hours_left == pytest.approx(1.0)
    assert going.price is not None
    assert 0 < going.price < 2 * 10 * going.hours
    assert going.silent_s is None
    assert runs["silent"].silent_s == pytest.approx(7200, abs=60)
    assert (runs["begun"].status, runs["begun"].step, runs["begun"].steps) == (None, 0, None)
    show_runs(Console(width=80), tmp_path, list(runs.values()))
    shown = capsys.readouterr().out
    assert "finished  " in shown
    assert "75.0%" in shown
    assert "USD" in shown
    assert f"{silent}: has written nothing for 2.0 h: if it was killed, launch it again" in " ".join(shown.split())
    assert json.loads(runs_as_json([done]))[0]["tokens_per_s"] == 100.0
    with pytest.raises(UserError, match="no runs here"):
        list_runs(tmp_path / "nothing")


def test_a_log_is_followed_until_the_run_ends(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "running", 8, 3)

    def goes_on(_seconds: float) -> None:
        """As if another process wrote two steps and ended."""
        whole = (run / "metrics.jsonl").read_text(encoding="utf-8").rpartition("\n")[0] + "\n"
        added = "".join(json.dumps({"step": step, "loss": 0.5, "lr": 1e-4}) + "\n" for step in (4, 5))
        (run / "metrics.jsonl").write_text(whole + added, encoding="utf-8")
        (run / "status.json").write_text(json.dumps({"status": "stopped", "step": 5, "steps": 8}))

    assert list(follow(run, 2, goes_on=True, wait=goes_on)) == [
        "step 3  loss 0.6667  100 tok/s",
        "step 3:  eval_loss 0.25  eval_loss/chat 0.5  exact_match 0.75",
        "step 4  loss 0.5  lr 0.0001",
        "step 5  loss 0.5  lr 0.0001",
        f"{run}: stopped",
    ]
    assert len(list(follow(run, None, goes_on=False))) == 6
    assert list(follow(run, 0, goes_on=False)) == []
    with pytest.raises(UserError, match="no run here"):
        next(follow(tmp_path / "nothing", None, goes_on=True))
