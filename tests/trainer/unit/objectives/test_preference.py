"""Objectives on pairs: each loss against its formula in fp64, and on a model's own log-probabilities."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal, localcontext
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from finetune.data.batch import Batch, collate
from finetune.data.dataset import Dataset, build_training
from finetune.data.loader import Loader
from finetune.data.samples import Example, Sequence
from finetune.models.attention import attention_for
from finetune.models.base_model import Base
from finetune.models.config import model_config
from finetune.models.head.chunked import HeadTask, matrix_losses
from finetune.models.head.token_loss import LogitMap
from finetune.models.loss_model import CausalLMWithLoss
from finetune.models.weights import Placement, load_model
from finetune.models.wrapped import Outputs
from finetune.objectives import make_objective
from finetune.objectives.forward import ForwardPass
from finetune.objectives.kto import LABEL, MISMATCHED
from finetune.objectives.objective import ONE_RANK, Objective, Sums, TermSums, sequence_log_probs
from finetune.objectives.preference import LOSSES, REFERENCE, log_odds
from finetune.recipe import load_recipe
from finetune.recipe.objective_settings import LOSS_KEYS, OBJECTIVE_SECTIONS, Dpo, Kto, Orpo, PreferenceLoss


def test_a_pair_equals_its_reference_before_the_first_step(
    made: Path, tmp_path: Path, recipe: dict[str, Any], write_recipe: Any
) -> None:
    """ln 2, by columns that were added to the examples; and log-probabilities of each sequence alone."""
    rows = tiny.write_rows(tmp_path / "pairs.jsonl", tiny.preferences(12))
    recipe["data"] = {"train": [{"path": str(rows), "format": "preference"}], "max_length": 128}
    recipe["objective"] = {"name": "dpo"}
    loaded = load_recipe(write_recipe(recipe))
    config = model_config(loaded.model)
    attention = attention_for(loaded, config, "cpu")
    model = CausalLMWithLoss(
        load_model(loaded, Base.of(loaded, config), attention, Placement("load", torch.device("cpu")))
    )
    plain = AutoModelForCausalLM.from_pretrained(made / "llama")
    data = build_training(loaded, Base.of(loaded).renderer(loaded.objective))
    assert isinstance(data, Dataset)
    objective = make_objective(loaded.objective)
    forward, found = ForwardPass(attention, objective), []
    with torch.no_grad():
        for example in data.examples:
            for sequence in example.sequences:
                ids, mask = torch.tensor(sequence.input_ids)[None].long(), torch.tensor(sequence.loss_mask)[1:]
                every = plain(input_ids=ids).logits[0, :-1].log_softmax(-1).double()
                found.append(every.gather(1, ids[0, 1:, None])[mask].sum().item())
    with_reference = data.examples.with_columns({REFERENCE: np.array(found)})
    order = Dataset(with_reference, data.rows).in_order(loaded)
    micro_batches = Loader(order, 4, 2, 0, 1, 10**6).step(0).batches
    assert max(len(batch.sequence_lengths) for batch in micro_batches) > 4  # packed
    for batch in micro_batches:
        outputs = forward(model, batch)
        torch.testing.assert_close(
            sequence_log_probs(outputs, batch, ONE_RANK), batch.columns[REFERENCE], rtol=1e-6, atol=0
        )
        loss = objective.loss(objective.terms(outputs, batch), batch.counts)
        assert loss.item() == pytest.approx(math.log(2), abs=1e-6)


# --- formulas

BETA, SMOOTHING, MARGIN = 0.3, 0.2, 0.4


def s(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# Of a pair, by its sums of log-probabilities a (chosen) and b (rejected), those of the reference A and B, and the
# numbers of its targets n and m.
FORMULAS: dict[str, Callable[[float, float, float, float, int, int], float]] = {
    "sigmoid": lambda a, b, A, B, n, m: -math.log(s(BETA * (a - A - b + B))),
    "sigmoid smoothed": lambda a, b, A, B, n, m: (
        -(1 - SMOOTHING) * math.log(s(BETA * (a - A - b + B))) - SMOOTHING * math.log(s(-BETA * (a - A - b + B)))
    ),
    "robust": lambda a, b, A, B, n, m: -math.log(s(BETA * (a - A - b + B))),
    "robust smoothed": lambda a, b, A, B, n, m: (
        (-(1 - SMOOTHING) * math.log(s(BETA * (a - A - b + B))) + SMOOTHING * math.log(s(BETA * (b - B - a + A))))
        / (1 - 2 * SMOOTHING)
    ),
    "hinge": lambda a, b, A, B, n, m: max(0.0, 1 - BETA * (a - A - b + B)),
    "ipo": lambda a, b, A, B, n, m: ((a - A) / n - (b - B) / m - 1 / (2 * BETA)) ** 2,
    "sigmoid_norm": lambda a, b, A, B, n, m: -math.log(s(BETA * ((a - A) / n - (b - B) / m))),
    "apo_zero": lambda a, b, A, B, n, m: 1 - s(BETA * (a - A)) + s(BETA * (b - B)),
    "apo_down": lambda a, b, A, B, n, m: s(BETA * (a - A)) + 1 - s(BETA * (a - A - b + B)),
    "simpo": lambda a, b, A, B, n, m: -math.log(s(BETA * (a / n - b / m) - MARGIN)),
}
LENGTHS = ((7, 12), (9, 4), (5, 5))  # tokens of the answers of three pairs; all but the first two of each are targets
REFERENCES = ((-4.0, -9.5), (-11.0, -1.5), (-3.0, -6.0))


def settings_of(name: str, **others: Any) -> Dpo:
    loss, *smoothed = name.split()
    keys = {"label_smoothing": SMOOTHING} if smoothed else {"margin": MARGIN} if loss == "simpo" else {}
    return Dpo(loss=loss, beta=BETA, **keys, **others)  # pyright: ignore[reportArgumentType]


def batches() -> list[Batch]:
    """Two micro-batches, of one pair and of two."""
    pairs = [
        Example("rows", row, 0, tuple(map(sequence, lengths)), {REFERENCE: reference, LABEL: float(row != 1)})
        for row, (lengths, reference) in enumerate(zip(LENGTHS, REFERENCES, strict=True))
    ]
    return [collate(pairs[:1]), collate(pairs[1:], padded_to=40)]


def sequence(length: int) -> Sequence:
    return Sequence(np.arange(3, 3 + length, dtype=np.int32), np.arange(length) >= 2)


def token_losses() -> list[Tensor]:
    """Of the targets of `batches`."""
    generator = torch.Generator().manual_seed(1)
    numbers = [torch.rand(len(batch.targets.ids), generator=generator, dtype=torch.float64) * 2 for batch in batches()]
    return [each.requires_grad_() for each in numbers]


def log_probs(losses: list[Tensor]) -> list[tuple[float, float]]:
    """(chosen, rejected) of each pair."""
    targets = [length - 2 for pair in LENGTHS for length in pair]
    sums = [-part.sum().item() for part in torch.cat(losses).split(targets)]
    return list(zip(sums[::2], sums[1::2], strict=True))


def step_of(objective: Objective, losses: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    """Returns the loss of a step of two micro-batches, by the parts that each has a backward of; and its metrics."""
    made, sums, counts = batches(), TermSums(), Counter[str]()
    for batch in made:
        counts.update(batch.counts)
    parts = []
    for batch, each in zip(made, losses, strict=True):
        terms = objective.terms(Outputs(each.sum(), each), batch)
        sums.add(terms)
        parts.append(objective.loss(terms, counts))
    total = Sums(sums.totals, sums.terms, counts)
    torch.testing.assert_close(sum(part.item() for part in parts), total.loss())
    return torch.stack(parts).sum(), objective.metrics(total)


@pytest.mark.parametrize("name", FORMULAS)
def test_a_loss_is_its_formula(name: str) -> None:
    """In fp64, over the pairs of a step however it is divided; and by finite differences its gradient."""
    losses, objective = token_losses(), make_objective(settings_of(name))
    loss, _ = step_of(objective, losses)
    targets = [(n - 2, m - 2) for n, m in LENGTHS]
    each = [
        FORMULAS[name](*pair, *reference, *counts)
        for pair, reference, counts in zip(log_probs(losses), REFERENCES, targets, strict=True)
    ]
    assert loss.item() == pytest.approx(sum(each) / 3, rel=1e-12)
    assert torch.autograd.gradcheck(lambda *given: step_of(objective, list(given))[0], losses)


def test_the_table_of_formulas_is_complete() -> None:
    assert {name.split()[0] for name in FORMULAS} == LOSSES.keys() == set(get_args(PreferenceLoss))
    reading = {name for name, loss in LOSSES.items() if loss.reads_reference}
    assert reading == set(LOSS_KEYS["reference"])
    assert all((REFERENCE in make_objective(settings_of(name)).columns) == (name in reading) for name in LOSSES)


def test_metrics_are_means_over_the_pairs_of_the_step() -> None:
    losses = token_losses()
    _, found = step_of(make_objective(settings_of("sigmoid")), losses)
    pairs = list(zip(log_probs(losses), REFERENCES, strict=True))
    chosen, rejected = ([BETA * (pair[i] - reference[i]) for pair, reference in pairs] for i in (0, 1))
    wanted = {
        "rewards/chosen": sum(chosen) / 3,
        "rewards/rejected": sum(rejected) / 3,
        "rewards/margin": (sum(chosen) - sum(rejected)) / 3,
        "rewards/accuracy": sum(a > b for a, b in zip(chosen, rejected, strict=True)) / 3,
        "log_probs/chosen": sum(pair[0] for pair, _ in pairs) / 3,
        "log_probs/rejected": sum(pair[1] for pair, _ in pairs) / 3,
        "kl": (sum(chosen) + sum(rejected)) / BETA / 6,
    }
    assert found == pytest.approx(wanted, rel=1e-12)
    assert 0 < found["rewards/accuracy"] < 1
    with_sft, plain = (set(step_of(make_objective(settings_of("simpo", **key)), losses)[1]) for key in (SFT, {}))
    assert plain == wanted.keys() - {"kl"}
    assert with_sft == plain | {"preference", "nll"}


SFT = {"sft_weight": 0.7}


def test_the_sft_term_is_over_the_chosen_tokens_of_the_step() -> None:
    """Not the mean of the pairs' means, and nothing of the rejected."""
    losses = token_losses()
    with_sft, metrics = step_of(make_objective(settings_of("sigmoid", **SFT)), losses)
    alone, _ = step_of(make_objective(settings_of("sigmoid")), losses)
    nll = -sum(chosen for chosen, _ in log_probs(losses)) / sum(n - 2 for n, _ in LENGTHS)
    assert (with_sft - alone).item() == pytest.approx(0.7 * nll, rel=1e-12)
    assert metrics["nll"] == pytest.approx(nll)
    assert metrics["preference"] == pytest.approx(alone.item())


