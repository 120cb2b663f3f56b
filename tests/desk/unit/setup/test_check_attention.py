"""`check` says what `train` would of documents that cannot share a forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finetune.desk.setup.check import check_recipe

PEGASUS = {"model_type": "pegasus", "vocab_size": 384, "d_model": 32, "decoder_layers": 2, "decoder_ffn_dim": 64}
PEGASUS |= {"decoder_attention_heads": 4, "encoder_layers": 1, "encoder_attention_heads": 4, "dropout": 0.0}


@pytest.fixture
def scratch(recipe: dict[str, Any], made: Path) -> dict[str, Any]:
    return {**recipe, "model": {"config": PEGASUS, "tokenizer": str(made / "llama")}}


def test_check_refuses_rows_that_cannot_share_a_forward(scratch: dict[str, Any], write_recipe: Any) -> None:
    report = check_recipe(write_recipe(scratch), ())
    assert report.error is not None
    assert "packed documents of PegasusForCausalLM apart" in report.error
    assert report.error.endswith("set batch.rows_per_device: 1, and no tokens_per_device")


def test_check_notes_that_packing_is_off(scratch: dict[str, Any], write_recipe: Any) -> None:
    report = check_recipe(write_recipe(scratch), ("batch.rows_per_device=1",))
    assert report.error is None
    assert any(note.endswith("one document per forward; packing is off") for note in report.notes)


def test_the_shapes_of_tests_are_packed(recipe: dict[str, Any], write_recipe: Any) -> None:
    assert check_recipe(write_recipe(recipe), ()).error is None
