"""Stand-ins for operations that do not run on fake tensors, or not without other ranks; they keep and free the same
bytes: products of packed weights, of ZeRO-3's linear layers and of grouped experts, fused kernels, and collectives."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.integrations import moe

from finetune.engine import tensor_experts, tensor_group
from finetune.engine.tensor_group import ParameterShard
from finetune.models import fused_layers, grouped_experts, packed_linear, stored_experts
from finetune.models.head import chunked
from finetune.models.stored_layers import StoredLinear

_EXPERTS = 32  # of a layer, at most, that rows choose: with more a plan would take minutes


@contextlib.contextmanager
def stand_ins(compute: torch.dtype, keeps_inputs_alone: bool, on_gpu: bool = False) -> Iterator[None]:
    """Replaces functions of libraries within. keeps_inputs_alone: of linear layers, as under ZeRO-3; on_gpu: the CPU's
    autocast answers for the one of CUDA, without which peft's 4-bit layers cast their inputs to fp32, dropout is the
    one kernel that a GPU has for it, which keeps a byte for each element, and the head's weight gradient is added up by
    its product."""
    is_enabled: Any = torch.is_autocast_enabled
    dropout: Any = torch.nn.functional.dropout
    if on_gpu:
        torch.is_autocast_enabled = lambda device="cpu": is_enabled(device)
        torch.nn.functional.dropout = lambda x, p=0.5, training=True, inplace=False: (
            torch.native_dropout(x, p, True)[0] if training and p else x
        )
    # Grouped products call these two of their module, and nothing public chooses between them.
    can_use, grouped, linear = moe._can_use_grouped_mm, moe._grouped_mm, torch.nn.functional.linear
    unpacked_weight, bounds = packed_linear.unpacked_weight, stored_experts.bounds
    packed_linear.unpacked_weight = lambda layer, weight: (
        unpacked_weight(layer, weight)  # of plain operators
        if isinstance(layer, StoredLinear)
        else torch.empty(layer.out_features, layer.in_features, dtype=compute)
    )
    stored_experts.bounds = even_bounds
    of_adapters = grouped_experts.grouped_mm
    norm, liger, of_head = fused_layers.rms_norm, fused_layers.liger_function, chunked.liger_cross_entropy
    add_product = chunked.add_product
    if on_gpu:  # a product of 16-bit matrices is added up in fp32 without a copy
        chunked.add_product = lambda total, left, right, first: torch.addmm(
            total, left, right, out_dtype=total.dtype, out=total, beta=0 if first else 1
        )
    fused_layers.rms_norm, fused_layers.liger_function = fused_norm, liger_function
    chunked.liger_cross_entropy = LigerKernel
    collectives: Any = tensor_group.dist
    tensor_group.dist = _OneRank()  # pyright: ignore[reportAttributeAccessIssue]
    places_here, tensor_experts.places_here = tensor_experts.places_here, even_places
    if keeps_inputs_alone:
        torch.nn.functional.linear = lambda x, weight, bias=None: _InputAlone.apply(x, weight, bias)
    # torch knows the shapes of grouped products in bf16 only, though its kernels compute others; transformers' own
    # operator for these has the same in- and outputs, and always makes the weight's gradient. In transformers 5.17 the
    # backward of that reads values.
    if compute != torch.bfloat16:
        moe._can_use_grouped_mm, grouped_experts.grouped_mm = (lambda *_: False), grouped_product
        if not hasattr(torch.ops.transformers, "grouped_mm_fallback_backward"):
            moe._grouped_mm = lambda rows, weight, offs: _Grouped.apply(rows.to(weight.dtype), weight)
    try:
        yield
    finally:
        moe._can_use_grouped_mm, moe._grouped_mm, torch.nn.functional.linear = can_use, grouped, linear
        grouped_experts.grouped_mm = of_adapters
        tensor_group.dist, torch.is_autocast_enabled = collectives, is_enabled
        tensor_experts.places_here = places_here
        chunked.add_product = add_product
        fused_layers.rms_norm, fused_layers.liger_function, chunked.liger_cross_entropy = norm, liger, of_head
        packed_linear.unpacked_weight, stored_experts.bounds = unpacked_weight, bounds
        torch.nn.functional.dropout = dropout


class _OneRank:
    """Collectives of a single rank."""

    def all_reduce(self, _tensor: Tensor, **_: Any) -> None: ...

    def all_gather_into_tensor(self, _parts: Tensor, _part: Tensor, **_: Any) -> None: ...

    def reduce_scatter_tensor(self, _own: Tensor, _parts: Tensor, **_: Any) -> None: ...


class _Unpacked(torch.autograd.Function):
    """A product with a weight that is unpacked for it, in the forward and again in the backward
    (`models/packed_linear.py`, bitsandbytes' MatMul4Bit)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.shape = shape
        return torch.nn.functional.linear(x, torch.empty(shape, dtype=x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        return gradient @ torch.empty(ctx.shape, dtype=gradient.dtype), None


def unpacked_product(layer: Any, x: Tensor) -> Tensor:
    """Returns x times the transpose of a layer's packed weight."""
    kind = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    out: Any = _Unpacked.apply(x.to(kind), (layer.out_features, layer.in_features))
    return out.to(x.dtype)


class _InputAlone(torch.autograd.Function):
    """DeepSpeed's linear layer under stage 3: keeps input and weight, and autocast's copies only during a product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        output = x.matmul(weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        x, weight, bias = ctx.saved_tensors
        with torch.autocast("cpu", dtype=gradient.dtype, enabled=gradient.dtype != torch.float32, cache_enabled=False):
            grad_x = gradient.matmul(weight) if ctx.needs_input_grad[0] else None
            flat = gradient.reshape(-1, gradient.shape[-1])
            grad_weight = flat.t().matmul(x.reshape(-1, x.shape[-1])) if ctx.needs_input_grad[1] else None
        grad_bias = flat.sum(0) if bias is not None and ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias


class _Grouped(torch.autograd.Function):
    """Products of each row with the matrix of its group: rows (S, I), weight (G, I, O)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return rows.new_empty(len(rows), weight.shape[2])

    @staticmethod
    def backward(ctx: Any, *_gradients: Any) -> Any:
        return tuple(map(torch.empty_like, ctx.saved_tensors))


def grouped_product(rows: Tensor, others: Tensor, ends: Tensor) -> Tensor:
    """Of `grouped_experts.grouped_mm`."""
    if others.dim() == 2:
        return rows.new_empty(len(ends), len(rows), others.shape[1])
    if rows.requires_grad:
        return _Grouped.apply(rows, others)  # pyright: ignore[reportReturnType]
    return torch.ops.transformers.grouped_mm_fallback(rows, others, ends)  # counted as a product


# --- fused kernels, each an operator: fake tensors would take torch's norm to pieces, and Triton has none for them


def _operator(schema: str, shapes: Callable[..., Any]) -> Any:
    """schema: `name(arguments) -> results`, as torch's own; those with `!` are changed in place."""
    name, bracket, signature = schema.partition("(")
    changed = re.findall(r"!\) (\w+)", signature)
    operator = torch.library.custom_op(f"finetune::{name}", shapes, mutates_args=changed, schema=bracket + signature)
    operator.register_fake(shapes)
    return operator


_norm = _operator(
    "norm(Tensor x, Tensor weight) -> (Tensor, Tensor)",
    lambda x, weight: (torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)),
)
_norm_backward = _operator(
    "norm_backward(Tensor gradient, Tensor x, Tensor weight, Tensor scale) -> (Tensor, Tensor)",
    lambda gradient, x, weight, scale: (torch.empty_like(x), torch.empty_like(weight)),
)
_gate = _operator("gate(Tensor a, Tensor b) -> Tensor", lambda a, b: torch.empty_like(a))
_gate_backward = _operator("gate_backward(Tensor gradient, Tensor(a!) a, Tensor(b!) b) -> ()", lambda *_: None)
_rotate = _operator("rotate(Tensor(a!) q, Tensor(b!) k, Tensor cos, Tensor sin) -> ()", lambda *_: None)
_cross_entropy = _operator(
    "cross_entropy(Tensor(a!) logits, Tensor read, Tensor again, Tensor losses) -> ()", lambda *_: None
)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        out, scale = _norm(x, weight)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        of_x, of_weight = _norm_backward(gradients[0].contiguous(), *ctx.saved_tensors)
        return of_x, of_weight if ctx.needs_input_grad[1] else None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return _gate(a, b)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        a, b = (tensor.detach() for tensor in ctx.saved_tensors)
        _gate_backward(gradients[0], a, b)
        return a, b


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _turned(q, k, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return *_turned(*gradients, *ctx.saved_tensors), None, None


def _turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, k = (tensor.transpose(1, 2).contiguous() for tensor in (q, k))
    _rotate(q.detach(), k.detach(), cos, sin)
    return q.transpose(1, 2), k.transpose(1, 2)


def fused_norm(x: Tensor, weight: Tensor, _eps: float) -> Tensor:
    return _Norm.apply(x, weight)  # pyright: ignore[reportReturnType]


def liger_function(file: str, _name: str) -> Any:
    if file == "rms_norm":
        return lambda x, weight, *_: _Norm.apply(x, weight)
    return {"swiglu": _Gate, "rope": _Rotation}[file].apply


class LigerKernel:
    """Liger's kernel of the cross entropy, which reads logits twice and puts their gradient in their place."""

    def __getitem__(self, _grid: tuple[int]) -> Callable[..., None]:
        return lambda X_ptr, loss_ptr, **_: _cross_entropy(X_ptr, X_ptr, X_ptr, loss_ptr)


def even_places(choices: Tensor, shard: ParameterShard) -> Tensor:
    """Of `tensor_experts.places_here`: tokens choose all experts equally often."""
    return choices.new_zeros(len(choices) * shard.size // shard.total)


def even_bounds(ends: Tensor, rows: int) -> list[int]:
    """Of `stored_experts.bounds`: rows choose some of the experts equally often, each as many as one has of all."""
    experts = min(len(ends), _EXPERTS)
    return [rows * min(i, experts) // experts for i in range(len(ends) + 1)]


class EvenExchange:
    """An `Exchange` (models/moe.py) of tokens that choose all experts equally often."""

    def __init__(self, size: int):
        self.size = size

    def weight(self, stacked: Tensor) -> Tensor:
        return stacked

    def counts(self, leaving: Tensor) -> tuple[Tensor, list[int], list[int]]:
        return leaving.clone(), [], []

    def rows(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        return _Travel.apply(rows)  # pyright: ignore[reportReturnType]: torch's stubs have no type for it


class _Travel(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, rows: Tensor) -> Tensor:
        return torch.empty_like(rows.contiguous())

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Any:
        return torch.empty_like(gradients[0].contiguous())