def test_orpo_is_its_formula() -> None:
    losses, objective = token_losses(), make_objective(Orpo(beta=BETA))
    loss, metrics = step_of(objective, losses)
    ratios = []
    for (a, b), (n, m) in zip(log_probs(losses), LENGTHS, strict=True):
        p, q = math.exp(a / (n - 2)), math.exp(b / (m - 2))
        ratios.append(-math.log(s(math.log(p / (1 - p)) - math.log(q / (1 - q)))))
    nll = -sum(chosen for chosen, _ in log_probs(losses)) / sum(n - 2 for n, _ in LENGTHS)
    assert loss.item() == pytest.approx(nll + BETA * sum(ratios) / 3, rel=1e-12)
    assert (metrics["nll"], metrics["odds_ratio"]) == pytest.approx((nll, sum(ratios) / 3))
    assert torch.autograd.gradcheck(lambda *given: step_of(objective, list(given))[0], losses)


def test_log_odds_near_certainty() -> None:
    """Of p near 1, where 1 - p is lost in rounding, and near 0; finite with a gradient of 0 at p = 1."""
    given = torch.tensor([-1e-11, -1e-5, -0.69, -0.70, -30.0, -800.0], dtype=torch.float64, requires_grad=True)
    wanted = [exact_log_odds(x) for x in given.tolist()]
    odds = log_odds(given)
    torch.testing.assert_close(odds.detach(), torch.tensor(wanted, dtype=torch.float64), rtol=1e-14, atol=0)
    (slopes,) = torch.autograd.grad(odds.sum(), given)
    torch.testing.assert_close(slopes, 1 / -torch.expm1(given.detach()), rtol=1e-12, atol=0)
    certain = torch.zeros(1, requires_grad=True)
    assert torch.isfinite(log_odds(certain))
    assert torch.autograd.grad(log_odds(certain).sum(), certain)[0].item() == 0


