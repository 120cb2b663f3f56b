"""Preference pairs: two answers to one prompt, however the row spells the prompt."""

from __future__ import annotations

from typing import Any

from finetune.data.formats import turns
from finetune.data.formats.tools import Tool
from finetune.data.formats.values import kind, shown
from finetune.data.formats.values import text as text_of
from finetune.data.samples import BadRow, Message, Preference, PromptCompletion

Messages = list[Message]


def preference_of(prompt: Any, chosen: Any, rejected: Any, system: str, tools: tuple[Tool, ...]) -> Preference:
    """A pair of answers, each text or messages alike; only what follows the prompt is trained.

    Raises BadRow where there is no prompt, nothing to prefer, or no answer.
    """
    if isinstance(chosen, str) and (prompt is None or prompt == ""):
        raise BadRow("`chosen` and `rejected` are text, but there is no `prompt` that they answer")
    if isinstance(chosen, str) and isinstance(prompt, str) and not system and not tools:
        return _of_texts(prompt, chosen, rejected)
    answers = _answer(chosen, "chosen"), _answer(rejected, "rejected")
    before, first, second = _split(prompt, *answers)
    if first == second:
        raise BadRow("`chosen` and `rejected` are the same, so there is nothing to prefer")
    for name, answer in (("chosen", first), ("rejected", second)):
        _check_answer(name, answer)
    chosen_, rejected_ = (
        turns.conversation([*turns.context(before), *answer], system, tools) for answer in (first, second)
    )
    return Preference(chosen_, rejected_)


def _of_texts(prompt: str, chosen: str, rejected: str) -> Preference:
    question = text_of(prompt, "`prompt`")
    pair = [
        PromptCompletion(question, text_of(answer, f"`{name}`"))
        for name, answer in (("chosen", chosen), ("rejected", rejected))
    ]
    if pair[0] == pair[1]:
        raise BadRow("`chosen` and `rejected` are the same, so there is nothing to prefer")
    return Preference(*pair)


def _answer(value: Any, where: str) -> Messages:
    if isinstance(value, str):
        return [Message("assistant", text_of(value, f"`{where}`"))]
    return turns.messages(value, where)


def _split(prompt: Any, chosen: Messages, rejected: Messages) -> tuple[Messages, Messages, Messages]:
    """(prompt, chosen answer, rejected answer)"""
    shared = _shared(chosen, rejected)
    if prompt is None or prompt == "" or prompt == []:
        if not shared:
            raise BadRow("`chosen` and `rejected` begin differently and there is no `prompt`; expected one of both")
        return chosen[:shared], chosen[shared:], rejected[shared:]
    before = _prompt(prompt)
    whole = chosen[0].role != "assistant" or rejected[0].role != "assistant"
    if not whole:
        return before, chosen, rejected
    if not _is_of(before, chosen[:shared], is_text=isinstance(prompt, str)):
        raise BadRow(
            f"`prompt` is {shown(before[-1].content)}, but `chosen` and `rejected` are conversations that do not begin "
            "with it; leave out `prompt`, or keep only the answers in them"
        )
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _prompt(value: Any) -> Messages:
    if isinstance(value, str):
        return [Message("user", text_of(value, "`prompt`"))]
    if not isinstance(value, list):
        raise BadRow(f"`prompt` is {kind(value)}; expected text or a list of messages")
    return turns.messages(value, "prompt")


def _shared(chosen: Messages, rejected: Messages) -> int:
    """How many messages both begin with."""
    pairs = zip(chosen, rejected, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)))


def _is_of(prompt: Messages, shared: Messages, *, is_text: bool) -> bool:
    """Whether the beginning that two conversations share holds the row's prompt.

    A prompt of text is one of its questions, in most datasets the first, in some the last.
    """
    if is_text:
        said = [message.content.strip() for message in shared if message.role == "user"]
        return prompt[0].content.strip() in said
    return [(m.role, m.content) for m in prompt] == [(m.role, m.content) for m in shared[: len(prompt)]]


def _check_answer(name: str, answer: Messages) -> None:
    if not answer:
        raise BadRow(f"`{name}` has no answer of its own: the other one goes on from it; expected two answers")
    if answer[0].role != "assistant":
        raise BadRow(
            f"`chosen` and `rejected` differ from a message of {answer[0].role} on ({shown(answer[0].content)}); "
            "expected two answers to one prompt"
        )
