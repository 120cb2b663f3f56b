"""Which ways of dividing the work go together, and with which model, recipe and backend: the rules, in one place.

Every rule gives messages, each with what would do instead; `check_combination` raises them all at once, before a model
loads. A rule says what it refuses because it cannot be, or because the stack below does not do it right; never what is
merely slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune.engine.parallelism import Parallelism, dimension_key
from finetune.errors import UserError
from finetune.models.dropout import drops
from finetune.recipe.schema import Recipe

if TYPE_CHECKING:
    from finetune.engine.launch import Launch


@dataclass(frozen=True)
class Shape:
    """What of a model's architecture the rules look at; 0 or () where it has none of it."""

    layers: int
    heads: int
    kv_heads: int
    experts: int
    attention: tuple[str, ...]  # other than full causal attention: "sliding_attention", "chunked_attention"
    soft_capped: bool = False  # attention's logits
    drops: tuple[str, ...] = ()  # names of its settings by which it drops at random

    @classmethod
    def of(cls, config: Any) -> Shape:
        """config: transformers'."""
        text = config.get_text_config()
        heads = getattr(text, "num_attention_heads", 0) or 0
        kinds = set(getattr(text, "layer_types", None) or ())
        if not kinds and getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True):
            kinds = {"sliding_attention"}
        experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None) or 0
        return cls(
            layers=getattr(text, "num_hidden_layers", 0) or 0,
            heads=heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            experts=experts,
            attention=tuple(sorted(kinds - {"full_attention"})),
            soft_capped=getattr(text, "attn_logit_softcapping", None) is not None,
            drops=tuple(name for name, _ in drops(text)),
        )


@dataclass(frozen=True)
class Asked:
    """What the rules look at."""

    launch: Launch
    parallelism: Parallelism
    recipe: Recipe
    shape: Shape | None  # None: the model's config is not at hand

    def key(self, field: str) -> str:
        """`parallelism_config_tp_size: 4`, as it stands in the config."""
        return f"`{dimension_key(field)}: {getattr(self.parallelism, field)}`"


Rule = Callable[[Asked], Iterator[str]]


def check_combination(recipe: Recipe, recipe_file: str, launch: Launch, config: Any | None) -> None:
    """config: transformers', where it is at hand. Raises UserError with every message of every rule."""
    shape = None if config is None else Shape.of(config)
    asked = Asked(launch, launch.parallelism, recipe, shape)
    problems = [problem for rule in RULES for problem in rule(asked)]
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise UserError(f"{launch.name} cannot run {recipe_file}:\n{lines}")


def nearest(wanted: int, number: int) -> str:
    """Divisors of `number` around `wanted`, for messages.

    >>> nearest(5, 12)
    '4 or 6'
    """
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    below = [n for n in divisors if n <= wanted][-1:]
    above = [n for n in divisors if n > wanted][:1]
    return " or ".join(str(n) for n in below + above)


def not_yet(asked: Asked) -> Iterator[str]:
    for field in ("tensor", "pipeline", "expert"):
        if getattr(asked.parallelism, field) > 1:
            yield f"{asked.key(field)}: not supported yet: remove it"
    if asked.parallelism.replicate > 1 and asked.parallelism.shard > 1:
        yield f"{asked.key('replicate')} with {asked.key('shard')}: not supported yet: remove one"


def shared_tokens(asked: Asked) -> Iterator[str]:
    """Rows whose tokens several ranks share, by context parallel or by Ulysses."""
    sizes, recipe = asked.parallelism, asked.recipe
    if sizes.tokens == 1:
        return
    keys = " and ".join(asked.key(field) for field in ("context", "sequence") if getattr(sizes, field) > 1)
    if recipe.train.compile:
        yield f"{keys}: compiled layers have no room for the exchange between ranks: set `train.compile: false`"
    for name in _dropouts(asked):
        yield f"{keys}: each rank would draw dropout for its own tokens, so losses would depend on it: set {name} to 0"
    if recipe.model.attention in ("eager", "sdpa", "flash_attention_2"):
        yield (
            f"{keys}: `model.attention: {recipe.model.attention}` is transformers' own, which does not know of other "
            "ranks: set `model.attention: auto`"
        )


def _dropouts(asked: Asked) -> Iterator[str]:
    lora = asked.recipe.lora
    if lora is not None and lora.dropout:
        yield f"`lora.dropout` (now {lora.dropout})"
    for name in asked.shape.drops if asked.shape else ():
        yield f"the model's `{name}`"


def context(asked: Asked) -> Iterator[str]:
    """Pieces of a document on several ranks are attended to by kernels that know causal attention and no more."""
    if asked.parallelism.context == 1:
        return
    if asked.recipe.model.attention in ("documents", "varlen", "flex"):
        yield (
            f"{asked.key('context')}: attention over several ranks is a way of its own, not `model.attention: "
            f"{asked.recipe.model.attention}`: set `auto`"
        )
    if asked.shape is None:
        return
    by_heads = f"use `{dimension_key('sequence')}`, whose ranks attend to whole rows"
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


RULES: list[Rule] = [not_yet, shared_tokens, context, sequence]
