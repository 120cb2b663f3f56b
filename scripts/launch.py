"""`accelerate launch` for schedulers: signals reach the training processes, and the exit status says what to do next.

    python scripts/launch.py --config_file accelerate_configs/ddp.yaml -m finetune train RECIPE [KEY=VALUE]...

    75   stopped by SIGTERM, SIGINT or SIGUSR1, and saved: start the same command again
    0    the run is complete; anything else is the launcher's own, 1 for every failure

`accelerate launch` reports 1 for a run that has saved and asks to be started again, dies of SIGUSR1, and at SIGTERM
gives its processes thirty seconds. Here it has a session of its own, and its children get the signal instead of it. A
second signal ends them at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from finetune.cli import quiet_libraries
from finetune.errors import STOPPED_STATUS, UserError
from finetune.recipe import load_recipe
from finetune.tracking.status import read_status
from finetune.training.stop import SIGNALS


def run_folder(arguments: list[str]) -> Path:
    """Of the recipe after `-m finetune train`. Raises UserError where there is none."""
    if "train" not in arguments[:-1]:
        raise UserError("usage: launch.py [options of accelerate launch] -m finetune train RECIPE [KEY=VALUE]...")
    recipe, *overrides = arguments[arguments.index("train") + 1 :]
    run = load_recipe(Path(recipe), overrides).run
    return Path(run.dir) / run.name


def pass_on(launcher: subprocess.Popen[bytes], number: int) -> None:
    """To the training processes; to the launcher itself where it has not started any."""
    children = psutil.Process(launcher.pid).children()
    for process in children or [psutil.Process(launcher.pid)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def main() -> int:
    quiet_libraries()
    arguments = sys.argv[1:]
    try:
        folder = run_folder(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    (folder / "status.json").unlink(missing_ok=True)
    command = [sys.executable, "-m", "accelerate.commands.launch", *arguments]
    environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600", **os.environ}  # s, where someone signals it all the same
    launcher = subprocess.Popen(command, start_new_session=True, env=environment)
    received: list[int] = []
    for number in SIGNALS:
        signal.signal(number, lambda number, _frame: (received.append(number), pass_on(launcher, number)))
    status = launcher.wait()
    ended = read_status(folder)
    stopped = ended == "stopped" or (received and ended is None)  # none: it had not begun
    return STOPPED_STATUS if status and stopped else status


if __name__ == "__main__":
    raise SystemExit(main())
