"""Head and cross entropy, a chunk of positions at a time, so that logits (S, V) exist neither in the forward nor in the
backward.

Letters: S supervised tokens, C of them at once, V vocabulary, D hidden size.

The gradient is made in the forward, while a chunk's logits are there: three matrix products as in the plain way, where
recomputation would take four. It is that of the sum of all losses, times whatever the backward brings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from finetune.models.head.formula import (
    Formula,
    LogitMap,
    TokenLosses,
    at_least_fp32,
    losses_and_gradient,
    token_losses,
)

# Of one chunk's logits in fp32. CPU: benchmarks/head.py. Accelerators: by arithmetic, not measured: 1,024 rows at 128k
# words, where the matrix products outweigh reading the weight and adding up its gradient.
CHUNK_BYTES = {"cpu": 32 * 2**20, "accelerator": 512 * 2**20}
FEWEST_ROWS = 128  # below, the matrix products wait for the weight


def rows_at_once(vocabulary: int, device: str) -> int:
    """C."""
    return max(FEWEST_ROWS, CHUNK_BYTES["cpu" if device == "cpu" else "accelerator"] // (4 * vocabulary))


@dataclass(frozen=True)
class Work:
    targets: Tensor  # (S,)
    formula: Formula
    logit_map: LogitMap
    rows: int  # C

    def chunks(self) -> Iterator[slice]:
        """Of like size; at least one, so that a forward without supervised tokens has a graph all the same."""
        tokens = len(self.targets)
        count = max(1, -(-tokens // self.rows))
        for i in range(count):
            yield slice(i * tokens // count, (i + 1) * tokens // count)


def linear_losses(hidden: Tensor, weight: Tensor, bias: Tensor | None, work: Work) -> TokenLosses:
    """Of a head that is one matrix. hidden: (S, D), weight: (V, D), bias: (V,)."""
    if _needs_gradient(hidden, weight, bias):
        return TokenLosses(*_Linear.apply(hidden, weight, bias, work))
    compute = _compute_type(weight)
    matrix, offset = weight.to(compute), None if bias is None else bias.to(compute)  # once, not for every chunk
    return _only_losses(hidden, lambda x: torch.nn.functional.linear(x.to(compute), matrix, offset), work)


def module_losses(hidden: Tensor, call: Callable[[Tensor], Tensor], trained: list[Tensor], work: Work) -> TokenLosses:
    """Of any head: adapters, DoRA, quantised weights. call: (C, D) -> (C, V); trained: its parameters."""
    if _needs_gradient(hidden, *trained):
        return TokenLosses(*_Module.apply(hidden, call, work, *trained))
    return _only_losses(hidden, call, work)


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _only_losses(hidden: Tensor, call: Callable[[Tensor], Tensor], work: Work) -> TokenLosses:
    pieces = [
        token_losses(work.logit_map(at_least_fp32(call(hidden[rows]))), work.targets[rows], work.formula)
        for rows in work.chunks()
    ]
    each = torch.cat(pieces)
    return TokenLosses(each.sum(), each)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, work: Work) -> tuple[Tensor, Tensor]:
        compute = _compute_type(weight)
        with torch.autocast(hidden.device.type, enabled=False):  # the types are said here, out= knows no autocast
            each, gradients = _linear_chunks(ctx.needs_input_grad[:3], hidden, weight, bias, work, compute)
        return _finish(ctx, each, gradients, (hidden, weight, bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        return *_scaled(ctx, gradient), None


class _Module(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, call: Callable[[Tensor], Tensor], work: Work, *trained: Tensor
    ) -> tuple[Tensor, Tensor]:
        needed = ctx.needs_input_grad[0]
        of_hidden = torch.empty_like(hidden) if needed else None
        sums = [torch.zeros_like(at_least_fp32(p)) for p in trained]
        pieces = []
        for rows in work.chunks():
            with torch.enable_grad():
                x = hidden[rows].detach().requires_grad_(needed)
                losses = token_losses(work.logit_map(at_least_fp32(call(x))), work.targets[rows], work.formula)
                inputs = [x, *trained] if needed else trained
                found = list(torch.autograd.grad(losses.sum(), inputs, allow_unused=True))
            if of_hidden is not None:
                of_hidden[rows] = found.pop(0)
            for total, part in zip(sums, found, strict=True):
                if part is not None:
                    total.add_(part)
            pieces.append(losses.detach())
        return _finish(ctx, torch.cat(pieces), [of_hidden, *sums], (hidden, *trained))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        of_hidden, *of_trained = _scaled(ctx, gradient)
        return of_hidden, None, None, *of_trained


def _linear_chunks(
    needs: tuple[bool, ...], hidden: Tensor, weight: Tensor, bias: Tensor | None, work: Work, compute: torch.dtype
) -> tuple[Tensor, list[Tensor | None]]:
    """Losses (S,) and the gradients of hidden, weight and bias that are needed, those of the weights in fp32."""
    held = torch.promote_types(compute, torch.float32)
    matrix, offset = weight.to(compute), None if bias is None else bias.to(compute)
    of_hidden = torch.empty_like(hidden) if needs[0] else None
    of_weight = torch.zeros_like(weight, dtype=held) if needs[1] else None
    of_bias = torch.zeros_like(bias, dtype=held) if bias is not None and needs[2] else None
    each = hidden.new_empty(len(hidden), dtype=held)
    shape = (min(work.rows, len(hidden)), len(weight))
    # Made once: fresh memory for every chunk costs the CPU as much as the softmax.
    product, gradient = hidden.new_empty(shape, dtype=compute), hidden.new_empty(shape, dtype=held)
    logits = product if held == compute else torch.empty_like(gradient)
    for rows in work.chunks():
        x = hidden[rows].to(compute)
        raw, out = product[: len(x)], gradient[: len(x)]
        torch.mm(x, matrix.t(), out=raw)
        if offset is not None:
            raw.add_(offset)
        upcast = raw if held == compute else logits[: len(x)].copy_(raw)
        each[rows], back = losses_and_gradient(upcast, work.targets[rows], work.formula, work.logit_map, out)
        if of_bias is not None:
            of_bias.add_(back.sum(0))
        back = back if held == compute else raw.copy_(back)
        if of_hidden is not None:
            of_hidden[rows] = back @ matrix
        if of_weight is not None:
            _add_product(of_weight, back.t(), x)
    return each, [of_hidden, of_weight, of_bias]


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, added up in the type of `total`."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.device.type == "cuda":
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.add_(left @ right)


def _compute_type(weight: Tensor) -> torch.dtype:
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def _finish(
    ctx: Any, each: Tensor, gradients: list[Tensor | None], inputs: tuple[Tensor | None, ...]
) -> tuple[Tensor, Tensor]:
    ctx.gradients = gradients
    ctx.types = [None if x is None else x.dtype for x in inputs]
    ctx.mark_non_differentiable(each)
    ctx.set_materialize_grads(False)
    return each.sum(), each


def _scaled(ctx: Any, gradient: Tensor) -> list[Tensor | None]:
    """The gradients of the forward, times that of its sum. Handed over, not kept: the weight's is as large as it."""
    if ctx.gradients is None:
        raise RuntimeError("the LM head's gradients are gone after one backward: run the forward again")
    found, ctx.gradients = ctx.gradients, None
    return [None if g is None else g.mul_(gradient).to(t) for g, t in zip(found, ctx.types, strict=True)]
