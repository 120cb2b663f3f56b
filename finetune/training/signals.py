"""Requests to stop a run, by a scheduler or by Ctrl-C.

The first SIGTERM, SIGINT or SIGUSR1 requests a stop: the ranks agree on a step, save, and exit with status 75. A second
signal ends the process at once, as does a first one before there is anything to save (with 75). The launcher's end
requests a stop, too: `accelerate launch` of one process dies of a SIGTERM without forwarding it, and always of SIGUSR1.

A thread reads the signals, because the main thread may be waiting in a collective for a rank that is gone, and Python
then runs no handler.
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


class StopRequest:
    """Request to stop this process; `reason` is the first signal's name."""

    def __init__(self) -> None:
        self.steps_begun = False  # there is, or will be, state to save
        self._reason: str | None = None
        self._received_at = 0.0
        self._launcher: int | None = None

    @property
    def reason(self) -> str | None:
        """Returns the reason to stop the run; None if it should continue."""
        if self._reason is None and self._launcher is not None and os.getppid() != self._launcher:
            self._reason, self._received_at = "the end of its launcher", time.monotonic()
        return self._reason

    def watch_launcher(self) -> None:
        """Treats the end of the parent process as a request to stop."""
        self._launcher = os.getppid()

    def receive(self, number: int) -> None:
        """Records the first signal; ends the process with 128 + number at a later one."""
        if not self.steps_begun:
            os._exit(STOPPED_STATUS)
        if self._reason is None:
            self._reason, self._received_at = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - self._received_at > ECHO_S:
            os._exit(128 + number)


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
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writing)  # ends the reader
        reader.join()
        os.close(reading)
