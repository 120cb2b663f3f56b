"""Progress as lines, if there is no terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from finetune import utils


@pytest.fixture(autouse=True)
def _lines_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "SECONDS_BETWEEN_LINES", 0)


def test_a_pass_says_how_long_it_takes_once_it_knows() -> None:
    output = io.StringIO()
    with utils.ProgressBar(Console(file=output), "steps", 100, done=10) as progress:
        progress.update(10)  # as if it continues: nothing is done yet
        assert output.getvalue() == ""
        progress.update(55)
    assert output.getvalue().startswith("steps 55/100  eta ")


def test_a_rate_is_shown_and_an_estimate_may_be_too_low() -> None:
    output = io.StringIO()
    with utils.ProgressBar(Console(file=output), "tokenizing a.jsonl", 1_000, unit="rows") as progress:
        progress.update(500)
        progress.update(2_000)
    first, second = output.getvalue().splitlines()
    assert first.startswith("tokenizing a.jsonl 500/1,000  ")
    assert " rows/s  eta " in first
    assert second.startswith("tokenizing a.jsonl 2,000  ")
    assert second.endswith(" rows/s")


def test_a_bar_that_is_kept_has_its_first_and_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "SECONDS_BETWEEN_LINES", 3600)
    output = io.StringIO()
    with utils.ProgressBar(Console(file=output), "step", 9, done=4, keeps=True) as progress:
        for step in range(5, 10):
            progress.update(step, f"loss {step}.0")
    assert [line.split("  ")[:2] for line in output.getvalue().splitlines()] == [
        ["step 5/9", "loss 5.0"],
        ["step 9/9", "loss 9.0"],
    ]
    with utils.ProgressBar(Console(file=output), "other", 9, shown=False) as progress:
        progress.update(9)
    assert "other" not in output.getvalue()
