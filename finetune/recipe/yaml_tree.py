"""Reads YAML into plain values with the place (file, line) of each, resolves `extends` and applies overrides.

Values follow YAML 1.2 when PyYAML's 1.1 surprises: `1e-4` is a number, `010` is ten, and `on`, `off`, `yes`, `no` are
text, marked as `PlainWord` unless they are quoted: `load.py` refuses them where a truth value may be meant. Short forms
(`shorthands.py`) are replaced in each file and override, so that full ones are merged. Raw dicts exist only here and in
`load.py`.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from finetune.errors import UserError
from finetune.recipe.shorthands import PLAIN_WORDS, PlainWord, expand
from finetune.shipped import SHIPPED, here_or_shipped

Key = tuple[str | int, ...]  # path to a value: ("data", "train", 0, "path")


@dataclass(frozen=True)
class Location:
    """A line of a file (1-based), or an override on the command line (no line)."""

    file: str
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True)
class Problem:
    place: Location
    key: Key
    message: str

    def __str__(self) -> str:
        location = f"{self.place}: {dotted(self.key)}" if self.key else str(self.place)
        return f"{location}: {self.message}"


class RecipeError(UserError):
    """All problems of one recipe, one per line, in the order of the file."""

    def __init__(self, path: Path | str, problems: list[Problem]):
        self.problems = tuple(problems)
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        lines = [f"{path}: {count}", *(f"  {problem}" for problem in problems)]
        super().__init__("\n".join(lines))


def dotted(key: Key) -> str:
    """
    >>> dotted(("data", "train", 0, "path"))
    'data.train[0].path'
    """
    text = ""
    for part in key:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


_FLOAT = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
_NUMBERS = (("int", r"[-+]?[0-9]+", "-+0123456789"), ("float", _FLOAT, "-+.0123456789"))
_WORDS = (
    ("null", r"~|null|Null|NULL", "~nN"),
    ("null", "", ("",)),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("merge", r"<<", "<"),
)

# A recipe has some hundred values; more are a mistake or a trap (https://en.wikipedia.org/wiki/Billion_laughs_attack).
MAX_VALUES = 10_000  # an alias counts as the node it stands for
_MAX_INTEGER = 2**63 - 1
_UNREADABLE = re.compile("[\0\ud800-\udfff]")  # in no file, name or UTF-8 text

_PLAIN = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


class _YamlLoader(yaml.SafeLoader):
    """SafeLoader with numbers and booleans of YAML 1.2."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012 (PyYAML's own name and type)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Extends PyYAML's method, called for every section that is merged, by a check of size."""
        super().flatten_mapping(node)
        _check_count(len(node.value), node)


def _check_count(count: int, node: yaml.Node) -> None:
    if count > MAX_VALUES:
        raise yaml.constructor.ConstructorError(None, None, f"more than {MAX_VALUES:,} values", node.start_mark)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that also quotes text that only `_YamlLoader` reads as a number, such as a commit `12e4567`."""


for _classes, _kinds in (((_YamlLoader,), _WORDS), ((_YamlLoader, _Dumper), _NUMBERS)):
    for _tag, _pattern, _first in _kinds:
        for _class in _classes:
            _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))


def _decimal(loader: _YamlLoader, node: yaml.ScalarNode) -> int:
    """Reads `010` as ten; PyYAML's own constructor reads eight."""
    return int(loader.construct_scalar(node))


_YamlLoader.add_constructor("tag:yaml.org,2002:int", _decimal)


yaml.SafeDumper.add_representer(PlainWord, yaml.SafeDumper.represent_str)  # of this file's and of `flow`


def _marked(text: str) -> str:
    """Returns unquoted text, marked if YAML 1.1 reads it as a truth value."""
    return PlainWord(text) if text.lower() in PLAIN_WORDS else text


def dump(values: dict[str, Any]) -> str:
    """Returns YAML that `read` reads back to equal values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


@dataclass
class Tree:
    """Nested dicts, lists and scalars, and the place of each."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[Key, Location] = field(default_factory=dict)  # always has ()

    def place(self, key: Key) -> Location:
        """Returns the place of a key, or of its nearest parent."""
        while key not in self.places:
            key = key[:-1]
        return self.places[key]


def read(path: Path, text: str | None = None) -> Tree:
    """Reads a recipe file and those it `extends`; the extending file's values win. text: in place of the file's, such
    as an editor's. Raises RecipeError."""
    return _read(here_or_shipped(path), (), text)


