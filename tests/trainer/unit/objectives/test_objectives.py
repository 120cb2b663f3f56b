"""Every row of `OBJECTIVES` keeps the contract; sums with units give the step's loss however it is divided."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import own_losses
import pytest
import torch

from finetune.data.batch import Batch, collate
from finetune.data.samples import Example, Sequence
from finetune.models.wrapped import Outputs
from finetune.objectives import OBJECTIVES, make_objective
from finetune.objectives.objective import Objective, Sums, Term, TermSums, combined
from finetune.recipe.objective_settings import OBJECTIVE_SECTIONS, Focal, Orpo, Sft


def batch_of(*lengths: int, source: int = 0) -> Batch:
    sequences = [Sequence(np.arange(3, 3 + n, dtype=np.int32), np.arange(n) >= 2) for n in lengths]
    return collate([Example("a", row, source, (one,)) for row, one in enumerate(sequences)])


COLUMNS: dict[str, float | tuple[float, float]] = {  # of each pair
    "reference_log_probs": (-1.0, -2.0),
    "label": 1.0,
}


GIVEN = {"own": {"file": own_losses.__file__, "function": "mean_of_answers"}}  # keys without a default


def pairs_of(*lengths: tuple[int, int], columns: Iterable[str] = ()) -> Batch:
    pairs = [tuple(Sequence(np.arange(3, 3 + n, dtype=np.int32), np.arange(n) >= 2) for n in pair) for pair in lengths]
    values = {name: COLUMNS[name] for name in columns}
    return collate([Example("a", row, 0, pair, values) for row, pair in enumerate(pairs)])


def outputs_of(batch: Batch, seed: int = 0) -> Outputs:
    """As a forward gives them: losses between 0 and 3 nats."""
    generator = torch.Generator().manual_seed(seed)
    losses = torch.rand(len(batch.targets.ids), generator=generator, dtype=torch.float64).mul(3).requires_grad_()
    return Outputs(losses.sum(), losses, (losses.detach(), losses.detach()))  # details: for those who read them


def sums_of(objective: Objective, batches: list[Batch]) -> Sums:
    sums = TermSums()
    for seed, batch in enumerate(batches):
        sums.add(objective.terms(outputs_of(batch, seed), batch))
    counts = {unit: sum(batch.counts[unit] for batch in batches) for unit in batches[0].counts}
    return Sums(sums.totals, sums.terms, counts)


@pytest.mark.parametrize("evaluating", [False, True])
@pytest.mark.parametrize("name", [name for name in OBJECTIVES if not OBJECTIVE_SECTIONS[name]().scores_sequences])
def test_the_contract(name: str, evaluating: bool) -> None:
    """Loss terms have a graph and a unit that batches count; a rank without outputs has the same terms, all zero."""
    settings = OBJECTIVE_SECTIONS[name]().model_copy(update=GIVEN.get(name, {}))
    objective = make_objective(settings, ("a", "b"), evaluating)
    batch = pairs_of((5, 9), (4, 3), columns=objective.columns)
    if objective.statistics is not None:
        statistics = objective.statistics(outputs_of(batch), batch)
        assert all(term.total.shape == () and term.unit in batch.counts for term in statistics.values())
        assert objective.no_terms(batch, objective.statistics).keys() == statistics.keys()
        batch = batch.with_columns({name: term.total.detach() for name, term in statistics.items()})
    terms = objective.terms(outputs_of(batch), batch)
    weighted = [term for term in terms.values() if term.weight is not None]
    assert weighted
    assert all(term.total.shape == () and term.total.requires_grad and term.unit in batch.counts for term in weighted)
    nothing = objective.no_terms(batch)
    assert {key: term.total.shape for key, term in nothing.items()} == {k: t.total.shape for k, t in terms.items()}
    assert all(not term.total.any() for term in objective.no_terms(batch).values() if term.weight is not None)
    part = objective.loss(terms, batch.counts)
    torch.testing.assert_close(part.item(), sums_of(objective, [batch]).loss())
    assert name in OBJECTIVE_SECTIONS


def test_a_step_is_the_same_however_it_is_divided() -> None:
    """Micro-batches of 3, 7 and 11 targets: the mean over all 21, not the mean of three means."""
    batches = [batch_of(5), batch_of(9), batch_of(13)]
    objective = make_objective(Sft())
    losses = torch.cat([outputs_of(batch, seed).token_losses for seed, batch in enumerate(batches)])
    assert sums_of(objective, batches).loss() == pytest.approx(losses.mean().item(), rel=1e-12)


def test_focal_loss_is_its_formula() -> None:
    batch, outputs = batch_of(8), outputs_of(batch_of(8))
    objective = make_objective(Focal(gamma=1.5))
    loss = objective.loss(objective.terms(outputs, batch), batch.counts)
    p = torch.exp(-outputs.token_losses)
    torch.testing.assert_close(loss, ((1 - p) ** 1.5 * -torch.log(p)).mean())
    (ours,) = torch.autograd.grad(loss, outputs.token_losses)
    wanted = ((1 - p) ** 1.5 + 1.5 * outputs.token_losses * p * (1 - p) ** 0.5) / len(p)
    torch.testing.assert_close(ours, wanted.detach())
    assert sums_of(objective, [batch]).mean("nll") == pytest.approx(outputs.token_losses.mean().item())
    assert objective.metrics(sums_of(objective, [batch])).keys() == {"nll"}


@pytest.mark.parametrize("gamma", [0.0, 0.01, 0.5, 0.9, 1.0, 2.0])
def test_focal_loss_of_tokens_that_are_certain(gamma: float) -> None:
    """In fp32 a probability is rounded to 1 below a loss of 6e-8, and a loss to 0 or a little less."""
    losses = [0.0, -6e-8, 1e-30, 3e-8, 1e-7, 1e-4, 0.7, 9.0]
    objective = make_objective(Focal(gamma=gamma))

    def gradient(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        nll = torch.tensor(losses, dtype=dtype, requires_grad=True)
        (term,) = (t for t in objective.terms(Outputs(nll.sum(), nll), batch_of(len(losses))).values() if t.weight)
        return term.total, torch.autograd.grad(term.total, nll)[0]

    total, ours = gradient(torch.float32)
    nll = torch.tensor(losses, dtype=torch.float64).clamp(min=0)
    p, others = torch.exp(-nll), -torch.expm1(-nll)
    slope = gamma * nll * p * others ** (gamma - 1)  # of (1 - p)^gamma, times the loss: 0 at p = 1
    wanted = others**gamma + torch.where(nll > 0, slope, 0.0)
    torch.testing.assert_close(ours.double(), wanted, rtol=2e-6, atol=1e-12)
    torch.testing.assert_close(total.double(), (others**gamma * nll).sum(), rtol=1e-6, atol=1e-7)


def test_losses_by_source_are_means_over_their_own_tokens() -> None:
    batches = [batch_of(5, source=0), batch_of(9, source=1)]
    sums = sums_of(objective := make_objective(Sft(), ("first", "second")), batches)
    wanted = [outputs_of(batch, seed).token_losses.mean().item() for seed, batch in enumerate(batches)]
    assert objective.metrics(sums) == pytest.approx({"loss/first": wanted[0], "loss/second": wanted[1]})
    assert sums.totals["tokens_by_source"].tolist() == [5, 9]
    orpo = make_objective(Orpo(), ("first", "second"))
    of_pairs = sums_of(orpo, [pairs_of((5, 9))])
    assert of_pairs.totals["tokens_by_source"].tolist() == [14, 0]
    assert not any(name.startswith("loss/") for name in orpo.metrics(of_pairs))  # both answers' tokens are not its loss


def test_terms_of_several_units_are_divided_by_their_own_counts() -> None:
    def terms(outputs: Outputs, batch: Batch) -> dict[str, Term]:
        return {"b": Term(torch.tensor(6.0), "examples", 0.5), "seen": Term(torch.tensor(8.0), "tokens")}

    objective = combined(make_objective(Sft()), [Objective(terms)])
    sums = sums_of(objective, [batch_of(5, 9)])
    nll = sums.mean("nll")
    assert sums.loss() == pytest.approx(nll + 0.5 * 6.0 / 2)
    assert objective.metrics(sums) == {"seen": 8.0 / 14}
