"""What a run writes while it goes: metrics.jsonl, the samples of each rank, and the trackers' copies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from finetune.engine.base import Engine
from finetune.errors import STOPPED_STATUS
from finetune.recipe import Recipe
from finetune.tracking import StepLog, Trackers, prepare_samples, sample_file
from finetune.tracking.metrics import Background


class RunLog:
    """Opened on every rank of a run that is about to make `first_step`; what one rank alone writes, others pass over.

    Files and trackers are written to by a thread, in order, so that the loop waits for neither disk nor server; what
    goes wrong there is raised by a later call here.

    Collective. about: what trackers keep of the run; ids: theirs, as a checkpoint knows them.
    """

    def __init__(
        self, engine: Engine, recipe: Recipe, folder: Path, first_step: int, about: dict[str, Any], ids: dict[str, str]
    ):
        main = engine.is_main
        self._metrics = StepLog(folder / "metrics.jsonl", first_step) if main else None
        self._samples = _samples(engine, folder / "samples", first_step) if recipe.tracking.samples else None
        self._trackers = Trackers(recipe, folder, about, ids) if main else None
        self._thread = Background("run-log")

    def write(self, entry: dict[str, Any], step: int) -> None:
        if self._metrics and self._trackers:
            self._thread.do(self._metrics.write, entry)
            self._thread.do(self._trackers.log, entry, step)

    def rows(self, step: int, rows: list[str]) -> None:
        """What this rank trained on."""
        if self._samples:
            self._thread.do(self._samples.write, {"step": step, "rows": rows})

    def table(self, name: str, columns: list[str], rows: list[list[str]], step: int) -> None:
        if self._trackers:
            self._thread.do(self._trackers.table, name, columns, rows, step)

    def run_ids(self) -> dict[str, str]:
        return self._trackers.run_ids() if self._trackers else {}

    def flush(self) -> None:
        """To the disk, before a checkpoint says that these steps are done."""
        for log in (self._metrics, self._samples):
            if log:
                self._thread.do(log.flush)
        self._thread.flush()

    def finish(self, summary: dict[str, float]) -> None:
        if self._trackers:
            self._thread.do(self._trackers.summary, summary)
            self._thread.do(self._trackers.finish)
        self._thread.flush()

    def finish_preempted(self) -> None:
        if self._trackers:
            self._thread.do(self._trackers.finish_preempted, STOPPED_STATUS)
        self._thread.flush()

    def close(self) -> None:
        """Everything that was handed over is written, also where the run fails."""
        try:
            self._thread.close()
        finally:
            for log in (self._metrics, self._samples):
                if log:
                    log.close()


def _samples(engine: Engine, folder: Path, first_step: int) -> StepLog | None:
    """One file for the rows of each share; none where other ranks train on the same."""
    if engine.is_main:
        prepare_samples(folder, first_step)
    engine.ranks.barrier()
    return StepLog(sample_file(folder, engine.rank), first_step) if engine.is_data_parallel_leader else None


class ExpertLoad:
    """Every expert's load since the last time it was written: experts.json of a run."""

    def __init__(self) -> None:
        self._steps: list[int] = []  # the first and the last
        self._load: Tensor | None = None

    def add(self, step: int, load: Tensor) -> None:
        """load: (layers, experts) tokens of the step that chose each expert."""
        self._steps = [*self._steps[:1], step]
        self._load = load if self._load is None else self._load + load

    def write(self, folder: Path) -> None:
        """{"steps": [first, last], "load": tokens that chose each expert, a list for each layer}; then from 0 again."""
        if self._load is not None:
            content = {"steps": [self._steps[0], self._steps[-1]], "load": self._load.long().tolist()}
            (folder / "experts.json").write_text(json.dumps(content) + "\n", encoding="utf-8")
        self._steps, self._load = [], None
