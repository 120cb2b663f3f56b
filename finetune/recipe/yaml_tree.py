"""YAML read into plain values, with the place of every one; `extends` followed, command-line overrides laid on top.

Values are of YAML 1.2's core schema where it differs from PyYAML's 1.1 and bites: `1e-4` is a number, `on`, `off`,
`yes` and `no` are words, `010` is ten. Raw dicts exist only here and in `load.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from finetune.recipe.problems import Key, Place, Problem, RecipeError

_FLOAT = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
_NUMBERS = (("int", r"[-+]?[0-9]+", "-+0123456789"), ("float", _FLOAT, "-+.0123456789"))
_WORDS = (
    ("null", r"~|null|Null|NULL", "~nN"),
    ("null", "", ("",)),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("merge", r"<<", "<"),
)

_PLAIN = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's idea of numbers and booleans."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012 (PyYAML's own name and type)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that also quotes text which only `_Loader` would take for a number, such as a commit `12e4567`."""


for _classes, _kinds in (((_Loader,), _WORDS), ((_Loader, _Dumper), _NUMBERS)):
    for _tag, _pattern, _first in _kinds:
        for _class in _classes:
            _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))


def _decimal(loader: _Loader, node: yaml.ScalarNode) -> int:
    """PyYAML's own reads `010` as eight."""
    return int(loader.construct_scalar(node))


_Loader.add_constructor("tag:yaml.org,2002:int", _decimal)


def dump(values: dict[str, Any]) -> str:
    """YAML that `read` reads back to equal values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


@dataclass
class Tree:
    """Nested dicts, lists and scalars, and where each came from."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[Key, Place] = field(default_factory=dict)  # () is always there

    def place(self, key: Key) -> Place:
        """The place of a key, or of the nearest thing above it."""
        while key not in self.places:
            key = key[:-1]
        return self.places[key]


def read(path: Path) -> Tree:
    """A recipe file with everything it `extends`, nearest file last. Raises RecipeError."""
    return _read(path, ())


def _read(path: Path, above: tuple[Path, ...]) -> Tree:
    tree = _parse(path)
    base = tree.values.pop("extends", None)
    if base is None:
        return tree
    place = tree.places[("extends",)]
    if not isinstance(base, str):
        raise _error(path, place, ("extends",), f"expected the path of one recipe file, got {base!r}")
    base_path = path.parent / base
    above = (*above, path.resolve())
    if base_path.resolve() in above:
        chain = " -> ".join(p.name for p in (*above, base_path))
        raise _error(path, place, ("extends",), f"recipes extend each other in a circle: {chain}")
    if not base_path.is_file():
        raise _error(path, place, ("extends",), f"no such file: {base_path}")
    below = _read(base_path, above)
    lay_over(below, tree.values, tree.places, ())
    below.places[()] = tree.places[()]
    return below


def _error(path: Path | str, place: Place, key: Key, message: str) -> RecipeError:
    return RecipeError(path, [Problem(place, key, message)])


def _parse(path: Path) -> Tree:
    text = _text(path)
    try:
        tree, problems = _plain(text, lambda line: Place(str(path), line))
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        message = f"not valid YAML: character U+{ord(text[error.position]):04X} is not allowed"
        raise _error(path, Place(str(path), line), (), message) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = ", ".join(part for part in (error.context, error.problem) if part)
        raise _error(path, Place(str(path), mark and mark.line + 1), (), f"not valid YAML: {message}") from None
    if problems:
        raise RecipeError(path, sorted(problems, key=lambda problem: problem.place.line or 0))
    if tree.values is None:
        raise _error(path, Place(str(path)), (), "is empty; copy one of the files in recipes/")
    if not isinstance(tree.values, dict):
        raise _error(path, tree.places[()], (), "expected sections (`key: value`), got something else")
    tree.places[()] = Place(str(path), 1)
    return tree


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise _error(path, Place(str(path)), (), "no such file") from None
    except IsADirectoryError:
        raise _error(path, Place(str(path)), (), "is a folder, not a recipe file") from None
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise _error(path, Place(str(path), line), (), "not UTF-8 text") from None
    except OSError as error:
        raise _error(path, Place(str(path)), (), f"cannot be read: {error.strerror}") from None


