"""Attention over rows whose tokens several ranks share: context parallel, Ulysses, or Ulysses within each context
rank.

Context parallel: queries stay on their rank and attend to the keys and values of all ranks of their row. Every
exchange computes the same: pieces merged by log-sum-exp (`models.attention.pieces`). They differ in how keys and values
arrive: all at once (`allgather`, https://arxiv.org/abs/2407.21783, section 3.3.2), or one rank's after the
other, around the ring, during attention to the previous ones (https://arxiv.org/abs/2310.01889), from neighbour to
neighbour (`ring`) or by a collective (`alltoall`). Each is waited for only when it is needed; in the backward they
arrive once more, and the gradients of keys and values return to their rank.

Ulysses (sequence parallel): ranks with some tokens of all heads exchange them for all tokens of some heads, attend as
one device would, and exchange back (https://arxiv.org/abs/2309.14509).

Letters: T tokens of the row, t of them on this rank, n ranks, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from finetune.data.batch import TokenShare
from finetune.engine.parallelism import ContextExchange, Parallelism
from finetune.engine.ranks import all_reduced, group_along
from finetune.errors import UserError
from finetune.models.attention import AttentionChoice
from finetune.models.attention.kernels import (
    WITHIN_DOCUMENTS,
    AttentionCall,
    WithinDocuments,
    in_one_type,
    register,
)
from finetune.models.attention.pieces import Piece, attend, attend_backward, nothing_seen, pieces
from finetune.models.attention.sinks import Attended, add_sinks, sinks_gradient
from finetune.objectives.objective import ONE_RANK, TokenRanks

SHARED_TOKENS = "finetune_shared_tokens"  # in transformers' table of attention functions
Arrival = Callable[[], Tensor]  # waits for a tensor


@dataclass(frozen=True, eq=False)
class SharedRow:
    """Exchange of the tokens of one micro-batch, and the attention among them."""

    sequence_group: Any  # None without Ulysses
    attention: WithinDocuments
    documents: Any


def divided(choice: AttentionChoice, parallelism: Parallelism) -> AttentionChoice:
    """Returns the attention for rows on several ranks, without process groups. Raises UserError."""
    if parallelism.tokens == 1:
        return choice
    obstacle, alone = None, "so its tokens cannot be sharded. Fix: use data parallel only"
    if not choice.isolates_documents:
        obstacle = f"{choice.reason}, {alone}"
    elif choice.mixers:
        obstacle = f"{', '.join(choice.mixers)} runs along each document whole, {alone}"
    elif choice.implementation not in WITHIN_DOCUMENTS and (
        parallelism.context == 1 or choice.implementation != "flash_attention_2"
    ):
        instead = "use data parallel only" if choice.implementation == "eager" else "set model.attention: documents"
        obstacle = (
            f"transformers' own attention `{choice.implementation}` does not communicate with other ranks "
            f"({choice.reason}). Fix: {instead}"
        )
    if obstacle is not None:
        raise UserError(f"{parallelism.summary()}: {obstacle}")
    method = f"{choice.implementation}: {choice.reason}"
    if parallelism.context > 1:
        method = f"keys and values by {parallelism.exchange}; one call for each document's part, no mask"
    reason = f"{parallelism.summary()}; {method}"
    return AttentionChoice(SHARED_TOKENS, reason, True, not_shared="the tokens of a row lie on several ranks")


def apply_context_parallel(
    choice: AttentionChoice, shard: TokenShare, parallelism: Parallelism, rank: int
) -> AttentionChoice:
    """Returns `divided` with the groups of this rank, created on first use. Collective. Raises UserError."""
    without_groups = divided(choice, parallelism)
    if parallelism.tokens == 1:
        return choice
    sequence_group, group = (group_along(name, parallelism, rank) for name in ("sequence", "context"))

    def prepare(document_lengths: tuple[int, ...]) -> dict[str, Any]:
        if group is None:
            attention, documents = (
                WITHIN_DOCUMENTS[choice.implementation],
                choice.prepare(document_lengths)["documents"],
            )
        else:
            attention, documents = context_attention, ContextRow(document_lengths, shard, parallelism.exchange, group)
        return {"documents": SharedRow(sequence_group, attention, documents)}

    return replace(without_groups, prepare=prepare)


def shared_attention(call: AttentionCall, row: SharedRow) -> Tensor:  # (1, t, H, D), as in the call
    if row.sequence_group is None:
        return row.attention(call, row.documents)
    query, key, value = to_heads(row.sequence_group, *call[:3])
    sinks = call.sinks
    if sinks is not None:  # those of the heads that are here
        sinks = sinks.chunk(dist.get_world_size(row.sequence_group))[dist.get_rank(row.sequence_group)]
    out = row.attention(call._replace(query=query, key=key, value=value, sinks=sinks), row.documents)
    exchanged: Any = _HeadExchange.apply(row.sequence_group, False, out.transpose(1, 2))
    return exchanged[0].transpose(1, 2)


register(SHARED_TOKENS, shared_attention)


# --- sums over the tokens of a row


def token_ranks(parallelism: Parallelism, rank: int) -> TokenRanks:
    """Returns the ranks that share this rank's rows. Collective if it creates groups."""
    groups = [group for name in ("sequence", "context") if (group := group_along(name, parallelism, rank)) is not None]

    def summed(tensor: Tensor) -> Tensor:
        """Returns the sum over the ranks; so is the gradient. Nothing is sent for an empty tensor (of a dummy)."""
        total: Any = _SumOverRanks.apply(groups, tensor) if tensor.numel() else tensor
        return total

    return TokenRanks(parallelism.tokens, summed) if groups else ONE_RANK


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, groups: list[Any], tensor: Tensor) -> Tensor:
        ctx.groups = groups
        return all_reduced(tensor, *groups)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, all_reduced(gradient, *ctx.groups)


