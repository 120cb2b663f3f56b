"""Lines of metrics.jsonl that no run writes: every command that reads runs shows this one, and says what is damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_report import make_run

from finetune.desk.studio import pages
from finetune.desk.studio.jobs import Jobs
from finetune.desk.view.report import write_report
from finetune.desk.view.run_log import follow
from finetune.plan.run_list import list_runs, runs_as_json, show_runs
from finetune.tracking.trackers import best_values

DAMAGE = {
    "a text as a loss": '{"step": 41, "loss": "0.5", "tokens_per_s": 9.0, "step_s": 1.0}',
    "null as a loss": '{"step": 41, "loss": null, "step_s": 1.0}',
    "null as a time": '{"step": 41, "loss": 0.5, "step_s": null, "time/forward": null}',
    "a list": '{"step": 41, "loss": [0.5]}',
    "a huge integer": '{"step": 41, "loss": 1' + "0" * 400 + "}",
    "a huge number": '{"step": 41, "loss": 0.5, "step_s": 1e308, "time/forward": 1e308}',
    "an overflow": '{"step": 41, "loss": 1e999}',
    "NaN": '{"step": 41, "loss": NaN}',
    "a boolean": '{"step": 41, "loss": true}',
    "a text as an evaluation": '{"step": 41, "eval_loss": "low"}',
    "a huge step": '{"step": 1' + "0" * 300 + ', "loss": 0.5}',
    "a negative step": '{"step": -1, "loss": 0.5}',
    "a text as a step": '{"step": "41", "loss": 0.5}',
    "no step": '{"loss": 0.5}',
    "a number": "7",
    "half a line": '{"step": 41, "lo',
    "nested": "[" * 90_000,
    "no text": "\udcff\udcfe",
}
PLANS: dict[str, Any] = {
    "steps": 10**400,
    "world_size": 10**400,
    "device": ["cpu"],
    "measured": "fast",
}


def shown(folder: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What each command says of a run."""
    infos = list_runs(folder)
    show_runs(Console(width=300), folder, infos)
    write_report([run], folder / "page.html")
    values = pages.run_values(Jobs(folder), "run")
    parts = pages.fragment("run-part.html.jinja", configs=[], **values)
    assert "run" in pages.fragment("runs-part.html.jinja", rows=[values["row"]], commands=[])
    return {
        "runs": capsys.readouterr().out,
        "runs --json": runs_as_json(infos),
        "logs": "\n".join(follow(run, None, goes_on=False)),
        "report": (folder / "page.html").read_text(encoding="utf-8"),
        "studio": parts,
    }


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_line_is_left_out_and_said(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", 1e-3)
    file = run / "metrics.jsonl"
    before, whole = file.read_bytes(), shown(tmp_path, run, capsys)
    best = best_values(run)
    file.write_bytes(before + DAMAGE[name].encode("utf-8", "surrogateescape") + b"\n")
    last = before.count(b"\n") + 1
    damage = f"metrics.jsonl: 1 line is damaged and left out, the first is line {last}"
    for command, text in shown(tmp_path, run, capsys).items():
        assert damage not in whole[command]
        assert damage in text, command
    (info,) = list_runs(tmp_path)
    assert info.step == max(json.loads(line)["step"] for line in before.splitlines())
    assert best_values(run) == best


@pytest.mark.parametrize("key", PLANS)
def test_a_damaged_plan_takes_no_command_down(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", 1e-3)
    plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
    (run / "plan.json").write_text(json.dumps({**plan, key: PLANS[key]}), encoding="utf-8")
    assert "run" in shown(tmp_path, run, capsys)["runs"]


def test_files_that_cannot_be_read_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "[run", 1e-3)
    for name in ("metrics.jsonl", "plan.json", "status.json"):
        (run / name).unlink()
        (run / name).mkdir()
    (info,) = list_runs(tmp_path)
    show_runs(Console(width=300), tmp_path, [info])
    assert "[run: metrics.jsonl cannot be read: Is a directory" in capsys.readouterr().out
    assert info.problems[1:] == ("plan.json cannot be read", "status.json cannot be read")
