"""The readers: for each kind of file a function from its bytes to numbered rows, in `READERS`; a few rows at a time.

JSON is read strictly, and an array item by item, so that memory is that of the largest item, not of the file. Input
that Python's json accepts but that changes a row's meaning is refused: NaN and infinite numbers are no JSON (RFC 8259,
section 6); of a name that an object has twice Python keeps the later.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from finetune.data.samples import BadRow
from finetune.data.sources.files import (
    COMPRESSIONS,
    File,
    LabelledRows,
    NumberedRows,
    content,
    file_rows,
    kind_of,
    seekable_content,
)
from finetune.data.visible_text import visible
from finetune.errors import UserError


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRow(f"an object has `{visible(twice[:100])}` twice; only one of the two can be meant")
    if not all(map(str.isascii, unique)) and (half := next(filter(undecodable, unique), None)) is not None:
        raise BadRow(f"an object has the name {half[:40]!a}, which has half a character; write it whole")
    return unique


class _NotFinite(Exception):
    """Raised for a number that JSON does not have; the caller adds its position."""


def _not_finite(text: str) -> float:
    raise _NotFinite(text)


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _not_finite(text)


STRICT = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_not_finite, parse_float=_finite)
LENIENT = json.JSONDecoder()


def decode_at(text: str, at: int) -> tuple[Any, int]:
    """Returns (value, its end) of the JSON that begins at `at`; the value is a BadRow if it is JSON but no row.

    Raises json.JSONDecodeError, and ValueError or RecursionError for values that Python's decoder gives up on.
    """
    try:
        value, end = STRICT.raw_decode(text, at)
        if isinstance(value, dict):
            return value, end
        # No more than a glimpse: the value may have 10 MB.
        shown = json.dumps(value[:40] if isinstance(value, (str, list)) else value)
        return BadRow(f"expected an object with columns, got {shown[:40]}"), end
    except BadRow as error:
        return error, LENIENT.raw_decode(text, at)[1]
    except _NotFinite as error:
        value, end = LENIENT.raw_decode(text, at)
        path = _path_of_not_finite(value) or "the value"
        return BadRow(f"`{path[:100]}` is {str(error)[:40]}, which is no JSON number; write a number or null"), end


def undecodable(text: str) -> str | None:
    """The sign of the first byte that was not UTF-8 (see `_NUL_SIGN` in readers.py); None if all of it was text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[error.start]
    return None


def parse_line(line: str, first: bool = False) -> dict[str, Any] | BadRow:
    """The object in a line."""
    text = line.rstrip(" \t\r\n")
    start = len(text) - len(text.lstrip(" \t\r\n"))
    try:
        value, end = decode_at(text, start)
        if end < len(text):
            raise json.JSONDecodeError("Extra data", text, end)
    except json.JSONDecodeError as error:
        return BadRow(f"{not_json(error, text)}; {_advice(text, first)}")
    except (RecursionError, ValueError) as error:  # nested without end, a number of thousands of digits
        return BadRow(f"JSON that cannot be read: {str(error)[:200]}")
    if isinstance(value, BadRow) and first and text[start] == "[":
        return BadRow(f"{value}; {_advice(text, first)}")
    return value


def not_json(error: json.JSONDecodeError, text: str) -> str:
    """Returns the problem, with a little of the text around it."""
    near = text[max(error.pos - 10, 0) : error.pos + 20]
    return f"not valid JSON: {error.msg} at column {error.colno}" + (f", near {near!a}" if near else "")


def _advice(line: str, first: bool) -> str:
    if "\r" in line:
        return "the file's lines end in carriage returns alone; save it with \\n as line ends"
    if first and line.lstrip().startswith("["):
        return "the file looks like a JSON array: name it .json"
    if line.strip() == "{":
        return "expected one object a line, whole; an array of objects goes into a .json file"
    return "expected one object a line"


def _path_of_not_finite(value: Any, path: str = "") -> str | None:
    """Returns the path, such as `messages[2].score`, of the first NaN or infinite number."""
    if isinstance(value, float) and not math.isfinite(value):
        return path
    if isinstance(value, dict):
        parts = [(f"{path}.{name}" if path else name, item) for name, item in value.items()]
    elif isinstance(value, list):
        parts = [(f"{path}[{i}]", item) for i, item in enumerate(value)]
    else:
        return None
    return next((inner for name, item in parts if (inner := _path_of_not_finite(item, name)) is not None), None)


# --- an array, item by item


BLOCK_BYTES = 1 << 20  # read at a time, and as much as there is already if an item is longer
_SPACE = re.compile(r"[ \t\r\n]*")
# The longest thing that may be cut in two by the end of a block: "-Infinity", or an escape such as "\ud83e".
LONGEST_CUT = 16


def array_items(label: str, stream: io.BufferedReader) -> NumberedRows:
    """Items of an array, counted from 1. Raises UserError with the line if the file is not an array."""
    array = _ArrayText(label, stream)
    array.take("[")
    number = 0
    while not (array.peek() == "]" and not number):
        number += 1
        yield number, array.item()
        if array.peek() != ",":
            break
        array.take(",")
    array.take("]")
    if array.peek():
        raise array.problem(array.at, "not valid JSON: more follows after the end of the array")


