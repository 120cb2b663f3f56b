"""Readers: for each kind of file a function from its bytes to numbered rows, in `READERS`; a few rows at a time.

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
from finetune.data.sources.arrow_features import Table
from finetune.data.sources.files import (
    BUFFER_BYTES,
    COMPRESSIONS,
    File,
    LabelledRows,
    NumberedRows,
    check_unique,
    content,
    file_rows,
    kind_of,
    seekable_content,
)
from finetune.data.sources.spreadsheets import xlsx
from finetune.data.visible_text import visible
from finetune.errors import UserError


class _NotFinite(Exception):
    """Raised for a number that JSON does not have; the caller adds its position."""


def _not_finite(text: str) -> float:
    raise _NotFinite(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRow(f"an object has `{visible(twice[:100])}` twice; only one of the two can be meant")
    if not all(map(str.isascii, unique)) and (broken := next(filter(undecodable, unique), None)) is not None:
        raise BadRow(f"the name {broken[:40]!a} of an object contains an unpaired surrogate; write it whole")
    return unique


STRICT = json.JSONDecoder(
    object_pairs_hook=_unique,
    parse_constant=_not_finite,
    parse_float=lambda text: number if math.isfinite(number := float(text)) else _not_finite(text),
)
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


def decode_text(text: str) -> Any:
    """Returns the value of a JSON text, of any kind. Raises BadRow."""
    try:
        return STRICT.decode(text)
    except _NotFinite as error:
        raise BadRow(f"its JSON has {str(error)[:40]}, which is no JSON number; write a number or null") from None
    except json.JSONDecodeError as error:
        raise BadRow(_not_json(error, text)) from None
    except (RecursionError, ValueError) as error:  # nested without end, a number of thousands of digits
        raise BadRow(f"JSON that cannot be read: {str(error)[:200]}") from None


def _path_of_not_finite(value: Any, path: str = "") -> str | None:
    """Returns the path, such as `messages[2].score`, of the first NaN or infinite number."""
    if isinstance(value, float) and not math.isfinite(value):
        return path
    parts: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        parts = [(f"{path}.{name}" if path else name, item) for name, item in value.items()]
    elif isinstance(value, list):
        parts = [(f"{path}[{i}]", item) for i, item in enumerate(value)]
    return next((inner for name, item in parts if (inner := _path_of_not_finite(item, name)) is not None), None)


def undecodable(text: str) -> str | None:
    """Returns the sign of the first byte that was not UTF-8 (see `_NUL_SIGN`); None if all of it was text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[error.start]
    return None


def _not_json(error: json.JSONDecodeError, text: str) -> str:
    """Returns the problem, with a little of the text around it."""
    near = text[max(error.pos - 10, 0) : error.pos + 20]
    return f"not valid JSON: {error.msg} at column {error.colno}" + (f", near {near!a}" if near else "")


# --- an array, item by item


BLOCK_BYTES = 1 << 20  # read at a time, and as much as there is already if an item is longer
_SPACE = re.compile(r"[ \t\r\n]*")
# The longest thing that may be cut in two by the end of a block: "-Infinity", or an escape such as "\ud83e".
LONGEST_CUT = 16


