"""The types that weights are held in, and that a model computes in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from finetune.recipe.schema import Recipe


@dataclass(frozen=True)
class Dtypes:
    """Types in memory. `compute` is what the matrix products run in."""

    trained: torch.dtype
    frozen: torch.dtype
    compute: torch.dtype


def dtypes(recipe: Recipe) -> Dtypes:
    """What `train.precision` and `model.dtype` mean together; see Precision in the README."""
    compute = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "bf16_true": torch.bfloat16}[
        recipe.train.precision
    ]
    trained = torch.bfloat16 if recipe.train.precision == "bf16_true" else torch.float32
    asked = recipe.model.dtype
    return Dtypes(trained=trained, frozen=compute if asked == "auto" else getattr(torch, asked), compute=compute)