# --- context parallel


class ContextRow:
    """Keys that this rank's queries attend to in one micro-batch, for every arrival. Created once for all layers."""

    def __init__(self, document_lengths: tuple[int, ...], shard: TokenShare, exchange: ContextExchange, group: Any):
        self.exchange, self.group, self.size = exchange, group, shard.context
        tokens = sum(document_lengths)
        queries = shard.stretches(tokens, shard.context_rank)
        if exchange == "allgather":
            arrivals = [((0, tokens),)]
        else:
            senders = [(shard.context_rank - step) % shard.context for step in range(shard.context)]
            arrivals = [shard.stretches(tokens, sender) for sender in senders]
        self.arrivals: list[list[Piece]] = [pieces(document_lengths, queries, arrival) for arrival in arrivals]


def context_attention(call: AttentionCall, row: ContextRow) -> Tensor:  # (1, t, H, D), as in the call
    """Causal attention within each document of the row. Collective over the row's context ranks."""
    if call.dropout or call.window is not None or call.softcap is not None:
        raise ValueError("context parallel attention has no dropout, no sliding window and no soft-capping")
    query, key, value = in_one_type(*call[:3])
    with torch.autocast(query.device.type, enabled=False):  # products in fp32 stay in fp32
        out: Any = _ContextAttention.apply(query, torch.cat([key, value], dim=-1), call.sinks, call.scale, row)
    return out.transpose(1, 2)


class _ContextAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key_value: Tensor, sinks: Tensor | None, scale: float, row: ContextRow
    ) -> Tensor:
        attended = nothing_seen(query, key_value.shape[-1] - query.shape[-1])
        if row.exchange == "allgather":
            attend(query, _all_gathered_row(key_value, row), row.arrivals[0], scale, attended)
        else:
            current = key_value
            for step, arrival in enumerate(row.arrivals):
                coming = _shift(current, row) if step < row.size - 1 else None
                attend(query, current, arrival, scale, attended)
                current = coming() if coming else current
        if sinks is not None:
            attended = add_sinks(attended, sinks)
        out = attended.out.to(query.dtype)
        ctx.save_for_backward(query, key_value, sinks, out, attended.lse)
        ctx.scale, ctx.row = scale, row
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """The ring: the gradient of keys and values follows them one step later, and reaches their rank at the end."""
        query, key_value, sinks, out, lse = ctx.saved_tensors
        row, scale, attended = ctx.row, ctx.scale, Attended(out, lse)
        grad_query = torch.zeros_like(query, dtype=lse.dtype)
        if row.exchange == "allgather":
            full = _all_gathered_row(key_value, row)
            grad_full = torch.zeros_like(full, dtype=lse.dtype)
            attend_backward(gradients[0], query, full, attended, row.arrivals[0], scale, grad_query, grad_full)
            # Back to this rank's tokens, summed over ranks: (1, K, T, D) -> (1, K, t, D).
            chunks = grad_full[0].unflatten(1, (2 * row.size, -1)).transpose(0, 1)  # (2 * ranks, K, t / 2, D)
            halves = chunks[: row.size], chunks[row.size :].flip(0)
            by_rank = torch.stack(halves, dim=2).flatten(2, 3)  # (ranks, K, t, D)
            grad_key_value = grad_full.new_empty(1, *by_rank.shape[1:])
            dist.reduce_scatter_tensor(grad_key_value, by_rank.contiguous(), group=row.group)
        else:
            current, following = key_value, None
            for step, arrival in enumerate(row.arrivals):
                coming = _shift(current, row) if step < row.size - 1 else None
                grad_current = torch.zeros_like(current, dtype=lse.dtype)
                attend_backward(gradients[0], query, current, attended, arrival, scale, grad_query, grad_current)
                if following:
                    grad_current += following()
                following = _shift(grad_current, row)
                current = coming() if coming else current
            assert following is not None
            grad_key_value = following()
        of_sinks = sinks_gradient(gradients[0], attended, sinks) if ctx.needs_input_grad[2] else None
        return grad_query.to(query.dtype), grad_key_value.to(key_value.dtype), of_sinks, None, None


