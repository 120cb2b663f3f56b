"""Pipelines: what can be cut into stages, and what their schedules take."""

from __future__ import annotations

from collections.abc import Iterator

from finetune.engine.parallelism import dimension_key
from finetune.engine.rules.asked import Asked, dropouts
from finetune.engine.schedule import ONE_STAGE, fitting
from finetune.engine.stages import PLAN
from finetune.recipe.schema import Recipe

_DRAWS = "draws its numbers layer after layer, and a stage does not know those of the layers before it"


def pipeline_stages(asked: Asked) -> Iterator[str]:
    """Whether model and backend can be cut into so many stages."""
    sizes, shape = asked.parallelism, asked.shape
    if sizes.stages_per_rank > 1 and (sizes.pipeline == 1 or sizes.schedule in ONE_STAGE):
        yield (
            f"{asked.key('stages_per_rank')} has an effect with a pipeline and `interleaved` or `zero_bubble` only: "
            f"remove it, or set `{dimension_key('schedule')}: interleaved`"
        )
    if sizes.pipeline == 1:
        return
    if sizes.schedule == "interleaved" and sizes.stages_per_rank == 1:
        yield f"{asked.key('schedule')} needs `{dimension_key('stages_per_rank')}: 2` or more; with one it is `1f1b`"
    if asked.launch.kind != "replicated" or sizes.shard > 1:
        yield f"{asked.key('pipeline')} does not go with shards inside its stages: use `distributed_type: MULTI_GPU`"
    for field in ("context", "sequence", "tensor", "expert"):
        if getattr(sizes, field) > 1:
            yield f"{asked.key('pipeline')} with {asked.key(field)}: they do not go together: remove one"
    if shape is None:
        return
    if frozenset(shape.parts) != PLAN:
        yield f"{asked.key('pipeline')}: this architecture is not just an embedding, layers and a norm: remove it"
    stages = sizes.pipeline * sizes.stages_per_rank
    if stages > shape.layers:
        most = max(1, shape.layers // sizes.stages_per_rank)
        yield (
            f"{asked.key('pipeline')}: {stages} stages of {shape.layers} layers, and each needs one: "
            f"`{dimension_key('pipeline')}: {most}` at most"
        )


def pipeline_micro_batches(asked: Asked) -> Iterator[str]:
    """Whether the schedule can run a step's micro-batches. Where their number varies, empty ones fill it up."""
    sizes, batch = asked.parallelism, asked.recipe.batch
    if sizes.pipeline == 1 or batch.rows_per_device == "auto" or batch.tokens_per_device is not None:
        return
    rows = batch.rows // sizes.data  # of a pipeline
    if batch.rows % (batch.rows_per_device * sizes.data):
        return  # said elsewhere

    def fits(count: int) -> bool:
        return fitting(sizes.schedule, sizes.pipeline, count) == count

    if (count := rows // batch.rows_per_device) and not fits(count):
        others = [n for n in range(1, rows + 1) if rows % n == 0 and fits(rows // n)]
        near = sorted(others, key=lambda n: abs(n - int(batch.rows_per_device)))[:2]
        advice = [f"`batch.rows_per_device: {n}`" for n in sorted(near)]
        advice += [f"`batch.rows: {fitting(sizes.schedule, sizes.pipeline, count) * batch.rows // count}`"]
        if sizes.schedule in ONE_STAGE:
            advice.append(f"`{dimension_key('schedule')}: gpipe`")
        yield (
            f"{asked.key('schedule')} on {sizes.pipeline} ranks does not take {count} micro-batches a step: "
            f"set {' or '.join(advice)}"
        )


def pipeline_recipe(asked: Asked) -> Iterator[str]:
    """What a recipe may not ask of a pipeline."""
    if asked.parallelism.pipeline == 1:
        return
    recipe, key = asked.recipe, asked.key("pipeline")
    if recipe.batch.rows_per_device == "auto":
        yield (
            f"{key}: `batch.rows_per_device: auto` tries one forward, and a stage holds those of several "
            "micro-batches: give a number"
        )
    if recipe.optimizer.in_backward:
        yield f"{key}: `optimizer.in_backward` needs one backward a step, a pipeline lives from several: set `false`"
    for name in dropouts(asked):
        yield f"{key}: dropout {_DRAWS}: set {name} to 0"
    if asked.parallelism.schedule == "zero_bubble":
        yield from _zero_bubble(asked.key("schedule"), recipe)


def _zero_bubble(key: str, recipe: Recipe) -> Iterator[str]:
    """torch goes through each backward twice: for the gradients of the inputs, later for those of the weights."""
    if recipe.train.compile:
        yield f"{key}: torch cannot take a compiled backward apart: use `1f1b`, or `compile: false`"
    if recipe.model.cross_entropy != "plain":
        yield (
            f"{key} goes through a backward twice, and `model.cross_entropy: {recipe.model.cross_entropy}` has its "
            "gradients once: use `1f1b`, or `cross_entropy: plain`, which holds all logits"
        )
    if recipe.train.activation_checkpointing:
        yield (
            f"{key} goes through a backward twice, and what is computed again for it is there once: use `1f1b`, or "
            "`activation_checkpointing: false`"
        )
