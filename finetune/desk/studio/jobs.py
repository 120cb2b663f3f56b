"""Commands that the studio runs: each a child process in a session of its own, that goes on without the studio.

    .finetune-studio/jobs/3/   job.json      its words, process, and what it is for
                               output.txt    what it prints
                               stop.txt      if someone pressed Stop
                               status.txt    its exit status, at its end; -1: it was killed with its shell

A shell waits for the command and writes its exit status, so that a later studio knows it, too.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from finetune.desk.studio.project_folder import STUDIO
from finetune.utils import write_atomically

# Ctrl-C reaches the whole group: the command handles it, and the shell waits. A trap, unlike an ignored signal, is not
# inherited (https://pubs.opengroup.org/onlinepubs/9799919799/utilities/V3_chap02.html#trap).
_KEEPER = 'trap : INT TERM; "$@"; echo $? > "$0"'
_COLUMNS = "110"  # of tables that commands print
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_MOST_OUTPUT = 200_000  # characters of one answer


@dataclass(frozen=True)
class StartedCommand:
    number: int
    action: str
    words: tuple[str, ...]  # of python
    begun: float
    pid: int
    process: str  # which process had that number, see `process_identity`
    page: str | None = None  # that the command writes
    about: str | None = None  # the run or recipe that it is for
    before: int | None = None  # time of the run's status.json when the command was started, in nanoseconds


def process_identity(pid: int) -> str | None:
    """Returns what no other process with this number has; None if there is no such process. Not its time of creation:
    that moves when the system's clock is set."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot}:{fields[19]}"  # starttime, in ticks since the boot (man 5 proc)
    except ProcessLookupError:
        return None
    except OSError:  # no such process, or a system without /proc
        try:
            return str(psutil.Process(pid).create_time())
        except psutil.NoSuchProcess:
            return None


def _started_command(number: int, values: Mapping[str, Any]) -> StartedCommand:
    """Raises TypeError or ValueError if these are not the values of a command of this number."""
    job = StartedCommand(**{**values, "words": tuple(values["words"])})
    texts = [*job.words, job.action, job.process, job.page or "", job.about or ""]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError
    for text in texts:
        text.encode()  # half a surrogate pair is in no command
    if type(job.pid) is not int or job.number != number or not 1 < job.pid < 2**31:
        raise ValueError
    if not isinstance(job.begun, int | float) or not isinstance(job.before, int | None):
        raise TypeError
    return job


def command_line(words: Sequence[str]) -> str:
    """Returns a command as one would type it."""
    return shlex.join(["python", *words])


class Jobs:
    """The commands of a folder. Reads those of earlier studios as well."""

    def __init__(self, folder: Path):
        self.folder, self._root = folder, folder / STUDIO / "jobs"
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, action: str, words: Sequence[str], page: str | None, about: str | None) -> StartedCommand:
        """Starts `python WORDS...` in the folder."""
        self._root.mkdir(parents=True, exist_ok=True)
        (self._root.parent / ".gitignore").write_text("*\n", encoding="utf-8")
        number = max(self.numbers(), default=0) + 1
        while True:
            place = self._root / str(number)
            try:
                place.mkdir()
                break
            except FileExistsError:  # of another studio in this folder, which took it just now
                number += 1
        before = written_at(self.folder / about) if about else None
        command = ["sh", "-c", _KEEPER, str(place / "status.txt"), sys.executable, *words]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": _COLUMNS}
        with (place / "output.txt").open("wb") as output:
            child = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._children[number] = child
        process = process_identity(child.pid) or ""  # it stays at least as a zombie
        job = StartedCommand(number, action, tuple(words), time.time(), child.pid, process, page, about, before)
        write_atomically(place / "job.json", json.dumps(asdict(job)))
        return job

    def numbers(self) -> list[int]:
        """Returns the numbers of all commands, the newest first."""
        names = (path.name for path in self._root.glob("*")) if self._root.is_dir() else ()
        return sorted((int(name) for name in names if name.isdecimal()), reverse=True)

    def read(self, number: int) -> StartedCommand | None:
        """Returns a command; None if there is none of this number, or its file is damaged."""
        try:
            values = json.loads((self._root / str(number) / "job.json").read_text(encoding="utf-8"))
            return _started_command(number, values)
        except (OSError, ValueError, TypeError, LookupError, RecursionError):
            return None

    def all(self) -> list[StartedCommand]:
        return [job for number in self.numbers() if (job := self.read(number)) is not None]

    def damaged(self) -> list[str]:
        """Returns the files of commands that cannot be read, relative to the folder."""
        files = [self._root / str(number) / "job.json" for number in self.numbers() if self.read(number) is None]
        return [str(file.relative_to(self.folder)) for file in files if file.exists()]

    def status(self, job: StartedCommand) -> int | None:
        """Returns the exit status; None while it runs; -1 if it ended without one, with the machine for instance."""
        child = self._children.get(job.number)
        has_ended = child is not None and child.poll() is not None
        if (status := self._written_status(job)) is not None:
            if child is not None and not has_ended:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(1)  # else it stays a zombie; writing its status was the last it did
            return status
        if child is not None and not has_ended:
            return None
        if child is None and process_identity(job.pid) == job.process and not _is_zombie(job.pid):
            return None
        if (status := self._written_status(job)) is not None:  # as the last that it did
            return status
        with suppress(OSError):
            (self._root / str(job.number) / "status.txt").write_text("-1\n", encoding="utf-8")
        return -1

    def _written_status(self, job: StartedCommand) -> int | None:
        try:
            return int((self._root / str(job.number) / "status.txt").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def ended_at(self, job: StartedCommand) -> int | None:
        """Returns when a command ended, in nanoseconds of the file system's clock; None if that is not known."""
        try:
            return (self._root / str(job.number) / "status.txt").stat().st_mtime_ns
        except OSError:
            return None

    def running(self) -> list[StartedCommand]:
        return [job for job in self.all() if self.status(job) is None]

    def output(self, job: StartedCommand, start: int = 0) -> tuple[str, int]:
        """Returns what a command has printed from a byte on, and the byte to continue from."""
        has_ended = self.status(job) is not None  # before its last words are read
        try:
            with (self._root / str(job.number) / "output.txt").open("rb") as file:
                file.seek(start)
                content = file.read(_MOST_OUTPUT)
        except OSError:
            return "", start
        is_last = has_ended and len(content) < _MOST_OUTPUT
        lines = content[: content.rfind(b"\n") + 1]  # no line, and so no character, in parts
        whole = content if is_last or (not lines and len(content) == _MOST_OUTPUT) else lines
        text = _COLOURS.sub("", whole.decode("utf-8", "replace"))
        return text, start + len(whole)

    def stop(self, job: StartedCommand) -> None:
        """Interrupts a command as Ctrl-C does: a training saves and ends; a second time ends it at once."""
        if self.status(job) is None:
            (self._root / str(job.number) / "stop.txt").touch()
            with suppress(ProcessLookupError):  # it ended meanwhile
                os.killpg(job.pid, signal.SIGINT)

    def is_stop_requested(self, job: StartedCommand) -> bool:
        return (self._root / str(job.number) / "stop.txt").exists()

    def last_launches(self) -> dict[str, StartedCommand]:
        """Returns for each run the newest command that trains it."""
        return {job.about: job for job in reversed(self.all()) if job.action == "launch" and job.about}


def _is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def written_at(run: Path) -> int | None:
    """Returns the modification time of a run's status.json in nanoseconds: it changes when a launch begins its steps,
    and when it ends."""
    try:
        return (run / "status.json").stat().st_mtime_ns
    except OSError:
        return None
