"""Commands that the studio runs: each a child process in a session of its own, that goes on without the studio.

    .finetune-studio/jobs/3/   job.json      its words, process, and what it is for
                               output.txt    what it prints
                               status.txt    its exit status, at its end

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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from finetune.desk.studio.project_folder import STUDIO

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
    created: float  # of the process, by the system's clock: another may have its number later
    page: str | None = None  # that the command writes
    about: str | None = None  # the run or recipe that it is for


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
        place = self._root / str(number)
        place.mkdir()
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
        created = psutil.Process(child.pid).create_time()
        job = StartedCommand(number, action, tuple(words), time.time(), child.pid, created, page, about)
        (place / "job.json").write_text(json.dumps(asdict(job)), encoding="utf-8")
        return job

    def numbers(self) -> list[int]:
        """Returns the numbers of all commands, the newest first."""
        names = (path.name for path in self._root.glob("*")) if self._root.is_dir() else ()
        return sorted((int(name) for name in names if name.isdecimal()), reverse=True)

    def read(self, number: int) -> StartedCommand | None:
        """Returns a command; None if there is none of this number, or its file is damaged."""
        try:
            values = json.loads((self._root / str(number) / "job.json").read_text(encoding="utf-8"))
            return StartedCommand(**{**values, "words": tuple(values["words"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def all(self) -> list[StartedCommand]:
        return [job for number in self.numbers() if (job := self.read(number)) is not None]

    def status(self, job: StartedCommand) -> int | None:
        """Returns the exit status; None while it runs; -1 if it ended without one, with the machine for instance."""
        try:
            status = int((self._root / str(job.number) / "status.txt").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            try:
                process = psutil.Process(job.pid)
                same = abs(process.create_time() - job.created) < 1
                is_alive = same and process.status() != psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                is_alive = False
            if is_alive:
                return None
            status = -1
        if (child := self._children.get(job.number)) is not None:
            child.wait()  # else it stays a zombie; it has ended, or wrote its status as the last it does
        return status

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
            os.killpg(job.pid, signal.SIGINT)
