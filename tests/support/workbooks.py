"""Spreadsheets as Excel writes them, cell by cell."""

from __future__ import annotations

import zipfile
from pathlib import Path
from xml.sax.saxutils import escape

MAIN = 'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'
RELATIONS = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
Line = list[str]  # cells as XML


def shared(number: int) -> str:
    return f't="s"><v>{number}</v>'


def inline(text: str) -> str:
    return f't="inlineStr"><is><t xml:space="preserve">{escape(text)}</t></is>'


def workbook(path: Path, sheets: dict[str, list[Line]], texts: tuple[str, ...] = ()) -> Path:
    """Writes a workbook; texts: its shared strings, as the XML inside of an item."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as book:
        listed = "".join(f'<sheet name="{name}" r:id="rId{i}"/>' for i, name in enumerate(sheets))
        book.writestr("xl/workbook.xml", f'<workbook {MAIN} xmlns:r="{RELATIONS}"><sheets>{listed}</sheets></workbook>')
        related = "".join(f'<Relationship Id="rId{i}" Target="worksheets/s{i}.xml"/>' for i in range(len(sheets)))
        book.writestr("xl/_rels/workbook.xml.rels", f"<Relationships>{related}</Relationships>")
        for i, lines in enumerate(sheets.values()):
            rows = ""
            for number, line in enumerate(lines, start=1):
                cells = "".join(f'<c r="{chr(65 + at)}{number}" {cell}</c>' for at, cell in enumerate(line) if cell)
                rows += f'<row r="{number}">{cells}</row>'
            book.writestr(f"xl/worksheets/s{i}.xml", f"<worksheet {MAIN}><sheetData>{rows}</sheetData></worksheet>")
        items = "".join(f"<si>{text}</si>" for text in texts)
        book.writestr("xl/sharedStrings.xml", f"<sst {MAIN}>{items}</sst>")
    return path
