"""One call of attention for each document: no mask, no work across documents, on any device.

Letters: T tokens of the row, N documents, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from finetune.models.attention.masked import (
    boundaries,
    in_one_type,
    register,
    soft_capped,
)

DOCUMENTS = "finetune_documents"  # in transformers' table of attention functions


class Lengths:
    """Of one micro-batch's documents. A plain object: torch.compile guards the values in a tuple or a frozen dataclass,
    and would compile anew for every row."""

    def __init__(self, lengths: tuple[int, ...], ends: Tensor | None = None):
        self.lengths = lengths
        self.ends = ends  # (N + 1,) where layers are compiled
        self._seen: dict[tuple[int, int | None], Tensor] = {}

    def seen(self, length: int, window: int | None, device: torch.device) -> Tensor:
        """Made once for all layers."""
        if (length, window) not in self._seen:
            self._seen[length, window] = seen(length, window, device)
        return self._seen[length, window]


def seen(length: int, window: int | None, device: torch.device) -> Tensor:
    """(length, length), True where token i sees token j: i - window < j <= i."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None, :]
    causal = distance >= 0
    return causal if window is None else causal & (distance < window)


def prepare(document_lengths: tuple[int, ...], compiled: bool = False) -> dict[str, Any]:
    return {"documents": Lengths(document_lengths, boundaries(document_lengths, "cpu", True) if compiled else None)}


def per_document_attention(
    query: Tensor,  # (1, H, T, D)
    key: Tensor,  # (1, K, T, D)
    value: Tensor,  # (1, K, T, D)
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    documents: Lengths,
) -> Tensor:  # (1, T, H, D)
    if torch.compiler.is_compiling() and documents.ends is not None and not dropout:
        q, k, v = in_one_type(query, key, value)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        operation = torch.ops.finetune.per_document  # of `opaque`
        return operation(q, k, v, documents.ends, scale, sliding_window, softcap)
    return one_by_one(query, key, value, dropout, scaling, sliding_window, softcap, documents)


def _one_by_one(
    query: Tensor,  # (1, H, T, D)
    key: Tensor,  # (1, K, T, D)
    value: Tensor,  # (1, K, T, D)
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    documents: Lengths,
) -> Tensor:  # (1, T, H, D)
    pieces = []
    rows = (tensor.split(documents.lengths, dim=2) for tensor in (query, key, value))
    for length, q, k, v in zip(documents.lengths, *rows, strict=True):
        window = None if sliding_window is None or length <= sliding_window else sliding_window
        if softcap is not None:
            mask = documents.seen(length, window, q.device)
            piece = soft_capped(q, k, v, mask, dropout, scaling, softcap)
        else:
            piece = scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=None if window is None else documents.seen(length, window, q.device),
                dropout_p=dropout,
                is_causal=window is None,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        pieces.append(piece.transpose(1, 2))  # as the CPU's kernel lays it out, so that cat is the only copy
    return torch.cat(pieces, dim=1)


# A loop over lengths that change with every row: traced, each row would compile anew.
one_by_one: Any = torch.compiler.disable(_one_by_one)
register(DOCUMENTS, per_document_attention)
