"""Requests to stop a run, by a scheduler or by Ctrl-C.

The first SIGTERM, SIGINT or SIGUSR1 requests a stop: the ranks agree on a step, save, and exit with status 75. A second
signal ends the process at once, as does a first one before there is anything to save (with 75). The launcher's end
requests a stop, too: `accelerate launch` of one process dies of a SIGTERM without forwarding it, and always of SIGUSR1.

While a command still imports its modules, a signal ends it, without a traceback (`end_while_starting`).

Each is answered at once, by one process: by `finetune launch`, else by rank 0. Threads read the signals and watch the
launcher, because the main thread may be in a long product, or waiting in a collective for a rank that is gone, and
Python then runs no handler.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

from finetune.errors import STOPPED_STATUS

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# Ctrl-C and schedulers signal the launcher and its processes alike, and the launcher forwards its own: signals that
# arrive this soon after the first are the same request.
ECHO_S = 1.0
ANSWERED_VARIABLE = "FINETUNE_ANSWERED"  # set by `finetune launch`, which answers the signals that it forwards
_POLL_S = 1.0  # between two looks at the launcher


def answer(name: str, steps_begun: bool) -> str:
    """Returns what follows from the first signal, by its name."""
    if not steps_begun:
        return f"{name} received before the first step: the run ends now, there is nothing to save"
    return (
        f"{name} received: the run saves and stops at the end of this step (an evaluation, or a result that is being "
        "written, ends first). Press Ctrl-C again to end it at once, without saving"
    )


def answer_again(name: str) -> str:
    """Returns what follows from a later signal."""
    return f"{name} received again: the run ends now, without saving"


def say(text: str) -> None:
    """Prints a line on standard error from a handler or a thread; a lock of `print` may be held below them."""
    with contextlib.suppress(OSError):
        behind = "\n" if os.isatty(2) else ""  # ^C, or a bar
        os.write(2, f"{behind}{text}\n".encode())


def end_while_starting(trains: bool) -> None:
    """Lets signals end this process, while it imports its modules, at once and without a traceback; until `listening`,
    or `interruptible`.

    trains: the command begins a run, so each signal ends it as before the first step; else Ctrl-C alone, with 130.
    """
    for number in SIGNALS if trains else (signal.SIGINT,):
        signal.signal(number, _end_run if trains else _end_command)


def interruptible() -> None:
    """Lets Ctrl-C raise KeyboardInterrupt again, in a command that trains nothing."""
    if signal.getsignal(signal.SIGINT) is _end_command:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_run(number: int, _frame: object) -> None:
    if ANSWERED_VARIABLE not in os.environ and int(os.environ.get("RANK", "0")) == 0:
        say(answer(signal.Signals(number).name, steps_begun=False))
    os._exit(STOPPED_STATUS)


def _end_command(number: int, _frame: object) -> None:
    os._exit(128 + number)


class StopRequest:
    """Request to stop this process; `reason` is the first signal's name."""

    def __init__(self) -> None:
        self.steps_begun = False  # there is, or will be, state to save
        self._reason: str | None = None
        self._received_at = 0.0
        self._parent = os.getppid()
        self._launcher: int | None = None
        self._over = threading.Event()

    @property
    def reason(self) -> str | None:
        """Returns the reason to stop the run; None if it should continue."""
        if self._reason is None and self._launcher is not None and os.getppid() != self._launcher:
            self._reason, self._received_at = "the end of its launcher", time.monotonic()
            what = "saves and stops at the end of this step" if self.steps_begun else "ends now"
            self._say(f"the launcher of this run has ended: the run {what}")
        return self._reason

    def watch_launcher(self) -> None:
        """Treats the end of the parent process as a request to stop; before the first step it ends this process."""
        self._launcher = self._parent
        threading.Thread(target=self._watch, name="launcher", daemon=True).start()

    def receive(self, number: int) -> None:
        """Records the first signal; ends the process with 128 + number at a later one."""
        name = signal.Signals(number).name
        is_first = self._reason is None
        if is_first:
            self._reason, self._received_at = name, time.monotonic()
            self._answer(answer(name, self.steps_begun))
        if not self.steps_begun:
            os._exit(STOPPED_STATUS)
        if not is_first and time.monotonic() - self._received_at > ECHO_S:
            self._answer(answer_again(name))
            os._exit(128 + number)

    def close(self) -> None:
        """Ends the watch of the launcher."""
        self._over.set()

    def _watch(self) -> None:
        while self.reason is None:
            if self._over.wait(_POLL_S):
                return
        if not self.steps_begun:
            os._exit(STOPPED_STATUS)

    def _answer(self, text: str) -> None:
        if ANSWERED_VARIABLE not in os.environ:
            self._say(text)

    def _say(self, text: str) -> None:
        if int(os.environ.get("RANK", "0")) == 0:
            say(text)


@contextlib.contextmanager
def listening() -> Iterator[StopRequest]:
    """Yields the request that receives this process's signals meanwhile. Call it on the main thread."""
    request = StopRequest()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def read() -> None:
        while numbers := os.read(reading, 1):
            if numbers[0] in SIGNALS:  # the pipe carries every signal that Python handles
                request.receive(numbers[0])

    # Python writes a signal's number to the pipe only if it has a handler.
    before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    reader = threading.Thread(target=read, name="signals", daemon=True)
    reader.start()
    try:
        yield request
    finally:
        request.close()
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is _end_run else handler)
        os.close(writing)  # ends the reader
        reader.join()
        os.close(reading)
