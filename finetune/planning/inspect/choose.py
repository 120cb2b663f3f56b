"""Which examples to show: the first ones, or a certain row, and why that one is not there."""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.data import Examples, prepare_examples, read_rows
from finetune.errors import UserError
from finetune.planning.inspect.view import View
from finetune.recipe.schema import Source


def first_examples(examples: Examples, count: int) -> list[int]:
    """Numbers of `count` examples: the first of each source, then the second of each, ...; in the data's order."""
    begins, end = [], 0
    for source in examples.report.sources:
        begins.append((end, end + source.taken))
        end += source.taken
    turns = max((end - begin for begin, end in begins), default=0)
    in_turn = (begin + turn for turn in range(turns) for begin, end in begins if begin + turn < end)
    return sorted(number for number, _ in zip(in_turn, range(count), strict=False))


def find_row(view: View, place: str) -> list[int]:
    """Numbers of the examples (pieces, under `overlong: split`) that PATH:NUMBER became; the end of a path will do.

    Raises UserError with the nearest rows, and with what became of this one.
    """
    path, _, digits = place.rpartition(":")
    if not path or not digits.isdecimal():
        raise UserError(f"--row {place}: expected PATH:NUMBER, such as train.jsonl:12")
    number, near = int(digits), []
    found = []
    for i, example in enumerate(view.data.examples):
        if is_path(example.path, path):
            near.append((example.row, example.path))
            if example.row == number:
                found.append(i)
    if found:
        return list(dict.fromkeys(found))
    if not near:
        known = sorted({example.path for example in view.data.examples})
        raise UserError(f"--row {place}: no example is from {path}; there are {', '.join(known)}")
    raise UserError(f"--row {place}: {_why_absent(view, path, number)}\nThe nearest {_nearest(near, number)}")


def is_path(label: str, typed: str) -> bool:
    """Whether `typed` is a source's label or the end of it, from a slash on."""
    return label == typed or label.endswith(f"/{typed.removeprefix('./')}")


def _nearest(near: Sequence[tuple[int, str]], number: int) -> str:
    rows = sorted(set(near))
    at = bisect_left(rows, (number, ""))
    found = [f"{path}:{row}" for row, path in rows[max(0, at - 1) : at + 1]]
    return f"{'are' if len(found) > 1 else 'is'} {' and '.join(found)}"


def _why_absent(view: View, path: str, number: int) -> str:
    """What became of a row that no example is from: read and rendered again, by itself."""
    bad: dict[tuple[str, int], str] = {}
    for source, report in zip(view.sources, view.data.examples.report.sources, strict=True):
        for label, n, row in read_rows(source, lambda label, n, message: bad.update({(label, n): message})):
            if n == number and is_path(label, path):
                return _why_dropped(view, source, report.format, row, f"{label}:{n}")
        for (label, n), message in bad.items():
            if n == number and is_path(label, path):
                return f"a bad row: {message}"
    return "there is no such row"


def _why_dropped(view: View, source: Source, format: str, row: dict[str, Any], place: str) -> str:
    """The error that a file of this row alone would be, were nothing allowed to be dropped."""
    strict = {"overlong": "error", "on_bad_row": "error", "mixture": None, "streaming": False}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.jsonl"
        path.write_text(json.dumps(row, default=str) + "\n", encoding="utf-8")
        alone = {"path": str(path), "config": None, "split": "train", "weight": 1.0, "max_epochs": None, "limit": None}
        only = source.model_copy(update={**alone, "format": format or source.format})
        data = view.recipe.data.model_copy(update={**strict, "train": (only,), "eval": ()})
        recipe = view.recipe.model_copy(update={"data": data})
        try:
            prepare_examples(recipe, [only], view.tokenizer)
        except UserError as error:
            why, _, _ = str(error).partition("\n(`data.on_bad_row")  # advice for who stopped at such a row
            return f"dropped: {why}".replace(f"{path}:1", place).replace(str(path), place)
    return f"usable, but not among those that an epoch takes of its source (weight {source.weight:g})"
