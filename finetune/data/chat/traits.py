"""What a chat template is like, found by rendering short conversations with it; once per run.

    text   <|im_start|>user\\nqUeStIoN<|im_end|>\\n<|im_start|>assistant\\naNsWeR<|im_end|>\\n
                                                 prompt               ANSWER end_of_turn closing

Without a generation prompt, what stands before the answer is the header, if it is more than white space.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from finetune.data.chat.template import Jinja
from finetune.data.samples import BadRow, Conversation, Message

QUESTION, ANSWER, THOUGHT = "qUeStIoN", "aNsWeR", "tHoUgHt"  # texts that no template contains
TOOL, ARGUMENT, RESULT = "fUnCtIoN", "vAlUe", "rEsUlT"
CALL_ID = "cAlLnUm01"  # nine letters and digits, which Mistral's templates insist on


@dataclass(frozen=True)
class CallForm:
    """How a template wants an assistant's tool calls."""

    no_content: str | None = ""  # in place of an empty content; None where a template tells calls by it (DeepSeek V3)
    arguments_as_text: bool = False  # JSON in a string, where a template adds it to one
    needs_ids: bool = False  # whether it refuses calls without an id (Mistral)


@dataclass(frozen=True)
class Traits:
    """What follows and precedes an answer, and which parts of a conversation a template knows."""

    prompt: str = ""  # the generation prompt after a question
    prompt_fits: bool = False  # whether an answer without reasoning follows it
    header: str = ""  # of an assistant's turn, where there is no generation prompt
    end_of_turn: str = ""  # what the model writes after an answer, such as <|eot_id|>; "" if nothing
    tail: str | None = None  # all that follows the last answer: white space, end-of-turn and closing; None: unknown
    closing: str = ""  # what of it the model does not write: a newline, Phi-3's <|endoftext|>
    calls: CallForm | None = None  # None where the template writes no tool calls
    writes_tools: bool = False
    writes_reasoning: bool = False

    def as_dicts(self, conversation: Conversation) -> list[dict[str, Any]]:
        """The messages as the template sees them."""
        form = self.calls or CallForm()
        messages = with_call_ids(conversation.messages) if form.needs_ids else conversation.messages
        return [_as_dict(message, form) for message in messages]


def with_call_ids(messages: Sequence[Message]) -> list[Message]:
    """Calls and their answers with ids where a row has none; made of the call and its place, so always the same."""
    found: list[Message] = []
    waiting: list[str] = []  # ids of calls without an answer so far
    for i, message in enumerate(messages):
        if message.tool_calls:
            calls = tuple(
                {**call, "id": call.get("id") or _call_id(call, i, j)} for j, call in enumerate(message.tool_calls)
            )
            message, waiting = replace(message, tool_calls=calls), [call["id"] for call in calls]
        elif message.role == "tool" and waiting:
            answered = message.tool_call_id or waiting[0]
            message = replace(message, tool_call_id=answered)
            waiting = [id_ for id_ in waiting if id_ != answered]
        found.append(message)
    return found


def _call_id(call: Mapping[str, Any], message: int, place: int) -> str:
    """Nine letters and digits, as Mistral's are."""
    said = json.dumps([message, place, call["function"]], sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(said.encode(), digest_size=5).hexdigest()[:9]


def _as_dict(message: Message, form: CallForm) -> dict[str, Any]:
    found = message.as_dict()
    if not message.tool_calls:
        return found
    calls = [{**call, "function": _function(call["function"], form)} for call in message.tool_calls]
    return {**found, "content": message.content or form.no_content, "tool_calls": calls}


def _function(function: Mapping[str, Any], form: CallForm) -> dict[str, Any]:
    """With its arguments as an object, which is what transformers asks for; or as text, for a template that adds it."""
    arguments = function["arguments"]
    if form.arguments_as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**function, "arguments": arguments}


def traits_of(jinja: Jinja, tokens: Iterable[str]) -> Traits:
    """tokens: the added tokens of the tokenizer, by which an end-of-turn is known."""
    one = probe(1)
    try:
        question, prompted = jinja.text(one[:1]), jinja.text(one[:1], prompt=True)
        text = jinja.text(one)
    except BadRow:
        return Traits()
    prompt = prompted[len(question) :] if prompted.startswith(question) else ""
    has_prompt, at = prompted != question, text.rfind(ANSWER)
    if at < 0:
        return Traits(prompt)
    header = "" if has_prompt or not text.startswith(prompted) else text[len(prompted) : at]
    tail = text[at + len(ANSWER) :]
    end = _end_of_turn(tail, _longer(jinja), list(tokens))
    return Traits(
        prompt,
        text.startswith(prompted),
        header if header.strip() else "",
        end,
        tail,
        tail[tail.index(end) + len(end) :] if end else tail,
        _call_form(jinja),
        _writes(jinja, TOOL, one, tools=[probe_tool()]),
        _writes(jinja, THOUGHT, [one[0], _as_dict(Message("assistant", ANSWER, reasoning=THOUGHT), CallForm())]),
    )


def _longer(jinja: Jinja) -> str:
    """What follows the first answer of two."""
    try:
        return jinja.text(probe(2)).partition(ANSWER)[2]
    except BadRow:
        return ""


def _end_of_turn(tail: str, longer: str, tokens: list[str]) -> str:
    """The tokens at the beginning of `tail`, or else its first line; "" where there is nothing but white space.

    Of "<|end|>\\n<|endoftext|>" it is "<|end|>": the second token closes the conversation, not the turn, for it is not
    there when another turn follows (`longer`).
    """
    rest, longer = tail.lstrip(), longer.lstrip()
    end = _first_token(rest, tokens)
    if not end:
        return rest.partition("\n")[0].rstrip()
    while after := _first_token(rest[len(end) :].lstrip(), tokens):
        more = rest[: rest.index(after, len(end)) + len(after)]
        if not longer.startswith(more):
            break
        end = more
    return end


def _first_token(text: str, tokens: list[str]) -> str:
    return max((token for token in tokens if token and text.startswith(token)), key=len, default="")


def _call_form(jinja: Jinja) -> CallForm | None:
    """The first form of a call that the template writes with its argument."""
    for as_text, no_content in product((False, True), ("", None)):
        form = CallForm(no_content, as_text)
        if _writes_call(jinja, form, probe_call()):
            bare = {key: value for key, value in probe_call().items() if key != "id"}
            return replace(form, needs_ids=not _writes_call(jinja, form, bare))
    return None


def _writes_call(jinja: Jinja, form: CallForm, call: Mapping[str, Any]) -> bool:
    message = _as_dict(Message("assistant", "", tool_calls=(call,)), form)
    return _writes(jinja, ARGUMENT, [*probe(1)[:1], message], [probe_tool()])


def _writes(jinja: Jinja, what: str, messages: list[dict[str, Any]], tools: Iterable[Mapping[str, Any]] = ()) -> bool:
    try:
        return what in jinja.text(messages, list(tools))
    except BadRow:
        return False


def probe(turns: int) -> list[dict[str, Any]]:
    """Questions and answers that can be found again."""
    return [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}] * turns


def probe_tool() -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}, "required": ["x"]}
    return {"type": "function", "function": {"name": TOOL, "description": "d", "parameters": parameters}}


def probe_call() -> dict[str, Any]:
    return {"type": "function", "id": CALL_ID, "function": {"name": TOOL, "arguments": {"x": ARGUMENT}}}
