"""`runs` and `logs`: what the files of runs say, whole, half written and silent."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from rich.console import Console
from run_files import write_run

from finetune.errors import UserError
from finetune.plan.run_list import list_runs, runs_as_json, show_runs


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
