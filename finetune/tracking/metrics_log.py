"""metrics.jsonl: one JSON object per line, one train line per optimizer step, in order, none twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class MetricsLog:
    """Appends lines; on resume drops those of steps that will be run again."""

    def __init__(self, path: Path, first_step: int):
        """first_step: the step that will be logged next (1-based); 1 starts the file anew."""
        kept = [line for line in read_metrics(path) if line["step"] < first_step] if first_step > 1 else []
        text = "".join(_line(entry) for entry in kept)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, entry: dict[str, Any]) -> None:
        self._file.write(_line(entry))

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every whole line; a last one that a killed run left torn is not counted."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(entry, allow_nan=False, ensure_ascii=False) + "\n"
