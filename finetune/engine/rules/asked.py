"""What rules look at, and what their messages are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from finetune.engine.launch import Launch
from finetune.engine.parallelism import Parallelism, dimension_key
from finetune.models.dropout import drops
from finetune.models.rope import length_dependent_rope
from finetune.recipe.schema import Recipe


@dataclass(frozen=True)
class Shape:
    """What of a model's architecture the rules look at; 0 or () where it has none of it."""

    layers: int
    heads: int
    kv_heads: int
    experts: int
    attention: tuple[str, ...]  # other than full causal attention: "sliding_attention", "chunked_attention"
    parts: tuple[str, ...] = ()  # of the base model, where transformers says that it can be cut between them
    soft_capped: bool = False  # attention's logits
    drops: dict[str, float] = field(default_factory=dict)  # settings by which it drops at random
    rope: tuple[str, ...] = ()  # types of RoPE that depend on the length of a document
    tensor_styles: frozenset[str] = frozenset()  # of the plan to cut its matrices; empty: it has none

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
            parts=tuple(sorted(getattr(text, "base_model_pp_plan", None) or ())),
            soft_capped=getattr(text, "attn_logit_softcapping", None) is not None,
            drops=dict(drops(text)),
            rope=tuple(length_dependent_rope(config)),
            tensor_styles=frozenset(tensor_plan(config).values()),
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


def tensor_plan(config: Any) -> dict[str, str]:
    """Of a model's config, transformers': how to cut its matrices, a style by pattern; empty where nothing is said."""
    return dict(getattr(config.get_text_config(), "base_model_tp_plan", None) or {})


def nearest(wanted: int, number: int) -> str:
    """Divisors of `number` around `wanted`, for messages.

    >>> nearest(5, 12)
    '4 or 6'
    """
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    below = [n for n in divisors if n <= wanted][-1:]
    above = [n for n in divisors if n > wanted][:1]
    return " or ".join(str(n) for n in below + above)


def dropouts(asked: Asked) -> Iterator[str]:
    lora = asked.recipe.lora
    if lora is not None and lora.dropout:
        yield f"`lora.dropout` (now {lora.dropout})"
    for name in asked.shape.drops if asked.shape else {}:
        yield f"the model's `{name}`"
