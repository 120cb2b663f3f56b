"""A config of another tool on its way to a recipe: the keys that were read, the recipe's, and those without a place."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from finetune.errors import UserError
from finetune.recipe.foreign_keys import FOREIGN_KEYS
from finetune.recipe.yaml_tree import flow

TODO = "TODO: "  # begins the comment of a value that a person has to decide
_NOT_SET = (None, False, "", "none", "None")
_SECTIONS = (
    *("run", "model", "mode", "lora", "quantization", "tokens", "data", "objective", "batch", "optimizer"),
    *("schedule", "train", "evaluate", "checkpoint", "tracking"),
)


@dataclass
class Conversion:
    """Values of the other tool, and the recipe that they become."""

    tool: str
    theirs: dict[str, Any]
    devices: int | None = None  # that the other tool ran on; None: not said
    keys: dict[str, tuple[Any, str]] = field(default_factory=dict)  # of the recipe, dotted: value and comment
    sources: dict[str, list[tuple[dict[str, Any], str]]] = field(default_factory=dict)  # by train, eval
    left: dict[str, list[str]] = field(default_factory=dict)  # reason: keys of the other tool
    launch: str | None = None  # name of an accelerate config
    _read: set[str] = field(default_factory=set)

    def take(self, *names: str, default: Any = None) -> Any:
        """Returns the value of the first of these keys that is set, and marks all of them as read."""
        self._read |= set(names)
        given = [self.theirs[name] for name in names if self.theirs.get(name) not in (None, "")]
        return given[0] if given else default

    def is_on(self, *names: str, default: bool = False) -> bool:
        """Returns whether a switch is on, in any spelling of true."""
        value = self.take(*names, default=default)
        return value is True or (isinstance(value, str) and value.lower() in ("true", "yes", "on", "1", "unsloth"))

    def word(self, *names: str, default: str | None = None) -> str | None:
        """Returns text, or a scalar as text."""
        value = self.take(*names, default=default)
        if isinstance(value, list | dict):
            self.leave(names[0], "is not text")
            return default
        return None if value is None else str(value)

    def listed(self, *names: str) -> list[Any]:
        """Returns a list, also from text with commas, or from one value."""
        value = self.take(*names, default=[])
        if isinstance(value, str):
            return [part.strip() for part in value.split(",") if part.strip()]
        return value if isinstance(value, list) else [value] if value not in (False, {}) else []

    def table(self, *names: str) -> dict[str, Any]:
        """Returns a mapping, also from text in JSON; empty if there is none."""
        value = self.take(*names, default={})
        try:
            value = json.loads(value) if isinstance(value, str) else value
        except ValueError:
            value = None
        if not isinstance(value, dict):
            self.leave(names[0], "is not a mapping of settings")
            return {}
        return value

    def number(self, *names: str, default: float | None = None) -> Any:
        """Returns a number, also from text such as `1e-4`; None if it is neither given nor has a default."""
        value = self.take(*names, default=default)
        try:
            value = float(value) if isinstance(value, str) else value
        except ValueError:
            value = str(value)
        if isinstance(value, str | list | dict | bool):
            self.leave(names[0], f"{value!r} is not a number")
            return default
        is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 1e15
        return int(value) if is_whole and value != 0 else value

    def set(self, key: str, value: Any, comment: str = "") -> None:
        self.keys[key] = (value, comment)

    def copy(self, key: str, *names: str, default: float | None = None) -> None:
        """Sets a number of the recipe from the other tool's, or from its default, which then is written out."""
        value, is_given = self.number(*names, default=default), any(self.theirs.get(name) is not None for name in names)
        if value is not None:
            self.set(key, value, "" if is_given else f"the default of {self.tool}")

    def override(self, text: str) -> None:
        """Applies `section.key=value` in place of what was converted. Raises UserError for a key of another depth."""
        key, equals, value = text.partition("=")
        if not equals or (key.count(".") != 1 and key != "mode"):
            raise UserError(f"{text!r}: expected section.key=value, such as optimizer.lr=1e-4")
        if key in ("data.train", "data.eval"):
            self.sources.pop(key.partition(".")[2], None)
        self.set(key, scalar(value), "from the command line")
        unused = {"full": ("lora", "quantization"), "lora": ("quantization",)}.get(value, ()) if key == "mode" else ()
        self.keys = {name: one for name, one in self.keys.items() if name.partition(".")[0] not in unused}

    def leave(self, name: str, reason: str) -> None:
        """Lists a key as not converted."""
        self._read.add(name)
        names = self.left.setdefault(reason, [])
        if name not in names:
            names.append(name)

    def leave_the_rest(self) -> None:
        """Lists all keys that are set and were not read, with the reason that `check` gives for them."""
        for name, value in self.theirs.items():
            if name in self._read or value in _NOT_SET or value in ([], {}):
                continue
            reason = FOREIGN_KEYS.get(name, "no counterpart is known")
            self.leave(name, reason if " " in reason else f"set `{reason}`, if it is meant")

    def value(self, key: str) -> Any:
        return self.keys.get(key, (None, ""))[0]

    def todos(self) -> list[str]:
        """Returns what a person has to decide, with the key."""
        comments = [(key, comment) for key, (_, comment) in self.keys.items()]
        comments += [(f"data.{part}", comment) for part, sources in self.sources.items() for _, comment in sources]
        return [f"{key}: {comment.removeprefix(TODO)}" for key, comment in comments if comment.startswith(TODO)]

    def text(self, origin: str) -> str:
        """Returns the recipe as YAML with comments. origin: a short name of the config that it was."""
        lines = [f"# {origin} of {self.tool}, converted by `python -m finetune new --from`."]
        if self.left:
            lines += ["#", "# Not converted:"]
        for reason, names in self.left.items():
            lines.append(f"#   {', '.join(names)}: {reason}")
        for section in _SECTIONS:
            inside = {key.partition(".")[2]: one for key, one in self.keys.items() if key.partition(".")[0] == section}
            if "" in inside:  # a key of its own, such as `mode`
                value, comment = inside[""]
                lines.append(_line(f"{section}: {flow(value)}", comment))
                continue
            below: list[str] = []
            for part, sources in self.sources.items() if section == "data" else ():
                below += [f"  {part}:", *(_line(f"    - {flow(source)}", comment) for source, comment in sources)]
            below += [_line(f"  {name}: {flow(value)}", comment) for name, (value, comment) in inside.items()]
            lines += [f"{section}:", *below] if below else []
        return "\n".join(lines) + "\n"


def scalar(text: str) -> Any:
    """Returns a value of the command line as YAML reads it, with numbers such as `1e-4`."""
    try:
        return float(text) if re.fullmatch(r"[-+]?[\d.]+[eE][-+]?\d+", text) else yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _line(text: str, comment: str) -> str:
    return f"{text}  # {comment}" if comment else text


def run_name(text: str) -> str:
    """Returns a name of a run: the last part of a path, with `-` for other characters."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text.rstrip("/").rpartition("/")[2]).strip("-._") or "run"
