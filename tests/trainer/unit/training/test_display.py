"""Progress as lines, if there is no terminal; evaluations; the command that follows a run."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from finetune import utils
from finetune.recipe import load_recipe
from finetune.training.display import next_command, show_evaluation


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


def test_an_evaluation_of_pairs_is_a_table() -> None:
    output = io.StringIO()
    metrics = {
        "eval_loss": 0.03,
        "eval_rewards/chosen": 4.83,
        "eval_rewards/accuracy": 1.0,
        "eval_log_probs/chosen": -0.31,
        "exact_match": 0.955,
    }
    show_evaluation(Console(file=output, width=100), 50, metrics, [])
    first, *table = output.getvalue().splitlines()
    assert first == "step 50: eval_loss 0.0300  exact_match 95.5%"
    cells = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in table if re.match("[│┃]", line)]
    assert cells == [
        ["", "chosen", "accuracy"],
        ["eval_rewards", "4.8300", "100.0%"],
        ["eval_log_probs", "-0.3100", ""],
    ]


@pytest.mark.parametrize(
    ("changes", "command"),
    [
        ({}, "chat runs/x"),
        ({"objective": {"name": "reward"}}, "score runs/x --data FILE"),
        ({"data": {"train": [{"path": "x.txt", "format": "text"}], "max_length": 8}}, "generate runs/x PROMPT"),
    ],
)
def test_a_result_is_used_by_the_command_for_its_objective(
    recipe: dict[str, Any], write_recipe: Any, changes: dict[str, Any], command: str
) -> None:
    if "objective" in changes:
        recipe["data"] = {"train": [{"path": "x.jsonl", "format": "preference"}], "max_length": 64}
    loaded = load_recipe(write_recipe({**recipe, **changes}))
    assert next_command(loaded.objective, loaded.data, Path("runs/x")) == f"python -m finetune {command}"