class _Array:
    """A JSON array in a file, of whose text a part is in memory: `_text` from `_at` on is still to be parsed."""

    def __init__(self, label: str, stream: io.BufferedReader):
        self._label, self._stream = label, stream
        self._text, self._at, self._line, self._ended = "", 0, 1, False
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")

    def items(self) -> NumberedRows:
        """Yields the items, counted from 1. Raises UserError with the line if the file is not an array."""
        self._take("[")
        number = 0
        while not (self._peek() == "]" and not number):
            number += 1
            self._peek()
            line = self._line
            while True:  # until the value is complete
                try:
                    value, end = decode_at(self._text, self._at)
                    if end < len(self._text) or self._ended:  # else a number may continue in the next block
                        break
                except json.JSONDecodeError as error:
                    is_cut = error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - LONGEST_CUT
                    if self._ended or not is_cut:
                        raise self._problem(error.pos, _not_json(error, self._text)) from None
                except (RecursionError, ValueError) as error:
                    raise self._problem(self._at, f"JSON that cannot be read: {str(error)[:200]}") from None
                self._read()
            if not isinstance(value, BadRow) and undecodable(self._text[self._at : end]):
                value = BadRow("it is not UTF-8; save the file as UTF-8")
            self._pass(end)
            yield number, (BadRow(f"(line {line}) {value}") if isinstance(value, BadRow) else value)
            if self._peek() != ",":
                break
            self._take(",")
        self._take("]")
        if self._peek():
            raise self._problem(self._at, "not valid JSON: more follows after the end of the array")

    def _peek(self) -> str:
        """Returns the next character that is not white space; "" at the end of the file."""
        while True:
            match = _SPACE.match(self._text, self._at)
            self._pass(match.end() if match else self._at)
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._read()

    def _take(self, expected: str) -> None:
        if self._peek() != expected:
            actual = f"found {self._text[self._at : self._at + 20]!a}" if self._peek() else "the file ends"
            raise self._problem(self._at, f"not valid JSON: expected `{expected}`, {actual}")
        self._pass(self._at + 1)

    def _problem(self, at: int, problem: str) -> UserError:
        """Returns an error of the file, not of one row: the begin of the next item is unknown."""
        line = self._line + self._text.count(chr(10), self._at, at)
        return UserError(f"{self._label}:{line}: {problem}. Fix: correct the file")

    def _read(self) -> None:
        # As much again as is there: the work is linear in the length of an item.
        block = self._stream.read(max(BLOCK_BYTES, len(self._text) - self._at))
        self._ended = not block
        self._text, self._at = self._text[self._at :] + self._decoder.decode(block, self._ended), 0

    def _pass(self, to: int) -> None:
        self._line += self._text.count("\n", self._at, to)
        self._at = to


# --- files of lines


LONGEST_LINE = 1 << 30  # bytes; beyond it a file is not one of lines, and would fill the memory
LARGEST_CELL = 1 << 28  # characters; csv's own limit, 128 KiB, is less than a long document

_NUL = "it has a NUL byte, so it is not UTF-8 text (UTF-16, or not text at all?); save the file as UTF-8"
# surrogateescape decodes a byte that is not UTF-8 to U+DC80..U+DCFF, which no UTF-8 text has; U+DC00 stands for NUL.
_NUL_SIGN = "\udc00"


def _raw_lines(label: str, stream: io.BufferedReader) -> Iterator[tuple[int, bytes]]:
    for number, raw in enumerate(iter(lambda: stream.readline(LONGEST_LINE), b""), start=1):
        if len(raw) == LONGEST_LINE:
            raise UserError(f"{label}:{number}: a line of more than {LONGEST_LINE} bytes. Fix: give a file of lines")
        yield number, raw


def _lines(label: str, stream: io.BufferedReader) -> Iterator[tuple[int, str | BadRow]]:
    """Yields (line number, text with its line end) of UTF-8 bytes, with or without a byte order mark."""
    for number, raw in _raw_lines(label, stream):
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            yield number, BadRow(f"byte {error.start + 1} of the line is not UTF-8; save the file as UTF-8")
        else:
            yield number, BadRow(_NUL) if "\0" in line else line


def txt(file: File, unit: str = "line") -> NumberedRows:
    """Yields a row {"text": ...} for each line that is not blank, each paragraph, or the file, by its first line.

    unit: line, paragraph (up to a blank line) or file.
    """
    first, joined, last = 0, list[str](), 0  # the lines of a paragraph or file so far
    with content(file) as stream:
        for number, line in _lines(file.label, stream):
            text = line if isinstance(line, BadRow) else line.removesuffix("\n").removesuffix("\r")
            if isinstance(text, str) and "\r" in text:
                text = BadRow("it has a carriage return in its middle; save the file with \\n as line ends")
            if isinstance(text, BadRow):
                yield number, text
            elif text.strip() and unit == "line":
                yield number, {"text": text}
            elif text.strip():
                blank_lines = number - last - 1 if joined else 0
                if blank_lines and unit == "paragraph":
                    yield first, {"text": "\n".join(joined)}
                    joined = []
                first, last = (first if joined else number), number
                joined += [""] * (blank_lines if joined else 0) + [text]
        if joined:
            yield first, {"text": "\n".join(joined)}


