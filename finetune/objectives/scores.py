"""Objectives on scores that a model gives to sequences, each at its last token.

Letters: D sequences, E examples, N labels. s is the score of an answer.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid

from finetune.data.batch import Batch
from finetune.models.wrapped import Outputs
from finetune.objectives.objective import Objective, Term, Terms, TokenRanks
from finetune.objectives.preference import pairs
from finetune.objectives.ranking import rounding_of, score_tolerance, share_of_best
from finetune.recipe.objective_settings import Classify, RewardObjective

MARGIN = "margin"  # column of a batch, (E,): by how much the chosen answer is to score higher; 0 if there is none
LABEL = "label"  # column of a batch, (E,): index of the label


def reward(settings: RewardObjective, evaluating: bool, token_ranks: TokenRanks, compute: torch.dtype) -> Objective:
    """A reward model: -log sigmoid(s(chosen) - s(rejected) - margin) (Bradley-Terry; Ouyang et al. 2022,
    https://arxiv.org/abs/2203.02155, equation 1; margin: Touvron et al. 2023, https://arxiv.org/abs/2307.09288,
    equation 2), and centering * (s(chosen) + s(rejected))^2 (Eisenstein et al. 2023, https://arxiv.org/abs/2312.09244).
    """

    def terms(outputs: Outputs, batch: Batch) -> Terms:
        chosen, rejected = pairs(sequence_scores(outputs, batch, token_ranks)[:, 0])  # (E,), (E,)
        losses = -logsigmoid(chosen - rejected - batch.columns.get(MARGIN, 0.0))
        scores = torch.stack([chosen, rejected], 1).detach()
        means = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margin": chosen - rejected,
            "rewards/accuracy": share_of_best(scores, score_tolerance(scores, rounding_of(compute)))[:, 0],
        }
        loss_terms = {"reward": Term(token_ranks.share(losses.sum()), "examples", 1.0)}
        if settings.centering:
            off_centre = (chosen + rejected).square().sum()
            loss_terms["off_centre"] = Term(token_ranks.share(off_centre), "examples", settings.centering)
        return {**loss_terms, **_means(means, token_ranks)}

    return Objective(terms, num_scores=1)


def classify(settings: Classify, evaluating: bool, token_ranks: TokenRanks, compute: torch.dtype) -> Objective:
    """Cross entropy over the labels of a text."""

    def terms(outputs: Outputs, batch: Batch) -> Terms:
        scores = sequence_scores(outputs, batch, token_ranks)  # (E, N): an example is one sequence
        labels = batch.columns[LABEL].long()
        losses = cross_entropy(scores, labels, reduction="none")
        shares = share_of_best(scores.detach(), score_tolerance(scores.detach(), rounding_of(compute)))
        correct = shares.gather(1, labels[:, None])[:, 0]
        return {
            "classify": Term(token_ranks.share(losses.sum()), "examples", 1.0),
            **_means({"accuracy": correct}, token_ranks),
        }

    return Objective(terms, num_scores=len(settings.score_labels), columns=(LABEL,))


def sequence_scores(outputs: Outputs, batch: Batch, token_ranks: TokenRanks) -> Tensor:  # (D, N)
    """Returns the scores of each sequence; of ranks that share its tokens, one has them."""
    scores = outputs.scores
    assert scores is not None  # a model of scores
    every = scores.new_zeros(len(batch.sequence_tokens), scores.shape[1])
    return token_ranks.sum(every.index_add(0, batch.ends.sequence, scores))


def _means(by_example: dict[str, Tensor], token_ranks: TokenRanks) -> Terms:
    return {name: Term(token_ranks.share(each.detach().sum()), "examples") for name, each in by_example.items()}
