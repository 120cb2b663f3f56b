"""What takes the place of other tools' keys and values in a recipe: foreign/*.yaml, a file for each tool.

`keys` has a row for a key, or for several with commas: a key of the recipe, or a sentence if there is none or more to
say. A name holds at any depth, a dotted one at its place. `sources` has the keys of one dataset. `values` has, by key
of the recipe, what becomes of the tool's values: a value, `same`, a sentence, or the fields of `ForeignRow`.
`defaults` are the tool's own. A file is read when an unknown key or a conversion asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).with_name("foreign")
FILES = ("transformers", "trl", "axolotl", "llama_factory", "unsloth", "torchtune", "others")  # the first answers


@dataclass(frozen=True)
class ForeignRow:
    """What takes the place of a key or of a value of another tool."""

    ours: str | None = None  # a key of the recipe, or a value of it
    note: str = ""  # a sentence in its place
    sets: Mapping[str, Any] = field(default_factory=dict)  # further keys of the recipe
    doubt: str = ""  # what is not the same: a person has to decide
    comment: str = ""
    marks: Sequence[str] = ()  # keys of the tool that no other value has
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of the tool, with this value

    @property
    def hint(self) -> str:
        """Returns the sentence, or one that says what to set."""
        further = [f"{key}: {_flow(value)}" for key, value in self.sets.items()]
        parts = further if further and not self.ours else [self.ours or "null", *further]
        return self.note or f"set {' and '.join(f'`{part}`' for part in parts)}"


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {one}' for key, one in value.items())}}}"
    return str(value)


@dataclass(frozen=True)
class ForeignTool:
    """The rows of one or more files; the first of two with one name is taken."""

    keys: dict[str, ForeignRow]
    sources: dict[str, ForeignRow]
    values: dict[str, dict[str, ForeignRow]]  # by key of the recipe
    defaults: dict[str, Any]

    def names(self, ours: str) -> tuple[str, ...]:
        """Returns the tool's names for a key of the recipe."""
        return tuple(name for name, row in self.keys.items() if row.ours == ours)

    def value(self, ours: str, theirs: object) -> ForeignRow:
        """Returns what becomes of a value of theirs; empty if there is no row."""
        return self.values.get(ours, {}).get(str(theirs).lower() if isinstance(theirs, bool) else str(theirs), _NONE)


_NONE = ForeignRow()


@cache
def foreign_tool(*files: str) -> ForeignTool:
    """Returns the rows of these files, all of them by default."""
    tool = ForeignTool({}, {}, {}, {})
    for name in files or FILES:
        content = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
        for mine, theirs in ((tool.keys, "keys"), (tool.sources, "sources")):
            _add(mine, content.get(theirs, {}))
        for key, rows in content.get("values", {}).items():
            _add(tool.values.setdefault(key, {}), rows)
        for key, value in content.get("defaults", {}).items():
            tool.defaults.setdefault(key, value)
    return tool


def _add(rows: dict[str, ForeignRow], content: dict[str, Any]) -> None:
    for names, answer in content.items():
        for name in names.split(", "):
            if isinstance(answer, dict):
                row = ForeignRow(**answer)
            elif answer == "same":
                row = ForeignRow(name)
            else:
                row = ForeignRow(note=answer) if " " in (answer or "") else ForeignRow(answer)
            rows.setdefault(name, row)


@cache
def unknown_key_hint(place: str) -> Mapping[str, str]:
    """Returns names of other tools with what to answer for each: a key of the recipe, or a sentence.

    place: "" for keys anywhere, "data.train" for those of a source, and a key such as `objective.name` for its values.
    """
    tool = foreign_tool()
    if place in ("", "data.train"):
        rows = tool.sources if place else tool.keys
        answers = {name: row.ours or row.note for name, row in rows.items()}
        return {name: text for name, text in answers.items() if name not in text.split(".")}  # ours are found by name
    return {value: row.hint for value, row in tool.values.get(place, {}).items()}
