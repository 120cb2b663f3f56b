"""Objectives on pairs of answers to one prompt: the chosen one first, then the rejected one.

Letters: D sequences, E pairs. L is the log-probability of an answer: the sum over its targets; r that of the policy
minus that of the reference. Over a bar, or `averages`: divided by the number of the answer's targets. c and d are the
rewards of the chosen and the rejected answer, beta times r, its average, or, without a reference, L's average.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from finetune.data.batch import Batch
from finetune.models.wrapped import Outputs
from finetune.objectives.objective import (
    Objective,
    Sums,
    Term,
    Terms,
    TokenRanks,
    sequence_log_probs,
    sequence_sums,
    sequence_targets,
)
from finetune.objectives.ranking import rounding_of, share_of_best
from finetune.recipe.objective_settings import Dpo, Orpo

REFERENCE = "reference_log_probs"  # column of a batch, (D,)


@dataclass(frozen=True)
class PairLoss:
    formula: Callable[[Tensor, Tensor, Dpo], Tensor]  # (c, d, settings) -> losses, (E,) each
    averages: bool = False
    reads_reference: bool = True


def sigmoid(chosen: Tensor, rejected: Tensor, settings: Dpo) -> Tensor:
    """-(1 - e) log s(c - d) - e log s(d - c), s the logistic function (DPO: Rafailov et al. 2023,
    https://arxiv.org/abs/2305.18290, equation 7). e = label_smoothing: the probability that a pair is the wrong way
    round (cDPO: Mitchell 2023, https://ericmitchell.ai/cdpo.pdf)."""
    margin, wrong = chosen - rejected, settings.label_smoothing
    return -(1 - wrong) * logsigmoid(margin) - wrong * logsigmoid(-margin)


def robust(chosen: Tensor, rejected: Tensor, settings: Dpo) -> Tensor:
    """(-(1 - e) log s(c - d) + e log s(d - c)) / (1 - 2e): without bias if a share e of the pairs is the wrong way
    round (Ray Chowdhury et al. 2024, https://arxiv.org/abs/2403.00409)."""
    margin, wrong = chosen - rejected, settings.label_smoothing
    return (-(1 - wrong) * logsigmoid(margin) + wrong * logsigmoid(-margin)) / (1 - 2 * wrong)


def hinge(chosen: Tensor, rejected: Tensor, settings: Dpo) -> Tensor:
    """max(0, 1 - (c - d)); at the kink the gradient is 0 (SLiC: Zhao et al. 2023, https://arxiv.org/abs/2305.10425,
    with the rewards of DPO as in RSO: Liu et al. 2023, https://arxiv.org/abs/2309.06657)."""
    return (1 - (chosen - rejected)).relu()


def ipo(chosen: Tensor, rejected: Tensor, settings: Dpo) -> Tensor:
    """((c - d) / beta - 1 / (2 beta))^2 of averages (Azar et al. 2023, https://arxiv.org/abs/2310.12036, equation 17,
    whose sums are averages in the authors' results, as TRL's dpo_trainer.py reports)."""
    beta = settings.beta
    return ((chosen - rejected) / beta - 1 / (2 * beta)) ** 2


def sigmoid_norm(chosen: Tensor, rejected: Tensor, settings: Dpo) -> Tensor:
    """-log s(c - d) of averages (Lambert et al. 2024, https://arxiv.org/abs/2411.15124). Its beta has
    another scale: 5 when DPO has 0.1."""
    return -logsigmoid(chosen - rejected)


def apo_zero(chosen: Tensor, rejected: Tensor, settings: Dpo) -> Tensor:
    """1 - s(c) + s(d): the chosen answers are better than the model's own (D'Oosterlinck et al. 2024,
    https://arxiv.org/abs/2408.06266, equation 7)."""
    return 1 - chosen.sigmoid() + rejected.sigmoid()


def apo_down(chosen: Tensor, rejected: Tensor, settings: Dpo) -> Tensor:
    """s(c) + 1 - s(c - d): the model's own answers are better than the chosen ones (as apo_zero, equation 8)."""
    return chosen.sigmoid() + 1 - (chosen - rejected).sigmoid()


def simpo(chosen: Tensor, rejected: Tensor, settings: Dpo) -> Tensor:
    """-log s(c - d - margin) of averages, without a reference (Meng et al. 2024, https://arxiv.org/abs/2405.14734;
    margin is its gamma)."""
    margin = 0.5 if settings.margin is None else settings.margin
    return -logsigmoid(chosen - rejected - margin)


LOSSES: dict[str, PairLoss] = {
    "sigmoid": PairLoss(sigmoid),
    "robust": PairLoss(robust),
    "hinge": PairLoss(hinge),
    "ipo": PairLoss(ipo, averages=True),
    "sigmoid_norm": PairLoss(sigmoid_norm, averages=True),
    "apo_zero": PairLoss(apo_zero),
    "apo_down": PairLoss(apo_down),
    "simpo": PairLoss(simpo, averages=True, reads_reference=False),
}


def dpo(settings: Dpo, evaluating: bool, token_ranks: TokenRanks, compute: torch.dtype) -> Objective:
    """A loss of the table; with `sft_weight` also the negative log-likelihood of the chosen answers, over their tokens
    (RPO: Pang et al. 2024, https://arxiv.org/abs/2404.19733, equation 2, which averages over each answer first)."""
    loss, beta = LOSSES[settings.loss], settings.beta

    def terms(outputs: Outputs, batch: Batch) -> Terms:
        log_probs = sequence_log_probs(outputs, batch, token_ranks)  # (D,)
        scores = log_probs - batch.columns[REFERENCE] if loss.reads_reference else log_probs
        errors = log_prob_errors(outputs, batch, token_ranks, compute)
        if loss.reads_reference:
            errors = math.sqrt(2) * errors  # the reference's are as large
        kl = {"kl": Term(scores.detach().sum(), "sequences")} if loss.reads_reference else {}
        if loss.averages:
            scores, errors = (each / sequence_targets(batch, token_ranks) for each in (scores, errors))
        chosen, rejected = pairs(beta * scores)
        own = {"preference": Term(loss.formula(chosen, rejected, settings).sum(), "examples", 1.0)}
        if settings.sft_weight:
            own["nll"] = chosen_nll(log_probs)._replace(weight=settings.sft_weight)
        return shared({**own, **pair_metrics(chosen, rejected, beta * errors, log_probs), **kl}, outputs, token_ranks)

    columns = (REFERENCE,) if loss.reads_reference else ()
    return Objective(terms, parts_and_metrics, differentiable=True, columns=columns)


def orpo(settings: Orpo, evaluating: bool, token_ranks: TokenRanks, compute: torch.dtype) -> Objective:
    """NLL of the chosen answers over their tokens - beta log s(log odds of the chosen - log odds of the rejected), odds
    = p / (1 - p), log p the average L (Hong et al. 2024, https://arxiv.org/abs/2403.07691)."""
    beta = settings.beta

    def terms(outputs: Outputs, batch: Batch) -> Terms:
        log_probs = sequence_log_probs(outputs, batch, token_ranks)  # (D,)
        lengths = sequence_targets(batch, token_ranks)
        averages, errors = log_probs / lengths, log_prob_errors(outputs, batch, token_ranks, compute) / lengths
        chosen, rejected = pairs(log_odds(averages))
        odds_ratio = {"odds_ratio": Term(-logsigmoid(chosen - rejected).sum(), "examples", beta)}
        metrics = pair_metrics(*pairs(beta * averages), beta * errors, log_probs)
        nll = chosen_nll(log_probs)._replace(weight=1.0)
        return shared({"nll": nll, **odds_ratio, **metrics}, outputs, token_ranks)

    return Objective(terms, parts_and_metrics, differentiable=True)


def log_odds(log_prob: Tensor) -> Tensor:
    """log(p / (1 - p)) of log p, exact even if p is near 0 or 1 (Maechler 2012,
    https://cran.r-project.org/web/packages/Rmpfr/vignettes/log1mexp-note.pdf).

    Below 1e-12, at which fp32 has no log-probabilities, -log p counts as 1e-12, without a gradient.
    """
    log_prob = log_prob.clamp(max=-1e-12)
    likely = log_prob > -math.log(2)
    near_one = (-log_prob.expm1()).log()
    near_zero = (-log_prob.clamp(max=-math.log(2)).exp()).log1p()  # clamped: the unused branch has a gradient, too
    return log_prob - torch.where(likely, near_one, near_zero)


def pairs(per_sequence: Tensor) -> tuple[Tensor, Tensor]:  # (D,) -> (E,), (E,)
    """Returns the values of the chosen and of the rejected answers."""
    chosen, rejected = per_sequence.view(-1, 2).unbind(1)
    return chosen, rejected


def chosen_nll(log_probs: Tensor) -> Term:
    return Term(-pairs(log_probs)[0].sum(), "first_target_tokens")


def log_prob_errors(outputs: Outputs, batch: Batch, token_ranks: TokenRanks, compute: torch.dtype) -> Tensor:  # (D,)
    """Returns the size of the rounding errors in `sequence_log_probs`: those of tokens add up as independent ones."""
    squares = outputs.token_losses.detach().double().square()
    return rounding_of(compute) * sequence_sums(squares, batch, token_ranks).sqrt()


def pair_metrics(chosen: Tensor, rejected: Tensor, errors: Tensor, log_probs: Tensor) -> Terms:
    """Returns metrics of rewards (E,), of which `errors` (D,) are of rounding, and of the answers' log-probabilities
    (D,)."""
    accuracy = share_of_best(torch.stack([chosen, rejected], 1).detach(), torch.hypot(*pairs(errors)))[:, 0]
    of_chosen, of_rejected = pairs(log_probs)
    means = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margin": chosen - rejected,
        "rewards/accuracy": accuracy,
        "log_probs/chosen": of_chosen,
        "log_probs/rejected": of_rejected,
    }
    return {name: Term(each.detach().sum(), "examples") for name, each in means.items()}


def shared(terms: Terms, outputs: Outputs, token_ranks: TokenRanks) -> Terms:
    """Returns this rank's part of terms that all ranks of a row have; those of the loss in the type of the outputs."""
    parts = {name: term._replace(total=token_ranks.share(term.total)) for name, term in terms.items()}
    dtype = outputs.token_losses.dtype
    return {
        name: part if part.weight is None else part._replace(total=part.total.to(dtype)) for name, part in parts.items()
    }


def parts_and_metrics(sums: Sums) -> dict[str, float]:
    """Returns the mean of every term, including the terms of the loss if there are several."""
    means = {name: sums.mean(name) for name, term in sums.terms.items() if term.unit}
    return means if "nll" in means else {name: mean for name, mean in means.items() if name != "preference"}
