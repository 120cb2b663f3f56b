"""Turns of a conversation that a model writes token by token: the tokens between two of them, and the calls in one.

Ids of a turn are never made from its text. Only what stands between two turns is rendered and tokenized, by itself:

    ids that the model sampled                 text between                                   ids it samples next
    ... 9707 <|im_end|>     \\n<|im_start|>tool\\n7<|im_end|>\\n<|im_start|>assistant\\n     ...

A tool call is recognized by the form in which the template writes one:

    Qwen        <tool_call>\\n{"name": "add", "arguments": {"x": 1}}\\n</tool_call>
    Llama 3     {"name": "add", "parameters": {"x": 1}}
    Mistral     [TOOL_CALLS][{"name": "add", "arguments": {"x": 1}, "id": "..."}]
    DeepSeek    <｜tool▁call▁begin｜>function<｜tool▁sep｜>add\\n```json\\n{"x": 1}\\n```<｜tool▁call▁end｜>
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from finetune.data.chat.renderer import Renderer
from finetune.data.chat.template import ANSWER, QUESTION, probe
from finetune.data.chat.template_traits import ARGUMENT, CALL_ID, TOOL, probe_call, probe_tool
from finetune.data.chat.trained_spans import Chat, parts_of, prompt_of
from finetune.data.samples import BadRow, Conversation, Message, PromptOnly
from finetune.utils import common_prefix_length

_NAME = re.compile(r"[\w.:/-]{1,128}")  # of a function: nothing that a template or tokenizer could take for a mark
_DECODER = json.JSONDecoder()
_COMMA = re.compile(r"\s*,\s*")  # between the calls of a list


@dataclass(frozen=True)
class CallPattern:
    """The form of a tool call. The object after `opener` has name and arguments under two keys; or, if `between` is not
    None, the name stands before it, and the object has the arguments."""

    opener: str  # without its outer white space; "" if the whole turn is the object
    name_key: str = ""
    arguments_key: str = ""
    between: str | None = None

    def calls_in(self, text: str) -> tuple[str, list[dict[str, Any]], int]:
        """Returns the text before the first call, the calls ({name, arguments}), and the number of those that are
        malformed. text: of a turn, with special tokens, without its end."""
        calls, malformed = list[dict[str, Any]](), 0
        begins = [match.start() for match in re.finditer(re.escape(self.opener), text)] if self.opener else [0]
        if not begins or (not self.opener and not text.lstrip().startswith("{")):
            return text, [], 0
        for begin in begins:
            try:
                calls += self.calls_at(text, begin + len(self.opener))
            except (ValueError, KeyError, TypeError, RecursionError):
                malformed += 1
        return (text[: begins[0]] if calls else text), calls, malformed

    def calls_at(self, text: str, at: int) -> list[dict[str, Any]]:
        """Returns the calls after one opener: one, or those of a list. Raises ValueError, KeyError and TypeError."""
        calls = list[dict[str, Any]]()
        while True:
            at = len(text) - len(text[at:].lstrip().removeprefix("[").lstrip())  # a list of calls may begin
            name = None
            if self.between is not None:
                match = _NAME.match(text, at)
                if match is None or not text.startswith(self.between, match.end()):
                    raise ValueError("no name")
                name, at = match[0], match.end() + len(self.between)
            value, at = _DECODER.raw_decode(text, at)
            arguments = value if name is not None else value[self.arguments_key]
            name = value[self.name_key] if name is None else name
            if not (_NAME.fullmatch(name) and isinstance(arguments, dict)):
                raise ValueError("no call")
            calls.append({"name": name, "arguments": arguments})
            if self.between is not None or (comma := _COMMA.match(text, at)) is None:
                return calls
            at = comma.end()


def call_pattern(chat: Chat) -> CallPattern | None:
    """Returns the form in which a template writes a call; None if it writes none, or not as JSON."""
    if chat.traits.calls is None:
        return None
    question, tools = probe(1)[:1], [probe_tool()]
    plain = chat.jinja.text(probe(1), tools).rpartition(QUESTION)[2]
    for number in (2, 1):  # some templates write one call only
        calls = tuple({**probe_call(), "id": f"{CALL_ID[:-1]}{i}"} for i in range(number))
        message = Conversation((Message("assistant", "", tool_calls=calls),))
        try:
            text = chat.jinja.text([*question, *chat.traits.as_dicts(message)], tools).rpartition(QUESTION)[2]
        except BadRow:
            continue
        found = list(json_objects(text, ARGUMENT))
        if len(found) == number:
            break
    else:
        return None
    begin, end, value = found[0]
    before, after = text[common_prefix_length(text, plain) : begin], text[end : found[-1][0]]
    if value == {"x": ARGUMENT}:
        before, name, between = before.rpartition(TOOL)
        opener = _common_end(before, after.rpartition(TOOL)[0]) if number > 1 else before
        return CallPattern(opener.strip(), between=between) if name and opener.strip() else None
    keys = {json.dumps(given): key for key, given in value.items()}
    name, arguments = (keys.get(json.dumps(given)) for given in (TOOL, {"x": ARGUMENT}))
    if name is None or arguments is None:
        return None
    is_list = number == 1 or after.strip() == ","
    opener = (before.strip().removesuffix("[") if is_list else _common_end(before, after)).strip()
    return CallPattern(opener, name, arguments) if opener or number == 1 else None


def json_objects(text: str, marker: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yields (begin, end, value) of the outermost JSON objects of a text that hold a marker."""
    end = 0
    for match in re.finditer(r"\{", text):
        if match.start() < end:
            continue
        with contextlib.suppress(ValueError):
            value, at = _DECODER.raw_decode(text, match.start())
            if marker in text[match.start() : at]:
                end = at
                yield match.start(), end, value