def json_rows(file: File) -> NumberedRows:
    """Yields one object per line. A .json file may also be an array, its items counted from 1; many have lines, too."""
    with content(file) as stream:
        head = stream.peek(1).removeprefix(codecs.BOM_UTF8)
        if kind_of(file.name)[0] == ".json" and head.lstrip().startswith(b"["):
            yield from _Array(file.label, stream).items()
            return
        for number, line in _lines(file.label, stream):
            if isinstance(line, BadRow):
                yield number, line
            elif line.strip():
                yield number, _parse_line(line, first=number == 1)


def _parse_line(line: str, first: bool) -> dict[str, Any] | BadRow:
    text = line.rstrip(" \t\r\n")
    start = len(text) - len(text.lstrip(" \t\r\n"))
    advice = "expected one object a line"
    if "\r" in text:
        advice = "the file's lines end in carriage returns alone; save it with \\n as line ends"
    elif first and text.lstrip().startswith("["):
        advice = "the file looks like a JSON array: name it .json"
    elif text.strip() == "{":
        advice = "expected one object a line, whole; an array of objects goes into a .json file"
    try:
        value, end = decode_at(text, start)
        if end < len(text):
            raise json.JSONDecodeError("Extra data", text, end)
    except json.JSONDecodeError as error:
        return BadRow(f"{_not_json(error, text)}; {advice}")
    except (RecursionError, ValueError) as error:  # nested without end, a number of thousands of digits
        return BadRow(f"JSON that cannot be read: {str(error)[:200]}")
    if isinstance(value, BadRow) and first and text[start] == "[":
        return BadRow(f"{value}; {advice}")
    return value


def csv_file(file: File) -> NumberedRows:
    """Yields a row for each record below the header; its number is the line that it begins on."""
    csv.field_size_limit(LARGEST_CELL)
    with content(file) as stream:
        # A comma, unless the header has semicolons instead, as spreadsheet programs write if 1,5 is a number.
        first = re.sub(rb'"[^"]*"', b"", stream.peek(BUFFER_BYTES).partition(b"\n")[0])
        is_tab, is_semicolon = kind_of(file.name)[0] == ".tsv", b";" in first and b"," not in first
        delimiter = "\t" if is_tab else ";" if is_semicolon else ","
        # Signs in place of bytes that are not UTF-8: a record may span several lines, so each line must stay.
        lines = (
            raw.decode("utf-8-sig" if number == 1 else "utf-8", "surrogateescape").replace("\0", _NUL_SIGN)
            for number, raw in _raw_lines(file.label, stream)
        )
        # strict: a stray quote is an error, not a silent join of everything that follows.
        reader = csv.reader(lines, strict=True, delimiter=delimiter)
        begins = 1
        try:
            header = next(reader, [])
            if any(map(undecodable, header)):
                raise UserError(f"{file.label}:1: the header is not UTF-8. Fix: save the file as UTF-8")
            check_unique(f"{file.label}:1: the header has", header)
            begins = reader.line_num + 1
            for cells in reader:
                if cells:
                    yield begins, _csv_row(header, cells, delimiter)
                begins = reader.line_num + 1
        except csv.Error as error:
            reason, fix = str(error), "double the quotes in a quoted cell"
            if "new-line character" in reason:
                reason, fix = "it has carriage returns that end no line", "save the file with \\n as line ends"
            elif "unexpected end of data" in reason:
                reason, fix = "a quote is opened here and never closed", f"close it, or {fix}"
            # An error of the file, not of one row: the begin of the next record is unknown.
            raise UserError(f"{file.label}:{begins}: not valid CSV: {reason}. Fix: {fix}") from None


def _csv_row(header: list[str], cells: list[str], delimiter: str) -> dict[str, str] | BadRow:
    if len(cells) != len(header):
        name = {",": "comma", ";": "semicolon", "\t": "tab"}[delimiter]
        return BadRow(f"{len(cells)} cells in a table of {len(header)} columns; quote cells that hold a {name}")
    if len(header) > 1 and cells == header:
        return BadRow("the header is repeated, as in files that were joined; take the line out")
    for name, cell in zip(header, cells, strict=True):
        if sign := undecodable(cell):
            problem = _NUL if sign == _NUL_SIGN else "it is not UTF-8; save the file as UTF-8"
            return BadRow(f"`{name[:100]}`: {problem}")
    return dict(zip(header, cells, strict=True))


# --- tables: parquet, and arrow as a file or as a stream


