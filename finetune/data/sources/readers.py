"""The readers: for each kind of file a function from its bytes to numbered rows, in `READERS`; a few rows at a time."""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from finetune.data.samples import BadRow
from finetune.data.sources.files import (
    COMPRESSIONS,
    DAMAGED,
    File,
    LabelledRows,
    NumberedRows,
    content,
    file_rows,
    kind_of,
    package_errors,
    seekable_content,
)
from finetune.data.sources.json_rows import array_items, parse_line, undecodable
from finetune.errors import UserError

LONGEST_LINE = 1 << 30  # bytes; beyond it a file is not one of lines, and would fill the memory
LARGEST_CELL = 1 << 28  # characters; csv's own limit, 128 KiB, is less than a long document

_NUL = "it has a NUL byte, so it is not UTF-8 text (UTF-16, or not text at all?); save the file as UTF-8"
# surrogateescape decodes a byte that is not UTF-8 to U+DC80..U+DCFF, which no UTF-8 text has; U+DC00 stands for NUL.
_NUL_SIGN = "\udc00"


def txt(file: File) -> NumberedRows:
    """A row for each line that is not blank, as {"text": line}."""
    with content(file) as stream:
        for number, line in lines(file.label, stream):
            if isinstance(line, BadRow):
                yield number, line
            elif "\r" in (text := line.removesuffix("\n").removesuffix("\r")):
                yield number, BadRow("it has a carriage return in its middle; save the file with \\n as line ends")
            elif text.strip():
                yield number, {"text": text}


def jsonl(file: File) -> NumberedRows:
    """A row for each line that is not blank."""
    with content(file) as stream:
        yield from json_lines(file.label, stream)


def json_file(file: File) -> NumberedRows:
    """Items of an array, counted from 1; objects line by line are read too, since many such files are called .json."""
    with content(file) as stream:
        head = stream.peek(1).removeprefix(codecs.BOM_UTF8)
        reader = array_items if head.lstrip().startswith(b"[") else json_lines
        yield from reader(file.label, stream)


def json_lines(label: str, stream: io.BufferedReader) -> NumberedRows:
    """An object a line."""
    for number, line in lines(label, stream):
        if isinstance(line, BadRow):
            yield number, line
        elif line.strip():
            yield number, parse_line(line, first=number == 1)


def lines(label: str, stream: io.BufferedReader) -> Iterator[tuple[int, str | BadRow]]:
    """(line number, text with its line end) of UTF-8 bytes, with or without a byte order mark."""
    for number, raw in _raw_lines(label, stream):
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            yield number, BadRow(f"byte {error.start + 1} of the line is not UTF-8; save the file as UTF-8")
        else:
            yield number, BadRow(_NUL) if "\0" in line else line


def _raw_lines(label: str, stream: io.BufferedReader) -> Iterator[tuple[int, bytes]]:
    number = 0
    while raw := stream.readline(LONGEST_LINE):
        number += 1
        if len(raw) == LONGEST_LINE:
            raise UserError(f"{label}:{number}: a line of more than {LONGEST_LINE} bytes; is this a file of lines?")
        yield number, raw


def csv_file(file: File) -> NumberedRows:
    """A row for each record below the header; its number is the line that it begins on."""
    csv.field_size_limit(LARGEST_CELL)
    delimiter = "\t" if kind_of(file.name)[0] == ".tsv" else ","
    with content(file) as stream:
        # strict: a stray quote is an error, not a silent join of everything that follows.
        reader = csv.reader(_csv_lines(file.label, stream), strict=True, delimiter=delimiter)
        begins = 1
        try:
            header = next(reader, [])
            _check_header(file.label, header)
            begins = reader.line_num + 1
            for cells in reader:
                if cells:
                    yield begins, _csv_row(header, cells)
                begins = reader.line_num + 1
        except csv.Error as error:
            # An error of the file, not of one row: the begin of the next record is not known.
            raise UserError(f"{file.label}:{begins}: not valid CSV: {_csv_reason(error)}") from None


def _csv_lines(label: str, stream: io.BufferedReader) -> Iterator[str]:
    """Lines with signs in place of bytes that are not UTF-8: a record may span several, so none can be left out."""
    for number, raw in _raw_lines(label, stream):
        line = raw.decode("utf-8-sig" if number == 1 else "utf-8", "surrogateescape")
        yield line.replace("\0", _NUL_SIGN)


def _csv_reason(error: csv.Error) -> str:
    if "new-line character" in str(error):
        return "it has carriage returns that end no line; save the file with \\n as line ends"
    if "unexpected end of data" in str(error):
        return "a quote is opened here and never closed; quotes in a quoted cell are doubled"
    return f"{error}; quotes in a quoted cell are doubled"


def _check_header(label: str, header: list[str]) -> None:
    if any(map(undecodable, header)):
        raise UserError(f"{label}:1: the header is not UTF-8; save the file as UTF-8")
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise UserError(f"{label}:1: the header has `{twice[0][:100]}` twice; rename one of the columns")


