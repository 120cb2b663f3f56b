"""Runs a command of finetune that kills itself, as SIGKILL does, at one point of an export.

python export_killer.py writing|gate|rename OUT export RUN -o OUT ...
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

POINT, OUT, *COMMAND = sys.argv[1:]
PARTIAL = f"{OUT}.partial"


def kill_at_point(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in ("open", "os.rename"):
        return
    path = str(arguments[0])
    is_weights = path.startswith(f"{PARTIAL}/") and path.endswith((".safetensors", ".gguf"))
    reached = {
        "writing": event == "os.rename" and path.startswith(f"{PARTIAL}/") and path.endswith("s.partial"),
        # Weights that are complete are read by the gate alone.
        "gate": event == "open"
        and is_weights
        and arguments[1] in ("r", "rb")
        and os.path.exists(f"{PARTIAL}/README.md"),
        "rename": event == "os.rename" and path == PARTIAL,
    }
    if reached[POINT]:
        os.kill(os.getpid(), signal.SIGKILL)


sys.addaudithook(kill_at_point)

from finetune.desk.cli import app  # noqa: E402

app(COMMAND)
