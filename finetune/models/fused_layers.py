"""Computes norms, gates and rotations by one kernel in the forward and one in the backward, in place of several passes.

    norm        y = x / rms(x) * (offset + w)       torch's fused operator, or Liger's
    gate        y = silu(a) * b                     Liger's
    rotation    q, k turned by cos, sin             Liger's, in place

In 16 bit an eager norm takes six passes over the hidden states, in fp32, and more in the backward; a gate keeps one
more activation than its inputs. Which module computes which formula is found by running its own forward on small
tensors, to the last bit, not by names; a module that computes another keeps its forward. That a model whose modules
are replaced computes the same is tried on a tiny copy in fp32, with plain functions in place of kernels; the kernels
themselves are proved in tests/trainer/kernels. Liger: https://github.com/linkedin/Liger-Kernel, Hsu et al. 2024,
https://arxiv.org/abs/2410.10989.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from finetune.errors import UserError
from finetune.models.attention.isolation import Trial, compare, trial_problem
from finetune.models.head.chunked import liger_problem
from finetune.models.patches import replace_forward
from finetune.models.tiny_config import tiny_config
from finetune.models.trials import FAILURES, tiny_problem


class Norm(NamedTuple):
    """The formula of a norm."""

    eps: float
    offset: float = 0.0  # added to the weight: 1 for those that are zero-centred (Gemma, Qwen3-Next)
    # The weight multiplies in fp32, before the result is rounded to the type of the input (Gemma, OLMo 2); else after.
    in_fp32: bool = False


class Functions(NamedTuple):
    """Functions that take the place of formulas; None: the architecture's own."""

    norm: Callable[[Tensor, Tensor, Norm], Tensor] | None = None  # (x, weight, formula) -> as x
    gate: Callable[[Tensor, Tensor], Tensor] | None = None  # (a, b) -> silu(a) * b
    # (q, k, cos, sin) -> q, k: (B, H, T, D) each, cos and sin (B, T, D), whose halves are the same
    rotation: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None


@dataclass(frozen=True)
class KernelChoice:
    """The kernels of a run, with the reason."""

    norm: Literal["torch", "liger"] | None  # None: the architecture's own
    by_liger: frozenset[str]  # `gate`, `rotation`
    reason: str

    def functions(self) -> Functions:
        norms = {"torch": _norm_by_torch, "liger": _norm_by_liger, None: None}
        return Functions(
            norms[self.norm],
            _gate_by_liger if "gate" in self.by_liger else None,
            _rotation_by_liger if "rotation" in self.by_liger else None,
        )


def choose_kernels(
    requested: Literal["auto", "plain", "liger"],
    device: str,
    compiled: bool = False,
    keeps_products: bool = False,
) -> KernelChoice:
    """Returns which kernels a run may take. device: `cuda` or `cpu`; compiled: `train.compile`; keeps_products: a
    backward reads products again that Liger's kernels have overwritten, with selective recomputation or a pipeline
    that runs it in two parts. Raises UserError if the requested ones are not possible."""
    none = partial(KernelChoice, None, frozenset())
    if requested == "plain":
        return none("asked for in the recipe")
    no_liger = liger_problem(device)
    if requested == "liger" and (why := no_liger or ("torch.compile fuses by itself" if compiled else None)):
        raise UserError(f"model.kernels: `liger` is not possible: {why}. Fix: use `auto`")
    if compiled:
        return none("torch.compile fuses by itself")
    if device != "cuda" and requested == "auto":
        return none("no GPU")
    in_place = frozenset(() if keeps_products or no_liger else ("gate", "rotation"))
    if requested == "liger":
        return KernelChoice("liger", in_place, "asked for in the recipe")
    return KernelChoice("torch", in_place, no_liger or "liger-kernel is installed")


def fuse_layers(model: nn.Module, config: PretrainedConfig, choice: KernelChoice) -> str:
    """Replace the forward of each module whose formula is known, in place; returns the kernels and the reason, as text.

    model: transformers' or peft's, before an engine wraps it. Raises UserError if Liger's kernels are asked for, and
    the architecture has no such module, or is not the same with them.
    """
    functions = choice.functions()
    if not any(functions):
        return f"plain ({choice.reason})"
    if (why := kernel_problem(config, choice)) is not None:
        if choice.norm == "liger":
            raise UserError(f"model.kernels: `liger` does not fit {type(model).__name__}: {why}. Fix: use `auto`")
        return f"plain ({why})"
    replaced = replace_formulas(model, functions)
    names = {"norm": choice.norm, "gate": "liger", "rotation": "liger"}
    parts = [f"{count} {kind}s by {names[kind]}" for kind, count in replaced.items()]
    if not parts:
        return "plain (no module computes a formula that is known here)"
    return f"{', '.join(parts)} ({choice.reason})"


