"""`data.eval: {share: ...}`, and what is a row of a txt file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.data.dataset import Dataset, build_held_out, build_training
from finetune.data.sources.source import read_rows
from finetune.errors import UserError
from finetune.models.base_model import Base
from finetune.recipe import load_recipe
from finetune.recipe.schema import Source


def parts(path: Path, *overrides: str) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """(trained, held out) as (file, row) of every example."""
    recipe = load_recipe(path, overrides)
    renderer = Base.of(recipe).renderer(recipe.objective)
    training, held_out = build_training(recipe, renderer), build_held_out(recipe, renderer)
    assert isinstance(training, Dataset)
    assert held_out is not None
    trained, held = ([(one.path, one.row) for one in data.examples] for data in (training, held_out))
    return trained, held


def test_rows_that_are_held_out_are_never_trained_on(recipe: dict[str, Any], write_recipe: Any) -> None:
    recipe["data"]["eval"] = {"share": 0.25}
    path = write_recipe(recipe)
    trained, held = parts(path)
    assert len(held) == 30
    assert len(trained) + len(held) == 120
    assert not {*trained} & {*held}
    assert parts(path, "train.max_steps=3", "data.max_length=96") == (trained, held)  # a choice of rows and seed alone
    assert {*parts(path, "run.seed=43")[1]} != {*held}
    twice, still = parts(path, "data.train.0.weight=2")
    assert (len(twice), still) == (180, held)


def test_pieces_and_repetitions_of_a_row_stay_together(
    recipe: dict[str, Any], write_recipe: Any, tmp_path: Path
) -> None:
    rows = [{"text": " ".join([f"{i} river stone"] * 20)} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 2))
    recipe["data"] |= {"train": [{"path": str(tmp_path / "rows.jsonl")}], "eval": {"share": 0.2}, "overlong": "split"}
    trained, held = parts(write_recipe(recipe))
    assert len(trained) + len(held) == 80  # two pieces of each
    sides = [{(row - 1) % 20 for _, row in side} for side in (trained, held)]
    assert len(sides[1]) == 4
    assert not sides[0] & sides[1]


def test_a_share_of_nothing(recipe: dict[str, Any], write_recipe: Any) -> None:
    recipe["data"]["eval"] = {"share": 0.001}
    with pytest.raises(UserError, match=r"data\.eval\.share: it holds out no row at all"):
        parts(write_recipe(recipe))


@pytest.mark.parametrize(
    ("unit", "rows"),
    [
        (None, [(2, "one"), (3, "two"), (6, "three")]),
        ("line", [(2, "one"), (3, "two"), (6, "three")]),
        ("paragraph", [(2, "one\ntwo"), (6, "three")]),
        ("file", [(2, "one\ntwo\n\n\nthree")]),
    ],
)
def test_rows_of_a_text(unit: Any, rows: list[tuple[int, str]], tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\none\ntwo\n \n\nthree\n\n")
    read = [(number, row["text"]) for _, number, row in read_rows(Source(path=str(path), text_unit=unit))]
    assert read == rows
