"""A chat template applied: from messages to text, and what its `{% generation %}` blocks mark."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from finetune.data.chat.template import Template
from finetune.data.samples import BadRow
from finetune.errors import UserError

# What templates that ask for today are told, or tokens would change from one day to the next: the date that Llama 3.1's
# own template names where there is no clock.
DATE = date(2024, 7, 26)
_ASKS = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")

Span = tuple[int, int]  # characters [begin, end) of a text
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


@dataclass(frozen=True)
class Jinja:
    """A chat template and the special tokens that it may name (bos_token, eos_token, ...)."""

    template: Template
    special: Mapping[str, str]

    def text(self, messages: Messages, tools: Tools = (), *, prompt: bool = False) -> str:
        """The rendered text, with the generation prompt behind it if `prompt`."""
        return self._render(messages, tools, prompt, mark=False)[0]

    def marked(self, messages: Messages, tools: Tools = ()) -> tuple[str, list[Span]]:
        """The rendered text, and the spans of its generation blocks; none where the template has no such blocks."""
        return self._render(messages, tools, False, mark=self.template.marks_generation)

    def _render(self, messages: Messages, tools: Tools, prompt: bool, mark: bool) -> tuple[str, list[Span]]:
        """Raises BadRow where the template refuses the conversation, UserError where it is not a template."""
        render_template: Any = render_jinja_template  # annotated as str, returns (texts, spans of each)
        try:
            texts, spans = render_template(
                conversations=[messages],
                tools=[dict(tool) for tool in tools] or None,
                chat_template=dated(self.template.text),
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=mark,
                **self.special,
            )
        except jinja2.TemplateSyntaxError as error:
            where = f"{self.template.name}, line {error.lineno}"
            raise UserError(f"{where}: not a Jinja template: {error.message}") from None
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            # A template refuses what it has no grammar for (a system message, an order of roles) by raising.
            raise BadRow(f"{self.template.name} refuses this conversation: {error}") from None
        return texts[0], [(begin, end) for begin, end in spans[0] if end > begin] if mark else []
