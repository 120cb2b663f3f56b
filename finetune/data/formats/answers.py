"""Answers to one prompt: two of which one is better, or several with scores, in any spelling of the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from finetune.data.formats.messages import as_context, read_message, read_messages, read_turn, to_conversation
from finetune.data.formats.tools import Tool
from finetune.data.formats.values import kind, shown
from finetune.data.formats.values import text as text_of
from finetune.data.samples import BadRow, Conversation, Message, Preference, PromptCompletion
from finetune.utils import common_prefix_length


def preference_of(prompt: Any, chosen: Any, rejected: Any, system: str, tools: tuple[Tool, ...]) -> Preference:
    """Returns a pair of answers, both text or both messages; only the text after the prompt is trained.

    Raises BadRow if there is no prompt, no preference, or no answer.
    """
    if isinstance(chosen, str) and (prompt is None or prompt == ""):
        raise BadRow("`chosen` and `rejected` are text, but there is no `prompt` that they answer")
    same = "`chosen` and `rejected` are the same, so there is nothing to prefer"
    if isinstance(chosen, str) and isinstance(prompt, str) and not system and not tools:
        question = text_of(prompt, "`prompt`")
        better = PromptCompletion(question, text_of(chosen, "`chosen`"))
        worse = PromptCompletion(question, text_of(rejected, "`rejected`"))
        if better == worse:
            raise BadRow(same)
        return Preference(better, worse)
    before, *answers = _split(prompt, _answer(chosen, "chosen"), _answer(rejected, "rejected"))
    if answers[0] == answers[1]:
        raise BadRow(same)
    for name, answer in zip(("chosen", "rejected"), answers, strict=True):
        if not answer:
            raise BadRow(f"`{name}` has no answer of its own: the other one continues it; expected two answers")
        if answer[0].role != "assistant":
            raise BadRow(
                f"`chosen` and `rejected` differ from a message of {answer[0].role} on ({shown(answer[0].content)}); "
                "expected two answers to one prompt"
            )
    first, second = (to_conversation([*as_context(before), *answer], system, tools) for answer in answers)
    return Preference(first, second)


def _answer(value: Any, name: str) -> list[Message]:
    if isinstance(value, str):
        return [Message("assistant", text_of(value, f"`{name}`"))]
    return _messages(value, name)


def _messages(value: Any, name: str) -> list[Message]:
    """Reads messages, or turns of sharegpt, which LLaMA-Factory's pairs have."""
    is_turn = isinstance(value, list) and value and isinstance(value[0], Mapping) and "from" in value[0]
    return read_messages(value, name, read_turn if is_turn else read_message)


def _split(
    prompt: Any, chosen: list[Message], rejected: list[Message]
) -> tuple[list[Message], list[Message], list[Message]]:
    """Returns (prompt, chosen answer, rejected answer)."""
    shared = common_prefix_length(chosen, rejected)
    split = chosen[:shared], chosen[shared:], rejected[shared:]
    if prompt is None or prompt == "" or prompt == []:
        if not shared:
            raise BadRow("`chosen` and `rejected` begin differently and there is no `prompt`; expected one of both")
        return split
    before = _prompt(prompt)
    if chosen[0].role == rejected[0].role == "assistant":  # answers alone
        return before, chosen, rejected
    if isinstance(prompt, str):  # one of the questions, in most datasets the first, in some the last
        questions = [message.content.strip() for message in chosen[:shared] if message.role == "user"]
        begins_with_prompt = before[0].content.strip() in questions
    else:
        first = chosen[: min(shared, len(before))]
        begins_with_prompt = [(m.role, m.content) for m in before] == [(m.role, m.content) for m in first]
    if not begins_with_prompt:
        raise BadRow(
            f"`prompt` is {shown(before[-1].content)}, but `chosen` and `rejected` are conversations that do not begin "
            "with it; leave out `prompt`, or keep only the answers in them"
        )
    return split


def _prompt(value: Any) -> list[Message]:
    if isinstance(value, str):
        return [Message("user", text_of(value, "`prompt`"))]
    if not isinstance(value, list):
        raise BadRow(f"`prompt` is {kind(value)}; expected text or a list of messages")
    return _messages(value, "prompt")


def answered(
    prompt: Any, answer: Any, where: str, system: str, tools: tuple[Tool, ...]
) -> Conversation | PromptCompletion:
    """Returns one answer, text or messages, to a prompt of either kind."""
    if not isinstance(answer, str | list):
        raise BadRow(f"{where} is {kind(answer)}; expected text or a list of messages")
    if isinstance(prompt, str) and isinstance(answer, str) and not system and not tools:
        return PromptCompletion(text_of(prompt, "`prompt`"), text_of(answer, where))
    turns = [Message("assistant", text_of(answer, where))] if isinstance(answer, str) else read_messages(answer, where)
    if turns[0].role != "assistant":
        raise BadRow(f"{where} begins with a message of {turns[0].role}; expected the answer to `prompt` alone")
    return to_conversation([*as_context(_prompt(prompt)), *turns], system, tools)
