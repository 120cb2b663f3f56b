"""status.json: what became of the last launch of a run, for scripts that decide whether to start it again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

Status = Literal["running", "stopped", "finished"]  # one that was killed stays `running`


def write_status(run_dir: Path, status: Status, step: int, steps: int) -> None:
    """step of steps: where the run stands. Replaced whole."""
    file, temporary = run_dir / "status.json", run_dir / "status.tmp"
    temporary.write_text(json.dumps({"status": status, "step": step, "steps": steps}) + "\n", encoding="utf-8")
    temporary.replace(file)


def read_status(run_dir: Path) -> Status | None:
    """None where nothing was launched yet."""
    file = run_dir / "status.json"
    return json.loads(file.read_text(encoding="utf-8"))["status"] if file.exists() else None
