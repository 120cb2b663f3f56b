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
    for field in ("tensor", "context", "sequence", "pipeline", "expert"):
        if getattr(asked.parallelism, field) > 1:
            yield f"{asked.key(field)}: not supported yet: remove it"
    if asked.parallelism.replicate > 1 and asked.parallelism.shard > 1:
        yield f"{asked.key('replicate')} with {asked.key('shard')}: not supported yet: remove one"


RULES: list[Rule] = [not_yet]
