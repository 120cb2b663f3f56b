"""Traits of a chat template, detected by rendering short conversations with it; once per run.

    text   <|im_start|>user\\nqUeStIoN<|im_end|>\\n<|im_start|>assistant\\naNsWeR<|im_end|>\\n
                                                 prompt               ANSWER end_of_turn closing

Without a generation prompt, the text before the answer is the header, if it is more than white space.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from finetune.data.chat.template import ANSWER, THOUGHT, Jinja, probe
from finetune.data.samples import BadRow, Conversation, Message
from finetune.utils import common_prefix_length

TOOL, ARGUMENT, RESULT = "fUnCtIoN", "vAlUe", "rEsUlT"
CALL_ID = "cAlLnUm01"  # nine letters and digits, which Mistral's templates insist on


@dataclass(frozen=True)
class CallForm:
    """Form in which a template wants an assistant's tool calls."""

    no_content: str | None = ""  # replaces an empty content; None if a template recognizes calls by it (DeepSeek V3)
    arguments_as_text: bool = False  # JSON in a string, if a template adds it to one
    needs_ids: bool = False  # whether it refuses calls without an id (Mistral)


@dataclass(frozen=True)
class EmptyThought:
    """Text before an answer without reasoning, if a template supports reasoning.

    Qwen 3          prompt <|im_start|>assistant\\n           text <think>\\n\\n</think>\\n\\n
    R1's distills   prompt <｜Assistant｜><think>\\n           text \\n</think>\\n\\n     opener <think>\\n
    Nemotron 3      prompt <|im_start|>assistant\\n<think>\\n  text \\n</think>\\n       before <think></think>
    Nemotron 2      prompt Assistant\\n<think>\\n               text \\n</think>\\n\\n     opener, before <think>\\n
    Gemma 4         prompt <|turn>model\\n<|channel>thought\\n<channel|>    opener <|channel>thought\\n<channel|>
    """

    text: str  # that the model writes; "" if the prompt ends with it
    opener: str = ""  # the end of the generation prompt that a rendered answer does not have
    before: str = ""  # the text that a rendered answer has instead


@dataclass(frozen=True)
class Traits:
    """Text before and after an answer, and which parts of a conversation a template supports."""

    prompt: str = ""  # the generation prompt after a question
    prompt_fits: bool = False  # whether an answer without reasoning follows it
    header: str = ""  # of an assistant's turn, if there is no generation prompt
    end_of_turn: str = ""  # written by the model after an answer, such as <|eot_id|>; "" if absent
    tail: str | None = None  # all that follows the last answer: white space, end-of-turn and closing; None: unknown
    closing: str = ""  # the part of it that the model does not write: a newline, Phi-3's <|endoftext|>
    next_role: str = ""  # token of the user's turn that ends an answer, if no other does (GLM 4.5: <|user|>)
    next_tool: str = ""  # token of a tool's result, which ends a call then
    calls: CallForm | None = None  # None if the template writes no tool calls
    writes_tools: bool = False
    writes_reasoning: bool = False
    empty_thought: EmptyThought | None = None

    def added_end(self, message: Mapping[str, Any]) -> str:
        """Returns the token that ends an assistant's last message, if the template writes it with the next message."""
        return self.next_tool if message.get("tool_calls") else self.next_role

    def as_dicts(self, conversation: Conversation) -> list[dict[str, Any]]:
        """Returns the messages as the template sees them."""
        form = self.calls or CallForm()
        messages = with_call_ids(conversation.messages) if form.needs_ids else conversation.messages
        return [_as_dict(message, form) for message in messages]


def with_call_ids(messages: Sequence[Message]) -> list[Message]:
    """Returns the messages with ids of calls and answers, added if a row has none: a hash of the call and its place."""
    with_ids: list[Message] = []
    waiting: list[str] = []  # ids of calls without an answer so far
    for i, message in enumerate(messages):
        if message.tool_calls:
            # Without an id: nine letters and digits, as Mistral's are.
            texts = [
                json.dumps([i, j, call["function"]], sort_keys=True, ensure_ascii=False)
                for j, call in enumerate(message.tool_calls)
            ]
            hashes = [hashlib.blake2b(text.encode(), digest_size=5).hexdigest()[:9] for text in texts]
            calls = tuple(
                {**call, "id": call.get("id") or own} for call, own in zip(message.tool_calls, hashes, strict=True)
            )
            message, waiting = replace(message, tool_calls=calls), [call["id"] for call in calls]
        elif message.role == "tool" and waiting:
            answered = message.tool_call_id or waiting[0]
            message = replace(message, tool_call_id=answered)
            waiting = [id_ for id_ in waiting if id_ != answered]
        with_ids.append(message)
    return with_ids


