"""Processes of a run, started to be killed: really launched, or forked with the launcher's environment.

Starting Python and importing torch is nearly all the time of a short run. A fork of a process that has imported
everything begins at once, and differs from a launch only where this file says so. Run as a program under `accelerate
launch`, it writes that environment down.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import psutil
from forks import leave_fork
from repository import ROOT

EIGHT = ("pp_fsdp2_tp",)  # configs of eight processes; others have two
LAUNCHER_NOTICES_S = 0.2  # at most, until it ends the ranks that are left
NOTICED_S = 60.0  # at most, until the processes that were left by a kill have ended
LAUNCHER_ALONE = "launched, the launcher"

Environment = dict[str, str]


class Failed(Exception):
    """A start of the run that ended badly by itself, or did not end."""


class Forked:
    """Ranks by fork. This process plays the launcher: where one ends badly, it ends the others."""

    def __init__(self, environments: list[Environment], arguments: list[str], log: Path):
        port = str(free_port())
        # There is no launcher to keep the ranks' address book, so rank 0 does.
        own = {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "False"}
        self._running: list[int] = []
        self._status = 0
        for environment in environments:
            self._running.append(_fork({**environment, **own}, arguments, log))

    def status(self) -> int | None:
        """None while it runs, else its exit status."""
        for pid in list(self._running):
            self._reap(pid, os.WNOHANG)
        if self._status:
            self.close()
        return None if self._running else self._status

    def strike(self, rng: random.Random) -> str:
        """SIGKILL to one rank or to all; returns which, once they are dead."""
        everyone = rng.random() < 0.5
        victims = list(self._running) if everyone else [rng.choice(self._running)]
        self._kill(victims)
        return "forked, all ranks" if everyone else "forked, one rank"

    def finish(self, rng: random.Random) -> None:
        """End the ranks that are left, which meanwhile notice the loss or do not."""
        if self._running:
            time.sleep(rng.uniform(0, LAUNCHER_NOTICES_S))
        self.close()

    def close(self) -> None:
        self._kill(list(self._running))

    def _kill(self, pids: list[int]) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            self._reap(pid)

    def _reap(self, pid: int, flags: int = 0) -> None:
        ended, status = os.waitpid(pid, flags)
        if ended:
            self._running.remove(pid)
            self._status = self._status or abs(os.waitstatus_to_exitcode(status))


class Launched:
    """Ranks by `accelerate launch`."""

    def __init__(self, config: str, environment: Environment, arguments: list[str], log: Path):
        command = [*_launch_command(config), "-m", "finetune", *arguments]
        with log.open("ab") as file:
            self._launcher = psutil.Popen(
                command, env={**os.environ, **environment}, stdout=file, stderr=subprocess.STDOUT
            )
        self._ranks: list[psutil.Process] = []

    def status(self) -> int | None:
        """None while it runs, else its exit status."""
        return self._launcher.poll()

    def strike(self, rng: random.Random) -> str:
        """SIGKILL to one rank, to the launcher, or to both and all below; returns which, once they are dead."""
        self._ranks = self._launcher.children()
        below = self._launcher.children(recursive=True)
        victims = {LAUNCHER_ALONE: [self._launcher], "launched, all": [self._launcher, *below]}
        if self._ranks:
            victims["launched, one rank"] = [rng.choice(self._ranks)]
        way = rng.choice(sorted(victims))
        _kill(victims[way])
        return way

    def finish(self, rng: random.Random) -> None:
        """The launcher notices and ends the rank that is left; ranks without a launcher end by themselves.

        Raises Failed where they do not: whoever starts the run again would have it twice.
        """
        give_up = time.monotonic() + NOTICED_S
        while not all(map(_is_dead, (self._launcher, *self._ranks))):
            if time.monotonic() > give_up:
                self.close()
                raise Failed(f"processes that were left did not end within {NOTICED_S:.0f} s of the kill")
            time.sleep(0.01)

    def close(self) -> None:
        alive = self._launcher.children(recursive=True) if self._launcher.poll() is None else []
        _kill([self._launcher, *self._ranks, *alive])


Killable = Forked | Launched


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    while not all(map(_is_dead, processes)):
        time.sleep(0.001)


def _is_dead(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _fork(environment: Environment, arguments: list[str], log: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    return os.fork() or leave_fork(_become_rank, environment, arguments, log)


def _become_rank(environment: Environment, arguments: list[str], log: Path) -> int:
    """In the fork: `python -m finetune`, in a launcher's environment, up to the exit; then the threads that Python
    would wait for."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["finetune", *arguments]

    try:
        runpy.run_module("finetune", run_name="__main__")
        status = 0
    except SystemExit as done:
        status = done.code if isinstance(done.code, int) else int(done.code is not None)
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    return status


def in_fork(work: Callable[..., object], *arguments: object) -> None:
    """Do something that may start threads, elsewhere. Raises RuntimeError where it failed."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work(*arguments)
            status = 0
        finally:
            if sys.exc_info()[0]:
                traceback.print_exc()
            os._exit(status)
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError(f"{work.__name__} failed")


def free_port() -> int:
    """Below the range that outgoing connections take theirs from."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port between 20000 and 32000")


def launcher_environments(config: str, folder: Path) -> list[Environment]:
    """What each rank finds in its environment under `accelerate launch`: read from a real one."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [*_launch_command(config), str(Path(__file__).resolve()), str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    files = [folder / f"environment-{rank}.json" for rank in range(processes(config))]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def config_file(config: str) -> str:
    return str(ROOT / "accelerate_configs" / f"{config}.yaml")


def processes(config: str) -> int:
    return 8 if config in EIGHT else 2


def _launch_command(config: str) -> list[str]:
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    return [
        *command,
        "--config_file",
        config_file(config),
        "--num_processes",
        str(processes(config)),
    ]


if __name__ == "__main__":
    Path(sys.argv[1], f"environment-{os.environ['RANK']}.json").write_text(json.dumps(dict(os.environ)))
