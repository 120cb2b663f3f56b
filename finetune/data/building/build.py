"""From a source's rows to an entry of the cache: chunks of rows over all cores, written in order as they come back.

This process reads and writes; memory holds a few chunks, however many rows there are.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from finetune.data.building.chunk import Item, Outcome, Piece, Work, bad_row_message, draw
from finetune.data.building.progress import BuildProgress
from finetune.data.building.workers import num_cores, tokenised
from finetune.data.cache.entries import Writer
from finetune.data.chat.renderer import Renderer
from finetune.data.formats import check_columns, detect_format
from finetune.data.report import SourceReport
from finetune.data.samples import BadRow
from finetune.data.sources import SourceReader, without_credentials
from finetune.data.token_text import plain_text
from finetune.errors import UserError
from finetune.recipe import Recipe
from finetune.recipe.schema import Data, Source

CHUNK_ROWS = 256
CHUNK_CHARACTERS = 500_000  # a chunk ends early behind as much text, or a few of them would fill the memory
SMALL_CHARACTERS = 8_000_000  # less is tokenised here: it takes about as long as to start the other processes
HEAD_ROWS = 20  # of every source, looked at before any is tokenised
FORMAT_ROWS = 100  # that `format: auto` looks at
BAD_ROWS_LISTED = 10


@dataclass(frozen=True)
class Plain:
    """A source that was found, and that says its format."""

    source: Source  # `format` is never auto
    opened: SourceReader
    note: str | None  # how the format was found, where it was

    @property
    def name(self) -> str:
        """For people."""
        return without_credentials(self.source.path)


def open_source(source: Source, streaming: bool = False) -> Plain:
    """Find a source and its format. Raises UserError."""
    opened = SourceReader(source, streaming)
    resolved, note = resolve_format(source, opened)
    check_columns(resolved.format, resolved.columns)
    return Plain(resolved, opened, note)


def resolve_format(source: Source, opened: SourceReader) -> tuple[Source, str | None]:
    """The source with the format and columns that its first rows fit, and a sentence on it; as it is where it says."""
    if source.format != "auto":
        return source, None
    name, head = without_credentials(source.path), list(islice(opened.rows(lambda *_: None), FORMAT_ROWS))
    if not head:
        raise UserError(f"{name}: has no row that can be read, so its format cannot be told; set `format`")
    try:
        found = detect_format([row for _, _, row in head], source.columns)
    except UserError as error:  # what it says of one row it says of the first
        raise UserError(f"{head[0][0]}:{head[0][1]}: {error}") from None
    note = f"{name}: format {found.format} ({found.reason})"
    return source.model_copy(update={"format": found.format, "columns": found.columns}), note


def work_of(data: Data, source: Source, made: Renderer) -> Work:
    return Work(made, source.format, source.columns, data.max_length, data.overlong, data.on_bad_row == "skip")


def check_heads(recipe: Recipe, made: Renderer) -> None:
    """Open every source of a recipe and render its first rows: a typo in the last must not cost the first's tokenising.

    Raises UserError as the build would.
    """
    train, held_out = recipe.data.train, recipe.data.eval
    for source, streaming in (*((one, recipe.data.streaming) for one in train), *((one, False) for one in held_out)):
        plain = open_source(source, streaming)
        work = work_of(recipe.data, plain.source, made)
        with closing(items_of(plain.opened)) as items:
            for label, number, row in islice(items, HEAD_ROWS):
                try:
                    draw(work, row)
                except BadRow as error:
                    if not work.skips_bad:
                        raise UserError(bad_row_message((label, number), error)) from None
                except UserError as error:
                    raise UserError(f"{label}:{number}: {error}") from None


def build(
    writer: Writer,
    data: Data,
    plain: Plain,
    digest: str,
    made: Renderer,
    progress: Callable[[int], None] | None = None,
    workers: int | None = None,
) -> None:
    """Write all examples of a source whose content has this digest.

    progress: called with the rows done so far. workers: processes; by default one a core if there is enough to do.
    Raises UserError for bad rows beyond what the recipe allows, and where nothing is left.
    """
    untrained = _write(writer, data, plain, items_of(plain.opened), made, progress, workers)
    if SourceReader(plain.opened.source).digest() != digest:
        raise UserError(f"{plain.name}: was changed while it was read; start again when it is written whole")
    _check_share(writer.report, data.max_bad_share)
    _check_rest(writer.report, data.max_length, untrained, made)


def build_part(writer: Writer, data: Data, plain: Plain, items: Iterator[Item], made: Renderer) -> None:
    """Write the examples of some rows of a source; there may be none. Raises UserError as `build` does."""
    _write(writer, data, plain, items, made)
    _check_share(writer.report, data.max_bad_share)


def _write(
    writer: Writer,
    data: Data,
    plain: Plain,
    items: Iterator[Item],
    made: Renderer,
    progress: Callable[[int], None] | None = None,
    workers: int | None = None,
) -> Piece | None:
    """The examples of these rows; returns the first one that has no trained token."""
    report = writer.report
    report.path, report.format = plain.name, plain.source.format
    work, untrained = work_of(data, plain.source, made), None
    with BuildProgress(plain.name, plain.opened.estimated_rows()) as shown, closing(_chunks(items)) as chunks:
        head, several = _is_worth_it(chunks)
        workers = workers or (num_cores() if several else 1)
        with closing(tokenised(work, chain(head, chunks), workers)) as outcomes:
            for outcome in outcomes:
                _count(report, outcome)
                writer.append(outcome.flat)
                untrained = untrained or outcome.untrained
                shown.update(report.rows)
                if progress:
                    progress(report.rows)
    return untrained


# --- rows in chunks


def items_of(opened: SourceReader) -> Generator[Item, None, None]:
    """Rows in their order, those that cannot be read as the reason."""
    unread: list[Item] = []

    def note(label: str, number: int, message: str) -> None:
        unread.append((label, number, message))

    rows, failure = opened.rows(note), None
    while failure is None:
        try:
            item = next(rows, None)
        except UserError as error:
            item, failure = None, error
        except OSError as error:
            item, failure = (
                None,
                UserError(f"{without_credentials(opened.source.path)}: cannot be read: {error.strerror or error}"),
            )
        yield from unread
        unread.clear()
        if item is None:
            break
        yield item
    if failure:
        raise failure


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
        characters += size_of(item[2])
        if len(chunk) == CHUNK_ROWS or characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk
    if failure:
        raise failure


def size_of(value: Any) -> int:
    """Characters in a row, about."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(size_of, value.values()))
    if isinstance(value, Sequence):
        return sum(map(size_of, value)) if value and not isinstance(value[0], int) else 8 * len(value)
    return 8


