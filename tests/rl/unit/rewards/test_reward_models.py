"""Reward models: the scores of `finetune score`, for sampled answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from completions import completion, reward
from conftest import train_here
from rich.console import Console

from finetune.errors import UserError
from finetune.release.inference.score import score_file, source_of
from finetune.rl.rewards.completion import Completion
from finetune.rl.rewards.scoring import Rewards


@pytest.fixture
def trained(recipe: dict[str, Any], write_recipe: Any, tmp_path: Path) -> Path:
    path = tiny.write_rows(tmp_path / "pairs.jsonl", tiny.preferences(8))
    data = {"train": [{"path": str(path), "format": "preference"}], "max_length": 128}
    train_here(write_recipe({**recipe, "objective": {"name": "reward"}, "data": data}), "train.max_steps=1")
    return tmp_path / "runs" / "run"


def test_scores_are_those_of_the_score_command(trained: Path, tmp_path: Path) -> None:
    rows = tiny.preferences(8)
    score_file(
        trained, source_of(str(tmp_path / "pairs.jsonl"), "auto", None), tmp_path / "o.jsonl", Console(quiet=True)
    )
    expected = [json.loads(line)["chosen"] for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    completions = [
        Completion("", tuple(row["prompt"]), row["chosen"][0]["content"], None, {}, 1, False, f"pairs.jsonl:{i}")
        for i, row in enumerate(rows)
    ]
    settings = reward(reward_model=str(trained), weight=2.0, metric="taste", on_failure=-1.0)
    strange = [completion(""), completion("<|im_end|>")]
    with Rewards((settings,), None) as rewards:
        results = rewards.score([*completions, *strange])
        assert rewards.score([]) == []
    assert [one.by_name["taste"] for one in results[:8]] == pytest.approx(expected, abs=1e-6)
    assert results[0].total == pytest.approx(2 * expected[0], abs=1e-5)
    assert results[8].by_name["taste"] is not None  # an empty answer has a score
    assert results[9].failures[0].startswith("taste: message 1 (assistant) contains '<|im_end|>', which this tokenizer")


def test_other_models_are_refused(made: Path, tmp_path: Path) -> None:
    for folder, message in (
        (made / "llama", "this model generates text and has no score head"),
        (tmp_path / "none", "no result here"),
    ):
        with pytest.raises(UserError, match=rf"rewards\[0\] \(reward_model\): .*{message}"):
            Rewards((reward(reward_model=str(folder)),), None).__enter__()
