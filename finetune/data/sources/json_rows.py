"""JSON as rows need it: strict, and an array item by item, so that memory is that of the largest item, not of the file.

What Python's json accepts and would change a row's meaning is refused: NaN and infinite numbers are no JSON (RFC 8259,
section 6); of a name that an object has twice Python keeps the later.
"""

from __future__ import annotations

import codecs
import io
import json
import math
import re
from typing import Any

from finetune.data.samples import BadRow
from finetune.data.sources.files import NumberedRows
from finetune.errors import UserError


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRow(f"an object has `{twice[:100]}` twice; only one of the two can be meant")
    return unique


class _NotFinite(Exception):
    """A number that JSON does not have; where it is, the caller finds out."""


def _not_finite(text: str) -> float:
    raise _NotFinite(text)


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _not_finite(text)


STRICT = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_not_finite, parse_float=_finite)
LENIENT = json.JSONDecoder()


def decode_at(text: str, at: int) -> tuple[Any, int]:
    """Returns (value, its end) of the JSON that begins at `at`; the value is a BadRow where it is JSON but no row.

    Raises json.JSONDecodeError, and ValueError or RecursionError for what Python's decoder gives up on.
    """
    try:
        value, end = STRICT.raw_decode(text, at)
        return as_row(value), end
    except BadRow as error:
        return error, LENIENT.raw_decode(text, at)[1]
    except _NotFinite as error:
        value, end = LENIENT.raw_decode(text, at)
        path = _path_of_not_finite(value) or "the value"
        return BadRow(f"`{path[:100]}` is {str(error)[:40]}, which is no JSON number; write a number or null"), end


def undecodable(text: str) -> str | None:
    """The sign of the first byte that was not UTF-8 (see `_NUL_SIGN` in readers.py); None where all of it was text."""
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


def as_row(value: Any) -> dict[str, Any]:
    """Raises BadRow for a value that is not an object."""
    if isinstance(value, dict):
        return value
    # No more than a glimpse: the value may have 10 MB.
    shown = json.dumps(value[:40] if isinstance(value, (str, list)) else value)
    raise BadRow(f"expected an object with columns, got {shown[:40]}")


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


BLOCK_BYTES = 1 << 20  # read at a time, and as much as there is already where an item is longer
_SPACE = re.compile(r"[ \t\r\n]*")
# The longest thing that may be cut in two by the end of what was read: "-Infinity", or an escape such as "\ud83e".
LONGEST_CUT = 16


def array_items(label: str, stream: io.BufferedReader) -> NumberedRows:
    """Items of an array, counted from 1. Raises UserError with the line where the file is not an array."""
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
                if self.ended or not self._may_be_cut(error):
                    raise self.problem(error.pos, not_json(error, self.text)) from None
            except (RecursionError, ValueError) as error:
                raise self.problem(self.at, f"JSON that cannot be read: {str(error)[:200]}") from None
            self._read()

    def _may_be_cut(self, error: json.JSONDecodeError) -> bool:
        return error.msg.startswith("Unterminated string") or error.pos >= len(self.text) - LONGEST_CUT

    def problem(self, at: int, what: str) -> UserError:
        """An error of the file, not of one row: the begin of the next item is not known."""
        return UserError(f"{self.label}:{self.line + self.text.count(chr(10), self.at, at)}: {what}")

    def _read(self) -> None:
        # As much again as is there: the work is linear in the length of an item.
        block = self.stream.read(max(BLOCK_BYTES, len(self.text) - self.at))
        self.ended = not block
        self.text, self.at = self.text[self.at :] + self._decoder.decode(block, self.ended), 0

    def _pass(self, to: int) -> None:
        self.line += self.text.count("\n", self.at, to)
        self.at = to
