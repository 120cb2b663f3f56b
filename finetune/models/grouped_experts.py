"""A layer of experts with LoRA, as grouped products: one for all experts, in place of one for each.

    y = x W[e]' + s (x A[e]') B[e]'        x (S, I) in the order of experts e, W (E, O, I), A (E, r, I), B (E, O, r)

peft adds s B A to the weights of all experts in each forward, and its backward makes the gradient of all of them, to
take those of A and B from it: two tensors of E x O x I. Here A and B are multiplied by the rows that chose their
expert, as are those of linear layers (lora_linear.py). The same values to rounding.

Letters: T tokens, K experts chosen for each, S = T K rows, E experts, D hidden, I and O sizes of a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from finetune.models.adapters import is_plain
from finetune.models.casts import shared_cast
from finetune.models.stored_experts import stored_product
from finetune.models.stored_layers import stored_matrices

_ALIGNMENT = 16  # bytes, of the strides that torch's grouped products take


class Adapter(NamedTuple):
    """LoRA on a stacked weight, in peft's layout."""

    down: Tensor  # A of all experts, (E r, I)
    up: Tensor  # B, (O, r E)
    scaling: float
    experts: int  # E
    first: int = 0  # of the experts whose weights are here


class GroupedWrapper:
    """Mixed into the class of peft's wrapper around experts: leaves its adapter to the experts' own forward."""

    group: dict[str, Any]  # the wrappers around the same experts, by the parameter that each adapts

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        wrapper: Any = self
        if adapters_in(self.group):
            return wrapper.base_layer(x, *args, **kwargs)
        return super().forward(x, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]  (of peft's)


def adapters_in(wrappers: Mapping[str, Any], first: int = 0) -> dict[str, Adapter]:
    """Returns the adapters by parameter, if this forward may compute them as grouped products; else {}: with several
    adapters or none, in a compiled layer, or if hooks gather their weights (ZeRO-3)."""

    def fuses(wrapper: Any) -> bool:
        name = wrapper.active_adapters[0] if len(wrapper.active_adapters) == 1 else ""
        if wrapper.disable_adapters or wrapper.merged or name not in wrapper.lora_A or wrapper.num_experts == 1:
            return False
        halves = (wrapper.lora_A[name], wrapper.lora_B[name])
        return all(map(is_plain, halves)) and halves[1].bias is None and not wrapper.get_param().requires_grad

    def adapter(wrapper: Any) -> Adapter:
        name = wrapper.active_adapters[0]
        down, up = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
        return Adapter(down, up, wrapper.scaling[name], wrapper.num_experts, first)

    if torch.compiler.is_compiling() or not all(map(fuses, wrappers.values())):
        return {}
    return {parameter: adapter(wrapper) for parameter, wrapper in wrappers.items()}


def with_adapters(
    experts: Any,
    plain: Any,  # its forward without adapters
    wrappers: Mapping[str, Any],
    hidden_states: Tensor,  # (T, D)
    top_k_index: Tensor,  # (T, K)
    top_k_weights: Tensor,  # (T, K)
) -> Tensor:  # (T, D)
    """The forward of a module of experts with adapters; that of its class if they are none of ours."""
    adapters = adapters_in(wrappers)
    if not adapters:
        return plain(hidden_states, top_k_index, top_k_weights)
    device = hidden_states.device.type
    compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_states.dtype
    weights = {name: weight.to(compute) for name, weight in experts.named_parameters(recurse=False)}
    return adapted_experts(experts, weights, adapters, hidden_states.to(compute), top_k_index, top_k_weights)


def adapted_experts(
    experts: Any,
    weights: Mapping[str, Tensor],  # frozen
    adapters: Mapping[str, Adapter],
    hidden_states: Tensor,  # (T, D), in the type of the weights
    top_k_index: Tensor,  # (T, K)
    top_k_weights: Tensor,  # (T, K)
) -> Tensor:  # (T, D)
    """Returns the weighted sums of the outputs of each token's experts. experts: a module of transformers' experts
    interface, whose activation and switches it has."""
    tokens, top_k = top_k_index.shape
    expert, order = top_k_index.reshape(-1).sort(stable=True)  # (S,)
    numbers = torch.arange(len(next(iter(weights.values()))), device=expert.device)
    ends = torch.searchsorted(expert, numbers, right=True, out_int32=True)  # (E,), of the rows of each
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)

    stored = stored_matrices(experts)

    def product(rows: Tensor, name: str) -> Tensor:
        if (matrix := stored.get(name)) is not None:
            with_bias = weights[f"{name}_bias"][expert] if experts.has_bias else None
            return stored_product(rows, weights[name], matrix, adapters.get(name), ends, with_bias)
        matrices = weights[name] if experts.is_transposed else weights[name].transpose(1, 2)  # (E, I, O)
        rows = rows.to(matrices.dtype)  # a gate may compute in fp32
        if name in adapters:
            halves = (adapters[name].down, adapters[name].up)
            cast = partial(aligned_halves, adapter=adapters[name], here=len(matrices), compute=rows.dtype)
            with torch.no_grad():
                # Without a cast they are used at once: FSDP2 has gathered them for this layer, and frees them.
                shares = any(half.dtype != rows.dtype for half in halves)
                casts = shared_cast(halves, cast) if shares else cast(halves)
            outputs: Any = _AdaptedProducts.apply(rows, matrices, adapters[name], ends, *casts, *halves)
        else:
            outputs = grouped_mm(rows, matrices, ends)
        return outputs.add_(weights[f"{name}_bias"][expert]) if experts.has_bias else outputs

    rows: Any = _ToExperts.apply(hidden_states, order, place, top_k)  # (S, D)
    inner = product(rows, "gate_up_proj" if experts.has_gate else "up_proj")
    # The gate of each class has no public name.
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    outputs = product(inner, "down_proj")
    if getattr(experts, "has_post_expert_norm", False):  # later than transformers 5.17
        outputs = experts.post_expert_norm(outputs)
    by_token: Any = _ToTokens.apply(outputs, order, place)
    weighted = by_token.view(tokens, top_k, -1) * top_k_weights[..., None]
    return weighted.sum(1).to(hidden_states.dtype)


