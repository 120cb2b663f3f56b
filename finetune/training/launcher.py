"""`finetune launch`: `accelerate launch` that forwards signals to its processes and prints no traceback of its own.

    python -m finetune launch [--config-file FILE] [--num-processes N] RECIPE [KEY=VALUE]...
    python -m finetune launch [options of accelerate launch] -m finetune train|reference|doctor ...
    python -m finetune launch torchrun [options of torchrun] -m finetune train RECIPE ... --config-file FILE

    75   stopped by SIGTERM, SIGINT or SIGUSR1, and saved: run the same command again
    else the status of the process that failed first: 2 for errors that the user can fix, 1 for a failure

`accelerate launch` reports 1 for a run that has saved and asks to be started again, dies of SIGUSR1, prints a traceback
of its own below each message, and at SIGTERM gives its processes thirty seconds. Here it has a session of its own, so
Ctrl-C does not reach it, and its children get each signal instead of it. Each signal is answered here at once, because
this process is idle. Before the first step children get SIGTERM for it, which leaves no traceback of one that has no
handler yet. A second signal ends them at once, and after five seconds whatever is left. The launcher ends with this
process, also if this is killed; its ranks notice, save and stop. Only a launcher that would restart ended processes
(`--max_restarts`) gets the signal itself, as SIGTERM, which it forwards; it has ten minutes for it. So one machine of
an elastic launch can be removed: its ranks and all others save, and the others continue.

Run as a program, this module is that launcher: accelerate's or torch's, without its tracebacks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from finetune.engine.launch import read_config_file
from finetune.errors import STOPPED_STATUS, UserError
from finetune.recipe import load_recipe
from finetune.recipe.load import LoadRecipe
from finetune.shipped import here_or_shipped
from finetune.tracking.metrics import read_status
from finetune.training.signals import ANSWERED_VARIABLE, ECHO_S, SIGNALS, answer, answer_again, say

ACCELERATE, TORCHRUN = "accelerate.commands.launch", "torch.distributed.run"
PROGRAM = ("-m", "finetune")
DEFAULTS = {
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",  # s, if the launcher itself is signaled
    # Otherwise a returning machine waits for an address that the others have already agreed on
    # (https://github.com/pytorch/pytorch/issues/135712).
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}

_ENDS_S = 5.0  # after a second signal
_signalled = threading.Event()  # in the launcher: `finetune launch` has received a signal, and forwards it


def launch(
    words: Sequence[str],
    config_file: Path | None = None,
    num_processes: int | None = None,
    load: LoadRecipe = load_recipe,
) -> int:
    """Starts the processes and waits for them; returns the exit status. Raises UserError before starting any.

    words: RECIPE [KEY=VALUE]..., or options of a launcher and the program after `-m finetune`, see above.
    """
    module, options, program = _split(words)
    run_dir: Path | None = None
    if program[:1] == ["train"]:
        arguments = [word for word in program[1:] if not word.startswith("-")]
        if not arguments:
            raise UserError("launch: `train` needs a recipe. Fix: add one, as in `-m finetune train RECIPE`")
        run = load(Path(arguments[0]), arguments[1:]).run
        run_dir = Path(run.dir) / run.name
    if config_file is not None:
        config_file = here_or_shipped(config_file)
        read_config_file(str(config_file), num_processes)
    if module == TORCHRUN:
        program = [*program, *(["--config-file", str(config_file)] if config_file else [])]
        sizes = ["--nproc_per_node", str(num_processes)] if num_processes else []
    else:
        sizes = ["--config_file", str(config_file)] if config_file else []
        sizes += ["--num_processes", str(num_processes)] if num_processes else []
    before = _written_at(run_dir)

    def steps_begun() -> bool:
        return run_dir is not None and _written_at(run_dir) != before

    launched = _Launched([module, *sizes, *options, *PROGRAM, *program], steps_begun)
    status = launched.wait()
    ended = read_status(run_dir) if run_dir and steps_begun() else None
    not_begun = bool(run_dir and launched.is_signalled and ended is None)
    return STOPPED_STATUS if status and (not_begun or ended == "stopped") else status


def _split(words: Sequence[str]) -> tuple[str, list[str], list[str]]:
    """Returns the launcher's module, its options, and the arguments of `finetune`. Raises UserError.

    >>> _split(["lora.yaml", "optimizer.lr=1e-4"])
    ('accelerate.commands.launch', [], ['train', 'lora.yaml', 'optimizer.lr=1e-4'])
    >>> _split(["torchrun", "--nnodes", "2", "-m", "finetune", "train", "lora.yaml"])
    ('torch.distributed.run', ['--nnodes', '2'], ['train', 'lora.yaml'])
    """
    module, words = (TORCHRUN, list(words[1:])) if words[:1] == ["torchrun"] else (ACCELERATE, list(words))
    starts = [i for i in range(len(words)) if tuple(words[i : i + 2]) == PROGRAM]
    if starts:
        return module, words[: starts[0]], words[starts[0] + 2 :]
    if module == TORCHRUN or not words or words[0].startswith("-"):
        raise UserError(
            f"launch: no program. Fix: give a recipe, or --model and --data for a new one, or end "
            f"{words[0] + ' ...' if words else 'the options'} with `-m finetune train RECIPE`"
        )
    return module, [], ["train", *words]


def _written_at(run_dir: Path | None) -> int | None:
    """Returns the modification time of status.json in nanoseconds."""
    try:
        return None if run_dir is None else (run_dir / "status.json").stat().st_mtime_ns
    except OSError:
        return None


class _Launched:
    """The launcher's process, and the signals that it is to get. Made on the main thread, once."""

    def __init__(self, words: list[str], steps_begun: Callable[[], bool]):
        """words: module and its arguments."""
        self._restarts = any(word.replace("-", "_").startswith("__max_restarts") for word in words)
        self._steps_begun, self._first_at = steps_begun, 0.0
        self._last: int | None = None  # the last signal
        self._ends = False
        self._killed = False
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # inherited: schedulers signal the launcher as well
        reading, self._alive = os.pipe()  # the launcher reads its end, when this process is gone
        command = [sys.executable, "-m", "finetune.training.launcher", str(reading), *words]
        environment = {**DEFAULTS, **os.environ, ANSWERED_VARIABLE: "1"}
        self._process = subprocess.Popen(command, start_new_session=True, env=environment, pass_fds=[reading])
        os.close(reading)
        for number in SIGNALS:
            signal.signal(number, self._receive)

    @property
    def is_signalled(self) -> bool:
        return self._last is not None

    def wait(self) -> int:
        """Returns the exit status."""
        status = self._process.wait()
        if self._killed and self._last is not None:
            return 128 + self._last
        if self.is_signalled and status == -signal.SIGTERM:  # it had started no process
            return 128 - status
        return _status("the launcher", status)

    def _receive(self, number: int, _frame: object) -> None:
        """Answers a signal, and forwards it to the training processes; to the launcher if it has started none or would
        restart them."""
        name, now = signal.Signals(number).name, time.monotonic()
        if self._last is None:
            self._first_at = now
            say(answer(name, self._steps_begun()))
        elif now - self._first_at > ECHO_S and not self._ends:
            self._ends = True
            say(answer_again(name))
            timer = threading.Timer(_ENDS_S, self._kill)
            timer.daemon = True
            timer.start()
        self._last = number
        with contextlib.suppress(OSError):  # it has ended
            os.write(self._alive, b".")
        ranks = _below(self._process.pid, recursive=False)
        if self._restarts or not ranks:
            self._process.send_signal(signal.SIGTERM)
            return
        forwarded = number if self._steps_begun() else signal.SIGTERM
        for process in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(forwarded)

    def _kill(self) -> None:
        """Kills the launcher and all below it: a stopped process, or one in a long call, ends by nothing else."""
        below = _below(self._process.pid, recursive=True)
        self._killed = self._process.poll() is None
        self._process.kill()
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _below(pid: int, recursive: bool) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive)
    except psutil.NoSuchProcess:
        return []


