"""The run directory, runs/<name>/: created before the model is loaded, written by a thread."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from finetune.data.samples import Image, Medium
from finetune.engine.base import Engine
from finetune.errors import STOPPED_STATUS, RunFailure, UserError, log_errors_to
from finetune.recipe import Recipe
from finetune.recipe.schema import Run
from finetune.tracking.metrics import (
    GENERATIONS,
    PICTURES,
    Background,
    StepLog,
    missing_steps,
    prepare_samples,
    sample_file,
)
from finetune.tracking.trackers import Trackers
from finetune.utils import write_atomically

log = logging.getLogger(__name__)

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_IN_PLACE = {errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY}  # something else has a file's name
_MOUNTED = {errno.EXDEV, errno.EBUSY, errno.ETXTBSY}  # a file that cannot be replaced by a rename
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_OF_DISKS = _FULL | _IN_PLACE | _MOUNTED | _FORBIDDEN | {errno.EIO, errno.ESTALE, errno.ENAMETOOLONG, errno.ELOOP}


def run_folder(run: Run) -> Path:
    return Path(run.dir).expanduser() / run.name


def make_run_folder(run: Run) -> None:
    """Creates the run directory. Raises UserError if it cannot be written to."""
    folder, what = run_folder(run), "created"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        log_errors_to(folder)
        what = "written to"
        (folder / ".lock").touch()
    except OSError as error:
        reason = f"run.dir: {folder} cannot be {what}: {error.strerror}"
        raise UserError(f"{reason}. Fix: choose another `run.dir`") from None


def disk_failure(folder: Path, error: OSError) -> RunFailure:
    """Returns a message for an error of the run's disk. Raises other errors again."""
    if error.errno not in _OF_DISKS:
        raise error
    remedies = {
        "free space": _FULL,
        "move away what is there under this name": _IN_PLACE,
        "unmount it, as a file that is mounted alone cannot be replaced": _MOUNTED,
        "make it writable": _FORBIDDEN,
    }
    remedy = next((text for text, codes in remedies.items() if error.errno in codes), "repair the disk or the path")
    return RunFailure(
        f"{error.filename or folder}: {error.strerror}. The run in {folder} has failed, and its checkpoints are "
        f"untouched. Fix: {remedy}, and run the same command again"
    )


