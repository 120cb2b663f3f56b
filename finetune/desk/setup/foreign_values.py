"""Values of another tool's config: read within bounds, and recorded as they are asked for, at every depth."""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from finetune.errors import UserError

MAX_BYTES = 256 * 1024  # of a config; the tools' own examples have up to 8 KiB
MAX_TABLE_BYTES = 16 * 1024 * 1024  # of a JSON table, such as LLaMA-Factory's dataset_info.json
MAX_VALUES = 10_000  # an alias counts as the value that it stands for
MAX_DEPTH = 40


def read_config(path: Path) -> dict[str, Any]:
    """Returns the values of a config in YAML or JSON, as PyYAML reads them, which the tools use. Raises UserError."""
    text = read_bounded(path, MAX_BYTES)
    try:
        values = json.loads(text) if path.suffix == ".json" else _yaml_values(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        raise UserError(f"{place}: not valid YAML: {one_line(problem)}. Fix: correct this line") from None
    except (yaml.YAMLError, ValueError) as error:
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise UserError(f"{path}: not valid {kind}: {one_line(str(error))}. Fix: correct the file") from None
    except RecursionError:
        raise UserError(f"{path}: {_TOO_DEEP}. Fix: give the tool's own config") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected keys and values (`key: value`). Fix: give the tool's own config")
    _check_size(values, str(path))
    return {str(name): value for name, value in values.items()}


_TOO_DEEP = f"nested deeper than {MAX_DEPTH}"


def read_bounded(path: Path, most: int) -> str:
    """Returns the text of a regular file of at most so many bytes. Raises UserError, also for devices and pipes."""
    try:
        mode = path.stat()
        if stat.S_ISDIR(mode.st_mode):
            raise UserError(f"{path}: is a folder, not a file. Fix: give the config itself")
        if not stat.S_ISREG(mode.st_mode):
            raise UserError(f"{path}: is not a regular file. Fix: save the config to a file")
        with path.open("rb") as file:
            content = file.read(most + 1)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file. Fix: give a config, or a command line in quotes") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{one_line(str(path), 200)}: cannot be read: {reason}. Fix: check the path") from None
    if len(content) > most:
        raise UserError(f"{path}: larger than {most // 1024:,} KiB. Fix: give the tool's own config")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UserError(f"{path}:{line}: not UTF-8 text. Fix: save the file as UTF-8") from None


