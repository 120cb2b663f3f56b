"""What is wrong with a recipe: every problem at once, each with its place, as one error."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from finetune.errors import UserError

Key = tuple[str | int, ...]  # path to a value: ("data", "train", 0, "path")


@dataclass(frozen=True)
class Place:
    """A line of a file (1-based), or an override of the command line (no line)."""

    file: str
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True)
class Problem:
    place: Place
    key: Key
    message: str

    def __str__(self) -> str:
        where = f"{self.place}: {dotted(self.key)}" if self.key else str(self.place)
        return f"{where}: {self.message}"


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
