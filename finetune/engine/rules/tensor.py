"""Matrices cut by columns and rows: tensor parallel."""

from __future__ import annotations

import math
from collections.abc import Iterator

from finetune.engine.parallelism import dimension_key
from finetune.engine.rules.asked import Asked, nearest


def tensor_backends(asked: Asked) -> Iterator[str]:
    """What is cut is cut before torch's fully_shard, which knows of it no more than the sizes."""
    if asked.parallelism.tensor == 1:
        return
    key, recipe = asked.key("tensor"), asked.recipe
    if asked.launch.kind == "zero":
        yield f"{key}: DeepSpeed takes whole matrices: use fsdp2_tp or tp"
    if recipe.mode == "qlora":
        yield f"{key} with `mode: qlora`: 4-bit blocks run along the rows, and columns would be cut through: use fsdp2"
    if recipe.lora is not None and recipe.lora.dora:
        yield f"{key} with `lora.dora: true`: DoRA divides by the norms of whole rows, and ranks hold parts: use fsdp2"
    if recipe.optimizer.in_backward:
        yield (
            f"{key} with `optimizer.in_backward: true`: a norm between cut matrices has its gradient only when all "
            "ranks have added up theirs: use fsdp2, or `in_backward: false`"
        )
    if recipe.optimizer.name == "muon":
        yield f"{key}: Muon needs whole matrices: use ddp, or another optimizer"


def tensor_shape(asked: Asked) -> Iterator[str]:
    """Each rank works on whole heads, and draws no random number that another rank does not draw."""
    size, shape = asked.parallelism.tensor, asked.shape
    if size == 1 or shape is None:
        return
    if shape.experts:
        instead = f"divide them with `{dimension_key('expert')}`, or use fsdp2"
        yield f"{asked.key('tensor')}: the model's {shape.experts} experts are not cut by columns here: {instead}"
    elif not shape.tensor_styles:
        yield f"{asked.key('tensor')}: transformers has no plan to cut this model: use fsdp2"
    if "colwise" in shape.tensor_styles and (shape.heads % size or shape.kv_heads % size):
        common = math.gcd(shape.heads, shape.kv_heads)
        yield (
            f"{asked.key('tensor')}: {size} ranks cannot share {shape.heads} attention heads and {shape.kv_heads} "
            f"key-value heads: make it {nearest(size, common)}"
        )
    if dropped := shape.drops.get("attention_dropout"):
        yield (
            f"{asked.key('tensor')}: the model drops attention at random (`attention_dropout: "
            f"{dropped}`), and ranks would draw for other heads than one process does: use fsdp2"
        )
