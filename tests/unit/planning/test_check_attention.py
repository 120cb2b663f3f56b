"""`check` says what `train` would of documents that cannot share a forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finetune.planning.check import check_recipe

BLOOM = {"model_type": "bloom", "vocab_size": 384, "hidden_size": 32, "n_head": 4, "n_layer": 2}


@pytest.fixture
def scratch(recipe: dict[str, Any], made: Path) -> dict[str, Any]:
    return {**recipe, "model": {"config": BLOOM, "tokenizer": str(made / "llama")}}


def test_check_refuses_rows_that_cannot_share_a_forward(scratch: dict[str, Any], write_recipe: Any) -> None:
    report = check_recipe(write_recipe(scratch), ())
    assert report.error is not None
    assert report.error.startswith("BloomForCausalLM does not take transformers' attention functions: one document per")
    assert report.error.endswith("set batch.rows_per_device: 1, and no tokens_per_device")


def test_check_notes_that_packing_is_off(scratch: dict[str, Any], write_recipe: Any) -> None:
    report = check_recipe(write_recipe(scratch), ("batch.rows_per_device=1",))
    assert report.error is None
    assert any(note.endswith("one document per forward; packing is off") for note in report.notes)


def test_the_shapes_of_tests_are_packed(recipe: dict[str, Any], write_recipe: Any) -> None:
    assert check_recipe(write_recipe(recipe), ()).error is None
