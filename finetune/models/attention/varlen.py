"""All documents of the row in one call of torch's flash-attention kernel (torch.nn.attention.varlen): CUDA, 16 bit.

Letters: T tokens of the row, N documents, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor

from finetune.data.batch import row_places
from finetune.models.attention.masked import boundaries, in_one_type, register

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None

VARLEN = "finetune_varlen"  # in transformers' table of attention functions


class Boundaries:
    """Those of one micro-batch's documents, on the device; created once for all layers."""

    def __init__(self, ends: Tensor, longest: int, keys: Keys | None = None):
        self.ends = ends  # (N + 1,) int32: 0, then where each document ends (`cu_seqlens`)
        self.longest = longest  # tokens; may be more than any document has
        self.keys = keys  # where documents share what they begin with


class Keys(NamedTuple):
    """What documents see: each the shared beginning, which is in the row once, and its own tokens."""

    places: Tensor  # (keys,) int64 in the row, document after document
    ends: Tensor  # (N + 1,) int32, as those of the documents
    longest: int


def prepare(
    document_lengths: tuple[int, ...],
    prefix_lengths: tuple[int, ...] = (),
    *,
    device: str,
    longest: int | None = None,
) -> dict[str, Any]:
    """longest: a bound on every document's tokens, for torch.compile, which recompiles for another number."""
    compiled = longest is not None
    most = max(document_lengths) if longest is None else longest
    ends = boundaries(document_lengths, device, compiled)
    if not any(prefix_lengths):
        return {"documents": Boundaries(ends, most)}
    lengths = tuple(own + prefix for own, prefix in zip(document_lengths, prefix_lengths, strict=True))
    places = torch.from_numpy(row_places(document_lengths, prefix_lengths)).to(device)
    return {"documents": Boundaries(ends, most, Keys(places, boundaries(lengths, device, compiled), max(lengths)))}


def varlen_attention(
    query: Tensor,  # (1, H, T, D)
    key: Tensor,  # (1, K, T, D)
    value: Tensor,  # (1, K, T, D)
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    documents: Boundaries,
) -> Tensor:  # (1, T, H, D)
    if dropout or softcap is not None or varlen_attn is None:
        raise ValueError("varlen attention has neither dropout nor soft-capping: set model.attention: auto")
    q, k, v = (tensor[0].transpose(0, 1) for tensor in in_one_type(query, key, value))  # (T, H or K, D)
    grouped: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    # (-1, 0) is the kernel's word for causal; (w - 1, 0) for the token itself and w - 1 before it.
    window = (-1, 0) if sliding_window is None else (sliding_window - 1, 0)
    ends = key_ends = documents.ends
    longest = longest_keys = documents.longest
    if documents.keys is not None:  # the kernel takes queries for the last of their keys (flash attention 2.1)
        places, key_ends, longest_keys = documents.keys
        k, v = k[places], v[places]
    out = varlen_attn(q, k, v, ends, key_ends, longest, longest_keys, scale=scaling, window_size=window, **grouped)
    assert isinstance(out, Tensor)  # a tuple only where the log-sum-exp is asked for
    return out[None]


def missing(grouped: bool) -> str | None:
    """Returns why this torch cannot, whatever the device; None where it can. grouped: several query heads share
    keys."""
    if varlen_attn is None:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen"
    takes = inspect.signature(varlen_attn).parameters
    wanted = ("scale", "window_size", *(("enable_gqa",) if grouped else ()))
    lacking = [name for name in wanted if name not in takes]
    return f"varlen_attn of torch {torch.__version__} does not take {', '.join(lacking)}" if lacking else None


register(VARLEN, varlen_attention)
