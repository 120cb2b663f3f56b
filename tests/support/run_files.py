"""Files of a run that was never there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_run(folder: Path, status: str | None, steps: int, done: int, **plan: Any) -> Path:
    """Files of a run whose steps take half a minute, evaluations included."""
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = [
        {
            "step": step,
            "loss": 2.0 / step,
            "tokens_per_s": 100.0,
            "step_s": 20.0,
            "time/forward": 20.0,
            "time/other": 10.0,
        }
        for step in range(1, done + 1)
    ]
    lines.append({"step": done, "eval_loss": 0.25, "eval_loss/chat": 0.5, "exact_match": 0.75})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"step": 99, "lo', encoding="utf-8")  # as a killed run leaves it
    (folder / "plan.json").write_text(json.dumps({"steps": steps, "world_size": 2, "device": "cpu", **plan}))
    if status is not None:
        (folder / "status.json").write_text(json.dumps({"status": status, "step": done, "steps": steps}))
    return folder
