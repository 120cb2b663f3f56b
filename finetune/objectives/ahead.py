"""The loss of a head that predicts the token after the next one (`model.mtp: train`), and its acceptance.

    loss          weight * (sum of -log p(t_{i+2} | t_0 .. t_{i+1}) over the head's targets) / (targets of the step)
    acceptance    share of the head's guesses of t_{i+2} that the model makes itself once it has read t_{i+1}, greedy

The sum has the count of the model's own targets below it, as DeepSeek-V3 has it (2024, https://arxiv.org/abs/2412.19437,
equation 24: 1/T for both), and Megatron-LM with losses per token: the head has one target less in each sequence whose
second token is trained. `mtp_loss` is the mean over the head's own targets.

Acceptance is that of one guess ahead, along the texts of the rows: a server's first draft of each step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from finetune.data.batch import Batch
from finetune.models.wrapped import Outputs
from finetune.objectives.objective import Objective, Sums, Term, Terms, TokenRanks


def ahead(weight: float, evaluating: bool, token_ranks: TokenRanks) -> Objective:
    """Returns the head's loss as a term; of an evaluation a metric, with the acceptance beside it."""

    def terms(outputs: Outputs, batch: Batch) -> Terms:
        assert outputs.ahead is not None  # the loader was asked for its targets
        each = outputs.ahead.each
        count = torch.tensor(float(len(each)), device=each.device)
        own = {"mtp_loss": Term(outputs.ahead.total, "target_tokens", None if evaluating else weight)}
        own["mtp_targets"] = Term(count)
        if evaluating:
            own["mtp_accepted"] = Term(token_ranks.share(accepted(outputs, batch, token_ranks)))
        return own

    return Objective(terms, _metrics)


def accepted(outputs: Outputs, batch: Batch, token_ranks: TokenRanks) -> Tensor:  # ()
    """Returns how many of the head's guesses the model makes itself, one place later. Ranks that share rows may have
    one and the other: all of them put together those of the row."""
    assert outputs.ahead is not None
    assert batch.ahead is not None
    of_row, targets = batch.row_targets, len(batch.targets.ids)
    here = torch.arange(targets, device=batch.targets.ids.device) if of_row is None else of_row.here
    count = targets if of_row is None else len(of_row.ids)

    def of_all(guesses: Tensor, places: Tensor) -> Tensor:  # (N,), 0: none
        own = torch.zeros(count, dtype=torch.float64, device=guesses.device)
        return token_ranks.sum(own.index_put((places,), guesses.double() + 1))

    model, head = of_all(outputs.details[0], here), of_all(outputs.ahead.details[0], batch.ahead.target)
    return ((head == model) & (head > 0)).double().sum()


def _metrics(sums: Sums) -> dict[str, float]:
    targets = sums.totals["mtp_targets"].item()
    if not targets:
        return {}
    shown = {"mtp_loss": sums.totals["mtp_loss"].item() / targets}  # before its weight
    if "mtp_accepted" in sums.totals:
        shown["mtp_acceptance"] = sums.totals["mtp_accepted"].item() / targets
    return shown