def _as_dict(message: Message, form: CallForm) -> dict[str, Any]:
    """Returns a message as chat templates see it; keys without a value are absent."""
    as_dict: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.media:  # which file is meant, templates need not know
        as_dict["content"] = []
        for i, text in enumerate(message.texts):
            if i > 0:
                as_dict["content"].append({"type": message.media[i - 1].kind})
            as_dict["content"] += [{"type": "text", "text": text}] * bool(text)
    if message.reasoning is not None:
        # Both names are in use: Qwen's and DeepSeek's templates read the first, gpt-oss the second.
        as_dict |= {"reasoning_content": message.reasoning, "thinking": message.reasoning}
    if message.tool_calls:
        as_dict["content"] = as_dict["content"] or form.no_content
        as_dict["tool_calls"] = []
        for call in message.tool_calls:
            arguments = call["function"]["arguments"]
            if form.arguments_as_text and not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            as_dict["tool_calls"].append({**call, "function": {**call["function"], "arguments": arguments}})
    if message.name is not None:
        as_dict["name"] = message.name
    if message.tool_call_id is not None:
        as_dict["tool_call_id"] = message.tool_call_id
    return as_dict


def traits_of(jinja: Jinja, tokens: Iterable[str]) -> Traits:
    """tokens: the added tokens of the tokenizer, which identify an end-of-turn."""
    one = probe(1)
    try:
        question, prompted = jinja.text(one[:1]), jinja.text(one[:1], prompt=True)
        text = jinja.text(one)
    except BadRow:
        return Traits()
    prompt = prompted[len(question) :] if prompted.startswith(question) else ""
    at = text.rfind(ANSWER)
    if at < 0:
        return Traits(prompt)
    try:
        longer = jinja.text(probe(2)).partition(ANSWER)[2]
    except BadRow:
        longer = ""
    header = text[len(prompted) : at] if prompted == question and text.startswith(prompted) else ""
    tail = text[at + len(ANSWER) :]
    end, calls = _end_of_turn(tail, longer, list(tokens)), _call_form(jinja)
    next_role = "" if end else _next_role(jinja, tail, longer, prompt, list(tokens))
    if next_role:
        end, tail = next_role, tail + next_role
    return Traits(
        prompt=prompt,
        prompt_fits=text.startswith(prompted),
        header=header if header.strip() else "",
        end_of_turn=end,
        tail=tail,
        closing=tail[tail.index(end) + len(end) :] if end else tail,
        next_role=next_role,
        next_tool=(_next_tool(jinja, calls, list(tokens)) or next_role) if next_role else "",
        calls=calls,
        writes_tools=_writes(jinja, TOOL, one, tools=[probe_tool()]),
        writes_reasoning=_writes(jinja, THOUGHT, [one[0], _thoughtful()]),
        empty_thought=_empty_thought(jinja, question, prompted, text),
    )


def _thoughtful() -> dict[str, Any]:
    return _as_dict(Message("assistant", ANSWER, reasoning=THOUGHT), CallForm())


_GIVEN = re.compile(r"<\|(\w+)>[^<]*<\1\|>\s*$")  # a thought that the prompt has whole, in Gemma's tokens


