"""Programs in forks of a process that has imported what a run imports: a launch without seconds of imports per rank.

`accelerate_launch` and `python` take and return what subprocess.run would. For each pair of config and size,
accelerate's own launcher, itself in a fork, starts once a program that writes its environment down; the ranks get that
environment, and above themselves a process with the launcher's command line. What differs from a launch: modules are
imported already, rank 0 keeps the address book of the group, and the first rank that fails ends the others at once.
Tests of launchers, of signals and of what is imported start real processes.

Run as a program this is the server: a request a line on its standard input, an exit status a line on its output.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread
import contextlib
import ctypes
import gc
import hashlib
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import psutil
from repository import ROOT

DISTRIBUTED = ROOT / "tests" / "trainer" / "distributed"
PRELOADED = ("context_worker", "expert_ranks")  # programs of the ranks that `forkserver` starts
WINGS = {"rl": "finetune.rl.rollouts.run_rows", "desk": "finetune.desk.setup.check"}
TIMEOUT_S = 600.0
TIMEOUT_OF_MATRICES_S = 4 * 3600.0  # as pytest's: a launch trains a hundred cases
GRACE_S = 5.0  # between a rank's SIGTERM, after another failed, and its SIGKILL
ROOM_FOR_COMMAND_LINE = 4096  # bytes; the process that stands for the launcher writes its own there

Done = subprocess.CompletedProcess[str]

# Where the environments of launchers are kept; conftest.py gives all workers of a session the same folder.
environments_folder = Path(tempfile.gettempdir())


def accelerate_launch(config: Path, processes: int, *program: object, **environment: str) -> Done:
    """As `accelerate launch --config_file config --num_processes processes program`. environment: changes to ours."""
    return _forked_launch(config, processes, program, environment, TIMEOUT_S)


def _forked_launch(
    config: Path, processes: int, program: tuple[object, ...], environment: dict[str, str], timeout: float
) -> Done:
    launched = _launcher_variables(config, processes)
    command = [*_launch_command(config, processes), *map(str, program)]
    is_group = "MASTER_PORT" in launched[0]  # be it of one
    with _meeting_point() if is_group else contextlib.nullcontext({}) as meeting_point:
        ranks = [{**os.environ, **variables, **meeting_point, **environment} for variables in launched]
        return _server().run(ranks, list(map(str, program)), command, timeout)


def launch_in_matrices(config: Path, processes: int, *program: object) -> Done:
    """By accelerate's own launcher, two ranks of a shipped config; in forks, which import once, variants and others."""
    if processes != 2 or config.parent != ROOT / "accelerate_configs":
        return _forked_launch(config, processes, program, {}, TIMEOUT_OF_MATRICES_S)
    command = [*_launch_command(config, processes), *map(str, program)]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def python(*program: object, **environment: str) -> Done:
    """As `python program`, such as `-m finetune ...` or a file with its arguments."""
    words = list(map(str, program))
    return _server().run([{**os.environ, **environment}], words, [sys.executable, *words])


def torchrun(processes: int, *program: object) -> Done:
    """As `torchrun --standalone --nproc_per_node processes program`."""
    words = list(map(str, program))
    with _meeting_point() as meeting_point:
        size = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), **meeting_point}
        ranks = [{**os.environ, **size, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
        return _server().run(ranks, words, ["torchrun", *words])


def _launch_command(config: Path, processes: int) -> list[str]:
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    return [*command, "--num_processes", str(processes)]


def _launcher_variables(config: Path, processes: int) -> list[dict[str, str]]:
    """Variables that `accelerate launch` adds for each rank, read by a program that it starts, once in a session."""
    key = hashlib.sha256(f"{processes} {config.read_text(encoding='utf-8')}".encode()).hexdigest()[:16]
    file = environments_folder / f"{key}.json"
    if not file.exists():
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            launcher = _launch_command(config, processes)[1:]
            done = python(*launcher, Path(__file__).resolve(), "--environment-to", folder)
            assert done.returncode == 0, done.stdout + done.stderr
            # As many as the launcher starts, which may be fewer than requested.
            files = sorted(Path(folder).glob("*.json"), key=lambda file: int(file.stem))
            ranks = [json.loads(file.read_text(encoding="utf-8")) for file in files]
            added = [{k: v for k, v in rank.items() if os.environ.get(k) != v} for rank in ranks]
            finished = Path(folder, "added.json")
            finished.write_text(json.dumps(added), encoding="utf-8")
            finished.rename(file)
    return json.loads(file.read_text(encoding="utf-8"))


@contextlib.contextmanager
def _meeting_point() -> Iterator[dict[str, str]]:
    """Where ranks find each other. There is no launcher to keep their address book, so rank 0 does.

    Its port stays bound here, without listening, until the ranks have ended: rank 0 may share it, and no socket that
    asks for any port gets it in the seconds before rank 0 listens.
    """
    with socket.socket() as port:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(("127.0.0.1", 0))
        number = str(port.getsockname()[1])
        yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": number, "TORCHELASTIC_USE_AGENT_STORE": "False"}


def start_forkserver() -> None:
    """Starts the server of multiprocessing's `forkserver` method, unless it runs, with what its ranks import."""
    from multiprocessing import forkserver, set_forkserver_preload

    import pytest

    for name in PRELOADED:
        assert (DISTRIBUTED / f"{name}.py").is_file(), f"{name}: the server would pass over it in silence"
    set_forkserver_preload(list(PRELOADED))
    with pytest.MonkeyPatch.context() as patch:
        # Before Python 3.13 it looks for them nowhere else (https://github.com/python/cpython/issues/117378).
        paths = [str(DISTRIBUTED), *filter(None, sys.path)]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        forkserver.ensure_running()


class Server:
    """The process that forks, as its client sees it."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "-" * ROOM_FOR_COMMAND_LINE]
        own = {"OMP_NUM_THREADS": "1", "THP_MEM_ALLOC_ENABLE": "1"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **own},
            start_new_session=True,
        )
        atexit.register(self.close)

    def run(
        self, ranks: list[dict[str, str]], program: list[str], command: list[str], timeout: float = TIMEOUT_S
    ) -> Done:
        """Raises subprocess.TimeoutExpired, after which the server is gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(timeout, self.close)
        with tempfile.TemporaryDirectory(prefix="finetune-fork-") as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            request = {"ranks": ranks, "program": program, "command": command, "cwd": os.getcwd()}
            self._process.stdin.write(json.dumps({**request, "out": str(out), "err": str(err)}) + "\n")
            self._process.stdin.flush()
            timer.start()
            answer = self._process.stdout.readline()
            timer.cancel()
            texts = [path.read_text(encoding="utf-8", errors="replace") if path.exists() else "" for path in (out, err)]
        if not answer:
            raise subprocess.TimeoutExpired(command, timeout, *texts)
        return subprocess.CompletedProcess(command, int(answer), *texts)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                assert pipe is not None
                pipe.close()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None


_servers: list[Server] = []  # the last one is in use


def _server() -> Server:
    if not _servers or not _servers[-1].is_alive:
        _servers.append(Server())
    return _servers[-1]


# --- in the server


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the imports say is no answer
    sys.path[1:1] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "support")]
    import_everything()
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork() or _stand_for_launcher(request)
        _, status = os.waitpid(pid, 0)
        answers.write(f"{os.waitstatus_to_exitcode(status)}\n")
        answers.flush()


