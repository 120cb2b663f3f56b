"""From a wrapped model to the rows of a forward: looked up, or found by trial; the same on every rank.

The maths does not depend on the result: it only decides in how many forwards the rows of a step are computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from finetune.data.dataset import Dataset, Stream
from finetune.engine.base import Engine
from finetune.objectives.forward import ForwardPass
from finetune.planning.plan import versions
from finetune.recipe import Recipe
from finetune.training.fit.entry import dependencies, entry_file, read_entry, write_entry
from finetune.training.fit.memory import Memory
from finetune.training.fit.search import Found, largest_that_fits
from finetune.training.fit.trial import Build, HeaviestRow, Trials, optimizer_bytes
from finetune.utils import divisors

log = logging.getLogger(__name__)

_GIB = 2**30
# One call over the whole forward: scores or a mask of tokens x tokens.
_SQUARE_IN_TOKENS = ("eager", "sdpa")


@dataclass(frozen=True)
class FoundRows:
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
) -> FoundRows:
    """Collective. Leaves no trace on weights, gradients, optimizer or random numbers. Raises UserError and
    RunFailure."""
    row = HeaviestRow(data.first_example(), *data.heaviest_row(recipe.data.max_length))
    sizes = divisors(recipe.batch.rows // engine.parallelism.data)
    of = dependencies(
        recipe,
        model=config.to_dict(),
        row={"tokens": row.tokens, "supervised": row.supervised},
        rows_per_rank=sizes[-1],
        attention=forward.attention.implementation,
        backend=engine.launch.backend,
        hardware=engine.ranks.gather(memory.name),
        versions=versions(),
    )
    path, limit = entry_file(of), min(engine.ranks.gather(memory.limit))
    kept: Found | None = engine.ranks.gather(read_entry(path) if engine.is_main else None)[0]
    if kept is not None and kept.needs <= limit < kept.next_needs:
        say(f"batch.rows_per_device: auto: {kept.size}, as kept in {path}")
        return _found(kept, limit, sizes, "as found before")
    say(f"batch.rows_per_device: auto: trying forwards of up to {sizes[-1]} rows of {row.tokens:,} tokens")
    found = _try(engine, recipe, forward, row, build, memory, sizes, limit, say)
    if engine.is_main:
        _keep(path, of, found)
    return _found(found, limit, sizes, "found by trial")


def _try(
    engine: Engine,
    recipe: Recipe,
    forward: ForwardPass,
    row: HeaviestRow,
    build: Build,
    memory: Memory,
    sizes: list[int],
    limit: int,
    say: Callable[[str], None],
) -> Found:
    trials = Trials(engine, memory, forward, row, optimizer_bytes(engine, build))

    def attempt(rows: float) -> float:
        needs = trials.attempt(rows)
        say(f"  {rows:g}: {needs / _GIB:.1f} of {limit / _GIB:.1f} GiB")
        return needs

    power = 2 if forward.attention.implementation in _SQUARE_IN_TOKENS else 1
    devices = [engine.device] if engine.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        try:
            trials.begin()
            return largest_that_fits(sizes, limit, attempt, power)
        finally:
            engine.drop_gradients()
            memory.release()  # the run's blocks are cut anew
            if recipe.train.compile:
                torch.compiler.reset()  # forgets the sizes that were tried: the run compiles for its own


def _found(found: Found, limit: float, sizes: list[int], how: str) -> FoundRows:
    room = f"{found.needs / _GIB:.1f} of {limit / _GIB:.1f} GiB, {how}"
    if found.needs > limit:
        return FoundRows(found.size, f"auto: the fewest there can be, though they need {room}")
    what = "all there are" if found.size == sizes[-1] else "the most that fit"
    return FoundRows(found.size, f"auto: {what}, {room}")


def _keep(path: Path, of: dict[str, Any], found: Found) -> None:
    try:
        write_entry(path, of, found)
    except OSError as error:
        log.warning("%s cannot be written (%s): rows per forward are looked for again next time", path, error.strerror)
