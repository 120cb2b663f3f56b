"""Limits on a chat template's computation for a row, whatever it loops over or repeats.

A template is an untrusted program. Its syntax tree gets guards wherever it can loop or grow: steps of every loop,
call and filter that goes through a list are counted, characters that it writes, stores or creates as well, and
time from the 10,000th step on. The rest is unchanged, so a template within its limits writes the same text.

    {% for m in messages %}{{ m.content }}{% set x = x + x %}{% endfor %}
                 |               |                     |
               steps           written               stored

An expression between guards is bounded by its length: each part of it is a constant, of the row, or was stored.

The guards are 4 to 15 % of the time to encode a row. Child processes under limits of time and memory instead were
measured and rejected: a row takes 11 to 37 % longer than with guards, each child starts in 2.4 s of a processor
(transformers' sandbox) and takes 72 MB, and every process that renders would need one: workers, ranks, `check`, `chat`
and `serve`.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinMethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import LoopContext
from jinja2.visitor import NodeTransformer

from finetune.errors import UserError

MAX_TEXT = 10_000_000  # characters or items that a template may make, in addition to `TIMES` those of the row
TIMES = 20
MAX_CONSTANTS = 200_000_000  # characters of the template's own that loops may write, if each took every branch
MAX_STEPS = 3_000_000  # turns of loops and, with `_CALL` each, calls and filters; and `TIMES` the row's characters
_CALL = 5
MAX_S = 20.0  # of a thread's own time
_TIMED_EVERY = 10_000  # steps
_MAX_BITS = 1024  # of an integer
_MAX_WIDTH = 1000  # of what JSON is indented or separated by, and of decimal places
_WIDE = 8  # terms of a sum between guards

# Methods whose results are not longer than their text.
_SHORTER = frozenset({"strip", "lstrip", "rstrip", "split", "startswith", "endswith", "get", "items", "keys"})
_OUTPUT, _STORED, _STEPS = "finetune_written", "finetune_stored", "finetune_steps"
_CONTAINERS = (list, tuple, dict, set, frozenset)


class Limits:
    """Remaining limits of the row that is rendered. One thread renders with it at a time."""

    def __init__(self, nests: bool) -> None:
        """Sets the limits to 0 before the first row: Jinja computes constants while compiling, and uncounted."""
        self.nests = nests  # whether the template puts lists into lists; else they are those of the row
        self.begin({})
        self._chars = self._steps = -1
        self._is_extended = True

    def begin(self, variables: Mapping[str, Any]) -> None:
        """Starts over, for a row with these variables."""
        self._chars, self._steps, self._until = MAX_TEXT, MAX_STEPS, 0.0
        self._timed_at = MAX_STEPS - _TIMED_EVERY
        self._constants, self._widest = MAX_CONSTANTS, 0
        self._variables, self._is_extended = variables, False

    def charge(self, count: int) -> None:
        """Counts characters or items that are about to be created. Raises UserError beyond the limit."""
        self._chars -= count
        if self._chars < 0:
            self._extend()

    def step(self, count: int = 1) -> None:
        """Counts steps that are about to be taken. Raises UserError beyond the limits."""
        self._steps -= count
        if self._steps < self._timed_at:
            now, self._timed_at = time.thread_time(), self._steps - _TIMED_EVERY
            self._until = self._until or now + MAX_S
            if self._steps < 0:
                self._extend()
            if now > self._until:
                raise UserError(f"it takes more than {MAX_S:.0f} s")

    def _extend(self) -> None:
        """Extends the limits by the row's size, computed only if needed: a row may have long texts or many steps."""
        if not self._is_extended:
            self._is_extended = True
            size = _size(self._variables, 1 << 40)
            self._chars += TIMES * size
            self._steps += TIMES * size
        if self._chars < 0:
            raise UserError(f"it makes a text of more than {MAX_TEXT:,} characters")
        if self._steps < 0:
            raise UserError(f"it takes more than {MAX_STEPS:,} steps")

    # --- guards in the tree

    def written(self, value: Any) -> Any:
        """Guards text that is written, or becomes part of a text."""
        if type(value) is str:
            self._chars -= len(value)
            if self._chars < 0:
                self._extend()
        elif isinstance(value, _CONTAINERS):
            self.charge(_size(value, self._chars))
        return value

    def stored(self, value: Any) -> Any:
        """Guards an assigned value. A list may hold itself many times over, through others."""
        if isinstance(value, _CONTAINERS):
            self.charge(_size(value, self._chars) if self.nests else len(value))
        elif isinstance(value, str):
            self.charge(len(value))
        return value

    def looped(self, iterable: Any, data: int) -> Any:
        """Guards the items of a loop whose body has `data` characters of its own."""
        self._widest = max(self._widest, data)
        if hasattr(iterable, "__next__"):
            return self._counted(iterable, data)
        if hasattr(iterable, "__len__"):
            self._turn(len(iterable), data)
        return iterable

    def _turn(self, count: int, data: int) -> None:
        self.step(count)
        self._constants -= count * data
        if self._constants < 0:
            raise UserError(f"its loops write more than {MAX_CONSTANTS:,} characters")

    def _counted(self, iterator: Iterator[Any], data: int = 0) -> Iterator[Any]:
        for item in iterator:
            self._turn(1, data)
            if type(item) is str:
                self.charge(len(item))
            yield item

    # --- operators, filters and calls

    def binop(self, _context: Any, operator: str, left: Any, right: Any) -> Any:
        """`*`, `**` and `%` as Jinja computes them."""
        if operator == "%":
            if isinstance(left, str):
                self._check_format(left, [right], "%")
            return left % right
        if isinstance(left, int | float) and isinstance(right, int | float):
            bits = [one.bit_length() if isinstance(one, int) else 0 for one in (left, right)]
            if sum(bits) > _MAX_BITS or (operator == "**" and (abs(right) > 1000 or bits[0] * abs(right) > _MAX_BITS)):
                raise UserError("it computes a number that is too large")
            return left * right if operator == "*" else left**right
        if operator == "**":
            return left**right
        for one, count in ((left, right), (right, left)):
            if isinstance(count, int) and isinstance(one, str | list | tuple | bytes):
                self.charge(len(one) * max(count, 0))
        return left * right

    def filtered(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a filter of Jinja that checks the size of its result before it creates it."""

        def guarded(*arguments: Any, **named: Any) -> Any:
            # The first is what Jinja passes to filters that want its context.
            given = arguments[1:] if hasattr(original, "jinja_pass_arg") else arguments
            values = [*given, *named.values()]
            self.step(_CALL)
            self._check_numbers(values)
            if name in ("map", "select", "reject", "selectattr", "rejectattr", "unique", "items"):
                return self._counted(iter(original(*arguments, **named)))
            value, others = given[0], values[1:]
            if name == "join":
                arguments = self._joined(arguments, given, others)
            elif name in ("replace", "indent", "wordwrap", "urlize"):
                self._check_inserted(name, value, others)
            elif name == "format":
                self._check_format(str(value), others, "%")
            elif name in ("round", "batch", "slice"):
                most = _MAX_WIDTH if name == "round" else MAX_TEXT // 100
                if any(isinstance(one, int) and abs(one) > most for one in others):
                    raise UserError(f"`{name}` gets a number of more than {most:,}")
            elif name == "sum" and any(isinstance(one, list | tuple) for one in others):
                items = list(value)
                for item in items:  # Python copies the sum so far for each
                    self.charge(_size(item, self._chars) * len(items))
                arguments = (*arguments[: len(arguments) - len(given)], items, *given[1:])
            elif isinstance(value, _CONTAINERS) and name not in ("center", "truncate"):  # written with all it holds
                self.charge(_size(value, self._chars))
            if name == "tojson":
                for one in itertools.chain.from_iterable(
                    one if isinstance(one, list | tuple) else [one] for one in others
                ):
                    if (len(one) if isinstance(one, str) else one or 0) > _MAX_WIDTH:
                        raise UserError(f"`tojson` is to indent or separate by more than {_MAX_WIDTH:,} characters")
            return original(*arguments, **named)

        for attribute in ("jinja_pass_arg", "jinja_async_variant"):
            if hasattr(original, attribute):
                setattr(guarded, attribute, getattr(original, attribute))
        return guarded

    def _joined(self, arguments: tuple[Any, ...], given: tuple[Any, ...], others: list[Any]) -> tuple[Any, ...]:
        """Returns the arguments of `join`, with its items as a list: they may have been an iterator."""
        items = list(given[0]) if isinstance(given[0], Iterable) and not isinstance(given[0], str) else given[0]
        between = max((len(one) for one in others if isinstance(one, str)), default=0)
        if isinstance(items, list):
            self.charge(sum(_size(item, MAX_TEXT) for item in items) + between * len(items))
        else:
            self._check_inserted("join", items, others)
        at = len(arguments) - len(given)
        return (*arguments[:at], items, *given[1:])

    def _check_inserted(self, name: str, value: Any, others: list[Any]) -> None:
        """Charges for a text into which another one, or space, is put at many places."""
        text = value if isinstance(value, str) else " " * min(_size(value, self._chars), MAX_TEXT)
        strings = [one for one in others if isinstance(one, str)]
        numbers = [abs(one) for one in others if isinstance(one, int)]
        longest = max(map(len, strings), default=0)
        if name == "replace":
            old = strings[0] if strings else ""
            self.charge((text.count(old) if old else len(text) + 1) * (len(strings[1]) if strings[1:] else 0))
        elif name == "indent":
            self.charge((text.count("\n") + 1) * max([longest, *numbers]))
        elif name == "urlize":
            self.charge((text.count(".") + text.count("@")) * longest)
        elif name == "expandtabs":
            self.charge(text.count("\t") * max(numbers, default=8))
        else:  # wordwrap, translate, join: anywhere
            self.charge(len(text) * longest)

    def _check_numbers(self, values: Iterable[Any]) -> None:
        for one in values:
            if isinstance(one, int) and abs(one) > MAX_TEXT:
                raise UserError(f"a filter or function gets a number of more than {MAX_TEXT:,}")

    def _check_format(self, pattern: str, values: Iterable[Any], sign: str) -> None:
        """Charges for a pattern with places for values, each of which may be used at every place or have a width."""
        digits = max(map(len, re.findall(r"\d+", pattern)), default=0)
        if digits > 6:
            raise UserError("it formats a text to a width of more than 1,000,000 characters")
        flat = list(itertools.chain.from_iterable(one if isinstance(one, tuple) else [one] for one in values))
        self._check_numbers(flat)
        widest = max((abs(one) for one in flat if isinstance(one, int)), default=0)
        longest = max((_size(one, MAX_TEXT) for one in flat), default=0)
        is_width = "*" in pattern or "{" in pattern
        places = pattern.count(sign)
        self.charge(places * max(longest, widest if is_width else 0, 10**digits if digits > 3 else 0))

    def call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the sandbox's call: of macros, which may call each other, and of methods of texts."""

        def guarded(__context: Any, __obj: Any, *arguments: Any, **named: Any) -> Any:
            self._steps -= _CALL
            if self._steps < self._timed_at:
                self.step(0)
            if type(__obj) is BuiltinMethodType and __obj.__name__ in _SHORTER:
                return original(__context, __obj, *arguments, **named)
            if arguments or named:
                arguments = self._called(__obj, arguments, named)
            result = original(__context, __obj, *arguments, **named)
            if type(result) is str:
                self.charge(len(result))
            return result

        return guarded

    def _called(self, function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        if isinstance(function, LoopContext):  # a loop that calls itself
            return (self.looped(arguments[0], self._widest), *arguments[1:]) if arguments else arguments
        values = [*arguments, *named.values()]
        self._check_numbers(values)
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps `format`
        text, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(text, str):
            items = [item for value in values if isinstance(value, Mapping) for item in value.values()]
            if name in ("format", "format_map"):
                self._check_format(text, values if name == "format" else items, "{")
            elif name == "join":
                return self._joined(arguments, arguments, [text])
            elif name in ("replace", "expandtabs"):
                self._check_inserted(name, text, values)
            elif name == "translate":
                self._check_inserted(name, text, list(map(str, items)))
        elif name == "generate_lorem_ipsum":
            count = 1
            for one in values:
                count *= max(one, 1) if isinstance(one, int) else 1
            self.charge(count * (100 if len(values) < 4 else 1) * 10)
        else:
            self.nests = self.nests or name == "fromkeys"
            for value in values:
                self.stored(value)
        return arguments


def _size(value: Any, most: int) -> int:
    """Returns the characters and items in a value, with all that it holds, as often as it holds it; a little more than
    `most` if there are more."""
    total, waiting = 0, [value]
    while waiting and total <= most:
        one = waiting.pop()
        if isinstance(one, str):
            total += len(one)
        elif isinstance(one, Mapping):
            total += len(one)
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, _CONTAINERS):
            total += len(one)
            waiting += one
        else:
            total += 1
    return total


# --- the tree


class _Guards(NodeTransformer):
    """Puts guards into a template's syntax tree."""

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [one if isinstance(one, nodes.TemplateData | nodes.Const) else _guard(one) for one in node.nodes]
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        data = sum(len(one.data) for one in node.find_all(nodes.TemplateData))
        data += sum(len(one.value) for one in node.find_all(nodes.Const) if isinstance(one.value, str))
        self.generic_visit(node)
        node.iter = _guard(node.iter, _STEPS, nodes.Const(data))
        return node

    def visit_Assign(self, node: nodes.Assign) -> nodes.Node:
        self.generic_visit(node)
        node.node = node.node if isinstance(node.node, nodes.Const) else _guard(node.node, _STORED)
        return node

    def visit_With(self, node: nodes.With) -> nodes.Node:
        self.generic_visit(node)
        node.values = [_guard(one, _STORED) for one in node.values]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [one if isinstance(one, nodes.Const) else _guard(one) for one in node.nodes]
        return node

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        self.generic_visit(node)
        terms, one = 1, node.left
        while isinstance(one, nodes.Add):
            terms, one = terms + 1, one.left
        if terms % _WIDE == 0 or isinstance(node.right, nodes.Add):
            node.left, node.right = _guard(node.left, _STORED), _guard(node.right, _STORED)
        return node


def _guard(node: Any, name: str = _OUTPUT, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(arguments), [], None, None, lineno=node.lineno)


_VARIABLE = (nodes.Name, nodes.Call, nodes.Filter, nodes.FilterBlock)
_NESTING = {"dict", "batch", "slice", "groupby"}

# Filters that make more than they get, or go through a list with another filter.
_GROWING = (
    *("batch", "center", "e", "escape", "forceescape", "format", "indent", "items", "join", "list", "map", "pprint"),
    *("reject", "rejectattr", "replace", "round", "select", "selectattr", "slice", "string", "sum", "tojson"),
    *("truncate", "unique", "urlize", "wordwrap", "xmlattr"),
)


def compile_with_limits(environment: Any, source: str) -> tuple[Any, Limits]:
    """Returns a template and the limits that each rendering begins with.

    environment: a sandbox of Jinja for this template alone, which is changed. Raises jinja2.TemplateSyntaxError.
    """
    tree: Any = environment.parse(source)
    literals = tree.find_all((nodes.List, nodes.Tuple, nodes.Dict))
    names = {one.name for one in tree.find_all((nodes.Filter, nodes.Name))}
    nests = not names.isdisjoint(_NESTING) or any(
        getattr(one, "ctx", "load") == "load" and any(one.find_all(_VARIABLE)) for one in literals
    )
    limits = Limits(nests)
    environment.intercepted_binops = frozenset({"*", "**", "%"})
    environment.call_binop = limits.binop
    environment.call = limits.call(environment.call)
    for name in _GROWING:
        environment.filters[name] = limits.filtered(name, environment.filters[name])
    environment.filters |= {_OUTPUT: limits.written, _STORED: limits.stored, _STEPS: limits.looped}
    tree = _Guards().visit(tree)
    tree.set_environment(environment)
    return jinja2.Template.from_code(environment, environment.compile(tree), dict(environment.globals)), limits
