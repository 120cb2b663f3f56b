"""Rows of a run whose sources are read as they are needed (`data.streaming`).

    source   rows 1..W | W+1..2W | ...     a chunk: W = `data.window` rows of the source, tokenised once and cached
    stream   examples of the sources, next of the one that has given least for its weight
    window   the next W examples of the stream, packed together; their rows in a random order

All of it is a pure function of recipe and data, so the position of a run is one number here, too: rows since its start.
To find a position again, the windows before it are packed again from the lengths that the cache holds; no row is
tokenised twice. Memory holds the lengths of a few windows, however long the stream is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from finetune.data.examples import Entry, Example
from finetune.data.order import group_rows, shuffled
from finetune.data.packing import Rows, pack, row_work
from finetune.errors import UserError
from finetune.recipe import Recipe
from finetune.recipe.schema import Source

WINDOWS_KEPT = 4  # in memory; a step may lie across two of them
CHUNKS_KEPT = 4  # of each source, mapped


class Tape:
    """One source's examples, chunk after chunk, from the start again after its end."""

    def __init__(self, source: Source, window: int, chunk: Callable[[int], Entry]):
        """chunk: the cache entry of rows [number * window, (number + 1) * window), made when it is not there yet."""
        self.source, self._window = source, window
        self.chunk = lru_cache(CHUNKS_KEPT)(chunk)

    def is_last(self, number: int) -> bool:
        """Whether the source ends with this chunk: it has fewer rows than were asked for."""
        return self.chunk(number).report.rows < self._window


@dataclass(frozen=True)
class Place:
    """Where the stream stands in one source."""

    chunk: int = 0
    within: int = 0  # examples taken of that chunk
    passes: int = 0  # whole ones
    given: int = 0  # rows or tokens, over the run


@dataclass(frozen=True)
class Window:
    """Examples that were packed together. `N` of them in `R` rows."""

    first_row: int  # of the run
    sources: NDArray[np.int64]  # (N,) number of the source
    chunks: NDArray[np.int64]  # (N,)
    within: NDArray[np.int64]  # (N,) number in the chunk
    lengths: NDArray[np.int64]  # (N,)
    rows: Rows
    order: NDArray[np.int64]  # (R,)
    after: tuple[Place, ...]  # where the stream stands behind it

    @property
    def end_row(self) -> int:
        return self.first_row + len(self.rows)


class StreamedRows:
    """The rows of a run, at any position. Positions go on for as long as the sources may be read."""

    def __init__(self, recipe: Recipe, tapes: Sequence[Tape]):
        self._recipe, self._tapes = recipe, tuple(tapes)
        mixture = recipe.data.mixture
        self._by_tokens = mixture is not None and mixture.by == "tokens"
        # Where each window begins: (its first row, places before it). The windows themselves are made again on demand.
        self._starts: list[tuple[int, tuple[Place, ...]]] = [(0, tuple(Place() for _ in tapes))]
        self._window = lru_cache(WINDOWS_KEPT)(self._made)

    def documents(self, position: int) -> list[Example]:
        """Examples of the row at a position of the run."""
        window, members = self._row(position)
        return [self._example(window, int(member)) for member in members]

    def lengths(self, position: int) -> NDArray[np.int64]:
        """Tokens of each example of that row."""
        window, members = self._row(position)
        return window.lengths[members]

    def epochs(self, position: int) -> float:
        """How often every source had been read whole before the window of the row before this position."""
        return float(min(place.passes for place in self._starts[self._number(max(0, position - 1))][1]))

    def window(self, number: int) -> Window:
        """Window `number`, from 0."""
        while number >= len(self._starts):
            self._find_next()
        return self._window(number)

    def _row(self, position: int) -> tuple[Window, NDArray[np.int64]]:
        window = self._window(self._number(position))
        return window, window.rows[int(window.order[position - window.first_row])]

    def _number(self, position: int) -> int:
        """Of the window that holds a position."""
        while self._starts[-1][0] <= position:
            self._find_next()
        return bisect_right(self._starts, position, key=lambda start: start[0]) - 1

    def _find_next(self) -> None:
        last = self._window(len(self._starts) - 1)
        self._starts.append((last.end_row, last.after))

    def _example(self, window: Window, member: int) -> Example:
        source = int(window.sources[member])
        entry = self._tapes[source].chunk(int(window.chunks[member]))
        return replace(entry.example(int(window.within[member])), source=source)

    def _made(self, number: int) -> Window:
        first_row, places = self._starts[number]
        taken, after = self._take(list(places))
        sources, chunks, within, lengths = np.array(taken, np.int64).reshape(-1, 4).T
        data, batch = self._recipe.data, self._recipe.batch
        rows = pack(lengths, data.max_length)
        group = group_rows(data.balance, batch.rows)
        order = shuffled(len(rows), (self._recipe.run.seed, number), row_work(rows, lengths), group, first_row)
        return Window(first_row, sources, chunks, within, lengths, rows, order, after)

    def _take(self, places: list[Place]) -> tuple[list[tuple[int, int, int, int]], tuple[Place, ...]]:
        """The next (source, chunk, number in it, tokens) of the stream; fewer than `window` where all sources ended."""
        before = list(places)
        taken: list[tuple[int, int, int, int]] = []
        while len(taken) < self._recipe.data.window:
            ended = min(now.passes - then.passes for now, then in zip(places, before, strict=True))
            if taken and ended:
                break
            if ended > 1:  # the first end may have been that of an empty chunk, behind rows that filled the one before
                raise UserError("data.train: no row of the stream can be trained on; look at `finetune inspect`")
            number = self._next_source(places)
            place, tape = places[number], self._tapes[number]
            lengths = tape.chunk(place.chunk).lengths
            if place.within < len(lengths):
                length = int(lengths[place.within])
                taken.append((number, place.chunk, place.within, length))
                given = place.given + (length if self._by_tokens else 1)
                places[number] = place = replace(place, within=place.within + 1, given=given)
            if place.within >= len(lengths):
                places[number] = self._behind_chunk(place, tape)
        return taken, tuple(places)

    def _behind_chunk(self, place: Place, tape: Tape) -> Place:
        if tape.is_last(place.chunk):
            return replace(place, chunk=0, within=0, passes=place.passes + 1)
        return replace(place, chunk=place.chunk + 1, within=0)

    def _next_source(self, places: Sequence[Place]) -> int:
        """Of those that may still be read, the source that has given least for its weight (stride scheduling,
        Waldspurger and Weihl 1995, MIT/LCS/TM-528)."""
        readable = [
            number
            for number, (place, tape) in enumerate(zip(places, self._tapes, strict=True))
            if tape.source.max_epochs is None or place.passes < tape.source.max_epochs
        ]
        if not readable:
            raise UserError(
                f"the stream ends after {self._starts[-1][0]:,} rows, {self._starts[-1][0] // self._recipe.batch.rows:,} "
                "steps: every source was read `max_epochs` times; lower train.max_steps, or raise `max_epochs`"
            )
        return min(readable, key=lambda number: places[number].given / self._tapes[number].source.weight)
