"""Character spans of a conversation that are trained: the text that the model has to write in use, turn by turn.

For assistant message i, with the text before it in use (its generation prompt included) and its own:

    prompt   render(messages[:i], add_generation_prompt)     ...<|im_start|>assistant\\n
    so far   render(messages[:i + 1])                        ...<|im_start|>assistant\\nHello<|im_end|>\\n
    written  so far, without the prompt                                            Hello<|im_end|>\\n
    trained  written, without the closing of a conversation                        Hello<|im_end|>

Positions only: a content that looks like a marker of the template is not mistaken for one.

Some templates rewrite history: they leave earlier reasoning out, or end the last turn with another token. A turn whose
rendering is not the beginning of the full conversation's gets an example of its own, in which it is the last: the
text the model sees when it writes it. Turns that agree with one another stay together, each is trained exactly once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, NamedTuple

from finetune.data.chat.template import ANSWER, Jinja, Marked, Messages, Span, Tools
from finetune.data.chat.template_traits import Traits
from finetune.data.samples import BadRow, Conversation, Message
from finetune.errors import UserError
from finetune.utils import common_prefix_length


class TrainedText(NamedTuple):
    """A text and its trained spans."""

    text: str
    spans: list[Span]
    messages: int  # number of messages in the text, from the first on


@dataclass(frozen=True)
class Chat:
    """A template, its traits, and the added tokens of the tokenizer, one of which ends a turn."""

    jinja: Jinja
    traits: Traits
    tokens: tuple[str, ...]
    tool_use: Chat | None = None  # for conversations with tools, if the tokenizer has a template of its own for them
    thinking: Chat | None = None  # for answers with reasoning, if the generation prompt ends with an empty thought

    @property
    def name(self) -> str:
        return self.jinja.template.name

    def selected(self, conversation: Conversation) -> Chat:
        """Returns the template of a conversation among the tokenizer's own, as transformers selects it."""
        return self.tool_use if conversation.tools and self.tool_use else self


@dataclass(frozen=True)
class _Turn:
    """An assistant message as the last of its conversation."""

    text: str
    spans: list[Span]
    messages: int  # it and those before it


@dataclass(frozen=True)
class _Written:
    """Text that a template adds for an assistant message after `prompt`, and the generation blocks in it."""

    prompt: str
    text: str
    marks: list[Span]


def parts_of(chat: Chat, conversation: Conversation, train_on: str) -> list[TrainedText]:
    """Returns the examples of a conversation: one, or more if the template rewrites history.

    Raises BadRow if the template leaves a part of the row out, UserError if no mask can be right.
    """
    chat = chat.selected(conversation)
    if chat.traits.empty_thought and not chat.traits.writes_reasoning:
        # Reasoning in the content of answers becomes `reasoning`: a template would cut it off.
        apart: list[Message] = []
        for message in conversation.messages:
            match = THOUGHT_IN_CONTENT.fullmatch(message.content)
            if match and message.role == "assistant" and message.reasoning is None:
                message = replace(message, reasoning=match[1].strip("\n") or None, content=match[2])
            apart.append(message)
        conversation = replace(conversation, messages=tuple(apart))
    messages, tools = chat.traits.as_dicts(conversation), conversation.tools
    answers = [i for i, message in enumerate(conversation.messages) if message.role == "assistant" and message.train]
    trained = answers[-1:] if train_on == "last_assistant" else answers
    last = bool(trained) and trained[-1] == len(messages) - 1
    full_text, marks = chat.jinja.marked(messages, tools) if last else (chat.jinja.text(messages, tools), [])
    if messages[-1:] and messages[-1]["role"] == "assistant":
        full_text += chat.traits.added_end(messages[-1])
    turns = []
    for i in trained if train_on != "all" else ():
        so_far = (full_text, marks) if i == len(messages) - 1 else chat.jinja.marked(messages[: i + 1], tools)
        with_thought = chat.thinking if conversation.messages[i].reasoning else None
        written = _written(with_thought or chat, messages, tools, i, so_far)
        message = conversation.messages[i]
        if not all(_contains(written.text, text) for text in message.texts):
            raise BadRow(
                f"{chat.name} changes the content of message {i} (assistant): {message.content[:40]!r} is not in "
                f"{written.text[:60]!r}, so the model would not learn what the row says. Fix: give "
                "another model.chat_template"
            )
        if _cuts_thought(message.content, written.text):
            raise BadRow(
                f"{chat.name} takes the text before '</think>' in message {i} (assistant) for a thought. Fix: take "
                "'</think>' out of the answer, or give the thought as `reasoning`"
            )
        if message.reasoning and not _contains(written.text, message.reasoning):
            raise BadRow(f"{chat.name} {_NO_REASONING.format(i)}")
        turns.append(_turn(chat, written, i))
    _check_context(chat, conversation, messages, full_text)
    if not turns:
        return [TrainedText(full_text, [(0, len(full_text))] if train_on == "all" else [], len(messages))]
    # Few texts with every turn as it was rendered, each trained in one of them; in the order of the turns.
    parts: list[TrainedText] = []
    rest, text, count = turns, full_text, len(messages)
    while rest:
        # Up to the end-of-turn only: some templates write a last token that a longer conversation does not have.
        agrees = [text.startswith(turn.text[: turn.spans[-1][1]]) for turn in rest]
        if any(agrees):
            parts.append(TrainedText(text, [span for turn in compress(rest, agrees) for span in turn.spans], count))
        rest = [turn for turn, one in zip(rest, agrees, strict=True) if not one]
        text, count = (rest[-1].text, rest[-1].messages) if rest else ("", 0)  # agrees with itself, so this ends
    return parts[::-1]