def _common_end(one: str, other: str) -> str:
    """Returns the longest common end, from the first whole mark on: `begin｜><｜call｜>` gives `<｜call｜>`."""
    end = one[len(one) - common_prefix_length(one[::-1], other[::-1]) :]
    return end[mark.start() :] if (mark := re.search(r"[<\[]", end)) else end


@dataclass(frozen=True)
class TurnRenderer:
    """Tokens of prompts and of what follows a turn, under a run's template."""

    renderer: Renderer
    end_ids: frozenset[int]

    @cached_property
    def pattern(self) -> CallPattern | None:
        """Returns the form of a call, see `call_pattern`. Raises UserError without a chat template."""
        return call_pattern(self.renderer.chat_for(Conversation((Message("user", "Hi"),), (probe_tool(),))))

    def prompt(self, conversation: Conversation) -> list[int]:
        """Returns the tokens of a prompt. Raises BadRow."""
        ((rendered,),) = self.renderer.draw(PromptOnly(conversation))
        return self.renderer.tokenize([rendered])[0][0].tolist()

    def text(self, ids: list[int]) -> str:
        return str(self.renderer.tokenizer.decode(ids, skip_special_tokens=True))

    def read(self, ids: list[int]) -> tuple[Message, int]:
        """Returns a sampled turn as a message, and the number of its calls that are malformed. The message is what
        environments and rewards see; its tokens are `ids`."""
        body = ids[:-1] if ids[-1:] and ids[-1] in self.end_ids else ids
        calls, malformed = list[dict[str, Any]](), 0
        text = self.text(body)
        if self.pattern is not None:  # the opener may be a special token
            marked = str(self.renderer.tokenizer.decode(body)) if self.pattern.opener else text
            before, calls, malformed = self.pattern.calls_in(marked)
            text = self.renderer.special_text.sub("", before).strip() if calls else text
        given = tuple({"type": "function", "function": call} for call in calls)
        return Message("assistant", text, tool_calls=given), malformed

    def after(self, prompt: Conversation, turns: Sequence[Message]) -> list[int]:
        """Returns the tokens between the end of the last sampled turn and the next one.

        turns: after the prompt, sampled ones and the environment's in turn; the last ones are the environment's. Texts
        of sampled turns are replaced: the template must neither read nor change them. Raises BadRow if the template or
        the tokenizer refuses the environment's messages.
        """
        messages = prompt.messages
        for turn in turns:
            if turn.role == "assistant":  # with a text that is found again in the rendering, at its end
                names = [{"name": call["function"]["name"], "arguments": {"x": ANSWER}} for call in turn.tool_calls]
                calls = tuple({"type": "function", "function": function} for function in names)
                turn = Message("assistant", "" if calls else ANSWER, tool_calls=calls)
            messages = (*messages, turn)
        whole = replace(prompt, messages=messages)
        chat = self.renderer.chat_for(whole)
        last = max(i for i, message in enumerate(messages) if message.role == "assistant")
        part = parts_of(chat, replace(prompt, messages=messages[: last + 1]), "last_assistant")[-1]
        end_of_turn = part.text[part.text.rindex(ANSWER) + len(ANSWER) : part.spans[-1][1]]
        text = prompt_of(chat, whole)
        at = text.rindex(ANSWER) + len(ANSWER) if ANSWER in text else len(text)
        if not text.startswith(end_of_turn, at):  # in history another token may end a turn: gpt-oss has <|end|> there
            end_of_turn = max((one for one in chat.tokens if text.startswith(one, at)), key=len, default="")
        if not end_of_turn:
            raise BadRow(
                f"{chat.name} writes a turn differently once another message follows: "
                f"{text[at : at + 40]!r} does not begin with its end, so the text after a sampled turn is unclear. "
                "Fix: give another model.chat_template"
            )
        # As it follows an end of turn, which is nearly always a token of its own.
        end, following = chat.traits.end_of_turn, text[at + len(end_of_turn) :]
        encoder = self.renderer.encoder
        alone, joined = encoder.ids(end), encoder.ids(end + following)
        return (
            joined[len(alone) :]
            if joined[: len(alone)] == alone
            else encoder.continuation(alone, end + following, len(end))
        )
