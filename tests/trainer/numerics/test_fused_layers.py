"""Norms, gates and rotations in one kernel each way: which modules are replaced, and that they compute the same.

torch's fused norm runs here by its formula for CPUs; Liger's kernels are in tests/trainer/kernels."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.errors import UserError
from finetune.models import fused_layers
from finetune.models.assemble import assemble
from finetune.models.attention import attention_for
from finetune.models.base_model import Base
from finetune.models.config import model_config
from finetune.models.fused_layers import (
    Functions,
    KernelChoice,
    Norm,
    choose_kernels,
    fuse_layers,
    kernel_problem,
    norm_of,
    replace_formulas,
)
from finetune.models.weights import Placement, load_model
from finetune.recipe import load_recipe

SHAPE = {key: value for key, value in tiny.MODELS["llama"].items() if key != "model_type"}
OTHERS = {kind: {"model_type": kind, **SHAPE, "head_dim": 16} for kind in ("gemma2", "gemma3_text", "olmo2", "glm")}
MODELS: dict[str, dict[str, Any]] = {**tiny.MODELS, **OTHERS}
BY_TORCH = KernelChoice("torch", frozenset(), "of a test")
ALL = KernelChoice("torch", frozenset(("gate", "rotation")), "of a test")


def test_a_norm_with_a_gate_is_none() -> None:
    """Without its gate, and in one group, it would compute the plain formula."""
    from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

    assert norm_of(Zamba2RMSNormGated(64, 64)) is None


def model_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[name]), attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)  # norms are not left at 0 and 1
    return model.to(dtype)


def computed(model: Any, autocast: bool = False) -> list[Tensor]:
    """Returns loss and gradients."""
    ids = torch.randint(3, 90, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    loss = nn.functional.cross_entropy(logits.float(), ids[0, 1:])
    loss.backward()
    return [loss.detach(), *(p.grad.float() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    ("name", "norms", "gates", "rotations", "formula"),
    [
        ("llama", 5, 2, 2, Norm(1e-6)),
        ("qwen3", 9, 2, 2, Norm(1e-6)),  # of heads as well
        ("mixtral", 5, 0, 2, Norm(1e-5)),
        ("gemma2", 9, 0, 2, Norm(1e-6, 1.0, True)),  # 1 + w, in fp32; gated by gelu
        ("gemma3_text", 13, 0, 0, Norm(1e-6, 1.0, True)),  # angles of each kind of layer
        ("olmo2", 9, 2, 2, Norm(1e-5, 0.0, True)),
        ("glm", 5, 0, 0, Norm(1.5625e-07)),  # turns neighbours
        ("qwen3_5", 7, 2, 1, Norm(1e-6, 1.0, True)),  # its gated norms take two inputs
    ],
)
def test_formulas_are_found(name: str, norms: int, gates: int, rotations: int, formula: Norm) -> None:
    model = model_of(name)
    before = copy.deepcopy(model)
    assert {norm_of(module) for module in model.modules()} - {None} == {formula}
    replaced = replace_formulas(model, ALL.functions())
    assert (replaced["norm"], replaced["gate"], replaced["rotation"]) == (norms, gates, rotations)
    assert kernel_problem(model.config, ALL) is None
    assert {type(m) for m in model.modules()} == {type(m) for m in before.modules()}
    assert list(model.state_dict()) == list(before.state_dict())


def test_a_run_s_model_is_fused(recipe: dict[str, Any], write_recipe: Any) -> None:
    """Whose config has the attention of the run, which needs documents."""
    loaded = load_recipe(write_recipe(recipe))
    config = model_config(loaded.model)
    model = load_model(
        loaded, Base.of(loaded, config), attention_for(loaded, config, "cpu"), Placement("load", torch.device("cpu"))
    )
    assert fuse_layers(model, model.config, BY_TORCH) == "5 norms by torch (of a test)"
    wrapped = assemble(model, loaded, torch.device("cpu"), has_scores=False, only_sums=True)
    assert wrapped.kernels == "plain (no GPU)"


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "olmo2", "qwen3_5"])
def test_torch_s_norm_is_the_same_in_fp32(name: str) -> None:
    model = model_of(name)
    wanted = computed(copy.deepcopy(model))
    replace_formulas(model, BY_TORCH.functions())
    for found, expected in zip(computed(model), wanted, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5 * expected.abs().max().item())


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32], ids=["16 bit weights", "autocast"])
@pytest.mark.parametrize("norm", [Norm(1e-6), Norm(1e-6, 1.0, True)], ids=["Llama", "Gemma"])
def test_in_bf16_it_is_no_further_from_the_truth(norm: Norm, kind: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(200, 64).bfloat16(), (torch.randn(64) * 0.3 + 1).bfloat16().to(kind)
    upstream = torch.randn(200, 64).bfloat16()

    def result(function: Any, dtype: torch.dtype | None) -> list[Tensor]:
        leaves = [x.to(dtype or x.dtype), weight.to(dtype or kind)]
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is None):
            out = function(*leaves, norm)
        out.backward(upstream.to(out.dtype))
        return [out.detach().double(), *(leaf.grad.double() for leaf in leaves if leaf.grad is not None)]

    exact = result(lambda x, w, norm: nn.functional.rms_norm(x, w.shape, w + norm.offset, norm.eps), torch.float64)
    for ours, usual, truth in zip(
        result(fused_layers._norm_by_torch, None), result(fused_layers._plain_norm, None), exact, strict=True
    ):
        distance, usually = ((one - truth).norm() / truth.norm() for one in (ours, usual))
        # Against a weight in fp32, its rounding to the compute type, as FSDP2 does it: half a bit of bf16.
        assert distance < 1.1 * usually + (2**-9 if kind == torch.float32 else 0)


class Casts(TorchDispatchMode):
    """Elements of hidden states that are cast from fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float32 and args[0].dim() == 3:
            self.elements += args[0].numel()
        return out


