"""Packed frozen weights: the same bytes as transformers makes as it reads, exact unpacking, shapes without values."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from finetune.errors import UserError
from finetune.models.attention import attention_for
from finetune.models.base_model import Base
from finetune.models.config import model_config
from finetune.models.packed_linear import (
    Fp8Linear,
    ScaledLinear,
    fp8_rows,
    pack_linear_layers,
    scaled_product,
    state_tensors,
    unpacked,
)
from finetune.models.weights import Placement, fuse_adapters, load_model, parameter_counts
from finetune.recipe import load_recipe
from finetune.recipe.schema import Quantization
from finetune.utils import unwrap_peft

CPU = torch.device("cpu")
LORA = {"mode": "qlora", "lora": {"rank": 4, "alpha": 8}}


def load(values: dict[str, Any], write_recipe: Any, placement: Placement, **changes: Any) -> Any:
    recipe = load_recipe(write_recipe({**values, **LORA, **changes}))
    config = model_config(recipe.model)
    return load_model(recipe, Base.of(recipe, config), attention_for(recipe, config, "cpu"), placement)


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
    from finetune.models.packed_linear import pack_fp8

    torch.manual_seed(0)
    layer = pack_fp8(torch.randn(7, 5), torch.randn(7).to(compute), compute)
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


# --- products of 8 bits


def q(rows: torch.Tensor) -> torch.Tensor:  # in fp64
    values, scale = fp8_rows(rows)
    return values.double() * scale.double()


@pytest.fixture
def scaled() -> ScaledLinear:
    """48 x 64; its rows differ in size, so that a scale that is left out shows."""
    from finetune.models.packed_linear import pack_fp8

    torch.manual_seed(0)
    weight = torch.randn(48, 64) * torch.logspace(-2, 1, 48)[:, None]
    layer = pack_fp8(weight, torch.randn(48).bfloat16(), torch.bfloat16)
    layer.__class__ = ScaledLinear
    return cast(ScaledLinear, layer)


def test_scaled_products_are_of_the_operands_that_are_said(scaled: ScaledLinear) -> None:
    """y = q(x) W' + b, dx = q(dy s') w, by their formulas in fp64."""
    weight = unpacked(scaled.weight, scaled.scale, 64).double()  # s w
    x = torch.randn(2, 20, 64).mul_(torch.logspace(-3, 3, 20)[:, None]).bfloat16().requires_grad_()
    of_y = torch.randn(2, 20, 48).bfloat16()
    y = scaled(x)
    (of_x,) = torch.autograd.grad(y, x, of_y)
    assert y.dtype == of_x.dtype == torch.bfloat16
    expected = q(x.detach().view(40, 64)) @ weight.T
    assert scaled.bias is not None
    bound = {"rtol": 2**-7, "atol": 2**-7 * scaled.bias.abs().max().item()}  # y is rounded before and after the bias
    torch.testing.assert_close(y.detach().view(40, 48).double(), expected + scaled.bias.double(), **bound)
    s = scaled.scale.double()
    expected = q(of_y.view(40, 48).double() * s.T) @ (weight / s)
    torch.testing.assert_close(of_x.view(40, 64).double(), expected, rtol=2**-7, atol=2**-20)
    plain = of_y.view(40, 48).double() @ weight  # and that is the gradient, within 8 bits
    assert (of_x.view(40, 64) - plain).norm() / plain.norm() < 2**-4


def test_torch_multiplies_what_is_emulated(scaled: ScaledLinear) -> None:
    """By torch's own product of 8 bits, which CPUs have: the shapes, scales and strides that a GPU is given."""
    x = torch.randn(40, 64).bfloat16()
    values, scale = fp8_rows(x)
    w, s = fp8_rows(unpacked(scaled.weight, scaled.scale, 64))
    theirs = torch._scaled_mm(values, w.t(), scale, s.t().contiguous(), out_dtype=torch.bfloat16)
    assert torch.equal(scaled_product(x, w.t(), s.t()), theirs)


def test_a_token_of_a_scaled_product_does_not_see_the_others(scaled: ScaledLinear) -> None:
    x = torch.randn(40, 64).bfloat16()
    x[30] *= 1e4
    assert torch.equal(scaled(x)[:7], scaled(x[:7]))


def test_adapters_on_scaled_products(recipe: dict[str, Any], write_recipe: Any) -> None:
    """Which layers multiply so, and that a loss falls by the gradients that reach the adapters."""
    recipe["train"]["precision"] = "bf16"
    changes = {"quantization": {"type": "fp8", "compute": "scaled"}}
    model = load(recipe, write_recipe, Placement("load", CPU), **changes)
    fuse_adapters(model, False)
    kinds = {name.rpartition(".")[0]: type(module) for name, module in model.named_modules() if "base_layer" in name}
    assert len(kinds) == 14
    assert set(kinds.values()) == {ScaledLinear}
    ids = torch.arange(1, 25)[None]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=1e-2), []
    for _ in range(4):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = F.cross_entropy(
                model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, :-1].float(), ids[0, 1:]
            )
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in trained)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[3] < losses[2] < losses[1] < losses[0]


def test_layers_of_other_sizes_stay_dequantised_and_a_model_of_them_is_refused() -> None:
    settings = Quantization(type="fp8", compute="scaled")

    class Model(torch.nn.Module):
        _keep_in_fp32_modules = None

        def __init__(self, *sizes: int) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleDict({f"up{size}": torch.nn.Linear(32, size) for size in sizes})
            self.layers["router"] = torch.nn.Linear(32, 32)

        def get_output_embeddings(self) -> None:
            return None

    model: Any = Model(48, 40)
    pack_linear_layers(model, settings, torch.bfloat16, CPU, CPU, [])
    kinds = [type(layer) for layer in model.layers.values()]
    assert kinds == [ScaledLinear, Fp8Linear, Fp8Linear]
    with pytest.raises(
        UserError, match=r"Model has no linear layers that .* must be multiples of 16\. Fix: use `dequantised`"
    ):
        pack_linear_layers(Model(40), settings, torch.bfloat16, CPU, CPU, [])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo does
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled_products_are_no_farther_from_the_truth(scaled: ScaledLinear, backend: str) -> None:
    """As one graph. Inductor leaves out the rounding of inputs to bf16 before the one to 8 bits, which moves some."""
    x, of_y = torch.randn(40, 64), torch.randn(40, 48).bfloat16()
    truth = x.double() @ unpacked(scaled.weight, scaled.scale, 64).double().T
    results, distances = [], []
    for layer in (scaled, torch.compile(scaled, fullgraph=True, backend=backend)):
        given = x.clone().requires_grad_()
        y = layer(given)
        y.backward(of_y)
        results.append((y, given.grad))
        distances.append((y.double() - scaled.bias.double() - truth).norm() / truth.norm())
    assert backend != "aot_eager" or all(map(torch.equal, *results))
    assert torch.equal(results[0][1], results[1][1])
    assert distances[1] <= 1.05 * distances[0] < 0.05
