"""Builds a cache entry from a source's rows: chunks of rows over all cores, written in order as they come back.

This process reads and writes; memory holds a few chunks, however many rows there are.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from finetune.data.chat.renderer import Renderer
from finetune.data.formats.converters import check_columns
from finetune.data.formats.detect import detect_format
from finetune.data.mismatched import write_with_mismatched
from finetune.data.objective_rows import objective_rows
from finetune.data.samples import BadRow
from finetune.data.sources.source import SourceReader
from finetune.data.token_cache import EntryWriter, SourceReport
from finetune.data.token_text import plain_text
from finetune.data.tokenizing import (
    Item,
    RowSettings,
    TokenizedExample,
    bad_row_message,
    draw,
    tokenize_chunks,
)
from finetune.errors import UserError
from finetune.recipe import Recipe, format_problem
from finetune.recipe.schema import ROW_KINDS, Source
from finetune.recipe.urls import without_credentials
from finetune.utils import num_cores

CHUNK_ROWS = 256
CHUNK_CHARACTERS = 500_000  # a chunk ends early after as much text, or a few of them would fill the memory
SMALL_CHARACTERS = 8_000_000  # less is tokenized here: it takes about as long as to start the other processes
HEAD_ROWS = 20  # of every source, rendered before any is tokenized
FORMAT_ROWS = 100  # that `format: auto` looks at
LINE_EVERY_S = 30.0  # between lines of progress, if there is no terminal to draw a bar on


# --- sources, opened once


@dataclass(frozen=True)
class OpenedSource:
    """A source that exists, with its format."""

    source: Source  # `format` is never auto
    reader: SourceReader
    note: str | None  # how the format was detected, if it was
    head: tuple[Item, ...] | None  # the first rows, if the format was detected by them

    @property
    def name(self) -> str:
        """Description for people."""
        return without_credentials(self.source.path)


class OpenedSources:
    """The sources of a recipe, each opened once and its format detected once, however many parts of a run need it."""

    def __init__(self, recipe: Recipe):
        self._recipe = recipe
        self._opened: list[tuple[Source, bool, OpenedSource]] = []
        self._heads_checked = False

    def open(self, source: Source) -> OpenedSource:
        """Raises UserError if there is no such source, its format cannot be told, or is not for the objective."""
        streaming = self._recipe.data.streaming and any(source is train for train in self._recipe.data.train)
        for known, streamed, opened in self._opened:
            if known == source and streamed == streaming:
                return opened
        objective = self._recipe.objective.name
        opened = _open(source, streaming, ROW_KINDS[objective].formats)
        if problem := format_problem(objective, opened.source.format):
            raise UserError(f"{opened.name}: {problem}")
        self._opened.append((source, streaming, opened))
        return opened

    def check_heads(self, renderer: Renderer) -> None:
        """Render the first rows of every source of the recipe, once: a typo in the last source must not cost the
        tokenizing of the first. Raises UserError as the build would."""
        if self._heads_checked:
            return
        data = self._recipe.data
        for source in (*data.train, *data.own_eval_sources):
            opened = self.open(source)
            settings = row_settings(self._recipe, opened.source, renderer)
            if opened.head is not None:
                _check_rows(settings, opened.head)
                continue
            with closing(read_items(opened.reader)) as items:
                _check_rows(settings, islice(items, HEAD_ROWS))
        self._heads_checked = True


def _open(source: Source, streaming: bool, formats: tuple[str, ...]) -> OpenedSource:
    """formats: those of the objective."""
    reader = SourceReader(source, streaming)
    unit = reader.text_unit and f"{without_credentials(source.path)}: each {reader.text_unit} of a txt file is a row"
    unit = unit and (unit if source.text_unit else f"{unit}; `text_unit: paragraph` and `file` make longer ones")
    if source.format != "auto":
        check_columns(source.format, source.columns)
        return OpenedSource(source, reader, unit, None)
    name, items = without_credentials(source.path), []
    with closing(read_items(reader)) as rows:
        while sum(not isinstance(row, str) for _, _, row in items) < FORMAT_ROWS and (item := next(rows, None)):
            items.append(item)
    readable = [(label, number, row) for label, number, row in items if not isinstance(row, str)]
    if not readable:
        raise UserError(f"{name}: has no row that can be read, so its format cannot be told; set `format`")
    try:
        detected = detect_format([row for _, _, row in readable], source.columns, formats)
    except UserError as error:  # its message is about the first row
        raise UserError(f"{readable[0][0]}:{readable[0][1]}: {error}") from None
    resolved = source.model_copy(update={"format": detected.format, "columns": detected.columns})
    check_columns(resolved.format, resolved.columns)
    note = unit or f"{name}: format {detected.format} ({detected.reason})"
    return OpenedSource(resolved, reader, note, tuple(items[:HEAD_ROWS]))


def row_settings(recipe: Recipe, source: Source, renderer: Renderer) -> RowSettings:
    data = recipe.data
    return RowSettings(
        renderer=renderer,
        format=source.format,
        columns=source.columns,
        max_length=data.max_length,
        overlong=data.overlong,
        skips_bad=data.on_bad_row == "skip",
        objective=objective_rows(recipe.objective),
        pairs=source.pairs,
    )


def _check_rows(settings: RowSettings, items: Iterator[Item] | tuple[Item, ...]) -> None:
    for item in items:
        label, number, _ = item
        try:
            draw(settings, item)
        except BadRow as error:
            if not settings.skips_bad:
                raise UserError(bad_row_message((label, number), error)) from None
        except UserError as error:
            raise UserError(f"{label}:{number}: {error}") from None


# --- the build


@dataclass(frozen=True)
class EntryBuild:
    """Recipe, source, renderer and settings that an entry is built from."""

    recipe: Recipe
    opened: OpenedSource
    renderer: Renderer
    progress: Callable[[int], None] | None = None  # called with the rows done so far
    workers: int | None = None  # processes; None: one per core if there is enough to do


def build_source(writer: EntryWriter, build: EntryBuild, digest: str) -> None:
    """Write all examples of a source whose content has this digest.

    Raises UserError for bad rows beyond what the recipe allows, if no example is left, and if the content changes.
    """
    reader = build.opened.reader
    untrained = _write_examples(writer, build, read_items(reader))
    if reader.digest() != digest:
        raise UserError(f"{build.opened.name}: was changed while it was read; start again when it is written whole")
    _check_share(writer.report, build.recipe.data.max_bad_share)
    _check_rest(writer.report, build.recipe.data.max_length, untrained, build.renderer)


def build_part(writer: EntryWriter, build: EntryBuild, items: Iterator[Item]) -> None:
    """Writes the examples of some rows of a source, possibly none. Raises UserError as `build_source` does."""
    _write_examples(writer, build, items)
    _check_share(writer.report, build.recipe.data.max_bad_share)


def _write_examples(writer: EntryWriter, build: EntryBuild, items: Iterator[Item]) -> TokenizedExample | None:
    """Writes the examples of `items`; for KTO, each next to an answer of another row."""
    if build.recipe.objective.name != "kto":
        return _write(writer, build, items)
    per_row = 2 if build.opened.source.format == "preference" else 1
    return write_with_mismatched(
        writer, lambda answers: _write(answers, build, items), build.recipe.data.max_length, per_row
    )


def _write(writer: EntryWriter, build: EntryBuild, items: Iterator[Item]) -> TokenizedExample | None:
    """Writes the examples of these rows; returns the first one that has no trained token."""
    opened, report, untrained = build.opened, writer.report, None
    report.path, report.format = opened.name, opened.source.format
    settings = row_settings(build.recipe, opened.source, build.renderer)
    writer.columns = settings.objective.columns
    with BuildProgress(opened.name, opened.reader.estimated_rows()) as shown, closing(_chunks(items)) as chunks:
        head, several = _first_chunks(chunks)
        workers = build.workers or (num_cores() if several else 1)
        with closing(tokenize_chunks(settings, chain(head, chunks), workers)) as results:
            for result in results:
                if result.failed:
                    raise UserError(result.failed)
                writer.append(result)
                untrained = untrained or result.untrained
                shown.update(report.rows)
                if build.progress:
                    build.progress(report.rows)
    return untrained


def _check_share(report: SourceReport, most: float) -> None:
    if report.rows and report.bad > most * report.rows:
        enough = math.ceil(1e4 * report.bad / report.rows) / 1e4
        listed = "\n".join(f"  {line}" for line in report.bad_rows)
        raise UserError(
            f"{report.path}: {report.bad} of {report.rows} rows are bad, more than data.max_bad_share "
            f"({most:g}) allows; {enough:g} would. The first of them:\n{listed}"
        )


def _check_rest(report: SourceReport, max_length: int, untrained: TokenizedExample | None, renderer: Renderer) -> None:
    """Raises UserError if no example is left, with one that was dropped and its mask."""
    if report.examples:
        return
    message = (
        f"{report.path}: none of its {report.rows} rows can be trained on: {report.bad} bad, "
        f"{report.dropped_overlong} longer than data.max_length ({max_length}), "
        f"{report.no_supervised_token} without a trained token"
    )
    if report.no_other_answer:
        message += (
            f", {report.no_other_answer} next to which no other row's answer fits: kto compares each answer with one "
            "of another row after the same prompt, both together within data.max_length"
        )
    if report.dropped_overlong:
        message += "; `data.overlong: split` keeps long ones, in pieces"
    if untrained:
        sequence = next(one for one in untrained.sequences if not one.num_targets)
        shown = plain_text(sequence, renderer.tokenizer)
        message += f".\n{untrained.where}, with [[ ]] around what is trained:\n{shown}"
    raise UserError(message)


# --- rows in chunks


def read_items(reader: SourceReader) -> Generator[Item, None, None]:
    """Rows in their order; for rows that cannot be read, the reason."""
    try:
        for label, number, row in reader.readable_and_bad():
            yield label, number, str(row) if isinstance(row, BadRow) else row
    except OSError as error:
        name = without_credentials(reader.source.path)
        raise UserError(f"{name}: cannot be read: {error.strerror or error}") from None


def _chunks(items: Iterator[Item]) -> Generator[list[Item], None, None]:
    """Rows by the hundred; the last chunk before an error of the file itself comes out before the error does."""
    chunk: list[Item] = []
    characters, failure = 0, None
    while True:
        try:
            item = next(items, None)
        except UserError as error:
            item, failure = None, error
        if item is None:
            break
        chunk.append(item)
        characters += num_characters(item[2])
        if len(chunk) == CHUNK_ROWS or characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk
    if failure:
        raise failure


def num_characters(value: Any) -> int:
    """Approximate number of characters in a row."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, bytes):  # of an image: its text is short, but it travels between processes
        return len(value) // 8
    if isinstance(value, Mapping):
        return sum(map(num_characters, value.values()))
    if isinstance(value, Sequence):
        return sum(map(num_characters, value)) if value and not isinstance(value[0], int) else 8 * len(value)
    return 8


