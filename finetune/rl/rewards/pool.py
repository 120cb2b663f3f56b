"""Processes that call one reward function: started fresh, killed at the time limit, replaced, outcomes in order.

completions -> pickled frames -> `child.py`, whichever process is free -> outcomes, in the order of the completions
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from finetune.errors import UserError, without_secrets
from finetune.rl.rewards.completion import Completion, Outcome

START_S = 120.0  # the import of the user's file, with whatever it loads
_OUTPUT_BYTES = 2000  # of what a call prints, kept for the log
_REPLY_BYTES = 1 << 20
_KINDS = ("raised", "not_a_number", "unanswerable")  # of failures that `child.py` replies with
FORGED = "wrote to the pipe of replies, which is not its own"
WHAT_CHARACTERS = 2000  # of the line of a failure


class NoReply(Exception):
    """Failure of a process to answer; it has to be replaced. args: kind of failure, one line."""


class Child:
    """One process of `child.py`, or of another module with such a `main`."""

    def __init__(self, settings: Mapping[str, Any], module: str = "finetune.rl.rewards.child"):
        """Raises UserError if the user's code cannot be loaded."""
        request, self._requests = os.pipe()
        self._replies, reply = os.pipe()
        self._output, output = os.pipe()
        path = [os.path.abspath(entry) for entry in sys.path]  # "" is the folder of the moment
        program = f"import sys; sys.path[:] = {path!r}; from {module} import main; main({request}, {reply})"
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(request, reply),
                env=_environment(),
                start_new_session=True,  # Ctrl-C is for the run
            )
        finally:
            for descriptor in (request, reply, output):
                os.close(descriptor)
        os.set_blocking(self._requests, False)
        os.set_blocking(self._output, False)
        self.notes: list[str] = []
        self._asked = 0
        try:
            started = self.ask(dict(settings), START_S)
        except NoReply as failure:
            text = self.output.decode("utf-8", "replace").strip()
            printed = f"\nIt printed:\n{text}" if text else ""
            problem = f"{settings['place']}: {failure.args[1]} while it was loaded"
            fix = f"Fix: correct it, so that it loads within {START_S:g} s and does not end its process"
            raise UserError(f"{problem}. {fix}{printed}") from None
        except BaseException:
            self.end()
            raise
        if "problem" in started:
            self.end()
            details = f"\n{started['details']}" if started.get("details") else ""
            raise UserError(f"{settings['place']}: {started['problem']}{details}")
        self.notes = list(started.get("notes", ()))

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Returns the reply to a request. Raises NoReply, and ends the process, if there is none in time."""
        self._asked += 1
        content, self.output, reply = pickle.dumps({**request, "id": self._asked}), bytearray(), bytearray()
        deadline, waiting = time.monotonic() + seconds, memoryview(len(content).to_bytes(8, "big") + content)
        with selectors.DefaultSelector() as selector:
            selector.register(self._requests, selectors.EVENT_WRITE)
            selector.register(self._output, selectors.EVENT_READ)
            selector.register(self._replies, selectors.EVENT_READ)
            while len(reply) < 8 or len(reply) < 8 + int.from_bytes(reply[:8], "big") <= _REPLY_BYTES:
                if (left := deadline - time.monotonic()) <= 0:
                    raise self._no_reply("timeout", f"gave no answer in {seconds:g} s")
                for key, _ in selector.select(left):
                    if key.fd == self._requests:
                        try:
                            waiting = waiting[os.write(self._requests, waiting) :]
                        except BrokenPipeError:
                            raise self._no_reply("died") from None
                        if not waiting:
                            selector.unregister(self._requests)
                    elif key.fd == self._output:
                        if not self._drain():
                            selector.unregister(self._output)
                    elif chunk := os.read(self._replies, 1 << 16):
                        reply += chunk
                    else:
                        raise self._no_reply("died")
        self._drain()
        size = int.from_bytes(reply[:8], "big")
        with contextlib.suppress(ValueError, RecursionError):
            answered = json.loads(reply[8:])
            if len(reply) == 8 + size and isinstance(answered, dict) and answered.get("id") == self._asked:
                return answered
        raise self._no_reply("died", FORGED)

    def _drain(self) -> bool:
        """Reads what was printed, of which the beginning is kept; False at the end of the pipe."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(64):  # a process that prints without end must not keep us here
                if not (chunk := os.read(self._output, 1 << 16)):
                    return False
                self.output += chunk[: max(0, _OUTPUT_BYTES - len(self.output))]
        return True

    def _no_reply(self, kind: str, what: str = "") -> NoReply:
        """Ends the process and returns the failure; what: by default the status with which the process ended."""
        if not what:
            try:
                code = self._process.wait(1)
                name = signal.Signals(-code).name if code < 0 else str(code)
                what = f"ended its process ({'signal ' if code < 0 else 'status '}{name})"
            except subprocess.TimeoutExpired:
                what = "closed the pipes of its process"
        self._drain()
        self.end()
        return NoReply(kind, what)

    def kill(self) -> None:
        """Ends the process and those it started; a thread that waits for it gets NoReply."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended; macOS says so of zombies
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        self.kill()
        self._process.wait()
        for descriptor in (self._requests, self._replies, self._output):
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _environment() -> dict[str, str]:
    """Returns the variables of a process that is no rank of the run, and has sets in one order in every process."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "TORCHELASTIC_"))}
    return {**{name: value for name, value in kept.items() if name not in ours}, "PYTHONHASHSEED": "0"}


