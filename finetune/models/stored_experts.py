"""Products of stacked experts whose weights are in the bytes of their files (stored_layers.py).

    y[e] = x[e] W[e]' + s (x[e] A[e]') B[e]'      for the experts e that rows chose, one after the other

An expert's W is unpacked for its product and dropped, in the forward and again in the backward, so that memory has one
of them. The host has to know which rows are whose: it waits for them once in each product.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from finetune.models.stored_layers import StoredMatrix


class Halves(Protocol):
    """LoRA on a stacked weight, as `grouped_experts.Adapter`."""

    @property
    def down(self) -> Tensor: ...  # A of all experts, (E r, I)
    @property
    def up(self) -> Tensor: ...  # B, (O, r E)
    @property
    def scaling(self) -> float: ...
    @property
    def experts(self) -> int: ...
    @property
    def first(self) -> int: ...  # of the experts whose weights are here


def stored_product(
    rows: Tensor,  # (S, I), in the order of experts
    packed: Tensor,  # (E, bytes) as floats of the compute type
    matrix: StoredMatrix,
    adapter: Halves | None,
    ends: Tensor,  # (E,), of the rows of each expert
    bias: Tensor | None,  # (S, O)
) -> Tensor:  # (S, O)
    """Returns the outputs of each row's expert."""
    rows, factors, scaling = rows.to(packed.dtype), (None, None), 0.0
    if adapter is not None:
        count, here, scaling = adapter.experts, len(packed), adapter.scaling
        own = slice(adapter.first, adapter.first + here)
        down = adapter.down.view(count, -1, adapter.down.shape[1])[own]  # (E, r, I)
        up = adapter.up.view(len(adapter.up), -1, count)[..., own].permute(2, 0, 1)  # (E, O, r)
        factors = (down.to(packed.dtype), up.to(packed.dtype))
    outputs: Any = _ExpertProducts.apply(rows, packed, matrix, bounds(ends, len(rows)), scaling, *factors)
    return outputs if bias is None else outputs + bias.to(outputs.dtype)


def bounds(ends: Tensor, rows: int) -> list[int]:
    """Returns the first row of each expert, and the end, `rows`. Waits for the device."""
    return [0, *ends.tolist()]


class _ExpertProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        packed: Tensor,
        matrix: StoredMatrix,
        firsts: list[int],
        scaling: float,
        down: Tensor | None,  # (E, r, I)
        up: Tensor | None,  # (E, O, r)
    ) -> Tensor:
        ctx.matrix, ctx.firsts, ctx.scaling, ctx.adapted = matrix, firsts, scaling, down is not None
        ctx.save_for_backward(rows, packed, *(half for half in (down, up) if half is not None))
        outputs = rows.new_empty(len(rows), matrix.shape[0])
        for expert, (start, end) in enumerate(pairwise(firsts)):
            if start == end:
                continue
            x = rows[start:end]
            y = x @ matrix.unpack(packed[expert], rows.dtype).t()
            if down is not None and up is not None:
                y = torch.addmm(y, x @ down[expert].t(), up[expert].t(), alpha=scaling)
            outputs[start:end] = y
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        rows, packed, *halves = ctx.saved_tensors
        needs_rows, of_y, scaling = ctx.needs_input_grad[0], gradients[0], ctx.scaling
        of_rows = torch.empty_like(rows) if needs_rows else None
        of_down, of_up = (torch.zeros_like(half) for half in halves) if halves else (None, None)
        for expert, (start, end) in enumerate(pairwise(ctx.firsts)):
            if start == end:
                continue
            own = slice(start, end)
            of_x = of_y[own] @ ctx.matrix.unpack(packed[expert], rows.dtype) if of_rows is not None else None
            if not halves:
                if of_rows is not None and of_x is not None:
                    of_rows[own] = of_x
                continue
            down, up = halves[0][expert], halves[1][expert]
            of_inner = (of_y[own] @ up) * scaling  # (n, r); the scaling at the smallest, as in lora_linear.py
            assert of_down is not None
            assert of_up is not None
            of_down[expert] = of_inner.t() @ rows[own]
            of_up[expert] = of_y[own].t() @ ((rows[own] @ down.t()) * scaling)
            if of_rows is not None and of_x is not None:
                of_rows[own] = torch.addmm(of_x, of_inner, down)
        return of_rows, None, None, None, None, of_down, of_up
