"""Causal attention within documents for queries and keys that are parts of a row: from pieces that need no mask.

A stretch of queries sees, of its own stretch, each document's part causally; of earlier ones only the one document that
reaches across, and of that document everything. So a piece is a square of one document, or a rectangle that is seen in
full.

The weights of a piece are relative to its keys; with the logarithm of their sum before the division (`lse`), results
for all the keys of a query merge into the full result, and the gradient of each piece can be computed by itself from
the full result (https://arxiv.org/abs/2310.01889; the formulas are flash attention's,
https://arxiv.org/abs/2307.08691, section 3.1).

Letters: T tokens of the row, t queries, s keys that are here, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from finetune.data.batch import Stretches
from finetune.models.attention.sinks import Attended

aten = torch.ops.aten


class Piece(NamedTuple):
    queries: slice
    keys: slice
    causal: bool


def pieces(document_lengths: Sequence[int], mine: Stretches, theirs: Stretches) -> list[Piece]:
    """Returns the keys at `theirs` that queries at `mine` see, both counted from the first that is here.

    Stretches of both are the same one, or disjoint, or one of keys is the full row.
    """
    ends = list(accumulate(document_lengths))
    seen, q = [], 0
    for first, end in mine:
        k = 0
        for start, stop in theirs:
            here, until = max(first, start), min(end, stop)
            index = bisect_right(ends, here)
            while here < until:  # each document's part
                size = min(until, ends[index]) - here
                seen.append(_piece(here - first + q, here - start + k, size, size, causal=True))
                here, index = ends[index], index + 1
            index = bisect_right(ends, first)  # of the document that reaches across
            begins = ends[index - 1] if index else 0
            a, b = max(begins, start), min(first, stop)
            if a < b:
                seen.append(_piece(q, a - start + k, min(end, ends[index]) - first, b - a, causal=False))
            k += stop - start
        q += end - first
    return seen


def _piece(query: int, key: int, queries: int, keys: int, causal: bool) -> Piece:
    return Piece(slice(query, query + queries), slice(key, key + keys), causal)


def nothing_seen(query: Tensor, value_size: int) -> Attended:
    """Returns the attention to no keys, to merge into; at least fp32."""
    exact = torch.promote_types(query.dtype, torch.float32)
    shape = query.shape[:-1]
    return Attended(query.new_zeros(*shape, value_size, dtype=exact), query.new_full(shape, float("-inf"), dtype=exact))


def attend(query: Tensor, key_value: Tensor, seen: Sequence[Piece], scaling: float, into: Attended) -> None:
    """Merge the contribution of these keys. key_value: (1, K, s, D of keys and D of values)."""
    for piece in seen:
        key, value = _split(query, key_value[:, :, piece.keys])
        part = attend_block(query[:, :, piece.queries], key, value, scaling, piece.causal)
        merge(Attended(into.out[:, :, piece.queries], into.lse[:, :, piece.queries]), part)


def attend_backward(
    gradient: Tensor,  # (1, H, t, D)
    query: Tensor,  # (1, H, t, D)
    key_value: Tensor,  # (1, K, s, D + D)
    attended: Attended,  # the queries, to all of their keys
    seen: Sequence[Piece],
    scaling: float,
    grad_query: Tensor,  # (1, H, t, D)
    grad_key_value: Tensor,  # (1, K, s, D + D)
) -> None:
    """Add these pieces' gradients to `grad_query` and `grad_key_value`, which are at least fp32."""
    for piece in seen:
        key, value = _split(query, key_value[:, :, piece.keys])
        g, q, out = (tensor[:, :, piece.queries] for tensor in (gradient, query, attended.out))
        full = Attended(out, attended.lse[:, :, piece.queries])
        gradients = attend_block_backward(g, q, key, value, full, scaling, piece.causal)
        grad_query[:, :, piece.queries] += gradients.query
        for into, part in zip(_split(query, grad_key_value[:, :, piece.keys]), gradients[1:], strict=True):
            into += part


def _split(query: Tensor, key_value: Tensor) -> tuple[Tensor, Tensor]:
    size = query.shape[-1]
    return key_value[..., :size], key_value[..., size:]


# --- attention of one piece: a stretch of queries to a stretch of keys


class Gradients(NamedTuple):
    query: Tensor  # (1, H, t, D)
    key: Tensor  # (1, K, s, D)
    value: Tensor  # (1, K, s, D)


