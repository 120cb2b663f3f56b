"""Rows of a run whose sources are read as they are needed (`data.streaming`).

    source   rows 1..W | W+1..2W | ...     a chunk: W = `data.window` rows of the source, tokenized once and cached
    stream   examples of the sources, the next one from the source that has emitted least for its weight
    window   the next W examples of the stream, packed together; their rows in a random order

All of it is a pure function of recipe and data, so the position of a run is one number here, too: rows since its start.
To find a position again, the windows before it are packed again from the lengths that the cache holds; no row is
tokenized twice. Memory holds the lengths of a few windows, however long the stream is.
"""

from __future__ import annotations

import hashlib
import logging
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune.data.building import EntryBuild, OpenedSources, build_part, read_items
from finetune.data.cache_entries import entries_folder
from finetune.data.chat.renderer import Renderer
from finetune.data.content import digest
from finetune.data.examples import entry_key, entry_metadata, rendering_key, source_names
from finetune.data.packing import Rows, group_rows, pack, row_work, shuffled
from finetune.data.row_source import RowSource
from finetune.data.samples import Example, ExampleSizes, concatenate_sizes
from finetune.data.token_cache import CacheEntry, find_or_build
from finetune.data.tokenizing import Item
from finetune.errors import UserError
from finetune.recipe import Recipe

log = logging.getLogger(__name__)

WINDOWS_KEPT = 4  # in memory; a step may lie across two of them
CHUNKS_KEPT = 4  # of each source, mapped


class SourceStream:
    """One source's examples, chunk after chunk, from the start again after its end."""

    def __init__(self, build: EntryBuild, key: str):
        """key: see `entry_key`."""
        self.source = build.opened.source
        self._build, self._key, self._window = build, key, build.recipe.data.window
        self.chunk = lru_cache(CHUNKS_KEPT)(self._chunk)
        self.sizes = lru_cache(CHUNKS_KEPT)(lambda chunk_index: self.chunk(chunk_index).sizes())
        self._items: Iterator[Item] = iter(())
        self._next = -1  # the chunk whose rows `_items` would give next; -1: nothing is open

    def is_last(self, chunk_index: int) -> bool:
        """Returns whether the source ends with this chunk: it has fewer rows than were read for."""
        return self.chunk(chunk_index).report.rows < self._window

    def _chunk(self, index: int) -> CacheEntry:
        """Returns the cache entry of rows [index * window, (index + 1) * window), which is built if it is absent."""
        build, window = self._build, self._window
        name = hashlib.sha256(f"{self._key} {window} {index}".encode()).hexdigest()
        metadata = entry_metadata(build.recipe.data, build.opened, build.renderer)
        metadata["rows"] = [index * window + 1, (index + 1) * window]
        fill = partial(build_part, build=build, items=self._rows(index))
        return find_or_build(entries_folder() / name, metadata, fill)[0]

    def _rows(self, index: int) -> Iterator[Item]:
        """Yields the rows of a chunk: read on from the last one, or from the start if that was a later one."""
        if not 0 <= self._next <= index:
            self._items, self._next = read_items(self._build.opened.reader), 0
        for _ in islice(self._items, (index - self._next) * self._window):
            pass  # rows that are in the cache, or another process's: read, not tokenized
        self._next = index + 1
        yield from islice(self._items, self._window)


@dataclass(frozen=True)
class StreamPosition:
    """Position of a stream in one source."""

    chunk: int = 0
    within: int = 0  # examples taken of that chunk
    passes: int = 0  # complete ones
    num_emitted: int = 0  # rows or tokens, over the run


@dataclass(frozen=True)
class Window:
    """Examples that were packed together. `N` of them in `R` rows."""

    first_row: int  # of the run
    sources: NDArray[np.int64]  # (N,) index of the source
    chunks: NDArray[np.int64]  # (N,)
    within: NDArray[np.int64]  # (N,) index in the chunk
    sizes: ExampleSizes  # (N,)
    rows: Rows
    order: NDArray[np.int64]  # (R,)
    after: tuple[StreamPosition, ...]  # of the stream at its end

    @property
    def end_row(self) -> int:
        return self.first_row + len(self.rows)