def replace_formulas(model: nn.Module, functions: Functions) -> Counter[str]:
    """Replace forwards, in place; returns the number of modules by the name of the formula."""
    replaced: Counter[str] = Counter()
    for module in model.modules():
        if "forward" in vars(module):  # replaced for another reason
            continue
        if functions.norm is not None and (norm := norm_of(module)) is not None:
            replace_forward(module, partial(_norm_forward, module, functions.norm, norm), "fused norm")
            replaced["norm"] += 1
        elif functions.gate is not None and is_gate(module):
            replace_forward(module, partial(_gate_forward, module, functions.gate), "fused gate")
            replaced["gate"] += 1
        elif functions.rotation is not None and (own := rotates(module, model)) is not None:
            forward = MethodType(_with_rotation(own, functions.rotation), module)
            replace_forward(module, forward, "fused rotation")
            replaced["rotation"] += 1
    return replaced


def kernel_problem(config: PretrainedConfig, choice: KernelChoice) -> str | None:
    """Returns why a tiny copy of the model is another with the formulas that are replaced; None if it is the same."""
    real = choice.functions()
    plain_ones = Functions(
        _PLAIN.norm if real.norm else None,
        _PLAIN.gate if real.gate else None,
        _PLAIN.rotation if real.rotation else None,
    )

    def differ(tiny: Any) -> str | None:
        plain = Trial(tiny, "eager")  # the config of a loaded model has its own, which may need documents
        reference, replaced = plain.alone(), Trial(tiny, "eager", plain)
        replace_formulas(replaced.model, plain_ones)
        return trial_problem(lambda: compare(reference, replaced.alone()))

    names = [name for name, function in plain_ones._asdict().items() if function]
    return tiny_problem(config.get_text_config(), tiny_config, f"kernels {names}", differ)


# --- formulas


def _plain_norm(x: Tensor, weight: Tensor, norm: Norm) -> Tensor:
    """Returns the norm as transformers' models compute it, step by step."""
    rows = x.float()
    rows = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + norm.eps)
    return (rows * (norm.offset + weight.float())).type_as(x) if norm.in_fp32 else weight * rows.type_as(x)


def _plain_gate(a: Tensor, b: Tensor) -> Tensor:
    return F.silu(a) * b


def _plain_rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + _turned(q) * sin, k * cos + _turned(k) * sin


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


_PLAIN = Functions(_plain_norm, _plain_gate, _plain_rotation)


def norm_of(module: nn.Module) -> Norm | None:
    """Returns the formula of a norm; None if the module is no norm, or has another formula, such as one with a gate."""
    if [*dict(module.named_parameters(recurse=False))] != ["weight"] or [*module.children(), *module.buffers()]:
        return None
    if len(inspect.signature(module.forward).parameters) != 1:
        return None
    numbers = [value for value in vars(module).values() if isinstance(value, float) and 0 < value < 0.01]
    if len(numbers) != 1:
        return None
    kinds = (bool, int, float, str, type(None))  # of attributes that a forward may depend on, in addition to weights
    settings = [(name, v) for name, v in vars(module).items() if not name.startswith("_") and isinstance(v, kinds)]
    return _formula_of(type(module), numbers[0], tuple(settings))


@cache
def _formula_of(kind: type[nn.Module], eps: float, settings: tuple[tuple[str, Any], ...]) -> Norm | None:
    probe = kind.__new__(kind)
    nn.Module.__init__(probe)
    vars(probe).update(settings)
    generator = torch.Generator().manual_seed(0)
    # Rows of several sizes: of the smallest eps decides.
    x = torch.randn(4, 64, generator=generator) * torch.tensor([[1.0], [1e-3], [30.0], [0.1]])
    weight = torch.randn(64, generator=generator) * 0.2 + 0.5
    types = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]
    for norm in (Norm(eps), Norm(eps, 1.0, True), Norm(eps, 0.0, True)):
        for of_x, of_weight in types:
            probe.weight = nn.Parameter(weight.to(of_weight), requires_grad=False)
            try:
                found = kind.forward(probe, x.to(of_x))
            except FAILURES:
                return None
            wanted = _plain_norm(x.to(of_x), weight.to(of_weight), norm)
            if not isinstance(found, Tensor) or found.dtype != wanted.dtype or not torch.equal(found, wanted):
                break
        else:
            return norm
    return None


def is_gate(module: nn.Module) -> bool:
    """Returns whether a module is a feed-forward gated by silu: down(silu(gate(x)) * up(x))."""
    parts = dict(module.named_children())
    if parts.keys() != {"gate_proj", "up_proj", "down_proj", "act_fn"} or [*module.parameters(recurse=False)]:
        return False
    return _gates(type(module), type(parts["act_fn"]))