def _empty_thought(jinja: Jinja, question: str, prompted: str, text: str) -> EmptyThought | None:
    """Returns the beginning of an answer without reasoning after the prompt: as with reasoning, but for its text.

    If the template leaves reasoning out, and its prompt ends with an opening tag: the closing tag, with
    the white space that follows the opening one before it, and twice after it. The same if an answer without
    reasoning is rendered after the opening tag, as if it were a thought.
    """
    if not prompted.startswith(question) or prompted == question:
        return None
    try:
        thoughtful = jinja.text([*probe(1)[:1], _thoughtful()])
    except BadRow:
        thoughtful = ""
    begin = thoughtful[len(prompted) : thoughtful.rfind(ANSWER)] if thoughtful.startswith(prompted) else ""
    written = begin.replace(THOUGHT, "") if THOUGHT in begin else ""
    tag = re.search(r"<(/?)(\w+)>(\s*)$", prompted)
    if text.startswith(prompted):
        if tag and tag[1] and tag.start() >= len(question):
            return EmptyThought("")
        if tag and re.search("think|thought|reason", tag[2]) and text.startswith(prompted + ANSWER):  # never closed
            return EmptyThought(f"{tag[3]}</{tag[2]}>{tag[3] * 2}", tag[0], tag[0])
        return EmptyThought(written) if written and text[len(prompted) :].startswith(written) else None
    shared = common_prefix_length(prompted, text)
    given = _GIVEN.search(prompted)
    if given and text.startswith(prompted[: given.start()] + ANSWER):
        return EmptyThought("", given[0])
    if shared < len(question) or tag is None:
        return None
    shared = min(shared, tag.start())  # <think> and </think> begin alike
    opener, before = prompted[shared:], text[shared : text.rfind(ANSWER)]
    is_closed, name, space = tag.groups()
    if is_closed:
        return EmptyThought("", opener, before)
    if not written and before.strip() in ("", f"</{name}>"):
        written = before or f"{space}</{name}>{space * 2}"
    return EmptyThought(written, opener, before) if written else None


def _end_of_turn(tail: str, longer: str, tokens: list[str]) -> str:
    """Returns the tokens at the beginning of `tail`, or else its first line; "" if it is only white space.

    For "<|end|>\\n<|endoftext|>" it is "<|end|>": the second token closes the conversation, not the turn, as it is not
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


def _next_role(jinja: Jinja, tail: str, longer: str, prompt: str, tokens: list[str]) -> str:
    """Returns the token of the next turn after an answer, which ends it in use; "" if it begins an answer, too."""
    token = _first_token(longer[len(tail) :], tokens) if longer.startswith(tail) else ""
    is_begin = token == jinja.special.get("bos_token") or prompt.lstrip().startswith(token)
    return "" if is_begin else token


def _next_tool(jinja: Jinja, form: CallForm | None, tokens: list[str]) -> str:
    if form is None:
        return ""
    call = _as_dict(Message("assistant", "", tool_calls=(probe_call(),)), form)
    result = _as_dict(Message("tool", RESULT, name=TOOL, tool_call_id=CALL_ID), form)
    try:
        before, after = (jinja.text([*probe(1)[:1], call, *more], [probe_tool()]) for more in ([], [result]))
    except BadRow:
        return ""
    return _first_token(after[len(before) :], tokens) if after.startswith(before) else ""


def _first_token(text: str, tokens: list[str]) -> str:
    return max((token for token in tokens if token and text.startswith(token)), key=len, default="")


def _call_form(jinja: Jinja) -> CallForm | None:
    """Returns the first form of a call that the template writes with its argument."""

    def is_written(form: CallForm, call: Mapping[str, Any]) -> bool:
        message = _as_dict(Message("assistant", "", tool_calls=(call,)), form)
        return _writes(jinja, ARGUMENT, [*probe(1)[:1], message], [probe_tool()])

    for as_text, no_content in product((False, True), ("", None)):
        form = CallForm(no_content, as_text)
        if is_written(form, probe_call()):
            bare = {key: value for key, value in probe_call().items() if key != "id"}
            return replace(form, needs_ids=not is_written(form, bare))
    return None


def _writes(jinja: Jinja, marker: str, messages: list[dict[str, Any]], tools: Iterable[Mapping[str, Any]] = ()) -> bool:
    try:
        return marker in jinja.text(messages, list(tools))
    except BadRow:
        return False


def probe_tool() -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}, "required": ["x"]}
    return {"type": "function", "function": {"name": TOOL, "description": "d", "parameters": parameters}}


def probe_call() -> dict[str, Any]:
    return {"type": "function", "id": CALL_ID, "function": {"name": TOOL, "arguments": {"x": ARGUMENT}}}
