"""Supervised fine-tuning: the negative log-likelihood of every supervised token.

Letters: T tokens of the flat row, S supervised tokens among them, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from finetune.data.batch import Batch
from finetune.models.head import LossHead, TokenLosses


def supervised_losses(
    model: Callable[..., Any],
    batch: Batch,
    attention_arguments: dict[str, Any],
    device: torch.device,
    head: LossHead,
) -> TokenLosses:  # in nats, fp32, in the order of `batch.targets`; with a graph also where nothing is supervised
    """Sums, never means: only the engine knows how many tokens the whole global batch has.

    Only the positions whose next token is supervised reach the LM head; whether their logits (S, V) are ever there
    together is the head's choice.
    """
    positions, targets = batch.targets.positions, batch.targets.ids  # (S,), (S,)
    arguments = {
        **{name: values.to(device, non_blocking=True) for name, values in batch.inputs.items()},
        "use_cache": False,  # with one, transformers would let packed documents see each other
        **attention_arguments,
    }
    positions, targets = positions.to(device, non_blocking=True), targets.to(device, non_blocking=True)
    return head.losses(model, arguments, positions, targets)