@cache
def _gates(kind: type[nn.Module], activation: type[nn.Module]) -> bool:
    generator = torch.Generator().manual_seed(0)
    layers = {name: nn.Linear(8, 8, bias=False, device="cpu") for name in ("gate_proj", "up_proj", "down_proj")}
    with torch.no_grad():
        for layer in layers.values():
            layer.weight.copy_(torch.randn(8, 8, generator=generator))
    probe = kind.__new__(kind)
    nn.Module.__init__(probe)
    x = torch.randn(3, 8, generator=generator)
    try:
        for name, layer in {**layers, "act_fn": activation()}.items():
            setattr(probe, name, layer)
        found = kind.forward(probe, x)
    except FAILURES:
        return False
    down, gate, up = (layers[f"{name}_proj"] for name in ("down", "gate", "up"))
    return isinstance(found, Tensor) and torch.equal(found, down(_plain_gate(gate(x), up(x))))


_ROTATION = "apply_rotary_pos_emb"  # the name of transformers' function in the file of each architecture


def rotates(module: nn.Module, model: nn.Module) -> FunctionType | None:
    """Returns the forward of an attention layer that turns queries and keys by halves, by that function of its file."""
    forward = type(module).forward
    if not isinstance(forward, FunctionType) or _ROTATION not in forward.__code__.co_names:
        return None
    rotaries = [one for one in model.modules() if type(one).__name__.endswith("RotaryEmbedding")]
    if len(rotaries) != 1 or "forward" in vars(rotaries[0]):
        return None
    same = _turns_halves(forward.__globals__[_ROTATION]) and _has_equal_halves(rotaries[0])
    return forward if same else None


@cache
def _turns_halves(function: Callable[..., Any]) -> bool:
    generator = torch.Generator().manual_seed(0)
    q, k, cos, sin = (
        torch.randn(shape, generator=generator) for shape in ((2, 4, 5, 8), (2, 2, 5, 8), *[(2, 5, 4)] * 2)
    )
    cos, sin = (torch.cat((half, half), -1) for half in (cos, sin))
    try:
        for kind in (torch.float32, torch.bfloat16):
            inputs = [tensor.to(kind) for tensor in (q, k, cos, sin)]
            found = function(*inputs)
            if not all(torch.equal(*pair) for pair in zip(found, _plain_rotation(*inputs), strict=True)):
                return False
    except FAILURES:
        return False
    return True


def _has_equal_halves(rotary: Any) -> bool:
    """Returns whether the angles of a rotary module's halves are the same, as the kernel reads the first one only."""
    try:
        cos, sin = type(rotary)(copy.deepcopy(rotary.config)).to("cpu")(torch.zeros(1, 5, 8), torch.arange(5)[None])
    except FAILURES:
        return False
    return all(torch.equal(*angles.chunk(2, -1)) for angles in (cos, sin))


# --- forwards


def _norm_forward(
    module: Any, function: Callable[[Tensor, Tensor, Norm], Tensor], norm: Norm, hidden_states: Tensor
) -> Tensor:
    return function(hidden_states, module.weight, norm)


def _gate_forward(module: Any, function: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> Tensor:
    return module.down_proj(function(module.gate_proj(x), module.up_proj(x)))


@cache
def _with_rotation(forward: FunctionType, function: Callable[..., tuple[Tensor, Tensor]]) -> FunctionType:
    """Returns a forward that calls `function` in place of its file's."""
    own = forward.__globals__[_ROTATION]

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if args or kwargs or cos.shape[-1] != q.shape[-1]:
            return own(q, k, cos, sin, *args, **kwargs)
        return function(q, k, cos, sin)

    names = {**forward.__globals__, _ROTATION: rotate}
    same = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    same.__kwdefaults__ = forward.__kwdefaults__
    return same


# --- kernels


def _norm_by_torch(x: Tensor, weight: Tensor, norm: Norm) -> Tensor:
    """Returns the norm by `aten::_fused_rms_norm`, which CUDA has for a weight in the type of its input; without
    autocast, which would compute in fp32. Against transformers it does not round before the product with the weight."""
    with torch.autocast(x.device.type, enabled=False):
        if norm.in_fp32:
            return rms_norm(x.float(), norm.offset + weight.float(), norm.eps).to(x.dtype)
        return rms_norm(x, weight.to(x.dtype), norm.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _norm_by_liger(x: Tensor, weight: Tensor, norm: Norm) -> Tensor:
    casting = "gemma" if norm.in_fp32 else "llama"
    # Not in place of the gradient, which a residual may share.
    return liger_function("rms_norm", "LigerRMSNormFunction")(x, weight, norm.eps, norm.offset, casting, False)


def _gate_by_liger(a: Tensor, b: Tensor) -> Tensor:
    """Returns silu(a) * b; the backward overwrites the inputs with their gradients."""
    return liger_function("swiglu", "LigerSiLUMulFunction")(a, b)


def _rotation_by_liger(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates in place; the backward, too."""
    return liger_function("rope", "LigerRopeFunction")(q, k, cos, sin)


@cache
def liger_function(file: str, name: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"liger_kernel.ops.{file}"), name).apply
