# ruff: noqa: E501 (a template is a line)
"""Chat templates end: every way of looping or growing has a limit, for each row, and normal ones write the same."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import tiny

from finetune.data.chat import limits
from finetune.data.chat.renderer import build_renderer
from finetune.data.chat.template import Jinja, Template
from finetune.data.samples import BadRow, Conversation, Message
from finetune.errors import UserError

LONG = "{% set s = 'x' * 9999 %}"
LOOP = "{% for i in range(99999) %}"
DOUBLED = "{% set ns = namespace(s='xy') %}{% for i in range(60) %}{% set ns.s = ns.s BY ns.s %}{% endfor %}{{ ns.s }}"
LAUGHS = "{% set a0 = ['x', 'x'] %}" + "".join(f"{{% set a{i + 1} = [a{i}, a{i}] %}}" for i in range(39))
MACROS = "{% macro m0() %}x{% endmacro %}" + "".join(
    f"{{% macro m{i}() %}}{{{{ m{i - 1}() }}}}{{{{ m{i - 1}() }}}}{{% endmacro %}}" for i in range(1, 40)
)

ATTACKS = {
    # loops
    "nested loops": LOOP + LOOP + "{% endfor %}{% endfor %}",
    "nested loops that write": LOOP + LOOP + "x{% endfor %}{% endfor %}",
    "loops of three": "{% for i in range(999) %}" * 3 + "{% set x = i %}" + "{% endfor %}" * 3,
    "loops with a condition": LOOP + "{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
    "loops with their own variable": LOOP + "{% for j in range(99999) %}{{ loop.last }}{% endfor %}{% endfor %}",
    "loops over filters": LOOP + "{% for j in range(99999) | map('string') %}{% endfor %}{% endfor %}",
    "loops over a list made before": "{% set l = range(99999) | list %}" + LOOP + "{% for j in l %}{% endfor %}{% endfor %}",
    "loops over a text": LONG + LOOP + "{% for c in s %}{% endfor %}{% endfor %}",
    "loops over keys": "{% set d = {}.fromkeys(range(99999)) %}" + LOOP + "{% for k in d %}{% endfor %}{% endfor %}",
    "a loop in a set block": "{% set x %}" + LOOP + LOOP + "y{% endfor %}{% endfor %}{% endset %}",
    "a recursive loop": "{% for i in range(999) recursive %}{{ loop(range(999)) }}{% endfor %}",
    "a recursive loop that branches": "{% for i in [1, 2] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
    "macros that double": MACROS + "{{ m39() }}",
    "a macro that calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "a macro without end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "two macros without end": "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}",
    "a macro and its caller": "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call m() %}" * 40 + "x" + "{% endcall %}" * 40,
    "filters over lists": LOOP + "{{ range(99999) | map('string') | list | length }}{% endfor %}",
    "selections": LOOP + "{{ range(99999) | select('odd') | list | length }}{% endfor %}",
    # growing
    "a text that doubles by +": DOUBLED.replace("BY", "+"),
    "a text that doubles by ~": DOUBLED.replace("BY", "~"),
    "a text that doubles by %": DOUBLED.replace("BY ns.s", "% 1").replace("ns.s % 1", "'%s%s' % (ns.s, ns.s)"),
    "a text that doubles by format": DOUBLED.replace("ns.s BY ns.s", "'{0}{0}'.format(ns.s)"),
    "a text that doubles by join": DOUBLED.replace("ns.s BY ns.s", "[ns.s, ns.s] | join"),
    "a text that doubles by a method": DOUBLED.replace("ns.s BY ns.s", "''.join([ns.s, ns.s])"),
    "a text that doubles by replace": DOUBLED.replace("ns.s BY ns.s", "ns.s | replace('x', 'xx')"),
    "a text that doubles in a set block": DOUBLED.replace(
        "{% set ns.s = ns.s BY ns.s %}", "{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = t %}"
    ),
    "a text that doubles in a macro": "{% macro m(s, n) %}{% if n %}{{ m(s + s, n - 1) }}{% endif %}{% endmacro %}{{ m('x', 60) }}",
    "a text that doubles in with": "{% with a = 'xxxxxxxxxx' %}" + "".join(
        f"{{% with {b} = {a} * 10 %}}" for a, b in ("ab", "ba") * 6
    ) + "{% endwith %}" * 13,
    "a list that doubles": "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "lists in lists, written": LAUGHS + "{{ a39 }}",
    "lists in lists, as JSON": LAUGHS + "{{ a39 | tojson }}",
    "lists in lists, as text": LAUGHS + "{{ (a39 | string) | length }}",
    "lists in lists, joined": LAUGHS + "{{ a39 | join }}",
    "lists in lists, compared": LAUGHS + LAUGHS.replace("a0", "b0").replace("[a", "[b").replace(", a", ", b").replace("set a", "set b") + "{{ a39 == b39 }}",
    "a product": "{{ 'x' * 10000000000 }}",
    "a product of products": "{{ ('x' * 9999) * 9999 }}",
    "a list's product": "{{ [0] * 10000000000 }}",
    "a product in a loop": LOOP + "{{ 'x' * 9999 }}{% endfor %}",
    "a product that is not written": LOOP + "{% set x = 'x' * 99999 %}{% endfor %}",
    "a power": "{{ 9 ** 9 ** 9 ** 9 }}",
    "a number that is squared": "{% set ns = namespace(n=9) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "%": "{{ '%10000000000d' % 1 }}",
    "% of nine digits": "{{ '%999999999d' % 1 }}",
    "% of places": "{{ '%*d' % (999999999, 1) }}",
    "% of a million, many times": "{{ ('%999999d' * 999) % ((1,) * 999) }}",
    "% of one name": LONG + "{{ ('%(s)s' * 99999) % {'s': s} }}",
    "format of a width": "{{ '{:999999999}'.format(1) }}",
    "format of a width that is given": "{{ '{:{}}'.format(1, 999999999) }}",
    "format_map": "{{ '{a:{b}}'.format_map({'a': 1, 'b': 999999999}) }}",
    "format of one place": LONG + "{{ ('{0}' * 99999).format(s) }}",
    "the filter format": "{{ '%999999999d' | format(1) }}",
    "center": "{{ 'x' | center(10000000000) }}",
    "center in a loop": LOOP + "{{ 'x' | center(9999) }}{% endfor %}",
    "center by map": "{{ range(99999) | map('string') | map('center', 9999) | list | length }}",
    "ljust": "{{ 'x'.ljust(10000000000) }}",
    "rjust in a loop": LOOP + "{% set x = 'x'.rjust(99999) %}{% endfor %}",
    "zfill": "{{ 'x'.zfill(10000000000) }}",
    "expandtabs": "{{ ('\t' * 9999).expandtabs(999999) }}",
    "replace": LONG + "{{ s | replace('x', s) }}",
    "replace of nothing": LONG + "{{ s | replace('', s) }}",
    "the method replace": LONG + "{{ s.replace('x', s) }}",
    "translate": LONG + "{{ s.translate({120: s}) }}",
    "join": LONG + "{{ s | join(s) }}",
    "the method join": LONG + "{{ s.join(s) }}",
    "join of a list": LONG + "{{ ([s] * 9999) | join }}",
    "indent": "{{ ('x\\n' * 9999) | indent(9999) }}",
    "wordwrap": LONG + "{{ s | wordwrap(1, wrapstring=s) }}",
    "urlize": LONG + "{{ ('http://www.a.org ' * 9999) | urlize(target=s) }}",
    "tojson": "{{ {'a': [1]} | tojson(indent=100000000) }}",
    "tojson of separators": LONG + "{{ range(9999) | list | tojson(separators=[s, s]) }}",
    "lipsum": "{{ lipsum(99999999) }}",
    "lipsum of words": "{{ lipsum(n=100, min=9999999, max=9999998) }}",
    "lipsum in a loop": LOOP + "{{ lipsum(100) }}{% endfor %}",
    "batch": "{{ [1] | batch(9999999, 'x') | list | length }}",
    "slice": "{{ [1] | slice(9999999) | list | length }}",
    "round": "{{ 1.5 | round(999999, 'floor') }}",
    "sum of lists": "{% set l = range(9999) | list %}{{ ([l] * 9999) | sum(start=[]) | length }}",
    "a large range": "{{ range(10 ** 9) }}",
    "a filter block": "{% filter center(999999999) %}x{% endfilter %}",
    "constants in loops": "{% for i in range(99999) %}{% for j in range(99) %}" + "x" * 999 + "{% endfor %}{% endfor %}",
    "the row's text, many times": LOOP + "{{ messages[0].content * 100 }}{% endfor %}",
}  # fmt: skip
ROW = [{"role": "user", "content": "a word, " * 50}]


QUICK = (
    "nested",
    "loops over filters",
    "lists in lists, written",
    "a text",
    "center",
    "format",
    "%",
    "join",
    "tojson",
    "lipsum",
)
LATER = [n for n in ATTACKS if not n.startswith(QUICK) or n.startswith("a text that doubles by j")]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] if n in LATER else []) for n in ATTACKS])
@pytest.mark.timeout(60)
def test_a_template_that_loops_or_grows_is_stopped(name: str) -> None:
    jinja, begun = Jinja(Template(ATTACKS[name], "evil.jinja"), {}), time.thread_time()
    with pytest.raises((UserError, BadRow), match=r"^evil\.jinja ") as caught:
        jinja.text(ROW)
    assert time.thread_time() - begun < 2 * limits.MAX_S
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", ["nested loops", "center", "lists in lists, written", "lipsum", "% of nine digits"])
def test_it_is_stopped_for_a_later_row_as_well(name: str) -> None:
    """The first rows, and the conversations of `check_template`, do not reach it."""
    text = tiny.CHATML + "{% if messages[0].content == 'late' %}" + ATTACKS[name] + "{% endif %}"
    renderer = build_renderer(tiny.tokenizer(), Template(text, "evil.jinja"))
    turns = [Conversation((Message("user", said), Message("assistant", "yes"))) for said in ("early", "late")]
    assert renderer.draw(turns[0])
    with pytest.raises(UserError, match=r"^evil\.jinja is not rendered for this row: "):
        renderer.draw(turns[1])
    assert renderer.draw(turns[0])  # what is left of a row is not the next one's


def test_reasoning_is_rendered_within_limits() -> None:
    """transformers' own function has none."""
    jinja = Jinja(Template(ATTACKS["nested loops"], "evil.jinja"), {})
    with pytest.raises(UserError, match="steps"):
        jinja.text([{"role": "assistant", "content": "x", "reasoning_content": "y"}])


