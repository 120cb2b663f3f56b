"""Losses of `grpo` off-policy, with a KL term and with corrections, on made-up log-probabilities in fp64: value and
gradient of formulas that are written here sample by sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from finetune.data.batch import Batch, collate
from finetune.data.samples import Example, Sequence
from finetune.models.wrapped import Outputs
from finetune.objectives.objective import KEPT, KEPT_TOKENS, ONE_RANK, TermSums
from finetune.recipe.schema import ObjectiveSettings, Rollouts
from finetune.rl.policy import (
    ADVANTAGE,
    CORRECTION,
    INITIAL,
    LOSSES,
    OLD,
    ROOM,
    SAMPLED,
    SAMPLER,
    grpo,
)
from finetune.rl.rollouts.correction import correction_weights

LENGTHS, MOST = (3, 1, 5, 2), 6
ADVANTAGES = (1.5, -0.5, -2.0, 0.7)
random = np.random.Generator(np.random.PCG64(3))
NEW, PAST, FIRST, DRAWN = (
    [np.clip(random.normal(-2, spread, n), None, -0.01) for n in LENGTHS] for spread in (0.5, 0.5, 0.5, 0.5)
)


def micro_batches(*names: str) -> list[Batch]:
    """Returns the samples in two micro-batches, with target columns of these names."""
    columns = {OLD: PAST, INITIAL: FIRST, SAMPLER: DRAWN, CORRECTION: [np.full(n, 0.5) for n in LENGTHS]}
    examples = [
        Example(
            *("rows.jsonl", i + 1, 0),
            (Sequence(np.arange(2 + n, dtype=np.int32), np.arange(2 + n) >= 2),),
            {ADVANTAGE: ADVANTAGES[i], SAMPLED: float(n)},
            {name: columns[name][i] for name in (SAMPLER, *names)},
        )
        for i, n in enumerate(LENGTHS)
    ]
    return [collate(examples[:1]), collate(examples[1:], 1)]


def computed(
    settings: ObjectiveSettings, rollouts: dict[str, Any], *names: str, kept: tuple[bool, ...] | None = None
) -> tuple[float, Tensor, TermSums]:
    """Returns (loss, its gradient by all log-probabilities, the terms) of the step."""
    objective = grpo(settings, False, ONE_RANK, Rollouts(prompts=2, samples=2, max_new_tokens=MOST, **rollouts))
    batches, sums, loss = micro_batches(*names), TermSums(), torch.zeros((), dtype=torch.float64)
    batches = masked(batches, kept) if kept else batches
    counts = {"sequences": 4, "target_tokens": sum(LENGTHS), ROOM: 4 * MOST}
    log_probs = torch.tensor(np.concatenate(NEW), requires_grad=True)
    assert objective.token_weights is not None
    for batch, of_batch in zip(batches, log_probs.split([LENGTHS[0], sum(LENGTHS[1:])]), strict=True):
        total = (-of_batch * objective.token_weights(batch).double()).sum()
        outputs = Outputs(total, -of_batch, (torch.zeros(len(of_batch)),))
        terms = objective.terms(outputs, batch)
        sums.add(terms)
        loss = loss + objective.loss(terms, counts)
    loss.backward()
    assert log_probs.grad is not None
    return loss.item(), log_probs.grad, sums


def masked(batches: list[Batch], kept: tuple[bool, ...]) -> list[Batch]:
    """Returns the micro-batches as rows that mask some samples have them."""
    flags = torch.tensor([float(keeps) for keeps in kept], dtype=torch.float64).split([1, 3])
    return [
        batch.with_columns({ADVANTAGE: batch.columns[ADVANTAGE] * keeps, KEPT: keeps})
        for batch, keeps in zip(batches, flags, strict=True)
    ]


def reduced(of_samples: list[Tensor], loss: str) -> Tensor:
    """Returns the mean of token losses as the paper of a loss has it."""
    if loss in ("grpo", "gspo"):
        return torch.stack([tokens.mean() for tokens in of_samples]).mean()
    if loss == "rloo":
        return torch.stack([tokens.sum() for tokens in of_samples]).mean()
    return torch.cat(of_samples).sum() / (len(LENGTHS) * MOST if loss == "dr_grpo" else sum(LENGTHS))


def expected(loss: str, clip: tuple[float, float], kl: float = 0.0, factor: float = 1.0) -> tuple[float, Tensor]:
    """Returns (loss, its gradient by all log-probabilities) of the formulas."""
    log_probs = torch.tensor(np.concatenate(NEW), requires_grad=True)
    losses = []
    for i, new in enumerate(log_probs.split(list(LENGTHS))):
        old, first, advantage = torch.tensor(PAST[i]), torch.tensor(FIRST[i]), ADVANTAGES[i]
        ratio = (new - old).mean().exp().expand(len(new)) if loss == "gspo" else (new - old).exp()
        bounded = ratio.clamp(1 - clip[0], 1 + clip[1])
        if loss == "cispo":
            of_tokens = -bounded.detach() * advantage * new
        else:
            of_tokens = -torch.minimum(ratio * advantage, bounded * advantage)
        losses.append(of_tokens * factor + kl * ((first - new).exp() - (first - new) - 1) * ratio)
    value = reduced(losses, loss)
    value.backward()
    assert log_probs.grad is not None
    return value.item(), log_probs.grad


@pytest.mark.parametrize("kl", [0.0, 0.3])
@pytest.mark.parametrize("loss", LOSSES)
def test_an_off_policy_loss_is_its_formula(loss: str, kl: float) -> None:
    clip = (0.1, 0.3)
    settings = ObjectiveSettings(name="grpo", loss=loss, clip=clip, kl=kl)  # pyright: ignore[reportArgumentType]
    value, gradient, sums = computed(settings, {"reuse": 2}, OLD, *([INITIAL] if kl else []))
    formula, of_formula = expected(loss, clip, kl)
    assert value == pytest.approx(formula, rel=1e-12)
    torch.testing.assert_close(gradient, of_formula, rtol=1e-11, atol=1e-15)
    assert sums.totals["clip_low"] + sums.totals["clip_high"] > 0
    largest = max(
        np.exp((new - past).mean() if loss == "gspo" else (new - past).max())
        for new, past in zip(NEW, PAST, strict=True)
    )
    assert sums.totals["ratio_max"].item() == pytest.approx(largest, rel=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_clip_of_a_loss_is_that_of_its_paper(loss: str) -> None:
    usual = {"dapo": (0.2, 0.28), "cispo": (1.0, 4.0), "gspo": (3e-4, 4e-4)}.get(loss, (0.2, 0.2))
    settings = ObjectiveSettings(name="grpo", loss=loss)  # pyright: ignore[reportArgumentType]
    value, _, _ = computed(settings, {"staleness": 1}, OLD)
    assert value == pytest.approx(expected(loss, usual)[0], rel=1e-12)


@pytest.mark.parametrize("kl", [0.0, 0.3])
@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp"])
def test_at_ratio_1_the_clipped_gradient_is_the_linear_one(
    loss: str, kl: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.PAST", NEW)
    settings = ObjectiveSettings(name="grpo", loss=loss, kl=kl)  # pyright: ignore[reportArgumentType]
    of_kl = [INITIAL] if kl else []
    linear, clipped = computed(settings, {}, *of_kl), computed(settings, {"reuse": 2}, OLD, *of_kl)
    torch.testing.assert_close(linear[1], clipped[1], rtol=1e-6, atol=1e-9)  # weights of the linear form are fp32


def test_with_kl_the_gradient_is_that_of_the_divergence() -> None:
    """On-policy, at a sampled token: its score times log(p / p_initial) (https://arxiv.org/abs/2512.02556)."""
    without, with_kl = (ObjectiveSettings(name="grpo", loss="dapo", kl=kl) for kl in (0.0, 0.3))
    gradient = computed(with_kl, {}, INITIAL)[1] - computed(without, {})[1]
    expected = 0.3 * torch.tensor(np.concatenate(NEW) - np.concatenate(FIRST)) / sum(LENGTHS)
    torch.testing.assert_close(gradient, expected, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize(("loss", "rollouts"), [("dapo", {}), ("gspo", {"reuse": 2}), ("cispo", {"staleness": 1})])
def test_corrections_are_factors_of_token_losses(loss: str, rollouts: dict[str, Any]) -> None:
    settings = ObjectiveSettings(name="grpo", loss=loss, correction="tis")  # pyright: ignore[reportArgumentType]
    plain, halved = computed(settings, rollouts, OLD), computed(settings, rollouts, OLD, CORRECTION)
    torch.testing.assert_close(halved[1], plain[1] / 2, rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize("correction", [False, True])
@pytest.mark.parametrize("kl", [0.0, 0.3])
@pytest.mark.parametrize("rollouts", [{}, {"reuse": 2}, {"staleness": 1}], ids=["on-policy", "reuse", "staleness"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_masked_sample_has_no_gradient_and_no_part_in_a_metric(
    loss: str, rollouts: dict[str, Any], kl: float, correction: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = (True, False, False, True)
    names = (OLD, *([CORRECTION] if correction else []), *([INITIAL] if kl else []))
    changes: dict[str, Any] = {"loss": loss, "kl": kl, "correction": "tis" if correction else None}
    whole = computed(ObjectiveSettings(name="grpo", **changes), rollouts, *names)
    settings = ObjectiveSettings(name="grpo", overlong="mask", **changes)
    value, gradient, sums = computed(settings, rollouts, *names, kept=kept)
    of_targets = torch.tensor(np.repeat(kept, LENGTHS))
    # The divisor is that of all samples: the others' gradients stay as they are.
    assert torch.equal(gradient, whole[1] * of_targets)
    assert (gradient[~of_targets] == 0).all()
    shown = {name for name, term in sums.terms.items() if term.weight is None and term.unit}
    assert {sums.terms[name].unit for name in shown} == {KEPT_TOKENS}
    for name, away in (("PAST", -2000), ("FIRST", 2000), ("DRAWN", 5)):  # of masked samples; exponentials overflow
        values = zip(globals()[name], kept, strict=True)
        monkeypatch.setitem(globals(), name, [each if keeps else each + away for each, keeps in values])
    again = computed(settings, rollouts, *names, kept=kept)
    assert again[0] == value
    assert torch.equal(again[1], gradient)
    assert {name: again[2].totals[name].item() for name in shown} == {name: sums.totals[name].item() for name in shown}


def test_corrections_are_their_formulas() -> None:
    trainer, sampler = np.log([0.5, 0.2, 0.9]), np.log([0.1, 0.5, 0.9])  # ratios 5, 0.4, 1: together 2
    objective = ObjectiveSettings(name="grpo", correction="tis")
    assert correction_weights(trainer, sampler, objective) == pytest.approx([2, 0.4, 1])
    bounded = objective.model_copy(update={"correction_bounds": (0.5, 3.0)})
    assert correction_weights(trainer, sampler, bounded) == pytest.approx([3, 0.5, 1])
    icepop = bounded.model_copy(update={"correction": "icepop"})
    assert correction_weights(trainer, sampler, icepop) == pytest.approx([0, 0, 1])
    whole = objective.model_copy(update={"correction": "sequence_mask"})
    assert correction_weights(trainer, sampler, whole) == pytest.approx([2, 2, 2])
    assert correction_weights(trainer + 0.2, sampler, whole) == pytest.approx([0, 0, 0])
    assert correction_weights(trainer + 1e3, sampler, icepop) == pytest.approx([0, 0, 0])  # beyond fp64
