"""Progress as lines, without a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from finetune.training import display


def test_a_pass_says_how_long_it_takes_once_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "_SECONDS_BETWEEN_LINES", 0)
    said = io.StringIO()
    with display.StepProgress(Console(file=said), "steps", 100, done=10, shown=True) as progress:
        progress.update(10)  # as a pass that continues: nothing is done yet
        assert said.getvalue() == ""
        progress.update(55)
    assert said.getvalue().startswith("steps: 55/100  eta ")
