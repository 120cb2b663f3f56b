"""Context parallel: queries stay on their rank, and meet the keys and values of all ranks of their row.

What is computed is the same for every exchange, pieces merged by log-sum-exp (`models.attention.pieces`). They differ
in how keys and values come: all at once (`allgather`, https://arxiv.org/abs/2407.21783, section 3.3.2), or one rank's
after the other's, round the ring, while the last ones are attended to (https://arxiv.org/abs/2310.01889), from
neighbour to neighbour (`ring`) or through a collective of all (`alltoall`). Each is waited for where it is needed;
backwards they come once more, and gradients of keys and values find their way home.

Letters: T tokens of the row, t of them on this rank, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from finetune.data.token_shard import TokenShare
from finetune.engine.parallelism import Exchange
from finetune.models.attention.block import Attended
from finetune.models.attention.masked import in_one_type
from finetune.models.attention.pieces import Piece, attend, attend_backward, nothing_seen, pieces

Arrival = Callable[[], Tensor]  # waits


class ContextRow:
    """Of one micro-batch: what this rank's queries see of every arrival. Made once for all layers.

    A plain object, as the `documents` of every way of attention are.
    """

    def __init__(self, document_lengths: tuple[int, ...], share: TokenShare, exchange: Exchange, group: Any):
        self.exchange, self.group, self.size = exchange, group, share.context
        tokens = sum(document_lengths)
        mine = share.stretches(tokens, share.context_rank)
        if exchange == "allgather":
            arrivals = [((0, tokens),)]
        else:
            senders = [(share.context_rank - step) % share.context for step in range(share.context)]
            arrivals = [share.stretches(tokens, sender) for sender in senders]
        self.arrivals: list[list[Piece]] = [pieces(document_lengths, mine, arrival) for arrival in arrivals]


def context_attention(
    query: Tensor,  # (1, H, t, D)
    key: Tensor,  # (1, K, t, D)
    value: Tensor,  # (1, K, t, D)
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    row: ContextRow,
) -> Tensor:  # (1, t, H, D)
    """Causal attention within each document of the row. Collective over the row's context ranks."""
    if dropout or sliding_window is not None or softcap is not None:
        raise ValueError("context parallel attention has no dropout, no sliding window and no soft-capping")
    query, key, value = in_one_type(query, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    with torch.autocast(query.device.type, enabled=False):  # products in fp32 stay that
        out: Any = _ContextAttention.apply(query, torch.cat([key, value], dim=-1), scale, row)
    return out.transpose(1, 2)


class _ContextAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key_value: Tensor, scale: float, row: ContextRow) -> Tensor:
        whole = nothing_seen(query, key_value.shape[-1] - query.shape[-1])
        if row.exchange == "allgather":
            attend(query, _gathered(key_value, row), row.arrivals[0], scale, whole)
        else:
            held = key_value
            for step, arrival in enumerate(row.arrivals):
                coming = _passed_on(held, row) if step < row.size - 1 else None
                attend(query, held, arrival, scale, whole)
                held = coming() if coming else held
        out = whole.out.to(query.dtype)
        ctx.save_for_backward(query, key_value, out, whole.lse)
        ctx.scale, ctx.row = scale, row
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key_value, out, lse = ctx.saved_tensors
        back = _gathered_backward if ctx.row.exchange == "allgather" else _passed_on_backward
        of_query, of_key_value = back(gradients[0], query, key_value, Attended(out, lse), ctx.scale, ctx.row)
        return of_query.to(query.dtype), of_key_value.to(key_value.dtype), None, None


def _gathered_backward(
    gradient: Tensor, query: Tensor, key_value: Tensor, whole: Attended, scale: float, row: ContextRow
) -> tuple[Tensor, Tensor]:
    everyone = _gathered(key_value, row)
    of_query, of_everyone = (torch.zeros_like(tensor, dtype=whole.lse.dtype) for tensor in (query, everyone))
    attend_backward(gradient, query, everyone, whole, row.arrivals[0], scale, of_query, of_everyone)
    return of_query, _home(of_everyone, row)


def _passed_on_backward(
    gradient: Tensor, query: Tensor, key_value: Tensor, whole: Attended, scale: float, row: ContextRow
) -> tuple[Tensor, Tensor]:
    """The gradient of the keys that are here follows them one step behind, and is home after the last."""
    of_query = torch.zeros_like(query, dtype=whole.lse.dtype)
    held, following = key_value, None
    for step, arrival in enumerate(row.arrivals):
        coming = _passed_on(held, row) if step < row.size - 1 else None
        of_held = torch.zeros_like(held, dtype=whole.lse.dtype)
        attend_backward(gradient, query, held, whole, arrival, scale, of_query, of_held)
        if following:
            of_held += following()
        following = _passed_on(of_held, row)
        held = coming() if coming else held
    assert following is not None
    return of_query, following()


# --- one rank's after the other's


def _passed_on(tensor: Tensor, row: ContextRow) -> Arrival:
    """To the next rank of the ring; gives what comes from the one before."""
    sent = tensor.contiguous()
    arrived = torch.empty_like(sent)
    works = (_to_neighbour if row.exchange == "ring" else _to_all)(sent, arrived, row)

    def wait() -> Tensor:
        for work in works:
            work.wait()
        assert sent.shape == arrived.shape  # and what is sent lives until it is
        return arrived

    return wait


def _to_neighbour(sent: Tensor, arrived: Tensor, row: ContextRow) -> list[Any]:
    rank = dist.get_rank(row.group)
    after, before = (dist.get_global_rank(row.group, (rank + step) % row.size) for step in (1, -1))
    sends, receives = (
        dist.P2POp(dist.isend, sent, after, row.group),
        dist.P2POp(dist.irecv, arrived, before, row.group),
    )
    return dist.batch_isend_irecv([sends, receives])


def _to_all(sent: Tensor, arrived: Tensor, row: ContextRow) -> list[Any]:
    """All of it to one, nothing to the others."""
    rank = dist.get_rank(row.group)
    to, come = [0] * row.size, [0] * row.size
    to[(rank + 1) % row.size] = come[(rank - 1) % row.size] = sent.numel()
    return [dist.all_to_all_single(arrived.view(-1), sent.view(-1), come, to, group=row.group, async_op=True)]


# --- all at once


def _gathered(part: Tensor, row: ContextRow) -> Tensor:  # (1, K, t, D) -> (1, K, T, D), in the row's order
    everyone = part.new_empty(row.size, *part.shape[1:])
    dist.all_gather_into_tensor(everyone, part.contiguous(), group=row.group)
    early, late = everyone.unflatten(2, (2, -1)).unbind(2)  # (ranks, K, t / 2, D): the two chunks of each
    return torch.cat([early, late.flip(0)]).transpose(0, 1).flatten(1, 2)[None]


def _home(of_row: Tensor, row: ContextRow) -> Tensor:  # (1, K, T, D) -> (1, K, t, D), summed over the ranks
    chunks = of_row[0].unflatten(1, (2 * row.size, -1)).transpose(0, 1)  # (2 * ranks, K, t / 2, D)
    of_ranks = torch.stack([chunks[: row.size], chunks[row.size :].flip(0)], dim=2).flatten(2, 3)  # (ranks, K, t, D)
    mine = of_row.new_empty(1, *of_ranks.shape[1:])
    dist.reduce_scatter_tensor(mine, of_ranks.contiguous(), group=row.group)
    return mine