def exact_log_odds(log_prob: float) -> float:
    with localcontext() as context:
        context.prec = 400
        p = Decimal(log_prob).exp()
        return float((p / (1 - p)).ln())


# --- KTO


def test_kto_is_its_formula() -> None:
    """z is the mean over the step of the mismatched answers, cut at 0 and without a gradient; labels 1, 0, 1."""
    losses = token_losses()
    objective = make_objective(Kto(beta=BETA, desirable_weight=1.5, undesirable_weight=0.5))
    ratios = [(a - A, b - B) for (a, b), (A, B) in zip(log_probs(losses), REFERENCES, strict=True)]
    mean = sum(other for _, other in ratios) / 3
    for shift in (-3 - mean, 2 - mean, 0.0):  # below 0, above, and as it is
        z = max(0.0, mean + shift)
        loss, metrics = kto_step(objective, losses, shift)
        each = [1.5 * (1 - s(BETA * (ratios[i][0] - z))) for i in (0, 2)] + [0.5 * (1 - s(BETA * (z - ratios[1][0])))]
        assert loss.item() == pytest.approx(sum(each) / 3, rel=1e-12)
        gradients = torch.autograd.grad(loss, losses)
        of_mismatched = [
            grad[5:15] if first else grad[7:9] for first, grad in zip((True, False), gradients, strict=True)
        ]
        assert not any(part.any() for part in of_mismatched)
    assert metrics == pytest.approx(
        {
            "kl": mean,
            "rewards/chosen": BETA * (ratios[0][0] + ratios[2][0]) / 2,
            "rewards/rejected": BETA * ratios[1][0],
            "rewards/margin": BETA * ((ratios[0][0] + ratios[2][0]) / 2 - ratios[1][0]),
            "log_probs/chosen": (log_probs(losses)[0][0] + log_probs(losses)[2][0]) / 2,
            "log_probs/rejected": log_probs(losses)[1][0],
        }
    )


