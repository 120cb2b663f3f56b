"""A JSON array of rows, read item by item: memory is that of the largest item, not of the file."""

from __future__ import annotations

import codecs
import io
import json
import re
from typing import Any

from finetune.data.samples import BadRow
from finetune.data.sources.file import File, Numbered, content
from finetune.data.sources.json_text import decode_at, not_json
from finetune.data.sources.lines import json_lines, stray
from finetune.errors import UserError

BLOCK_BYTES = 1 << 20  # read at a time, and as much as there is already where an item is longer
_SPACE = re.compile(r"[ \t\r\n]*")
# The longest thing that may be cut in two by the end of what was read: "-Infinity", or an escape such as "\ud83e".
LONGEST_CUT = 16


def json_file(file: File) -> Numbered:
    """Items of an array, counted from 1; objects line by line are read too, since many such files are called .json."""
    with content(file) as stream:
        head = stream.peek(1).removeprefix(codecs.BOM_UTF8)
        reader = _items if head.lstrip().startswith(b"[") else json_lines
        yield from reader(file.label, stream)


def _items(label: str, stream: io.BufferedReader) -> Numbered:
    window = _Window(label, stream)
    window.take("[")
    number = 0
    while not (window.peek() == "]" and not number):
        number += 1
        yield number, window.item()
        if window.peek() != ",":
            break
        window.take(",")
    window.take("]")
    if window.peek():
        raise window.problem(window.at, "not valid JSON: more follows after the end of the array")


class _Window:
    """The part of a file's text that is looked at: `text` from `at` on is still to be read."""

    def __init__(self, label: str, stream: io.BufferedReader):
        self.label, self.stream = label, stream
        self.text, self.at, self.line, self.ended = "", 0, 1, False
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")

    def peek(self) -> str:
        """The next character that is no white space; empty at the end of the file."""
        while True:
            match = _SPACE.match(self.text, self.at)
            self._pass(match.end() if match else self.at)
            if self.at < len(self.text) or self.ended:
                return self.text[self.at : self.at + 1]
            self._read()

    def take(self, expected: str) -> None:
        if self.peek() != expected:
            found = f"found {self.text[self.at : self.at + 20]!a}" if self.peek() else "the file ends"
            raise self.problem(self.at, f"not valid JSON: expected `{expected}`, {found}")
        self._pass(self.at + 1)

    def item(self) -> dict[str, Any] | BadRow:
        self.peek()
        line = self.line
        value, end = self._decoded()
        if not isinstance(value, BadRow) and stray(self.text[self.at : end]):
            value = BadRow("it is not UTF-8; save the file as UTF-8")
        self._pass(end)
        return BadRow(f"(line {line}) {value}") if isinstance(value, BadRow) else value

    def _decoded(self) -> tuple[Any, int]:
        """(value, where it ends), with as much read as it takes."""
        while True:
            try:
                value, end = decode_at(self.text, self.at)
                if end < len(self.text) or self.ended:  # else a number may go on in what comes next
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
        """The whole file is at fault: where the next item begins, nobody knows."""
        return UserError(f"{self.label}:{self.line + self.text.count(chr(10), self.at, at)}: {what}")

    def _read(self) -> None:
        # As much again as is there: the work is linear in the length of an item.
        block = self.stream.read(max(BLOCK_BYTES, len(self.text) - self.at))
        self.ended = not block
        self.text, self.at = self.text[self.at :] + self._decoder.decode(block, self.ended), 0

    def _pass(self, to: int) -> None:
        self.line += self.text.count("\n", self.at, to)
        self.at = to
