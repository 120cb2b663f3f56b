"""Norms, gates and rotations by Liger's kernels, in Triton's interpreter, against transformers' own operations."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny
import torch
from interpreted import needs_interpreter
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.models import fused_layers
from finetune.models.fused_layers import Norm, choose_kernels, fuse_layers

pytestmark = needs_interpreter
SHAPE = {key: value for key, value in tiny.MODELS["llama"].items() if key != "model_type"}
OTHERS = {kind: {"model_type": kind, **SHAPE, "head_dim": 16} for kind in ("gemma2", "olmo2")}
MODELS: dict[str, dict[str, Any]] = {**tiny.MODELS, **OTHERS}
TOKENS = 10


def computed(model: Any) -> dict[str, Tensor]:
    """Returns the loss, and gradients by name."""
    ids = torch.randint(3, 90, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    loss = nn.functional.cross_entropy(logits, ids[0, 1:])
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "olmo2", "mixtral", "qwen3_5"])
def test_a_model_with_kernels_is_the_same(name: str, recomputed: bool) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**MODELS[name])
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa" if name != "gemma2" else "eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    wanted = computed(copy.deepcopy(model))
    said = fuse_layers(model, config, choose_kernels("liger", "cpu"))
    assert "norms by liger" in said
    if recomputed:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    found = computed(model)
    assert found.keys() == wanted.keys()
    for key, expected in wanted.items():
        largest = expected.abs().max().item()
        torch.testing.assert_close(found[key], expected, rtol=0, atol=1e-4 * largest + 1e-7, msg=key)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32], ids=["16 bit weights", "fp32 weights"])
@pytest.mark.parametrize("norm", [Norm(1e-6), Norm(1e-6, 1.0, True), Norm(1e-6, 0.0, True)], ids=str)
def test_a_norm_in_bf16_is_no_further_from_the_truth(norm: Norm, kind: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(6, 64).bfloat16(), (torch.randn(64) * 0.3 + 1).bfloat16()
    upstream = torch.randn(6, 64).bfloat16()

    def result(function: Any, of_x: torch.dtype, of_weight: torch.dtype) -> list[Tensor]:
        leaves = [x.to(of_x, copy=True).requires_grad_(), weight.to(of_weight, copy=True).requires_grad_()]
        out = function(*leaves, norm)
        out.backward(upstream.to(out.dtype))
        return [one.double() for one in (out.detach(), *(leaf.grad for leaf in leaves)) if one is not None]

    def exact(x: Tensor, weight: Tensor, norm: Norm) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps) * (weight + norm.offset)

    ours, usual = (
        result(function, torch.bfloat16, kind) for function in (fused_layers._norm_by_liger, fused_layers._plain_norm)
    )
    for found, plain, truth in zip(ours, usual, result(exact, torch.float64, torch.float64), strict=True):
        distance, usually = ((one - truth).norm() / truth.norm() for one in (found, plain))
        assert distance < 1.1 * usually + 2**-9  # half a bit: its output is bf16 if the weight is in fp32, too


def test_gate_and_rotation_in_bf16_round_as_transformers() -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(1, TOKENS, 24).bfloat16() for _ in range(2))
    q, k = (torch.randn(1, heads, TOKENS, 16).bfloat16() for heads in (4, 2))
    cos, sin = (torch.randn(1, TOKENS, 8).repeat(1, 1, 2).bfloat16() for _ in range(2))
    for ours, plain, inputs in (
        (fused_layers._gate_by_liger, fused_layers._plain_gate, (a, b)),
        (fused_layers._rotation_by_liger, fused_layers._plain_rotation, (q, k, cos, sin)),
    ):
        results = []
        for function in (ours, plain):
            leaves = [tensor.clone().requires_grad_() for tensor in inputs[:2]]
            out = function(*(leaf * 1 for leaf in leaves), *(tensor.clone() for tensor in inputs[2:]))
            outputs = out if isinstance(out, tuple) else (out,)
            found = [one.detach().clone() for one in outputs]
            torch.autograd.backward(outputs, [torch.ones_like(one) for one in outputs])
            results.append([*found, *(leaf.grad for leaf in leaves)])
        torch.testing.assert_close(*results, rtol=2**-7, atol=2**-7)


def test_what_is_overwritten_is_not_read_again() -> None:
    """Of a layer in recomputation, whose backward runs on products that were computed again."""
    torch.manual_seed(0)
    up, gate = nn.Linear(8, 16), nn.Linear(8, 16)
    x = torch.randn(3, 8, requires_grad=True)

    def layer(x: Tensor) -> Tensor:
        return fused_layers._gate_by_liger(gate(x), up(x))

    checkpoint(layer, x, use_reentrant=False).sum().backward()
    found, x.grad = x.grad, None
    (nn.functional.silu(gate(x)) * up(x)).sum().backward()
    torch.testing.assert_close(found, x.grad, rtol=1e-5, atol=1e-6)
