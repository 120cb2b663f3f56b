"""Saves checkpoints while training continues.

    loop      save: wait for the last one, copy this rank's ranges to CPU memory  |  steps  |  settle
    thread                                       write, checksum, fsync -> all ranks? -> seal, prune

Every rank's thread writes its own file. The threads synchronize over a process group of their own: a checkpoint appears
when all its files are on disk, and a failure on one rank reaches all.
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

import torch
from torch import Tensor

from finetune.checkpoints.folder import Metrics, Retention, partial_folder, seal, start_partial, step_folder
from finetune.checkpoints.shards import part_tensors, shape_metadata, write_tensors
from finetune.engine.base import Engine
from finetune.engine.launch import collective_timeout
from finetune.engine.state_shards import scalars
from finetune.errors import RunFailure
from finetune.recipe import Recipe, dump_recipe
from finetune.recipe.schema import is_better

log = logging.getLogger(__name__)

Progress = dict[str, Any]  # step, tokens, supervised_tokens, tokens_by_source
Result = TypeVar("Result")


class _NotWritten(Exception):
    """Raised on all ranks if any could not write."""


@dataclass(frozen=True)
class _Snapshot:
    """State of the run at one step, independent of tensors that later steps change."""

    step: int
    state: dict[str, Any]
    tensors: dict[str, Tensor]  # this rank's tensors
    shapes: dict[str, str]
    scalars: dict[str, dict[str, float]]


class Saver:
    """Saves one checkpoint at a time: a new one waits for the previous one."""

    def __init__(
        self,
        engine: Engine,
        recipe: Recipe,
        root: Path,
        metadata: dict[str, Any],
        is_ours: Callable[[], bool] = lambda: True,
        sealed: Callable[[Path], None] = lambda _: None,
    ):
        """metadata: further content of state.json (data, versions, trackers), from the main process. is_ours: whether
        this launch may still write the folder, checked on the main process. sealed: receives each complete
        checkpoint, in the main process's thread, before older ones are deleted. Collective."""
        self._engine, self._recipe, self._root, self._metadata = engine, recipe, root, metadata
        self._is_ours, self._sealed = is_ours, sealed
        self.asynchronous = recipe.checkpoint.asynchronous and engine.copies_state
        self._gather = engine.ranks.side_gather()
        self._staging = Staging()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[str | None] | None = None
        self._retention = Retention(root, recipe.checkpoint)
        self._best = engine.ranks.gather(self._retention.best_value() if engine.is_main else None)[0]

    def improves(self, metrics: Metrics) -> bool:
        """Returns whether these are better than those of any saved checkpoint, by `checkpoint.best`."""
        name = self._recipe.checkpoint.best
        if name is None or name not in metrics:
            return False
        return self._best is None or is_better(name, metrics[name], self._best)

    def save(self, progress: Progress, metrics: Metrics) -> int:
        """Writes step-N; returns when this rank's part is copied (if not `asynchronous`: written). Collective.

        metrics: of an evaluation at this step, or empty. Returns the bytes of this rank's tensors, the size of the
        copy. Raises RunFailure as `settle`.
        """
        self.settle()
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
            **self._metadata,
        }
        snapshot = _Snapshot(progress["step"], state, tensors, shape_metadata(parts), scalars(parts, engine.optimizers))
        if self.improves(metrics):
            self._best = metrics[str(self._recipe.checkpoint.best)]
        self._pending = self._thread.submit(self._write, snapshot)
        if not self.asynchronous:
            self.settle()
        return sum(tensor.nbytes for tensor in snapshot.tensors.values())

    @property
    def failed(self) -> bool:
        """Returns whether the pending save has failed on this rank: all ranks should `settle`."""
        return self._pending is not None and self._pending.done() and self._pending.result() is not None

    def settle(self, must: bool = False) -> None:
        """Waits for the pending save. Collective.

        Raises RunFailure if it failed and `must` or `checkpoint.on_failure: stop` is set; else logs a warning.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        failure = pending.result()
        if failure is None:
            return
        if must or self._recipe.checkpoint.on_failure == "stop":
            raise RunFailure(failure)
        log.warning("%s. Training continues (checkpoint.on_failure: continue)", failure)

    def tidy(self) -> None:
        """Deletes the remains of an earlier, killed launch, at a run's end."""
        if self._engine.is_main and self._is_ours():
            self._prune()

    def close(self) -> None:
        """Waits for the pending save, failed or not, and releases its memory.

        Waits no longer than the timeout of collectives: another rank may be gone, and the thread waits for it.
        """
        running = [self._pending] if self._pending else []
        if futures.wait(running, collective_timeout().total_seconds()).not_done:
            log.error("the pending checkpoint is abandoned: another rank does not respond")
            self._thread.shutdown(wait=False)
            return
        self._thread.shutdown()
        self._staging.release()

    # --- in the thread

    def _write(self, snapshot: _Snapshot) -> str | None:
        """Returns the failure's message, the same on all ranks; None if the checkpoint is complete."""
        engine, step = self._engine, snapshot.step
        partial, final = partial_folder(self._root, step), step_folder(self._root, step)
        file = partial / f"rank-{engine.rank:05d}-of-{engine.world_size:05d}.safetensors"
        try:
            self._together(lambda: self._if_ours(start_partial, partial) if engine.is_main else None)
            shares = self._together(lambda: (write_tensors(file, snapshot.tensors, snapshot.shapes), snapshot.scalars))
            self._together(lambda: self._complete(snapshot, shares, partial, final) if engine.is_main else None)
        except _NotWritten as error:
            if engine.is_main and self._is_ours():
                shutil.rmtree(partial, ignore_errors=True)
            remedy = "free space, or clear what is in its way, and run the same command again"
            return f"{final} could not be written: {error}. Earlier checkpoints are untouched. Fix: {remedy}"
        return None

    def _if_ours(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Raises OSError if another launch has taken the folder, which then owns it."""
        if not self._is_ours():
            raise OSError("another launch has taken this run's folder")
        return work(*arguments)

    def _together(self, work: Callable[[], Result]) -> list[Result]:
        """Returns the results of every rank, in rank order; raises _NotWritten on all ranks if one could not write."""
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
        merged: dict[str, dict[str, float]] = {}
        for _, scalars_of_rank in shares:
            merged.update(scalars_of_rank)
        text = dump_recipe(self._recipe)
        state = {
            **snapshot.state,
            "recipe_sha256": hashlib.sha256(text.encode()).hexdigest(),
            "written": {
                "where": self._engine.launch.where,
                "world_size": self._engine.world_size,
                "host": socket.gethostname(),
                "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            },
            "scalars": merged,
        }
        (partial / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
        (partial / "recipe.yaml").write_text(text, encoding="utf-8")
        self._if_ours(seal, partial, final, [entry for entry, _ in shares])
        self._retention.trust(final)
        self._sealed(final)
        self._prune()

    def _prune(self) -> None:
        """Deletes old checkpoints; a failure to do so does not fail the run."""
        try:
            self._retention.prune()
        except OSError as error:
            log.warning("older checkpoints could not be deleted: %s", error)


_ALIGNMENT = 64  # bytes; a view of any type may begin there
_PORTABLE = 1  # cudaHostRegisterPortable


class Staging:
    """Host memory for the copies of one save, kept from save to save.

    Fresh memory is mapped page by page on first write, which takes several times as long as the copy, and a GPU copies
    at full speed to pinned memory only, which is slower still to allocate. torch rounds pinned allocations up to a
    power of two (https://github.com/pytorch/pytorch/issues/150517), up to twice the size needed; so ordinary memory is
    registered with the driver instead.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    def copies(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns copies of flat tensors on any device, complete on return; overwrites those of the previous call.

        Raises RunFailure if memory cannot be pinned.
        """
        size, pinned = sum(map(_aligned_bytes, tensors.values())), any(tensor.is_cuda for tensor in tensors.values())
        if size > self._memory.numel() or pinned != self._pinned:
            self.release()
            self._memory = torch.empty(size, dtype=torch.uint8)
            if pinned and (error := int(_driver().cudaHostRegister(self._memory.data_ptr(), size, _PORTABLE))):
                raise RunFailure(
                    f"{size / 1e9:.1f} GB of CPU memory cannot be pinned (CUDA error {error}). It is for the copy of a "
                    "checkpoint. Fix: set checkpoint.asynchronous: false, which needs no copy"
                )
            self._pinned = pinned
        copies, end = {}, 0
        for name, tensor in tensors.items():
            start, end = end, end + _aligned_bytes(tensor)
            copy = self._memory[start : start + tensor.nbytes].view(tensor.dtype)  # (numel,)
            copies[name] = copy.copy_(tensor.detach(), non_blocking=self._pinned)
        if self._pinned:
            torch.cuda.synchronize()
        return copies

    def release(self) -> None:
        """Frees the memory; only when the copies are no longer read."""
        if self._pinned:
            _driver().cudaHostUnregister(self._memory.data_ptr())  # fails only after an earlier failure
        self._memory, self._pinned = torch.empty(0, dtype=torch.uint8), False


def _aligned_bytes(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _driver() -> Any:
    """Returns the runtime of CUDA, or HIP."""
    return torch.cuda.cudart()