def _read(path: Path, parents: tuple[Path, ...], text: str | None = None) -> Tree:
    tree = _parse(path, text)
    base = tree.values.pop("extends", None)
    if base is None:
        return tree
    place = tree.places[("extends",)]
    if not isinstance(base, str):
        raise _error(path, place, ("extends",), f"expected the path of one recipe file, got {base!r}")
    base_path = path.parent / base
    try:
        base_path.stat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise _error(path, place, ("extends",), f"{_cut(str(base_path))}: {error.strerror}") from None
        if Path(base).is_absolute() or not (SHIPPED / base).is_file():
            raise _error(path, place, ("extends",), f"no such file: {base_path}") from None
        base_path = SHIPPED / base  # `extends: recipes/base/lora.yaml` works in any folder, as `launch` does
    parents = (*parents, path.resolve())
    if base_path.resolve() in parents:
        chain = " -> ".join(p.name for p in (*parents, base_path))
        raise _error(path, place, ("extends",), f"circular `extends`: {chain}")
    base_tree = _read(base_path, parents)
    merge_into(base_tree, tree.values, tree.places, ())
    base_tree.places[()] = tree.places[()]
    return base_tree


def _error(path: Path | str, place: Location, key: Key, message: str) -> RecipeError:
    return RecipeError(path, [Problem(place, key, message)])


