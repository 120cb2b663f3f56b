"""Shared by all implementations: attention under a mask, which generation with padding needs, boundaries, registration.

Letters: B rows, T query tokens, L key tokens, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask


def masked_attention(
    module: torch.nn.Module,
    query: Tensor,  # (B, H, T, D)
    key: Tensor,  # (B, K, L, D)
    value: Tensor,  # (B, K, L, D)
    attention_mask: Tensor | None,  # (B, 1, T, L), True where attended to
    dropout: float,
    scaling: float | None,
    softcap: float | None,
) -> tuple[Tensor, None]:  # (B, T, H, D)
    """Attention of a forward without document boundaries: generation, with a mask for its padding.

    Raises ValueError without a mask: packed documents could see each other.
    """
    if attention_mask is None:
        raise ValueError("neither documents nor an attention mask: documents could see each other")
    if softcap is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, is_causal=False)
    return soft_capped(query, key, value, attention_mask, dropout, scaling, softcap).transpose(1, 2).contiguous(), None


def soft_capped(
    query: Tensor,  # (B, H, T, D)
    key: Tensor,  # (B, K, L, D)
    value: Tensor,  # (B, K, L, D)
    seen: Tensor,  # broadcasts to (B, 1, T, L), True where attended to
    dropout: float,
    scaling: float | None,
    softcap: float,
) -> Tensor:  # (B, H, T, D)
    """Attention whose scores are squashed into +-softcap (Gemma 2, https://arxiv.org/abs/2408.00118, section 2), with
    the roundings of transformers' eager attention. Heads that share keys are products with one and the same matrix."""
    batch, heads, tokens, size = query.shape
    shared = (batch, key.shape[1], heads // key.shape[1] * tokens, size)
    scores = torch.matmul(query.reshape(shared), key.transpose(2, 3)).view(batch, heads, tokens, key.shape[2])
    scores = softcap * torch.tanh(scores * (size**-0.5 if scaling is None else scaling) / softcap)
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    weights = drop(torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype), dropout)
    return torch.matmul(weights.view(*shared[:3], -1), value).view(query.shape)


def boundaries(document_lengths: tuple[int, ...], device: str, compiled: bool) -> Tensor:
    """Returns (N + 1,) int32: 0, then where each of N documents ends (`cu_seqlens`). Copied without waiting for the
    device.

    compiled: one graph for all numbers of documents.
    """
    ends = torch.tensor([0, *accumulate(document_lengths)], dtype=torch.int32)
    ends = ends.pin_memory().to(device, non_blocking=True) if device == "cuda" else ends.to(device)
    if compiled:
        torch._dynamo.mark_dynamic(ends, 0)
    return ends


def in_one_type(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensors in autocast's type: queries and keys that were normalised with fp32 weights are not in it,
    and autocast does not cast for these kernels."""
    device = tensors[0].device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensors[-1].dtype
    return tuple(tensor.to(dtype) for tensor in tensors)


def refuse_extras(extras: dict[str, Any]) -> None:
    """Raises ValueError for what an architecture adds to attention and an implementation would leave out in silence."""
    for name in ("s_aux", "position_bias"):
        if extras.get(name) is not None:
            raise ValueError(f"this model's attention takes `{name}`: set model.attention: eager")


def with_unread_mask(
    arguments: dict[str, Any],  # of a forward, from `AttentionChoice.forward_arguments`
    device: torch.device,
) -> dict[str, Any]:
    """Returns the arguments, where they have documents, with a mask that our implementations do not read.

    Without a mask transformers looks for packed documents in the positions, and waits for the device to know whether
    there are any; a mask of four dimensions it hands through (masking_utils.py, `_preprocess_mask_arguments`). This one
    has no elements: a model that reads it all the same fails by its shape, where a mask that allows everything would
    let documents see each other.
    """
    if "documents" not in arguments:
        return arguments
    return {**arguments, "attention_mask": torch.empty(1, 1, 0, 0, dtype=torch.bool, device=device)}


WITHIN_DOCUMENTS: dict[str, Callable[..., Tensor]] = {}  # our own implementations, by name


def register(name: str, within_documents: Callable[..., Tensor]) -> None:
    """Let models be loaded with an implementation by this name (`attn_implementation`).

    within_documents: causal attention within each document of the row, given the result of its `prepare`.
    """

    def attention(
        module: torch.nn.Module,
        query: Tensor,  # (1, H, T, D)
        key: Tensor,  # (1, K, T, D)
        value: Tensor,  # (1, K, T, D)
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        documents: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:  # (1, T, H, D)
        refuse_extras(kwargs)
        if documents is None:
            return masked_attention(module, query, key, value, attention_mask, dropout, scaling, softcap)
        if attention_mask is not None and attention_mask.numel():
            raise ValueError("this model brings a mask of its own, which attention by documents would leave out")
        return within_documents(query, key, value, dropout, scaling, sliding_window, softcap, documents), None

    WITHIN_DOCUMENTS[name] = within_documents
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, _padding_mask)


def _padding_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """No mask in training (the documents say it all); with padding, when generating, sdpa's own."""
    if attention_mask is None:
        return None
    kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(*args, attention_mask=attention_mask, **kwargs)
