"""Tables as spreadsheet programs write them, and folders of documents."""

from __future__ import annotations

from pathlib import Path

import pytest
from workbooks import Line, inline, shared, workbook

from finetune.data.sources.source import SourceReader, read_rows
from finetune.errors import UserError
from finetune.recipe.schema import Source


def rows(path: Path) -> list[tuple[int, dict[str, str]]]:
    return [(number, row) for _, number, row in read_rows(Source(path=str(path)))]


HEADER = [inline("Frage"), inline("Antwort"), inline("Nr")]


def test_a_sheet_is_a_table_of_texts(tmp_path: Path) -> None:
    runs = "<r><t>an </t></r><r><rPr><b/></rPr><t>answer</t></r><rPh><t>no</t></rPh>"
    lines = [HEADER, [inline("a <b> & c"), shared(1), "><v>3</v>"], [], ["", "", ""], [shared(0), 't="b"><v>1</v>']]
    path = workbook(tmp_path / "a.xlsx", {"data": lines, "empty": []}, ("<t>one</t>", runs))
    assert rows(path) == [
        (2, {"Frage": "a <b> & c", "Antwort": "an answer", "Nr": "3"}),
        (5, {"Frage": "one", "Antwort": "true", "Nr": ""}),
    ]


@pytest.mark.parametrize(
    ("sheets", "message"),
    [
        ({"a": [HEADER], "b": [HEADER]}, "expected one sheet with cells, and has a, b: save the one to use"),
        ({"a": []}, "expected one sheet with cells, and has none"),
        ({"a": [[inline("x"), inline("x")]]}, "a.xlsx:1: the header has `x` twice"),
        ({"a": [HEADER]}, "the file has no rows"),
        ({"a": [HEADER, [inline("x"), 't="e"><v>#REF!</v>']]}, "a.xlsx:2: cell B: has the error #REF!"),
        (
            {"a": [[inline("x")], [inline("x"), inline("y")]]},
            "a.xlsx:2: cell B has a value .'y'., but its column no name",
        ),
        ({"a": [HEADER, [shared(7)]]}, "not a readable spreadsheet"),
    ],
)
def test_sheets_that_are_no_table(tmp_path: Path, sheets: dict[str, list[Line]], message: str) -> None:
    path = workbook(tmp_path / "a.xlsx", sheets)
    with pytest.raises(UserError, match=message):
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
