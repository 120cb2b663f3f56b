"""Objectives: pure functions of a model's outputs and a batch that return sums, each with its unit.

    step loss = sum over the loss terms of  weight * (sum of the term over the step) / (count of its unit in the step)

Sums add up over micro-batches and ranks alike, so accumulation, sharding and resuming need nothing from an objective.
Units are counted from the data: "target_tokens", "tokens", "sequences", "examples".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from finetune.data.batch import Batch
from finetune.models.head import TargetLoss, TokenLoss
from finetune.models.head.token_loss import HeadLosses
from finetune.models.loss_model import TargetTokens
from finetune.models.score_model import ScoredPositions
from finetune.models.wrapped import Outputs

Counts = Mapping[str, float]  # of a step over all ranks, by unit
NLL = TokenLoss()
# Column of a batch, (E,), under `objective.overlong: mask`: 1; 0 of an example without gradient and metrics.
KEPT = "kept"
KEPT_TOKENS = "kept_target_tokens"  # unit: targets of examples that are kept


class Term(NamedTuple):
    """A sum over one micro-batch."""

    total: Tensor  # () with a graph if it has a weight; of any shape if it is a metric only
    unit: str | None = None  # its mean is over these; None: it stays a sum
    weight: float | None = None  # in the loss; None: a metric only
    largest: bool = False  # a metric (): of micro-batches and ranks the largest counts, not the sum


Terms = dict[str, Term]


class TermSums:
    """Adds up the terms of micro-batches on one rank, in fp64."""

    def __init__(self) -> None:
        self.totals: dict[str, Tensor] = {}
        self.terms: Terms = {}

    def add(self, terms: Terms) -> None:
        for name, term in terms.items():
            total, merged = term.total.detach().double(), torch.maximum if term.largest else torch.add
            self.totals[name] = merged(self.totals[name], total) if name in self.totals else total
            self.terms[name] = term._replace(total=total)

    @property
    def largest(self) -> set[str]:
        """Returns the names of terms whose largest value counts."""
        return {name for name, term in self.terms.items() if term.largest}


@dataclass(frozen=True)
class Sums:
    """The terms of a step, added up over micro-batches and ranks."""

    totals: Mapping[str, Tensor]  # fp64, on the CPU
    terms: Terms  # of one micro-batch, for their units and weights
    counts: Counts

    def mean(self, name: str) -> float:
        """Returns a term's total over the count of its unit."""
        total, unit = self.totals[name].item(), self.terms[name].unit
        return total if unit is None else total / self.counts[unit]

    def loss(self) -> float:
        """Returns the step's loss: the weighted sum of the means of all loss terms."""
        weights = {name: term.weight for name, term in self.terms.items() if term.weight is not None}
        return sum(
            weight * self.totals[name].item() / self.counts[self.terms[name].unit or ""]
            for name, weight in weights.items()
        )


def means(sums: Sums) -> dict[str, float]:
    """Returns the mean of every metric whose unit the step has, and those that are a largest value."""
    metrics = [(name, term) for name, term in sums.terms.items() if term.weight is None]
    shown = [name for name, term in metrics if term.largest or (term.unit and sums.counts[term.unit])]
    return {name: sums.mean(name) for name in shown}


@dataclass(frozen=True)
class TokenRanks:
    """Ranks that share a row's tokens (context and sequence parallel); each computes the terms of all sequences."""

    count: int = 1
    sum: Callable[[Tensor], Tensor] = lambda tensor: tensor  # over these ranks; of gradients too, in the backward

    def share(self, total: Tensor) -> Tensor:
        """Returns this rank's part of a total that all of them have."""
        return total / self.count


ONE_RANK = TokenRanks()  # has all tokens of its rows


def sequence_log_probs(outputs: Outputs, batch: Batch, token_ranks: TokenRanks) -> Tensor:  # (D,) fp64
    """Returns the log-probability of the targets of each sequence.

    Added up in fp64, so that differences of long answers keep their digits.
    """
    return sequence_sums(-outputs.token_losses.double(), batch, token_ranks)


def sequence_sums(values: Tensor, batch: Batch, token_ranks: TokenRanks) -> Tensor:  # (S,) -> (D,)
    """Returns the sum of the targets' values of each sequence, one sequence after the other: adding by index has no
    fixed order on CUDA."""
    parts = values.split(list(batch.sequence_targets)) if batch.sequence_targets else ()
    return token_ranks.sum(torch.stack([part.sum() for part in parts]) if parts else values)


def sequence_targets(batch: Batch, token_ranks: TokenRanks) -> Tensor:  # (D,) fp64
    """Returns the number of targets of each sequence on all of these ranks."""
    local = torch.tensor(batch.sequence_targets, dtype=torch.float64)
    return token_ranks.sum(local.to(batch.targets.ids.device, non_blocking=True))


