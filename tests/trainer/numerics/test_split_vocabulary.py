"""Losses from logits whose columns are on several ranks, here threads: those of all columns, and their gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from finetune.data.predictions import IDS, LOG_PROBS
from finetune.models.head import TokenLoss
from finetune.models.head.chunked import HeadTask, matrix_losses, module_losses
from finetune.models.head.divergence import Divergence
from finetune.models.head.prediction import UNIFORM, Prediction
from finetune.models.head.token_loss import CooledTokenLoss, GuessLoss, LogitMap

VOCABULARY, TARGETS, HIDDEN = 23, 17, 6
BORDERS = (0, 9, 10, 23)  # of three ranks; one has a single column


@dataclass
class Exchange:
    """What the ranks send each other."""

    ranks: int
    barrier: threading.Barrier = field(init=False)
    sent: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier, self.sent = threading.Barrier(self.ranks), [None] * self.ranks

    def all(self, rank: int, values: Tensor) -> list[Tensor]:
        self.sent[rank] = values
        self.barrier.wait()
        everyone = [one.clone() for one in self.sent]
        self.barrier.wait()
        return everyone


@dataclass
class Part:
    exchange: Exchange
    rank: int
    first: int
    total: int = VOCABULARY

    def sum(self, values: Tensor) -> Tensor:
        return torch.stack(self.exchange.all(self.rank, values)).sum(0).to(values.dtype)

    def largest(self, values: Tensor) -> Tensor:
        return torch.stack(self.exchange.all(self.rank, values)).amax(0)

    def gather(self, values: Tensor) -> Tensor:
        return torch.cat(self.exchange.all(self.rank, values), 1)


def on_ranks(work: Callable[[Part, slice], Any]) -> list[Any]:
    ranks = len(BORDERS) - 1
    exchange = Exchange(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        runs = [
            pool.submit(work, Part(exchange, rank, BORDERS[rank]), slice(*BORDERS[rank : rank + 2]))
            for rank in range(ranks)
        ]
        return [run.result(timeout=60) for run in runs]


def teacher(sampled: bool) -> dict[str, Tensor]:
    log_p = torch.log_softmax(torch.randn(TARGETS, VOCABULARY, dtype=torch.float64), 1)
    ids = torch.multinomial(log_p.exp(), 5, replacement=sampled)
    return {IDS: ids, LOG_PROBS: log_p.gather(1, ids)}


LOSSES = {
    "plain": TokenLoss(),
    "smoothed with z-loss": TokenLoss(z_loss=0.01, label_smoothing=0.1),
    "cooled": CooledTokenLoss(0.7),
    "guesses": GuessLoss(),
    **{kind: Divergence(kind, 1.5, 0.3, 0.2) for kind in ("forward_kl", "reverse_kl", "jsd")},
    "without nll": Divergence(),
    "sampled": Divergence(sampled=True, nll_weight=0.5, temperature=2.0),
}


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_are_those_of_all_columns(name: str, differentiable: bool) -> None:
    """Of a trained matrix with a bias and a soft cap, and of a head of any kind, in several chunks."""
    torch.manual_seed(3)
    loss: Any = LOSSES[name]
    hidden, weight = (torch.randn(n, HIDDEN, dtype=torch.float64) for n in (TARGETS, VOCABULARY))
    bias, of_each = torch.randn(VOCABULARY, dtype=torch.float64), torch.rand(TARGETS, dtype=torch.float64)
    columns = teacher(loss.sampled) if isinstance(loss, Divergence) else {}
    ids = torch.randint(VOCABULARY, (TARGETS,))

    def computed(rows: slice, part: Any, by_module: bool = False) -> list[Tensor]:
        task = HeadTask(ids, loss, LogitMap(1.3, 5.0), 7, of_each, differentiable, columns, part)
        x, w, b = (t.clone().requires_grad_() for t in (hidden, weight[rows], bias[rows]))
        if by_module:
            losses = module_losses(x, lambda chunk: torch.nn.functional.linear(chunk, w, b), (w, b), task)
        else:
            losses = matrix_losses(x, w, b, task)
        (losses.each @ of_each if differentiable else losses.total).backward()
        return [losses.total.detach(), losses.each.detach(), *losses.details, x.grad, w.grad, b.grad]  # pyright: ignore

    total, *values, of_x, of_w, of_b = computed(slice(None), None)
    for by_module in (False, True):
        ranks = on_ranks(lambda part, rows, by_module=by_module: computed(rows, part, by_module))
        for rank in ranks:
            torch.testing.assert_close(rank[: 1 + len(values)], [total, *values], rtol=1e-12, atol=1e-12)
            assert torch.equal(rank[1], ranks[0][1])
        torch.testing.assert_close(sum(rank[-3] for rank in ranks), of_x, rtol=1e-11, atol=1e-12)
        for i, whole in ((-2, of_w), (-1, of_b)):
            torch.testing.assert_close(torch.cat([rank[i] for rank in ranks]), whole, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("vocabulary", [VOCABULARY, 21, 8])  # 8: two ranks have nothing but padding
def test_predictions_are_those_of_all_columns(vocabulary: int, drawn: bool) -> None:
    torch.manual_seed(4)
    logits = torch.randn(TARGETS, VOCABULARY, dtype=torch.float64)
    ids = torch.randint(vocabulary, (TARGETS,))
    columns = {UNIFORM: torch.rand(TARGETS, 6, dtype=torch.float64)} if drawn else {}
    if drawn:
        columns[UNIFORM][0, 0] = 1 - 2.0**-53
    prediction = Prediction(6, 0.8, vocabulary)
    each, (chosen, log_p) = prediction.losses(logits, ids, columns)

    def computed(part: Part, rows: slice) -> Any:
        return HeadTask(ids, prediction, LogitMap(), 7, columns=columns, part=part).losses(slice(None), logits[:, rows])

    for own, (ours, of_ours) in on_ranks(computed):
        assert torch.equal(ours, chosen)
        torch.testing.assert_close([own, of_ours], [each, log_p], rtol=1e-12, atol=1e-12)
