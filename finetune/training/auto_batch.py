"""`batch.rows_per_device: auto`: the most rows in one forward that memory holds, found by trial and kept; the same on
every rank.

The maths does not depend on the result: it only decides in how many forwards the rows of a step are computed.

A trial that runs out of memory ends a run whose ranks wait for each other in the middle of a forward. So sizes grow at
most twofold, and only where what was measured says that the next one fits: memory grows along a straight line in the
rows of a forward, or in their square where attention goes through a mask or scores of tokens x tokens.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import PretrainedConfig

from finetune.data.batch import UNSHARDED, Batch, TokenShare, collate, token_shard
from finetune.data.dataset import Dataset, Stream
from finetune.data.samples import Example
from finetune.data.samples import Sequence as TokenSequence
from finetune.data.sources.files import cache_root
from finetune.engine.base import Engine
from finetune.errors import RunFailure, UserError
from finetune.objectives.base import UNSCALED
from finetune.objectives.forward import ForwardPass
from finetune.planning.plan import versions
from finetune.recipe import Recipe
from finetune.training.process_memory import Memory
from finetune.utils import divisors, write_atomically

HALF = 0.5  # a row of half the tokens: with one whole row, the first two points of the line


@dataclass(frozen=True)
class FittingSize:
    size: int
    needs: float  # bytes
    next_needs: float  # at least, of the next size that was not taken; infinite where there is none


def largest_that_fits(
    sizes: Sequence[int], limit: float, attempt: Callable[[float], float], power: int = 1
) -> FittingSize:
    """The largest size whose measured need is within `limit`; the smallest of all where none is.

    sizes: ascending, from 1. attempt: bytes that a size needs, measured; infinite where there was no such memory.
    power: of a size, with which its need grows.
    """
    needs = {size: attempt(size) for size in (HALF, 1)}
    best, refused = 1, math.inf
    while candidates := [size for size in sizes if best < size and size not in needs]:
        ceiling = min((size for size, need in needs.items() if need > limit), default=math.inf)
        within = [size for size in candidates if size <= max(2 * best, candidates[0]) and size < ceiling]
        fitting = [size for size in within if predicted(needs, best, size, power) <= limit]
        if not fitting:
            refused = min((predicted(needs, best, size, power) for size in within), default=math.inf)
            break
        needs[fitting[-1]] = attempt(fitting[-1])
        if needs[fitting[-1]] <= limit:
            best = fitting[-1]
    beyond = [need for size, need in needs.items() if size > best]
    return FittingSize(best, needs[best], min([refused, *beyond]))


def predicted(needs: dict[float, float], best: int, size: int, power: int) -> float:
    """On the line in size ** power through the best size and the one that was measured below it."""
    below = max(other for other in needs if other < best)
    slope = (needs[best] - needs[below]) / (best**power - below**power)
    return needs[best] + max(slope, 0.0) * (size**power - best**power)


Build = Callable[[list[tuple[str, Tensor]]], list[Optimizer]]
_TWIN = 8192  # elements at most; bitsandbytes keeps state in 8 bits from 4096 on


@dataclass(frozen=True)
class HeaviestRow:
    """Longest, and most trained on, of all rows of the data; not always the same row."""

    example: Example  # whose tokens fill it
    tokens: int
    supervised: int

    def batch(self, rows: float, share: TokenShare = UNSHARDED) -> Batch:
        """Rows of one example each: attention within it costs no less than within several. HALF: of half a row."""
        part = min(rows, 1)
        several = len(self.example.sequences)
        length = max(1, int(self.tokens * part) // several)  # of each sequence
        targets = min(int(self.supervised * part) // several, length - 1)
        loss_mask = np.arange(length) >= length - targets
        sequences = [TokenSequence(np.resize(one.input_ids, length), loss_mask) for one in self.example.sequences]
        examples = [replace(self.example, sequences=tuple(sequences))] * max(1, int(rows))
        return token_shard(collate(examples, padded_to=share.padded(length * several * len(examples))), share)


@dataclass(frozen=True)
class Trials:
    """Trials on one engine; gradients stay, as for a step's later micro-batches, until `Engine.drop_gradients`.

    Every rank must make the same ones in the same order.
    """

    engine: Engine
    memory: Memory
    forward: ForwardPass
    row: HeaviestRow
    optimizer_bytes: int  # of state that is not there yet

    def begin(self) -> None:
        """Before any other: makes the gradients, and what is made once."""
        try:
            self._run(1)
        except torch.OutOfMemoryError:
            raise UserError(
                f"batch.rows_per_device: auto: not even one row of {self.row.tokens:,} tokens fits into "
                f"{self.memory.name}: train.activation_checkpointing: true, fsdp2, a smaller data.max_length, "
                "mode: lora or qlora, or an offload config"
            ) from None

    def attempt(self, rows: float) -> float:
        """Bytes that the rank that needs most would need; infinite where a rank ran out."""
        return max(self.engine.ranks.gather(self._attempt(rows) + self.optimizer_bytes))

    def _attempt(self, rows: float) -> float:
        try:
            return self.memory.peak(lambda: self._run(rows))
        except torch.OutOfMemoryError:
            if self.engine.trial_is_collective:
                # The others wait in the middle of this forward, and end with this process.
                raise RunFailure(
                    f"batch.rows_per_device: auto: {rows:g} rows looked as if they would fit and did not: "
                    f"give a number below {rows:g}"
                ) from None
        return math.inf  # here the error, which holds the forward's tensors, is gone

    def _run(self, rows: float) -> None:
        batch = self.row.batch(rows, self.engine.context_shard)
        batch = batch.map_tensors(lambda tensor: tensor.to(self.engine.device))
        objective = self.forward.objective

        def loss(model: Any) -> Tensor:
            return objective.loss(objective.terms(self.forward(model, batch), batch), UNSCALED)

        self.engine.trial(loss)


def optimizer_bytes(engine: Engine, build: Build) -> int:
    """What the optimizer's state will take of this device after the first step.

    Each stepped tensor has a small twin that is really stepped, and takes as much for each element.
    """
    if not engine.copies_state:  # it is on NVMe
        return 0
    stepped = {id(part.stepped): part for part in engine.parts(reading=True)}
    twins = []
    for part in stepped.values():
        twin = part.stepped.new_zeros(min(part.stepped.numel(), _TWIN))
        twin = twin.view(-1, 1) if len(part.shape) > 1 else twin
        twin.grad = torch.zeros_like(twin)
        twins.append((part, twin))
    optimizers = build([(part.name, twin) for part, twin in twins])
    for optimizer in optimizers:
        optimizer.step()
    taken = 0.0
    for part, twin in twins:
        optimizer = next(optimizer for optimizer in optimizers if twin in optimizer.state)
        if engine.device.type == "cuda" and getattr(optimizer, "is_paged", False):
            continue  # in memory that CUDA moves out as others need the device
        values = [
            value
            for field, value in optimizer.state[twin].items()
            if isinstance(value, Tensor) and value.ndim and not field.startswith("qmap")  # one table for all
        ]
        found = sum(value.nbytes for value in values if value.device.type == engine.device.type)
        taken += found / twin.numel() * part.stepped.numel()
    return int(taken)


# Of a recipe: what no forward's memory depends on. The rows' length and number are looked at in themselves.
_WITHOUT = {
    "run": True,
    "data": True,
    "batch": True,
    "schedule": True,
    "evaluate": True,
    "checkpoint": True,
    "tracking": True,
    "profile": True,
    "optimizer": {"lr", "weight_decay", "betas", "eps", "momentum", "max_grad_norm"},
    "train": {"epochs", "max_steps"},
}


def dependencies(recipe: Recipe, **others: Any) -> dict[str, Any]:
    """All that a result depends on, as plain values."""
    # pydantic's stubs do not take nested names where they are held in a variable.
    return {"recipe": recipe.model_dump(mode="json", exclude=_WITHOUT), **others}  # pyright: ignore[reportArgumentType]


def entry_file(depends_on: dict[str, Any]) -> Path:
    text = json.dumps(depends_on, sort_keys=True, default=str)
    return cache_root() / "rows_per_device" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def read_entry(path: Path) -> FittingSize | None:
    """None where there is none that can be read."""
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        after = about["next_needs_bytes"]
        return FittingSize(int(about["rows"]), float(about["needs_bytes"]), math.inf if after is None else float(after))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_entry(path: Path, depends_on: dict[str, Any], found: FittingSize) -> None:
    """Complete or absent. Raises OSError."""
    after = found.next_needs if math.isfinite(found.next_needs) else None
    about = {"rows": found.size, "needs_bytes": found.needs, "next_needs_bytes": after, "of": depends_on}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(about, indent=1, default=str), shared=True)


log = logging.getLogger(__name__)

_GIB = 2**30
# One call over the whole forward: scores or a mask of tokens x tokens.
_SQUARE_IN_TOKENS = ("eager", "sdpa")


@dataclass(frozen=True)
class RowsPerDevice:
    rows: int
    reason: str


def find_rows(
    engine: Engine,
    recipe: Recipe,
    config: PretrainedConfig,
    forward: ForwardPass,
    data: Dataset | Stream,
    build: Build,
    memory: Memory,
    say: Callable[[str], None] = lambda text: None,
) -> RowsPerDevice:
    """Collective. Leaves no trace on weights, gradients, optimizer or random numbers. Raises UserError and
    RunFailure."""
    row = HeaviestRow(data.first_example(), *data.heaviest_row(recipe.data.max_length))
    sizes = divisors(recipe.batch.rows // engine.parallelism.data)
    depends_on = dependencies(
        recipe,
        model=config.to_dict(),
        row={"tokens": row.tokens, "supervised": row.supervised},
        rows_per_rank=sizes[-1],
        attention=forward.attention.implementation,
        backend=engine.launch.backend,
        hardware=engine.ranks.gather(memory.name),
        versions=versions(),
    )
    path, limit = entry_file(depends_on), min(engine.ranks.gather(memory.limit))
    kept: FittingSize | None = engine.ranks.gather(read_entry(path) if engine.is_main else None)[0]
    if kept is not None and kept.needs <= limit < kept.next_needs:
        say(f"batch.rows_per_device: auto: {kept.size}, as kept in {path}")
        return _result(kept, limit, sizes, "as found before")
    say(f"batch.rows_per_device: auto: trying forwards of up to {sizes[-1]} rows of {row.tokens:,} tokens")
    trials = Trials(engine, memory, forward, row, optimizer_bytes(engine, build))
    fitting = _try(trials, recipe.train.compile, sizes, limit, say)
    if engine.is_main:
        try:
            write_entry(path, depends_on, fitting)
        except OSError as error:
            log.warning("%s cannot be written (%s): rows per forward are tried again next time", path, error.strerror)
    return _result(fitting, limit, sizes, "found by trial")


def _try(trials: Trials, compiles: bool, sizes: list[int], limit: float, say: Callable[[str], None]) -> FittingSize:
    engine = trials.engine

    def attempt(rows: float) -> float:
        needs = trials.attempt(rows)
        say(f"  {rows:g}: {needs / _GIB:.1f} of {limit / _GIB:.1f} GiB")
        return needs

    power = 2 if trials.forward.attention.implementation in _SQUARE_IN_TOKENS else 1
    devices = [engine.device] if engine.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        try:
            trials.begin()
            return largest_that_fits(sizes, limit, attempt, power)
        finally:
            engine.drop_gradients()
            trials.memory.release()  # the run's blocks are cut anew
            if compiles:
                torch.compiler.reset()  # forgets the sizes that were tried: the run compiles for its own


def _result(fitting: FittingSize, limit: float, sizes: list[int], how: str) -> RowsPerDevice:
    room = f"{fitting.needs / _GIB:.1f} of {limit / _GIB:.1f} GiB, {how}"
    if fitting.needs > limit:
        return RowsPerDevice(fitting.size, f"auto: the fewest there can be, though they need {room}")
    what = "all there are" if fitting.size == sizes[-1] else "the most that fit"
    return RowsPerDevice(fitting.size, f"auto: {what}, {room}")
