"""Every kind of file is read, and everything bad in one is an error with its place and what to do."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from data_helpers import prepare

from finetune.data import read_rows
from finetune.errors import UserError
from finetune.recipe.schema import Source

ROWS = [{"text": "hello world"}, {"text": 'é, "quoted" and\nof two lines'}, {"text": "quick fox"}]


def write(path: Path) -> Path:
    """ROWS in the format of the file's suffix."""
    if path.suffix == ".json":
        path.write_text(json.dumps(ROWS, indent=1, ensure_ascii=False), encoding="utf-8")
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in ROWS), encoding="utf-8")
    elif path.suffix == ".csv":
        with path.open("w", encoding="utf-8-sig", newline="") as file:  # with a byte order mark, as Excel writes it
            writer = csv.DictWriter(file, ["text"])
            writer.writeheader()
            writer.writerows(ROWS)
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    return path


def source(path: Path | str, format: str = "text", **options) -> Source:
    return Source.model_validate({"path": str(path), "format": format, **options})


@pytest.mark.parametrize(
    ("suffix", "numbers"), [(".json", [1, 2, 3]), (".jsonl", [1, 2, 3]), (".csv", [2, 3, 5]), (".parquet", [1, 2, 3])]
)
def test_each_kind_of_file(tmp_path, suffix, numbers):
    path = write(tmp_path / f"data{suffix}")
    found = list(read_rows(source(path)))
    assert [row for _, _, row in found] == ROWS
    assert [number for _, number, _ in found] == numbers
    assert {label for label, _, _ in found} == {str(path)}
    assert len(list(read_rows(source(path, limit=2)))) == 2


def test_txt_is_a_row_a_line(tmp_path):
    path = tmp_path / "data.txt"
    path.write_bytes("first \r\n\n third\u2028same line".encode())
    found = list(read_rows(source(path)))
    assert found == [(str(path), 1, {"text": "first "}), (str(path), 3, {"text": " third\u2028same line"})]


def test_json_by_lines_and_blank_lines(tmp_path):
    path = tmp_path / "data.json"
    path.write_text('{"text": "a"}\n\n{"text": "b"}\n')
    assert [(number, row["text"]) for _, number, row in read_rows(source(path))] == [(1, "a"), (3, "b")]


def test_a_folder_is_read_in_the_order_of_names(tmp_path):
    for name in ("b.jsonl", "a.csv", ".hidden.jsonl"):
        write(tmp_path / name)
    (tmp_path / "README.md").write_text("not data")
    labels = [Path(label).name for label, _, _ in read_rows(source(tmp_path))]
    assert labels == ["a.csv"] * 3 + ["b.jsonl"] * 3
    assert len(list(read_rows(source(tmp_path, limit=4)))) == 4


def test_relative_paths_start_at_the_current_folder(tmp_path, monkeypatch):
    write(tmp_path / "data.jsonl")
    monkeypatch.chdir(tmp_path)
    assert next(iter(read_rows(source("data.jsonl"))))[0] == "data.jsonl"


def test_a_long_cell(tmp_path):
    path = tmp_path / "long.csv"
    path.write_text("text\n" + "a" * 1_000_000 + "\n")
    assert len(next(iter(read_rows(source(path))))[2]["text"]) == 1_000_000


def test_a_dataset_saved_where_the_hub_is_not(tmp_path):
    """`datasets` reads what it finds by name; with the hub out of reach the message says what to do."""
    code = (
        "from finetune.data import read_rows\nfrom finetune.recipe.schema import Source\n"
        "from finetune.errors import UserError\n"
        "try: list(read_rows(Source(path='nobody/nothing', format='text', split='test')))\n"
        "except UserError as error: print(error)"
    )
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=offline, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("nobody/nothing: no local file or folder of this name in")
    for part in ("`split` (test)", "hf auth login", "without a network, give a local file"):
        assert part in done.stdout


def test_dataset_type_is_iterable():
    """What the hub's path relies on, without the hub."""
    from finetune.data.sources import _dataset_rows

    dataset = datasets.Dataset.from_list(ROWS)
    assert list(_dataset_rows(dataset, "hub"))[2] == ("hub", 3, ROWS[2])
    with pytest.raises(UserError, match=r"hub\[test\]: the dataset has no rows; check `split`"):
        list(_dataset_rows(dataset.select([]), "hub[test]"))


# --- bad files: (name, bytes, parts of the message)

