"""Prompts of rows, what rewards see of them, and their order."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.data.chat.renderer import build_renderer
from finetune.data.dataset import Dataset, build_held_out, build_training
from finetune.data.samples import Conversation, Message, PromptCompletion, PromptOnly
from finetune.errors import UserError
from finetune.features import load_recipe
from finetune.models.base_model import Base
from finetune.models.tokenizer import load_tokenizer
from finetune.rl.rollouts.prompts import PromptContent, RunPrompts

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
    data = build_training(recipe, Base.of(recipe).renderer(recipe.objective))
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
    with pytest.raises(UserError, match=r"sums\.jsonl:4: its prompt has \d+ tokens, and there is room for "):
        prompts_of(path, "data.overlong=error")
    with pytest.raises(UserError, match="none of 4 rows has a prompt of at most 8 tokens"):
        prompts_of(path, "rollouts.max_new_tokens=120")


def test_prompts_of_held_out_rows_are_read_and_named_alike(path: Path) -> None:
    recipe = load_recipe(path, [f"data.eval={path.parent / 'sums.jsonl'}"])
    data = build_held_out(recipe, Base.of(recipe).renderer(recipe.objective))
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


QUESTION, ANSWER = {"role": "user", "content": "1 and 1?"}, {"role": "assistant", "content": "2"}
WITHOUT = {  # rows without an answer, as formats have them
    "prompt": {"prompt": "1 and 1?", "level": 3},
    "prompt of messages": {"prompt": [QUESTION], "level": 3},
    "another name": {"problem": "1 and 1?", "level": 3},
    "messages": {"messages": [QUESTION], "level": 3},
    "sharegpt": {"conversations": [{"from": "human", "value": "1 and 1?"}], "level": 3},
}


def answered_later(path: Path, rows: list[dict[str, Any]], *overrides: str) -> RunPrompts:
    (path.parent / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rewards = "rewards=[{name: regex, pattern: '2'}]"
    return prompts_of(path, f"data.train={path.parent / 'prompts.jsonl'}", rewards, *overrides)


@pytest.mark.parametrize("row", WITHOUT.values(), ids=WITHOUT)
def test_a_row_without_an_answer_is_the_same_prompt_as_one_with_it(path: Path, row: dict[str, Any]) -> None:
    (with_answer,) = answered_later(path, [{"messages": [QUESTION, ANSWER]}]).prompts
    assert with_answer.reference
    prompts = answered_later(path, [row])
    (prompt,) = prompts.prompts
    assert (prompt.ids, prompt.reference) == (with_answer.ids, [])
    (content,) = prompts.contents([prompt])
    assert content == PromptContent(({"role": "user", "content": "1 and 1?"},), {"level": 3})


def test_a_conversation_that_ends_with_a_question_is_a_prompt_as_a_whole(path: Path) -> None:
    prompts = answered_later(path, [{"messages": [QUESTION, ANSWER, QUESTION]}, {"messages": [QUESTION, ANSWER]}])
    (first, last), (content, _) = prompts.prompts, prompts.contents(prompts.prompts)
    assert len(first.ids) > 2 * len(last.ids)
    assert [message["role"] for message in content.messages] == ["user", "assistant", "user"]
    assert (first.reference, len(last.reference)) == ([], 2)


def test_a_prompt_is_plain_text_without_a_chat_template(path: Path, made: Path) -> None:
    recipe = load_recipe(path)
    tokenizer = load_tokenizer(recipe.model)
    tokenizer.chat_template = None
    rendered = build_renderer(tokenizer)
    ((prompt,),) = rendered.draw(PromptOnly(Conversation((Message("user", "1 and"),)), "1 and"))
    ((whole,),) = rendered.draw(PromptCompletion("1 and", " 1"))
    (ids, trained), (joint, _) = rendered.tokenize([prompt, whole])
    assert not trained.any()
    assert joint.tolist()[: len(ids)] == ids.tolist()
    assert ids[-1] != tokenizer.eos_token_id


def test_rewards_that_need_a_reference_refuse_rows_without_one(path: Path, tmp_path: Path) -> None:
    rows = [{"messages": [QUESTION, ANSWER]}, {"messages": [QUESTION]}]
    own = tmp_path / "own.py"
    own.write_text("def reads(completion, reference): ...\ndef may_read(completion, row, reference=None): ...\n")
    message = r"prompts\.jsonl:2: the row has no answer, which rewards\[0\] \({}\) needs"
    for label, reward in {
        "number": "{name: number}",
        "reads": f"{{file: {own}, function: reads}}",
        "judge": "{judge: 'http://localhost/v1', model: m, prompt: '{completion} or {reference}?'}",
    }.items():
        with pytest.raises(UserError, match=message.format(label)):
            answered_later(path, rows, f"rewards=[{reward}]")
    for reward in (
        f"{{file: {own}, function: may_read}}",
        "{judge: 'http://localhost/v1', model: m}",
        "{name: number, on_failure: 0.0}",
        "{name: tests}",
    ):
        assert len(answered_later(path, rows, f"rewards=[{reward}]").prompts) == 2