class _ToExperts(torch.autograd.Function):
    """Rows (S, D) in the order of experts, of tokens (T, D). Its backward adds up the rows of a token at its places;
    autograd would sort them first, to add in a fixed order."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, order: Tensor, place: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.top_k = top_k
        return hidden_states[order // top_k]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        (place,) = ctx.saved_tensors
        return gradients[0][place].unflatten(0, (-1, ctx.top_k)).sum(1), None, None, None


class _ToTokens(torch.autograd.Function):
    """The same rows in the order of tokens."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows[place]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        (order,) = ctx.saved_tensors
        return gradients[0][order], None, None


def grouped_mm(rows: Tensor, others: Tensor, ends: Tensor) -> Tensor:
    """Returns, for rows (S, I) and matrices (E, I, O), (S, O); for (M, S) and (S, N), the products of the columns and
    rows of each expert, (E, M, N)."""
    return F.grouped_mm(rows, others, offs=ends)


def aligned_halves(
    halves: tuple[Tensor, ...], adapter: Adapter, here: int, compute: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns A (E, R, I) and B (E, R, O) of the experts that are here; ranks beyond r, which align strides, are 0."""
    down, up = halves
    rank = len(down) // adapter.experts
    of_all = down.view(adapter.experts, rank, -1), up.view(len(up), rank, adapter.experts).permute(2, 1, 0)
    step = _ALIGNMENT // compute.itemsize
    aligned = -(-rank // step) * step
    made = []
    for half in of_all:
        own = half[adapter.first : adapter.first + here]
        made.append(half.new_zeros((here, aligned, half.shape[2]), dtype=compute))
        made[-1][:, :rank] = own
    return made[0], made[1]


class _AdaptedProducts(torch.autograd.Function):
    """Outputs (S, O) of rows (S, I). a, b: of `aligned_halves`; down, up: what they were cast from."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        matrices: Tensor,  # (E, I, O)
        adapter: Adapter,
        ends: Tensor,
        a: Tensor,  # (E, R, I)
        b: Tensor,  # (E, R, O)
        down: Tensor,
        up: Tensor,
    ) -> Tensor:
        ctx.scaling, ctx.experts, ctx.first = adapter.scaling, adapter.experts, adapter.first
        ctx.shapes = down.shape, up.shape
        inner = grouped_mm(rows, a.transpose(1, 2), ends)  # (S, R)
        ctx.save_for_backward(rows, matrices, inner, a, b, ends)
        return grouped_mm(rows, matrices, ends).add_(grouped_mm(inner, b, ends), alpha=adapter.scaling)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        rows, matrices, inner, a, b, ends = ctx.saved_tensors
        of_y = gradients[0].contiguous()  # (S, O)
        of_inner = grouped_mm(of_y, b.transpose(1, 2), ends)  # (S, R), without the scaling
        # Experts without rows: on Blackwell their product is not zero
        # (https://github.com/pytorch/pytorch/issues/172439).
        idle = (ends.diff(prepend=ends.new_zeros(1)) == 0)[:, None, None]
        (down, up), rank = ctx.shapes, ctx.shapes[0][0] // ctx.experts

        def of_all(half: Tensor) -> Tensor:  # (E here, R, N) -> (E, r, N)
            own = half[:, :rank].mul_(ctx.scaling).masked_fill_(idle, 0.0)
            if len(own) == ctx.experts:
                return own
            whole = own.new_zeros(ctx.experts, *own.shape[1:])
            whole[ctx.first : ctx.first + len(own)] = own
            return whole

        of_down = of_all(grouped_mm(of_inner.t(), rows, ends)).reshape(down)
        of_up = of_all(grouped_mm(inner.t(), of_y, ends)).permute(2, 1, 0).reshape(up)
        of_rows = None
        if ctx.needs_input_grad[0]:
            of_rows = grouped_mm(of_y, matrices.transpose(1, 2), ends)
            of_rows.add_(grouped_mm(of_inner, a, ends), alpha=ctx.scaling)
        return of_rows, None, None, None, None, None, of_down, of_up
