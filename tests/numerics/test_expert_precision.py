"""Stacked experts compute in the type that the recipe's precision says, whatever their weights are held in."""

from __future__ import annotations

import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.models.moe import compute_experts_in, experts_of


def test_experts_follow_autocast() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny.MODELS["mixtral"]))
    experts = experts_of(model)["model.layers.0.mlp.experts"]
    hidden, weights = torch.randn(30, 64), torch.rand(30, 2)
    index = torch.rand(30, 8).argsort(1)[:, :2]
    whole = experts(hidden, index, weights)
    compute_experts_in(model, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        half = experts(hidden, index, weights)
    assert half.dtype == torch.bfloat16  # as any other layer's, or hidden states would be fp32 from here on
    half.sum().backward()
    gradient = experts.get_parameter("down_proj").grad
    assert gradient is not None
    assert gradient.dtype == torch.float32
    assert torch.equal(gradient, gradient.bfloat16().float())  # made in 16 bits
    assert experts_of(model)["model.layers.0.mlp.experts"] is experts  # still to be divided
    experts.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(half, experts(hidden, index, weights))
    assert 1e-4 < (half - whole).abs().max() / whole.abs().max() < 0.05
