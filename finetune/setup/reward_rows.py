"""Rewards in `check`: the first rows of the recipe's data as completions, and the trial of its rewards on them."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from finetune.data.building import OpenedSources, read_items
from finetune.data.chat.renderer import Renderer, build_renderer
from finetune.data.chat.template_choice import template_of
from finetune.data.formats.converters import FORMATS
from finetune.data.formats.detect import parse_row
from finetune.data.samples import BadRow, Conversation, PromptCompletion
from finetune.errors import UserError
from finetune.inference.answering import render_prompt
from finetune.recipe import Recipe
from finetune.rewards.completion import Completion
from finetune.rewards.trial import JUDGED_ROWS, TRIED_ROWS, RewardTrial, try_rewards


def check_rewards(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> RewardTrial:
    """Returns the trial of the recipe's rewards. Raises UserError if a run could not use them or learn from them."""
    count = JUDGED_ROWS if any(one.kind == "judge" for one in recipe.rewards) else TRIED_ROWS
    trial = try_rewards(recipe.rewards, reference_answers(recipe, tokenizer, count))
    if trial.problems:
        raise UserError("\n".join([*trial.problems, *(f"    {line}" for line in trial.table().splitlines())]))
    return trial


def reference_answers(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, count: int) -> list[Completion]:
    """Returns the references of the first rows of each source, `count` of all, as if they had been sampled."""
    renderer, opened = build_renderer(tokenizer, template_of(recipe.model, tokenizer)), OpenedSources(recipe)
    each = -(-count // len(recipe.data.train))
    completions = list[Completion]()
    for source in recipe.data.train:
        one = opened.open(source)
        fields = FORMATS[one.source.format].fields
        used = {(one.source.columns or {}).get(field, field) for field in fields}
        with closing(read_items(one.reader)) as items:
            for label, number, row in islice(items, each):
                if isinstance(row, str):  # why it cannot be read, which the data's own check says
                    continue
                try:
                    sample = parse_row(row, one.source.format, one.source.columns)
                except BadRow:
                    continue
                columns = {name: value for name, value in row.items() if name not in used}
                if isinstance(sample, Conversation | PromptCompletion):
                    completion = _reference_answer(renderer, sample, columns)
                    completions.append(replace(completion, place=f"{label}:{number}"))
    return completions[:count]


def _reference_answer(
    renderer: Renderer, sample: Conversation | PromptCompletion, columns: dict[str, Any]
) -> Completion:
    """Returns the last assistant turn of a row; without one, a completion without a reference."""
    messages: tuple[dict[str, Any], ...] = ()
    if isinstance(sample, PromptCompletion) and renderer.chat is None:
        prompt, reference = sample.prompt, sample.completion
    else:
        chat = sample.as_conversation() if isinstance(sample, PromptCompletion) else sample
        is_answered = chat.messages[-1].role == "assistant"
        reference = chat.messages[-1].content if is_answered else None
        before = replace(chat, messages=chat.messages[:-1] if is_answered else chat.messages)
        prompt = render_prompt(renderer.chat, before)
        messages = tuple(_as_dict(message) for message in before.messages)
    tokens = len(renderer.tokenizer(reference or "", add_special_tokens=False)["input_ids"])  # type: ignore[arg-type]
    return Completion(prompt, messages, reference or "", reference, columns, tokens, is_truncated=False)


def _as_dict(message: Any) -> dict[str, Any]:
    """Returns a message with the keys that a row gives it."""
    optional = {
        "reasoning_content": message.reasoning,
        "tool_calls": [dict(call) for call in message.tool_calls],
        "name": message.name,
        "tool_call_id": message.tool_call_id,
    }
    return {
        "role": message.role,
        "content": message.content,
        **{key: value for key, value in optional.items() if value},
    }
