"""What people see of a run in the terminal, in `logs` and in `runs`: the loss, and what the objective is about."""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from conftest import train_here
from rich.console import Console

from finetune import utils
from finetune.desk.view.run_log import follow
from finetune.plan.run_list import evaluation, list_runs, show_runs
from finetune.tracking.headline import progress_text
from finetune.tracking.watches import CoresWatch, PaceWatch, VarianceWatch

WIDTH = 100
NUMBER = r"-?\d[\d.,]*(?:e-?\d+)?"
# By objective: its rows, and what a step shows behind its loss.
OBJECTIVES: dict[str, tuple[Callable[[int], list[dict[str, Any]]], dict[str, Any], str]] = {
    "sft": (tiny.conversations, {}, ""),
    "dpo": (tiny.preferences, {}, rf"  accuracy {NUMBER}%  margin {NUMBER}"),
    "orpo": (tiny.preferences, {}, rf"  accuracy {NUMBER}%  margin {NUMBER}"),
    "kto": (tiny.unpaired, {}, rf"(  margin {NUMBER})?"),  # no margin if all answers of a step are of one kind
    "reward": (tiny.preferences, {}, rf"  accuracy {NUMBER}%  margin {NUMBER}"),
    "classify": (tiny.texts, {"labels": list(tiny.LABELS)}, rf"  accuracy {NUMBER}%"),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_step_shows_what_its_objective_is_about(
    name: str, recipe: dict[str, Any], write_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(utils, "SECONDS_BETWEEN_LINES", 0)
    rows, keys, shown = OBJECTIVES[name]
    sources = [{"path": str(tiny.write_rows(tmp_path / "rows.jsonl", rows(24)))}]
    recipe["data"] = {"train": sources, "eval": sources, "max_length": 128}
    seen = train_here(write_recipe({**recipe, "objective": {"name": name, **keys}}), "train.max_steps=2")
    line = re.compile(rf"step \d/2  loss {NUMBER}{shown}  {NUMBER} tok/s  eta \d+ s")
    assert len([one for one in seen.splitlines() if line.fullmatch(one)]) == 2, seen


def test_samples_without_variance_are_told_in_the_step_and_at_the_end(
    online: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tiny model is never right."""
    monkeypatch.setattr(utils, "SECONDS_BETWEEN_LINES", 0)
    seen = train_here(online, "train.max_steps=12")
    assert re.search(
        rf"^step 12/12  loss {NUMBER}  reward 0\.0000  no variance 100%  {NUMBER} tok/s  eta 0 s$", seen, re.M
    )
    assert seen.count("nothing is learnt: in the last 10 steps all samples of each prompt had the same reward") == 1
    assert "no variance" in seen
    assert "100% of the prompts in every step: nothing was learnt" in seen
    run = online.parent / "runs" / "run"
    logged = [line for line in follow(run, None, False) if "  loss " in line]
    assert [line.partition("  ")[0] for line in logged] == [f"step {i}" for i in range(1, 13)]
    assert all("  reward 0.0000  no variance 100%  " in line for line in logged)
    show_runs(Console(width=WIDTH), run, list_runs(run))
    assert "reward 0.0000" in capsys.readouterr().out


def test_an_evaluation_of_samples_is_its_reward(online: Path) -> None:
    train_here(online, "train.max_steps=2", "evaluate.every_steps=2", "evaluate.prompts=2")
    (info,) = list_runs(online.parent / "runs")
    assert evaluation(info) == "0.0000"
    assert "eval_reward" in info.evaluation


def test_a_warning_comes_ever_less_often_and_begins_again() -> None:
    watch, without = VarianceWatch(), {"zero_variance": 1.0, "reward": 0.0}
    warned = [step for step in range(1, 101) if watch.step_done(without)]
    assert warned == [10, 20, 40, 80]
    assert watch.step_done({"zero_variance": 0.75, "reward": 0.1}) is None
    assert [step for step in range(1, 12) if watch.step_done(without)] == [10]
    assert watch.step_done({"loss": 1.0}) is None  # no samples


@pytest.mark.parametrize(
    "line",
    [{}, {"reward": -12.3456, "zero_variance": 1.0}, {"rewards/accuracy": 1.0, "rewards/margin": -0.0001234}],
)
def test_the_longest_line_has_a_hundred_columns(line: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "SECONDS_BETWEEN_LINES", 0)
    output = io.StringIO()
    text = progress_text({"loss": -12.3456, **line, "tokens_per_s": 123456.0, "mfu": 0.456})
    with utils.ProgressBar(Console(file=output, width=WIDTH), "step", 20_000) as progress:
        progress.update(10_000, text)
    (shown,) = output.getvalue().splitlines()
    assert len(shown) + len("123456 s") - len("0 s") <= WIDTH
    terminal = io.StringIO()
    with utils.ProgressBar(
        Console(file=terminal, width=WIDTH, force_terminal=True, color_system=None), "step", 20_000, keeps=True
    ) as progress:
        progress.update(10_000, text)
    last = terminal.getvalue().splitlines()[-2]
    assert text in last
    assert "10000/20000" in last
    assert last.endswith("eta -:--:--")


@pytest.mark.parametrize(
    ("load", "said"), [(1e6, "The machine is busy: "), (0.0, "The machine is not busy (load 0.0)")]
)
def test_a_step_of_ten_times_the_usual_time_says_whether_the_machine_is_busy(
    monkeypatch: pytest.MonkeyPatch, load: float, said: str
) -> None:
    """By the token: a step of more tokens may take longer. Said at the first such step, the second and the fourth."""
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    watch = PaceWatch()

    def done(step: int, seconds: float, tokens: int = 1000) -> str | None:
        return watch.step_done({"step": step, "step_s": seconds, "tokens_per_s": tokens / seconds})

    assert done(1, 900.0) is None  # nothing to compare with
    assert [done(step, 2.0 + step % 3) for step in range(2, 9)] == [None] * 7
    assert done(9, 29.0) is None
    assert done(10, 300.0, tokens=100_000) is None
    warning = done(11, 36.0)
    assert warning is not None
    assert warning.startswith(f"step 11 took 36.0 s, 10 times its usual time. {said}")
    assert [done(step, 60.0) is not None for step in range(12, 15)] == [True, False, True]


@pytest.mark.parametrize(
    ("share", "load", "says"), [(0.1, 1e6, True), (1.9, 1e6, False), (0.1, 0.0, False)], ids=["busy", "enough", "idle"]
)
def test_a_machine_that_is_busy_from_the_start_is_told_once(
    monkeypatch: pytest.MonkeyPatch, share: float, load: float, says: bool
) -> None:
    now = [0.0]
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "process_time", lambda: share * now[0])
    watch, warnings = CoresWatch(), list[str | None]()
    for step in range(1, 20):
        now[0] += 10.0
        warnings.append(watch.step_done({"step": step}))
    assert [bool(one) for one in warnings] == [*[False] * 3, says, *[False] * 15]
    assert not says or str(warnings[3]).startswith("this process has 0.10 of a core: 1000000.0 programs want the")
