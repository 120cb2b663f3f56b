"""Which ways of dividing the work go together, and with which model, recipe and backend: the rules, in one place.

Every rule gives messages, each with what would do instead; `check_combination` raises them all at once, before a model
loads. A rule says what it refuses because it cannot be, or because the stack below does not do it right; never what is
merely slow.
"""

from __future__ import annotations

from typing import Any

from finetune.engine.launch import Launch
from finetune.engine.rules import experts, pipeline, shards, shared_tokens, tensor
from finetune.engine.rules.asked import Asked, Rule, Shape
from finetune.errors import UserError
from finetune.recipe.schema import Recipe

RULES: tuple[Rule, ...] = (
    shards.shards_and_replicas,
    tensor.tensor_backends,
    tensor.tensor_shape,
    shared_tokens.shared_tokens,
    shared_tokens.context,
    shared_tokens.sequence,
    pipeline.pipeline_stages,
    pipeline.pipeline_micro_batches,
    pipeline.pipeline_recipe,
    experts.experts_need_shards,
    experts.experts_to_divide,
    experts.experts_as_they_are,
    experts.balance_of_whole_rows,
)


def check_combination(recipe: Recipe, recipe_file: str, launch: Launch, config: Any | None) -> None:
    """config: transformers', where it is at hand. Raises UserError with every message of every rule."""
    shape = None if config is None else Shape.of(config)
    asked = Asked(launch, launch.parallelism, recipe, shape)
    problems = [problem for rule in RULES for problem in rule(asked)]
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise UserError(f"{launch.name} cannot run {recipe_file}:\n{lines}")
