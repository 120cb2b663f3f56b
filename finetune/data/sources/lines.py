"""Files of lines: text, JSON by line, comma- or tab-separated values. Read as they stream: a line at a time."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from finetune.data.samples import BadRow
from finetune.data.sources.file import File, Numbered, content, kind_of
from finetune.data.sources.json_text import json_object
from finetune.errors import UserError

LONGEST_LINE = 1 << 30  # bytes; beyond it a file is not one of lines, and would fill the memory
LARGEST_CELL = 1 << 28  # characters; csv's own limit, 128 KiB, is less than a long document

_NUL = "it has a NUL byte, so it is not UTF-8 text (UTF-16, or not text at all?); save the file as UTF-8"
# surrogateescape decodes a byte that is not UTF-8 to U+DC80..U+DCFF, which no UTF-8 text has; U+DC00 we put for NUL.
_NUL_SIGN = "\udc00"


def stray(text: str) -> str | None:
    """The sign of the first byte that was no text; None: all of it was. Such signs are what cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[error.start]
    return None


def txt(file: File) -> Numbered:
    """A row for each line that is not blank, as {"text": line}."""
    with content(file) as stream:
        for number, line in lines(file.label, stream):
            if isinstance(line, BadRow):
                yield number, line
            elif "\r" in (text := line.removesuffix("\n").removesuffix("\r")):
                yield number, BadRow("it has a carriage return in its middle; save the file with \\n as line ends")
            elif text.strip():
                yield number, {"text": text}


def jsonl(file: File) -> Numbered:
    """A row for each line that is not blank."""
    with content(file) as stream:
        yield from json_lines(file.label, stream)


def json_lines(label: str, stream: io.BufferedReader) -> Numbered:
    """An object a line."""
    for number, line in lines(label, stream):
        if isinstance(line, BadRow):
            yield number, line
        elif line.strip():
            yield number, json_object(line, first=number == 1)


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


def csv_file(file: File) -> Numbered:
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
            # The file, not the row: where the record would have ended, and the next begins, nobody knows.
            raise UserError(f"{file.label}:{begins}: not valid CSV: {_csv_reason(error)}") from None


def _csv_lines(label: str, stream: io.BufferedReader) -> Iterator[str]:
    """Lines with signs in place of what is not text: a line cannot be left out, for a record may go over several."""
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
    if any(map(stray, header)):
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
        if found := stray(cell):
            what = _NUL if found == _NUL_SIGN else "it is not UTF-8; save the file as UTF-8"
            return BadRow(f"`{name[:100]}`: {what}")
    return dict(zip(header, cells, strict=True))
