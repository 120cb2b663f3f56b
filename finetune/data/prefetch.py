"""Items of an iterator, made ahead of their use by a thread of its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")

_PATIENCE_S = 10.0  # for an item that is being made when nobody wants any more; the thread ends with the process


class Prefetched(Generic[T], Iterator[T]):
    """The same items in the same order, up to `most` of them ready before they are asked for.

    Only the thread touches the iterator, from its first item to its end. What the iterator raises is raised here, with
    its traceback, behind the items that came before. Close it, or use it as a context, where it may be left early.

        with Prefetched(make() for make in work) as items:
            for item in items: ...
    """

    def __init__(self, items: Iterator[T], most: int = 2):
        self._items, self._most = items, most
        self._ready: deque[T] = deque()
        self._failure: BaseException | None = None
        self._ended = self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._make, name="prefetch", daemon=True)
        self._thread.start()

    def __next__(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended)
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            if self._failure is not None:
                raise self._failure
            raise StopIteration

    def close(self) -> None:
        """Nothing more is made. What is being made is waited for, a while."""
        with self._changed:
            self._closed = self._ended = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join(_PATIENCE_S)

    def __enter__(self) -> Prefetched[T]:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def _make(self) -> None:
        failure = None
        try:
            while self._has_room():
                item = next(self._items, _END)
                if item is _END:
                    break
                with self._changed:
                    self._ready.append(item)  # pyright: ignore[reportArgumentType]  (not the end)
                    self._changed.notify_all()
                del item  # or the last one lives as long as this thread waits
        except BaseException as error:  # noqa: BLE001 - raised again in `__next__`, where somebody listens
            failure = error
        with self._changed:
            if not self._closed:
                self._failure, self._ended = failure, True
            self._changed.notify_all()

    def _has_room(self) -> bool:
        """Waits for it; False where nobody wants any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._ready) < self._most)
            return not self._closed


_END = object()
