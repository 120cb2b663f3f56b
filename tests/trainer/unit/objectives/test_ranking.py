"""Metrics that compare scores: equal ones share the point, and rounding moves none of them."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import torch

from finetune.data.batch import Batch, collate
from finetune.data.samples import Example, Sequence
from finetune.models.wrapped import Outputs
from finetune.objectives import make_objective
from finetune.objectives.objective import Sums, TermSums
from finetune.objectives.preference import REFERENCE
from finetune.objectives.ranking import rounding_of, share_of_best
from finetune.recipe.schema import ObjectiveSettings as Settings
from finetune.recipe.schema import PreferenceLoss, is_better

PAIRS, TARGETS = 64, 20
# A sum of token losses in another order, or of kernels of another shape: errors of one token's loss.
NOISE = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 0.01}


def same_answers(reference: np.ndarray[Any, Any]) -> Batch:
    """Returns pairs of two answers of one length. reference: (PAIRS, 2) their log-probabilities under it."""
    answer = Sequence(np.arange(3, 4 + TARGETS, dtype=np.int32), np.arange(1 + TARGETS) >= 1)
    columns = [{REFERENCE: tuple(row), "label": 0.0} for row in reference.tolist()]
    return collate([Example("a", i, 0, (answer, answer), each) for i, each in enumerate(columns)])


def metrics_of(settings: Settings, outputs: Outputs, batch: Batch, compute: torch.dtype) -> dict[str, float]:
    objective, sums = make_objective(settings, compute=compute), TermSums()
    sums.add(objective.terms(outputs, batch))
    return objective.metrics(Sums(sums.totals, sums.terms, batch.counts))


def objectives() -> list[dict[str, Any]]:
    of_loss: dict[str, dict[str, Any]] = {"simpo": {"beta": 2, "margin": 0.5}}
    return [{"name": "dpo", "loss": loss, **of_loss.get(loss, {})} for loss in get_args(PreferenceLoss)] + [
        {"name": "orpo"}
    ]


@pytest.mark.parametrize("compute", NOISE)
@pytest.mark.parametrize("keys", objectives(), ids=lambda keys: keys.get("loss", keys["name"]))
def test_answers_that_only_rounding_tells_apart_are_ties(keys: dict[str, Any], compute: torch.dtype) -> None:
    """As while policy and reference are the same: one half, exactly, whatever the noise."""
    generator = torch.Generator().manual_seed(3)
    exact = torch.rand(PAIRS, 1, TARGETS, generator=generator, dtype=torch.float64).expand(-1, 2, -1) * 3
    noise = NOISE[compute] * torch.randn(PAIRS, 2, TARGETS, generator=generator, dtype=torch.float64)
    losses = (exact + noise).reshape(-1)
    found = metrics_of(Settings(**keys), Outputs(losses.sum(), losses), same_answers(-exact.sum(2).numpy()), compute)
    assert found["rewards/accuracy"] == 0.5
    assert found["rewards/margin"] != 0
    better = exact * torch.tensor([0.7, 1.0], dtype=torch.float64)[:, None]  # by much more than noise
    losses = (better + noise).reshape(-1)
    found = metrics_of(Settings(**keys), Outputs(losses.sum(), losses), same_answers(-exact.sum(2).numpy()), compute)
    assert found["rewards/accuracy"] == 1


@pytest.mark.parametrize("compute", NOISE)
@pytest.mark.parametrize("labels", [None, ("a", "b"), ("a", "b", "c", "d")])
def test_scores_that_only_rounding_tells_apart_are_ties(labels: tuple[str, ...] | None, compute: torch.dtype) -> None:
    count, generator = len(labels or (0,)), torch.Generator().manual_seed(3)
    values = torch.full((2 * PAIRS, count), 0.3, dtype=torch.float64)
    values += NOISE[compute] / 3 * torch.rand(values.shape, generator=generator, dtype=torch.float64)
    settings = Settings(name="classify", labels=labels) if labels else Settings(name="reward")
    answer = Sequence(np.arange(3, 9, dtype=np.int32), np.arange(6) >= 1)
    each = (answer,) if labels else (answer, answer)
    batch = collate([Example("a", i, 0, each, {"label": 0.0}) for i in range(2 * PAIRS // len(each))])
    nothing = torch.zeros(0)
    found = metrics_of(settings, Outputs(nothing.sum(), nothing, scores=values), batch, compute)
    assert found["accuracy" if labels else "rewards/accuracy"] == pytest.approx(1 / max(count, 2), rel=1e-12)


def test_no_share_turns_on_rounding() -> None:
    """Nor at the end of the tolerance: a small change of a score is a small change of its share."""
    tolerance = rounding_of(torch.float32)
    behind = torch.linspace(-3, 3, 6001, dtype=torch.float64) * tolerance
    scores = torch.stack([torch.zeros_like(behind), behind], 1)
    shares = share_of_best(scores, torch.full_like(behind, tolerance))
    assert torch.equal(shares.sum(1), torch.ones_like(behind))
    assert (shares[:, 1].diff() >= 0).all()
    assert shares[:, 1].diff().max() < 1.5e-3
    assert (shares[0].tolist(), shares[3000].tolist(), shares[-1].tolist()) == ([1, 0], [0.5, 0.5], [0, 1])


@pytest.mark.parametrize(
    ("metric", "value", "best", "better"),
    [
        ("eval_loss", 2.0, 2.0 + 1e-6, False),
        ("eval_loss", 2.0, 2.0 + 1e-4, True),
        ("eval_loss", 2.0 + 1e-4, 2.0, False),
        ("eval_rewards/accuracy", 0.5 + 1e-9, 0.5, False),
        ("eval_rewards/accuracy", 0.5 + 1 / 4096, 0.5, True),
        ("eval_rewards/margin", 1e-8, -1e-8, False),
        ("eval_log_probs/chosen", -300.0, -300.001, False),
        ("eval_log_probs/chosen", -300.0, -300.01, True),
        ("exact_match", 0.5, 0.5, False),
        ("eval_loss", float("nan"), 2.0, False),
    ],
)
def test_an_improvement_is_more_than_rounding(metric: str, value: float, best: float, better: bool) -> None:
    assert is_better(metric, value, best) is better
