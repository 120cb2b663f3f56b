"""Rows of a run whose sources are read as they are needed (`data.streaming`).

    source   rows 1..W | W+1..2W | ...     a chunk: W = `data.window` rows of the source, tokenised once and cached
    stream   examples of the sources, next of the one that has given least for its weight
    window   the next W examples of the stream, packed together; their rows in a random order

All of it is a pure function of recipe and data, so the position of a run is one number here, too: rows since its start.
To find a position again, the windows before it are packed again from the lengths that the cache holds; no row is
tokenised twice. Memory holds the lengths of a few windows, however long the stream is.
"""

from __future__ import annotations

import hashlib
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from finetune.data.building.build import Plain, build_part, check_heads, items_of, open_source
from finetune.data.building.chunk import Item
from finetune.data.cache.entries import Entry, entries_folder, find_or_build
from finetune.data.chat.renderer import Renderer, renderer
from finetune.data.chat.template import resolve_template
from finetune.data.examples import Example, about_entry, example_of, key_of_entry, key_of_rendering
from finetune.data.mixture import source_names
from finetune.data.order import group_rows, shuffled
from finetune.data.packing import Rows, pack, row_work
from finetune.data.sources import Opened
from finetune.errors import UserError
from finetune.recipe import Recipe
from finetune.recipe.schema import Source

log = logging.getLogger(__name__)

WINDOWS_KEPT = 4  # in memory; a step may lie across two of them
CHUNKS_KEPT = 4  # of each source, mapped


class Tape:
    """One source's examples, chunk after chunk, from the start again after its end."""

    def __init__(self, source: Source, window: int, chunk: Callable[[int], Entry]):
        """chunk: the cache entry of rows [number * window, (number + 1) * window), made when it is not there yet."""
        self.source, self._window = source, window
        self.chunk = lru_cache(CHUNKS_KEPT)(chunk)
        self.lengths = lru_cache(CHUNKS_KEPT)(self._lengths)

    def num_trained(self, number: int) -> NDArray[np.integer]:
        """(N,) trained tokens of the examples of a chunk."""
        return self.chunk(number).num_trained

    def _lengths(self, number: int) -> NDArray[np.int64]:
        """(N,) tokens of the examples of a chunk."""
        return np.diff(self.chunk(number).offsets)

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
    num_trained: NDArray[np.int64]  # (N,)
    rows: Rows
    order: NDArray[np.int64]  # (R,)
    after: tuple[Place, ...]  # where the stream stands behind it

    @property
    def end_row(self) -> int:
        return self.first_row + len(self.rows)


class StreamedRows:
    """The rows of a run, at any position. Positions go on for as long as the sources may be read.

    For one thread at a time: it reads files as it goes.
    """

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

    def first_examples(self, source: int, count: int) -> list[Example]:
        """At most `count` examples of a source, of its first chunk."""
        entry = self._tapes[source].chunk(0)
        return [example_of(entry, i, source) for i in range(min(count, len(entry)))]

    def lengths(self, position: int) -> NDArray[np.int64]:
        """Tokens of each example of that row."""
        window, members = self._row(position)
        return window.lengths[members]

    def num_trained(self, position: int) -> int:
        """Trained tokens of that row."""
        window, members = self._row(position)
        return int(window.num_trained[members].sum())

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
        return example_of(entry, int(window.within[member]), source)

    def _made(self, number: int) -> Window:
        first_row, places = self._starts[number]
        taken, after = self._take(list(places))
        sources, chunks, within, lengths, num_trained = np.array(taken, np.int64).reshape(-1, 5).T
        data, batch = self._recipe.data, self._recipe.batch
        rows = pack(lengths, data.max_length)
        group = group_rows(data.balance, batch.rows)
        order = shuffled(len(rows), (self._recipe.run.seed, number), row_work(rows, lengths), group, first_row)
        return Window(first_row, sources, chunks, within, lengths, num_trained, rows, order, after)

    def _take(self, places: list[Place]) -> tuple[list[tuple[int, ...]], tuple[Place, ...]]:
        """The next (source, chunk, number in it, tokens, trained tokens) of the stream; fewer than `window` where all
        sources ended."""
        before = list(places)
        taken: list[tuple[int, ...]] = []
        while len(taken) < self._recipe.data.window:
            # The first end may be that of an empty chunk, behind rows that filled the one before: nothing is taken yet.
            if taken and all(now.passes > then.passes for now, then in zip(places, before, strict=True)):
                break
            number = self._next_source(places)
            place, tape = places[number], self._tapes[number]
            lengths = tape.lengths(place.chunk)
            if place.within < len(lengths):
                length = int(lengths[place.within])
                num_trained = int(tape.num_trained(place.chunk)[place.within])
                taken.append((number, place.chunk, place.within, length, num_trained))
                given = place.given + (length if self._by_tokens else 1)
                places[number] = place = replace(place, within=place.within + 1, given=given)
            if place.within >= len(lengths):
                places[number] = self._behind_chunk(number, place)
        return taken, tuple(places)

    def _behind_chunk(self, number: int, place: Place) -> Place:
        if not self._tapes[number].is_last(place.chunk):
            return replace(place, chunk=place.chunk + 1, within=0)
        if not place.given:
            raise UserError(f"data.train[{number}]: no row of it can be trained on; look at it with `finetune inspect`")
        return replace(place, chunk=0, within=0, passes=place.passes + 1)

    def _next_source(self, places: Sequence[Place]) -> int:
        """Of those that may still be read, the source that has given least for its weight (stride scheduling,
        Waldspurger and Weihl 1995, MIT/LCS/TM-528)."""
        readable = [
            number
            for number, (place, tape) in enumerate(zip(places, self._tapes, strict=True))
            if tape.source.max_epochs is None or place.passes < tape.source.max_epochs
        ]
        if not readable:
            steps = self._starts[-1][0] // self._recipe.batch.rows
            raise UserError(
                f"the stream ends after {steps:,} steps: every source was read `max_epochs` times; "
                "lower train.max_steps, or raise `max_epochs`"
            )
        return min(readable, key=lambda number: places[number].given / self._tapes[number].source.weight)