def _plain(text: str, place: Callable[[int], Place]) -> tuple[Tree, list[Problem]]:
    """Values and places of one YAML text (nothing: None), and what YAML allows but a recipe does not."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        reading = _Reading(loader, place)
        values = None if node is None else reading.value(node, (), ())
        return Tree(values, reading.places), reading.problems  # type: ignore[arg-type]  (callers check for a dict)
    finally:
        loader.dispose()


@dataclass
class _Reading:
    """One walk over the nodes of a YAML text."""

    loader: _Loader
    place: Callable[[int], Place]  # of a line
    places: dict[Key, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def value(self, node: yaml.Node, key: Key, above: tuple[yaml.Node, ...]) -> Any:
        """The plain value of a node. `above`: the nodes that it stands in."""
        place = self.place(node.start_mark.line + 1)
        self.places.setdefault(key, place)
        if any(node is other for other in above):
            return self.problem(place, key, "an alias that stands inside what it names")
        above = (*above, node)
        if not isinstance(node, yaml.ScalarNode) and node.tag not in _PLAIN:
            return self.problem(place, key, f"the tag {node.tag!r} has no meaning here")
        if isinstance(node, yaml.SequenceNode):
            return [self.value(child, (*key, i), above) for i, child in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return self.section(node, key, above)
        try:
            return self.loader.construct_object(node, deep=True)
        except ValueError:  # an explicit tag such as `!!int x`
            return self.problem(place, key, f"{node.value!r} does not fit its tag {node.tag.rpartition(':')[2]!r}")

    def section(self, node: yaml.MappingNode, key: Key, above: tuple[yaml.Node, ...]) -> dict[str, Any]:
        self.twice(node, key)
        self.loader.flatten_mapping(node)  # merge keys (<<) become plain ones
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            place = self.place(key_node.start_mark.line + 1)
            if not isinstance(key_node, yaml.ScalarNode):
                self.problem(place, key, "a key must be a word")
                continue
            here = (*key, key_node.value)
            self.places[here] = place
            values[key_node.value] = self.value(value_node, here, above)
        return values

    def twice(self, node: yaml.MappingNode, key: Key) -> None:
        """A problem for each key that the section itself gives again (what `<<` brings may be given again)."""
        seen: set[str] = set()
        for child, _ in node.value:
            if isinstance(child, yaml.ScalarNode) and child.value != "<<":
                if child.value in seen:
                    self.problem(self.place(child.start_mark.line + 1), (*key, child.value), "is given twice; keep one")
                seen.add(child.value)

    def problem(self, place: Place, key: Key, message: str) -> None:
        self.problems.append(Problem(place, key, message))


def lay_over(tree: Tree, values: dict[str, Any], places: dict[Key, Place], key: Key) -> None:
    """Merge `values` into the tree: sections by key, everything else (lists too) replaced whole."""
    target: Any = tree.values
    for part in key:
        target = target[part]
    for name, value in values.items():
        here = (*key, name)
        # A model config is one value: half of one architecture under half of another is nobody's wish.
        if isinstance(value, dict) and isinstance(target.get(name), dict) and here != ("model", "config"):
            lay_over(tree, value, places, here)
        else:
            _forget(tree.places, here)
            tree.places.update({k: p for k, p in places.items() if k[: len(here)] == here})
            target[name] = value
        tree.places[here] = places.get(here, tree.place(here))


def _forget(places: dict[Key, Place], key: Key) -> None:
    """Remove the places of a value and of everything in it."""
    for old in [k for k in places if k[: len(key)] == key]:
        del places[old]


def override(tree: Tree, text: str, is_text: Callable[[Key], bool]) -> None:
    """Lay `section.key=value` over the tree. List items go by number: `data.train.0.path=x`.

    The value is read as YAML, and as it stands where the schema wants text (`is_text`): a commit or a regular
    expression needs no quotes of YAML's inside those of the shell. Raises RecipeError.
    """
    name, equals, raw = text.partition("=")
    place = Place(f"command line, {text!r}")
    parts = name.strip().split(".")
    if not equals or not all(parts):
        raise _error("command line", place, (), "expected section.key=value, such as optimizer.lr=1e-4")
    if parts == ["extends"]:
        raise _error("command line", place, ("extends",), "works inside a recipe file only")
    target: Any = tree.values
    key: Key = ()
    for part in parts[:-1]:
        index = _index(target, part, place, key)
        if isinstance(target, dict) and not isinstance(target.get(index), dict | list):
            target[index] = {}
            tree.places[(*key, index)] = place
        target = target[index]
        key = (*key, index)
    index = _index(target, parts[-1], place, key)
    key = (*key, index)
    target[index] = _override_value(raw, place, key, is_text(key))
    _forget(tree.places, key)
    tree.places[key] = place


def _index(target: Any, part: str, place: Place, key: Key) -> Any:
    """`part` as an index of `target`."""
    if isinstance(target, dict):
        return part
    if not isinstance(target, list):
        raise _error("command line", place, key, f"is {target!r}, it has no {part!r} inside")
    if not part.isdecimal() or int(part) >= len(target):
        numbers = {0: "nothing to number yet", 1: "expected 0"}.get(len(target), f"expected 0 to {len(target) - 1}")
        raise _error("command line", place, key, f"is a list of {len(target)}: {numbers}, got {part!r}")
    return int(part)


def _override_value(raw: str, place: Place, key: Key, is_text: bool) -> Any:
    if is_text and raw.strip() not in ("", "~", "null") and raw[0] not in "'\"":
        return raw
    try:
        tree, problems = _plain(raw, lambda line: place)
    except yaml.YAMLError:
        return raw
    if problems:
        inside = [Problem(place, (*key, *problem.key), problem.message) for problem in problems]
        raise RecipeError("command line", inside)
    return tree.values
