"""YAML read into plain values, with the place of every one; `extends` followed, command-line overrides laid on top.

Values are of YAML 1.2's core schema where it differs from PyYAML's 1.1 and bites: `1e-4` is a number, `on`, `off`, `yes`
and `no` are words. Raw dicts exist only here and in `load.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from finetune.recipe.problems import Key, Place, Problem, RecipeError


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's idea of numbers and booleans."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012 (PyYAML's own name and type)


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
):
    _firsts: list[Any] = [None] if _tag == "null" else []
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), [*_first, *_firsts])
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("^$"), [""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile("^<<$"), ["<"])


@dataclass
class Tree:
    """Nested dicts, lists and scalars, and where each came from."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[Key, Place] = field(default_factory=dict)

    def place(self, key: Key) -> Place:
        """The place of a key, or of the nearest thing above it."""
        for end in range(len(key), -1, -1):
            if key[:end] in self.places:
                return self.places[key[:end]]
        return Place("recipe")


def read(path: Path) -> Tree:
    """A recipe file with everything it `extends`, nearest file last. Raises RecipeError."""
    return _read(path, ())


def _read(path: Path, seen: tuple[Path, ...]) -> Tree:
    if path.resolve() in seen:
        chain = " -> ".join(p.name for p in (*seen, path))
        raise RecipeError(
            path, [Problem(Place(str(path)), ("extends",), f"recipes extend each other in a circle: {chain}")]
        )
    tree = _parse(path)
    base = tree.values.pop("extends", None)
    if base is None:
        return tree
    place = tree.places[("extends",)]
    if not isinstance(base, str):
        raise RecipeError(path, [Problem(place, ("extends",), f"expected the path of one recipe file, got {base!r}")])
    base_path = path.parent / base
    if not base_path.is_file():
        raise RecipeError(path, [Problem(place, ("extends",), f"no such file: {base_path}")])
    below = _read(base_path, (*seen, path.resolve()))
    lay_over(below, tree.values, tree.places, ())
    below.places[()] = tree.places[()]
    return below


def _parse(path: Path) -> Tree:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecipeError(path, [Problem(Place(str(path)), (), "no such file")]) from None
    except IsADirectoryError:
        raise RecipeError(path, [Problem(Place(str(path)), (), "is a folder, not a recipe file")]) from None
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise RecipeError(path, [Problem(Place(str(path), line), (), "not UTF-8 text")]) from None
    except OSError as error:
        raise RecipeError(path, [Problem(Place(str(path)), (), f"cannot be read: {error.strerror}")]) from None
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        tree = Tree(places={(): Place(str(path), 1)})
        if node is None:
            raise RecipeError(path, [Problem(Place(str(path)), (), "is empty; copy one of the files in recipes/")])
        problems: list[Problem] = []
        values = _convert(node, (), str(path), loader, tree.places, problems)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Place(str(path), mark.line + 1 if mark else None)
        raise RecipeError(path, [Problem(place, (), f"not valid YAML: {error.problem or error.context}")]) from None
    except yaml.YAMLError as error:
        raise RecipeError(path, [Problem(Place(str(path)), (), f"not valid YAML: {error}")]) from None
    finally:
        loader.dispose()
    if problems:
        raise RecipeError(path, problems)
    if not isinstance(values, dict):
        raise RecipeError(path, [Problem(tree.places[()], (), "expected sections (`key: value`), got something else")])
    tree.values = values
    return tree


def _convert(
    node: yaml.Node, key: Key, file: str, loader: _Loader, places: dict[Key, Place], problems: list[Problem]
) -> Any:
    """Plain values of a node; fills `places`, and `problems` with duplicate or non-text keys."""
    places.setdefault(key, Place(file, node.start_mark.line + 1))
    if isinstance(node, yaml.SequenceNode):
        return [_convert(child, (*key, i), file, loader, places, problems) for i, child in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return loader.construct_object(node, deep=True)
    written = [k.value for k, _ in node.value if isinstance(k, yaml.ScalarNode) and k.value != "<<"]
    lines = {k.value: k.start_mark.line + 1 for k, _ in node.value if isinstance(k, yaml.ScalarNode)}
    for name in {name for name in written if written.count(name) > 1}:
        problems.append(Problem(Place(file, lines[name]), (*key, name), "is given twice; keep one"))
    loader.flatten_mapping(node)  # merge keys (<<) become plain ones
    values = {}
    for key_node, value_node in node.value:
        name = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
        if not isinstance(name, str):
            problems.append(Problem(Place(file, key_node.start_mark.line + 1), key, "a key must be a word"))
            continue
        places[(*key, name)] = Place(file, key_node.start_mark.line + 1)
        values[name] = _convert(value_node, (*key, name), file, loader, places, problems)
    return values


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
            for old in [k for k in tree.places if k[: len(here)] == here]:
                del tree.places[old]
            tree.places.update({k: p for k, p in places.items() if k[: len(here)] == here})
            target[name] = value
        tree.places[here] = places.get(here, tree.place(here))


def override(tree: Tree, text: str) -> None:
    """Lay `section.key=value` over the tree; the value is read as YAML. List items by number: data.train.0.path=x."""
    name, equals, raw = text.partition("=")
    place = Place(f"command line, {text!r}")
    if not equals or not all(name.strip().split(".")):
        raise RecipeError("command line", [Problem(place, (), "expected section.key=value, such as optimizer.lr=1e-4")])
    try:
        value = yaml.load(raw, Loader=_Loader)  # noqa: S506 (_Loader is a SafeLoader)
    except yaml.YAMLError:
        value = raw
    parts = name.strip().split(".")
    target: Any = tree.values
    key: Key = ()
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        if isinstance(target, list):
            if not part.isdigit() or int(part) >= len(target):
                count = len(target)
                message = f"is a list of {count}; expected a number from 0 to {count - 1}, got {part!r}"
                raise RecipeError("command line", [Problem(place, key, message)])
            index: Any = int(part)
        elif isinstance(target, dict):
            index = part
        else:
            raise RecipeError("command line", [Problem(place, key, f"is {target!r}, it has no {part!r} inside")])
        key = (*key, index)
        if last:
            for old in [k for k in tree.places if k[: len(key)] == key]:
                del tree.places[old]
            target[index] = value
            tree.places[key] = place
        else:
            if isinstance(target, dict) and not isinstance(target.get(index), dict | list):
                target[index] = {}
                tree.places[key] = place
            target = target[index]