# --- the launcher


def run_launcher(module: str, arguments: Sequence[str]) -> int:
    """Runs a launcher's module; returns the exit status of the process that failed first, 0 if none did."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the ranks have reported the error
    sys.argv = [module, *(_with_defaults(arguments) if module == ACCELERATE else arguments)]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except subprocess.CalledProcessError as error:
        return _status("the process", error.returncode)
    except ChildFailedError as error:
        # In the order of detection; processes that the launcher then ended come later.
        rank, first = next(iter(error.failures.items()))
        return _status(f"rank {rank}", first.exitcode)
    except SignalException as error:
        return 128 + error.sigval
    except (ValueError, ImportError) as error:  # accelerate's error for incompatible options
        print(f"error: {module}: {error}", file=sys.stderr)
        return 2
    return 0


def _with_defaults(arguments: Sequence[str]) -> list[str]:
    """Adds accelerate's defaults (a process for each device), without its warnings, unless a launch is described."""
    import torch
    from accelerate.commands.config.config_args import default_config_file

    words = list(arguments[: arguments.index("-m")])
    is_described = os.path.isfile(default_config_file) or (words and (len(words) > 2 or words[0] != "--num_processes"))
    if is_described:
        return list(arguments)
    count = int(words[1]) if words else max(1, torch.accelerator.device_count())
    several = ["--multi_gpu", "--main_process_port", "0"] if count > 1 else []
    fixed = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", *several]
    return ["--num_processes", str(count), *fixed, *arguments[len(words) :]]


def _status(process: str, code: int) -> int:
    """Returns an exit status as a shell would; prints the signal that ended the process."""
    if code >= 0:
        return code
    if _signalled.is_set() and code == -signal.SIGTERM:  # the answer to the signal has said so
        return 128 - code
    killed = " Most often the system does so for lack of memory: see `dmesg`" if code == -signal.SIGKILL else ""
    print(f"error: {process} was ended by {signal.Signals(-code).name}.{killed}", file=sys.stderr)
    return 128 - code


def _end_with(parent: int) -> None:
    """Ends this process when the other end of a pipe is closed: its parent is gone, if by a SIGKILL."""
    os.set_inheritable(parent, False)  # ranks end by themselves, after a save

    def wait() -> None:
        while os.read(parent, 1):
            _signalled.set()
        os._exit(STOPPED_STATUS)

    threading.Thread(target=wait, name="parent", daemon=True).start()


if __name__ == "__main__":
    _end_with(int(sys.argv[1]))
    raise SystemExit(run_launcher(sys.argv[2], sys.argv[3:]))
