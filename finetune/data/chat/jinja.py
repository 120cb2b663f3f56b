"""A chat template applied: from messages to text, and what its `{% generation %}` blocks mark."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from typing import Any

import jinja2
from transformers.utils import chat_template_utils

from finetune.data.chat.template import Template
from finetune.data.samples import BadRow
from finetune.errors import UserError

# What templates that ask for today are told, or tokens would change from one day to the next: the date that Llama 3.1's
# own template names where there is no clock.
DATE = date(2024, 7, 26)
_ASKS = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")

REASONING = frozenset({"reasoning_content", "thinking", "reasoning"})  # its names that transformers knows

Span = tuple[int, int]  # characters [begin, end) of a text
Marked = tuple[str, list[Span]]  # a text and what its generation blocks wrote
Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]


@lru_cache
def dated(template: str) -> str:
    """A template with `DATE` in the place of today's; calls without a literal format stay as they are.

    >>> dated("{{ strftime_now('%d %b %Y') }}")
    "{{ '26 Jul 2024' }}"
    """
    return _ASKS.sub(lambda call: call[1] + DATE.strftime(call[2]) + call[1], template)


def asks_for_today(template: str) -> bool:
    """Whether a template still does after `dated`."""
    return "strftime_now(" in dated(template)


@lru_cache
def _compiled(template: str) -> Any:
    """The template in transformers' own sandbox; None where this version of it does not give it.

    transformers' public function renders in the same one, but spends a third of the time on copies: of all values,
    which are plain JSON here, and of what the sandbox knows, out of a chain of dicts.
    """
    compile_template: Any = getattr(chat_template_utils, "_compile_jinja_template", None)
    environment: Any = compile_template(dated(template)).environment if compile_template else None
    if not hasattr(environment, "activate_tracker"):  # what `{% generation %}` marks
        return None
    compiled = environment.from_string(dated(template))
    compiled.globals = dict(compiled.globals)
    return compiled


@dataclass(frozen=True)
class Jinja:
    """A chat template and the special tokens that it may name (bos_token, eos_token, ...)."""

    template: Template
    special: Mapping[str, str]

    def text(self, messages: Messages, tools: Tools = (), *, prompt: bool = False) -> str:
        """The rendered text, with the generation prompt behind it if `prompt`."""
        return self._render(messages, tools, prompt, mark=False)[0]

    def marked(self, messages: Messages, tools: Tools = ()) -> Marked:
        """The rendered text, and the spans of its generation blocks; none where the template has no such blocks."""
        return self._render(messages, tools, False, mark=self.template.marks_generation)

    def _render(self, messages: Messages, tools: Tools, prompt: bool, mark: bool) -> Marked:
        """Raises BadRow where the template refuses the conversation, UserError where it is not a template."""
        given = {
            "messages": messages,
            "tools": [dict(tool) for tool in tools] or None,
            "documents": None,
            "add_generation_prompt": prompt,
            **self.special,
        }
        try:
            compiled = None if _has_reasoning(messages) else _compiled(self.template.text)
            if compiled is None:
                text, spans = _by_transformers(self.template, given, mark)
            elif mark:
                text, spans = _tracked(compiled, given)
            else:
                text, spans = compiled.render(given), []
        except jinja2.TemplateSyntaxError as error:
            where = f"{self.template.name}, line {error.lineno}"
            raise UserError(f"{where}: not a Jinja template: {error.message}") from None
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            # A template refuses what it has no grammar for (a system message, an order of roles) by raising.
            raise BadRow(f"{self.template.name} refuses this conversation: {error}") from None
        return text, [(begin, end) for begin, end in spans if end > begin]


def _has_reasoning(messages: Messages) -> bool:
    """Whether transformers would give a message's reasoning the other names that templates know it by."""
    return any(not REASONING.isdisjoint(message) for message in messages)


def _by_transformers(template: Template, given: Mapping[str, Any], mark: bool) -> Marked:
    """By the public function, which wants conversations in the place of `messages`."""
    render: Any = chat_template_utils.render_jinja_template  # annotated as str, returns (texts, spans of each)
    others = {name: value for name, value in given.items() if name != "messages"}
    texts, spans = render(
        [given["messages"]], chat_template=dated(template.text), return_assistant_tokens_mask=mark, **others
    )
    return texts[0], spans[0] if mark else []


def _tracked(compiled: Any, given: Mapping[str, Any]) -> Marked:
    """As transformers does it: the blocks so far are how a generation block knows where it begins."""
    blocks: list[str] = []
    spans: list[Span] = []
    with compiled.environment.activate_tracker(blocks, spans):
        for block in compiled.generate(given):
            blocks.append(block)
    return "".join(blocks), spans