def test_layers_read_a_norm_s_output_without_casts() -> None:
    """Of trained weights in fp32 under autocast transformers' norms give fp32, which q, k, v, gate and up each cast."""
    counts = []
    for fused in (False, True):
        model = model_of("llama")
        if fused:
            replace_formulas(model, Functions(norm=lambda x, w, n: nn.functional.rms_norm(x, w.shape, w.to(x), n.eps)))
        model.get_input_embeddings().register_forward_hook(lambda _module, _inputs, out: out.bfloat16())
        with Casts() as casts, torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            model(input_ids=torch.arange(24)[None], use_cache=False)
        counts.append(casts.elements)
    # 5 layers read each layer's norms, the head the last; and each norm casts inside of it, which a kernel does not.
    assert counts[0] - counts[1] >= 2 * 5 * 24 * SHAPE["hidden_size"]


def test_a_norm_that_computes_something_else_keeps_its_forward() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(64)), 1e-6

        def forward(self, x: Tensor) -> Tensor:
            x = x - x.mean(-1, keepdim=True)
            return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    assert norm_of(Centred()) is None
    assert norm_of(nn.LayerNorm(64)) is None


def test_a_model_that_is_not_the_same_keeps_its_forwards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    config = model_of("llama").config
    wrong = fused_layers._PLAIN._replace(gate=lambda a, b: nn.functional.silu(b) * a)
    monkeypatch.setattr(fused_layers, "_PLAIN", wrong)
    assert "the loss differs" in (kernel_problem(config, ALL) or "")
    model = model_of("llama")
    assert fuse_layers(model, config, ALL).startswith("plain (in a trial")
    assert not [module for module in model.modules() if "forward" in vars(module)]
    with pytest.raises(UserError, match="`liger` does not fit LlamaForCausalLM"):
        fuse_layers(model, config, KernelChoice("liger", frozenset(("gate",)), "asked for in the recipe"))


def test_kernels_that_cannot_be_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(choose_kernels("auto", "cpu").functions())
    assert not any(choose_kernels("plain", "cuda").functions())
    assert not any(choose_kernels("auto", "cuda", compiled=True).functions())
    with pytest.raises(UserError, match=r"`liger` is not possible: its kernels need a CUDA device"):
        choose_kernels("liger", "cpu")
    monkeypatch.setattr(fused_layers, "liger_problem", lambda _device: None)
    assert choose_kernels("auto", "cuda") == KernelChoice("torch", ALL.by_liger, "liger-kernel is installed")
    # What they overwrite is read again.
    assert choose_kernels("liger", "cuda", keeps_products=True).by_liger == frozenset()
    with pytest.raises(UserError, match=r"torch\.compile fuses by itself"):
        choose_kernels("liger", "cuda", compiled=True)