def import_everything() -> None:
    """Imports what a run and `check` import. Raises RuntimeError if that started a thread: a fork would not have it."""
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # pyarrow's allocator would start one
    from finetune.startup import quiet_libraries

    quiet_libraries()
    names = ["bitsandbytes", "deepspeed", "peft", "finetune.training.run"]
    names += [name for wing, name in WINGS.items() if (ROOT / "finetune" / wing).is_dir()]
    for name in names:
        importlib.import_module(name)
    threads = psutil.Process().num_threads()
    if threads != 1:
        raise RuntimeError(f"{threads} threads after the imports: forks would be missing all but one")
    gc.collect()
    gc.freeze()  # every run collects garbage at its end: a fifth of a second for half a million objects of imports


def _stand_for_launcher(request: dict[str, Any]) -> NoReturn:
    """In a fork: start a rank for each environment; end all where one fails, as a launcher does."""
    status = 1
    try:
        _write_command_line(request["command"])
        running = {os.fork() or leave_fork(_become_rank, request, environment) for environment in request["ranks"]}
        status, alone = 0, len(running) == 1
        while running:
            pid, ended = os.wait()
            running.discard(pid)
            code = os.waitstatus_to_exitcode(ended)
            if code and not status:
                status = code if alone else 1
                _end(running)
    finally:
        if sys.exc_info()[0]:
            traceback.print_exc()
        os._exit(abs(status))


def _end(running: set[int]) -> None:
    """SIGTERM, and SIGKILL to what is left of it."""
    for pid in running:
        os.kill(pid, signal.SIGTERM)
    give_up = time.monotonic() + GRACE_S
    while running:
        for pid in list(running):
            if os.waitpid(pid, os.WNOHANG)[0]:
                running.discard(pid)
            elif time.monotonic() > give_up:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _write_command_line(command: list[str]) -> None:
    """Into this process's own, where a rank finds the launcher's: the words it was started with make room for them."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end; fields are counted from the third
    content = b"\0".join(word.encode() for word in command) + b"\0"
    assert len(content) <= end - begin, "make ROOM_FOR_COMMAND_LINE larger"
    ctypes.memmove(begin, content.ljust(end - begin, b"\0"), end - begin)


def leave_fork(work: Callable[..., int], *arguments: object) -> NoReturn:
    """Ends this fork with the status that `work` returns."""
    status = 1
    try:
        status = work(*arguments)
    finally:
        # Never back into the frames of the program that was forked, not even for an error.
        if sys.exc_info()[0]:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _become_rank(request: dict[str, Any], environment: dict[str, str]) -> int:
    """In a fork of the fork: the program, up to the exit."""
    for standard, name in ((1, "out"), (2, "err")):
        descriptor = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, standard)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(environment)
    return _run_program(request["program"])


def _run_program(program: list[str]) -> int:
    """Exit status of `python program`, after what Python waits for and calls at its exit."""
    try:
        if program[0] == "-m":
            sys.argv, sys.path[0] = program[1:], ""
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = program, str(Path(program[0]).resolve().parent)
            runpy.run_path(program[0], run_name="__main__")
        status = 0
    except SystemExit as done:
        status = done.code if isinstance(done.code, int) else int(done.code is not None)
        if isinstance(done.code, str):
            print(done.code, file=sys.stderr)
    concurrent.futures.thread._python_exit()  # what Python's own exit calls first: idle threads of pools end
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    return status


if __name__ == "__main__":
    if sys.argv[1] == "--environment-to":
        rank = os.environ.get("RANK", "0")
        Path(sys.argv[2], f"{rank}.json").write_text(json.dumps(dict(os.environ)), encoding="utf-8")
    else:
        serve()