def prompt_of(chat: Chat, conversation: Conversation) -> str:
    """Returns the text after which the model writes the next message: as in a row that has that message."""
    answered = replace(conversation, messages=(*conversation.messages, Message("assistant", ANSWER)))
    (part,) = parts_of(chat, answered, "last_assistant")
    return part.text[: part.spans[0][0]]


# --- a turn


def _turn(chat: Chat, written: _Written, i: int) -> _Turn:
    traits, text = chat.traits, written.text
    # The end of the answer, end-of-turn included: the usual one, or another token, as a tool call may have its own.
    if traits.tail is not None and text.endswith(traits.tail):
        end = len(text) - len(traits.closing)
    else:
        body = text.rstrip()
        if body.endswith(chat.tokens):
            end = len(body)
        elif chat.jinja.template.marks_generation:
            end = len(text)
        else:
            raise BadRow(
                f"{chat.name} ends message {i} (assistant) with {text[-30:]!r}, not with {traits.tail!r} as after "
                "other answers, nor with a token of this tokenizer. The model would not learn to stop. Fix: mark what "
                "the assistant writes in the template with {% generation %}, or give another model.chat_template"
            )
    if not chat.jinja.template.marks_generation:
        # The model writes all that is not in the prompt, as Mistral's space and an empty thought, but no header.
        begin = 0
        if traits.header:
            if not text.startswith(traits.header):
                raise BadRow(
                    f"{chat.name} has no generation prompt, and begins message {i} (assistant) with "
                    f"{text[:40]!r} but other answers with {traits.header!r}. Which text the model would write is "
                    "unclear. Fix: mark it in the template with {% generation %}, or give another model.chat_template"
                )
            begin = len(traits.header)
        spans = [(begin, end)]
    elif spans := [(begin, min(stop, end)) for begin, stop in written.marks]:
        # The last block extends to the end-of-turn, or is cut after it, if it ends elsewhere.
        begin, stop = spans[-1]
        if traits.end_of_turn and text[stop:end].strip() in (traits.end_of_turn, *chat.tokens):
            spans[-1] = (begin, end)
    before = len(written.prompt)
    joined: list[Span] = []
    for begin, end in [(before + begin, before + end) for begin, end in spans if begin < end]:
        if joined and joined[-1][1] == begin:  # they touch
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    if not joined:
        raise BadRow(f"{chat.name} marks nothing of message {i} (assistant) as generated, so nothing would be trained")
    return _Turn(written.prompt + text, joined, i + 1)


def _written(chat: Chat, messages: Messages, tools: Tools, i: int, so_far: Marked) -> _Written:
    """Returns the text that the template adds for message `i` to its prompt. so_far: rendered through this message."""
    prompt = chat.jinja.text(messages[:i], tools, prompt=True)
    at, (text, marks) = len(prompt), so_far
    thought = chat.traits.empty_thought
    opens = thought is not None and thought.opener == thought.before != "" and prompt.endswith(thought.opener)
    if opens and (opened := _behind_an_opened_thought(chat, messages[i], prompt, so_far)):
        text, marks = opened
    elif not text.startswith(prompt):
        prompt, at, (text, marks) = _in_other_history(chat, messages, tools, i, prompt, so_far)
    # Some write the header after a question, but not after a tool's result, where the model goes on: the text in use.
    header = chat.traits.prompt
    if thought is not None and not text.startswith(header, at):
        header = header.removesuffix(thought.opener) + thought.before
    if header and not prompt.endswith((header, chat.traits.prompt)) and text.startswith(header, at):
        at += len(header)
    # A mark that begins within the prompt is cut: that part is given, not written by the model.
    if not text.endswith(end := chat.traits.added_end(messages[i])):
        text += end
    return _Written(prompt, text[at:], [(max(begin - at, 0), end - at) for begin, end in marks if end > at])


