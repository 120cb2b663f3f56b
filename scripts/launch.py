"""`accelerate launch` for schedulers: signals reach the training processes, and the exit status says what to do next.

    python scripts/launch.py --config_file accelerate_configs/ddp.yaml -m finetune train RECIPE [KEY=VALUE]...
    python scripts/launch.py torchrun --nnodes 1:4 ... -m finetune train RECIPE [KEY=VALUE]... --config-file FILE

    75   stopped by SIGTERM, SIGINT or SIGUSR1, and saved: run the same command again
    0    the run is complete; anything else is the launcher's own, 1 for every failure

`accelerate launch` reports 1 for a run that has saved and asks to be started again, dies of SIGUSR1, and at SIGTERM
gives its processes thirty seconds. Here it has a session of its own, and its children get the signal instead of it. A
second signal ends them at once. Only a launcher that would restart ended processes (`--max_restarts`) gets the
signal itself, as SIGTERM, which it passes on; it is given ten minutes for it. So one machine of an elastic launch can
be taken away: its ranks and all others save, and the others go on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from finetune.errors import STOPPED_STATUS, UserError
from finetune.recipe import load_recipe
from finetune.startup import quiet_libraries
from finetune.tracking.metrics import read_status
from finetune.training.signals import SIGNALS

DEFAULTS = {
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",  # s, where the launcher itself is signalled
    # Or a machine that comes back waits for an address that the others have long agreed on
    # (https://github.com/pytorch/pytorch/issues/135712).
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def run_folder(arguments: list[str]) -> Path:
    """Of the recipe after `-m finetune train`. Raises UserError where there is none."""
    if "train" not in arguments[:-1]:
        raise UserError("usage: launch.py [options of accelerate launch] -m finetune train RECIPE [KEY=VALUE]...")
    recipe, *overrides = _without_config_file(arguments[arguments.index("train") + 1 :])
    run = load_recipe(Path(recipe), overrides).run
    return Path(run.dir) / run.name


def _without_config_file(words: list[str]) -> list[str]:
    """
    >>> _without_config_file(["r.yaml", "a.b=1", "--config-file", "ddp.yaml"])
    ['r.yaml', 'a.b=1']
    """
    values = {i + 1 for i, word in enumerate(words) if word == "--config-file"}
    return [word for i, word in enumerate(words) if i not in values and not word.startswith("--config-file")]


def command(arguments: list[str]) -> list[str]:
    """The launcher's, from what stands behind launch.py."""
    if arguments[:1] == ["torchrun"]:
        return [sys.executable, "-m", "torch.distributed.run", *arguments[1:]]
    return [sys.executable, "-m", "accelerate.commands.launch", *arguments]


def restarts(arguments: list[str]) -> bool:
    """Whether the launcher restarts processes that have ended."""
    return any(word.replace("-", "_").startswith("__max_restarts") for word in arguments)


def pass_on(launcher: subprocess.Popen[bytes], number: int, restarts: bool) -> None:
    """To the training processes; to the launcher itself where it has not started any, or would start others."""
    children = psutil.Process(launcher.pid).children()
    if restarts or not children:
        launcher.send_signal(signal.SIGTERM)
        return
    for process in children:
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
    environment = {**DEFAULTS, **os.environ}
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # inherited: schedulers signal the launcher as well, which would die
    launcher = subprocess.Popen(command(arguments), start_new_session=True, env=environment)
    received: list[int] = []
    restarts_processes = restarts(arguments)
    for number in SIGNALS:
        signal.signal(
            number, lambda number, _frame: (received.append(number), pass_on(launcher, number, restarts_processes))
        )
    status = launcher.wait()
    ended = read_status(folder)
    stopped = ended == "stopped" or (received and ended is None)  # none: it had not begun
    return STOPPED_STATUS if status and stopped else status


if __name__ == "__main__":
    raise SystemExit(main())
