"""The training loop: what happens to every batch of every step, readable top to bottom.

It knows nothing of how tensors lie on devices; the engine knows nothing of steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import torch

from finetune.data.batch import Batch
from finetune.data.loader import StepBatches
from finetune.engine.base import Engine
from finetune.engine.precision import NonFinite
from finetune.errors import RunFailure
from finetune.models.attention import AttentionChoice
from finetune.models.head import LossHead
from finetune.objectives import supervised_losses
from finetune.planning.plan import Plan
from finetune.recipe import Recipe
from finetune.tracking.clock import StepClock
from finetune.tracking.meters import Meters
from finetune.training.by_source import SourceSums
from finetune.training.feed import Feed
from finetune.training.routing import Routing, RoutingSums, routing_line
from finetune.training.schedules import lr_factor


@dataclass
class State:
    """Where a run stands: all that changes besides weights, optimizer and loss scale."""

    step: int = 0  # optimizer steps done
    tokens: int = 0  # global, without padding
    supervised_tokens: int = 0
    padding_tokens: int = 0  # computed besides, on as many processes as there were
    tokens_by_source: dict[str, int] = field(default_factory=dict)  # where there are several


@dataclass(frozen=True)
class StepMetrics:
    """One train line of metrics.jsonl."""

    step: int
    epoch: float
    loss: float  # nats per supervised token of the global batch; what is optimised, all terms of `objective` included
    grad_norm: float | None  # before clipping; None where fp16 skipped the step
    lr: float
    tokens: int
    supervised_tokens: int
    padding_tokens: int
    tokens_per_s: float
    step_s: float


@dataclass(frozen=True)
class Wishes:
    """What this rank would have happen at the end of a step; summed over the ranks, so that all do the same."""

    stop: float = 0.0  # it was sent a signal
    save: float = 0.0  # `checkpoint.every_minutes` have passed
    settle: float = 0.0  # a checkpoint that was being written has failed


@dataclass(frozen=True)
class Step:
    """A step that was made."""

    metrics: StepMetrics
    by_source: dict[str, float]  # `loss/<source>` of the step and `tokens/<source>` of the run, where there are several
    rows: list[str]  # path:row of what this rank trained on
    wishes: Wishes  # of all ranks
    measured: dict[str, float]  # by key of metrics.jsonl; see `tracking.meters`
    routing: dict[str, float] = field(default_factory=dict)  # by key as well; of a mixture of experts
    expert_load: torch.Tensor | None = None  # (layers, experts) int64, over all ranks


def training_steps(
    engine: Engine,
    feed: Feed[StepBatches],
    attention: AttentionChoice,
    head: LossHead,
    recipe: Recipe,
    plan: Plan,
    state: State,
    source_names: Sequence[str] = (),
    wishes: Callable[[], Wishes] = Wishes,
    meters: Meters | None = None,
    routing: Routing | None = None,
) -> Iterator[Step]:
    """Train from `state.step` to the plan's end; yields after every optimizer step, with `state` up to date.

    feed: of the batches of every step from `state.step` on.
    wishes: asked on every rank once a step; they travel with the loss, in the reduction that it needs anyway.
    Raises RunFailure before the optimizer step where loss or gradient is not finite, on all ranks alike.
    """
    if state.step < plan.steps:
        warm_up(engine, feed.peek().batches[0], attention, head)
    meters, routing = meters or Meters(engine), routing or Routing()
    clock = meters.clock
    clock.restart()
    while state.step < plan.steps:
        with clock.phase("data"):
            made = next(feed)
        batches, items, tokens = made.batches, made.counts["target_tokens"], made.counts["tokens"]
        factor = lr_factor(recipe.schedule, state.step, plan.steps)
        engine.set_lr(factor)
        sums = StepSums(engine, attention, head, recipe.run.seed, clock, state.step, made, source_names, routing)
        engine.accumulate(batches, sums.share, clock.phase)
        wished = astuple(wishes())
        nats, balance, *others = engine.total(sums.nats(), sums.routing.loss, *wished, *sums.sources.values())
        loss, balance = nats / items + routing.coefficient * balance / tokens, balance / tokens
        wished, of_sources = others[: len(wished)], others[len(wished) :]
        if not math.isfinite(loss):
            raise RunFailure(not_finite("loss", engine, state.step, sums.losses))
        meters.weigh_gradients()
        try:
            with clock.phase("optimizer"):
                grad_norm = engine.step()
        except NonFinite as error:
            raise RunFailure(not_finite("gradient", engine, state.step, sums.losses, error.stepped)) from None
        state.step += 1
        state.tokens += tokens
        state.supervised_tokens += items
        for name, count in sums.sources.tokens(of_sources).items():
            state.tokens_by_source[name] = state.tokens_by_source.get(name, 0) + count
        load = sums.routing.load(engine)
        measured = meters.step(batches, tokens, items)
        state.padding_tokens += made.padding
        metrics = StepMetrics(
            step=state.step,
            epoch=made.epoch,
            loss=loss,
            grad_norm=grad_norm,
            lr=recipe.optimizer.lr * factor,
            tokens=state.tokens,
            supervised_tokens=state.supervised_tokens,
            padding_tokens=state.padding_tokens,
            tokens_per_s=tokens / measured.seconds,
            step_s=measured.seconds,
        )
        by_source: dict[str, float] = {f"loss/{name}": value for name, value in sums.sources.losses(of_sources).items()}
        by_source |= {f"tokens/{name}": count for name, count in state.tokens_by_source.items()}
        about_experts = routing_line(balance, load)
        yield Step(metrics, by_source, row_ids(batches), Wishes(*wished), measured.line, about_experts, load)


class StepSums:
    """What the micro-batches of one step add up to on this rank."""

    def __init__(
        self,
        engine: Engine,
        attention: AttentionChoice,
        head: LossHead,
        seed: int,
        clock: StepClock,
        step: int,
        made: StepBatches,
        source_names: Sequence[str],
        routing: Routing,
    ):
        self._engine, self._attention, self._head, self._seed, self._clock = engine, attention, head, seed, clock
        self._step, self._items = step, made.counts["target_tokens"]
        self.losses: list[tuple[Batch, torch.Tensor]] = []  # (): nats of each micro-batch, fp64
        self.sources = SourceSums(source_names, engine.device)
        self.routing = RoutingSums(routing, made.counts["tokens"], engine.device)

    def share(self, model: Any, batch: Batch) -> torch.Tensor:  # ()
        """A micro-batch's share of the step's loss: its nats over the supervised tokens of the whole step, and its
        rows' part of the balance of experts."""
        seed_micro_batch(self._seed, self._step, batch.index)
        with self._clock.phase("forward"), self.routing.listening() as logits:
            arguments = self._attention.forward_arguments(batch.sequence_lengths)
            nats, of_tokens = supervised_losses(model, batch, arguments, self._engine.device, self._head)
            self.sources.add(batch, of_tokens)
            balance = self.routing.share(logits, batch)
        self.losses.append((batch, nats.detach().double()))
        if self._engine.steps_in_backward and not math.isfinite(*self._engine.total(self.losses[-1][1])):
            raise RunFailure(not_finite("loss", self._engine, self._step, self.losses))
        return nats / self._items + balance

    def nats(self) -> torch.Tensor:  # ()
        nothing = torch.zeros((), dtype=torch.float64, device=self._engine.device)
        return torch.stack([nothing, *(nats for _, nats in self.losses)]).sum()


