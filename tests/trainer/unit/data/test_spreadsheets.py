"""Tables as spreadsheet programs write them, and folders of documents."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from workbooks import Line, replace_in, workbook

from finetune.data.sources import spreadsheets
from finetune.data.sources.source import SourceReader, read_rows
from finetune.errors import UserError
from finetune.recipe.schema import Source


def rows(path: Path) -> list[tuple[int, dict[str, str]]]:
    return [(number, row) for _, number, row in read_rows(Source(path=str(path)))]


HEADER = ["Frage", "Antwort", "Nr"]


def test_a_sheet_is_a_table_of_texts(tmp_path: Path) -> None:
    day, moment = datetime.date(2024, 1, 2), datetime.datetime(2024, 1, 2, 3, 4, 5)
    lines = [
        HEADER,
        ["a <b> & c", "rich", 3],
        [],
        ["", None, None],
        ["one", True, 0.1],
        [day, moment, datetime.time(3, 4)],
        [0.1 + 0.2, -123456789012345, 1e-7],
        ["", "", "=1+1"],
    ]
    path = workbook(tmp_path / "a.xlsx", {"data": lines, "empty": []})
    runs = '<r><t xml:space="preserve">an </t></r><r><rPr><b/></rPr><t>answer</t></r><rPh sb="0" eb="1"><t>no</t></rPh>'
    replace_in(path, "xl/sharedStrings.xml", "<t>rich</t>", runs)
    replace_in(path, "xl/worksheets/sheet1.xml", "<v>0.1</v>", "<v>0.10000000000000001</v>")  # as Excel stores it
    replace_in(path, "xl/worksheets/sheet1.xml", "<f>1+1</f><v />", "<f>1+1</f><v>2</v>")
    assert rows(path) == [
        (number, dict(zip(HEADER, texts, strict=True)))
        for number, *texts in (
            (2, "a <b> & c", "an answer", "3"),
            (5, "one", "true", "0.1"),
            (6, "2024-01-02", "2024-01-02T03:04:05", "03:04:00"),
            (7, "0.3", "-123456789012345", "1e-07"),
            (8, "", "", "2"),
        )
    ]


@pytest.mark.parametrize(
    ("sheets", "message"),
    [
        (
            {"a": [HEADER], "b": [HEADER]},
            r"one sheet with cells, found a, b \(hidden\)\. Fix: save the one",
        ),
        ({"a": []}, "expected one sheet with cells, found none"),
        ({"a": [["x", "x"]]}, "a.xlsx:1: the header has `x` twice"),
        ({"a": [HEADER]}, "the file has no rows"),
        ({"a": [HEADER, ["x", "#REF!"]]}, "a.xlsx:2: cell B: has the error #REF!"),
        ({"a": [["x"], ["x", "y"]]}, "a.xlsx:2: cell B has a value .'y'., but its column no name"),
    ],
)
def test_sheets_that_are_no_table(tmp_path: Path, sheets: dict[str, list[Line]], message: str) -> None:
    path = workbook(tmp_path / "a.xlsx", {"first": [], **sheets}, hidden=["b"])
    with pytest.raises(UserError, match=message):
        rows(path)


@pytest.mark.parametrize(
    ("part", "old", "new", "message"),
    [
        ("worksheets/sheet1", 't="s"><v>0</v>', 't="s"><v>7</v>', "a.xlsx: not a readable spreadsheet"),
        ("worksheets/sheet1", "</sheetData>", "", "a.xlsx: not a readable spreadsheet"),
        (
            "worksheets/sheet1",
            '<row r="2"',
            '<row r="99999999"',
            "more than 1,048,576 rows. Fix: save the sheet",
        ),
        ("sharedStrings", "<t>Nr</t>", f"<t>{'x' * 5000}</t>", "a spreadsheet of 0.0 GiB unpacked, more than"),
    ],
)
def test_damaged_spreadsheets_and_bombs(
    tmp_path: Path, part: str, old: str, new: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = workbook(tmp_path / "a.xlsx", {"a": [HEADER, ["x", "y", 1]]})
    if part == "sharedStrings":
        monkeypatch.setattr(spreadsheets, "MAX_BYTES", 20000)
    assert len(rows(path)) == 1
    replace_in(path, f"xl/{part}.xml", old, new)
    with pytest.raises(UserError, match=message):
        rows(path)


def test_without_openpyxl_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = workbook(tmp_path / "a.xlsx", {"a": [HEADER, ["x", "y", 1]]})
    monkeypatch.setattr(spreadsheets, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"package openpyxl\. Fix: pip install 'finetune-recipes\[tables\]', or save"):
        rows(path)


def test_semicolons_as_spreadsheets_write_them(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('\ufeffFrage;"Antwort; lang"\n"1,5; und";ja\n', encoding="utf-8")
    assert rows(tmp_path / "a.csv") == [(2, {"Frage": "1,5; und", "Antwort; lang": "ja"})]
    (tmp_path / "b.csv").write_text('"a;b"\n1;2\n', encoding="utf-8")
    assert rows(tmp_path / "b.csv") == [(2, {"a;b": "1;2"})]
    (tmp_path / "c.csv").write_text("a;b\n1;2;3\n", encoding="utf-8")
    with pytest.raises(UserError, match="3 cells in a table of 2 columns; quote cells that hold a semicolon"):
        rows(tmp_path / "c.csv")


def test_documents_are_rows_if_nothing_else_is_there(tmp_path: Path) -> None:
    for name in ("a.md", "deep/b.markdown"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n\nOne.\nTwo.\n", encoding="utf-8")
    read = [row["text"] for _, row in rows(tmp_path)]
    assert read == ["# a.md\n\nOne.\nTwo.", "# deep/b.markdown\n\nOne.\nTwo."]
    assert [row["text"] for _, row in rows(tmp_path / "a.md")] == read[:1]
    assert SourceReader(Source(path=str(tmp_path))).text_unit == "file"
    by_paragraph = Source(path=str(tmp_path / "*.md"), text_unit="paragraph")
    assert [row["text"] for _, _, row in read_rows(by_paragraph)] == ["# a.md", "One.\nTwo."]
    (tmp_path / "rows.jsonl").write_text('{"text": "a row"}\n', encoding="utf-8")
    assert [row["text"] for _, row in rows(tmp_path)] == ["a row"]


def test_a_folder_of_web_pages_is_told_how_to_convert_them(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<html></html>", encoding="utf-8")
    with pytest.raises(UserError, match=r"no data files in this folder .*index\.html.*pandoc -f html -t gfm"):
        rows(tmp_path)
