"""What if: other values of a key, and what has to change for a recipe to fit into less memory."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from finetune.errors import UserError
from finetune.plan.search import Choice, PlanRequest, as_lines, best, changed, search, value_of
from finetune.plan.speed import Speeds
from finetune.plan.tables import Machines

_MAX_VALUES = 16


def values_of(text: str) -> tuple[str, list[int]]:
    """Reads `data.max_length=2048..131072`, doubling, or `lora.rank=8,16,64`. Raises UserError.

    >>> values_of("data.max_length=1024..5000")
    ('data.max_length', [1024, 2048, 4096, 5000])
    """
    match = re.fullmatch(r"([a-z_]+\.[a-z_]+)=(?:(\d+)\.\.(\d+)|(\d+(?:,\d+)*))", text.replace(" ", ""))
    if match is None:
        raise UserError(f"--sweep {text}: expected a key and its values, such as data.max_length=2048..131072")
    if match[4]:
        values = [int(value) for value in match[4].split(",")]
    else:
        first, last = int(match[2]), int(match[3])
        values = [first * 2**i for i in range(32) if first * 2**i < last] + [last]
    if min(values) < 1 or len(values) > _MAX_VALUES:
        raise UserError(f"--sweep {text}: expected 1 to {_MAX_VALUES} values above 0")
    return match[1], values


def sweep(
    request: PlanRequest, machines: Sequence[Machines], speeds: Sequence[Speeds | None], key: str, value: int
) -> Choice | str:
    """Returns the best place for another value of a key, or why there is none. request: of that value."""
    every: list[Choice] = []
    rules: dict[str, str] = {}
    for one, reached in zip(machines, speeds, strict=True):
        found = search(request, one, reached)
        every += found.choices
        rules |= found.illegal
    return best(every) if every else f"{key}: {value}: " + "; ".join(dict.fromkeys(rules.values()))


# Changes, the cheapest first: those that leave the result as it is, then those that do not.
_CHANGES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"batch.rows_per_device": 1}, "same result"),
    ({"train.activation_checkpointing": True}, "same result"),
    ({"batch.rows_per_device": 1, "train.activation_checkpointing": True}, "same result"),
    (
        {"batch.rows_per_device": 1, "train.activation_checkpointing": True, "train.activation_offload": True},
        "same result",
    ),
    ({"optimizer.name": "adamw_8bit"}, "another result: optimizer state in 8 bits"),
    ({"data.max_length": 0.5}, "another result: longer examples follow data.overlong"),
    ({"data.max_length": 0.25}, "another result: longer examples follow data.overlong"),
)


def to_fit(request: PlanRequest, machines: Machines, speeds: Speeds | None) -> list[tuple[str, Choice]]:
    """Returns changes with which the recipe fits, each with its best place: cheapest first, none needless."""
    fitting = []
    for changes, cost in (({}, "as it is"), *_CHANGES):
        recipe = request.recipe
        absolute = {key: _absolute(recipe, key, value) for key, value in changes.items()}
        if any(value_of(recipe, key) == value for key, value in absolute.items()) and len(absolute) == 1:
            continue
        if "optimizer.name" in absolute and recipe.optimizer.name != "adamw":
            continue
        other = dataclasses.replace(request, recipe=changed(recipe, absolute))
        if "data.max_length" in absolute and other.repack is not None:
            other = dataclasses.replace(other, rows=other.repack(other.recipe))
        found = [one for one in search(other, machines, speeds, widely=False).choices if one.verdict == "fits"]
        if found:
            words = ", ".join(as_lines(absolute)) or "no change"
            fitting.append((f"{words} ({cost})", best(found)))
    return fitting


def _absolute(recipe: Any, key: str, value: Any) -> Any:
    return int(recipe.data.max_length * value) if key == "data.max_length" else value