def _in_other_history(
    chat: Chat, messages: Messages, tools: Tools, i: int, prompt: str, so_far: Marked
) -> tuple[str, int, Marked]:
    """Returns (prompt, start of message `i`, the text and marks that it begins in), for a prompt that `so_far`
    does not begin with. Raises if there is no such place."""
    text, marks = so_far
    if opened := _behind_an_opened_thought(chat, messages[i], prompt, so_far):
        return prompt, len(prompt), opened
    # gpt-oss drops the reasoning before a tool's call once the answer is there, but the model saw it when it wrote
    # the answer. The addition does not depend on it.
    history = [
        {key: value for key, value in message.items() if key not in ("reasoning_content", "thinking")}
        for message in messages[:i]
    ]
    if history != list(messages[:i]):
        bare_prompt = chat.jinja.text(history, tools, prompt=True)
        bare, bare_marks = chat.jinja.marked([*history, messages[i]], tools)
        if bare.startswith(bare_prompt):
            return prompt, len(bare_prompt), (bare, bare_marks)
    shared = common_prefix_length(prompt, text)
    if marks:  # the template itself marks generated text; tokens of a prompt and an answer may begin alike
        begins = [begin for begin, end in marks if end > shared]
        shared = min(shared, begins[0]) if begins else shared
        return text[:shared], shared, so_far
    has_reasoning = "reasoning_content" in messages[i]
    if not chat.traits.writes_reasoning and has_reasoning:
        raise BadRow(f"{chat.name} {_NO_REASONING.format(i)}")
    begin = max(0, shared - 20)
    reason = (
        f"{chat.name} renders what precedes message {i} (assistant) differently once its answer is known: "
        f"{prompt[begin : shared + 30]!r} becomes {text[begin : shared + 30]!r}. What the model would see in use is "
        "not what it would be trained on. Fix: mark what the assistant writes in the template with {% generation %}, "
        "or give another model.chat_template"
    )
    if chat.traits.writes_reasoning and not has_reasoning:
        raise BadRow(f"{reason}, or give the message its `reasoning`, which the template prompts for")
    raise BadRow(reason) if chat.traits.prompt_fits else UserError(reason)  # other rows may fit, or none can


def _behind_an_opened_thought(chat: Chat, message: Mapping[str, Any], prompt: str, so_far: Marked) -> Marked | None:
    """Returns (text, marks) if the prompt opens a thought that the rendered answer does not have: the thought, or an
    empty one, after the prompt, and then the answer as it is rendered. Otherwise None."""
    thought, (text, marks) = chat.traits.empty_thought, so_far
    if thought is None or not thought.opener or not prompt.endswith(thought.opener):
        return None
    answer_at = len(prompt) - len(thought.opener) + len(thought.before)
    if not text.startswith(prompt.removesuffix(thought.opener) + thought.before):
        return None
    reasoning = message.get("reasoning_content", "")
    if reasoning and (chat.traits.writes_reasoning or not thought.text):
        return None
    written = (reasoning.strip("\n") if thought.text[:1] == "\n" else reasoning) + thought.text
    moved = len(prompt) + len(written) - answer_at
    spans = [(begin + moved, end + moved) for begin, end in marks if end > answer_at]
    return prompt + written + text[answer_at:], [(len(prompt), end) for _, end in spans[:1]] + spans[1:]


THOUGHT_IN_CONTENT = re.compile(r"\s*<think>(.*?)</think>\s*(.+)", re.DOTALL)


# --- no part of the row is lost


def _cuts_thought(content: str, written: str) -> bool:
    """Returns whether a template has cut an answer at a "</think>" that ends no thought."""
    return "</think>" in content and not THOUGHT_IN_CONTENT.fullmatch(content) and content.strip() not in written


_NO_REASONING = (
    "does not write the `reasoning` of message {} (assistant). Fix: take it out of the row, or give a "
    "model.chat_template that writes it"
)


def _check_context(chat: Chat, conversation: Conversation, messages: Messages, full_text: str) -> None:
    """Raises BadRow if the template leaves out tools, tool calls, or a message that is not the assistant's."""
    if conversation.tools:
        try:
            without = chat.jinja.text(messages)
        except BadRow:  # it knows tools so well that it will not do without
            without = None
        if without == full_text:
            raise BadRow(
                f"{chat.name} does not support tools: it leaves the row's `tools` out. Fix: give a model.chat_template "
                "that writes them"
            )
    for i, message in enumerate(conversation.messages):
        calls = [call["function"]["name"] for call in message.tool_calls]
        missing = next((name for name in calls if full_text.count(name) < calls.count(name)), None)
        if missing is not None or (message.tool_calls and chat.traits.calls is None):
            raise BadRow(
                f"{chat.name} does not support tool calls: it leaves out {missing or calls[0]!r} of message {i} "
                "(assistant). Fix: give a model.chat_template that writes them"
            )
        if message.role != "assistant" and not all(_contains(full_text, text) for text in message.texts):
            raise BadRow(
                f"{chat.name} does not write message {i} ({message.role}), {message.content[:40]!r}. Fix: take it "
                "out of the row, or give a model.chat_template that writes it"
            )


def _contains(text: str, content: str) -> bool:
    """Returns whether a text has a content: as it is, with other white space, or as a string of JSON."""
    if content in text:
        return True
    solid = "".join(text.split())
    forms = (content, *(json.dumps(content, ensure_ascii=ascii)[1:-1] for ascii in (False, True)))
    return any("".join(form.split()) in solid for form in forms)