def _parse(path: Path, text: str | None = None) -> Tree:
    file, content = Location(str(path)), ""
    try:
        content = path.read_text(encoding="utf-8") if text is None else text
        tree, problems = _parse_text(content, lambda line: Location(str(path), line))
    except FileNotFoundError:
        raise _error(path, file, (), "no such file") from None
    except IsADirectoryError:
        raise _error(path, file, (), "is a folder, not a recipe file") from None
    except OSError as error:
        raise _error(path, file, (), f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise _error(path, Location(str(path), line), (), "not UTF-8 text") from None
    except yaml.reader.ReaderError as error:
        line = content[: error.position].count("\n") + 1
        message = f"not valid YAML: character U+{ord(content[error.position]):04X} is not allowed"
        raise _error(path, Location(str(path), line), (), message) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = ", ".join(part for part in (error.context, error.problem) if part)
        raise _error(path, Location(str(path), mark and mark.line + 1), (), f"not valid YAML: {message}") from None
    except RecursionError:
        raise _error(path, file, (), f"not valid YAML: {_TOO_DEEP}") from None
    if problems:
        raise RecipeError(path, sorted(problems, key=lambda problem: problem.place.line or 0))
    if tree.values is None:
        raise _error(path, file, (), "is empty; copy one of the files in recipes/")
    if not isinstance(tree.values, dict):
        raise _error(path, tree.places[()], (), "expected sections (`key: value`) at the top level")
    expand(tree.values)
    tree.places[()] = Location(str(path), 1)
    return tree


def _parse_text(text: str, place: Callable[[int], Location]) -> tuple[Tree, list[Problem]]:
    """Returns values (None if empty) and places of a YAML text, and problems that YAML allows but a recipe does not."""
    loader = _YamlLoader(text)
    try:
        try:
            node = loader.get_single_node()
        except (ValueError, OverflowError):  # of PyYAML's own chr()
            problem = "an escape that stands for no character, such as \\U00110000"
            raise yaml.MarkedYAMLError(None, None, problem, loader.get_mark()) from None
        walk = _NodeWalk(loader, place)
        values = None if node is None else walk.value(node, (), ())
        return Tree(values, walk.places), walk.problems  # type: ignore[arg-type]  (callers check for a dict)
    finally:
        loader.dispose()


_TOO_DEEP = "nested too deeply, or a section is merged into itself"


@dataclass
class _NodeWalk:
    """Converts the nodes of a YAML text to plain values."""

    loader: _YamlLoader
    place: Callable[[int], Location]  # by line
    places: dict[Key, Location] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    count: int = 0  # of values

    def value(self, node: yaml.Node, key: Key, parents: tuple[yaml.Node, ...]) -> Any:
        """Returns the plain value of a node."""
        place = self.place(node.start_mark.line + 1)
        self.places.setdefault(key, place)
        self.count += 1
        _check_count(self.count, node)
        if any(node is parent for parent in parents):
            return self.problem(place, key, "an alias inside the value it refers to")
        parents = (*parents, node)
        if not isinstance(node, yaml.ScalarNode) and node.tag not in _PLAIN:
            return self.problem(place, key, f"the tag {node.tag!r} is not supported")
        if isinstance(node, yaml.SequenceNode):
            return [self.value(child, (*key, i), parents) for i, child in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return self.section(node, key, parents)
        try:
            value = self.loader.construct_object(node, deep=True)
        except (ValueError, LookupError, AttributeError, TypeError):  # an explicit tag such as `!!int x`
            tag = node.tag.rpartition(":")[2]
            return self.problem(place, key, f"{_cut(repr(node.value))} does not match its tag {tag!r}")
        if not isinstance(value, str | int | float | None):
            return self.problem(place, key, f"the tag {node.tag!r} is not supported")
        if isinstance(value, int) and abs(value) > _MAX_INTEGER:
            return self.problem(place, key, f"{_cut(node.value)} is too large for an integer (64 bits)")
        if isinstance(value, str) and (found := _UNREADABLE.search(value)):
            return self.problem(place, key, f"has the character U+{ord(found[0]):04X}, which no name or text may have")
        is_plain = isinstance(node, yaml.ScalarNode) and node.style is None  # without quotes
        return _marked(value) if isinstance(value, str) and is_plain else value

    def section(self, node: yaml.MappingNode, key: Key, parents: tuple[yaml.Node, ...]) -> dict[str, Any]:
        self.check_duplicates(node, key)
        self.loader.flatten_mapping(node)  # merge keys (<<) become plain ones
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            place = self.place(key_node.start_mark.line + 1)
            if not isinstance(key_node, yaml.ScalarNode) or _UNREADABLE.search(key_node.value):
                self.problem(place, key, "a key must be a scalar of readable text")
                continue
            child_key = (*key, key_node.value)
            self.places[child_key] = place
            values[key_node.value] = self.value(value_node, child_key, parents)
        return values

    def check_duplicates(self, node: yaml.MappingNode, key: Key) -> None:
        """Adds a problem for each duplicate key of the section itself (keys from `<<` may be overridden)."""
        seen: set[str] = set()
        for child, _ in node.value:
            if isinstance(child, yaml.ScalarNode) and child.value != "<<":
                if child.value in seen:
                    self.problem(self.place(child.start_mark.line + 1), (*key, child.value), "duplicate key; keep one")
                seen.add(child.value)

    def problem(self, place: Location, key: Key, message: str) -> None:
        self.problems.append(Problem(place, key, message))


def _cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def merge_into(tree: Tree, values: dict[str, Any], places: dict[Key, Location], key: Key) -> None:
    """Merges `values` into the tree: sections by key; all else, lists included, is replaced."""
    target: Any = tree.values
    for part in key:
        target = target[part]
    inside, replaced = _by_child(places, key), _by_child(tree.places, key)
    for name, value in values.items():
        child = (*key, name)
        # A model config is one value: two architectures must not be mixed.
        if isinstance(value, dict) and isinstance(target.get(name), dict) and child != ("model", "config"):
            merge_into(tree, value, places, child)
        else:
            for old in replaced.get(name, ()):
                tree.places.pop(old, None)
            tree.places.update({new: places[new] for new in inside.get(name, ())})
            target[name] = value
        tree.places[child] = places.get(child, tree.place(child))


def _by_child(places: dict[Key, Location], key: Key) -> dict[str | int, list[Key]]:
    """Returns the keys inside each child of the section at `key`, and the child's own."""
    children: dict[str | int, list[Key]] = {}
    for inner in places:
        if len(inner) > len(key) and inner[: len(key)] == key:
            children.setdefault(inner[len(key)], []).append(inner)
    return children


def override(tree: Tree, text: str, is_text: Callable[[Key], bool]) -> None:
    """Applies `section.key=value` to the tree. List items are addressed by index: `data.train.0.path=x`.

    The value is read as YAML, or literally if the schema expects text (`is_text`): a commit or a regular expression
    needs no YAML quotes inside those of the shell. Raises RecipeError.
    """
    name, equals, raw = text.partition("=")
    place = Location(f"command line, {text!r}")
    parts = name.strip().split(".")
    if not equals or not all(parts):
        raise _error("command line", place, (), "expected section.key=value, such as optimizer.lr=1e-4")
    if parts == ["extends"]:
        raise _error("command line", place, ("extends",), "is allowed in recipe files only")
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
    tree.places = {old: at for old, at in tree.places.items() if old[: len(key)] != key} | {key: place}
    expand(tree.values)


def _index(target: Any, part: str, place: Location, key: Key) -> Any:
    """Returns `part` as an index of `target`."""
    if isinstance(target, dict):
        return part
    if not isinstance(target, list):
        raise _error("command line", place, key, f"is {target!r}, which has no key {part!r}")
    if not part.isdecimal() or int(part) >= len(target):
        expected = {0: "no valid index", 1: "expected index 0"}.get(len(target), f"expected 0 to {len(target) - 1}")
        raise _error("command line", place, key, f"is a list of {len(target)}: {expected}, got {part!r}")
    return int(part)


def _override_value(raw: str, place: Location, key: Key, is_text: bool) -> Any:
    if _UNREADABLE.search(raw):
        raise _error("command line", place, key, "is not UTF-8 text")
    if is_text and raw.strip() not in ("", "~", "null") and raw[0] not in "'\"":
        return _marked(raw)
    try:
        tree, problems = _parse_text(raw, lambda line: place)
    except yaml.YAMLError:
        return raw
    except RecursionError:
        raise _error("command line", place, key, _TOO_DEEP) from None
    if problems:
        raise RecipeError("command line", [Problem(place, (*key, *p.key), p.message) for p in problems])
    return tree.values


def flow(value: Any) -> str:
    """Returns a value as YAML in one line."""
    text = yaml.dump(
        value, Dumper=_FlowDumper, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6
    )
    return text.removesuffix("...\n").strip()


class _FlowDumper(_Dumper):
    """Dumper that keeps a text in its line: line breaks and control characters are escapes in quotes."""

    def represent_text(self, text: str) -> yaml.Node:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_FlowDumper.add_representer(str, _FlowDumper.represent_text)