def _csv_row(header: list[str], cells: list[str]) -> dict[str, str] | BadRow:
    if len(cells) != len(header):
        return BadRow(f"{len(cells)} cells in a table of {len(header)} columns; quote cells that hold a comma")
    if len(header) > 1 and cells == header:
        return BadRow("the header once more, as where files were joined; take the line out")
    for name, cell in zip(header, cells, strict=True):
        if sign := undecodable(cell):
            problem = _NUL if sign == _NUL_SIGN else "it is not UTF-8; save the file as UTF-8"
            return BadRow(f"`{name[:100]}`: {problem}")
    return dict(zip(header, cells, strict=True))


# --- tables: parquet, and arrow as a file or as a stream


ROWS_AT_ONCE = 128  # so that rows of 10 MB fit into memory


def parquet(file: File) -> NumberedRows:
    """Rows of a parquet file."""
    # pre_buffer, pyarrow's default, would hold all row groups at once.
    with seekable_content(file) as stream, pyarrow.parquet.ParquetFile(stream, pre_buffer=False) as table:
        _check_columns(file.label, table.schema_arrow)
        yield from _table_rows(table.iter_batches(batch_size=ROWS_AT_ONCE))


def arrow(file: File) -> NumberedRows:
    """Rows of an arrow file: the random-access kind, or the stream that `datasets` writes."""
    with seekable_content(file) as stream:
        is_file = stream.read(6) == b"ARROW1"
        stream.seek(0)
        with pyarrow.ipc.open_file(stream) if is_file else pyarrow.ipc.open_stream(stream) as reader:
            _check_columns(file.label, reader.schema)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else iter(reader)
            yield from _table_rows(batches)


def _check_columns(label: str, schema: pyarrow.Schema) -> None:
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise UserError(f"{label}: the table has a column `{twice[0][:100]}` twice; rename one of them")


def _table_rows(batches: Iterable[pyarrow.RecordBatch]) -> NumberedRows:
    number = 0
    for batch in batches:
        for begin in range(0, batch.num_rows, ROWS_AT_ONCE):
            for row in _python_rows(batch.slice(begin, ROWS_AT_ONCE)):
                number += 1
                yield number, row


def _python_rows(batch: pyarrow.RecordBatch) -> list[dict[str, Any] | BadRow]:
    try:
        return batch.to_pylist()
    # A date beyond Python's, text that is not UTF-8: errors of one row, not of the file.
    except (ValueError, OverflowError, pyarrow.ArrowException) as error:
        if batch.num_rows == 1:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            return [BadRow(f"a value that cannot be read: {reason[:200]}")]
    return [row for i in range(batch.num_rows) for row in _python_rows(batch.slice(i, 1))]


# --- which function reads which kind of file


# By the suffix of the name, without a compression's.
READERS: dict[str, Callable[[File], NumberedRows]] = {
    ".json": json_file,
    ".jsonl": jsonl,
    ".ndjson": jsonl,
    ".csv": csv_file,
    ".tsv": csv_file,
    ".txt": txt,
    ".parquet": parquet,
    ".arrow": arrow,
}


def is_data(name: str) -> bool:
    """Whether a file of this name is one that is read."""
    return kind_of(name)[0] in READERS


def expected_kinds() -> str:
    """The kinds of file that are read, for messages."""
    kinds = ", ".join(kind.lstrip(".") for kind in READERS)
    return f"expected {kinds}, or one of them compressed ({', '.join(COMPRESSIONS)})"


def rows_of(file: File) -> LabelledRows:
    """(label, number, row or BadRow) of a file, from the start. Raises UserError where the rest cannot be read."""
    return file_rows(file, READERS[kind_of(file.name)[0]])


# --- about how many rows there are, for the person who waits; never for what is read


ESTIMATE_BYTES = 1 << 20
LINE_KINDS = (".jsonl", ".ndjson", ".txt", ".csv", ".tsv")


def estimated_rows(files: Sequence[File]) -> int | None:
    """About how many rows the files have; None where only reading all of them would tell."""
    counts = [_estimated_rows(file) for file in files]
    return None if None in counts else sum(count for count in counts if count is not None)


def _estimated_rows(file: File) -> int | None:
    """By the footer of a parquet file, by the first megabyte of a file of lines."""
    kind, compression = kind_of(file.name)
    try:
        if kind == ".parquet" and not compression:
            with seekable_content(file) as stream:
                return pyarrow.parquet.read_metadata(stream).num_rows
        size = file.size()
        if kind not in LINE_KINDS or compression or size is None:
            return None
        with file.open() as stream:
            head = stream.read(ESTIMATE_BYTES)
    except (OSError, UserError, *DAMAGED, *package_errors()):  # reading it raises the better error
        return None
    lines = head.count(b"\n")
    return round(lines * size / len(head)) if lines else None
