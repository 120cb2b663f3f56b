"""Runs whose pairs share their prompts have the losses, counts and evaluations of those that compute each twice."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
from conftest import metrics, train_here
from usual import usual

from finetune.desk.setup.check import check_recipe
from finetune.errors import UserError


@pytest.fixture
def pairs(made: Path, tmp_path: Path, recipe: dict[str, Any]) -> dict[str, Any]:
    for name, count, seed in (("pairs", 80, 0), ("held_out", 12, 1)):
        tiny.write_rows(tmp_path / f"{name}.jsonl", tiny.preferences(count, seed))
    recipe["data"] |= {
        "train": [{"path": str(tmp_path / "pairs.jsonl"), "format": "preference"}],
        "eval": [{"path": str(tmp_path / "held_out.jsonl"), "format": "preference"}],
        "max_length": 128,
    }
    recipe["objective"] = {"name": "orpo"}
    return recipe


LORA = {"mode": "lora", "lora": {"rank": 4, "alpha": 8}}
CASES: dict[str, dict[str, Any]] = {
    "dpo": {"objective": {"name": "dpo"}},
    "adapters off, unpacked": {**LORA, "objective": {"name": "dpo", "reference": "adapters_off"}, "packing": False},
    "window, recomputed": {"model": "mistral", "train": {"activation_checkpointing": True}},
    # The balance of experts is over all tokens of both sequences, computed once or twice.
    "experts": {"model": "qwen3_moe", "objective": {"name": "orpo", "router_aux_loss_coef": 0.02}},
    "scores": {"objective": {"name": "reward"}},
    "measured rows": {"batch": {"rows_per_device": "auto"}},
}


def changed(recipe: dict[str, Any], made: Path, case: dict[str, Any]) -> dict[str, Any]:
    recipe["model"]["name"] = str(made / case.get("model", "llama"))
    recipe["data"]["packing"] = case.get("packing", True)
    for section in ("objective", "train", "batch"):
        recipe[section] |= case.get(section, {})
    return recipe | {key: case[key] for key in ("mode", "lora") if key in case}


@pytest.mark.parametrize("name", usual(CASES, "dpo", "experts", "scores"))
def test_a_run_is_the_same(name: str, pairs: dict[str, Any], made: Path, tmp_path: Path, write_recipe: Any) -> None:
    path = write_recipe(changed(pairs, made, CASES[name]))
    shown = train_here(path, "run.name=shared")
    assert "% of the tokens need not be computed again" in shown
    train_here(path, "run.name=twice", "objective.share_prompts=false")
    shared, twice = (metrics(tmp_path / "runs" / run) for run in ("shared", "twice"))
    assert len(shared) == len(twice) == 7  # six steps, one evaluation
    for ours, theirs in zip(shared, twice, strict=True):
        share = ours.pop("eval_shared_token_share" if "eval_loss" in ours else "shared_token_share")
        assert 0.2 < share < 0.5
        exact = {"step", "tokens", "supervised_tokens", "padding_tokens"}
        assert {k: v for k, v in ours.items() if k in exact} == {k: v for k, v in theirs.items() if k in exact}
        names = {k for k in theirs if k == "loss" or k.startswith(("eval_", "experts/", "rewards/", "log_probs/"))}
        assert names <= ours.keys()
        if ours["step"] == 1:  # of rewards that are nothing but rounding
            names -= {"rewards/accuracy"}
        for key in names:
            assert ours[key] == pytest.approx(theirs[key], rel=2e-6, abs=2e-6), key
    assert [line["padding_tokens"] for line in shared if "loss" in line] == [0] * 6
    plans = [json.loads((tmp_path / "runs" / run / "plan.json").read_text()) for run in ("shared", "twice")]
    assert 0.2 < plans[0]["shared_token_share"] < 0.5
    assert plans[1]["shared_token_share"] is None
    assert "asked for in the recipe" in plans[1]["shared_prompts"]
    assert {p["rows_per_epoch"] for p in plans} == {plans[0]["rows_per_epoch"]}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": {"attention": "sdpa"}}, "`sdpa` here: transformers' own attention finds documents"),
        ({"train": {"compile": True}}, "compiled layers take each sequence whole"),
        ({"objective": {"dropout": True}}, "objective.dropout draws for each answer"),
    ],
)
def test_true_is_refused_where_it_cannot_be(
    change: dict[str, dict[str, Any]], reason: str, pairs: dict[str, Any], write_recipe: Any
) -> None:
    for section, values in change.items():
        pairs[section] |= values
    path, asked = write_recipe(pairs), "objective.share_prompts=true"
    expected = f"objective.share_prompts: true does not fit .*{reason}"
    with pytest.raises(UserError, match=expected):
        train_here(path, asked)
    assert re.search(expected, check_recipe(path, (asked,)).error or "")
