"""How far the tokenising of a source is, for the person who waits for it."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

LINE_EVERY_S = 30.0  # where there is no terminal to draw a bar on


class BuildProgress:
    """A bar with rows, rows/s and the time left; without a terminal a line now and then. Both on standard error."""

    def __init__(self, name: str, total: int | None):
        """total: rows, about; None: not known."""
        self.name, self.total = name, total
        self._begun = self._said = time.monotonic()
        self._bar = _bar() if sys.stderr.isatty() else None

    def __enter__(self) -> BuildProgress:
        if self._bar:
            self._task = self._bar.add_task(f"tokenising {self.name}", total=self.total)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, rows: int) -> None:
        """rows: done so far."""
        if self.total is not None and rows > self.total:  # an estimate was too low
            self.total = None
        if self._bar:
            self._bar.update(self._task, completed=rows, total=self.total)
        elif time.monotonic() - self._said > LINE_EVERY_S:
            self._said = time.monotonic()
            line = progress_line(self.name, rows, self.total, self._said - self._begun)
            print(line, file=sys.stderr, flush=True)


def progress_line(name: str, rows: int, total: int | None, seconds: float) -> str:
    """
    >>> progress_line("a.jsonl", 60_000, 300_000, 30.0)
    'tokenising a.jsonl: 60,000 of about 300,000 rows, 2,000 rows/s, about 120 s left'
    """
    of = f" of about {total:,}" if total else ""
    speed = rows / seconds
    left = f", about {(total - rows) / speed:.0f} s left" if total and speed else ""
    return f"tokenising {name}: {rows:,}{of} rows, {speed:,.0f} rows/s{left}"


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        _RowsPerSecond(),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
        transient=True,
    )


class _RowsPerSecond(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.0f} rows/s" if task.speed else "")
