"""A chat template and its rendering: from messages to text, with the spans of its `{% generation %}` blocks."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property, lru_cache
from typing import Any

import jinja2
from transformers.utils import chat_template_utils

from finetune.data.chat.limits import Limits, compile_with_limits
from finetune.data.samples import BadRow
from finetune.errors import UserError

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")

# The date that templates get for today's, or tokens would change from one day to the next: the one in Llama 3.1's own
# template for systems without a clock.
DATE = date(2024, 7, 26)
_ASKS = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")

_REASONING_FIRST = ("reasoning_content", "thinking", "reasoning")  # its names that transformers knows, in its order

Span = tuple[int, int]  # characters [begin, end) of a text
Marked = tuple[str, list[Span]]  # a text and the spans of its generation blocks
Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]

QUESTION, ANSWER, THOUGHT = "qUeStIoN", "aNsWeR", "tHoUgHt"  # texts that no template contains


@dataclass(frozen=True)
class Template:
    """A chat template and its name in messages."""

    text: str
    name: str
    tool_use: str | None = None  # template of conversations with tools, if the tokenizer has several

    @cached_property
    def marks_generation(self) -> bool:
        """Returns whether the template itself marks the assistant's text, by `{% generation %}`."""
        return GENERATION_TAG.search(self.text) is not None


@lru_cache
def dated(template: str) -> str:
    """Returns a template with `DATE` in the place of today's; calls without a literal format stay as they are.

    >>> dated("{{ strftime_now('%d %b %Y') }}")
    "{{ '26 Jul 2024' }}"
    """
    return _ASKS.sub(lambda call: call[1] + DATE.strftime(call[2]) + call[1], template)


def asks_for_today(template: str) -> bool:
    """Returns whether a template asks for today's date even after `dated`."""
    return "strftime_now(" in dated(template)


_NUMBERS = itertools.count()


@lru_cache(maxsize=256)
def _compiled(template: str, _thread: int) -> tuple[Any, Limits]:
    """Returns the template in transformers' own sandbox, with limits, for one thread.

    transformers' public function renders in the same one, but without limits, and spends a third of the time on copies
    of all values, which are plain JSON here, and of the sandbox's globals, out of a chain of dicts.
    """
    # transformers remembers the environment of each text that it compiled. This one is for one template and thread: the
    # guards of another would count in its place. So its text, a comment, is a new one.
    environment = chat_template_utils._compile_jinja_template(f"{{# {next(_NUMBERS)} #}}").environment
    return compile_with_limits(environment, dated(template))


@dataclass(frozen=True)
class Jinja:
    """A chat template, the special tokens that it may name (bos_token, eos_token, ...), and a row's arguments."""

    template: Template
    special: Mapping[str, str]
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def wants_parts(self) -> bool:
        """Returns whether the template writes a content only as a list of parts (SmolVLM)."""
        return _wants_parts(self.template, tuple(self.special.items()))

    def text(self, messages: Messages, tools: Tools = (), *, prompt: bool = False) -> str:
        """Returns the rendered text, with the generation prompt after it if `prompt`."""
        return self.marked(messages, tools, prompt=prompt, mark=False)[0]

    def marked(self, messages: Messages, tools: Tools = (), *, prompt: bool = False, mark: bool = True) -> Marked:
        """Returns the rendered text, and the spans of its generation blocks, empty if the template has none.

        Raises BadRow if the template refuses the conversation, UserError if it is not a template.
        """
        variables = {
            "messages": [_in_parts(message) for message in messages] if self.wants_parts else messages,
            "tools": [dict(tool) for tool in tools] or None,
            "documents": None,
            "add_generation_prompt": prompt,
            **self.special,
            **self.arguments,
        }
        try:
            text, spans = _rendered(self.template, variables, mark and self.template.marks_generation)
        except UserError as error:
            raise UserError(
                f"{self.template.name} is not rendered for this row: {error}. Fix: simplify the template, or give "
                "another one"
            ) from None
        except jinja2.TemplateSyntaxError as error:
            where = f"{self.template.name}, line {error.lineno}"
            why = str(error.message).rstrip(".")
            raise UserError(f"{where}: not a Jinja template: {why}. Fix: correct the template") from None
        except (RecursionError, MemoryError) as error:
            does = "calls itself without end" if isinstance(error, RecursionError) else "fills the memory"
            raise UserError(f"{self.template.name} {does}. Fix: correct the template, or give another one") from None
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError) as error:
            # A template refuses unsupported input (a system message, an order of roles) by raising.
            raise BadRow(f"{self.template.name} refuses this conversation: {error}") from None
        return text, [(begin, end) for begin, end in spans if end > begin]


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


@lru_cache(maxsize=64)
def _wants_parts(template: Template, special: tuple[tuple[str, str], ...]) -> bool:
    if "'text'" not in template.text and '"text"' not in template.text:  # it knows no parts
        return False
    variables = {"tools": None, "documents": None, "add_generation_prompt": False, **dict(special)}
    question = probe(1)[:1]
    try:
        plain, parts = (
            _rendered(template, {**variables, "messages": messages}, False)[0]
            for messages in (question, [_in_parts(message) for message in question])
        )
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, RecursionError, MemoryError, UserError):
        return False  # rendering it again says why
    return QUESTION not in plain and QUESTION in parts


def _rendered(template: Template, variables: dict[str, Any], mark: bool) -> Marked:
    """Returns the text and its marked spans. Raises UserError beyond the limits, and Jinja's own errors."""
    program, limits = _compiled(template.text, threading.get_ident())
    messages = []
    for message in variables["messages"]:  # with all names that templates know a reasoning by, as transformers has them
        reasoning = next((message[name] for name in _REASONING_FIRST if message.get(name) is not None), None)
        names = {} if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}
        messages.append(names or message)
    variables = {**variables, "messages": messages}
    limits.begin(variables)
    if not mark:
        return program.render(variables), []
    blocks: list[str] = []
    spans: list[Span] = []
    # As transformers does: a generation block begins at the length of the blocks so far.
    with program.environment.activate_tracker(blocks, spans):
        for block in program.generate(variables):
            blocks.append(block)
    return "".join(blocks), spans


def probe(turns: int) -> list[dict[str, Any]]:
    """Returns questions and answers whose texts no template contains."""
    return [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}] * turns
