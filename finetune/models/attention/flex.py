"""FlexAttention: a kernel that torch.compile writes for the documents' mask, and that skips what no token may see.

Letters: T tokens of the row, R blocks of 128 of them, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from finetune.models.attention.masked import in_one_type, register

FLEX = "finetune_flex"  # in transformers' table of attention functions
BLOCK = 128  # tokens; flex_attention's own default


class BlockMasks:
    """Those of one micro-batch, for each window that a layer of the model has; created once for all layers."""

    def __init__(self, masks: dict[int | None, BlockMask]):
        self.masks = masks


def prepare(
    document_lengths: tuple[int, ...],
    prefix_lengths: tuple[int, ...] = (),
    *,
    device: str,
    windows: Iterable[int | None],
) -> dict[str, Any]:
    masks = {window: block_mask(document_lengths, window, device, prefix_lengths) for window in windows}
    return {"documents": BlockMasks(masks)}


def block_mask(
    document_lengths: tuple[int, ...], window: int | None, device: str, prefix_lengths: tuple[int, ...] = ()
) -> BlockMask:
    """Returns the mask in which token i sees token j of the same document with i - window < j <= i.

    prefix_lengths: of each document the tokens of the one before that it begins with.
    Built from the lengths in R x R steps; `create_block_mask` would evaluate T x T pairs.
    """
    document = np.repeat(np.arange(len(document_lengths)), document_lengths)  # (T,)
    tokens = len(document)
    first = np.arange(0, tokens, BLOCK)  # (R,)
    last = np.minimum(first + BLOCK, tokens) - 1
    # Documents lie end to end: where the nearest pair of two blocks is of one document some pair is, and where the
    # farthest pair is all are. Rows are queries, columns keys.
    before = first[:, None] > first[None, :]
    some = before & (document[first][:, None] == document[last][None, :])
    every = before & (document[last][:, None] == document[first][None, :]) & ((last - first) == BLOCK - 1)[:, None]
    if window is not None:
        some &= first[:, None] - last[None, :] < window
        every &= last[:, None] - first[None, :] < window
    some |= np.eye(len(first), dtype=bool)
    document_of_token = torch.from_numpy(document.astype(np.int32)).to(device)

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        mine = (document_of_token[query] == document_of_token[key]) & (key <= query)
        return mine if window is None else mine & (query - key < window)

    mask_function: Callable[..., Tensor] = seen
    if any(prefix_lengths):
        begins = np.concatenate(([0], np.cumsum(document_lengths)))
        for i in np.flatnonzero(prefix_lengths):
            queries = slice(begins[i] // BLOCK, (begins[i + 1] - 1) // BLOCK + 1)
            some[queries, begins[i - 1] // BLOCK : (begins[i - 1] + prefix_lengths[i] - 1) // BLOCK + 1] = True
        mask_function = _seen_with_prefixes(document_of_token, begins[:-1], np.array(prefix_lengths), window)
    return BlockMask.from_kv_blocks(
        *_in_order(some & ~every, device), *_in_order(every, device), BLOCK, mask_function, (tokens, tokens)
    )


def _seen_with_prefixes(
    document: Tensor,  # (T,) int32
    begins: np.ndarray,  # (N,) first place of each document
    prefixes: np.ndarray,  # (N,)
    window: int | None,
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Returns a mask function by positions: those in a document, which count what it shares."""
    before = np.concatenate((begins[:1], begins[:-1]))  # of the document before
    tables = (begins - prefixes, before + prefixes, before - np.concatenate((prefixes[:1], prefixes[:-1])))
    zero_of, shared_end_of, zero_before_of = (torch.from_numpy(table).to(document)[document] for table in tables)

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = (document[query] == document[key]) & (key <= query)
        shared = (document[query] - 1 == document[key]) & (key < shared_end_of[query])
        if window is None:
            return own | shared
        position = query - zero_of[query]
        return (own & (query - key < window)) | (shared & (position - key + zero_before_of[query] < window))

    return seen


def _in_order(blocks: np.ndarray, device: str) -> tuple[Tensor, Tensor]:
    """Returns (1, 1, R) how many blocks of keys each block of queries has, and (1, 1, R, R) their indices, those
    first."""
    counts = torch.from_numpy(blocks.sum(1, dtype=np.int32))
    indices = torch.from_numpy(np.argsort(~blocks, axis=1, kind="stable").astype(np.int32))
    return counts[None, None].to(device), indices[None, None].to(device)


def flex_documents_attention(
    query: Tensor,  # (1, H, T, D)
    key: Tensor,  # (1, K, T, D)
    value: Tensor,  # (1, K, T, D)
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    documents: BlockMasks,
) -> Tensor:  # (1, T, H, D)
    if dropout:
        raise ValueError("FlexAttention has no dropout: set model.attention: auto")
    query, key, value = in_one_type(query, key, value)
    attend = flex_attention if torch.compiler.is_compiling() else _compiled()
    out = attend(
        query,
        key,
        value,
        score_mod=None if softcap is None else _capped(softcap),
        block_mask=documents.masks[sliding_window],
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).contiguous()


def _capped(softcap: float) -> Callable[..., Tensor]:
    def cap(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


@cache
def _compiled() -> Any:
    """Returns the compiled kernel, at first use: torch.compile takes seconds to import."""
    return torch.compile(flex_attention)


register(FLEX, flex_documents_attention)
