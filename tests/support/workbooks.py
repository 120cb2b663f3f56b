"""Spreadsheets as Excel writes them, and parts of them changed."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openpyxl

SHARED = "xl/sharedStrings.xml"
MAIN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
Line = Sequence[Any]  # values of cells; None: no cell


def workbook(path: Path, sheets: dict[str, list[Line]], hidden: Sequence[str] = ()) -> Path:
    book = openpyxl.Workbook()
    book.remove(book.worksheets[0])
    for name, lines in sheets.items():
        sheet = book.create_sheet(name)
        sheet.sheet_state = "hidden" if name in hidden else "visible"
        for row, line in enumerate(lines, start=1):
            for column, value in enumerate(line, start=1):
                sheet.cell(row, column, value)
    book.save(path)
    _share_texts(path)
    return path


def replace_in(path: Path, part: str, old: str, new: str) -> None:
    """Replaces text in a part of a workbook, such as `xl/sharedStrings.xml`."""
    parts = _parts(path)
    assert old in parts[part], parts[part]
    parts[part] = parts[part].replace(old, new)
    _write(path, parts)


def _share_texts(path: Path) -> None:
    """Puts texts of cells into a part of their own, which the cells refer to by number; openpyxl may not."""
    parts, texts = _parts(path), list[str]()
    if SHARED in parts:
        return

    def refer(cell: re.Match[str]) -> str:
        texts.append(cell[1])
        return f't="s"><v>{len(texts) - 1}</v></c>'

    for name in parts:
        if name.startswith("xl/worksheets/"):
            parts[name] = re.sub(r't="inlineStr"><is>(.*?)</is></c>', refer, parts[name])
    parts[SHARED] = f'<sst xmlns="{MAIN}">{"".join(f"<si>{text}</si>" for text in texts)}</sst>'
    kind = "application/vnd.openxmlformats-officedocument.spreadsheetml.sharedStrings+xml"
    types = "[Content_Types].xml"
    parts[types] = parts[types].replace("</Types>", f'<Override PartName="/{SHARED}" ContentType="{kind}"/></Types>')
    _write(path, parts)


def _parts(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as book:
        return {name: book.read(name).decode() for name in book.namelist()}


def _write(path: Path, parts: dict[str, str]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as book:
        for name, content in parts.items():
            book.writestr(name, content)
