"""Short forms of a recipe's values, and the full forms that they stand for: `data.train: rows.jsonl`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class PlainWord(str):
    """An unquoted word that YAML 1.1 reads as a truth value, and a recipe, as YAML 1.2, as text: `off`."""


# In any case. PyYAML's own list, without true and false, which both versions read alike.
PLAIN_WORDS = ("yes", "no", "on", "off")
# Of a tracker's switch, quoted or not: no project has such a name.
_ON = ("true", "yes", "on", "y", "enable", "enabled")
_OFF = ("false", "no", "off", "n", "none", "null", "disable", "disabled")
_PROJECT = "finetune"


@dataclass(frozen=True)
class Shorthand:
    """A key that has short forms."""

    full: Callable[[Any], Any]  # returns the full form of a short one, and any other value as it is
    expected: str  # in messages, next to the full forms
    schemas: tuple[dict[str, Any], ...]  # JSON Schemas of the short forms


def _sources(value: Any) -> Any:
    """`a.jsonl` and `[a.jsonl, b.jsonl]` are sources of these paths."""
    if isinstance(value, PlainWord):  # refused: see `load.py`
        return value
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list):
        return values
    return [{"path": item} if isinstance(item, str) else item for item in values]


def _held_out(value: Any) -> Any:
    """`0.1` is a share of the rows of `data.train`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return {"share": value} if is_number else _sources(value)


def _switch(value: Any) -> Any:
    """`on` is True, `off` is False, in all their spellings; any other value is itself."""
    word = value.strip().lower() if isinstance(value, str) else None
    return True if word in _ON else False if word in _OFF else value


def _wandb(value: Any) -> Any:
    """`true` is a project of the default name, `false` no tracking, and text the name of a project."""
    if isinstance(value := _switch(value), bool):
        return {} if value else None
    return {"project": value} if isinstance(value, str) else value


def _mlflow(value: Any) -> Any:
    """`true` is an experiment of the default name, `false` no tracking, and text the name of an experiment."""
    if isinstance(value := _switch(value), bool):
        return {} if value else None
    return {"experiment": value} if isinstance(value, str) else value


def _trackio(value: Any) -> Any:
    """`true` is a project of the default name, and `false` no tracking."""
    return {True: _PROJECT, False: None}[value] if isinstance(value := _switch(value), bool) else value


def _push(value: Any) -> Any:
    """`false` is no push, and text the repository."""
    if (value := _switch(value)) is False:
        return None
    return {"repo": value} if isinstance(value, str) else value


def _off(value: Any) -> Any:
    """`off`, which YAML 1.1 takes for false, and `false` are text here."""
    return "off" if _switch(value) is False else value


def _environment(value: Any) -> Any:
    """Text is the path of the file."""
    return {"file": value} if isinstance(value, str) and not isinstance(value, PlainWord) else value


def _names(value: Any) -> Any:
    """Text with a comma is a list of names."""
    is_list = isinstance(value, str) and "," in value
    return [name for part in value.split(",") if (name := part.strip())] if is_list else value


_PATH = {"type": "string", "minLength": 1}
_PATHS = {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/Source"}, _PATH]}}
_SWITCH_OR_NAME = ({"type": "boolean"}, {"type": "string"})
_SHARE = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}

SHORTHANDS: dict[tuple[str, str], Shorthand] = {
    ("data", "train"): Shorthand(_sources, "a path", (_PATH, {**_PATHS, "minItems": 1})),
    ("data", "eval"): Shorthand(_held_out, "a path or a share", (_PATH, _PATHS, _SHARE)),
    ("tracking", "wandb"): Shorthand(_wandb, "true or a project's name", _SWITCH_OR_NAME),
    ("tracking", "mlflow"): Shorthand(_mlflow, "true or an experiment's name", _SWITCH_OR_NAME),
    ("tracking", "trackio"): Shorthand(_trackio, "true or false", ({"type": "boolean"},)),
    ("run", "push"): Shorthand(_push, "a repository, as org/name, or false", (_PATH, {"const": False})),
    ("train", "graphs"): Shorthand(_off, "false", ({"const": False},)),
    ("rollouts", "environment"): Shorthand(_environment, "a path", (_PATH,)),
    ("lora", "targets"): Shorthand(_names, "names with commas", ({"type": "string", "pattern": ","},)),
}


def expand(values: dict[str, Any]) -> None:
    """Replaces the short forms in a recipe's plain values, of any shape, by full ones."""
    for (name, key), shorthand in SHORTHANDS.items():
        section = values.get(name)
        if isinstance(section, dict) and key in section:
            section[key] = shorthand.full(section[key])
    objective = values.get("objective")
    # Before recipes are merged: one that is extended may have a name.
    if isinstance(objective, dict) and objective.get("file") is not None and "name" not in objective:
        values["objective"] = {"name": "own", **objective}