BAD_FILES = {
    "broken json at a line": ("a.jsonl", b'{"text": "a"}\n{"text": \n', ["a.jsonl:2:", "not valid JSON", "column 9"]),
    "not an object": ("a.jsonl", b'{"text": "a"}\n[1, 2]\n', ["a.jsonl:2:", "expected an object", "[1, 2]"]),
    "a number a line": ("a.jsonl", b"1\n", ["a.jsonl:1:", "expected an object", "got 1"]),
    "nested too deeply": (
        "a.jsonl",
        b'{"text": ' + b"[" * 100_000 + b"\n",
        ["a.jsonl:1:", "JSON that cannot be read", "recursion"],
    ),
    "invalid UTF-8 in jsonl": ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', ["a.jsonl:2:", "byte 11", "UTF-8"]),
    "invalid UTF-8 in txt": ("a.txt", b"one\ntwo\nthr\xe9e\n", ["a.txt:3:", "byte 4", "save the file as UTF-8"]),
    "invalid UTF-8 in csv": ("a.csv", b"text\n\xff\n", ["a.csv:2:", "save the file as UTF-8"]),
    "invalid UTF-8 in json": ("a.json", b'[{"text": "a"},\n{"text": "\xff"}]', ["a.json:2:", "save the file as UTF-8"]),
    "UTF-16": ("a.jsonl", '{"text": "a"}'.encode("utf-16"), ["a.jsonl:1:", "save the file as UTF-8"]),
    "an array nested too deeply": ("a.json", b"[" * 100_000, ["a.json:", "JSON that cannot be read", "recursion"]),
    "a number without end": ("a.jsonl", b'{"text": ' + b"1" * 5000 + b"}", ["a.jsonl:1:", "JSON that cannot be read"]),
    "half a character": ("a.jsonl", b'{"text": "a\\ud83e"}', ["a.jsonl:1:", "half a character", "at 1"]),
    "broken array": ("a.json", b'[{"text": "a"},\n{"text": "b"}\n{"text"]', ["a.json:3:", "not valid JSON"]),
    "an array of text": ("a.json", b'[{"text": "a"}, "b"]', ["a.json:2:", "expected an object", '"b"']),
    "empty jsonl": ("a.jsonl", b"\n \n", ["a.jsonl:", "no rows"]),
    "empty json": ("a.json", b"[]", ["a.json:", "no rows"]),
    "empty csv": ("a.csv", b"", ["a.csv:", "no rows"]),
    "csv of a header": ("a.csv", b"text\n", ["a.csv:", "no rows"]),
    "empty txt": ("a.txt", b"\n\n", ["a.txt:", "no rows", "take it out of the recipe"]),
    "a cell too many": ("a.csv", b"text,b\nx,y\nx,y,z\n", ["a.csv:3:", "3 cells", "2 columns", "quote"]),
    "a cell too few": ("a.csv", b"text,b\n\nx\n", ["a.csv:3:", "1 cells", "2 columns"]),
    "an open quote": ("a.csv", b'text\nx\n"y\nz\n', ["a.csv:3:", "not valid CSV"]),
    "a column twice": ("a.csv", b"text,text\nx,y\n", ["a.csv:1:", "`text` twice", "rename"]),
    "not parquet": ("a.parquet", b"text\n", ["a.parquet:", "not a readable parquet file"]),
    "another kind": ("a.xlsx", b"PK", ["a.xlsx:", "`.xlsx`", "expected json, jsonl, csv, parquet, txt"]),
}


@pytest.mark.parametrize(("name", "content", "parts"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_bad_files(tmp_path, name, content, parts):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        prepare(path)
    assert str(tmp_path) in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


MISSING = {
    "a misspelt name": ("trian.jsonl", ["trian.jsonl: no such file", "did you mean", "train.jsonl"]),
    "no such folder": ("nowhere/x/train.jsonl", ["no such file", "there is no folder", "relative paths start at"]),
    "a folder of nothing": ("empty", ["empty: no data files in this folder (it has no files)", "expected json"]),
    "a folder of other things": ("docs", ["(it has README.md)", "expected json, jsonl"]),
}


@pytest.mark.parametrize(("name", "parts"), MISSING.values(), ids=MISSING.keys())
def test_missing_files(tmp_path, name, parts):
    write(tmp_path / "train.jsonl")
    for folder in ("empty", "docs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "docs" / "README.md").write_text("no data")
    with pytest.raises(UserError) as caught:
        prepare(tmp_path / name)
    for part in parts:
        assert part in str(caught.value)
