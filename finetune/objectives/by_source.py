"""The loss of each source of a mixture, as metrics next to the loss of the mixture."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from finetune.data.batch import Batch
from finetune.models.wrapped import Outputs
from finetune.objectives.objective import Objective, Sums, Term, Terms
from finetune.utils import copied_to


def by_source(names: Sequence[str], has_losses: bool = True) -> Objective:
    """Returns metrics `loss/<name>` in nats per target token; does not wait for the device.

    has_losses: false if the loss is not one of tokens (answers, scores): only tokens are counted.
    """

    def terms(outputs: Outputs, batch: Batch) -> Terms:
        losses = torch.zeros(len(names), dtype=torch.float64, device=outputs.token_losses.device)
        sources = copied_to(torch.tensor(batch.sequence_sources, dtype=torch.int64), losses.device)  # (D,)
        if has_losses:
            losses.index_add_(0, sources[batch.targets.sequence], outputs.token_losses.detach().double())
        counts = np.zeros((2, len(names)))
        sequences = zip(batch.sequence_sources, batch.sequence_targets, batch.sequence_tokens, strict=True)
        for source, num_targets, num_tokens in sequences:
            counts[:, source] += (num_targets, num_tokens)
        targets, tokens = torch.from_numpy(counts)
        return {
            "loss_by_source": Term(losses),
            "targets_by_source": Term(targets),
            "tokens_by_source": Term(tokens),
        }

    def metrics(sums: Sums) -> dict[str, float]:
        losses, targets = sums.totals["loss_by_source"].tolist(), sums.totals["targets_by_source"].tolist()
        return {f"loss/{name}": loss / n for name, loss, n in zip(names, losses, targets, strict=True) if n}

    return Objective(terms, metrics if has_losses else lambda sums: {})
