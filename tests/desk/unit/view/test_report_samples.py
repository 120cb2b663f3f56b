"""Samples of rollouts on the report page: chosen steps and prompts, answers by reward, damaged records."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from test_report import HOSTILE, Page, make_run

from finetune.desk.view.report import write_report
from finetune.rl.rewards.completion import Reward
from finetune.rl.rollouts.records import EVALUATION, STEP, Sample, record_file, write_record

FAILURE = "correct: raised ValueError: <b>bad</b>"


def sample(row: int, number: int, reward: float, text: str = "", failures: tuple[str, ...] = ()) -> Sample:
    given = Reward(reward, {"correct": None if failures else reward, "length": 0.0}, failures)
    numbers = np.zeros(3), np.ones(3)
    return Sample("a.jsonl", row, 0, number, [1, 2], [3, 4, 5], text or f"so {reward:g}", number == 2, *numbers, given)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of seven steps, of five prompts with 3 answers each."""
    folder = make_run(tmp_path / "run", 0.1)
    for step in range(1, 8):
        samples = [sample(row, number, row + number / 4) for row in range(5) for number in range(3)]
        write_record(folder / "rollouts", step, samples, "of this run")
    held_out = [sample(9, number, number / 2, HOSTILE, (FAILURE,) if number == 0 else ()) for number in range(12)]
    write_record(folder / "rollouts", 5, held_out, "of this run", EVALUATION)
    return folder


def page_of(run: Path) -> str:
    write_report([run], run.parent / "page.html")
    return (run.parent / "page.html").read_text(encoding="utf-8").partition("<h2>Samples: run")[2]


def test_first_middle_and_last_step_with_worst_median_and_best_prompt(run: Path) -> None:
    page = page_of(run).partition("</section>")[0]
    assert re.findall(r"<b>([^<]+)</b>: mean reward", page) == [
        "step 1",
        "step 4",
        "step 7",
        "held-out prompts after step 5",
    ]
    first = page.partition("</details>")[0]
    assert "mean reward 2.25, 3 of 5 prompts" in first
    assert re.findall(r"a\.jsonl:(\d)", first) == ["0", "2", "4"]
    assert re.findall(r'<b class="r(\d)">([^<]+)</b>', first) == [
        *(("0", "0.5"), ("0", "0.25"), ("0", "0")),
        *(("2", "2.5"), ("2", "2.25"), ("2", "2")),
        *(("4", "4.5"), ("4", "4.25"), ("4", "4")),
    ]
    assert "correct 4.5, length 0, 3 tokens, truncated" in first


def test_answers_between_are_left_out_and_failures_and_hostile_texts_are_shown_as_text(run: Path) -> None:
    page = page_of(run).partition("</section>")[0].rpartition("<details")[2]
    assert re.findall(r'<b class="r\d">([^<]+)</b>', page) == ["5.5", "5", "4.5", "4", "1.5", "1", "0.5", "0"]
    assert "4 answers between these are left out" in page
    assert "correct failed, length 0" in page
    assert "correct: raised ValueError: &lt;b&gt;bad&lt;/b&gt;" in page
    assert "script" not in Page(page).tags


def test_a_record_that_a_kill_has_cut_is_left_out_and_a_damaged_one_is_named(run: Path) -> None:
    file = record_file(run / "rollouts", 7, STEP)
    file.with_suffix(".safetensors").unlink()
    assert "<b>step 7</b>" not in page_of(run)
    file = record_file(run / "rollouts", 1, STEP)
    file.rename(file.with_name("step-one.jsonl"))
    write_report([run], run.parent / "page.html")
    page = (run.parent / "page.html").read_text(encoding="utf-8")
    assert "rollouts cannot be read" in page
    assert page.endswith("</html>\n")


def test_a_run_without_rollouts_has_no_such_section(tmp_path: Path) -> None:
    write_report([make_run(tmp_path / "run", 0.1)], tmp_path / "page.html")
    assert "Samples: " not in (tmp_path / "page.html").read_text(encoding="utf-8")