def kto_step(objective: Objective, losses: list[Tensor], shift: float) -> tuple[Tensor, dict[str, float]]:
    """shift: added to the statistic of the step."""
    assert objective.statistics is not None
    first = TermSums()
    for batch, each in zip(batches(), losses, strict=True):
        first.add(objective.statistics(Outputs(each.sum(), each), batch))
    mean = Sums(first.totals, first.terms, {"examples": 3}).mean(MISMATCHED) + shift
    column = {MISMATCHED: torch.tensor(mean, dtype=torch.float64)}
    return step_of(replace(objective, terms=lambda o, b: objective.terms(o, b.with_columns(column))), losses)


# --- through the head


@pytest.mark.parametrize(
    ("name", "trained"),
    [
        pytest.param(name, trained, marks=() if trained or name in ("sft", "kto") else pytest.mark.long)
        for name in (*FORMULAS, "orpo", "kto", "sft", "focal")
        for trained in (True, False)
    ],
)
def test_gradcheck_through_the_chunked_head(name: str, trained: bool) -> None:
    """Of hidden states, and of the head's weight where it is trained: its logits are then computed again in the
    backward. Chunks of 4 targets, so that most sequences are in several. (Distillation: test_divergence.py; scores,
    which have another head: test_scores.py.)"""
    beta = {"beta": BETA} if name in ("orpo", "kto") else {}
    settings = settings_of(name, sft_weight=0.5) if name in FORMULAS else OBJECTIVE_SECTIONS[name](**beta)  # pyright: ignore
    objective, made = make_objective(settings), batches()
    if name == "kto":
        made = [batch.with_columns({MISMATCHED: torch.tensor(0.3, dtype=torch.float64)}) for batch in made]
    generator = torch.Generator().manual_seed(2)
    hidden = [torch.randn(len(batch.targets.ids), 4, generator=generator, dtype=torch.float64) for batch in made]
    weight = torch.randn(15, 4, generator=generator, dtype=torch.float64)
    counts = {unit: sum(batch.counts[unit] for batch in made) for unit in made[0].counts}

    def loss(first: Tensor, second: Tensor, head: Tensor) -> Tensor:
        parts = []
        for batch, of_targets in zip(made, (first, second), strict=True):
            task = HeadTask(batch.targets.ids, objective.token_loss, LogitMap(), 4, differentiable=True)
            outputs = Outputs(*matrix_losses(of_targets, head, None, task)[:2])
            parts.append(objective.loss(objective.terms(outputs, batch), counts))
        return torch.stack(parts).sum()

    given = [each.requires_grad_() for each in hidden]
    assert torch.autograd.gradcheck(loss, (*given, weight.requires_grad_(trained)))
