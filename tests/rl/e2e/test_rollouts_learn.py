"""From right answers alone a small model learns what it half knows: the digits in reverse of the quickstart."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import ROOT, metrics, run_script, train_here


@pytest.mark.long
def test_exact_match_rises_from_a_half_to_nearly_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_script("make_quickstart.py", "--out", tmp_path / "runs" / "quickstart-data")
    for stage in ("digits-full", "grpo-full"):
        train_here(ROOT / "recipes" / "quickstart" / f"{stage}.yaml")
    lines = [line for line in metrics(tmp_path / "runs" / "quickstart-grpo-full") if "exact_match" in line]
    assert lines[0]["exact_match"] < 0.8
    assert lines[-1]["exact_match"] > 0.95
    assert lines[-1]["eval_reward"] > 0.9
    assert lines[-1]["eval_reward"] > lines[0]["eval_reward"] + 0.2