class Stream(RowSource):
    """Training data that is read as it is needed. Positions continue for as long as the sources may be read.

    For one thread at a time: it reads files as it goes.
    """

    def __init__(self, recipe: Recipe, streams: Sequence[SourceStream], identity: str, digests: Sequence[str]):
        """identity: hash of content, tokenizer, template, mask policy and window of all sources; digests: of the
        content of each source: its bytes, or the commit of a dataset of the hub."""
        self._recipe, self._streams, self._identity, self._digests = recipe, tuple(streams), identity, tuple(digests)
        mixture = recipe.data.mixture
        self._by_tokens = mixture is not None and mixture.by == "tokens"
        # Begin of each window: (its first row, positions before it, digest of all windows before it). The windows
        # themselves are built on demand.
        begin = tuple(StreamPosition() for _ in streams)
        self._starts: list[tuple[int, tuple[StreamPosition, ...], str]] = [(0, begin, "")]
        self._window = lru_cache(WINDOWS_KEPT)(self._build_window)

    @property
    def source_names(self) -> tuple[str, ...]:
        return tuple(source_names(self._recipe.data.train))

    @property
    def formats(self) -> tuple[str, ...]:
        return tuple(one.source.format for one in self._streams)

    def in_order(self, recipe: Recipe) -> Stream:
        return self

    def unpacked(self) -> Stream:
        raise UserError(
            "data.streaming: a stream is packed, and this architecture cannot keep documents apart. Fix: set it to "
            "false"
        )

    def size(self, max_length: int) -> None:
        pass

    def heaviest_row(self, max_length: int, shares_prompts: bool = False) -> tuple[int, int]:
        """Returns the sizes of a full row of which every token that can be trained is."""
        return max_length, max_length - 1

    def facts(self, part: str, max_length: int) -> dict[str, str]:
        return {f"{part}_data": f"a stream; its first window has {len(self.window(0).sizes):,} examples"}

    def summary(self) -> dict[str, float | str]:
        return {"stream": self._identity}

    def content(self) -> dict[str, Any]:
        """Returns the identity of each source. Rows are known when they have been read: `extra_state`."""
        return {f"train[{i}]": {"source": digest(source)} for i, source in enumerate(self._digests)}

    def extra_state(self, position: int) -> dict[str, Any]:
        windows = self.num_consumed(position)
        return {"consumed": {"windows": windows, "content": self.consumed(windows)}}

    def same_state(self, saved: dict[str, Any]) -> dict[str, Any]:
        if "consumed" not in saved:  # an earlier version wrote it
            return {}
        windows = saved["consumed"]["windows"]
        return {"consumed": {"windows": windows, "content": self.consumed(windows)}}

    def row(self, position: int) -> list[Example]:
        window, members = self._row(position)
        places = zip(window.sources[members], window.chunks[members], window.within[members], strict=True)
        return [self._streams[source].chunk(int(chunk)).example(int(i), int(source)) for source, chunk, i in places]

    def first_examples(self, source: int, count: int) -> list[Example]:
        entry = self._streams[source].chunk(0)
        return [entry.example(i, source) for i in range(min(count, len(entry)))]

    def first_hashes(self) -> NDArray[np.uint64]:
        """Returns the hashes of the first chunk of every source: `data.window` rows, or all of a smaller one."""
        return np.concatenate([np.asarray(stream.chunk(0).hashes) for stream in self._streams])

    def lengths(self, position: int) -> NDArray[np.int64]:
        window, members = self._row(position)
        return window.sizes.take(members).lengths

    def counts(self, position: int) -> Mapping[str, int]:
        window, members = self._row(position)
        return window.sizes.take(members).counts()

    def epoch_at(self, position: int) -> float:
        """Returns how often every source had been read to its end before the window of the row before this
        position."""
        _, positions, _ = self._starts[self._window_index(max(0, position - 1))]
        return float(min(one.passes for one in positions))

    def window(self, index: int) -> Window:
        """Returns window `index`, from 0."""
        while index >= len(self._starts):
            self._find_next()
        return self._window(index)

    def _row(self, position: int) -> tuple[Window, NDArray[np.int64]]:
        window = self._window(self._window_index(position))
        return window, window.rows[int(window.order[position - window.first_row])]

    def _window_index(self, position: int) -> int:
        """Returns the index of the window that holds a row position."""
        while self._starts[-1][0] <= position:
            self._find_next()
        return bisect_right(self._starts, position, key=lambda start: start[0]) - 1

    def _find_next(self) -> None:
        """Adds the begin of the next window, with a digest of the tokens and masks of all before it."""
        window, before = self._window(len(self._starts) - 1), self._starts[-1][2]
        parts = []
        for source, chunk in np.unique(np.stack([window.sources, window.chunks]), axis=1).T.tolist():
            entry = self._streams[source].chunk(chunk)
            within = window.within[(window.sources == source) & (window.chunks == chunk)]
            first, end = (int(entry.example_offsets[i]) for i in (within.min(), within.max() + 1))
            tokens = slice(int(entry.sequence_offsets[first]), int(entry.sequence_offsets[end]))
            parts += [entry.hashes[within], entry.loss_mask[tokens]]
        self._starts.append((window.end_row, window.after, digest(before, *parts)))

    def num_consumed(self, position: int) -> int:
        """Returns the windows that a run has read to their end, of those that are known; also while a thread reads."""
        return bisect_right(list(self._starts), position, key=lambda start: start[0]) - 1

    def consumed(self, windows: int) -> str:
        """Returns a digest of the tokens and masks of the first windows. Raises UserError if there are fewer."""
        while len(self._starts) <= windows:
            self._find_next()
        return self._starts[windows][2]

    def _build_window(self, index: int) -> Window:
        first_row, positions, _ = self._starts[index]
        taken, after = self._take(positions)
        sources, chunks, within = np.array(taken, np.int64).reshape(-1, 3).T
        sizes = concatenate_sizes(self._streams[source].sizes(chunk).take(np.array([i])) for source, chunk, i in taken)
        data, batch = self._recipe.data, self._recipe.batch
        rows = pack(sizes.tokens, data.max_length)
        group = group_rows(data.balance, batch.rows)
        work = row_work(rows, sizes.attention_work)
        order = shuffled(len(rows), (self._recipe.run.seed, index), work, group, first_row)
        return Window(first_row, sources, chunks, within, sizes, rows, order, after)

    def _take(
        self, before: tuple[StreamPosition, ...]
    ) -> tuple[list[tuple[int, int, int]], tuple[StreamPosition, ...]]:
        """Returns the next (source, chunk, index in it) of the stream, fewer than `window` if all sources ended, and
        the positions after them. Each is of the source that has emitted least for its weight (stride scheduling,
        Waldspurger and Weihl 1995, MIT/LCS/TM-528)."""
        positions = list(before)
        taken: list[tuple[int, int, int]] = []
        while len(taken) < self._recipe.data.window:
            # The first end may be that of an empty chunk, after rows that filled the one before: nothing is taken yet.
            if taken and all(now.passes > then.passes for now, then in zip(positions, before, strict=True)):
                break
            limits = [stream.source.max_epochs for stream in self._streams]
            readable = [i for i, most in enumerate(limits) if most is None or positions[i].passes < most]
            if not readable and taken:
                break
            if not readable:
                steps = self._starts[-1][0] // self._recipe.batch.rows
                raise UserError(
                    f"the stream ends after {steps:,} steps: every source was read `max_epochs` times. Fix: lower "
                    "train.max_steps, or raise `max_epochs`"
                )
            source = min(readable, key=lambda i: positions[i].num_emitted / self._streams[i].source.weight)
            stream, position = self._streams[source], positions[source]
            tokens = stream.sizes(position.chunk).tokens
            if position.within < len(tokens):
                taken.append((source, position.chunk, position.within))
                num_emitted = position.num_emitted + (int(tokens[position.within]) if self._by_tokens else 1)
                position = replace(position, within=position.within + 1, num_emitted=num_emitted)
            if position.within >= len(tokens) and not stream.is_last(position.chunk):
                position = replace(position, chunk=position.chunk + 1, within=0)
            elif position.within >= len(tokens):
                if not position.num_emitted:
                    raise UserError(
                        f"data.train[{source}]: none of its rows can be trained on. Fix: correct them; `finetune "
                        "inspect` shows why"
                    )
                position = replace(position, chunk=0, within=0, passes=position.passes + 1)
            positions[source] = position
        return taken, tuple(positions)


# --- from a recipe


def open_stream(
    recipe: Recipe,
    renderer: Renderer,
    opened: OpenedSources | None = None,
) -> Stream:
    """Opens every source, detects its format, and renders its first rows; reads nothing more. Raises UserError."""
    opened = opened or OpenedSources(recipe)
    of_sources = [opened.open(source) for source in recipe.data.train]
    opened.check_heads(renderer)
    rendering = rendering_key(renderer)
    digests = tuple(one.reader.digest() for one in of_sources)
    keys = [entry_key(recipe, one.source, content, rendering) for one, content in zip(of_sources, digests, strict=True)]
    streams = [SourceStream(EntryBuild(recipe, one, renderer), key) for one, key in zip(of_sources, keys, strict=True)]
    for one in of_sources:
        if one.note:
            log.warning("%s", one.note)
    identity = hashlib.sha256(" ".join([*keys, str(recipe.data.window)]).encode()).hexdigest()[:16]
    return Stream(recipe, streams, identity, digests)
