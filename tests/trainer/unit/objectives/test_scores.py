"""Objectives on scores: their closed forms and gradients in fp64, sums that add up, ranks that share tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from finetune.data.batch import Batch, TokenShare, collate, dummy_batch, token_shard
from finetune.data.samples import Example, Sequence
from finetune.models.wrapped import Outputs
from finetune.objectives import make_objective
from finetune.objectives.objective import Objective, Sums, TermSums, TokenRanks
from finetune.recipe.schema import ObjectiveSettings as Settings

CHOSEN, REJECTED, MARGINS = (1.5, -0.25, 3.0), (0.5, 0.75, -2.0), (0.0, 0.5, 1.0)


def examples(groups: list[tuple[int, ...]], columns: Mapping[str, tuple[float, ...]]) -> list[Example]:
    """groups: lengths of each example's sequences; columns: one number of each example."""
    rows = [tuple(Sequence(np.arange(3, 3 + n, dtype=np.int32), np.arange(n) >= 2) for n in group) for group in groups]
    return [Example("a", i, 0, row, {k: values[i] for k, values in columns.items()}) for i, row in enumerate(rows)]


def pairs(margins: bool = True) -> list[Example]:
    return examples([(5, 9), (4, 3), (7, 4)], {"margin": MARGINS} if margins else {})


def scored(values: Any) -> Outputs:
    nothing = torch.zeros(0)
    return Outputs(nothing.sum(), nothing, scores=torch.as_tensor(values, dtype=torch.float64).requires_grad_())


def pair_scores() -> Outputs:
    return scored([[s] for pair in zip(CHOSEN, REJECTED, strict=True) for s in pair])


def result(objective: Objective, outputs: Outputs, batch: Batch) -> tuple[float, dict[str, float], torch.Tensor]:
    """Returns the loss, the metrics, and the gradient of the scores."""
    terms, sums = objective.terms(outputs, batch), TermSums()
    sums.add(terms)
    assert outputs.scores is not None
    (gradient,) = torch.autograd.grad(objective.loss(terms, batch.counts), outputs.scores)
    totals = Sums(sums.totals, sums.terms, batch.counts)
    return totals.loss(), objective.metrics(totals), gradient


@pytest.mark.parametrize("evaluating", [False, True])
@pytest.mark.parametrize(("centering", "margins"), [(0.0, True), (0.3, True), (0.3, False)])
def test_a_reward_is_its_formula(centering: float, margins: bool, evaluating: bool) -> None:
    objective = make_objective(Settings(name="reward", centering=centering), evaluating=evaluating)
    loss, metrics, gradient = result(objective, pair_scores(), collate(pairs(margins)))
    chosen, rejected = np.array(CHOSEN), np.array(REJECTED)
    differences = chosen - rejected - (np.array(MARGINS) if margins else 0)
    wanted = np.log1p(np.exp(-differences)) + centering * (chosen + rejected) ** 2
    assert loss == pytest.approx(wanted.mean(), rel=1e-12)
    of_chosen = -1 / (1 + np.exp(differences)) + 2 * centering * (chosen + rejected)
    of_rejected = 1 / (1 + np.exp(differences)) + 2 * centering * (chosen + rejected)
    by_hand = np.stack([of_chosen, of_rejected], 1).reshape(-1, 1) / 3
    np.testing.assert_allclose(gradient, by_hand, rtol=1e-12)
    assert metrics["rewards/chosen"] == pytest.approx(chosen.mean())
    assert metrics["rewards/rejected"] == pytest.approx(rejected.mean())
    assert metrics["rewards/margin"] == pytest.approx((chosen - rejected).mean())
    assert metrics["rewards/accuracy"] == pytest.approx(2 / 3)


def test_classification_is_cross_entropy_over_examples() -> None:
    logits, labels = np.array([[1.0, 2.0, 0.5], [0.0, -1.0, 3.0]]), np.array([1, 0])
    objective = make_objective(Settings(name="classify", labels=("a", "b", "c")))
    batch = collate(examples([(5,), (9,)], {"label": (1.0, 0.0)}))
    loss, metrics, gradient = result(objective, scored(logits), batch)
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert loss == pytest.approx(-np.log(p[[0, 1], labels]).mean(), rel=1e-12)
    np.testing.assert_allclose(gradient, (p - np.eye(3)[labels]) / 2, rtol=1e-12)
    assert metrics["accuracy"] == 0.5


def test_gradients_are_those_of_finite_differences() -> None:
    objective = make_objective(Settings(name="reward", centering=0.2))
    batch = collate(pairs())

    def loss(scores: torch.Tensor) -> torch.Tensor:
        return objective.loss(objective.terms(scored([])._replace(scores=scores), batch), batch.counts)

    assert torch.autograd.gradcheck(loss, (pair_scores().scores,))


def test_a_dummy_batch_adds_nothing_but_has_a_graph() -> None:
    batch = dummy_batch(pairs()[0], 0, None)
    outputs = scored(np.zeros((0, 1)))
    objective = make_objective(Settings(name="reward", centering=0.2))
    terms = objective.terms(outputs, batch)
    assert all(not term.total.any() for term in terms.values())
    assert objective.loss(terms, {"examples": 3.0}).requires_grad


@pytest.mark.parametrize("share", [(2, 1), (1, 2), (2, 2)])
def test_the_rank_with_the_last_token_gives_the_score(share: tuple[int, int]) -> None:
    """Every rank has the full loss of the row, of which it counts its share."""
    context, sequence = share
    count = context * sequence
    batch = collate(pairs(), padded_to=TokenShare(context, sequence).padded(32))
    values = torch.linspace(-1, 1, batch.inputs["input_ids"].shape[1], dtype=torch.float64)  # the score of each token
    shares = [TokenShare(context, sequence, c, s) for c in range(context) for s in range(sequence)]
    local = []
    for one in shares:
        shard = token_shard(batch, one)
        mine = values[torch.from_numpy(one.places(len(values)))]
        local.append((shard, mine[shard.ends.positions][:, None]))
    total = torch.zeros(6, 1, dtype=torch.float64)
    for shard, scores in local:
        total.index_add_(0, shard.ends.sequence, scores)
    torch.testing.assert_close(total[:, 0], values[batch.ends.positions])
    objective = make_objective(Settings(name="reward"), token_ranks=TokenRanks(count, lambda own: total + 0 * own))
    parts = [objective.loss(objective.terms(scored(scores), shard), batch.counts) for shard, scores in local]
    alone = make_objective(Settings(name="reward"))
    wanted = alone.loss(alone.terms(scored(values[batch.ends.positions][:, None]), batch), batch.counts)
    torch.testing.assert_close(sum(parts), wanted)
