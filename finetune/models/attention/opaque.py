"""Attention per document as one operation that torch.compile does not look into: a compiled layer stays one graph, also
where its activations are recomputed (a graph break there would leave the whole layer uncompiled, in silence).

Letters: T tokens of the row, t of one document, N documents, H query heads, K key/value heads, G = H / K, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from finetune.models.attention.per_document import Lengths, one_by_one, seen


@torch.library.custom_op("finetune::per_document", mutates_args=())
def per_document(
    query: Tensor,  # (1, H, T, D)
    key: Tensor,  # (1, K, T, D)
    value: Tensor,  # (1, K, T, D)
    ends: Tensor,  # (N + 1,) on the CPU: 0, then where each document ends
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:  # (1, T, H, D)
    lengths = Lengths(tuple(ends.diff().tolist()))
    return one_by_one(query, key, value, 0.0, scaling, sliding_window, softcap, lengths).contiguous()


@per_document.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, *settings: Any) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])


@torch.library.custom_op("finetune::per_document_backward", mutates_args=())
def per_document_backward(
    gradient: Tensor,  # (1, T, H, D)
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """By the chain rule, in fp32: weights P = softmax(S), S = scaling Q K', capped or not."""
    heads, size, groups = query.shape[1], query.shape[3], key.shape[1]
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    lengths = ends.diff().tolist()
    pieces = (tensor[0].split(lengths, dim=1) for tensor in (gradient.transpose(1, 2), query, key, value))
    for length, *piece in zip(lengths, *pieces, strict=True):
        # Heads that share keys lie end to end: (K, G * t, D) against (K, t, D).
        g, q, k, v = (tensor.float().reshape(groups, -1, size) for tensor in piece)
        scores = q @ k.transpose(1, 2) * scaling  # (K, G * t, t)
        squashed = None if softcap is None else torch.tanh(scores / softcap)
        hidden = ~seen(length, sliding_window, query.device).repeat(heads // groups, 1)
        capped = scores if squashed is None or softcap is None else softcap * squashed
        weights = torch.softmax(capped.masked_fill(hidden, float("-inf")), dim=-1)
        of_weights = g @ v.transpose(1, 2)
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
        if squashed is not None:
            of_scores = of_scores * (1 - squashed.square())
        of_query = (of_scores @ k * scaling).view(heads, length, size)
        found.append((of_query, of_scores.transpose(1, 2) @ q * scaling, weights.transpose(1, 2) @ g))
    of_query, of_key, of_value = (torch.cat(parts, dim=1)[None] for parts in zip(*found, strict=True))
    return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


@per_document_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.settings = inputs[4:]


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    found = per_document_backward(gradient, *ctx.saved_tensors, *ctx.settings)
    return (*found, None, None, None, None)


per_document.register_autograd(_gradients, setup_context=_remember)
