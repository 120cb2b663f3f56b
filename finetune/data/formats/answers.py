"""Answers to one prompt: two of which one is better, or several with scores, in any spelling of the prompt."""

from __future__ import annotations

from typing import Any

from finetune.data.formats.messages import Tool, as_context, read_messages, to_conversation
from finetune.data.formats.values import kind, shown
from finetune.data.formats.values import text as text_of
from finetune.data.samples import BadRow, Conversation, Message, Preference, PromptCompletion
from finetune.utils import common_prefix_length

Messages = list[Message]


def preference_of(prompt: Any, chosen: Any, rejected: Any, system: str, tools: tuple[Tool, ...]) -> Preference:
    """A pair of answers, each text or messages alike; only the text after the prompt is trained.

    Raises BadRow if there is no prompt, no preference, or no answer.
    """
    if isinstance(chosen, str) and (prompt is None or prompt == ""):
        raise BadRow("`chosen` and `rejected` are text, but there is no `prompt` that they answer")
    if isinstance(chosen, str) and isinstance(prompt, str) and not system and not tools:
        return _text_pair(prompt, chosen, rejected)
    answers = _answer(chosen, "chosen"), _answer(rejected, "rejected")
    before, first, second = _split(prompt, *answers)
    if first == second:
        raise BadRow("`chosen` and `rejected` are the same, so there is nothing to prefer")
    for name, answer in (("chosen", first), ("rejected", second)):
        _check_answer(name, answer)
    chosen_, rejected_ = (to_conversation([*as_context(before), *answer], system, tools) for answer in (first, second))
    return Preference(chosen_, rejected_)


def _text_pair(prompt: str, chosen: str, rejected: str) -> Preference:
    question = text_of(prompt, "`prompt`")
    pair = [
        PromptCompletion(question, text_of(answer, f"`{name}`"))
        for name, answer in (("chosen", chosen), ("rejected", rejected))
    ]
    if pair[0] == pair[1]:
        raise BadRow("`chosen` and `rejected` are the same, so there is nothing to prefer")
    return Preference(pair[0], pair[1])


def _answer(value: Any, where: str) -> Messages:
    if isinstance(value, str):
        return [Message("assistant", text_of(value, f"`{where}`"))]
    return read_messages(value, where)


def _split(prompt: Any, chosen: Messages, rejected: Messages) -> tuple[Messages, Messages, Messages]:
    """(prompt, chosen answer, rejected answer)"""
    shared = common_prefix_length(chosen, rejected)
    if prompt is None or prompt == "" or prompt == []:
        if not shared:
            raise BadRow("`chosen` and `rejected` begin differently and there is no `prompt`; expected one of both")
        return chosen[:shared], chosen[shared:], rejected[shared:]
    before = _prompt(prompt)
    if chosen[0].role == rejected[0].role == "assistant":  # answers alone
        return before, chosen, rejected
    if not _contains_prompt(before, chosen[:shared], is_text=isinstance(prompt, str)):
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
    return read_messages(value, "prompt")


def _contains_prompt(prompt: Messages, shared: Messages, *, is_text: bool) -> bool:
    """Returns whether the beginning that two conversations share has the row's prompt.

    A prompt of text is one of its questions, in most datasets the first, in some the last.
    """
    if is_text:
        questions = [message.content.strip() for message in shared if message.role == "user"]
        return prompt[0].content.strip() in questions
    return [(m.role, m.content) for m in prompt] == [(m.role, m.content) for m in shared[: len(prompt)]]


def _check_answer(name: str, answer: Messages) -> None:
    if not answer:
        raise BadRow(f"`{name}` has no answer of its own: the other one continues it; expected two answers")
    if answer[0].role != "assistant":
        raise BadRow(
            f"`chosen` and `rejected` differ from a message of {answer[0].role} on ({shown(answer[0].content)}); "
            "expected two answers to one prompt"
        )


def answered(
    prompt: Any, answer: Any, where: str, system: str, tools: tuple[Tool, ...]
) -> Conversation | PromptCompletion:
    """One answer, text or messages, to a prompt of either kind."""
    if not isinstance(answer, str | list):
        raise BadRow(f"{where} is {kind(answer)}; expected text or a list of messages")
    if isinstance(prompt, str) and isinstance(answer, str) and not system and not tools:
        return PromptCompletion(text_of(prompt, "`prompt`"), text_of(answer, where))
    turns = [Message("assistant", text_of(answer, where))] if isinstance(answer, str) else read_messages(answer, where)
    if turns[0].role != "assistant":
        raise BadRow(f"{where} begins with a message of {turns[0].role}; expected the answer to `prompt` alone")
    return to_conversation([*as_context(_prompt(prompt)), *turns], system, tools)
