"""Rows of a spreadsheet (.xlsx, ECMA-376 part 1): the cells of its one sheet that has any, as text, below a header."""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO, Any
from xml.etree import ElementTree

from finetune.data.samples import BadRow
from finetune.data.sources.files import File, NumberedRows, check_unique, seekable_content
from finetune.errors import UserError

_MAIN = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"
_RELATION = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}id"
_BROKEN = (zipfile.BadZipFile, zlib.error, ElementTree.ParseError, KeyError, IndexError, ValueError, RuntimeError)


def xlsx(file: File) -> NumberedRows:
    """Yields a row for each line of cells below the header, with its number in the sheet; empty cells are empty texts.

    Raises UserError if several sheets have cells, or the file is none that can be read.
    """
    try:
        with seekable_content(file) as stream, zipfile.ZipFile(stream) as book:
            shared = []  # texts that cells refer to by number
            if "xl/sharedStrings.xml" in book.namelist():
                with book.open("xl/sharedStrings.xml") as texts:
                    shared = [_text(item) for item in _elements(texts, "si")]
            relations = ElementTree.fromstring(book.read("xl/_rels/workbook.xml.rels"))
            targets = {one.get("Id"): one.get("Target", "") for one in relations}
            filled = []  # (name, path) of the sheets with cells
            for sheet in ElementTree.fromstring(book.read("xl/workbook.xml")).iter(f"{_MAIN}sheet"):
                target = targets[sheet.get(_RELATION)]
                path = target.lstrip("/") if target.startswith("/") else f"xl/{target}"
                if next(_lines(book, path, shared), None) is not None:
                    filled.append((sheet.get("name", ""), path))
            if len(filled) != 1:
                names = ", ".join(name for name, _ in filled) or "none"
                raise UserError(
                    f"{file.label}: expected one sheet with cells, and has {names}: save the one to use as a file "
                    "of its own"
                )
            lines = _lines(book, filled[0][1], shared)
            number, first = next(lines)
            header = {column: cell.strip() for column, cell in first.items() if isinstance(cell, str) and cell.strip()}
            check_unique(f"{file.label}:{number}: the header has", list(header.values()))
            for number, cells in lines:
                yield number, _row(header, cells)
    except _BROKEN as error:
        reason = " ".join(str(error).split())[:100]
        raise UserError(
            f"{file.label}: not a readable spreadsheet ({reason}); is it damaged, or protected by a password? Save the "
            "sheet as CSV (UTF-8)"
        ) from None


def _row(header: dict[str, str], cells: dict[str, str | BadRow]) -> dict[str, Any] | BadRow:
    for column, cell in cells.items():
        if isinstance(cell, BadRow):
            return BadRow(f"cell {column}: {cell}")
        if column not in header and cell.strip():
            return BadRow(f"cell {column} has a value ({cell[:40]!r}), but its column no name in the header")
    return {name: cells.get(column, "") for column, name in header.items()}


def _lines(book: zipfile.ZipFile, path: str, shared: list[str]) -> Iterator[tuple[int, dict[str, str | BadRow]]]:
    """Yields (number, cells by the letters of their column) of the lines with a value."""
    number = 0
    with book.open(path) as stream:
        for line in _elements(stream, "row"):
            number = int(line.get("r") or number + 1)
            cells: dict[str, str | BadRow] = {}
            for i, cell in enumerate(line.iter(f"{_MAIN}c")):
                column = re.sub(r"\d", "", cell.get("r", "")) or f"#{i}"
                kind, value = cell.get("t", "n"), cell.findtext(f"{_MAIN}v") or ""
                if kind == "s":
                    cells[column] = shared[int(value)]
                elif kind == "inlineStr":
                    cells[column] = "".join(_text(inline) for inline in cell.iter(f"{_MAIN}is"))
                elif kind == "b":
                    cells[column] = "true" if value == "1" else "false"
                else:
                    cells[column] = BadRow(f"has the error {value}") if kind == "e" else value
            if any(cells.values()):
                yield number, cells


def _text(item: ElementTree.Element) -> str:
    """Returns the text of an item, which may have formatted runs, without phonetic hints."""
    runs = [item, *item.findall(f"{_MAIN}r")]
    return "".join(run.findtext(f"{_MAIN}t") or "" for run in runs)


def _elements(stream: IO[bytes], name: str) -> Iterator[ElementTree.Element]:
    """Yields elements as they end, and frees them."""
    for _, element in ElementTree.iterparse(stream):
        if element.tag == f"{_MAIN}{name}":
            yield element
            element.clear()