class _ArrayText:
    """The part of a file's text that is in memory: `text` from `at` on is still to be parsed."""

    def __init__(self, label: str, stream: io.BufferedReader):
        self.label, self.stream = label, stream
        self.text, self.at, self.line, self.ended = "", 0, 1, False
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")

    def peek(self) -> str:
        """The next character that is not white space; empty at the end of the file."""
        while True:
            match = _SPACE.match(self.text, self.at)
            self._pass(match.end() if match else self.at)
            if self.at < len(self.text) or self.ended:
                return self.text[self.at : self.at + 1]
            self._read()

    def take(self, expected: str) -> None:
        if self.peek() != expected:
            actual = f"found {self.text[self.at : self.at + 20]!a}" if self.peek() else "the file ends"
            raise self.problem(self.at, f"not valid JSON: expected `{expected}`, {actual}")
        self._pass(self.at + 1)

    def item(self) -> dict[str, Any] | BadRow:
        self.peek()
        line = self.line
        value, end = self._decoded()
        if not isinstance(value, BadRow) and undecodable(self.text[self.at : end]):
            value = BadRow("it is not UTF-8; save the file as UTF-8")
        self._pass(end)
        return BadRow(f"(line {line}) {value}") if isinstance(value, BadRow) else value

    def _decoded(self) -> tuple[Any, int]:
        """(value, its end); reads on until the value is complete."""
        while True:
            try:
                value, end = decode_at(self.text, self.at)
                if end < len(self.text) or self.ended:  # else a number may continue in the next block
                    return value, end
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated string") or error.pos >= len(self.text) - LONGEST_CUT
                if self.ended or not is_cut:
                    raise self.problem(error.pos, not_json(error, self.text)) from None
            except (RecursionError, ValueError) as error:
                raise self.problem(self.at, f"JSON that cannot be read: {str(error)[:200]}") from None
            self._read()

    def problem(self, at: int, what: str) -> UserError:
        """An error of the file, not of one row: the begin of the next item is unknown."""
        return UserError(f"{self.label}:{self.line + self.text.count(chr(10), self.at, at)}: {what}")

    def _read(self) -> None:
        # As much again as is there: the work is linear in the length of an item.
        block = self.stream.read(max(BLOCK_BYTES, len(self.text) - self.at))
        self.ended = not block
        self.text, self.at = self.text[self.at :] + self._decoder.decode(block, self.ended), 0

    def _pass(self, to: int) -> None:
        self.line += self.text.count("\n", self.at, to)
        self.at = to


# --- the readers


LONGEST_LINE = 1 << 30  # bytes; beyond it a file is not one of lines, and would fill the memory
LARGEST_CELL = 1 << 28  # characters; csv's own limit, 128 KiB, is less than a long document

_NUL = "it has a NUL byte, so it is not UTF-8 text (UTF-16, or not text at all?); save the file as UTF-8"
# surrogateescape decodes a byte that is not UTF-8 to U+DC80..U+DCFF, which no UTF-8 text has; U+DC00 stands for NUL.
_NUL_SIGN = "\udc00"


def txt(file: File, unit: str = "line") -> NumberedRows:
    """A row for each line that is not blank, each paragraph, or the file, as {"text": ...}; its number: the first line.

    unit: line, paragraph (up to a blank line) or file.
    """
    with content(file) as stream:
        if unit == "line":
            yield from (
                (number, {"text": line} if isinstance(line, str) else line) for number, line in _text(file, stream)
            )
            return
        first, joined, last = 0, list[str](), 0
        for number, line in _text(file, stream):
            if isinstance(line, BadRow):
                yield number, line
                continue
            blank_lines = number - last - 1 if joined else 0
            if blank_lines and unit == "paragraph":
                yield first, {"text": "\n".join(joined)}
                joined = []
            first, last = (first if joined else number), number
            joined += [""] * (blank_lines if joined else 0) + [line]
        if joined:
            yield first, {"text": "\n".join(joined)}


def _text(file: File, stream: io.BufferedReader) -> Iterator[tuple[int, str | BadRow]]:
    """(line number, text without its end) of the lines that are not blank."""
    for number, line in lines(file.label, stream):
        if isinstance(line, BadRow):
            yield number, line
        elif "\r" in (text := line.removesuffix("\n").removesuffix("\r")):
            yield number, BadRow("it has a carriage return in its middle; save the file with \\n as line ends")
        elif text.strip():
            yield number, text


def json_rows(file: File) -> NumberedRows:
    """One object per line. A .json file may also be an array, its items counted from 1; many have lines, too."""
    with content(file) as stream:
        head = stream.peek(1).removeprefix(codecs.BOM_UTF8)
        if kind_of(file.name)[0] == ".json" and head.lstrip().startswith(b"["):
            yield from array_items(file.label, stream)
            return
        for number, line in lines(file.label, stream):
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
            # An error of the file, not of one row: the begin of the next record is unknown.
            raise UserError(f"{file.label}:{begins}: not valid CSV: {_csv_reason(error)}") from None


def _csv_lines(label: str, stream: io.BufferedReader) -> Iterator[str]:
    """Lines with signs in place of bytes that are not UTF-8: a record may span several, so each line must stay."""
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
    ".json": json_rows,
    ".jsonl": json_rows,
    ".ndjson": json_rows,
    ".csv": csv_file,
    ".tsv": csv_file,
    ".txt": txt,
    ".parquet": parquet,
    ".arrow": arrow,
}


def is_data(name: str) -> bool:
    """Returns whether files of this name are read."""
    return kind_of(name)[0] in READERS


def expected_kinds() -> str:
    """The kinds of file that are read, for messages."""
    kinds = ", ".join(kind.lstrip(".") for kind in READERS)
    return f"expected {kinds}, or one of them compressed ({', '.join(COMPRESSIONS)})"


def rows_of(file: File, text_unit: str = "line") -> LabelledRows:
    """(label, number, row or BadRow) of a file, from the start. Raises UserError if the rest cannot be read.

    text_unit: of a txt file.
    """
    kind = kind_of(file.name)[0]
    return file_rows(file, partial(txt, unit=text_unit) if kind == ".txt" else READERS[kind])
