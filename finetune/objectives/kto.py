"""Kahneman-Tversky optimization: single answers, each marked as desirable or not (Ethayarajh et al. 2024,
https://arxiv.org/abs/2402.01306).

    desirable     desirable_weight   * (1 - s(beta * (r - z)))       s the logistic function, r the log-probability of
    undesirable   undesirable_weight * (1 - s(beta * (z - r)))       the answer, policy minus reference

z = max(0, mean r of mismatched answers) estimates the KL divergence of the policy from the reference; no gradient. It
is a statistic of the whole step, so that the loss does not depend on how a step is divided: one more pass measures it.
Each example is a group of two sequences: its own, and its prompt with the answer of another example, for z only.
"""

from __future__ import annotations

from torch import Tensor

from finetune.data.batch import Batch
from finetune.models.wrapped import Outputs
from finetune.objectives.objective import Objective, Sums, Term, Terms, TokenRanks, sequence_log_probs
from finetune.objectives.preference import REFERENCE, pairs, shared
from finetune.recipe.objective_settings import Kto

LABEL = "label"  # column of a batch, (E,): 1 desirable, 0 not
MISMATCHED = "mismatched_log_ratio"  # statistic of a step


def kto(settings: Kto, evaluating: bool, token_ranks: TokenRanks) -> Objective:
    beta, weights = settings.beta, (settings.desirable_weight, settings.undesirable_weight)

    def statistics(outputs: Outputs, batch: Batch) -> Terms:
        log_ratios = sequence_log_probs(outputs, batch, token_ranks) - batch.columns[REFERENCE]
        _, mismatched = pairs(log_ratios)
        return shared({MISMATCHED: Term(mismatched.sum(), "examples")}, outputs, token_ranks)

    def terms(outputs: Outputs, batch: Batch) -> Terms:
        log_probs = sequence_log_probs(outputs, batch, token_ranks)  # (D,)
        own, mismatched = pairs(log_probs - batch.columns[REFERENCE])
        kl = batch.columns[MISMATCHED].clamp(min=0)  # ()
        desirable = batch.columns[LABEL]
        signs, weight = 2 * desirable - 1, weights[0] * desirable + weights[1] * (1 - desirable)
        losses = weight * (1 - (signs * beta * (own - kl)).sigmoid())  # (E,)
        of_labels = {
            name: Term((each.detach() * chosen).sum())
            for label, chosen in (("chosen", desirable), ("rejected", 1 - desirable))
            for name, each in (
                (f"rewards/{label}", beta * own),
                (f"log_probs/{label}", pairs(log_probs)[0]),
                (f"examples/{label}", chosen),
            )
        }
        loss = {"kto": Term(losses.sum(), "examples", 1.0), "kl": Term(mismatched.detach().sum(), "examples")}
        return shared({**loss, **of_labels}, outputs, token_ranks)

    return Objective(terms, _metrics, differentiable=True, columns=(REFERENCE, LABEL), statistics=statistics)


def _metrics(sums: Sums) -> dict[str, float]:
    """Returns means over the examples of a label, if there are any, and the KL divergence before it is cut at 0."""
    means = {"kl": sums.mean("kl")}
    for label in ("chosen", "rejected"):
        if count := _total(sums, f"examples/{label}"):
            means |= {f"{name}/{label}": _total(sums, f"{name}/{label}") / count for name in ("rewards", "log_probs")}
    if {"rewards/chosen", "rewards/rejected"} <= means.keys():
        means["rewards/margin"] = means["rewards/chosen"] - means["rewards/rejected"]
    return means


def _total(sums: Sums, name: str) -> float:
    total: Tensor = sums.totals[name]
    return total.item()
