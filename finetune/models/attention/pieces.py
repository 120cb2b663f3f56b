"""Causal attention within documents, where queries and keys are parts of a row: from pieces that need no mask.

A stretch of queries sees, of its own stretch, each document's part causally; of earlier ones only the one document that
reaches across, and of that document everything. So a piece is a square of one document, or a rectangle that is seen
whole.

Letters: T tokens of the row, t queries, s keys that are here, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from finetune.data.batch import Stretches
from finetune.models.attention import block
from finetune.models.attention.block import Attended


class Piece(NamedTuple):
    queries: slice
    keys: slice
    causal: bool


def pieces(document_lengths: Sequence[int], mine: Stretches, theirs: Stretches) -> list[Piece]:
    """What queries at places `mine` see of keys at places `theirs`, both counted from the first that is here.

    Stretches of both are the same one, or disjoint, or one of keys is the whole row.
    """
    ends = list(accumulate(document_lengths))
    found, q = [], 0
    for first, end in mine:
        k = 0
        for start, stop in theirs:
            for a, b in _documents(ends, max(first, start), min(end, stop)):
                found.append(_piece(a - first + q, a - start + k, b - a, b - a, causal=True))
            number = bisect_right(ends, first)  # the document that reaches across
            begins = ends[number - 1] if number else 0
            a, b = max(begins, start), min(first, stop)
            if a < b:
                found.append(_piece(q, a - start + k, min(end, ends[number]) - first, b - a, causal=False))
            k += stop - start
        q += end - first
    return found


def _documents(ends: list[int], first: int, end: int) -> Iterator[tuple[int, int]]:
    """Of each document its part within [first, end)."""
    number = bisect_right(ends, first)
    while first < end:
        yield first, min(end, ends[number])
        first, number = ends[number], number + 1


def _piece(query: int, key: int, queries: int, keys: int, causal: bool) -> Piece:
    return Piece(slice(query, query + queries), slice(key, key + keys), causal)


def nothing_seen(query: Tensor, value_size: int) -> Attended:
    """To merge into; at least fp32."""
    exact = torch.promote_types(query.dtype, torch.float32)
    shape = query.shape[:-1]
    return Attended(query.new_zeros(*shape, value_size, dtype=exact), query.new_full(shape, float("-inf"), dtype=exact))


def attend(query: Tensor, key_value: Tensor, of: Sequence[Piece], scaling: float, into: Attended) -> None:
    """Merge what the queries see of these keys. key_value: (1, K, s, D of keys and D of values)."""
    for piece in of:
        key, value = _split(query, key_value[:, :, piece.keys])
        part = block.attend(query[:, :, piece.queries], key, value, scaling, piece.causal)
        block.merge(Attended(into.out[:, :, piece.queries], into.lse[:, :, piece.queries]), part)


def attend_backward(
    gradient: Tensor,  # (1, H, t, D)
    query: Tensor,  # (1, H, t, D)
    key_value: Tensor,  # (1, K, s, D + D)
    whole: Attended,  # of the queries, over all of their keys
    of: Sequence[Piece],
    scaling: float,
    of_query: Tensor,  # (1, H, t, D)
    of_key_value: Tensor,  # (1, K, s, D + D)
) -> None:
    """Add these pieces' gradients to `of_query` and `of_key_value`, which are at least fp32."""
    for piece in of:
        key, value = _split(query, key_value[:, :, piece.keys])
        g, q, out = (tensor[:, :, piece.queries] for tensor in (gradient, query, whole.out))
        there = Attended(out, whole.lse[:, :, piece.queries])
        found = block.attend_backward(g, q, key, value, there, scaling, piece.causal)
        of_query[:, :, piece.queries] += found.query
        for into, part in zip(_split(query, of_key_value[:, :, piece.keys]), found[1:], strict=True):
            into += part


def _split(query: Tensor, key_value: Tensor) -> tuple[Tensor, Tensor]:
    size = query.shape[-1]
    return key_value[..., :size], key_value[..., size:]
