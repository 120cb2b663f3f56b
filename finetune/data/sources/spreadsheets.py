"""Rows of a spreadsheet (.xlsx): the cells of its one sheet that has any, as text, below a header.

openpyxl reads them, 10,000 rows a second: it streams a sheet, and tells errors and dates from texts and numbers.
python-calamine takes a fifteenth of the time, but makes an empty text of an error such as #REF!, and a file of two
cells far apart aborts the process: it allocates all cells between them.
"""

from __future__ import annotations

import datetime
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import IO, Any

from finetune.data.samples import BadRow
from finetune.data.sources.files import File, NumberedRows, check_unique, seekable_content
from finetune.errors import UserError

MAX_BYTES = 2**30  # of a file unpacked: the texts that cells share are in memory
MAX_ROWS = 2**20  # of Excel; a damaged file may skip as many as it likes
# What zipfile, the parser of XML and openpyxl raise for damaged files.
_BROKEN = (
    *(zipfile.BadZipFile, zlib.error, SyntaxError, LookupError, ValueError, TypeError, AttributeError),
    *(RuntimeError, EOFError),
)


def xlsx(file: File) -> NumberedRows:
    """Yields a row for each line of cells below the header, with its number in the sheet; empty cells are empty texts.

    Raises UserError if several sheets have cells, or the file is none that can be read.
    """
    if find_spec("openpyxl") is None:
        raise UserError(
            f"{file.label}: spreadsheets need the package openpyxl. Fix: pip install 'finetune-recipes[tables]', or "
            "save the sheet as CSV (UTF-8)"
        )
    try:
        with seekable_content(file) as stream:
            lines = _lines(file, _filled_sheet(file, stream))
            number, first = next(lines)
            header = {i: cell.strip() for i, cell in first.items() if isinstance(cell, str) and cell.strip()}
            check_unique(f"{file.label}:{number}: the header has", list(header.values()))
            for number, cells in lines:
                yield number, _row(header, cells)
    except _BROKEN as error:
        reason = " ".join(str(error).split())[:100]
        raise UserError(
            f"{file.label}: not a readable spreadsheet ({reason}). It may be damaged, or protected by a password. Fix: "
            "save the sheet as CSV (UTF-8)"
        ) from None


def _filled_sheet(file: File, stream: IO[bytes]) -> Any:
    """Returns openpyxl's sheet that has cells. Raises UserError if there is not exactly one."""
    import openpyxl

    with zipfile.ZipFile(stream) as archive:  # which reads no more of a part than is stated here
        unpacked = sum(part.file_size for part in archive.infolist())
    if unpacked > MAX_BYTES:
        raise UserError(
            f"{file.label}: a spreadsheet of {unpacked / 2**30:.1f} GiB unpacked, more than {MAX_BYTES / 2**30:g}. "
            "Fix: save the sheet as CSV (UTF-8)"
        )
    with warnings.catch_warnings():  # of settings for the screen that openpyxl does not know
        warnings.simplefilter("ignore")
        book = openpyxl.load_workbook(stream, read_only=True, data_only=True, keep_links=False)
    filled = []
    for sheet in book.worksheets:
        sheet.reset_dimensions()  # stated, not counted
        if next(_lines(file, sheet), None) is not None:
            filled.append(sheet)
    if len(filled) != 1:
        hidden = {True: "", False: " (hidden)"}
        names = ", ".join(one.title + hidden[one.sheet_state == "visible"] for one in filled) or "none"
        raise UserError(
            f"{file.label}: expected one sheet with cells, found {names}. Fix: save the one to use as a file of its own"
        )
    return filled[0]


def _lines(file: File, sheet: Any) -> Iterator[tuple[int, dict[int, str | BadRow]]]:
    """Yields (number, cells that are not empty by the number of their column) of the lines with a value."""
    rows, number = sheet.iter_rows(), 0
    while True:
        with warnings.catch_warnings():  # of dates out of range, which become errors, and extensions of a sheet
            warnings.simplefilter("ignore")
            row = next(rows, None)
        if row is None:
            return
        number += 1
        if number > MAX_ROWS:
            raise UserError(f"{file.label}: more than {MAX_ROWS:,} rows. Fix: save the sheet as CSV (UTF-8)")
        if cells := {i: _text(cell) for i, cell in enumerate(row) if cell.value not in (None, "")}:
            yield number, cells


def _text(cell: Any) -> str | BadRow:
    value = cell.value
    if cell.data_type == "e":
        return BadRow(f"has the error {value}")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.15g}"  # Excel's own digits: it stores 0.1 as 0.10000000000000001
    if isinstance(value, datetime.datetime) and value.time() == datetime.time():
        return value.date().isoformat()
    return value.isoformat() if isinstance(value, datetime.datetime | datetime.time) else str(value)


def _row(header: dict[int, str], cells: dict[int, str | BadRow]) -> dict[str, Any] | BadRow:
    from openpyxl.utils import get_column_letter

    for column, cell in cells.items():
        where = f"cell {get_column_letter(column + 1)}"
        if isinstance(cell, BadRow):
            return BadRow(f"{where}: {cell}")
        if column not in header and cell.strip():
            return BadRow(f"{where} has a value ({cell[:40]!r}), but its column no name in the header")
    return {name: cells.get(column, "") for column, name in header.items()}
