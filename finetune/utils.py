"""Small helpers that several rooms share. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import hashlib
import math
import multiprocessing
import os
import re
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import torch
    from rich.console import Console


def copied_to(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Returns a tensor of the CPU on a device. To a GPU from pinned memory, or the process would wait for all work
    there."""
    to_gpu = str(device).partition(":")[0] == "cuda"
    return tensor.pin_memory().to(device, non_blocking=True) if to_gpu else tensor.to(device)


def readable_bytes(count: float) -> str:
    """
    >>> readable_bytes(3_500_000), readable_bytes(12)
    ('3.3 MiB', '12 B')
    """
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.1f} {units[0]}" if units[0] != "B" else f"{count:.0f} B"


def readable_hours(hours: float) -> str:
    """
    >>> readable_hours(0.01), readable_hours(0.5), readable_hours(30.25)
    ('36 s', '30 min', '30.2 h')
    """
    if hours < 1 / 30:
        return f"{hours * 3600:.3g} s"
    return f"{hours * 60:.0f} min" if hours < 1 else f"{hours:.1f} h"


def print_line(console: Console, text: str, **style: Any) -> None:
    """Print text as one line. Only a terminal wraps it, so that files can be searched and paths copied."""
    console.print(text, soft_wrap=not console.is_terminal, **style)


SECONDS_BETWEEN_LINES = 10.0  # of progress, without a terminal


class ProgressBar:
    """A bar in a terminal, else a line now and then; nothing if not `shown`. A context manager."""

    def __init__(
        self,
        console: Console,
        name: str,
        total: int | None,
        done: int = 0,
        shown: bool = True,
        unit: str = "",
        keeps: bool = False,
    ):
        """total: None if unknown; an estimate may be exceeded. unit: of the rate that is shown, "" for none. keeps: the
        bar remains at the end, and the first and the last step have a line."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        self._console, self._name, self._total, self._first = console, name, total, done
        self._shown, self._unit, self._keeps = shown, unit, keeps
        self._begun = self._last_line = time.monotonic()
        self._bar = None
        if shown and console.is_terminal:
            whole = Column(no_wrap=True)  # only the bar is made smaller
            text = TextColumn("{task.fields[text]}", markup=False, table_column=whole)
            columns = (TextColumn("{task.description}", markup=False, table_column=whole), BarColumn(bar_width=None))
            columns = (*columns, MofNCompleteColumn(table_column=whole), text)
            left = (TextColumn("eta", table_column=whole), TimeRemainingColumn(table_column=whole))
            self._bar = Progress(*columns, *left, console=console, transient=not keeps, expand=True)
            self._task = self._bar.add_task(name, total=total, completed=done, text="")

    def __enter__(self) -> ProgressBar:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, done: int, text: str = "") -> None:
        """Shows the units done so far, with a text behind them."""
        now, new = time.monotonic(), done - self._first
        if self._unit and now > self._begun:
            text = f"{new / (now - self._begun):,.0f} {self._unit}/s"
        if self._bar:
            self._bar.update(self._task, completed=done, text=text)
            return
        is_end = self._keeps and (new == 1 or done == self._total)
        if not self._shown or new <= 0 or not (is_end or now - self._last_line >= SECONDS_BETWEEN_LINES):
            return
        self._last_line = now
        parts = [f"{self._name} {done:,}", text]
        if self._total is not None and done <= self._total:
            remaining = (now - self._begun) / new * (self._total - done)
            parts = [f"{self._name} {done:,}/{self._total:,}", text, f"eta {remaining:.0f} s"]
        print_line(self._console, "  ".join(filter(None, parts)), highlight=False, markup=False)
        self._console.file.flush()


def divisors(number: int) -> list[int]:
    """
    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def nearest_divisors(wanted: int, number: int) -> str:
    """Returns the divisors of `number` around `wanted`, for messages.

    >>> nearest_divisors(5, 12)
    '4 or 6'
    """
    below = [n for n in divisors(number) if n <= wanted][-1:]
    above = [n for n in divisors(number) if n > wanted][:1]
    return " or ".join(str(n) for n in below + above)


def num_cores() -> int:
    """Returns the cores that this process may use, possibly limited by a launcher or `taskset`."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_with_parent() -> None:
    """End this pool worker when its parent is gone. A killed parent cannot end its workers, and the pipes that
    they share among them never close."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def sha256_file(path: Path) -> str:
    """Returns the hex digest of a file's bytes. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_atomically(path: Path, content: str | bytes, shared: bool = False) -> None:
    """Write a file that is complete or absent. shared: other processes may write it at the same time.

    Without `shared`, the next write replaces the remains of a killed one. Raises OSError.
    """
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp" if shared else f"{path.name}.tmp")
    try:
        with naming(path):
            temporary.write_bytes(content.encode() if isinstance(content, str) else content)
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Adds the file's name to OSErrors, which lack it when an open file is written."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def fsync(path: Path) -> None:
    """Flush a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def peak_resident_bytes() -> int:
    """Returns the peak resident set size of this process. Exact on Linux; elsewhere getrusage's, which may include the
    parent's at the fork."""
    status = Path("/proc/self/status")
    if status.exists() and (match := re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE)):
        return int(match[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, KiB elsewhere


def unwrap_peft(model: Any) -> Any:
    """Returns transformers' model: the one inside a peft model, or `model` itself. Imports no peft."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def full_shape(parameter: Any) -> Any:
    """Returns the shape of the unsharded parameter (torch.Size), also under ZeRO-3. Imports no torch."""
    return getattr(parameter, "ds_shape", parameter.shape)


def common_prefix_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Returns the number of leading items in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def pattern_of(paths: list[str], modules: list[str]) -> str:
    """Returns a regular expression for paths, and no other modules of a model: for all layers, or path by path."""
    every = "|".join(sorted({re.sub(r"(?<=\\\.)\d+(?=\\\.)", r"\\d+", re.escape(path)) for path in paths}))
    if {path for path in modules if re.fullmatch(every, path)} == {*paths}:
        return every
    return "|".join(map(re.escape, paths))


def answer(text: str, pattern: str | None) -> str | None:
    """Returns the text to compare: without outer blanks, or the pattern's first group in its last occurrence.

    None if the pattern does not occur: such a text has no answer, and equals no other.
    """
    if pattern is None:
        return text.strip()
    matches = re.findall(pattern, text)
    if not matches:
        return None
    return (matches[-1][0] if isinstance(matches[-1], tuple) else matches[-1]).strip()


def no_constant(name: str) -> NoReturn:
    """Refuses NaN and infinities, which Python reads and JSON has not: `parse_constant` of `json.loads`."""
    raise ValueError(f"{name} is not a JSON number")


def is_from_rust(error: BaseException) -> bool:
    """Returns whether an error is from a Rust library: a panic, which is not an Exception, or an Exception without its
    own class. Neither class can be imported to catch it."""
    return type(error) is Exception or type(error).__name__ == "PanicException"