class RunLog:
    """Metrics, samples and trackers of a run that starts with `first_step`. Collective: every rank opens one.

    A thread writes to files and trackers, in order, so the loop waits for neither disk nor server; an error there
    is raised by a later call.

    config: recipe and plan, for trackers; ids: of the trackers' runs, from a checkpoint.
    """

    def __init__(
        self, engine: Engine, recipe: Recipe, folder: Path, first_step: int, config: dict[str, Any], ids: dict[str, str]
    ):
        self._folder, main = folder, engine.is_main
        if main and (missing := missing_steps(folder / "metrics.jsonl", first_step)):
            log.warning(
                "%s has no lines of steps %s, which the checkpoint has: it was cut or removed. Reports lack these "
                "steps; training continues with step %d",
                folder / "metrics.jsonl",
                missing,
                first_step,
            )
        self._metrics = StepLog(folder / "metrics.jsonl", first_step) if main else None
        generates = main and recipe.evaluate.generate > 0
        self._generations = StepLog(folder / GENERATIONS, first_step) if generates else None
        try:
            self._samples = _samples(engine, folder / "samples", first_step) if recipe.tracking.samples else None
            self._trackers = Trackers(recipe.tracking, recipe.run.name, folder, config, ids) if main else None
        except BaseException:
            for opened in (self._metrics, self._generations):
                if opened:
                    opened.close()
            raise
        self._thread = Background("run-log")

    def write(self, entry: dict[str, Any], step: int) -> None:
        if self._metrics and self._trackers:
            self._thread.do(self._metrics.write, entry)
            self._thread.do(self._trackers.log, entry, step)

    def rows(self, step: int, rows: list[str]) -> None:
        """Logs the rows that this rank trained on."""
        if self._samples:
            self._thread.do(self._samples.write, {"step": step, "rows": rows})

    def table(
        self,
        name: str,
        columns: list[str],
        rows: list[list[str]],
        step: int,
        media: Sequence[tuple[Medium, ...]] = (),
        questions: Sequence[str] = (),
    ) -> None:
        """Logs a table. media: per row, whose images are shown small, side by side; questions: per row, without
        the chat template."""
        if (trackers := self._trackers) is None:
            return

        def write() -> None:
            from finetune.data.media.image_files import thumbnails

            pictures: list[Path | None] = []  # of each row; the file is there if the same images were logged before
            of_rows = [[one.source for one in of_row if isinstance(one, Image)] for of_row in media]
            for sources in of_rows if any(of_rows) else ():
                digest = hashlib.sha256(repr(sources).encode()).hexdigest()[:16]
                path = self._folder / PICTURES / f"{digest}.png" if sources else None
                if path is not None and not path.is_file():
                    path.parent.mkdir(exist_ok=True)
                    write_atomically(path, thumbnails(sources))
                pictures.append(path)
            if self._generations and name == "generations":
                names: dict[str, Any] = {"questions": list(questions)} if questions else {}
                if pictures:
                    names["pictures"] = [path and f"{PICTURES}/{path.name}" for path in pictures]
                self._generations.write({"step": step, "columns": columns, "rows": rows, **names})
            head, shown = columns, rows
            if questions:
                head = ["question", "answer", "expected"]
                shown = [[question, *row[1:]] for question, row in zip(questions, rows, strict=True)]
            trackers.table(name, head, shown, step, pictures)

        self._thread.do(write)

    def run_ids(self) -> dict[str, str]:
        return self._trackers.run_ids() if self._trackers else {}

    def flush(self) -> None:
        """Writes everything to the disk. Call it before a checkpoint declares these steps done."""
        for log in (self._metrics, self._samples, self._generations):
            if log:
                self._thread.do(log.flush)
        self._thread.flush()

    def finish(self, summary: dict[str, float], artifacts: dict[str, Path]) -> None:
        """Writes the summary. artifacts: model folders for trackers, by alias."""
        if self._trackers:
            self._thread.do(self._trackers.summary, summary)
            self._thread.do(self._trackers.artifacts, artifacts)
            self._thread.do(self._trackers.finish)
        self._thread.flush()

    def finish_preempted(self) -> None:
        if self._trackers:
            self._thread.do(self._trackers.finish_preempted, STOPPED_STATUS)
        self._thread.flush()

    def close(self) -> None:
        """Writes everything pending, also when the run fails."""
        try:
            self._thread.close()
        finally:
            for log in (self._metrics, self._samples, self._generations):
                if log:
                    log.close()


def _samples(engine: Engine, folder: Path, first_step: int) -> StepLog | None:
    """Returns one file per data-parallel rank; None on ranks that share its sequences."""
    if engine.is_main:
        prepare_samples(folder, first_step)
    engine.ranks.barrier()
    return StepLog(sample_file(folder, engine.rank), first_step) if engine.is_data_parallel_leader else None


class ExpertLoad:
    """Load of every expert since the last write: experts.json of a run."""

    def __init__(self) -> None:
        self._steps: list[int] = []  # first and last
        self._load: Tensor | None = None

    def add(self, step: int, load: Tensor) -> None:
        """Adds a step's load: (layers, experts), tokens that chose each expert."""
        self._steps = [*self._steps[:1], step]
        self._load = load if self._load is None else self._load + load

    def write(self, folder: Path) -> None:
        """Writes {"steps": [first, last], "load": tokens per expert, a list for each layer} and resets."""
        if self._load is not None:
            content = {"steps": [self._steps[0], self._steps[-1]], "load": self._load.long().tolist()}
            write_atomically(folder / "experts.json", json.dumps(content) + "\n")
        self._steps, self._load = [], None