def _first_chunks(chunks: Iterator[list[Item]]) -> tuple[Iterator[list[Item]], bool]:
    """The first chunks, and whether there is enough text for more than one process."""
    head: list[list[Item]] = []
    characters = 0
    try:
        for chunk in chunks:
            head.append(chunk)
            characters += sum(num_characters(row) for _, _, row in chunk)
            if characters >= SMALL_CHARACTERS:
                return iter(head), True
    except UserError as error:
        return _then_raise(head, error), False
    return iter(head), False


def _then_raise(head: list[list[Item]], error: UserError) -> Iterator[list[Item]]:
    yield from head
    raise error


# --- progress


class BuildProgress:
    """A bar with rows, rows/s and the time left; without a terminal a line now and then. Both on standard error."""

    def __init__(self, name: str, total: int | None):
        """total: approximate number of rows; None: unknown."""
        self.name, self.total = name, total
        self._begun = self._shown_at = time.monotonic()
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
        elif time.monotonic() - self._shown_at > LINE_EVERY_S:
            self._shown_at = time.monotonic()
            line = progress_line(self.name, rows, self.total, self._shown_at - self._begun)
            print(line, file=sys.stderr, flush=True)


def progress_line(name: str, rows: int, total: int | None, seconds: float) -> str:
    """
    >>> progress_line("a.jsonl", 60_000, 300_000, 30.0)
    'tokenising a.jsonl: 60,000 of about 300,000 rows, 2,000 rows/s, about 120 s left'
    """
    share = f" of about {total:,}" if total else ""
    speed = rows / seconds
    left = f", about {(total - rows) / speed:.0f} s left" if total and speed else ""
    return f"tokenising {name}: {rows:,}{share} rows, {speed:,.0f} rows/s{left}"


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
