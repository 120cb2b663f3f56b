"""Calls that are made beside the loop: by one thread, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

_MOST_WAITING = 1000  # calls; beyond them the loop waits for a disk or a server that does not keep up


class Background:
    """What a call raises is raised by a later `do`, `flush` or `close` here, once; no call after it is made."""

    def __init__(self, name: str):
        self._pool = ThreadPoolExecutor(1, name)
        self._waiting: deque[Future[None]] = deque()
        self._failed = False

    def do(self, call: Callable[..., Any], *arguments: Any) -> None:
        self._settle(down_to=_MOST_WAITING)
        self._waiting.append(self._pool.submit(self._make, call, *arguments))

    def flush(self) -> None:
        """Every call is made when this returns."""
        self._settle(down_to=0)

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._pool.shutdown()

    def _settle(self, down_to: int) -> None:
        while self._waiting and (self._waiting[0].done() or len(self._waiting) > down_to):
            self._waiting.popleft().result()

    def _make(self, call: Callable[..., Any], *arguments: Any) -> None:
        if self._failed:
            return
        self._failed = True  # until it is known better
        call(*arguments)
        self._failed = False
