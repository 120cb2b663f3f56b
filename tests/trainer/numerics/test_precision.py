"""What a precision means: types in memory, and that fp16's scale is invisible in the result."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from finetune.engine.optimizer_step import LossScale, NonFinite
from finetune.engine.overflow import half_products, overflow_as_sum
from finetune.models.attention import attention_for
from finetune.models.attention.per_document import prepare
from finetune.models.base_config import dtypes
from finetune.models.base_model import Base
from finetune.models.config import model_config
from finetune.models.head import TokenLoss
from finetune.models.loss_model import CausalLMWithLoss, TargetTokens
from finetune.models.weights import Placement, load_model
from finetune.recipe import load_recipe
from finetune.recipe.schema import Quantization
from finetune.training.parts import precision_there

CPU = torch.device("cpu")
LORA = {"mode": "lora", "lora": {"rank": 4, "alpha": 8}}


def loaded_model(recipe: dict[str, Any], write_recipe: Any, precision: str, **changes: Any) -> Any:
    recipe["train"]["precision"] = precision
    loaded = load_recipe(write_recipe({**recipe, **changes}))
    config = model_config(loaded.model)
    model = load_model(loaded, Base.of(loaded, config), attention_for(loaded, config, "cpu"), Placement("load", CPU))
    types = dtypes(loaded)
    return CausalLMWithLoss(model, autocast=types.compute if types.compute != types.trained else None)


@pytest.mark.parametrize(
    ("precision", "trained", "frozen"),
    [
        ("fp32", torch.float32, torch.float32),
        ("bf16", torch.float32, torch.bfloat16),
        ("fp16", torch.float32, torch.float16),
        ("bf16_true", torch.bfloat16, torch.bfloat16),
    ],
)
def test_types_in_memory(
    recipe: dict[str, Any], write_recipe: Any, precision: str, trained: torch.dtype, frozen: torch.dtype
) -> None:
    full = loaded_model(recipe, write_recipe, precision)
    assert {p.dtype for p in full.parameters()} == {trained}
    adapted = loaded_model(recipe, write_recipe, precision, **LORA)
    assert {p.dtype for p in adapted.parameters() if p.requires_grad} == {trained}
    assert {p.dtype for p in adapted.parameters() if not p.requires_grad} == {frozen}


@pytest.mark.parametrize(("precision", "compute"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_products_and_residuals_are_in_the_compute_type_gradients_in_fp32(
    recipe: dict[str, Any], write_recipe: Any, precision: str, compute: torch.dtype
) -> None:
    model = loaded_model(recipe, write_recipe, precision)
    seen: dict[str, torch.dtype] = {}
    for name in ("model.layers.0", "model.layers.1.mlp.down_proj", "lm_head"):
        model.causal_lm.get_submodule(name).register_forward_hook(
            lambda _m, _i, output, name=name: seen.update({name: output.dtype})
        )
    model(input_ids=torch.arange(3, 12)[None], use_cache=False, **prepare((9,))).logits.sum().backward()
    assert set(seen.values()) == {compute}, seen
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


def test_loss_scale_halves_on_overflow_and_grows_after_good_steps() -> None:
    scale = LossScale.of("fp16")
    first = scale.value
    assert not scale.update(math.inf)
    assert scale.value == first / 2
    scale.growth_interval = 3
    assert [scale.update(1.0) for _ in range(3)] == [True] * 3
    assert scale.value == first


def test_loss_scale_gives_up_on_a_gradient_that_is_itself_not_finite() -> None:
    scale = LossScale(enabled=True, value=0.5)
    with pytest.raises(NonFinite):
        scale.update(math.nan)


def test_no_scale_outside_fp16() -> None:
    for precision in ("fp32", "bf16", "bf16_true"):
        scale = LossScale.of(precision)
        assert scale.value == 1.0
        assert scale.update(math.inf), "the engine, not the scale, stops such a run"


def test_a_gradient_overflows_where_the_sum_over_ranks_does() -> None:
    """Beside the largest number of fp16, 65,504, which the summands of two ranks and of four stay below."""
    gradient = torch.tensor([32752.0, -32752.0, 32760.0, -32770.0, math.inf, math.nan, 1e-3])
    for sums, infinite in (
        ([], [4, 5]),
        ([lambda t: t + t], [2, 3, 4, 5]),
        ([lambda t: t + t, lambda t: t + t], [0, 1, 2, 3, 4, 5]),
    ):
        weight = torch.zeros(len(gradient), requires_grad=True)
        overflow_as_sum(weight, sums)
        (weight * gradient).sum().backward()
        assert weight.grad is not None
        assert weight.grad.isinf().nonzero().flatten().tolist() == infinite
        finite = weight.grad.isfinite()
        assert torch.equal(weight.grad[finite], gradient[finite])  # as they were


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_gradients_that_are_products_in_fp16_are_known(recipe: dict[str, Any], write_recipe: Any, mode: str) -> None:
    """All others are sums in fp32, of an embedding's recurring tokens, or scaled in fp32, as the head's: they have bits
    that fp16 has not."""
    model = loaded_model(recipe, write_recipe, "fp16", **(LORA if mode == "lora" else {}))
    ids = torch.arange(37).remainder(5)[None] + 3
    targets = TargetTokens(torch.arange(36), ids[0, 1:], TokenLoss())
    (model(input_ids=ids, targets=targets, use_cache=False, **prepare((37,))).total * 1000.7).backward()
    rounded = {
        name
        for name, p in model.causal_lm.named_parameters()
        if p.grad is not None and torch.equal(p.grad, p.grad.half().float())
    }
    assert {product.name for product in half_products(model)} == rounded
    assert len(rounded) > 10


def test_quantised_weights_survive_an_evaluation(recipe: dict[str, Any], write_recipe: Any) -> None:
    """bitsandbytes repacks 4-bit weights in eval on some CPUs and ruins later gradients; ours stay as they were."""
    quantised = {"mode": "qlora", "quantization": {"type": "nf4"}, "lora": {"rank": 4, "alpha": 8}}
    model = loaded_model(recipe, write_recipe, "fp32", **quantised)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(input_ids=torch.arange(3, 12)[None], use_cache=False, **prepare((9,))).logits.square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.requires_grad]

    before = gradients()
    model.eval()
    with torch.no_grad():
        model(input_ids=torch.arange(3, 12)[None], use_cache=False, **prepare((9,)))
    model.train()
    for a, b in zip(before, gradients(), strict=True):
        assert torch.equal(a, b)


def test_quantised_storage_is_a_float_that_fsdp2_can_shard(recipe: dict[str, Any], write_recipe: Any) -> None:
    quantised = {"mode": "qlora", "quantization": {"type": "nf4"}, "lora": {"rank": 4, "alpha": 8}}
    for precision, storage in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        model = loaded_model(recipe, write_recipe, precision, **quantised)
        packed = {p.dtype for p in model.parameters() if type(p).__name__ == "Params4bit"}
        assert packed == {storage}


def test_a_plan_says_what_a_device_makes_of_a_precision() -> None:
    said = [precision_there(*case) for case in (("fp32", "cuda"), ("fp32", "cpu"), ("fp8", "cpu"), ("fp8", "cuda"))]
    assert said == ["fp32 (TF32 is off: no tensor cores)", "fp32", "fp8, emulated", "fp8"]
    scaled = [precision_there("bf16", device, Quantization(type="fp8", compute="scaled")) for device in ("cpu", "cuda")]
    assert scaled == ["bf16, packed layers in fp8, emulated", "bf16, packed layers in fp8"]