class Pool:
    """Processes for one function. A context manager: the first process starts on entry, the others when they have
    something to do. settings: see `child.load`, and `place`, the function's name in messages."""

    def __init__(self, settings: Mapping[str, Any], processes: int, seconds: float, stops: bool):
        """stops: no completion is handed out after one that failed."""
        self._settings, self._seconds, self._stops = settings, seconds, stops
        self._children: list[Child | None] = [None] * processes
        self.notes: list[str] = []

    def __enter__(self) -> Pool:
        self._children[0] = Child(self._settings)
        self.notes = self._children[0].notes
        return self

    def __exit__(self, *_: object) -> None:
        for child in filter(None, self._children):
            child.end()

    def outcomes(self, completions: Sequence[Completion]) -> list[Outcome | None]:
        """Returns the outcomes in order; None after a failure that stops the run. Raises UserError if a process that
        replaces another cannot load the function."""
        outcomes: list[Outcome | None] = [None] * len(completions)
        waiting, lock, stop = iter(range(len(completions))), threading.Lock(), threading.Event()

        def work(slot: int) -> None:
            while not stop.is_set():
                with lock:
                    i = next(waiting, None)
                if i is None:
                    return
                outcomes[i] = answer = self._outcome(slot, completions[i])
                if answer.value is None and self._stops:
                    stop.set()  # those before it are answered, or being answered, so the first failure is always found

        number = min(len(self._children), len(completions))
        with ThreadPoolExecutor(max(1, number), "rewards") as threads:
            try:
                for done in [threads.submit(work, slot) for slot in range(number)]:
                    done.result()
            except BaseException:
                stop.set()
                for child in filter(None, self._children):
                    child.kill()
                raise
        return outcomes

    def _outcome(self, slot: int, completion: Completion) -> Outcome:
        child = self._children[slot]
        if child is None:
            child = self._children[slot] = Child(self._settings)
        arguments = {  # all that a function may declare, by the names of `child.ARGUMENTS`
            "completion": completion.text,
            "reference": completion.reference,
            "row": dict(completion.columns),
            "prompt": completion.prompt,
            "messages": list(completion.messages),
            "num_tokens": completion.num_tokens,
            "is_truncated": completion.is_truncated,
        }
        try:
            reply = child.ask(arguments, self._seconds)
        except NoReply as failure:
            self._children[slot] = None
            kind, what = failure.args
            return Outcome(None, kind, what, child.output.decode("utf-8", "replace"))
        printed = child.output.decode("utf-8", "replace")
        value, kind, what = reply.get("value"), reply.get("kind"), " ".join(str(reply.get("what")).split())
        if isinstance(value, float) and math.isfinite(value):
            return Outcome(value, details=printed)
        details = "\n".join(filter(None, (str(reply.get("details", "")), printed)))
        if kind not in _KINDS:  # the function has written the reply, in place of its process
            child.end()
            self._children[slot] = None
            kind, what = "died", FORGED
        return Outcome(None, kind, without_secrets(what[:WHAT_CHARACTERS]), details)
