"""Templates render as transformers' public function renders them: texts, generation blocks, and what they refuse."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jinja2
import pytest
from data_helpers import family_template
from transformers.utils.chat_template_utils import render_jinja_template

from finetune.data.chat import template as chat_template
from finetune.data.chat.template import Jinja, Template
from finetune.data.chat.template_traits import CallForm, Traits
from finetune.data.samples import BadRow, Conversation, Message
from finetune.errors import UserError

from .test_data_templates import CONVERSATIONS, FAMILIES

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
AWKWARD = Conversation(
    (
        Message("user", "<b>&amp; \"two\" 'and' {{ two }} {% break %} \u2028é😀\\n"),
        Message("assistant", "\n\n fine \n"),
        Message("user", "  "),
        Message("assistant", "</s><s> 4\t", reasoning="<i> 2 & 2"),
    )
)
SAMPLES = {**CONVERSATIONS, "awkward": AWKWARD}
GENERATION = "{% generation %}{{ message.content }}</s>{% endgeneration %}"

CRAFTED = {
    "tojson": "{{ messages | tojson }}{{ tools | tojson(indent=2) }}{{ messages[0] | tojson(sort_keys=true) }}",
    "tojson of letters": "{{ messages[0].content | tojson(ensure_ascii=true, separators=(',', ':')) }}",
    "keys in their order": "{% for m in messages %}{% for key, value in m.items() %}{{ key }}={{ value }};{% endfor %}"
    "{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{{ m.role }}"
    "{% if loop.index0 == 2 %}{% break %}{% endif %}{% endfor %}",
    "white space of blocks": "a\n  {% if true %}\n  b\n  {% endif %}\nc\n\n",
    "a macro": "{% macro m(message) %}[{{ message.role }}]{% endmacro %}{% for x in messages %}{{ m(x) }}{% endfor %}",
    "a namespace": "{% set n = namespace(i=0) %}{% for m in messages %}{% set n.i = n.i + 1 %}{% endfor %}{{ n.i }}",
    "names that are not there": "{{ nothing }}|{{ messages[0].nothing }}|{{ documents }}|{{ tools is defined }}",
    "blocks": "{% for message in messages %}{{ message.role }}:" + GENERATION + "\n{% endfor %}",
    "blocks in a macro": "{% macro m(message) %}" + GENERATION + "{% endmacro %}"
    "{% for message in messages %}{{ m(message) }}{% endfor %}",
    "an empty block": "{% generation %}{% endgeneration %}{{ messages[0].content }}",
    "no date but the literal": "{{ strftime_now('%Y') }}",
    # refused
    "an exception": "{{ raise_exception('no ' + messages[0].role) }}",
    "an exception in a block": "{% generation %}{{ raise_exception('no') }}{% endgeneration %}",
    "a value of none": "{{ none + 'a' }}",
    "a value of nothing": "{{ nothing.more }}",
    "a change of a message": "{{ messages[0].update(content='') }}",
    "a change of the messages": "{{ messages.append(1) }}",
    "a name of Python's": "{{ messages.__class__.__mro__ }}",
    "a name of Python's in a namespace": "{% set n = namespace(__init__=1) %}{{ n }}",
    "a number": "{{ 'two' | int(base=99) }}{{ [3, 'a'] | sort }}",
    "no such filter": "{% if false %}{{ 1 | nothing }}{% endif %}{{ 1 | nothing }}",
    "no template": "{% if %}",
    "no end": "{% for m in messages %}",
}


def theirs(template: str, messages: Any, tools: Any, *, prompt: bool = False, mark: bool = False) -> Any:
    """What transformers makes of it: (text, spans that are not empty), or its error."""
    render: Any = render_jinja_template
    try:
        rendered, spans = render(
            conversations=[messages],
            tools=[dict(tool) for tool in tools] or None,
            chat_template=chat_template.dated(template),
            add_generation_prompt=prompt,
            return_assistant_tokens_mask=mark,
            **SPECIAL,
        )
    except jinja2.TemplateSyntaxError as error:
        why = str(error.message).rstrip(".")
        return UserError, f"it, line {error.lineno}: not a Jinja template: {why}. Fix: correct the template"
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        return BadRow, f"it refuses this conversation: {error}"
    return rendered[0], [span for span in (spans[0] if mark else []) if span[0] < span[1]]


def ours(template: str, messages: Any, tools: Any, *, prompt: bool = False, mark: bool = False) -> Any:
    made = Jinja(Template(template, "it"), SPECIAL)
    try:
        return made.marked(messages, tools) if mark else (made.text(messages, tools, prompt=prompt), [])
    except (BadRow, UserError) as error:
        return type(error), str(error)


def cases(sample: Conversation) -> Iterator[tuple[Any, Any]]:
    """(messages, tools): every beginning of the conversation, with its calls in the forms that templates want."""
    for no_content, as_text in itertools.product(("", None), (False, True)):
        messages = Traits(calls=CallForm(no_content, as_text)).as_dicts(sample)
        for end in range(1, len(messages) + 1):
            yield messages[:end], sample.tools


def assert_same(template: str) -> None:
    marks = Template(template, "it").marks_generation
    for sample in SAMPLES.values():
        for messages, tools in cases(sample):
            given = template, messages, tools
            assert ours(*given) == theirs(*given)
            assert ours(*given, prompt=True) == theirs(*given, prompt=True)
            assert ours(*given, mark=True) == theirs(*given, mark=marks)


@pytest.mark.parametrize("tags", [False, True], ids=["as published", "tagged"])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "smolvlm"])  # it takes parts, which ours makes
def test_families(name, tags):
    assert_same(family_template(name, tags=tags))


@pytest.mark.parametrize("name", CRAFTED)
def test_what_templates_may_say(name):
    assert_same(CRAFTED[name])


def test_a_refusal_leaves_nothing_behind():
    """The next conversation's blocks are found where they are."""
    template = "{% generation %}{{ messages[0].content + '' }}{% endgeneration %}"
    assert ours(template, [{"role": "user", "content": None}], (), mark=True)[0] is BadRow
    assert ours(template, [{"role": "user", "content": "a"}], (), mark=True) == ("a", [(0, 1)])
