"""Keys of recipes whose rows name files."""

from __future__ import annotations

from finetune.recipe.schema import Model


def test_a_tower_has_an_older_name() -> None:
    assert Model(name="org/model", train=("language", "vision")).train == ("language", "tower")  # pyright: ignore
    assert Model.model_validate({"name": "org/model", "train": ["projector", "vision"]}).train == ("projector", "tower")
