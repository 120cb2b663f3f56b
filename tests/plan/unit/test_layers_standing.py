"""Layers that stand for others in a timeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from finetune.plan.micro_batch import HeaviestBatch, How
from finetune.plan.shapes import standing_for
from finetune.plan.timeline import timeline_of, weigh
from finetune.recipe import load_recipe

LORA = ["mode=lora", "lora={rank: 4, alpha: 8}", "train.precision=bf16", "train.activation_checkpointing=true"]
CONFIG = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
KINDS = ["sliding_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize("mode", [[], LORA], ids=["full", "lora"])
def test_layers_stand_for_others_with_keys_of_earlier_ones(
    recipe: dict[str, Any], write_recipe: Any, mode: list[str]
) -> None:
    """A timeline is that of a run of all layers, to the byte and the operator."""
    path: Path = write_recipe(recipe)
    config = AutoConfig.for_model(
        "gemma4_text",
        **CONFIG,
        num_hidden_layers=18,
        layer_types=KINDS * 6,
        num_kv_shared_layers=9,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=512,
        sliding_window=32,
        head_dim=16,
        global_head_dim=32,
    )
    standing = standing_for(config)
    assert standing == [0, 1, 2, 1, 1, 5, 1, 7, 8, 9, 9, 11, 9, 9, 11, 9, 16, 17]
    loaded, batch = load_recipe(path, mode), HeaviestBatch((96, 32), 100)
    each = weigh(loaded, config, batch, How(), range(18))
    assert timeline_of(loaded, config, batch, How()) == each