# --- from a recipe


@dataclass(frozen=True)
class OpenedStream:
    """The training sources of a recipe, found and looked into."""

    tapes: list[Tape]
    names: tuple[str, ...]
    formats: list[str]
    identity: str  # hash of content, tokenizer, template, mask policy and window of all of them


def open_stream(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> OpenedStream:
    """Find every source, its format, and render its first rows; read nothing more. Raises UserError."""
    model = recipe.model
    template = resolve_template(model.chat_template, tokenizer, model.chat_template_arguments)
    made = renderer(tokenizer, template, recipe.objective.train_on)
    plain = [open_source(source, streaming=True) for source in recipe.data.train]
    check_heads(recipe, made)
    rendering = key_of_rendering(made)
    keys = [key_of_entry(recipe, one.source, one.opened.digest(), rendering) for one in plain]
    tapes = [_tape(recipe, one, made, key) for one, key in zip(plain, keys, strict=True)]
    for one in plain:
        if one.note:
            log.warning("%s", one.note)
    identity = hashlib.sha256(" ".join([*keys, str(recipe.data.window)]).encode()).hexdigest()[:16]
    formats = [one.source.format for one in plain]
    return OpenedStream(tapes, tuple(source_names(recipe.data.train)), formats, identity)


def _tape(recipe: Recipe, plain: Plain, made: Renderer, key: str) -> Tape:
    window, spans = recipe.data.window, Spans(plain.opened, recipe.data.window)

    def chunk(number: int) -> Entry:
        name = hashlib.sha256(f"{key} {window} {number}".encode()).hexdigest()
        of = about_entry(recipe, plain, made) | {"rows": [number * window + 1, (number + 1) * window]}
        return find_or_build(
            entries_folder() / name,
            of,
            lambda writer: build_part(writer, recipe.data, plain, spans.rows(number), made),
        )[0]

    return Tape(plain.source, window, chunk)


class Spans:
    """Stretches of a source's rows: read on from where the last one ended, or from the start where they lie before."""

    def __init__(self, opened: Opened, size: int):
        self._opened, self._size = opened, size
        self._items: Iterator[Item] = iter(())
        self._next = -1  # the stretch that `_items` would give next; -1: nothing is open

    def rows(self, number: int) -> Iterator[Item]:
        """Rows [number * size, (number + 1) * size), those that cannot be read as the reason."""
        if not 0 <= self._next <= number:
            self._items, self._next = items_of(self._opened), 0
        for _ in islice(self._items, (number - self._next) * self._size):
            pass  # rows that are in the cache, or another process's: read, not tokenised
        self._next = number + 1
        return islice(self._items, self._size)
