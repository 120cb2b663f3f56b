"""Progress of training, and of a pass before it: a bar in a terminal, sparse lines in a log file, nothing on other
ranks."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 10.0


class TrainingProgress:
    """Context manager; `update` once per step."""

    def __init__(self, console: Console, steps: int, done: int, shown: bool):
        self._console, self._steps, self._shown = console, steps, shown
        self._first = done
        self._started = self._last_line = time.monotonic()
        self._bar = None
        if shown and console.is_terminal:
            self._bar = Progress(
                TextColumn("train"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("loss {task.fields[loss]}  {task.fields[speed]}"),
                TextColumn("eta"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task("train", total=steps, completed=done, loss="-", speed="-")

    def __enter__(self) -> TrainingProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, step: int, loss: float, tokens_per_s: float, mfu: float | None = None) -> None:
        """step: optimizer steps done; mfu: None if unknown."""
        speed = f"{tokens_per_s:,.0f} tok/s" + (f"  MFU {mfu:.1%}" if mfu is not None else "")
        if self._bar:
            self._bar.update(self._task, completed=step, loss=f"{loss:.4f}", speed=speed)
        elif self._shown:
            self._print_line(step, loss, speed)

    def _print_line(self, step: int, loss: float, speed: str) -> None:
        now = time.monotonic()
        if step > self._first + 1 and step < self._steps and now - self._last_line < _SECONDS_BETWEEN_LINES:
            return
        self._last_line = now
        remaining = (now - self._started) / max(1, step - self._first) * (self._steps - step)
        self._console.print(
            f"step {step}/{self._steps}  loss {loss:.4f}  {speed}  eta {remaining:.0f} s",
            highlight=False,
        )
        sys.stdout.flush()


class PassProgress:
    """Of one pass over the data. Context manager; `update` with the number of blocks that are done."""

    def __init__(self, console: Console, name: str, blocks: int, done: int, shown: bool):
        self._console, self._name, self._blocks, self._first, self._shown = console, name, blocks, done, shown
        self._started = self._last_line = time.monotonic()
        self._bar = None
        if shown and console.is_terminal:
            columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TextColumn("eta"), TimeRemainingColumn())
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task(name, total=blocks, completed=done)

    def __enter__(self) -> PassProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, done: int) -> None:
        now = time.monotonic()
        if self._bar:
            self._bar.update(self._task, completed=done)
        elif self._shown and now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            remaining = (now - self._started) / (done - self._first) * (self._blocks - done)
            self._console.print(f"{self._name}: {done}/{self._blocks}  eta {remaining:.0f} s", highlight=False)
            sys.stdout.flush()