class _Loader(yaml.SafeLoader):
    """SafeLoader, which the tools use, without dates, and with a bound on sections that are merged."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's own name and type)
        first: [one for one in resolvers if one[0] != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > MAX_VALUES:
            raise yaml.constructor.ConstructorError(None, None, f"more than {MAX_VALUES:,} values", node.start_mark)


def _yaml_values(text: str) -> Any:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is not None:
            _check_nodes(node, (), [0])
        return None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


def _check_nodes(node: yaml.Node, parents: tuple[yaml.Node, ...], count: list[int]) -> None:
    """Raises ConstructorError for too many or too deep values, cycles and keys that are given twice."""
    count[0] += 1
    problem = None
    if count[0] > MAX_VALUES:
        problem = f"more than {MAX_VALUES:,} values"
    elif len(parents) > MAX_DEPTH or any(node is parent for parent in parents):
        problem = _TOO_DEEP
    if problem:
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
    if isinstance(node, yaml.SequenceNode):
        for child in node.value:
            _check_nodes(child, (*parents, node), count)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, child in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen and key.value != "<<":
                name = one_line(key.value)
                raise yaml.constructor.ConstructorError(None, None, f"the key {name} is given twice", key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else "")
            _check_nodes(child, (*parents, node), count)


def _check_size(values: Any, place: str) -> None:
    """Raises UserError for values of JSON that are too many or too deep."""
    todo, count = [(values, 0)], 0
    while todo:
        value, depth = todo.pop()
        count += 1
        if count > MAX_VALUES or depth > MAX_DEPTH:
            problem = f"more than {MAX_VALUES:,} values" if count > MAX_VALUES else _TOO_DEEP
            raise UserError(f"{place}: {problem}. Fix: give the tool's own config")
        children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        todo += [(child, depth + 1) for child in children]


def one_line(text: str, most: int = 120) -> str:
    """Returns text in one line, at most so long; characters that are not printable are escaped.

    >>> one_line("a\\nmode: full")
    'a\\\\nmode: full'
    """
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)
    return shown if len(shown) <= most else shown[: most - 3] + "..."


@dataclass(frozen=True)
class Leftover:
    """A key of the other tool that is not converted."""

    path: str
    value: Any
    reason: str  # empty: nobody asked for it


@dataclass
class ForeignTable:
    """A section of another tool's config. It records which keys are asked for; `unread` yields all others.

    Sections inside are tables themselves, also in lists, so that no key can vanish at any depth.
    """

    values: dict[str, Any]
    path: str = ""  # ends with a dot, unless empty
    left: list[Leftover] = field(default_factory=list)  # shared by all tables of a config
    asked: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.values = {str(name): self._wrapped(value, f"{self.path}{name}") for name, value in self.values.items()}

    def _wrapped(self, value: Any, path: str) -> Any:
        if isinstance(value, dict):
            return ForeignTable(value, f"{path}.", self.left)
        if isinstance(value, list):
            return [self._wrapped(item, f"{path}[{i}]") for i, item in enumerate(value)]
        return value

    def __contains__(self, name: str) -> bool:
        """Returns whether the key is there and not null. This is no question for its value."""
        return self.values.get(name) not in (None, "")

    def put(self, name: str, value: Any) -> None:
        """Sets a key that nobody has asked for yet."""
        self.values[name] = self._wrapped(value, f"{self.path}{name}")

    def take(self, *names: str, default: Any = None) -> Any:
        """Returns the value of the first of these keys that is set; the others are left, unless they say the same."""
        given = [name for name in names if name in self]
        for other in given[1:]:
            if plain(self.values[other]) != plain(self.values[given[0]]):
                self.leave(other, f"{given[0]} takes precedence")
        self.asked |= set(names)
        return self.values[given[0]] if given else default

    def ignore(self, *names: str) -> None:
        """Marks keys that cannot change a result, such as a folder to write to."""
        self.asked |= set(names)

    def is_on(self, *names: str, default: bool = False) -> bool:
        """Returns whether a switch is on, in any spelling of true. Other values than switches are left."""
        value = self.take(*names, default=default)
        if isinstance(value, str | int) and str(value).lower() in _SWITCHES:
            return _SWITCHES[str(value).lower()]
        self.leave(next(name for name in names if name in self), "is neither true nor false")
        return default

    def word(self, *names: str, default: str | None = None) -> str | None:
        """Returns text, or a scalar as text."""
        value = self.take(*names, default=default)
        if isinstance(value, list | ForeignTable):
            self.leave(next(name for name in names if name in self), "is not text")
            return default
        return None if value is None else str(value)

    def listed(self, *names: str) -> list[Any]:
        """Returns a list, also from text with commas, or from one value."""
        value = self.take(*names, default=[])
        if isinstance(value, str):
            return [part.strip() for part in value.split(",") if part.strip()]
        return value if isinstance(value, list) else [] if value is False else [value]

    def words(self, *names: str) -> list[str]:
        """Returns a list of texts; items of another kind are left."""
        items = self.listed(*names)
        if any(isinstance(item, list | ForeignTable | None) for item in items):
            self.leave(next(name for name in names if name in self), "has items that are not text")
        return [str(item) for item in items if not isinstance(item, list | ForeignTable | None)]

    def tables(self, name: str) -> list[ForeignTable]:
        """Returns the sections of a list, or of one section; texts become sections with a `path`."""
        items = []
        for i, item in enumerate(self.listed(name)):
            if isinstance(item, str):
                item = ForeignTable({"path": item}, f"{self.path}{name}[{i}].", self.left)
            if isinstance(item, ForeignTable):
                items.append(item)
            else:
                self.leave(name, "has items that are neither a section nor a path")
        return items

    def table(self, *names: str) -> ForeignTable:
        """Returns a section, also from text in JSON; empty if there is none."""
        value = self.take(*names)
        name = next((name for name in names if name in self), names[0])
        if isinstance(value, str):
            try:
                value = json.loads(value)
                if isinstance(value, dict):
                    _check_size(value, name)
                    self.put(name, value)
                    value = self.values[name]
            except (ValueError, RecursionError):
                pass
        if isinstance(value, ForeignTable):
            return value
        if value not in (None, False):
            self.leave(name, "is not a section of keys")
        return ForeignTable({}, f"{self.path}{name}.", self.left)

    def number(self, *names: str, default: float | None = None) -> Any:
        """Returns a number, also from text such as `1e-4` and `010`; what is none is left, and the default taken."""
        value = self.take(*names, default=default)
        if value is None:
            return None
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                value = [value]
        if isinstance(value, bool | list | ForeignTable) or not math.isfinite(value):
            self.leave(next(name for name in names if name in self), "is not a number")
            return default
        is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 1e15
        return int(value) if is_whole and value != 0 else value

    def count(self, *names: str, default: int | None = None) -> Any:
        """Returns a whole number from 1; what is none is left, and the default taken."""
        value = self.number(*names, default=default)
        if value is None or (value == int(value) and value >= 1):
            return None if value is None else int(value)
        self.leave(next(name for name in names if name in self), "is not a whole number from 1")
        return default

    def leave(self, name: str, reason: str) -> None:
        """Lists a key as not converted."""
        self.asked.add(name)
        path, value = f"{self.path}{name}", self.values.get(name)
        if not any(one.path == path for one in self.left):
            self.left.append(Leftover(path, whole(value), reason))

    def unread(self) -> Iterator[Leftover]:
        """Yields every key at any depth that is set and that nobody asked for."""
        for name, value in self.values.items():
            yield from _unread(value, f"{self.path}{name}", name in self.asked)


def _unread(value: Any, path: str, is_asked: bool) -> Iterator[Leftover]:
    if isinstance(value, ForeignTable):
        yield from value.unread()
    elif isinstance(value, list) and any(isinstance(item, ForeignTable) for item in value):
        for i, item in enumerate(value):
            yield from _unread(item, f"{path}[{i}]", is_asked)
    elif not is_asked and value not in (None, "", []):
        yield Leftover(path, plain(value), "")


_SWITCHES = {
    **dict.fromkeys(("true", "yes", "on", "1", "t", "y", "unsloth", "auto", "full"), True),
    **dict.fromkeys(("false", "no", "off", "0", "f", "n", "none"), False),
}


def plain(value: Any) -> Any:
    """Returns the value without tables. This is no question for the keys inside."""
    if isinstance(value, ForeignTable):
        return {name: plain(inner) for name, inner in value.values.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def whole(value: Any) -> Any:
    """Returns the value without tables, all of whose keys are thereby asked for."""
    for table in [value] if isinstance(value, ForeignTable) else value if isinstance(value, list) else []:
        if isinstance(table, ForeignTable):
            table.asked |= set(table.values)
            for inner in table.values.values():
                whole(inner)
    return plain(value)


_SECRET = re.compile(r"(?i)^(token|.*(api_?key|password|secret|(hub|hf|auth|access)_token))$")


def shown(one: Leftover) -> str:
    """Returns `path=value` of a leftover in one line; secrets are not shown."""
    name = re.split(r"[.\[\]]+", one.path)[-1]
    value = "..." if _SECRET.match(name) and isinstance(one.value, str) else json.dumps(one.value, default=str)
    text = one.value if isinstance(one.value, str) and value != "..." else value
    return f"{one_line(one.path, 80)}={one_line(text, 60)}"
