"""Rows whose tokens several ranks share: context parallel and Ulysses."""

from __future__ import annotations

from collections.abc import Iterator

from finetune.engine.parallelism import dimension_key
from finetune.engine.rules.asked import Asked, dropouts, nearest


def shared_tokens(asked: Asked) -> Iterator[str]:
    """Rows whose tokens several ranks share, by context parallel or by Ulysses."""
    sizes, recipe = asked.parallelism, asked.recipe
    if sizes.tokens == 1:
        return
    keys = " and ".join(asked.key(field) for field in ("context", "sequence") if getattr(sizes, field) > 1)
    for name in dropouts(asked):
        yield f"{keys}: each rank would draw dropout for its own tokens, so losses would depend on it: set {name} to 0"
    for rope_type in asked.shape.rope if asked.shape else ():
        yield (
            f"{keys}: the frequencies of this model's `{rope_type}` RoPE depend on a document's length, and a rank has "
            "a part of it: use data parallel alone"
        )
    if recipe.model.attention in ("eager", "sdpa", "flash_attention_2"):
        yield (
            f"{keys}: `model.attention: {recipe.model.attention}` is transformers' own, which does not know of other "
            "ranks: set `model.attention: auto`"
        )


def context(asked: Asked) -> Iterator[str]:
    """Pieces of a document on several ranks are attended to by kernels that know causal attention and no more."""
    if asked.parallelism.context == 1:
        return
    if asked.recipe.model.attention in ("documents", "varlen", "flex"):
        yield (
            f"{asked.key('context')}: attention over several ranks is a way of its own, not `model.attention: "
            f"{asked.recipe.model.attention}`: set `auto`"
        )
    by_heads = f"use `{dimension_key('sequence')}`, whose ranks attend to whole rows"
    if asked.recipe.train.compile:
        yield (
            f"{asked.key('context')}: compiled layers would be traced anew for each row: set `train.compile: false`, "
            f"or {by_heads}"
        )
    if asked.shape is None:
        return
    for kind in asked.shape.attention:
        instead = by_heads if kind == "sliding_attention" else "remove it"
        yield f"{asked.key('context')}: this model has {_words(kind)}, which is not cut over ranks: {instead}"
    if asked.shape.soft_capped:
        yield f"{asked.key('context')}: this model caps attention's logits, which is not cut over ranks: {by_heads}"


def sequence(asked: Asked) -> Iterator[str]:
    """Each rank of Ulysses attends with whole heads."""
    size, shape = asked.parallelism.sequence, asked.shape
    if size == 1 or shape is None:
        return
    heads = shape.heads // asked.parallelism.tensor
    if heads % size:
        shared = f" on each of {asked.parallelism.tensor} tensor ranks" if asked.parallelism.tensor > 1 else ""
        yield f"{asked.key('sequence')} does not divide {heads} heads{shared}: set it to {nearest(size, heads)}"
    for kind in sorted(set(shape.attention) - {"sliding_attention"}):
        yield f"{asked.key('sequence')}: this model has {_words(kind)}, which keeps no documents apart: remove it"


def _words(kind: str) -> str:
    return kind.replace("_", " ")
