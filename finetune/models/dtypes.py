"""The types of weights in memory, 4-bit ones through bitsandbytes, and the type that a model computes in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import BitsAndBytesConfig

from finetune.errors import UserError
from finetune.recipe.schema import Quantization, Recipe


@dataclass(frozen=True)
class Dtypes:
    """Types in memory. `compute` is what the matrix products run in."""

    trained: torch.dtype
    frozen: torch.dtype
    compute: torch.dtype


def dtypes(recipe: Recipe) -> Dtypes:
    """Returns the types by `train.precision` and `model.dtype`; see Precision in the README."""
    compute = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "bf16_true": torch.bfloat16}[
        recipe.train.precision
    ]
    trained = torch.bfloat16 if recipe.train.precision == "bf16_true" else torch.float32
    frozen = compute if recipe.model.dtype == "auto" else getattr(torch, recipe.model.dtype)
    return Dtypes(trained=trained, frozen=frozen, compute=compute)


def quantization_config(
    quantization: Quantization, compute: torch.dtype, whole: list[str] | None = None
) -> BitsAndBytesConfig:
    """Returns bitsandbytes' config. whole: modules that stay as they are; None: the LM head.

    Raises UserError with the install line where the package is missing.
    """
    try:
        import bitsandbytes  # noqa: F401  (only to see whether it is installed)
    except ImportError:
        raise UserError("`mode: qlora` needs bitsandbytes: pip install 'bitsandbytes>=0.49'") from None
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantization.type,
        bnb_4bit_use_double_quant=quantization.double_quant,
        bnb_4bit_compute_dtype=compute,
        # The packed bytes are stored as floats of the compute type: FSDP2 shards floats only (bytes it would
        # replicate).
        bnb_4bit_quant_storage=compute,
        llm_int8_skip_modules=whole,  # 4 bits as well
    )


def keep_weights_unpacked(model: Any) -> None:
    """Forbid bitsandbytes to repack 4-bit weights for inference on CPUs with AVX512-BF16.

    One evaluation pass would repack them, `train()` would not undo it, and every later gradient would be wrong
    (bitsandbytes 0.50, nn/modules.py, `Linear4bit.forward`).
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