ROWS_AT_ONCE = 128  # so that rows of 10 MB fit into memory


def parquet(file: File) -> NumberedRows:
    # pre_buffer, pyarrow's default, would hold all row groups at once.
    with seekable_content(file) as stream, pyarrow.parquet.ParquetFile(stream, pre_buffer=False) as table:
        check_unique(f"{file.label}: the table has a column", table.schema_arrow.names)
        decoded = Table.of(file.label, table.schema_arrow, decode_text)
        yield from _table_rows(decoded, table.iter_batches(batch_size=ROWS_AT_ONCE))


def arrow(file: File) -> NumberedRows:
    """Yields rows of the random-access kind of file, or of the stream that `datasets` writes."""
    with seekable_content(file) as stream:
        is_file = stream.read(6) == b"ARROW1"
        stream.seek(0)
        with pyarrow.ipc.open_file(stream) if is_file else pyarrow.ipc.open_stream(stream) as reader:
            check_unique(f"{file.label}: the table has a column", reader.schema.names)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else iter(reader)
            yield from _table_rows(Table.of(file.label, reader.schema, decode_text), batches)


def _table_rows(table: Table, batches: Iterable[pyarrow.RecordBatch]) -> NumberedRows:
    number = 0
    for batch in batches:
        for begin in range(0, batch.num_rows, ROWS_AT_ONCE):
            for row in rows_of_batch(table, batch.slice(begin, ROWS_AT_ONCE)):
                number += 1
                yield number, row


def rows_of_batch(
    table: Table, batch: pyarrow.RecordBatch | pyarrow.Table
) -> list[dict[str, Any]] | list[dict[str, Any] | BadRow]:
    """Returns the rows of a part of a table, and a BadRow for each that cannot be read."""
    try:
        return table.rows(batch)
    except BadRow as error:
        if batch.num_rows == 1:
            return [error]
    # A date beyond Python's, text that is not UTF-8: errors of one row, not of the file.
    except (ValueError, OverflowError, pyarrow.ArrowException) as error:
        if batch.num_rows == 1:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            return [BadRow(f"a value that cannot be read: {reason[:200]}")]
    return [row for i in range(batch.num_rows) for row in rows_of_batch(table, batch.slice(i, 1))]


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
    ".xlsx": xlsx,
}
# Texts that are read if they are named, or nothing else is in a folder: a README beside rows is none of them.
DOCUMENTS = (".md", ".markdown")
# A line that turns other kinds into these.
_CONVERSIONS = {
    **dict.fromkeys((".xls", ".ods", ".numbers"), "save it as .xlsx, or as CSV (UTF-8)"),
    **dict.fromkeys((".html", ".htm"), "convert it: `pandoc -f html -t gfm --wrap=none page.html -o page.md`"),
    **dict.fromkeys((".docx", ".odt", ".rtf", ".epub"), "convert it: `pandoc -t gfm --wrap=none book.docx -o book.md`"),
    ".pdf": "convert it: `pdftotext -layout paper.pdf paper.txt`, and set `text_unit: file`",
    ".zip": "unpack it",
}


def is_data(name: str) -> bool:
    """Returns whether files of this name are read."""
    return kind_of(name)[0] in READERS


def is_document(name: str) -> bool:
    return kind_of(name)[0] in DOCUMENTS


def is_text(name: str) -> bool:
    """Returns whether `text_unit` says what a row of files of this name is."""
    return kind_of(name)[0] in (".txt", *DOCUMENTS)


def expected_kinds(names: Iterable[str] = (), fix: str = "give files of these kinds") -> str:
    """Returns the kinds of file that are read, and what to do, for messages. names: of files that are not, some of
    which can be converted."""
    kinds = ", ".join(kind.lstrip(".") for kind in (*READERS, DOCUMENTS[0]))
    advice = next((advice for name in names if (advice := _CONVERSIONS.get(kind_of(name)[0]))), "")
    return f"Expected {kinds}, or one of them compressed ({', '.join(COMPRESSIONS)}). Fix: {advice or fix}"


def rows_of(file: File, text_unit: str = "line") -> LabelledRows:
    """Yields (label, number, row or BadRow) of a file. Raises UserError if the rest cannot be read."""
    return file_rows(file, partial(txt, unit=text_unit) if is_text(file.name) else READERS[kind_of(file.name)[0]])
