"""Packed frozen weights: the same bytes as transformers makes as it reads, exact unpacking, shapes without values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from finetune.models.attention import attention_for
from finetune.models.config import model_config
from finetune.models.quantized import Fp8Linear, fp8_rows, state_tensors, unpacked
from finetune.models.weights import Placement, load_model, parameter_counts
from finetune.recipe import load_recipe
from finetune.utils import unwrap_peft

CPU = torch.device("cpu")
LORA = {"mode": "qlora", "lora": {"rank": 4, "alpha": 8}}


def load(values: dict[str, Any], write_recipe: Any, placement: Placement, **changes: Any) -> Any:
    recipe = load_recipe(write_recipe({**values, **LORA, **changes}))
    config = model_config(recipe.model)
    return load_model(recipe, config, attention_for(recipe, config, "cpu"), placement)


def tensors(model: Any) -> dict[str, torch.Tensor]:
    """All that a rank must have of the frozen base: parameters, buffers and quantisation states."""
    base = unwrap_peft(model)
    found = {**dict(base.named_parameters()), **dict(base.named_buffers())}
    for path, module in base.named_modules():
        found |= {f"{path}.{name}": tensor for name, tensor in state_tensors(module)}
    return {name.replace(".base_layer", ""): tensor for name, tensor in found.items() if "lora_" not in name}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_subclass(torch.Tensor).contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize(
    ("name", "compute", "double"),
    [("llama", torch.bfloat16, True), ("llama_tied", torch.float32, False), ("mixtral", torch.float32, True)],
)
def test_four_bits_are_those_of_transformers(
    recipe: dict[str, Any], write_recipe: Any, made: Path, name: str, compute: torch.dtype, double: bool
) -> None:
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=compute,
        bnb_4bit_quant_storage=compute,
    )
    theirs = AutoModelForCausalLM.from_pretrained(
        made / name, dtype=compute, quantization_config=settings, device_map={"": CPU}
    )
    recipe["model"]["name"] = str(made / name)
    recipe["train"]["precision"] = "fp32" if compute == torch.float32 else "bf16"
    chosen = {"type": "nf4", "double_quant": double}
    ours = load(recipe, write_recipe, Placement("load", CPU), quantization=chosen)
    expected, got = tensors(theirs), tensors(ours)
    assert any("absmax" in key for key in expected)
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert got[key].dtype == value.dtype, key
        assert torch.equal(as_bytes(got[key]), as_bytes(value)), key


@pytest.mark.parametrize(("kind", "dora"), [("nf4", False), ("nf4", True), ("fp8", False)])
def test_ranks_without_values_have_the_same_shapes(
    recipe: dict[str, Any], write_recipe: Any, kind: str, dora: bool
) -> None:
    changes = {"quantization": {"type": kind}, "lora": {"rank": 4, "dora": dora}}
    shapes = load(recipe, write_recipe, Placement("meta", CPU, packed_on=CPU), **changes)
    real = load(recipe, write_recipe, Placement("load", CPU, packed_on=CPU), **changes)
    ours, theirs = tensors(shapes), tensors(real)
    assert all(tensor.is_meta for tensor in ours.values())
    assert [(k, t.shape, t.dtype) for k, t in ours.items()] == [(k, t.shape, t.dtype) for k, t in theirs.items()]
    assert parameter_counts(shapes) == parameter_counts(real)


@pytest.mark.parametrize("kind", ["nf4", "fp8"])
def test_a_stage_packs_its_own_layers(recipe: dict[str, Any], write_recipe: Any, kind: str) -> None:
    placement = Placement("load", CPU, frozenset({1}))
    stage = load(recipe, write_recipe, placement, quantization={"type": kind})
    both = load(recipe, write_recipe, Placement("load", CPU), quantization={"type": kind})
    own, full = tensors(stage), tensors(both)
    assert {".layers.0." in key for key, tensor in own.items() if tensor.is_meta} == {True}
    assert all(torch.equal(as_bytes(t), as_bytes(full[key])) for key, t in own.items() if not t.is_meta)


# --- fp8


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_rows_of_fp8_are_exact_in_every_compute_type(compute: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(33, 30) * torch.logspace(-6, 3, 33)[:, None]
    weight[4] = 0.0
    values, scale = fp8_rows(weight)
    assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5)), "powers of two"
    exact = values.double() * scale.double()
    assert torch.equal((values.to(compute) * scale.to(compute)).double(), exact)
    # 3 bits after the point, and below the smallest normal number an absolute step
    bound = (weight.double().abs() / 16).maximum(scale.double() * 2**-10)
    assert ((exact - weight).abs() <= bound).all()
    largest = weight.abs().amax(1, keepdim=True) / scale
    assert (largest[largest > 0] >= 224).all()
    assert (largest <= 448).all()


@pytest.mark.parametrize("compute", [torch.float64, torch.bfloat16])
def test_the_product_is_that_of_the_unpacked_weights(compute: torch.dtype) -> None:
    from finetune.models.quantized import _pack_fp8

    torch.manual_seed(0)
    layer = _pack_fp8(torch.randn(7, 5), torch.randn(7).to(compute), compute)
    assert isinstance(layer, Fp8Linear)
    weight = unpacked(layer.weight, layer.scale, 5)
    assert weight.shape == (7, 5)
    assert weight.dtype == compute
    x = torch.randn(2, 3, 5).to(compute).requires_grad_()
    ours, plain = layer(x), F.linear(x, weight, layer.bias)
    assert torch.equal(ours, plain)
    grad = torch.randn_like(plain)
    (got,) = torch.autograd.grad(ours, x, grad)
    (expected,) = torch.autograd.grad(plain, x, grad)
    torch.testing.assert_close(got, expected)
