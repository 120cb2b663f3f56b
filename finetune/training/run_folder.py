"""runs/<name>/: made before anything is spent, and held by one launch at a time."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from finetune.engine.base import Engine
from finetune.engine.launch import hosts_without_shared_folder
from finetune.errors import UserError
from finetune.recipe import Recipe

log = logging.getLogger(__name__)

_WAIT_S = 60  # for a launch that was just told to stop, and saves


def run_folder(recipe: Recipe) -> Path:
    return Path(recipe.run.dir) / recipe.run.name


def make_run_folder(recipe: Recipe) -> None:
    """Raises UserError where results could not be written, before hours are spent on them."""
    folder = run_folder(recipe)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run.dir: {folder} cannot be made: {error.strerror}; choose another `run.dir`") from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"run.dir: {folder} cannot be written to; choose another `run.dir`")


@contextlib.contextmanager
def in_use(engine: Engine, folder: Path) -> Iterator[None]:
    """Hold the run's lock, which ends with the process that holds it, however that ends. Collective.

    Raises UserError on all ranks where another launch of the same run is going on, or where machines mean different
    folders by this name.
    """
    lock = FileLock(folder / ".lock")
    if engine.ranks.gather(_held_by_another(lock) if engine.is_main else False)[0]:
        raise UserError(f"another launch is training in {folder}: stop it, or use another `run.name`")
    several_machines = engine.local_processes < engine.world_size
    if several_machines and (hosts := hosts_without_shared_folder(engine.ranks.gather, engine.rank, folder)):
        raise UserError(
            f"run.dir: {folder.resolve()} is another folder on {', '.join(hosts)} than on rank 0's machine, and a "
            "checkpoint has a file of every rank: choose a `run.dir` on a file system that all machines share"
        )
    try:
        yield
    finally:
        lock.release()


def _held_by_another(lock: FileLock) -> bool:
    for seconds in (0, _WAIT_S):
        try:
            lock.acquire(timeout=seconds)
            return False
        except Timeout:
            if seconds == 0:
                log.warning("%s is held by another launch: waiting up to %d s for its end", lock.lock_file, _WAIT_S)
        except NotImplementedError:
            log.warning("%s: this file system has no locks; see to it that a run is launched once", lock.lock_file)
            return False
    return True
