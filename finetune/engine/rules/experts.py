"""Experts on different ranks, and the means that balance them."""

from __future__ import annotations

from collections.abc import Iterator

from finetune.engine.rules.asked import Asked, nearest


def experts_need_shards(asked: Asked) -> Iterator[str]:
    """The ranks of a shard group are what is divided."""
    parallelism = asked.parallelism
    if parallelism.expert == 1:
        return
    key = asked.key("expert")
    if asked.launch.kind != "fsdp2":
        yield f"{key}: divides the shards of FSDP: set `distributed_type: FSDP`, or remove it"
    elif parallelism.shard % parallelism.expert:
        fits = nearest(parallelism.expert, parallelism.shard)
        yield f"{key}: does not divide the {parallelism.shard} shards of a model: set it to {fits}"
    for field in ("tensor", "context", "sequence", "pipeline"):
        if getattr(parallelism, field) > 1:
            yield f"{key} with {asked.key(field)}: not supported: remove one"


def experts_to_divide(asked: Asked) -> Iterator[str]:
    if asked.parallelism.expert == 1 or asked.shape is None:
        return
    key, experts, expert = asked.key("expert"), asked.shape.experts, asked.parallelism.expert
    if experts == 0:
        yield f"{key}: the model has no experts: remove it"
    elif experts % expert:
        yield f"{key}: does not divide the model's {experts} experts: set it to {nearest(expert, experts)}"


def experts_as_they_are(asked: Asked) -> Iterator[str]:
    """What would have to look into experts that are elsewhere."""
    if asked.parallelism.expert == 1:
        return
    key, recipe = asked.key("expert"), asked.recipe
    if recipe.lora is not None and recipe.lora.targets == "all-linear":
        yield (
            f"{key} with `lora.targets: all-linear`: these are the experts too, whose adapters peft adds to the "
            "weight of all experts of a layer, and no rank has it: name layers, such as "
            "`lora.targets: [q_proj, k_proj, v_proj, o_proj]`"
        )
    if recipe.train.compile:
        yield (
            f"{key} with `train.compile: true`: how many tokens travel differs from layer to layer, and layers are "
            "compiled for one number: set `train.compile: false`"
        )


def balance_of_whole_rows(asked: Asked) -> Iterator[str]:
    """`objectives/router_balance.py` takes its means over rows."""
    if not asked.recipe.objective.router_aux_loss_coef:
        return
    for field in ("context", "sequence", "pipeline"):
        if getattr(asked.parallelism, field) > 1:
            yield (
                f"{asked.key(field)} with `objective.router_aux_loss_coef`: no rank sees all routers of a whole row: "
                "set one of the two to 0 or 1"
            )
