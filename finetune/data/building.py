"""Builds a cache entry from a source's rows: chunks of rows over all cores, written in order as they come back.

This process reads and writes; memory holds a few chunks, however many rows there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

from rich.console import Console

from finetune.data.chat.renderer import Renderer
from finetune.data.formats.converters import check_columns
from finetune.data.formats.detect import detect_format
from finetune.data.mismatched import write_with_mismatched
from finetune.data.objective_rows import objective_rows
from finetune.data.samples import BadRow, MediaKind
from finetune.data.sources.source import SourceReader
from finetune.data.token_cache import EntryWriter
from finetune.data.token_text import plain_text
from finetune.data.tokenizing import Item, RowSettings, TokenizedExample, bad_row_message, draw, tokenize_chunks
from finetune.errors import UserError
from finetune.recipe import Recipe, format_problem
from finetune.recipe.schema import Source
from finetune.recipe.urls import without_credentials
from finetune.utils import ProgressBar, num_cores

CHUNK_ROWS = 256
CHUNK_CHARACTERS = 500_000  # a chunk ends early after as much text, or a few of them would fill the memory
SMALL_CHARACTERS = 8_000_000  # less is tokenized here: it takes about as long as to start the other processes
# Characters that take about as long to tokenize as a file to decode: a picture, ten seconds of sound, of film.
# Estimates: they decide how many processes work, never what comes out.
DECODED: dict[MediaKind, int] = {"image": 20_000, "audio": 20_000, "video": 200_000}
HEAD_ROWS = 20  # of every source, rendered before any is tokenized
FORMAT_ROWS = 100  # that `format: auto` looks at


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
        """Raises UserError if there is no such source, or its format cannot be detected or is not for the objective."""
        streaming = self._recipe.data.streaming and any(source is train for train in self._recipe.data.train)
        for known, streamed, opened in self._opened:
            if known == source and streamed == streaming:
                return opened
        reader, name = SourceReader(source, streaming), without_credentials(source.path)
        note = None
        if reader.text_unit:
            is_line = reader.text_unit == "line" and not source.text_unit
            longer = "; `text_unit: paragraph` and `file` make longer ones" if is_line else ""
            note = f"{name}: each {reader.text_unit} of text is a row{longer}"
        if source.format != "auto":
            check_columns(source.format, source.columns)
            opened = OpenedSource(source, reader, note, None)
        else:
            items, readable = list[Item](), list[Mapping[str, Any]]()
            with closing(read_items(reader)) as rows:
                while len(readable) < FORMAT_ROWS and (item := next(rows, None)):
                    items.append(item)
                    if not isinstance(item[2], str):
                        readable.append(item[2])
            if not readable:
                raise UserError(f"{name}: no row can be read, so its format is unknown. Fix: set `format`")
            try:
                detected = detect_format(readable, source.columns, self._recipe.row_kind.formats)
            except UserError as error:  # its message is about the first row
                label, number = next((label, number) for label, number, row in items if not isinstance(row, str))
                raise UserError(f"{label}:{number}: {error}") from None
            resolved = source.model_copy(update={"format": detected.format, "columns": detected.columns})
            check_columns(resolved.format, resolved.columns)
            note = note or f"{name}: format {detected.format} ({detected.reason})"
            opened = OpenedSource(resolved, reader, note, tuple(items[:HEAD_ROWS]))
        if reader.note:
            opened = replace(opened, note="; ".join(filter(None, (reader.note, opened.note))))
        if problem := format_problem(self._recipe, opened.source.format):
            raise UserError(f"{opened.name}: {problem}")
        self._opened.append((source, streaming, opened))
        return opened

    def check_heads(self, renderer: Renderer) -> None:
        """Renders the first rows of every source of the recipe, once: a typo in the last source must not cost the
        tokenizing of the first. Raises UserError as the build would."""
        if self._heads_checked:
            return
        data = self._recipe.data
        for source in (*data.train, *data.own_eval_sources):
            opened = self.open(source)
            settings = row_settings(self._recipe, opened.source, renderer)
            for item in first_items(opened):
                try:
                    draw(settings, item)
                except BadRow as error:
                    if not settings.skips_bad:
                        raise UserError(bad_row_message(item[:2], error)) from None
        self._heads_checked = True


def first_items(opened: OpenedSource) -> Iterable[Item]:
    """Returns the first rows of a source. Raises UserError."""
    if opened.head is not None:
        return opened.head
    with closing(read_items(opened.reader)) as items:
        return list(islice(items, HEAD_ROWS))


def row_settings(recipe: Recipe, source: Source, renderer: Renderer) -> RowSettings:
    data = recipe.data
    return RowSettings(
        renderer=renderer,
        format=source.format,
        columns=source.columns,
        max_length=data.max_length,
        overlong=data.overlong,
        skips_bad=data.on_bad_row == "skip",
        objective=objective_rows(recipe.objective, recipe.rollouts is not None),
        pairs=source.pairs,
    )


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
    """Writes all examples of a source whose content has this digest.

    Raises UserError for bad rows beyond what the recipe allows, if no example is left, and if the content changes.
    """
    untrained = build_part(writer, build, read_items(build.opened.reader), digest)
    report, name = writer.report, build.opened.name
    if report.examples:
        return
    message = (
        f"{name}: none of its {report.rows} rows can be trained on: {report.bad} bad, {report.dropped_overlong} longer "
        f"than data.max_length ({build.recipe.data.max_length}), {report.no_supervised_token} without a trained token"
    )
    fix = "correct these rows"
    if report.no_other_answer:
        message += (
            f", {report.no_other_answer} next to which no other row's answer fits: {build.recipe.objective.name} "
            "compares each answer with one of another row after the same prompt, both together within data.max_length"
        )
    if report.dropped_overlong:
        fix += ", raise data.max_length, or set `data.overlong: split`, which keeps long ones in pieces"
    if untrained:
        sequence = next(one for one in untrained.sequences if not one.num_targets)
        label, number = untrained.row_id
        shown = plain_text(sequence, build.renderer.tokenizer)
        raise UserError(f"{message}.\n{label}:{number}, with [[ ]] around what is trained:\n{shown}\nFix: {fix}")
    raise UserError(f"{message}. Fix: {fix}")


def build_part(
    writer: EntryWriter, build: EntryBuild, items: Iterator[Item], digest: str | None = None
) -> TokenizedExample | None:
    """Writes the examples of some rows of a source, possibly none; single answers each next to one of another row.

    digest: of the source's content, if it must not change. Returns the first example that has no trained token. Raises
    UserError for a change, and for bad rows beyond what the recipe allows.
    """
    data = build.recipe.data
    if build.recipe.objective.row_kind.is_unpaired:
        per_row = 2 if build.opened.source.format in ("preference", "comparison") else 1
        untrained = write_with_mismatched(
            writer, lambda answers: _write(answers, build, items), data.max_length, per_row
        )
    else:
        untrained = _write(writer, build, items)
    if digest is not None and build.opened.reader.digest() != digest:
        raise UserError(f"{build.opened.name}: was changed while it was read. Fix: start again when it is complete")
    report = writer.report
    if report.bad > data.max_bad_share * report.rows:
        enough = math.ceil(1e4 * report.bad / report.rows) / 1e4
        listed = "\n".join(f"  {line}" for line in report.bad_rows)
        raise UserError(
            f"{report.path}: {report.bad} of {report.rows} rows are bad, more than data.max_bad_share "
            f"({data.max_bad_share:g}) allows. The first of them:\n{listed}\nFix: correct them, or set "
            f"data.max_bad_share to {enough:g}"
        )
    return untrained


def _write(writer: EntryWriter, build: EntryBuild, items: Iterator[Item]) -> TokenizedExample | None:
    """Writes the examples of these rows; returns the first one that has no trained token."""
    opened, report, untrained = build.opened, writer.report, None
    report.path, report.format = opened.name, opened.source.format
    settings = row_settings(build.recipe, opened.source, build.renderer)
    writer.columns = settings.objective.columns
    name, decoding = f"tokenizing {opened.name}", _decoding(build.renderer)
    with (
        ProgressBar(Console(stderr=True), name, opened.reader.estimated_rows(), unit="rows") as progress,
        closing(chunks_of(items, decoding)) as chunks,
    ):
        head, characters = [], 0  # the first chunks: is there enough to do for more than one process?
        while characters < SMALL_CHARACTERS and (chunk := next(chunks, None)):
            head.append(chunk)
            characters += sum(num_characters(item[2]) + decoding for item in chunk if not isinstance(item, UserError))
        workers = build.workers or (num_cores() if characters >= SMALL_CHARACTERS else 1)
        with closing(tokenize_chunks(settings, chain(head, chunks), workers)) as results:
            for result in results:
                if result.failed:
                    raise UserError(result.failed)
                writer.append(result)
                untrained = untrained or result.untrained
                progress.update(report.rows)
                if build.progress:
                    build.progress(report.rows)
    return untrained


# --- rows in chunks


def read_items(reader: SourceReader) -> Generator[Item, None, None]:
    """Yields rows in their order; for a row that cannot be read, the reason."""
    try:
        for label, number, row in reader.readable_and_bad():
            yield label, number, str(row) if isinstance(row, BadRow) else row
    except OSError as error:
        name = without_credentials(reader.source.path)
        reason = error.strerror or error
        raise UserError(f"{name}: cannot be read: {reason}. Fix: check the path and its permissions") from None


def _decoding(renderer: Renderer) -> int:
    """Returns the time that a row's file takes, of several kinds the longest, in characters of text; 0 if headers alone
    are read."""
    families = renderer.media.families.values() if renderer.media else ()
    return max((DECODED[one.kind] for one in families if one.rules.verify != "header"), default=0)


def chunks_of(items: Iterable[Item], decoding: int) -> Generator[list[Item | UserError], None, None]:
    """Yields rows by the hundred; an error of the file itself comes last, so that the rows before it are first.

    decoding: characters of text in whose time a row's file is decoded.
    """
    chunk: list[Item | UserError] = []
    characters = 0
    try:
        for item in items:
            chunk.append(item)
            characters += num_characters(item[2]) + decoding
            if len(chunk) == CHUNK_ROWS or characters >= CHUNK_CHARACTERS:
                yield chunk
                chunk, characters = [], 0
    except UserError as error:
        chunk.append(error)
    if chunk:
        yield chunk


def num_characters(value: Any) -> int:
    """Returns the approximate number of characters in a row."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, bytes):  # of an image: its text is short, but it travels between processes
        return len(value) // 8
    if isinstance(value, Mapping):
        return sum(map(num_characters, value.values()))
    if isinstance(value, Sequence):
        return sum(map(num_characters, value)) if value and not isinstance(value[0], int) else 8 * len(value)
    return 8
