"""`split` as it is written: a name, and a part of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from finetune.errors import UserError

FORMS = "train, train[:1000], train[100:200], train[-100:] or train[10%:20%]"
_NUMBER = r"(?:(-?\d[\d_]*)(%)?)?"
_SLICE = re.compile(rf"([\w.-]+)(?:\[{_NUMBER}:{_NUMBER}\])?")


@dataclass(frozen=True)
class Slice:
    """Rows [begin, end) of a split, counted from 0, or from the end where negative; or shares of it in percent."""

    name: str
    begin: int | None = None
    end: int | None = None
    percent: bool = False

    @property
    def is_whole(self) -> bool:
        return self.begin is None and self.end is None

    @property
    def needs_count(self) -> bool:
        """Whether one must know how many rows there are to know which are meant."""
        return self.percent or (self.begin or 0) < 0 or (self.end or 0) < 0

    def bounds(self, count: Callable[[], int]) -> tuple[int, int | None]:
        """[begin, end) from 0; `count`, the number of all rows, is called only where it is needed.

        Rounds as datasets does. train[10%:50%] of 25 rows -> (2, 12); train[-3:] of 25 -> (22, None).
        """
        if not self.needs_count:
            return self.begin or 0, self.end
        rows = count()

        def place(bound: int) -> int:
            from_start = round(bound * rows / 100) if self.percent else bound
            return max(from_start + rows, 0) if bound < 0 else from_start

        return place(self.begin or 0), None if self.end is None else place(self.end)


def parse_split(path: str, split: str) -> Slice:
    """Raises UserError for what is no split, or takes nothing. path: for messages."""
    match = _SLICE.fullmatch(split.strip())
    if not match:
        raise UserError(f"{path}: `split: {split}` is not understood; valid are forms such as {FORMS}")
    name, begin, begin_percent, end, end_percent = match.groups()
    units = {bool(percent) for bound, percent in ((begin, begin_percent), (end, end_percent)) if bound}
    if len(units) == 2:
        raise UserError(f"{path}: `split: {split}` mixes rows and percent; give both bounds in one of them")
    found = Slice(name, int(begin) if begin else None, int(end) if end else None, True in units)
    _check(path, split, found)
    return found


def _check(path: str, split: str, found: Slice) -> None:
    given = [bound for bound in (found.begin, found.end) if bound is not None]
    if found.percent and any(abs(bound) > 100 for bound in given):
        raise UserError(f"{path}: `split: {split}` goes beyond 100 %")
    begin, end = found.begin or 0, found.end
    if end is not None and (begin < 0) == (end < 0) and begin >= end:
        raise UserError(f"{path}: `split: {split}` takes no rows, for it ends where it begins or before")
