"""A weight in two modules that FSDP2 shards one by one is found before it shards anything."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, BertConfig, LlamaConfig

from finetune.engine.sharding import shared_by_units


def test_a_weight_of_two_units_is_named_and_a_tied_head_is_not() -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
    with torch.device("meta"):
        bert = AutoModelForCausalLM.from_config(BertConfig(is_decoder=True, intermediate_size=16, **sizes))
        llama = AutoModelForCausalLM.from_config(
            LlamaConfig(tie_word_embeddings=True, intermediate_size=16, num_key_value_heads=2, **sizes)
        )
    bert.tie_weights()
    llama.tie_weights()
    assert (
        shared_by_units(bert, list(bert.bert.encoder.layer))
        == "`cls.predictions.bias` and `cls.predictions.decoder.bias`"
    )
    assert shared_by_units(llama, list(llama.model.layers)) is None
    llama.model.layers[1].mlp = llama.model.layers[0].mlp
    found = shared_by_units(llama, list(llama.model.layers))
    assert found == "`model.layers.0.mlp.gate_proj.weight` and `model.layers.1.mlp.gate_proj.weight`"