def _is_worth_it(chunks: Iterator[list[Item]]) -> tuple[Iterator[list[Item]], bool]:
    """The first chunks, and whether there is enough text for more than one process."""
    head: list[list[Item]] = []
    characters = 0
    try:
        for chunk in chunks:
            head.append(chunk)
            characters += sum(size_of(row) for _, _, row in chunk)
            if characters >= SMALL_CHARACTERS:
                return iter(head), True
    except UserError as error:
        return _then_raise(head, error), False
    return iter(head), False


def _then_raise(head: list[list[Item]], error: UserError) -> Iterator[list[Item]]:
    yield from head
    raise error


# --- what became of them


def _count(report: SourceReport, outcome: Outcome) -> None:
    if outcome.failed:
        raise UserError(outcome.failed)
    for name, count in outcome.counts.items():
        setattr(report, name, getattr(report, name) + count)
    room = BAD_ROWS_LISTED - len(report.bad_rows)
    report.bad_rows += outcome.bad_rows[:room]
    report.examples += len(outcome.flat.lengths)
    report.tokens += len(outcome.flat.input_ids)
    report.supervised_tokens += int(outcome.flat.num_trained.sum())


def _check_share(report: SourceReport, most: float) -> None:
    if report.rows and report.bad > most * report.rows:
        listed = "\n".join(f"  {line}" for line in report.bad_rows)
        raise UserError(
            f"{report.path}: {report.bad} of {report.rows} rows are bad, more than data.max_bad_share "
            f"({most:g}) allows. The first of them:\n{listed}"
        )


def _check_rest(report: SourceReport, max_length: int, untrained: Piece | None, made: Renderer) -> None:
    """An error where no example is left, with one that was dropped and its mask."""
    if report.examples:
        return
    message = (
        f"{report.path}: none of its {report.rows} rows can be trained on: {report.bad} bad, "
        f"{report.dropped_overlong} longer than data.max_length ({max_length}), "
        f"{report.no_supervised_token} without a trained token"
    )
    if untrained:
        label, number = untrained.place
        shown = plain_text(untrained.input_ids, untrained.trained, made.tokenizer)
        message += f".\n{label}:{number}, with [[ ]] around what is trained:\n{shown}"
    raise UserError(message)
