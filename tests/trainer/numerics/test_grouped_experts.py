"""Experts as grouped products: chosen by a trial; with adapters, the same numbers as peft's, of fewer bytes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GptOssConfig, MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from finetune.models.adapters import adapters_off
from finetune.models.assemble import assemble
from finetune.models.attention import attention_for
from finetune.models.base_model import Base
from finetune.models.casts import cast_once
from finetune.models.config import model_config
from finetune.models.experts_trial import alignment_problem, choose_experts, verdict
from finetune.models.moe import group_adapters
from finetune.models.weights import Placement, load_model
from finetune.recipe import load_recipe

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_local_experts": 8}
KINDS: dict[str, Any] = {  # weights as (out, in); and as (in, out), with biases and another gate
    "mixtral": (MixtralExperts, MixtralConfig(**SIZES)),
    "gpt_oss": (GptOssExperts, GptOssConfig(**SIZES)),
}


def layer(kind: str, adapted: tuple[str, ...] = ("gate_up_proj", "down_proj"), experts: Any = None) -> nn.ModuleList:
    of_class, config = KINDS[kind]
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    made = of_class(config) if experts is None else experts
    for name in adapted:
        made = ParamWrapper(made, "default", name, LoraConfig(), r=3, lora_alpha=6)
    for name, weight in made.named_parameters():
        nn.init.normal_(weight, std=0.3)
        weight.requires_grad_("lora_" in name)
    return nn.ModuleList([made])


def results(experts: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Of 13 tokens, of which none chose the last expert."""
    experts.zero_grad()
    torch.manual_seed(1)
    index = torch.rand(13, 7).argsort(1)[:, :2]
    inputs = [torch.randn(13, 16, dtype=dtype).requires_grad_(), torch.rand(13, 2).requires_grad_()]
    output = experts(inputs[0], index, inputs[1])
    output.backward(torch.randn(13, 16).to(dtype))
    gradients = {name: weight.grad for name, weight in experts.named_parameters() if weight.requires_grad}
    found = {"output": output.detach(), "hidden": inputs[0].grad, "routing": inputs[1].grad, **gradients}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def largest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(((found[n].double() - e.double()).norm() / e.double().norm()).item() for n, e in expected.items())


class Largest(TorchDispatchMode):
    """Elements of the largest result of an operator."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not func.is_view:
            self.size = max(self.size, out.numel())
        return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapted", [("gate_up_proj", "down_proj"), ("down_proj",)])
def test_as_peft_but_without_weights_of_all_experts(kind: str, adapted: tuple[str, ...]) -> None:
    peft = layer(kind, adapted)
    ours = copy.deepcopy(peft)
    group_adapters(ours)
    with Largest() as of_peft:
        expected = results(peft[0])
    with Largest() as of_ours:
        found = results(ours[0])
    assert largest(found, expected) < 1e-6
    all_experts = 8 * 24 * 16
    assert of_peft.size >= all_experts
    assert of_ours.size < all_experts
    with adapters_off(peft), adapters_off(ours):
        assert largest(results(ours[0]), results(peft[0])) == 0.0


def test_a_second_adapter_is_left_to_peft() -> None:
    both = layer("mixtral", ("down_proj",))
    wrapper: Any = both[0]
    wrapper.update_layer("other", 3, 6, LoraConfig())
    wrapper.set_adapter(["default", "other"])
    nn.init.normal_(wrapper.lora_B["other"].weight)
    ours = copy.deepcopy(both)
    group_adapters(ours)
    assert largest(results(ours[0]), results(both[0])) == 0.0


def test_adapters_in_fp32_are_cast_once_a_step() -> None:
    exact = layer("mixtral")
    half = copy.deepcopy(exact)
    for name, weight in half.named_parameters():
        if "lora_" not in name:
            weight.data = weight.data.bfloat16()
    peft = copy.deepcopy(half)
    group_adapters(half)
    with torch.autocast("cpu", torch.bfloat16), cast_once():
        first = results(half[0], torch.bfloat16)
        second = results(half[0], torch.bfloat16)
        expected = results(peft[0], torch.bfloat16)
    reference = results(exact[0])
    assert largest(second, first) == 0.0
    assert all(first[name].dtype == torch.float32 for name in first if "lora_" in name)
    assert largest(first, reference) < min(0.02, 1.2 * largest(expected, reference))


def test_an_expert_without_tokens_has_a_gradient_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the kernel leaves its product as the memory was (https://github.com/pytorch/pytorch/issues/172439)."""
    product = torch.nn.functional.grouped_mm

    def leaves_it(rows: Tensor, others: Tensor, *, offs: Tensor) -> Tensor:
        made = product(rows, others, offs=offs)
        if others.dim() == 2:
            made[offs.diff(prepend=offs.new_zeros(1)) == 0] = float("nan")
        return made

    ours = layer("mixtral")
    group_adapters(ours)
    expected = results(ours[0])
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", leaves_it)
    found = results(ours[0])
    assert largest(found, expected) == 0.0
    for name, gradient in found.items():
        if "lora_A" in name:
            assert not gradient.view(8, 3, -1)[7].any()
        if "lora_B" in name:
            assert not gradient.view(len(gradient), 3, 8)[..., 7].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_trial_passes(kind: str, dtype: torch.dtype) -> None:
    model = layer(kind, ())
    assert verdict(model[0], CPU, dtype, True, True) == (None, None)


def test_a_product_that_is_wrong_or_missing_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, recipe: dict[str, Any], write_recipe: Any, made: Path
) -> None:
    product = torch.nn.functional.grouped_mm

    def late(rows: Tensor, others: Tensor, *, offs: Tensor) -> Tensor:  # an expert's last row goes to the next one
        return product(
            rows, others, offs=(offs - 1).clamp_min(0).index_fill_(0, torch.tensor(len(offs) - 1), len(rows))
        )

    def missing(*_: Any, **__: Any) -> Tensor:
        raise NotImplementedError("no kernel for this device")

    recipe["model"]["name"] = str(made / "mixtral")
    recipe.update(mode="lora", lora={"rank": 4})
    loaded = load_recipe(write_recipe(recipe))
    config = model_config(loaded.model)
    for wrong, said in ((late, "in a trial"), (missing, "no kernel for this device"), (product, "and their adapters")):
        model = load_model(
            loaded, Base.of(loaded, config), attention_for(loaded, config, "cpu"), Placement("load", CPU)
        )
        monkeypatch.setattr(torch.nn.functional, "grouped_mm", wrong)
        wrapped = assemble(model, loaded, CPU, has_scores=False, only_sums=True)
        monkeypatch.setattr(torch.nn.functional, "grouped_mm", product)
        assert said in wrapped.kernels
        is_eager = wrapped.config._experts_implementation == "eager"
        assert is_eager == ("experts one by one" in wrapped.kernels) == (wrong is not product)


def test_plain_and_sizes_that_no_kernel_takes() -> None:
    model = layer("mixtral")
    chosen = {"device_type": "cpu", "may_group_adapters": True}
    before = results(model[0])
    said = choose_experts(model, "plain", CPU, torch.float32, **chosen)
    assert said == "experts by transformers' default (asked for in the recipe)"
    assert largest(results(model[0]), before) == 0.0
    assert alignment_problem(model[0].get_base_layer(), torch.float32) is None
    odd = MixtralExperts(MixtralConfig(hidden_size=16, intermediate_size=12, num_local_experts=2))
    assert alignment_problem(odd, torch.bfloat16) is not None
    assert choose_experts(nn.Linear(2, 2), "auto", CPU, torch.float32, **chosen) is None
