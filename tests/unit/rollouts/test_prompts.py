"""Prompts of rows, what rewards see of them, and their order."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.data.dataset import Dataset, build_held_out, build_training
from finetune.errors import UserError
from finetune.models.tokenizer import load_tokenizer
from finetune.recipe import load_recipe
from finetune.rollouts.prompts import RunPrompts

ROWS = [{"question": f"{i} and {i}?", "answer": str(2 * i), "level": i} for i in range(4)]
ROWS[3]["question"] += " and" * 12


@pytest.fixture
def path(recipe: dict[str, Any], write_recipe: Callable[..., Path], tmp_path: Path) -> Path:
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    recipe["data"] = {"train": str(tmp_path / "sums.jsonl"), "max_length": 128, "packing": False}
    del recipe["evaluate"]
    return write_recipe(
        recipe
        | {
            "objective": {"name": "grpo"},
            "rollouts": {"prompts": 2, "samples": 4, "max_new_tokens": 70},
            "rewards": [{"name": "exact_match"}],
            "batch": {"rows": 8},
        }
    )


def prompts_of(path: Path, *overrides: str) -> RunPrompts:
    recipe = load_recipe(path, overrides)
    data = build_training(recipe, load_tokenizer(recipe.model))
    assert isinstance(data, Dataset)
    return RunPrompts(recipe, data)


def test_rewards_see_messages_and_columns_of_rows_under_other_names(path: Path) -> None:
    prompts = prompts_of(path)
    (first,) = prompts.contents(prompts.prompts[:1])
    assert first.messages == ({"role": "user", "content": "0 and 0?"},)
    assert first.columns == {"level": 0}
    tokenizer = load_tokenizer(load_recipe(path).model)
    assert tokenizer.decode(prompts.prompts[2].reference, skip_special_tokens=True) == "4"
    assert str(tokenizer.decode(prompts.prompts[2].ids)).endswith("<|im_start|>assistant\n")


def test_prompts_without_room_are_dropped_and_counted_or_refused(path: Path) -> None:
    prompts = prompts_of(path)
    assert [prompt.row for prompt in prompts.prompts] == [1, 2, 3]
    assert prompts.notes == ["1 prompts dropped: with 58 tokens or fewer a sample has room"]
    with pytest.raises(UserError, match=r"sums\.jsonl:4: its prompt has \d+ tokens, and rollouts\.max_new_tokens"):
        prompts_of(path, "data.overlong=error")
    with pytest.raises(UserError, match="none of 4 rows has a prompt of at most 8 tokens"):
        prompts_of(path, "rollouts.max_new_tokens=120")


def test_prompts_of_held_out_rows_are_read_and_named_alike(path: Path) -> None:
    recipe = load_recipe(path, [f"data.eval={path.parent / 'sums.jsonl'}"])
    data = build_held_out(recipe, load_tokenizer(recipe.model))
    assert data is not None
    prompts = RunPrompts(recipe, data, "eval")
    assert [prompt.row for prompt in prompts.prompts] == [1, 2, 3]
    assert prompts.notes == ["1 held-out prompts dropped: with 58 tokens or fewer a sample has room"]
    narrow = recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_length": 8})})
    with pytest.raises(UserError, match=r"data\.eval: none of \d rows has a prompt of at most"):
        RunPrompts(narrow, data, "eval")


def test_each_epoch_draws_every_prompt_once_in_another_order(path: Path) -> None:
    prompts = prompts_of(path)
    epochs = [[prompts.drawn(3 * epoch + i).row for i in range(3)] for epoch in range(8)]
    assert all(sorted(rows) == [1, 2, 3] for rows in epochs)
    assert len({tuple(rows) for rows in epochs}) > 1
    assert prompts.epochs(6) == 2.0
