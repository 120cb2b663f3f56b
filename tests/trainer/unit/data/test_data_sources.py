"""Every kind of file is read, and everything bad in one is an error with its place and what to do."""

from __future__ import annotations

import bz2
import csv
import errno
import gzip
import hashlib
import http.server
import io
import json
import lzma
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import datasets
import fsspec
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from data_helpers import prepare

from finetune.data.sources import files, readers
from finetune.data.sources.files import COMPRESSIONS, File, file_digest
from finetune.data.sources.readers import READERS, rows_of
from finetune.data.sources.source import HubRows, SourceReader, dataset_rows, read_rows
from finetune.errors import UserError
from finetune.recipe.schema import Source
from finetune.recipe.urls import without_credentials
from finetune.utils import sha256_file

ROWS = [{"text": "hello world"}, {"text": 'é, "quoted" and\nof two lines'}, {"text": "quick fox"}]


def jsonl(rows=ROWS) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def separated(delimiter: str) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, ["text"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return text.getvalue().encode("utf-8-sig")  # with a byte order mark, as Excel writes it


def tabular(suffix: str) -> bytes:
    table, out = pyarrow.Table.from_pylist(ROWS), io.BytesIO()
    if suffix == ".parquet":
        pyarrow.parquet.write_table(table, out)
    else:
        new = pyarrow.ipc.new_file if suffix == ".arrow" else pyarrow.ipc.new_stream
        with new(out, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return out.getvalue()


# By kind: (name, bytes of ROWS, numbers of the rows).
KINDS = {
    ".json": ("a.json", json.dumps(ROWS, indent=1, ensure_ascii=False).encode(), [1, 2, 3]),
    ".jsonl": ("a.jsonl", jsonl(), [1, 2, 3]),
    ".ndjson": ("a.ndjson", jsonl(), [1, 2, 3]),
    ".csv": ("a.csv", separated(","), [2, 3, 5]),
    ".tsv": ("a.tsv", separated("\t"), [2, 3, 5]),
    ".parquet": ("a.parquet", tabular(".parquet"), [1, 2, 3]),
    ".arrow": ("a.arrow", tabular(".arrow"), [1, 2, 3]),
    ".arrow, a stream": ("a.arrow", tabular("stream"), [1, 2, 3]),
    ".txt": ("a.txt", b"hello world\r\n\nquick fox", [1, 3]),
}
COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pyarrow.compress(data, "zstd", asbytes=True),
}


def source(path: Path | str, format: str = "text", **options) -> Source:
    return Source.model_validate({"path": str(path), "format": format, **options})


def written(path: Path, content: bytes | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(jsonl() if content is None else content)
    return path


def numbered(path: Path, count: int, start: int = 0) -> Path:
    return written(path, jsonl({"text": str(i)} for i in range(start, start + count)))


def texts(path: Path | str, **options) -> list[str]:
    return [row["text"] for _, _, row in read_rows(source(path, **options))]


def refused(path: Path | str, *parts: str, **options) -> str:
    """The message of a source that cannot be read."""
    with pytest.raises(UserError) as caught:
        list(SourceReader(source(path, **options)).rows())
    for part in parts:
        assert part in str(caught.value)
    return str(caught.value)


# --- kinds of files


def test_every_reader_is_tested():
    assert {key.partition(",")[0] for key in KINDS} == set(READERS) - {".xlsx"}  # test_spreadsheets.py
    assert set(COMPRESS) == {"", *COMPRESSIONS}


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_file(tmp_path, kind, compression):
    name, content, numbers = KINDS[kind]
    path = written(tmp_path / f"{name}{compression}", COMPRESS[compression](content))
    expected = [ROWS[0], ROWS[2]] if kind == ".txt" else ROWS
    opened = SourceReader(source(path))
    for _ in range(2):
        found = list(opened.rows())
        assert [row for _, _, row in found] == expected
        assert [number for _, number, _ in found] == numbers
        assert {label for label, _, _ in found} == {str(path)}
    assert len(list(read_rows(source(path, limit=1)))) == 1


@pytest.mark.parametrize("kind", [".jsonl", ".json", ".csv", ".parquet", ".arrow"])
def test_rows_are_read_while_they_are_wanted(tmp_path, kind):
    """A reader that breaks off has read no more than it gave, but for a buffer: ten thousand rows, of which one."""
    rows = [{"text": "x" * 1000, "n": str(i)} for i in range(10_000)]
    path = tmp_path / f"a{kind}"
    if kind in (".parquet", ".arrow"):
        table = pyarrow.Table.from_pylist(rows)
        if kind == ".parquet":
            pyarrow.parquet.write_table(table, path, row_group_size=500, compression="none", use_dictionary=False)
        else:
            with pyarrow.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table, max_chunksize=500)
    elif kind == ".csv":
        path.write_text("text,n\n" + "".join(f"{row['text']},{row['n']}\n" for row in rows))
    else:
        path.write_bytes(jsonl(rows) if kind == ".jsonl" else json.dumps(rows).encode())
    read = 0

    class Counting(io.FileIO):
        def readinto(self, buffer) -> int:
            nonlocal read
            count = super().readinto(buffer) or 0
            read += count
            return count

    file = File(str(path), path.name, lambda: Counting(path), str)
    rows_read = rows_of(file)
    assert next(rows_read)[2] == rows[0]
    assert read < 2_200_000 < path.stat().st_size
    assert sum(1 for _ in rows_read) == 9_999


@pytest.mark.parametrize("compression", [name for name in COMPRESS if name])
def test_compressed_in_pieces(tmp_path, compression):
    """Files that were compressed apart and joined, as `cat a.gz b.gz` and parallel compressors do."""
    pieces = [COMPRESS[compression](jsonl({"text": f"{n} {i}"} for i in range(3000))) for n in range(3)]
    path = written(tmp_path / f"a.jsonl{compression}", b"".join(pieces))
    assert texts(path) == [f"{n} {i}" for n in range(3) for i in range(3000)]


def test_txt_is_a_row_a_line(tmp_path):
    path = written(tmp_path / "data.txt", "first \r\n\n third\u2028same line".encode())
    found = list(read_rows(source(path)))
    assert found == [(str(path), 1, {"text": "first "}), (str(path), 3, {"text": " third\u2028same line"})]


def test_json_by_lines_and_blank_lines(tmp_path):
    path = written(tmp_path / "data.json", b'{"text": "a"}\r\n\n{"text": "b"}\n')
    assert [(number, row["text"]) for _, number, row in read_rows(source(path))] == [(1, "a"), (3, "b")]


@pytest.mark.parametrize("block", [1, 2, 3, 5, 8, 1000])
def test_an_array_is_the_same_however_it_is_cut(tmp_path, monkeypatch, block):
    rows = [
        *ROWS,
        {"text": "🤣 é", "n": [1, -2.5e3, True, None, {"a": "]},{"}]},
        {"text": "", "m": 12345},
    ]
    monkeypatch.setattr(readers, "BLOCK_BYTES", block)
    for number, ascii_only in enumerate((True, False)):
        text = " \n[" + " ,\n".join(json.dumps(row, ensure_ascii=ascii_only) for row in rows) + "\n]\n "
        path = written(tmp_path / f"{number}.json", text.encode("utf-8-sig"))
        assert [row for _, _, row in read_rows(source(path))] == rows


def test_a_row_of_ten_megabytes(tmp_path):
    long = "é" * 5_000_000 + "\n"
    contents = {
        "a.jsonl": jsonl([{"text": long}]),
        "a.json": b"[" + jsonl([{"text": long}]) + b"]",
        "a.csv": ('text\n"' + long + '"\n').encode(),
    }
    for name, content in contents.items():
        assert texts(written(tmp_path / name, content)) == [long]


def test_types_of_tables(tmp_path):
    """Whatever a table holds is read; what is no text is for the format to refuse."""
    day = datetime(2024, 2, 3, 4, 5, 6)
    column = pyarrow.array([[{"role": "user", "content": "q"}]])
    table = pyarrow.table(
        {
            "messages": column,
            "when": pyarrow.array([day], pyarrow.timestamp("us")),
            "raw": pyarrow.array([b"\xff"]),
            "id": pyarrow.ExtensionArray.from_storage(pyarrow.uuid(), pyarrow.array([b"0" * 16], pyarrow.binary(16))),
            "kind": pyarrow.array(["a"]).dictionary_encode(),
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    ((_, _, row),) = read_rows(source(tmp_path / "a.parquet"))
    assert row["messages"] == [{"role": "user", "content": "q"}]
    assert (row["when"], row["raw"], row["kind"]) == (day, b"\xff", "a")


# --- paths


def test_a_folder_is_read_in_the_order_of_names(tmp_path):
    for name in ("b.jsonl", "a.jsonl.gz", ".hidden.jsonl", "c/d/e.jsonl", ".git/f.jsonl"):
        written(tmp_path / name, gzip.compress(jsonl()) if name.endswith(".gz") else None)
    (tmp_path / "README.md").write_text("not data")
    labels = [str(Path(label).relative_to(tmp_path)) for label, _, _ in read_rows(source(tmp_path))]
    assert labels == ["a.jsonl.gz"] * 3 + ["b.jsonl"] * 3 + ["c/d/e.jsonl"] * 3
    assert len(list(read_rows(source(tmp_path, limit=4)))) == 4


def test_a_folder_with_links(tmp_path):
    numbered(tmp_path / "data" / "of" / "x.jsonl", 1)
    numbered(tmp_path / "data" / "a.jsonl", 1, start=5)
    (tmp_path / "data" / "round").symlink_to(tmp_path / "data")
    assert texts(tmp_path / "data") == ["5", "0"]
    (tmp_path / "data" / "z.jsonl").symlink_to(tmp_path / "gone.jsonl")
    refused(tmp_path / "data", "data/z.jsonl: a link to", "gone.jsonl, which does not exist")
    refused(tmp_path / "data" / "z.jsonl", "data/z.jsonl: a link to", "gone.jsonl, which does not exist")
    (tmp_path / "data" / "z.jsonl").unlink()
    (tmp_path / "data" / "z.jsonl").symlink_to(tmp_path / "data" / "z.jsonl")
    refused(tmp_path / "data", "data/z.jsonl: a link to")


@pytest.mark.parametrize("name", ["more", "b.jsonl", "of/c.jsonl"])
def test_a_folder_with_a_link_that_leads_out(tmp_path, name):
    numbered(tmp_path / "elsewhere" / "x.jsonl", 1)
    numbered(tmp_path / "data" / "of" / "a.jsonl", 1)
    target = tmp_path / "elsewhere"
    (tmp_path / "data" / name).symlink_to(target / "x.jsonl" if name.endswith("jsonl") else target)
    refused(tmp_path / "data", f"data/{name}: a link that leads out of", "give its target as a source of its own")
    # As it is given by its own name, it is what the recipe says.
    assert texts(tmp_path / "data" / name) == ["0"]


def test_a_folder_of_the_hubs_cache_links_to_its_blobs(tmp_path):
    numbered(tmp_path / "datasets--a--b" / "blobs" / "1f.jsonl", 2)
    snapshot = tmp_path / "datasets--a--b" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "train.jsonl").symlink_to("../../blobs/1f.jsonl")
    assert texts(snapshot) == ["0", "1"]


@pytest.mark.parametrize(
    "url", ["reference://a.json", "reference://", "zip://a.jsonl", "dbfs://h/a.jsonl", "no://a.jsonl"]
)
def test_protocols_that_name_no_files(url):
    refused(url, url, "https://, s3://, gs:// or hf://")


@pytest.mark.parametrize(
    "split",
    [
        "train[:9223372036854775808]",
        "train[18446744073709551616:]",
        "train[:-99999999999999999999]",
        "train[" + "9" * 5000 + ":]",
    ],
)
def test_a_split_beyond_any_data(tmp_path, split):
    with pytest.raises(UserError, match="counts more rows than any data has"):
        list(read_rows(source(numbered(tmp_path / "a.jsonl", 3), split=split)))


def test_half_a_surrogate_in_a_name_is_a_bad_row(tmp_path):
    rows = [{"text": "a"}, {"text": "b", "\ud83d": 1}, {"text": "c", "d": [{"e\udc00": 1}]}, {"text": "f", "ü😀": 1}]
    path = written(tmp_path / "a.jsonl", jsonl(rows))
    bad: list[str] = []
    read = [row["text"] for _, _, row in read_rows(source(path), lambda label, number, text: bad.append(text))]
    assert read == ["a", "f"]
    assert bad == [
        "the name '\\ud83d' of an object contains an unpaired surrogate; write it whole",
        "the name 'e\\udc00' of an object contains an unpaired surrogate; write it whole",
    ]
    assert not [text for text in bad if not text.isascii()]


def test_patterns(tmp_path):
    for number, name in enumerate(("b/2.jsonl", "a/1.jsonl", "a/c/3.jsonl", "a/[x].jsonl")):
        numbered(tmp_path / name, 1, start=number)
    (tmp_path / "a" / "notes.md").write_text("")
    assert texts(tmp_path / "*/*.jsonl") == ["1", "3", "0"]
    assert texts(tmp_path / "**/*.jsonl") == ["1", "3", "2", "0"]
    assert texts(tmp_path / "a/[x].jsonl") == ["3"]  # a file of that name, before a pattern
    assert texts(tmp_path / "a/[0-9].jsonl") == ["1"]
    refused(
        tmp_path / "a/*",
        "a/*: matches notes.md too, which is not a kind that is read",
        "Fix: narrow the pattern",
        "*.jsonl",
    )
    refused(tmp_path / "*.csv", "*.csv: no file matches this pattern", str(Path.cwd()))


def test_relative_paths_start_at_the_current_folder(tmp_path, monkeypatch):
    written(tmp_path / "data.jsonl")
    monkeypatch.chdir(tmp_path)
    assert next(iter(read_rows(source("data.jsonl"))))[0] == "data.jsonl"
    assert next(iter(read_rows(source("*.jsonl"))))[0] == "data.jsonl"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(texts("~/data.jsonl")) == len(texts(f"file://{tmp_path}/data.jsonl")) == 3


def test_not_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    refused(tmp_path / "pipe.jsonl", "neither a file nor a folder", "save them to a file")
    refused(tmp_path / ("x" * 300 + ".jsonl"), "cannot be read: File name too long")
    (tmp_path / "folder.jsonl").mkdir()
    refused(tmp_path / "folder.jsonl", "no data files in this folder")


@pytest.mark.parametrize("locked", ["data/a.jsonl", "data"])
def test_permission_denied(locked):
    with tempfile.TemporaryDirectory() as name:  # not below pytest's folder, which only its owner may enter
        folder = Path(name)
        written(folder / "data" / "a.jsonl")
        folder.chmod(0o755)
        (folder / locked).chmod(0)
        user = os.geteuid()
        try:
            if user == 0:  # whom no mode keeps out
                os.seteuid(65534)
            refused(folder / "data", f"{folder / locked}: cannot be read: Permission denied")
        finally:
            os.seteuid(user)
            (folder / locked).chmod(0o755)


# --- parts

PARTS = {
    "train": range(25),
    "train[:10]": range(10),
    "train[5:1_2]": range(5, 12),
    "train[20:100]": range(20, 25),
    "train[20:]": range(20, 25),
    "train[-3:]": range(22, 25),
    "train[:-20]": range(5),
    "train[-30:2]": range(2),
    "train[10%:50%]": range(2, 12),
    "train[50%:]": range(12, 25),
    "train[-20%:]": range(20, 25),
    "train[:]": range(25),
}


@pytest.mark.parametrize("split", PARTS)
def test_a_part_of_files_is_what_datasets_takes(tmp_path, split):
    numbered(tmp_path / "a.jsonl", 10)
    numbered(tmp_path / "b.jsonl", 15, start=10)
    found = list(read_rows(source(tmp_path, split=split)))
    assert [int(row["text"]) for _, _, row in found] == list(PARTS[split])
    places = [(Path(label).name, number) for label, number, _ in found]
    assert places == [("a.jsonl", i + 1) if i < 10 else ("b.jsonl", i - 9) for i in PARTS[split]]
    theirs = datasets.ReadInstruction.from_spec(split).to_absolute({"train": 25})[0]
    assert range(25)[slice(theirs.from_, theirs.to)] == PARTS[split]
    assert texts(tmp_path, split=split, limit=2) == [str(i) for i in PARTS[split]][:2]


def test_a_part_counts_bad_rows(tmp_path):
    """So that skipping bad rows does not move the others from one part to another."""
    path = written(tmp_path / "a.jsonl", b'{"text": "0"}\nbad\n{"text": "2"}\n{"text": "3"}\n')
    bad = []
    opened = SourceReader(source(path, split="train[25%:75%]"))
    assert [row["text"] for _, _, row in opened.rows(lambda *found: bad.append(found))] == ["2"]
    assert [(label, number) for label, number, _ in bad] == [(str(path), 2)]


def test_a_part_from_the_start_is_all_that_is_read(tmp_path):
    path = numbered(tmp_path / "a.jsonl", 3)
    written(tmp_path / "b.jsonl", b"broken")
    assert texts(tmp_path, split="train[:3]") == ["0", "1", "2"]
    assert texts(path, split="train[1:]", limit=1) == ["1"]


WRONG_SPLITS = {
    "test": ["`train`", "have no `test`", "give the files that hold it as `path`"],
    "test[:10]": ["have no `test`"],
    "train[": ["`split: train[` is not understood", "train[:1000]", "train[10%:20%]"],
    "train[1]": ["not understood"],
    "train[a:b]": ["not understood"],
    "train[:1.5%]": ["not understood"],
    "train[:10]+train[20:]": ["not understood"],
    "train[10:20%]": ["mixes rows and percent"],
    "train[:110%]": ["goes beyond 100 %"],
    "train[5:5]": ["takes no rows"],
    "train[-2:-5]": ["takes no rows"],
    "train[30:40]": ["`split: train[30:40]` takes no rows, for there are only 3"],
}


@pytest.mark.parametrize("split", WRONG_SPLITS)
def test_wrong_splits_of_files(tmp_path, split):
    refused(numbered(tmp_path / "a.jsonl", 3), f"{tmp_path / 'a.jsonl'}: ", *WRONG_SPLITS[split], split=split)


def test_files_have_no_configuration(tmp_path):
    refused(
        numbered(tmp_path / "a.jsonl", 3),
        "`config: main`",
        "files have no configurations. Fix: remove it",
        config="main",
    )


# --- digests


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def settle(path: Path) -> None:
    """Wait until a file's times lie so far back that its digest may be remembered: mtime and ctime."""
    os.utime(path, (1e9, 1e9))
    while time.time() - path.stat().st_ctime < files.SETTLED_S:
        time.sleep(0.05)


def test_the_digest_changes_with_the_content(tmp_path):
    path = numbered(tmp_path / "a.jsonl", 3)
    first = SourceReader(source(path)).digest()
    assert SourceReader(source(path)).digest() == first
    stat = path.stat()
    path.write_bytes(path.read_bytes().replace(b"1", b"9"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same size, same time
    assert SourceReader(source(path)).digest() != first
    assert SourceReader(source(numbered(tmp_path / "b.jsonl", 3))).digest() != first


def test_a_digest_is_remembered_only_of_a_file_left_alone(tmp_path, cache, monkeypatch):
    path = numbered(tmp_path / "a.jsonl", 3)
    first = files.file_digest(path)
    assert first == hashlib.sha256(path.read_bytes()).hexdigest()
    assert not list(cache.glob("digests/*.json"))  # written just now: another write could have the same time
    monkeypatch.setattr(files, "SETTLED_S", 0.2)
    settle(path)
    assert files.file_digest(path) == first
    (memo,) = cache.glob("digests/*.json")

    read = []
    monkeypatch.setattr(files, "sha256_file", lambda path: read.append(path) or sha256_file(path))
    assert files.file_digest(path) == first
    assert not read  # remembered
    stat = path.stat()
    path.write_bytes(path.read_bytes().replace(b"1", b"9"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # only ctime tells
    assert files.file_digest(path) != first
    assert len(read) == 1
    memo.write_text("{")  # not whole
    assert files.file_digest(path) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_file_that_changes_while_it_is_read(tmp_path, cache, monkeypatch):
    path = numbered(tmp_path / "a.jsonl", 3)
    monkeypatch.setattr(files, "sha256_file", lambda path: f"{path.write_bytes(b'')}")
    with pytest.raises(UserError, match=r"the file changes while it is read\. Fix: start again"):
        files.file_digest(path)


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setenv("FINETUNE_CACHE", str(written(tmp_path / "file") / "below"))
    with pytest.raises(UserError, match=r"the data cache cannot be written.*set FINETUNE_CACHE"):
        SourceReader(source(numbered(tmp_path / "a.jsonl", 3))).digest()


# --- URLs


class Handler(http.server.SimpleHTTPRequestHandler):
    """A folder, with a version of each file and parts of it or without, that notes what is asked for."""

    asked: ClassVar[list[str]] = []
    versions = True
    parts = True

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path.startswith("/private"):
            self.send_error(403)
        elif self.path.startswith("/broken"):
            self.send_error(500)
        elif self.path.startswith("/short"):
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"{}")
        elif self.parts and "Range" in self.headers:
            self.send_part(*map(int, self.headers["Range"].removeprefix("bytes=").split("-")))
        else:
            super().do_GET()

    def send_part(self, begin: int, last: int) -> None:
        content = Path(self.translate_path(self.path)).read_bytes()
        part = content[begin : last + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {begin}-{begin + len(part) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def do_HEAD(self) -> None:
        if self.path.startswith("/broken"):
            self.send_error(500)
        else:
            super().do_HEAD()

    def send_header(self, keyword: str, value: str) -> None:
        if keyword != "Last-Modified" or self.versions:
            super().send_header(keyword, value)

    def log_message(self, *found) -> None:
        pass


@pytest.fixture
def server(tmp_path, cache) -> Iterator[tuple[Path, str, type[Handler]]]:
    """(folder, address, handler) of a web server."""
    folder = tmp_path / "web"
    folder.mkdir()
    handler = type("OneHandler", (Handler,), {"asked": [], "directory": str(folder)})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder))) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield folder, f"127.0.0.1:{running.server_address[1]}", handler
        running.shutdown()
        thread.join()


def test_a_web_file_is_fetched_once(server, cache):
    folder, address, handler = server
    os.utime(written(folder / "a.jsonl.gz", gzip.compress(jsonl())), (2e9, 1e9))
    url = f"http://me:secret@{address}/a.jsonl.gz?token=hidden"
    first = SourceReader(source(url))
    assert [row for _, _, row in first.rows()] == ROWS
    assert {label for label, _, _ in first.rows()} == {f"http://{address}/a.jsonl.gz?..."}
    assert len(texts(url)) == 3
    assert handler.asked == ["/a.jsonl.gz?token=hidden"]
    assert SourceReader(source(url)).digest() == first.digest()

    written(folder / "a.jsonl.gz", gzip.compress(jsonl(ROWS[:1])))
    os.utime(folder / "a.jsonl.gz", (2e9, 1.1e9))
    assert len(texts(url)) == 1
    assert SourceReader(source(url)).digest() != first.digest()
    assert len(handler.asked) == 2
    assert not list(cache.glob("remote/*.tmp"))
    assert len(texts(f"http://{address}/*.gz")) == 1  # as the server lists its folder


def test_a_damaged_copy_of_a_web_file_is_fetched_again(server, cache, caplog):
    folder, address, _ = server
    os.utime(written(folder / "a.jsonl"), (2e9, 1e9))
    reader = SourceReader(source(f"http://{address}/a.jsonl"))
    rows, digest = list(reader.rows()), reader.digest()
    (copy,) = (path for path in cache.glob("remote/*") if path.suffix not in (".lock", ".crc32"))
    for file in (copy, copy.with_name(f"{copy.name}.crc32")):
        whole, told = file.read_bytes(), len(caplog.records)
        for bit in range(0, 8 * len(whole), len(whole) // 4):
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            file.write_bytes(damaged)
            assert list(SourceReader(source(f"http://{address}/a.jsonl")).rows()) == rows
            assert file.read_bytes() == whole
            assert len(caplog.records) == (told := told + 1)
    assert "its copy in the cache is damaged; it is fetched again" in caplog.text
    assert SourceReader(source(f"http://{address}/a.jsonl")).digest() == digest


def test_a_web_file_without_a_version_is_fetched_for_every_run(server):
    folder, address, handler = server
    handler.versions = False
    written(folder / "a.jsonl")
    first = SourceReader(source(f"http://{address}/a.jsonl"))
    written(folder / "a.jsonl", jsonl(reversed(ROWS)))  # of the same size
    second = SourceReader(source(f"http://{address}/a.jsonl"))
    assert [row for _, _, row in first.rows()] == ROWS
    assert [row for _, _, row in second.rows()] == ROWS[::-1]
    assert first.digest() != second.digest()


def test_a_web_file_changed_within_a_second(server):
    """Its time, in whole seconds, may stay the same: until the second is over it is fetched every time."""
    folder, address, _ = server
    first = written(folder / "a.jsonl").stat().st_mtime
    assert texts(f"http://{address}/a.jsonl") == [row["text"] for row in ROWS]
    os.utime(written(folder / "a.jsonl", jsonl(reversed(ROWS))), (first, first))
    assert texts(f"http://{address}/a.jsonl") == [row["text"] for row in reversed(ROWS)]


def test_a_stream_that_breaks_off(server):
    folder, address, _ = server
    written(folder / "short.jsonl", b"{}" * 50)
    with pytest.raises(UserError, match=r"short.jsonl\?\.{3}: cannot be read: ") as caught:
        list(SourceReader(source(f"http://{address}/short.jsonl?sig=hidden"), streaming=True).rows())
    assert "hidden" not in str(caught.value)


def test_processes_fetch_a_file_once(server):
    folder, address, handler = server
    os.utime(written(folder / "a.jsonl"), (1e9, 1e9))
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(len(texts(f"http://{address}/a.jsonl")))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [3] * 4
    assert len(handler.asked) == 1


@pytest.mark.parametrize("kind", [".jsonl", ".csv", ".json", ".txt", ".parquet"])
@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
def test_a_web_file_is_streamed(server, cache, kind, compression):
    folder, address, _ = server
    name, content, numbers = KINDS[kind]
    written(folder / (name + compression), COMPRESS[compression](content))
    opened = SourceReader(source(f"http://{address}/{name}{compression}"), streaming=True)
    for _ in range(2):
        assert [number for _, number, _ in opened.rows()] == numbers
    assert not (cache / "remote").exists()
    assert opened.digest() == SourceReader(opened.source, streaming=True).digest()
    os.utime(folder / (name + compression), (1e9, 1e9))
    assert opened.digest() != SourceReader(opened.source, streaming=True).digest()


@pytest.mark.parametrize("kind", [".jsonl", ".parquet"])
def test_a_stream_from_a_server_that_sends_full_files_only(server, kind):
    folder, address, handler = server
    handler.parts = False
    written(folder / f"a{kind}", KINDS[kind][1])
    opened = SourceReader(source(f"http://{address}/a{kind}"), streaming=True)
    if kind == ".jsonl":
        assert [row for _, _, row in opened.rows()] == ROWS
    else:
        with pytest.raises(UserError, match=r"sends no parts of files, which streaming \.parquet needs\. Fix: "):
            list(opened.rows())


def test_web_errors(server):
    folder, address, _ = server
    written(folder / "notes.md")
    written(folder / "short.jsonl", b"{}" * 50)
    written(folder / "bad.jsonl", b"{}\nbad\n")
    secret = f"http://me:secret@{address}"
    messages = [
        refused(f"{secret}/none.jsonl?sig=hidden", f"http://{address}/none.jsonl?...: no such file", "credentials"),
        refused(f"{secret}/private.jsonl?sig=hidden", "access is refused (403)"),
        refused(f"{secret}/broken.jsonl?sig=hidden", "cannot be reached: 500, message='Internal Server Error'"),
        refused(f"{secret}/notes.md", "`notes.md` is not a kind of file that is read"),
        refused(f"{secret}/bad.jsonl?sig=hidden", f"http://{address}/bad.jsonl?...:2: not valid JSON"),
        refused("http://me:secret@127.0.0.1:9/a.jsonl?sig=hidden", "http://127.0.0.1:9/a.jsonl?...: cannot be reached"),
        refused("simplecache::http://me:secret@x/a.jsonl", "chained URLs (`::`) are not read"),
        refused(f"{secret}/short.jsonl", f"http://{address}/short.jsonl: cannot be reached", "Not enough data"),
        refused(
            "foo://me:secret@x/a.jsonl",
            "foo://x/a.jsonl: not an address that can be read: Protocol not known",
            "https://, s3://",
        ),
        refused(f"{secret}/bad.jsonl", "have no `test`", split="test"),
        refused(f"{secret}/bad.jsonl", "`config: main`", config="main"),
    ]
    assert not [message for message in messages if "secret" in message or "hidden" in message]


@pytest.mark.parametrize(
    ("url", "line"),
    [("s3://b/a.jsonl", "pip install s3fs"), ("gs://b/a.jsonl", "pip install gcsfs")],
)
def test_what_is_not_installed_is_reported(monkeypatch, url, line):
    package = {"s3": "s3fs", "gs": "gcsfs"}[url[:2]]
    monkeypatch.setitem(sys.modules, package, None)  # also where it is installed
    refused(url, f"reading {url[:2]}:// needs a package that is not installed. Fix: {line}", package)


@pytest.fixture
def memory(cache) -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/", recursive=True)


def test_folders_and_patterns_of_a_store(memory):
    for name in ("data/b.jsonl", "data/c/a.jsonl", "data/.hidden.jsonl", "data/.git/x.jsonl", "data/README.md"):
        memory.pipe(f"/{name}", jsonl([{"text": name}]))
    assert texts("memory://data") == ["data/b.jsonl", "data/c/a.jsonl"]
    assert texts("memory://data/*.jsonl") == ["data/b.jsonl"]
    assert texts("memory://data/**/*.jsonl", split="train[-1:]") == ["data/c/a.jsonl"]
    assert next(iter(read_rows(source("memory://data/b.jsonl"))))[0].endswith("/data/b.jsonl")
    refused("memory://data/*.csv", "no file matches")
    refused("memory://data/*", "matches README.md too")
    refused("memory://data/none.jsonl", "no such file or folder there")
    memory.pipe("/docs/README.md", b"")
    refused("memory://docs", "no data files in this folder")


def test_a_stream_of_a_store(memory, cache):
    memory.pipe("/a.jsonl", jsonl({"text": str(i)} for i in range(9)))
    opened = SourceReader(source("memory://a.jsonl", split="train[2:5]"), streaming=True)
    assert [(number, row["text"]) for _, number, row in opened.rows()] == [(3, "2"), (4, "3"), (5, "4")]
    first = opened.digest()
    memory.pipe("/a.jsonl", jsonl({"text": str(i)} for i in range(9)))  # a newer file of the same size
    assert SourceReader(opened.source, streaming=True).digest() != first
    assert not (cache / "remote").exists()
    for split in ("train[:10%]", "train[-5:]"):
        with pytest.raises(UserError, match="cannot be streamed: the number of rows is not known"):
            SourceReader(source("memory://a.jsonl", split=split), streaming=True)


def test_a_cache_that_cannot_keep_a_remote_file(memory, tmp_path, monkeypatch):
    memory.pipe("/a.jsonl", jsonl())
    monkeypatch.setenv("FINETUNE_CACHE", str(written(tmp_path / "file") / "below"))
    refused("memory://a.jsonl", "cannot be kept in", "set FINETUNE_CACHE to a folder with room")


def test_the_cache_of_another_user(tmp_path, monkeypatch):
    def refuse(path, *_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "theirs"))
    monkeypatch.setattr(os, "mkdir", refuse)  # root may write anywhere
    with pytest.raises(UserError, match=r"Permission denied\. Fix: set FINETUNE_CACHE to a folder of your own"):
        file_digest(written(tmp_path / "rows.jsonl"))


def test_urls_as_they_are_shown():
    shown = {
        "data/a.jsonl": "data/a.jsonl",
        "s3://bucket/a?.jsonl": "s3://bucket/a?.jsonl",
        "https://u:p@host:8/a.jsonl?x=1#y": "https://host:8/a.jsonl?...",
        "https://host/a@b.jsonl": "https://host/a@b.jsonl",
        "sftp://u:p%40q@host/a.jsonl": "sftp://host/a.jsonl",
        "s3://k:s@bucket/a.jsonl?X-Amz-Signature=1f": "s3://bucket/a.jsonl?...",
        "abfs::az://c/a.jsonl?sig=1f": "abfs::az://c/a.jsonl?...",
    }
    assert {url: without_credentials(url) for url in shown} == shown


# --- datasets


def test_a_name_that_is_neither_here_nor_on_the_hub():
    """`datasets` reads what it finds by name; with the hub out of reach the message says what to do."""
    message = refused("nobody/nothing", "`split` (test)", "hf auth login", "give a local file", split="test")
    assert message.startswith("nobody/nothing: no local file or folder of this name in")


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Path:
    """A folder that `datasets` loads as it loads one of the hub: two splits, of 20 and 5 rows."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    numbered(tmp_path / "repo" / "train.jsonl", 20)
    numbered(tmp_path / "repo" / "test.jsonl", 5, start=100)
    return tmp_path / "repo"


def hub_texts(path: Path, split: str, streaming: bool) -> list[str]:
    return [row["text"] for _, _, row in HubRows(source(path, split=split), streaming).rows()]


@pytest.mark.parametrize("streaming", [False, True])
def test_splits_of_the_hub(repository, streaming):
    assert hub_texts(repository, "test", streaming) == [str(i) for i in range(100, 105)]
    assert hub_texts(repository, "train[3:7]", streaming) == ["3", "4", "5", "6"]
    assert hub_texts(repository, "train[17:]", streaming) == ["17", "18", "19"]
    assert len(hub_texts(repository, "train+test", streaming)) == 25
    with pytest.raises(UserError, match=r"no local file or folder(.|\n)*`split` \(dev\), which may be train,"):
        HubRows(source(repository, split="dev"), streaming)
    with pytest.raises(UserError, match="cannot be loaded"):
        HubRows(source(repository, config="none"), streaming)
    rows = HubRows(source(repository, split="test[1:3]"), streaming)
    assert [(label, number) for label, number, _ in rows.rows()] == [(f"{repository}[test[1:3]]", i) for i in (1, 2)]
    assert rows.digest() == HubRows(source(repository, split="test[1:3]"), streaming).digest()
    numbered(repository / "test.jsonl", 6)
    assert rows.digest() != HubRows(source(repository, split="test[1:3]"), streaming).digest()


def test_shares_of_a_stream_are_refused(repository):
    assert hub_texts(repository, "train[:50%]+test[-2:]", False) == [*map(str, range(10)), "103", "104"]
    for split in ("train[:50%]", "train[-2:]"):
        with pytest.raises(UserError, match="cannot be streamed: the number of rows is not known"):
            HubRows(source(repository, split=split), True)


def test_dataset_rows(tmp_path):
    dataset = datasets.Dataset.from_list(ROWS)
    assert list(dataset_rows(dataset, "hub"))[2] == ("hub", 3, ROWS[2])
    with pytest.raises(UserError, match=r"hub\[test\]: the dataset has no rows\. Fix: check `split`"):
        list(dataset_rows(dataset.select([]), "hub[test]"))
    written(tmp_path / "a.jsonl", jsonl() + b"bad\n")
    broken = datasets.load_dataset("json", data_files=str(tmp_path / "a.jsonl"), split="train", streaming=True)
    with pytest.raises(UserError, match=r"hub: cannot be read beyond row \d: "):
        list(dataset_rows(broken, "hub"))


def test_saved_datasets(tmp_path):
    dataset = datasets.Dataset.from_list([{"text": str(i)} for i in range(10)])
    dataset.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": dataset, "test": dataset.select(range(3))}).save_to_disk(tmp_path / "two")
    assert texts(tmp_path / "one") == texts(tmp_path / "two") == [str(i) for i in range(10)]
    assert texts(tmp_path / "two", split="test") == ["0", "1", "2"]
    found = list(read_rows(source(tmp_path / "two", split="test[-50%:]", limit=1)))
    assert found == [(f"{tmp_path / 'two'}[test]", 2, {"text": "1"})]
    refused(tmp_path / "one", "has no split `test`; it has `train`", split="test")
    refused(tmp_path / "two", "has no split `dev`; it has `train`, `test`", split="dev")
    refused(tmp_path / "two", "`config: x`", config="x")
    refused(tmp_path, "one: a dataset saved with save_to_disk, within", "source of its own")

    first = SourceReader(source(tmp_path / "one")).digest()
    assert SourceReader(source(tmp_path / "one")).digest() == first
    (data,) = (tmp_path / "one").glob("*.arrow")
    data.write_bytes(data.read_bytes().replace(b"0123456789", b"0123456798"))
    assert SourceReader(source(tmp_path / "one")).digest() != first
    (tmp_path / "one" / "state.json").write_text("{}")
    refused(tmp_path / "one", "saved with save_to_disk, but it cannot be loaded")


# --- what is not there

MISSING = {
    "a misspelt name": ("trian.jsonl", ["trian.jsonl: no such file", "did you mean", "train.jsonl"]),
    "no such folder": ("nowhere/x/train.jsonl", ["no such file", "there is no folder", "Relative paths start at"]),
    "a folder of nothing": ("empty", ["empty: no data files in this folder (it has no files)", "Expected json"]),
    "a folder of other things": ("docs", ["(it has README.md)", "Expected json, jsonl"]),
}


@pytest.mark.parametrize(("name", "parts"), MISSING.values(), ids=MISSING.keys())
def test_missing_files(tmp_path, name, parts):
    written(tmp_path / "train.jsonl")
    for folder in ("empty", "docs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "docs" / "README.md").write_text("no data")
    with pytest.raises(UserError) as caught:
        prepare(tmp_path / name)
    for part in parts:
        assert part in str(caught.value)
