"""Options of `new`, as a person types them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from finetune.errors import UserError


@dataclass(frozen=True)
class NewOptions:
    """Options or answers of the user."""

    model: str  # hub id or local folder
    data: str  # path as in a recipe
    mode: str
    name: str | None = None  # run name; None: from data and mode
    output: Path | None = None  # None: <name>.yaml in the current folder
    format: str | None = None  # None: by the rows
    columns: dict[str, str] | None = None  # field: column; None: by the rows
    overrides: tuple[str, ...] = ()  # section.key=value
    objective: str | None = None  # None: by the rows
    rewards: tuple[str, ...] = ()  # of an objective on samples, as `new_objective.parse_reward` reads them
    launches: bool = False  # the run begins next: the recipe is beside its folder, and is shown


def parse_columns(text: str) -> dict[str, str]:
    """Reads `prompt=Customer Message,completion=Agent Reply`; a comma belongs to a name unless a field follows it.

    >>> parse_columns("prompt=a, b,completion=c")
    {'prompt': 'a, b', 'completion': 'c'}
    """
    pairs = [pair.partition("=") for pair in re.split(r",\s*(?=\w+=)", text.strip())]
    columns = {field.strip(): column.strip() for field, _, column in pairs}
    if not all(field and equals and column.strip() for field, equals, column in pairs):
        raise UserError(
            f"--columns {text}: not of the form field=column. Fix: write it like prompt=question,completion=answer"
        )
    if len(columns) < len(pairs):
        raise UserError(f"--columns {text}: a field is given twice. Fix: give each field once")
    return columns
