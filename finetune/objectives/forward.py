"""Calls the model on a micro-batch, for training and evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from finetune.data.batch import Batch
from finetune.models.attention import AttentionChoice, with_unread_mask
from finetune.models.attention.mixers import documents_of_forward
from finetune.objectives.objective import Objective


@dataclass(frozen=True)
class ForwardPass:
    attention: AttentionChoice
    objective: Objective

    def __call__(self, model: Any, batch: Batch) -> Any:
        """Returns `Outputs`; in a pipeline stage that is not the last, hidden states. model: `CausalLMWithLoss` in a
        backend's wrapper, or a stage of it. Tensors of the batch lie on the model's device."""
        ids = batch.inputs["input_ids"]
        attention = self.attention.forward_arguments(batch.sequence_lengths, batch.prefix_lengths, ids)
        inputs = {
            **batch.inputs,
            "token_type_ids": None,  # which tokens are of images: attention knows
            "use_cache": False,  # with one, transformers would let packed documents see each other
            **with_unread_mask(attention, ids.device),  # attention may leave positions to the model
        }
        with documents_of_forward(batch.sequence_lengths):
            return model(**inputs, targets=self.objective.targets(batch))
