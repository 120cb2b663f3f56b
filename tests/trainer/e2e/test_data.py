"""Whole runs on mixtures, streams and token budgets: what is logged, and that a stop changes nothing."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
from bitwise import is_measured
from conftest import launch, metrics, train_alone

from finetune.data.dataset import build_training
from finetune.errors import UserError
from finetune.models.base_model import Base
from finetune.recipe import load_recipe


@pytest.fixture
def mixed(recipe: dict[str, Any], made: Path, tmp_path: Path) -> dict[str, Any]:
    """A recipe of two sources, one of them small."""
    few = tmp_path / "few.jsonl"
    tiny.write_rows(few, tiny.conversations(20, seed=7))
    recipe["data"]["train"] = [
        {"path": str(made / "rows.jsonl"), "weight": 2.0},
        {"path": str(few), "weight": 1.0},
    ]
    recipe["data"]["eval"] = [{"path": str(made / "held_out.jsonl"), "name": "first"}, {"path": str(few), "limit": 8}]
    recipe["checkpoint"] = {"every_steps": 3}
    recipe["schedule"] = {"name": "constant"}
    return recipe


def lines(run: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(run) if "loss" in line]


def of_the_maths(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if not is_measured(k)} for line in lines(run)]


@pytest.mark.parametrize("streaming", [False, True])
def test_each_source_is_logged_and_a_stop_changes_nothing(mixed, write_recipe, tmp_path, streaming):
    mixed["data"] |= {"mixture": {"by": "tokens"}, "streaming": streaming, "window": 50}
    path = write_recipe(mixed)
    train_alone(path, "run.name=whole")
    train_alone(path, "run.name=stopped", "train.max_steps=3")
    shown = train_alone(path, "run.name=stopped")
    assert "resuming from" in shown
    whole, stopped = of_the_maths(tmp_path / "runs" / "whole"), of_the_maths(tmp_path / "runs" / "stopped")
    assert whole[3:] == stopped[3:]
    assert [line["tokens/few"] for line in whole] == [line["tokens/few"] for line in stopped]

    for line in whole:
        assert line["tokens/rows"] + line["tokens/few"] == line["tokens"]
        assert min(line["loss/rows"], line["loss/few"]) <= line["loss"] <= max(line["loss/rows"], line["loss/few"])
    # Shares of 2 : 1, whatever the sizes (120 and 20 rows).
    assert whole[-1]["tokens/few"] / whole[-1]["tokens"] == pytest.approx(1 / 3, abs=0.1)
    evaluation = next(line for line in metrics(tmp_path / "runs" / "whole") if "eval_loss" in line)
    assert {"eval_loss", "eval_loss/first", "eval_loss/few"} <= set(evaluation)


@pytest.mark.long
def test_parts_of_sources_are_the_same_on_another_launch(mixed, write_recipe, tmp_path):
    """Epochs have different examples, and different numbers of packed sequences: stopped in the second of them."""
    mixed["data"]["train"][0] = {**mixed["data"]["train"][0], "weight": 1.0, "max_epochs": 1.0}
    mixed["data"]["train"][1]["weight"] = 0.7
    mixed["train"] = {**mixed["train"], "max_steps": None, "epochs": 2.5}
    path = write_recipe(mixed)
    train_alone(path, "run.name=whole")
    whole = of_the_maths(tmp_path / "runs" / "whole")
    middle = next(line["step"] for line in whole if line["epoch"] > 1.2)
    done = launch("ddp", 2, "train", path, "run.name=stopped", f"train.max_steps={middle}", "batch.rows_per_device=1")
    assert done.returncode == 0, done.stderr
    assert "resuming from" in train_alone(path, "run.name=stopped")
    stopped = of_the_maths(tmp_path / "runs" / "stopped")
    same = ("step", "epoch", "tokens", "supervised_tokens", "tokens/rows", "tokens/few")
    assert [[line[key] for key in same] for line in whole] == [[line[key] for key in same] for line in stopped]
    assert [line["loss"] for line in stopped] == pytest.approx([line["loss"] for line in whole], rel=5e-6)
    plan = json.loads((tmp_path / "runs" / "whole" / "plan.json").read_text())
    assert plan["total_rows"] != 2.5 * plan["rows_per_epoch"]
    assert len(whole) == plan["steps"] == -(-plan["total_rows"] // mixed["batch"]["rows"])
    assert whole[-1]["epoch"] == 2.5
    loaded = load_recipe(path)
    examples = build_training(loaded, Base.of(loaded).renderer(loaded.objective)).examples
    assert whole[-1]["tokens/rows"] == examples.lengths[examples.of_source(0)].sum()  # each of its rows once


def test_one_source_is_not_logged_apart(recipe, write_recipe, tmp_path):
    train_alone(write_recipe(recipe))
    keys = {key for line in metrics(tmp_path / "runs" / "run") for key in line}
    assert not [key for key in keys if key.startswith(("loss/", "tokens/"))]


def test_a_token_budget_is_the_same_maths(recipe, write_recipe, tmp_path):
    """The rows of a step decide, not the forwards they run in."""
    recipe["data"]["packing"] = False
    recipe["batch"] = {"rows": 8}
    recipe["train"]["max_steps"] = 4
    path = write_recipe(recipe)
    train_alone(path, "run.name=one")
    train_alone(path, "run.name=budget", "batch.tokens_per_device=100")
    one, budget = lines(tmp_path / "runs" / "one"), lines(tmp_path / "runs" / "budget")
    for a, b in zip(one, budget, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-6)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-5)
        assert (a["tokens"], a["supervised_tokens"]) == (b["tokens"], b["supervised_tokens"])


def test_a_run_longer_than_a_source_may_be_read_is_refused_before_it_begins(recipe, made, write_recipe, tmp_path):
    recipe["data"]["train"] = [{"path": str(made / "rows.jsonl"), "max_epochs": 1.0}]
    with pytest.raises(UserError, match=r"data.train\[0\] .* more than its max_epochs \(1\)"):
        train_alone(write_recipe(recipe), "train.max_steps=1000")
    assert not (tmp_path / "runs").exists()


def test_a_stream_says_what_it_is_and_needs_an_end(recipe, write_recipe, tmp_path):
    recipe["data"] |= {"streaming": True, "window": 30}
    path = write_recipe(recipe)
    shown = train_alone(path)
    assert "streamed in windows of 30 rows per source" in shown
    assert lines(tmp_path / "runs" / "run")[0]["epoch"] == 0.0
    with pytest.raises(UserError, match="the length of a stream is unknown"):
        train_alone(path, "train.max_steps=null", "train.epochs=1")


def test_a_stream_read_ahead_resumes_bitwise_from_what_was_trained(recipe, write_recipe, tmp_path, monkeypatch):
    """Windows of about two steps: at a checkpoint the next one has been read already. The cache is lost in between."""
    recipe["data"] |= {"streaming": True, "window": 20}
    recipe["checkpoint"] = {"every_steps": 2, "keep": 3}
    path, run = write_recipe(recipe), tmp_path / "runs" / "run"
    train_alone(path)
    whole, weights = of_the_maths(run), (run / "model" / "model.safetensors").read_bytes()
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "another"))
    assert "step 4 of 6" in train_alone(path)
    assert of_the_maths(run) == whole
    assert (run / "model" / "model.safetensors").read_bytes() == weights


def test_a_stream_that_ends_is_trained_on_to_its_end(recipe, write_recipe, tmp_path):
    """What is read ahead fails ahead, and is said at the step that it is missing in."""
    recipe["data"]["train"][0]["max_epochs"] = 1
    recipe["data"] |= {"streaming": True, "window": 50}
    with pytest.raises(UserError, match="the stream ends after") as raised:
        train_alone(write_recipe(recipe), "train.max_steps=500")
    steps = int(re.search(r"after ([\d,]+) steps", str(raised.value))[1])
    assert [line["step"] for line in lines(tmp_path / "runs" / "run")] == list(range(1, steps + 1))