@dataclass(frozen=True)
class Objective:
    """A function from outputs to the terms of a loss, and the results that it needs from the forward."""

    terms: Callable[[Outputs, Batch], Terms]  # of one micro-batch, the same names in each; loss terms have a weight
    metrics: Callable[[Sums], dict[str, float]] = means  # by key of metrics.jsonl; the loss itself is not among them
    token_loss: TargetLoss = NLL  # of each target; -log p(target) unless an objective adds to it
    token_weights: Callable[[Batch], Tensor] | None = None  # (S,) in `Outputs.total`; None: 1 each
    differentiable: bool = False  # `Outputs.token_losses` needs a graph: the loss is not linear in them
    scales_last: bool = False  # and their gradients are multiplied as those of a sum are, see `HeadTask`
    columns: tuple[str, ...] = ()  # of a batch, that the terms read
    # Terms of a pass without gradient over the whole step: the terms proper read their means, as columns () of a batch.
    statistics: Callable[[Outputs, Batch], Terms] | None = None
    num_scores: int = 0  # of a sequence, if the terms read `Outputs.scores` of a `ScoreModel`, and no token losses
    num_details: int = 0  # `Outputs.details` that the token loss gives

    def no_terms(self, batch: Batch, terms: Callable[[Outputs, Batch], Terms] | None = None) -> Terms:
        """Returns the terms, or other ones, all zero, for a rank without outputs (early stages of a pipeline)."""
        device, targets = batch.targets.ids.device, len(batch.targets.ids)
        each = torch.zeros(targets, device=device)
        scores = torch.zeros(len(batch.ends.positions), self.num_scores, device=device)
        of_ahead = torch.zeros(0 if batch.ahead is None else len(batch.ahead.ids), device=device)
        nothing = Outputs(
            torch.zeros((), device=device),
            each,
            (each,) * self.num_details,
            scores=scores,
            ahead=HeadLosses(torch.zeros((), device=device), of_ahead, (of_ahead,) * self.num_details),
        )
        like = (terms or self.terms)(nothing, self.completed(batch))
        return {name: term._replace(total=torch.zeros_like(term.total)) for name, term in like.items()}

    def completed(self, batch: Batch) -> Batch:
        """Returns the batch with zeros in the columns that only the run itself computes: for shapes, not values."""
        size, device = len(batch.sequence_tokens), batch.targets.ids.device
        missing = {name: torch.zeros(size, dtype=torch.float64, device=device) for name in self.columns}
        return replace(batch, columns={**missing, **batch.columns})

    @property
    def only_sums(self) -> bool:
        """Returns whether it reads the plain sum of token losses only, each following from logits and target alone."""
        plain = isinstance(self.token_loss, TokenLoss)
        return plain and self.token_weights is None and not self.differentiable

    def targets(self, batch: Batch) -> TargetTokens | ScoredPositions:
        """Returns the targets of a batch and the results that the forward has to compute for them."""
        if self.num_scores:
            return ScoredPositions(batch.ends.positions)
        weights = None if self.token_weights is None else self.token_weights(batch)
        how = self.token_loss, weights, self.differentiable, batch.target_columns
        if batch.ahead is not None:
            ids = batch.targets
            return TargetTokens(ids.positions, ids.ids, *how, scales_last=self.scales_last, ahead=batch.ahead)
        each_alone = weights is not None or batch.target_columns or not self.differentiable
        if each_alone or batch.distinct_targets is None:
            return TargetTokens(batch.targets.positions, batch.targets.ids, *how, scales_last=self.scales_last)
        positions, ids, of_target = batch.distinct_targets
        return TargetTokens(positions, ids, *how, of_target, self.scales_last)

    def loss(self, terms: Terms, counts: Counts) -> Tensor:  # ()
        """Returns a micro-batch's part of the step's loss."""
        first, *others = [t.total * (t.weight / counts[t.unit or ""]) for t in terms.values() if t.weight is not None]
        return sum(others, first)

    def trial_loss(self, outputs: Outputs, batch: Batch) -> Tensor:  # ()
        """Returns a loss for a backward that no optimizer step follows; its value does not matter."""
        batch = self.completed(batch)
        if self.statistics is not None:
            unknown = torch.zeros((), dtype=torch.float64, device=batch.targets.ids.device)
            batch = batch.with_columns(dict.fromkeys(self.statistics(outputs, batch), unknown))
        return self.loss(self.terms(outputs, batch), defaultdict(lambda: 1.0))


def combined(objective: Objective, others: Sequence[Objective]) -> Objective:
    """Returns an objective with the terms and metrics of others added, such as router balance or losses by source."""
    parts = (objective, *others)

    def terms(outputs: Outputs, batch: Batch) -> Terms:
        return {name: term for part in parts for name, term in part.terms(outputs, batch).items()}

    def metrics(sums: Sums) -> dict[str, float]:
        return {name: value for part in parts for name, value in part.metrics(sums).items()}

    return replace(objective, terms=terms, metrics=metrics)
