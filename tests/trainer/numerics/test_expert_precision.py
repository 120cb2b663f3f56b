"""Experts compute in the type that the recipe's precision says, and take part in every forward."""

from __future__ import annotations

import tiny
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts

from finetune.models.moe import compute_experts_in, experts_of, reach_experts


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


def test_experts_that_no_token_chose_have_gradients() -> None:
    """On one rank of several it may be so: LongCat-Flash has experts without weights, which tokens may choose alone."""
    torch.manual_seed(0)
    settings = {"n_routed_experts": 4, "zero_expert_num": 4, "expert_ffn_hidden_size": 24, "hidden_size": 16}
    experts = LongcatFlashExperts(AutoConfig.for_model("longcat_flash", **settings))
    for weight in experts.parameters():
        torch.nn.init.normal_(weight)
    hidden, weights = torch.randn(5, 16), torch.rand(5, 2)
    without, mixed = torch.full((5, 2), 6), torch.tensor([[0, 6]] * 5)

    def outputs(index: Tensor) -> Tensor:
        return experts(hidden, index, weights)

    before = [outputs(without), outputs(mixed)]
    reach_experts(experts)
    after = [outputs(without), outputs(mixed)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert not before[0].requires_grad
    after[0].sum().backward()
    for weight in experts.parameters():
        assert weight.grad is not None
        assert not weight.grad.any()