def warm_up(engine: Engine, batch: Batch, attention: AttentionChoice, head: LossHead) -> None:
    """Forwards and backwards that leave no trace: weights, optimizer and random numbers of the steps are untouched."""
    for _ in range(engine.warm_ups):
        arguments = attention.forward_arguments(batch.sequence_lengths)
        with engine.micro_batch(last=True):
            engine.backward(supervised_losses(engine.model, batch, arguments, engine.device, head).total)
        engine.drop_gradients()


def seed_micro_batch(seed: int, step: int, index: int) -> None:
    """Dropout as a pure function of the global micro-batch, so that it does not depend on which process runs it."""
    torch.manual_seed((seed * 1_000_003 + step) * 1_000_003 + index & (2**63 - 1))


def row_ids(batches: list[Batch]) -> list[str]:
    return [f"{origin.path}:{origin.row}" for batch in batches for origin in batch.origins]


def not_finite(
    what: str, engine: Engine, step: int, losses: list[tuple[Batch, torch.Tensor]], stepped: bool = False
) -> str:
    """The message of a stop: step, and the rows of the micro-batches that did it, over all ranks. Collective."""
    batches = [batch for batch, _ in losses]
    guilty = [batch for batch, nats in losses if not torch.isfinite(nats)] or batches
    rows = row_ids(guilty)
    shares = engine.gather(rows if what == "gradient" or guilty is not batches else [])
    everyone = list(dict.fromkeys(row for share in shares for row in share))  # several ranks may have the same
    shown = ", ".join(everyone[:20]) + (f" and {len(everyone) - 20} more" if len(everyone) > 20 else "")
    become = "the weights in memory are spoiled, the last checkpoint is not" if stepped else "nothing was stepped"
    return (
        f"the {what} is not finite at step {step + 1}; {become}. Rows in question: {shown}. "
        "Look at these rows with `finetune inspect`, lower optimizer.lr, or use train.precision: bf16 instead of fp16"
    )
