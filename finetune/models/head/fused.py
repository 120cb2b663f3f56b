"""Head and cross entropy by others: torch's own, and Liger's kernels."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from finetune.models.head.chunked import Work
from finetune.models.head.formula import LogitMap, TokenLosses


def torch_losses(hidden: Tensor, weight: Tensor, bias: Tensor | None, work: Work) -> TokenLosses:
    """torch >= 2.13, https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.linear_cross_entropy.html.

    The chunk is ours: by torch's own rule (`aspect_ratio`) it is 8 rows at 1.2k tokens, and three times slower.
    """
    linear_cross_entropy: Any = torch.nn.functional.linear_cross_entropy
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=work.rows)
    if work.logit_map.scale != 1.0:
        hidden = hidden * work.logit_map.scale
    each = linear_cross_entropy(hidden, weight, work.targets, linear_bias=bias, reduction="none", options=options)
    return TokenLosses(each.sum(), each.detach())


def torch_unfit(logit_map: LogitMap) -> str | None:
    """Why torch's cannot be used, or None. What the recipe alone tells is in finetune/recipe/rules.py."""
    if not hasattr(torch.nn.functional, "linear_cross_entropy"):
        return f"it needs torch >= 2.13, and this is {torch.__version__}"
    if logit_map.cap is not None:
        return "it cannot cap the logits, as this architecture does"
    return None


def liger_losses(hidden: Tensor, weight: Tensor, bias: Tensor | None, work: Work) -> TokenLosses:
    """https://github.com/linkedin/Liger-Kernel, LigerFusedLinearCrossEntropyLoss: it chooses its own chunks."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # pyright: ignore[reportMissingImports]

    if work.logit_map.scale != 1.0:
        hidden = hidden * work.logit_map.scale
    loss = LigerFusedLinearCrossEntropyLoss(
        lse_square_scale=work.formula.z_loss,
        label_smoothing=work.formula.label_smoothing,
        reduction="none",
        softcap=work.logit_map.cap,
        accum_dtype=torch.float32,
    )
    each = loss(weight, hidden, work.targets, bias)
    return TokenLosses(each.sum(), each.detach())


def liger_unfit(device: str) -> str | None:
    """Why Liger's kernels cannot be used, or None."""
    if device != "cuda":
        return "its kernels need a CUDA device"
    if importlib.util.find_spec("liger_kernel") is None:
        return "liger-kernel is not installed: pip install liger-kernel"
    return None
