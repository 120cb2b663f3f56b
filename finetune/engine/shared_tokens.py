"""Attention where several ranks share the tokens of a row: by context parallel, by Ulysses, or by Ulysses within each
context rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any

from torch import Tensor
from torch import distributed as dist

from finetune.data.token_shard import TokenShare
from finetune.engine.context import ContextRow, context_attention
from finetune.engine.parallelism import DIMENSIONS, Parallelism
from finetune.engine.ulysses import to_heads, to_tokens
from finetune.errors import UserError
from finetune.models.attention import AttentionChoice
from finetune.models.attention.masked import WITHIN_DOCUMENTS, register

SHARED_TOKENS = "finetune_shared_tokens"  # in transformers' table of attention functions


class SharedRow:
    """Of one micro-batch: how its tokens come together, and what the attention among them takes."""

    def __init__(self, sequence: Any, attention: Callable[..., Tensor], documents: Any):
        self.sequence = sequence  # the group of Ulysses; None without
        self.attention = attention
        self.documents = documents


def share_tokens(choice: AttentionChoice, share: TokenShare, parallelism: Parallelism, rank: int) -> AttentionChoice:
    """The same attention, for a row that this rank has its share of. Collective where it makes groups.

    Raises UserError where it cannot be.
    """
    if parallelism.tokens == 1:
        return choice
    if (why := _obstacle(choice, parallelism)) is not None:
        raise UserError(f"{parallelism.summary()}: {why}")
    sequence = _group("sequence", parallelism, rank)
    if parallelism.context > 1:
        group, exchange = _group("context", parallelism, rank), parallelism.exchange
        within = f"keys and values by {exchange}; one call for each document's part, no mask"
        attention: Callable[..., Tensor] = context_attention
        prepare = partial(ContextRow, share=share, exchange=exchange, group=group)
    else:
        within = f"{choice.implementation}: {choice.reason}"
        attention, prepare = WITHIN_DOCUMENTS[choice.implementation], partial(_documents, choice)
    reason = f"{parallelism.summary()}; {within}"
    return AttentionChoice(SHARED_TOKENS, reason, True, partial(_arguments, sequence, attention, prepare))


def _documents(choice: AttentionChoice, document_lengths: tuple[int, ...]) -> Any:
    return choice.prepare(document_lengths)["documents"]


def _arguments(
    sequence: Any,
    attention: Callable[..., Tensor],
    prepare: Callable[[tuple[int, ...]], Any],
    document_lengths: tuple[int, ...],
) -> dict[str, Any]:
    return {"documents": SharedRow(sequence, attention, prepare(document_lengths))}


def _obstacle(choice: AttentionChoice, parallelism: Parallelism) -> str | None:
    """What no rule could know before the model's class and what is installed were looked at."""
    if not choice.isolates_documents:
        return f"{choice.reason}, so its tokens cannot be cut: use data parallel alone"
    if choice.implementation in WITHIN_DOCUMENTS:
        return None
    if parallelism.context > 1 and choice.implementation == "flash_attention_2":
        return None
    instead = "use data parallel alone" if choice.implementation == "eager" else "set model.attention: documents"
    return (
        f"its attention is transformers' own `{choice.implementation}` here ({choice.reason}), "
        f"which does not know of other ranks: {instead}"
    )


def shared_attention(
    query: Tensor,  # (1, H, t, D)
    key: Tensor,  # (1, K, t, D)
    value: Tensor,  # (1, K, t, D)
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    row: SharedRow,
) -> Tensor:  # (1, t, H, D)
    settings = (dropout, scaling, sliding_window, softcap, row.documents)
    if row.sequence is None:
        return row.attention(query, key, value, *settings)
    out = row.attention(*to_heads(row.sequence, query, key, value), *settings)
    return to_tokens(row.sequence, out.transpose(1, 2)).transpose(1, 2)


def _group(dimension: str, parallelism: Parallelism, rank: int) -> Any:
    """Of the ranks that differ from this one in this dimension only; None where it is not used."""
    if getattr(parallelism, dimension) == 1:
        return None
    return _groups(dist.group.WORLD, dimension, parallelism)[rank]


@cache
def _groups(world: Any, dimension: str, parallelism: Parallelism) -> dict[int, Any]:
    """By rank. world: the process group that they are made in, once. Collective."""
    others = [name for name in DIMENSIONS if name != dimension]
    found: dict[int, Any] = {}
    for place in product(*(range(getattr(parallelism, name)) for name in others)):
        fixed = dict(zip(others, place, strict=True))
        ranks = [r for r in range(parallelism.processes) if fixed.items() <= parallelism.place(r).items()]
        group = dist.new_group(ranks)
        found |= dict.fromkeys(ranks, group)
    return found


register(SHARED_TOKENS, shared_attention)
