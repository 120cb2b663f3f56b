"""RoPE whose frequencies depend on the length of a sequence: each document of a row has its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config

from finetune.models.attention import DOCUMENTS, per_document
from finetune.models.attention.per_document import rotate_per_document
from finetune.models.config import length_dependent_rope

LENGTHS = (40, 9, 23, 17)  # the model was trained for 16 tokens; not in order, since `dynamic` remembers the longest
SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
FACTORS = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
CONFIGS = {
    "dynamic": LlamaConfig(
        **SHAPE,
        max_position_embeddings=16,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    ),
    "longrope": Phi3Config(
        **SHAPE,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 16,
            **FACTORS,
        },
    ),
}


def model_of(rope_type: str, attention: str) -> Any:
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[rope_type])  # transformers notes the attention in it
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model.train()


def packed(model: Any, ids: torch.Tensor) -> torch.Tensor:
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    arguments = per_document.prepare(LENGTHS)
    return model(input_ids=ids, position_ids=positions, use_cache=False, **arguments).logits[0]


@pytest.mark.parametrize("rope_type", CONFIGS)
def test_a_packed_document_rotates_as_if_it_were_alone(rope_type: str) -> None:
    ids = torch.randint(3, 128, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    fresh, model = model_of(rope_type, "sdpa"), model_of(rope_type, DOCUMENTS)
    alone = [copy.deepcopy(fresh)(input_ids=part, use_cache=False).logits[0] for part in ids.split(LENGTHS, dim=1)]
    wanted = torch.cat([logits.detach() for logits in alone])
    assert (packed(copy.deepcopy(model), ids) - wanted).abs().max() > 1e-2, "transformers' own: the test can fail"
    rotate_per_document(model)
    for _ in range(2):  # nothing is left of a row for the next
        torch.testing.assert_close(packed(model, ids), wanted, rtol=0, atol=1e-5)
    short = ids[:, :9]
    single = model(input_ids=short, position_ids=torch.arange(9)[None], use_cache=False, **per_document.prepare((9,)))
    torch.testing.assert_close(single.logits, fresh(input_ids=short, use_cache=False).logits, rtol=0, atol=1e-5)


def test_only_types_that_depend_on_length_are_named() -> None:
    assert length_dependent_rope(CONFIGS["dynamic"]) == ["dynamic"]
    assert length_dependent_rope(CONFIGS["longrope"]) == ["longrope"]
    assert length_dependent_rope(LlamaConfig()) == []
