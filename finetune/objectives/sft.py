"""Supervised fine-tuning: the negative log-likelihood of every supervised token.

Letters: T tokens of the flat row, S supervised tokens among them, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from finetune.data.batch import Batch, shifted_targets


def supervised_losses(
    model: Callable[..., Any],
    batch: Batch,  # input_ids, position_ids: (1, T)
    attention_arguments: dict[str, Any],
    device: torch.device,
) -> Tensor:  # (S,) in nats, fp32, in the order of `shifted_targets`; empty, with a graph, where nothing is supervised
    """Each by itself: callers sum, for only the engine knows how many tokens the whole global batch has.

    Only the positions whose next token is supervised reach the LM head (`logits_to_keep`), so logits are (S, V).
    """
    positions, targets = shifted_targets(batch)  # (S,), (S,)
    output = model(
        input_ids=batch.input_ids.to(device, non_blocking=True),
        position_ids=batch.position_ids.to(device, non_blocking=True),
        use_cache=False,  # with one, transformers would let packed documents see each other
        logits_to_keep=positions.to(device, non_blocking=True),
        **attention_arguments,
    )
    return cross_entropy(output.logits[0].float(), targets.to(device, non_blocking=True), reduction="none")