def test_long_rows_are_rendered_whole() -> None:
    jinja = Jinja(Template(tiny.CHATML, "t"), {})
    content = "word " * 3_000_000  # more than `MAX_TEXT` characters
    assert jinja.text([{"role": "user", "content": content}]) == f"<|im_start|>user\n{content}<|im_end|>"
    many = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 20_000
    assert jinja.text(many).count("<|im_end|>") == 40_000


def test_threads_have_limits_of_their_own() -> None:
    jinja, texts = Jinja(Template(LOOP + "{{ i % 7 }}{% endfor %}", "t"), {}), list[Any]()
    threads = [threading.Thread(target=lambda: texts.append(jinja.text(ROW))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["".join(str(i % 7) for i in range(99999))] * 4


def test_limits_are_those_of_a_row_after_other_threads_have_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards of another thread would count every row of this one together."""
    monkeypatch.setattr(limits, "MAX_TEXT", 1000)
    jinja, messages = (
        Jinja(Template(tiny.CHATML + "{# of several threads #}", "t"), {}),
        [{"role": "user", "content": "w" * 300}],
    )
    expected = jinja.text(messages)
    for _ in range(2):
        thread = threading.Thread(target=jinja.text, args=(messages,))
        thread.start()
        thread.join()
    assert [jinja.text(messages) for _ in range(100)] == [expected] * 100
