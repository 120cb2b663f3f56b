"""Supervised fine-tuning: the negative log-likelihood of every supervised token.

Letters: T tokens of the flat row, S supervised tokens among them, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from finetune.data.batch import Batch, shifted_targets
from finetune.models.attention import unread_mask
from finetune.models.head import LossHead, TokenLosses


def supervised_losses(
    model: Callable[..., Any],
    batch: Batch,  # input_ids, position_ids: (1, T)
    attention_arguments: dict[str, Any],
    device: torch.device,
    head: LossHead,
) -> TokenLosses:  # in nats, fp32, in the order of `shifted_targets`; with a graph also where nothing is supervised
    """Sums, never means: only the engine knows how many tokens the whole global batch has.

    Only the positions whose next token is supervised reach the LM head; whether their logits (S, V) are ever there
    together is the head's choice.
    """
    positions, targets = shifted_targets(batch)  # (S,), (S,)
    arguments = {
        "input_ids": batch.input_ids.to(device, non_blocking=True),
        "position_ids": batch.position_ids.to(device, non_blocking=True),
        "use_cache": False,  # with one, transformers would let packed documents see each other
        **attention_arguments,
    }
    if "documents" in attention_arguments:
        arguments["attention_mask"] = unread_mask(device)
    positions, targets = positions.to(device, non_blocking=True), targets.to(device, non_blocking=True)
    return head.losses(model, arguments, positions, targets)
