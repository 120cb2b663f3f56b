"""Saves a run's checkpoints while its steps go on.

    loop      save: wait for the last one, copy this rank's ranges to CPU memory  |  steps  |  settle
    thread                                       write, checksum, flush -> all ranks? -> seal, prune

Every rank's thread writes its own file; they agree over a process group of their own, so that a checkpoint appears when
all its files are on the disk, and a failure on one rank is known to all.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import socket
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from finetune.checkpoints.folder import partial_folder, seal, start_partial, step_folder
from finetune.checkpoints.retention import Metrics, Retention, score
from finetune.checkpoints.shards import part_tensors, shape_metadata
from finetune.checkpoints.staging import Staging
from finetune.checkpoints.tensor_file import write_tensors
from finetune.engine.base import Engine
from finetune.engine.parts import scalars
from finetune.engine.timeout import collective_timeout
from finetune.errors import RunFailure
from finetune.recipe import Recipe, dump_recipe

log = logging.getLogger(__name__)

Progress = dict[str, Any]  # step, tokens, supervised_tokens, tokens_by_source
About = dict[str, Any]  # what else state.json says of the run: data, versions, trackers
Result = TypeVar("Result")


class _NotWritten(Exception):
    """On all ranks: one of them could not write."""


@dataclass(frozen=True)
class _Snapshot:
    """A moment of the run, apart from the tensors that steps go on to change."""

    step: int
    state: dict[str, Any]
    tensors: dict[str, Tensor]  # of this rank
    shapes: dict[str, str]
    scalars: dict[str, dict[str, float]]


class Saver:
    """One checkpoint at a time: a new one waits for the last. Every method that says so is collective."""

    def __init__(self, engine: Engine, recipe: Recipe, root: Path, about: About):
        """about: used on the main process. Collective."""
        self._engine, self._recipe, self._root, self._about = engine, recipe, root, about
        self.asynchronous = recipe.checkpoint.asynchronous and engine.copies_state
        self._gather = engine.ranks.side_gather()
        self._staging = Staging()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[str | None] | None = None
        self._retention = Retention(root, recipe.checkpoint)
        self._best = engine.ranks.gather(self._retention.best_score() if engine.is_main else None)[0]

    def improves(self, metrics: Metrics) -> bool:
        """Whether these are better than any that were saved, by `checkpoint.best`."""
        value = score(metrics, self._recipe.checkpoint.best)
        return value is not None and (self._best is None or value < self._best)

    def save(self, progress: Progress, metrics: Metrics) -> int:
        """Write step-N. Collective; returns when this rank's part is copied, or where not `asynchronous`, is written.

        metrics: of an evaluation at this step; empty where there was none. Returns the bytes of this rank's tensors,
        which is what the copy takes. Raises RunFailure as `settle`.
        """
        self.settle()
        snapshot = self._snapshot(progress, metrics)
        if self.improves(metrics):
            self._best = score(metrics, self._recipe.checkpoint.best)
        self._pending = self._thread.submit(self._write, snapshot)
        if not self.asynchronous:
            self.settle()
        return sum(tensor.nbytes for tensor in snapshot.tensors.values())

    @property
    def failed(self) -> bool:
        """Whether the save under way is known, on this rank, to have failed: all ranks should `settle`."""
        return self._pending is not None and self._pending.done() and self._pending.result() is not None

    def settle(self, must: bool = False) -> None:
        """Wait until the save under way is complete. Collective.

        Raises RunFailure where it failed and `checkpoint.on_failure` is `stop`, or it `must` not; else says so.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        failure = pending.result()
        if failure is None:
            return
        if must or self._recipe.checkpoint.on_failure == "stop":
            raise RunFailure(failure)
        log.warning("%s. The run goes on (checkpoint.on_failure: continue)", failure)

    def tidy(self) -> None:
        """At a run's end: a kill after the last save may have come before its deletions."""
        if self._engine.is_main:
            self._prune()

    def close(self) -> None:
        """Let the save under way come to its end, whatever it is, and give its memory back.

        It is waited for no longer than ranks wait for each other: one may be gone, and the thread wait for it.
        """
        running = [self._pending] if self._pending else []
        if futures.wait(running, collective_timeout().total_seconds()).not_done:
            log.error("the checkpoint that was being written is given up: another rank does not answer")
            self._thread.shutdown(wait=False)
            return
        self._thread.shutdown()
        self._staging.release()

    def _snapshot(self, progress: Progress, metrics: Metrics) -> _Snapshot:
        engine = self._engine
        parts = engine.parts(reading=False)
        tensors = part_tensors(parts, engine.optimizers)
        if self.asynchronous:
            tensors = self._staging.copies(tensors)  # the stall of a save
        state = {
            **progress,
            "row_position": progress["step"] * self._recipe.batch.rows,  # position in the order of the run's rows
            "metrics": metrics,
            "loss_scale": {"value": engine.loss_scale.value, "good_steps": engine.loss_scale.good_steps},
            **self._about,
        }
        return _Snapshot(progress["step"], state, tensors, shape_metadata(parts), scalars(parts, engine.optimizers))

    # --- in the thread

    def _write(self, snapshot: _Snapshot) -> str | None:
        """The failure's message, alike on all ranks; None where the checkpoint is complete."""
        engine, step = self._engine, snapshot.step
        partial, final = partial_folder(self._root, step), step_folder(self._root, step)
        file = partial / f"rank-{engine.rank:05d}-of-{engine.world_size:05d}.safetensors"
        try:
            self._together(lambda: start_partial(partial) if engine.is_main else None)
            shares = self._together(lambda: (write_tensors(file, snapshot.tensors, snapshot.shapes), snapshot.scalars))
            self._together(lambda: self._complete(snapshot, shares, partial, final) if engine.is_main else None)
        except _NotWritten as error:
            if engine.is_main:
                shutil.rmtree(partial, ignore_errors=True)
            return f"{final} could not be written, earlier checkpoints are untouched: {error}"
        return None

    def _together(self, work: Callable[[], Result]) -> list[Result]:
        """What every rank's work returns, in rank order; raises _NotWritten on all ranks where one could not write."""
        outcome: tuple[Any, str | None]
        try:
            outcome = work(), None
        except OSError as error:
            outcome = None, f"rank {self._engine.rank}: {error}"
        outcomes = self._gather(outcome)
        failures = [failure for _, failure in outcomes if failure]
        if failures:
            raise _NotWritten("; ".join(failures))
        return [result for result, _ in outcomes]

    def _complete(self, snapshot: _Snapshot, shares: list[Any], partial: Path, final: Path) -> None:
        numbers: dict[str, dict[str, float]] = {}
        for _, share in shares:
            numbers.update(share)
        text = dump_recipe(self._recipe)
        state = {
            **snapshot.state,
            "recipe_sha256": hashlib.sha256(text.encode()).hexdigest(),
            "written": self._written(),
            "scalars": numbers,
        }
        (partial / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
        (partial / "recipe.yaml").write_text(text, encoding="utf-8")
        seal(partial, final, [entry for entry, _ in shares])
        self._retention.trust(final)
        self._prune()

    def _prune(self) -> None:
        """A checkpoint too many is no reason to end a run, or to call the new one not written."""
        try:
            self._retention.prune()
        except OSError as error:
            log.warning("older checkpoints could not be deleted: %s", error)

    def _written(self) -> dict[str, Any]:
        return {
            "where": self._engine.launch.where,
            "world_size": self._engine.world_size,
            "host": socket.gethostname(),
            "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