def attend_block(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: bool, seen: Tensor | None = None
) -> Attended:
    """Returns the attention to these keys alone. causal: t equals s, and query i sees keys 0 .. i; else all of them, or
    those that are True in `seen` (t, s)."""
    kernel = _kernel(query, value, seen)
    if kernel != "cuda":
        key, value = _repeat_groups(query, key), _repeat_groups(query, value)
    if kernel == "cpu":
        # Parts of attention are merged by the logsumexp of their scores, which the public function keeps to itself.
        attend = aten._scaled_dot_product_flash_attention_for_cpu
        return Attended(*attend(query, key, value, 0.0, causal, attn_mask=_bias(seen, query), scale=scaling))
    if kernel == "cuda":
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))  # (1, t or s, H or K, D): it groups them
        sizes = (None, None, q.shape[1], k.shape[1])
        # The same on a GPU.
        out, lse, *_ = aten._flash_attention_forward(q, k, v, *sizes, 0.0, causal, False, scale=scaling)
        return Attended(out.transpose(1, 2), lse)
    scores = _scores(query, key, scaling, causal, seen)
    lse = torch.logsumexp(scores, dim=-1)
    return Attended((torch.exp(scores - lse[..., None]) @ value.to(scores.dtype)).to(query.dtype), lse)


def attend_block_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    full: Attended,
    scaling: float,
    causal: bool,
    seen: Tensor | None = None,
) -> Gradients:
    """Returns the gradients of one piece. gradient: (1, H, t, D), of the output; full: attention to all keys."""
    groups, kernel = key.shape[1], _kernel(query, value, seen)
    if kernel != "cuda":
        key, value = _repeat_groups(query, key), _repeat_groups(query, value)
    out, lse = full.out.to(query.dtype), full.lse
    if kernel == "cpu":
        # Autograd would take the part's own logsumexp, not that of all keys; on a GPU, too.
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, out, lse, 0.0, causal, attn_mask=_bias(seen, query), scale=scaling
        )
    elif kernel == "cuda":
        g, q, k, v, o = (tensor.transpose(1, 2) for tensor in (gradient, query, key, value, out))
        sizes, random = (None, None, q.shape[1], k.shape[1]), torch.zeros(2, dtype=torch.uint64, device=q.device)
        # The same on a GPU.
        gradients = aten._flash_attention_backward(
            g, q, k, v, o, lse.contiguous(), *sizes, 0.0, causal, random, torch.empty(0, device=q.device), scale=scaling
        )
        gradients = tuple(tensor.transpose(1, 2) for tensor in gradients)
    else:
        weights = torch.exp(_scores(query, key, scaling, causal, seen) - lse[..., None])
        g, q, k, v, o = (tensor.to(weights.dtype) for tensor in (gradient, query, key, value, out))
        grad_scores = weights * (g @ v.transpose(2, 3) - (g * o).sum(-1, keepdim=True)) * scaling
        gradients = grad_scores @ k, grad_scores.transpose(2, 3) @ q, weights.transpose(2, 3) @ g
    return Gradients(gradients[0], *(_sum_groups(tensor, groups) for tensor in gradients[1:]))


def merge(into: Attended, part: Attended) -> None:
    """Add the contribution of other keys, in place. `into` begins as zeros and an lse of minus infinity."""
    lse = torch.logaddexp(into.lse, part.lse)
    into.out.mul_(torch.exp(into.lse - lse)[..., None]).add_(part.out * torch.exp(part.lse - lse)[..., None])
    into.lse.copy_(lse)


def _kernel(query: Tensor, value: Tensor, seen: Tensor | None) -> str | None:
    """Returns which fused kernel gives the lse; None if only the formula does, which has all scores in memory."""
    size = query.shape[-1]
    if size != value.shape[-1]:
        return None
    if query.device.type != "cuda":
        return "cpu" if query.device.type == "cpu" else None
    is_supported = query.dtype in (torch.bfloat16, torch.float16) and size % 8 == 0 and size <= 256 and seen is None
    has_kernel = torch.version.hip is None and torch.cuda.get_device_capability(query.device) >= (8, 0)
    return "cuda" if is_supported and has_kernel else None


def _bias(seen: Tensor | None, query: Tensor) -> Tensor | None:  # (t, s), added to scores
    if seen is None:
        return None
    return torch.zeros_like(seen, dtype=query.dtype).masked_fill_(~seen, float("-inf"))


def _scores(
    query: Tensor, key: Tensor, scaling: float, causal: bool, seen: Tensor | None
) -> Tensor:  # (1, H, t, s), at least fp32
    exact = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(exact) @ key.to(exact).transpose(2, 3) * scaling
    if seen is not None:
        return scores.masked_fill(~seen, float("-inf"))
    if not causal:
        return scores
    return scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), float("-inf"))


def _repeat_groups(query: Tensor, grouped: Tensor) -> Tensor:  # (1, K, s, D) -> (1, H, s, D)
    return grouped.repeat_interleave(query.shape[1] // grouped.shape[1], dim=1)


def _sum_groups(per_head: Tensor, groups: int) -> Tensor:  # (1, H, s, D) -> (1, K, s, D)
    if per_head.shape[1] == groups:
        return per_head
    exact = torch.promote_types(per_head.dtype, torch.float32)
    return per_head.unflatten(1, (groups, -1)).sum(2, dtype=exact)
