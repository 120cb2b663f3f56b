"""JSON lines by step, in order, none twice: metrics.jsonl, and with `tracking.samples` what each rank trained on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Entry = dict[str, Any]


class StepLog:
    """Appends lines; opened for a resumed run it first drops those of steps that will be run again."""

    def __init__(self, path: Path, first_step: int):
        """first_step: the step that will be logged next (1-based); 1 starts the file anew."""
        keep_before(path, first_step)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, entry: Entry) -> None:
        self._file.write(_line(entry))

    def flush(self) -> None:
        """To the disk, before a checkpoint says that these steps are done."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def keep_before(path: Path, first_step: int) -> None:
    """Drop the lines of `first_step` and later ones, and one that a killed run left torn; the file exists after."""
    kept = [entry for entry in read_steps(path) if entry["step"] < first_step] if first_step > 1 else []
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(map(_line, kept)), encoding="utf-8")
    temporary.replace(path)


def read_steps(path: Path) -> list[Entry]:
    """Every whole line; a last one that a killed run left torn is not counted."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def sample_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.jsonl"


def prepare_samples(folder: Path, first_step: int) -> None:
    """Trim the files of all ranks, also of a run by more of them; on the main process, before a rank opens its own."""
    folder.mkdir(exist_ok=True)
    for path in folder.glob("rank-*.jsonl"):
        keep_before(path, first_step)


def _line(entry: Entry) -> str:
    return json.dumps(entry, allow_nan=False, ensure_ascii=False) + "\n"