def _shift(tensor: Tensor, row: ContextRow) -> Arrival:
    """Send to the next rank of the ring; returns a function that waits for the previous rank's tensor."""
    sent = tensor.contiguous()
    arrived = torch.empty_like(sent)
    rank = dist.get_rank(row.group)
    following, previous = (rank + 1) % row.size, (rank - 1) % row.size
    works: list[Any]
    if row.exchange == "ring":
        send = dist.P2POp(dist.isend, sent, dist.get_global_rank(row.group, following), row.group)
        receive = dist.P2POp(dist.irecv, arrived, dist.get_global_rank(row.group, previous), row.group)
        works = dist.batch_isend_irecv([send, receive])
    else:  # an all-to-all with empty parts for the other ranks
        sizes, received = [0] * row.size, [0] * row.size
        sizes[following] = received[previous] = sent.numel()
        flat = arrived.view(-1), sent.view(-1)
        works = [dist.all_to_all_single(*flat, received, sizes, group=row.group, async_op=True)]

    def wait() -> Tensor:
        for work in works:
            work.wait()
        assert sent.shape == arrived.shape  # and keeps `sent` alive until it is sent
        return arrived

    return wait


def _all_gathered_row(local: Tensor, row: ContextRow) -> Tensor:  # (1, K, t, D) -> (1, K, T, D), in the row's order
    gathered = local.new_empty(row.size, *local.shape[1:])
    dist.all_gather_into_tensor(gathered, local.contiguous(), group=row.group)
    early, late = gathered.unflatten(2, (2, -1)).unbind(2)  # (ranks, K, t / 2, D): the two chunks of each
    return torch.cat([early, late.flip(0)]).transpose(0, 1).flatten(1, 2)[None]


# --- Ulysses


def to_heads(group: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(1, H, t, D) -> (1, H / n, n * t, D), the tokens in the order of the ranks. Collective.

    n divides H; heads of keys and values are repeated if it does not divide these.
    """
    size, kv_heads = dist.get_world_size(group), key.shape[1]
    copies = math.lcm(kv_heads, size) // kv_heads
    key, value = (tensor.repeat_interleave(copies, dim=1) for tensor in (key, value))
    exchanged: Any = _HeadExchange.apply(group, True, query, key, value)
    return exchanged


class _HeadExchange(torch.autograd.Function):
    """Exchange in which each direction is the backward of the other: values only move."""

    @staticmethod
    def forward(ctx: Any, group: Any, to_heads: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.to_heads = group, to_heads
        exchange = _tokens_to_heads if to_heads else _heads_to_tokens
        return tuple(exchange(group, tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        exchange = _heads_to_tokens if ctx.to_heads else _tokens_to_heads
        return (None, None, *(exchange(ctx.group, gradient) for gradient in gradients))


def _tokens_to_heads(group: Any, tensor: Tensor) -> Tensor:  # (1, H, t, D) -> (1, H / n, n * t, D)
    parts = tensor[0].unflatten(0, (dist.get_world_size(group), -1))  # (n, H / n, t, D), by rank of the heads
    return _all_to_all(group, parts).transpose(0, 1).flatten(1, 2)[None]


def _heads_to_tokens(group: Any, tensor: Tensor) -> Tensor:  # (1, H / n, n * t, D) -> (1, H, t, D)
    size = dist.get_world_size(group)
    parts = tensor[0].unflatten(1, (size, -1)).transpose(0, 1)  # (n, H / n, t, D), by rank of the tokens
    return _all_to_all(group, parts).flatten(0, 1)[None]


def _all_to_all(group: Any, parts: Tensor) -> Tensor:
    """Send part i to rank i and receive part i from rank i."""
    sent = parts.contiguous()
    arrived = torch.empty_like(sent)
    dist.all_to_all_single(arrived, sent, group=group)
    return arrived
