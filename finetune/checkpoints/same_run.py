"""What may change when a run goes on, and what makes it another run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import yaml

from finetune.errors import UserError
from finetune.recipe import Recipe, dump_recipe
from finetune.recipe.schema import Acceptable

# What the stored weights and counts belong to: with another one they cannot be used.
_BOUND = ("mode", "lora", "optimizer.name", "batch.rows")
# What the weights or the order of samples depend on, but could be another: `checkpoint.accept_changes`.
_EXPECTED: tuple[str, ...] = get_args(Acceptable)


def changes(recipe: Recipe, folder: Path, data: dict[str, Any], saved_data: dict[str, Any]) -> list[str]:
    """`key: before -> now` of every difference to the checkpoint's recipe that the run may go on with.

    data: facts on the training rows. Raises UserError listing the differences that it may not go on with.
    """
    saved = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
    now = yaml.safe_load(dump_recipe(recipe))
    rows = [f"data.train, the rows themselves: {line}" for line in _differences("", saved_data, data)]
    expected = [key for key in _EXPECTED if key not in recipe.checkpoint.accept_changes]
    bound, unexpected = _under(_BOUND, saved, now), _under(expected, saved, now)
    if "data.train" in expected:
        unexpected += rows
    if bound or unexpected:
        raise UserError(_refusal(folder, bound, unexpected))
    return [*_differences("", saved, now), *rows]


def _refusal(folder: Path, bound: list[str], unexpected: list[str]) -> str:
    keys = [key for key in _EXPECTED if any(line.startswith(key) for line in unexpected)]
    accept = f", or `checkpoint.accept_changes=[{','.join(keys)}]` to go on all the same" if not bound else ""
    return (
        f"{folder} is of another run; what may not change on resume did:\n  "
        + "\n  ".join([*bound, *unexpected])
        + f"\nuse another `run.name`, or `checkpoint.resume=never` to start this one anew{accept}"
    )


def _under(keys: list[str] | tuple[str, ...], saved: Any, now: Any) -> list[str]:
    return [line for key in keys for line in _differences(key, _at(saved, key), _at(now, key))]


def _at(values: Any, key: str) -> Any:
    for name in key.split("."):
        values = (values or {}).get(name)
    return values


def _differences(key: str, saved: Any, now: Any) -> Iterator[str]:
    if isinstance(saved, dict) and isinstance(now, dict):
        for name in sorted({*saved, *now}):
            yield from _differences(f"{key}.{name}" if key else name, saved.get(name), now.get(name))
    elif saved != now:
        yield f"{key}: {json.dumps(saved)} -> {json.dumps(now)}"
