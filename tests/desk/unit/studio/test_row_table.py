"""The first rows of a file, as the Data page shows them: cells, and what `new` takes each column for."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from studio_server import TOKEN, Browser, served

from finetune.desk.setup.new_options import parse_columns
from finetune.desk.studio.row_table import role_names, row_table

ROWS: list[dict[str, Any]] = [
    {"id": n, "Question, of a user": f"What is {n} and one?", "reply": f'It is "{n + 1}", of course'} for n in range(30)
]
ROLES = {"Question, of a user": "prompt", "reply": "completion"}
PAIRS = [{"prompt": f"Say {n} now", "chosen": f"It is {n} here", "rejected": f"No, not {n}"} for n in range(9)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def browser(folder: Path) -> Iterator[Browser]:
    with served(folder) as port:
        yield Browser(port, f"finetune-studio-{port}={TOKEN}")


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / name)
    elif name.endswith(".gz"):
        (folder / name).write_bytes(gzip.compress(lines.encode()))
    else:
        (folder / name).write_text(lines)


@pytest.mark.parametrize(
    ("name", "rows", "roles"),
    [
        ("rows.jsonl", ROWS, ROLES),
        ("rows.parquet", ROWS, ROLES),
        ("rows.jsonl.gz", ROWS, ROLES),
        ("pairs.jsonl", PAIRS, {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}),
        ("chat.jsonl", [{"messages": [{"role": "user", "content": "a"}]}], {"messages": "messages"}),
    ],
)
def test_rows_are_a_table_with_a_role_for_each_column(
    folder: Path, browser: Browser, name: str, rows: list[dict[str, Any]], roles: dict[str, str]
) -> None:
    write(folder, name, rows)
    table = row_table(name, folder)
    assert {one["name"]: one["role"] for one in table["columns"] if one["role"]} == roles
    assert [one["name"] for one in table["columns"]] == list(rows[0])
    assert table["problem"] == ""
    text = browser.get(f"/data?path={name}")
    for column in rows[0]:
        select = re.search(rf'<select class="role" data-column="{re.escape(column)}".*?</select>', text)
        assert select is not None
        chosen = re.findall(r"<option selected>(\w+)</option>", select[0])
        assert chosen == ([roles[column]] if column in roles else [])
    # What the page writes for them is read back as these.
    written = ",".join(f"{field}={column}" for column, field in roles.items())
    assert parse_columns(written) == {field: column for column, field in roles.items()}
    form = {"model": "org/model", "data": name, "mode": "lora", "output": "my.yaml", "columns": written}
    assert "--columns" in browser.post("/preview/new", form)["command"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.parquet", b"PAR1 and no more", "rows.parquet"),
        ("rows.jsonl", b"{\n", "no row can be read"),
        ("rows.jsonl", b"", "has no rows"),
        ("rows.csv", b"a,a\n1,2\n", "a"),
        ("rows.json", b'{"a":' * 100_000, "rows.json"),
        ("numbers.jsonl", b'{"a": 1, "b": 2}\n', "a"),
    ],
)
def test_a_file_that_is_no_rows_says_so_on_its_page(
    folder: Path, browser: Browser, name: str, content: bytes, said: str
) -> None:
    (folder / name).write_bytes(content)
    table = row_table(name, folder)
    assert said in table["problem"]
    assert "Fix: " in table["problem"]
    assert '<p class="note warn">' in browser.get(f"/data?path={name}")


def test_cells_and_names_of_columns_are_no_markup(folder: Path, browser: Browser) -> None:
    hostile = '"><script>alert(1)</script>'
    write(folder, "rows.jsonl", [{hostile: hostile, "half": "\ud800", "long": "x" * 10_000, "list": [{"a": None}]}])
    text = browser.get("/data?path=rows.jsonl")
    assert "<script>alert" not in text
    assert "x" * 300 not in text
    assert "&#34;a&#34;: null" in text


def test_roles_are_the_fields_of_all_formats() -> None:
    names = role_names()
    assert names[:2] == ["prompt", "completion"]
    assert {"messages", "chosen", "rejected", "label", "text", "input_ids"} <= set(names)
    assert len(names) == len(set(names))
