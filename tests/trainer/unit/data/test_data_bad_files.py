"""More than a hundred bad files: each is told with its file and row; under `skip` nothing else is lost.

Two kinds: what is wrong with one row (the rows around it are read, and so is what follows), and what is wrong with a
file (an error under either policy, for what follows cannot be trusted).
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from data_helpers import byte_level, prepare

from finetune.data.formats.detect import parse_row
from finetune.data.samples import BadRow
from finetune.data.sources.source import SourceReader
from finetune.errors import UserError
from finetune.recipe.schema import Source

MEGABYTES = 10_000_000
LONGEST_MESSAGE = 700  # characters besides the path, whatever the row holds


def said(*turns: tuple[Any, Any], keys: tuple[str, str] = ("role", "content")) -> list[dict[str, Any]]:
    return [dict(zip(keys, turn, strict=True)) for turn in turns]


GOOD: dict[str, dict[str, Any]] = {
    "text": {"text": "good"},
    "messages": {"messages": said(("user", "good"), ("assistant", "good"))},
    "sharegpt": {"conversations": said(("human", "good"), ("gpt", "good"), keys=("from", "value"))},
    "alpaca": {"instruction": "good", "output": "good"},
    "prompt_completion": {"prompt": "good", "completion": "good"},
}


class Bad(NamedTuple):
    name: str  # of the file
    content: bytes  # of the file; or of the one bad row
    parts: list[str]  # of the message
    format: str = "text"


def dumped(row: Any) -> bytes:
    return json.dumps(row).encode()


# --- bad rows. In each file a good row stands before and after the bad one.

JSON_ROWS = {
    # in JSON as such
    "cut short": (b'{"text": "b', ["not valid JSON"]),
    "no value": (b'{"text": }', ["not valid JSON: Expecting value", "column 10"]),
    "no comma": (b'{"text": "b" "c": 1}', ["not valid JSON", "`,`|delimiter"]),
    "a comma too many": (b'{"text": "b",}', ["not valid JSON"]),
    "Python's quotes": (b"{'text': 'b'}", ["not valid JSON", "double quotes"]),
    "Python's None": (b'{"text": None}', ["not valid JSON", "near"]),
    "a name without quotes": (b'{text: "b"}', ["not valid JSON", "double quotes"]),
    "a number as name": (b'{1: "b"}', ["not valid JSON", "double quotes"]),
    "words": (b"good morning", ["not valid JSON", "near 'good morning'"]),
    "a comment": (b"// a comment", ["not valid JSON"]),
    "two objects": (b'{"text": "b"} {"text": "c"}', ["not valid JSON: Extra data", "one object a line"]),
    "a tab in a string": (b'{"text": "a\tb"}', ["not valid JSON: Invalid control character"]),
    "a wrong escape": (b'{"text": "\\x41"}', ["not valid JSON: Invalid \\"]),
    "half of an object on a line": (b"{", ["not valid JSON", "one object a line, whole"]),
    "a carriage return": (b'{"text": "b"}\r{"text": "c"}', ["carriage returns", "\\n as line ends"]),
    "a NUL byte": (b'{"text": "b\0"}', ["NUL byte", "save the file as UTF-8"]),
    "Latin-1": (b'{"text": "caf\xe9"}', ["byte 14 of the line is not UTF-8", "save the file as UTF-8"]),
    "a surrogate in UTF-8": (b'{"text": "\xed\xa0\x80"}', ["not UTF-8"]),
    "an overlong NUL": (b'{"text": "\xc0\x80"}', ["not UTF-8"]),
    "nested without end": (b'{"text": ' + b"[" * 100_000, ["JSON that cannot be read", "recursion"]),
    "a number without end": (b'{"text": ' + b"1" * 5000 + b"}", ["JSON that cannot be read", "digits"]),
    "ten megabytes, cut short": (b'{"text": "' + b"x" * MEGABYTES, ["not valid JSON: Unterminated string"]),
    "ten megabytes and a word": (b'{"text": "' + b"x" * MEGABYTES + b'" oh}', ["not valid JSON", "near"]),
    "ten megabytes of Latin-1": (b'{"text": "' + b"\xe9" * MEGABYTES + b'"}', ["byte 11 of the line"]),
    "half a character": (b'{"text": "a\\ud83e"}', ["unpaired surrogate"]),
    "a byte order mark later": (b'\xef\xbb\xbf{"text": "b"}', ["not valid JSON", "\\ufeff"]),
}
# In JSON that is whole, so that an array can be read on from there.
JSON_VALUES = {
    "NaN": (b'{"text": "b", "score": NaN}', ["`score` is NaN", "no JSON number"]),
    "NaN deep within": (b'{"a": [{"text": "b"}, {"n": [NaN]}]}', ["`a[1].n[0]` is NaN"]),
    "infinity": (b'{"text": "b", "score": -Infinity}', ["`score` is -Infinity"]),
    "a number beyond all": (b'{"text": "b", "score": 1e999}', ["`score` is 1e999"]),
    "a name twice": (b'{"text": "b", "text": "c"}', ["`text` twice"]),
    "a name twice within": (b'{"text": "b", "m": {"k": 1, "k": 1}}', ["`k` twice"]),
    "a long name twice": (b'{"' + b"k" * MEGABYTES + b'": 1, "' + b"k" * MEGABYTES + b'": 2}', ["kkk", "twice"]),
    "a list": (b"[1, 2]", ["expected an object", "got [1, 2]"]),
    "a string": (b'"b"', ["expected an object", 'got "b"']),
    "a number": (b"12.5", ["expected an object", "got 12.5"]),
    "null": (b"null", ["expected an object", "got null"]),
    "true": (b"true", ["expected an object", "got true"]),
    "a list of ten megabytes": (b"[" + b"1, " * (MEGABYTES // 3) + b"1]", ["expected an object", "got [1, 1"]),
    "a string of ten megabytes": (b'"' + b"x" * MEGABYTES + b'"', ["expected an object", 'got "xxx']),
}
CSV_ROWS = {
    "a cell too many": (b"x,y,z", ["3 cells", "2 columns", "quote"]),
    "a cell too few": (b"x", ["1 cells", "2 columns"]),
    "the header again": (b"text,other", ["the header is repeated"]),
    "Latin-1": (b"caf\xe9,y", ["`text`", "not UTF-8"]),
    "Latin-1 elsewhere": (b"x,caf\xe9", ["`other`", "not UTF-8"]),
    "a NUL byte": (b"x\0,y", ["`text`", "NUL byte"]),
    "an empty cell": (b",y", ["`text`", "empty"]),
    "ten megabytes": (b"x,y," + b"z" * MEGABYTES, ["3 cells"]),
}
TXT_ROWS = {
    "Latin-1": (b"caf\xe9", ["byte 4 of the line is not UTF-8"]),
    "a NUL byte": (b"a\0b", ["NUL byte"]),
    "UTF-16 without its mark": ("ab".encode("utf-16-le"), ["NUL byte", "UTF-16"]),
    "a carriage return": (b"a\rb", ["carriage return"]),
    "ten megabytes of Latin-1": (b"x" * MEGABYTES + b"\xff", [f"byte {MEGABYTES + 1}"]),
}
# What a format says of a row, whatever the file: the words are its own, the place is ours.
FORMAT_ROWS: dict[str, tuple[str, Any, list[str]]] = {
    "no text": ("text", {"content": "b"}, ["`text`", "`content`"]),
    "no columns": ("text", {}, ["`text`"]),
    "text is null": ("text", {"text": None}, ["`text`", "null"]),
    "text is empty": ("text", {"text": ""}, ["`text`", "empty"]),
    "text is blank": ("text", {"text": " \n\t"}, ["`text`", "empty"]),
    "text is a number": ("text", {"text": 3}, ["`text`", "number"]),
    "text is true": ("text", {"text": True}, ["`text`"]),
    "text is a list": ("text", {"text": ["b"]}, ["`text`", "list"]),
    "text is an object": ("text", {"text": {"a": "b"}}, ["`text`", "object"]),
    "no messages": ("messages", {"mesages": []}, ["`messages`", "`mesages`"]),
    "messages of null": ("messages", {"messages": None}, ["`messages`", "null"]),
    "messages of text": ("messages", {"messages": "hi"}, ["`messages`"]),
    "messages of none": ("messages", {"messages": []}, ["`messages`", "empty"]),
    "a message of text": ("messages", {"messages": ["hi"]}, ["messages[0]"]),
    "a message of null": ("messages", {"messages": [None]}, ["messages[0]", "null"]),
    "no role": ("messages", {"messages": [{"content": "x"}]}, ["messages[0]", "`role`"]),
    "no content": ("messages", {"messages": [*said(("user", "x")), {"role": "assistant"}]}, ["messages[1]", "content"]),
    "an unknown role": ("messages", {"messages": said(("user", "x"), ("bot", "y"))}, ["messages[1]", "bot"]),
    "a role of null": ("messages", {"messages": said((None, "x"), ("assistant", "y"))}, ["messages[0]", "role"]),
    "a role of a list": ("messages", {"messages": said(([], "x"), ("assistant", "y"))}, ["messages[0]", "role"]),
    "content of null": ("messages", {"messages": said(("user", None), ("assistant", "y"))}, ["messages[0]", "null"]),
    "content of nothing": ("messages", {"messages": said(("user", ""), ("assistant", "y"))}, ["messages[0]", "empty"]),
    "content of a number": ("messages", {"messages": said(("user", 3), ("assistant", "y"))}, ["messages[0]", "number"]),
    "assistant first": ("messages", {"messages": said(("assistant", "x"), ("user", "y"))}, ["assistant", "user"]),
    "user twice": ("messages", {"messages": said(("user", "x"), ("user", "y"), ("assistant", "z"))}, ["user"]),
    "user alone": ("messages", {"messages": said(("user", "x"))}, ["assistant"]),
    "system alone": ("messages", {"messages": said(("system", "x"))}, ["assistant"]),
    "system later": ("messages", {"messages": said(("user", "x"), ("assistant", "y"), ("system", "z"))}, ["system"]),
    "no conversations": ("sharegpt", {"messages": []}, ["`conversations`"]),
    "an unknown speaker": ("sharegpt", {"conversations": said(("me", "x"), keys=("from", "value"))}, ["'me'"]),
    "gpt first": ("sharegpt", {"conversations": said(("gpt", "x"), keys=("from", "value"))}, ["assistant"]),
    "a value of null": (
        "sharegpt",
        {"conversations": said(("human", None), ("gpt", "y"), keys=("from", "value"))},
        ["conversations[0]", "null"],
    ),
    "no output": ("alpaca", {"instruction": "q"}, ["`output`", "`instruction`"]),
    "no instruction": ("alpaca", {"output": "a"}, ["`instruction`"]),
    "an output of null": ("alpaca", {"instruction": "q", "output": None}, ["`output`", "null"]),
    "an output of nothing": ("alpaca", {"instruction": "q", "output": ""}, ["`output`", "empty"]),
    "an input of a number": ("alpaca", {"instruction": "q", "input": 3, "output": "a"}, ["`input`"]),
    "no completion": ("prompt_completion", {"prompt": "q"}, ["`completion`"]),
    "a completion of nothing": ("prompt_completion", {"prompt": "q", "completion": ""}, ["`completion`", "empty"]),
    "a prompt of an object": ("prompt_completion", {"prompt": {}, "completion": "a"}, ["`prompt`"]),
    "text and messages": ("prompt_completion", {"prompt": "q", "completion": []}, ["`prompt`", "`completion`"]),
}
# Values of a table's column `text` that are no text.
CELLS: dict[str, tuple[pyarrow.Array, list[str]]] = {
    "null": (pyarrow.array(["good", None, "good"]), ["`text`", "null"]),
    "empty": (pyarrow.array(["good", "", "good"]), ["`text`", "empty"]),
    "bytes that are no text": (
        pyarrow.StringArray.from_buffers(
            3, pyarrow.py_buffer(b"\0\0\0\0\4\0\0\0\5\0\0\0\11\0\0\0"), pyarrow.py_buffer(b"good\xffgood")
        ),
        ["a value that cannot be read", "utf-8"],
    ),
}
UUIDS = pyarrow.ExtensionArray.from_storage(pyarrow.uuid(), pyarrow.array([b"0" * 16], pyarrow.binary(16)))
ALL_BAD_CELLS: dict[str, tuple[pyarrow.Array, str]] = {
    "NaN": (pyarrow.array([float("nan")]), "number"),
    "times": (pyarrow.array([datetime(2024, 1, 2)]), "datetime"),
    "times beyond Python's": (pyarrow.array([2**40], pyarrow.timestamp("s")), "a value that cannot be read"),
    "bytes": (pyarrow.array([b"\xff\xfe"]), "bytes"),
    "structs": (pyarrow.array([{"a": 1}]), "object"),
    "lists": (pyarrow.array([["a"]]), "list"),
    "an extension": (UUIDS, "UUID"),
}


def bad_rows() -> Iterator[tuple[str, Bad, list[int]]]:
    """(id, a file with one bad row between two good ones, numbers of the three)."""
    good = dumped(GOOD["text"])
    for name, (row, parts) in {**JSON_ROWS, **JSON_VALUES}.items():
        for suffix in (".jsonl", ".jsonl.gz") if name in ("cut short", "Latin-1") else (".jsonl",):
            content = b"\n".join((good, row, good))
            yield f"jsonl: {name}{suffix[6:]}", Bad(f"a{suffix}", packed(suffix, content), parts), [1, 2, 3]
    for name, (row, parts) in {**JSON_VALUES, "Latin-1": (b'{"text": "\xe9"}', ["not UTF-8"])}.items():
        content = b"[" + b",\n".join((good, row, good)) + b"]"
        yield f"json: {name}", Bad("a.json", content, ["(line 2)", *parts]), [1, 2, 3]
    for name, (row, parts) in CSV_ROWS.items():
        yield f"csv: {name}", Bad("a.csv", b"text,other\ngood,1\n" + row + b"\ngood,2\n", parts), [2, 3, 4]
        tabs = row.replace(b",", b"\t")
        yield f"tsv: {name}", Bad("a.tsv", b"text\tother\r\ngood\t1\r\n" + tabs + b"\r\ngood\t2", parts), [2, 3, 4]
    for name, (row, parts) in TXT_ROWS.items():
        yield f"txt: {name}", Bad("a.txt", b"good\n" + row + b"\ngood", parts), [1, 2, 3]
    for name, (format, row, parts) in FORMAT_ROWS.items():
        rows = [GOOD[format], row, GOOD[format]]
        yield f"{format}: {name}", Bad("a.jsonl", b"\n".join(map(dumped, rows)), parts, format), [1, 2, 3]
    for name, (column, parts) in CELLS.items():
        for suffix in (".parquet", ".arrow"):
            yield f"{suffix[1:]}: {name}", Bad(f"a{suffix}", table(suffix, text=column), parts), [1, 2, 3]


def packed(name: str, content: bytes) -> bytes:
    return gzip.compress(content) if name.endswith(".gz") else content


def table(suffix: str, **columns: pyarrow.Array) -> bytes:
    made, out = pyarrow.table(columns), io.BytesIO()
    if suffix == ".parquet":
        pyarrow.parquet.write_table(made, out)
    else:
        with pyarrow.ipc.new_file(out, made.schema) as writer:
            writer.write_table(made)
    return out.getvalue()


BAD_ROWS = {name: (bad, numbers) for name, bad, numbers in bad_rows()}


def read(path: Path, format: str, bad: Callable[[str, int, str], None]) -> list[tuple[str, int, Any]]:
    """Rows as the data room reads them under `skip`: what the file or the format refuses goes to `bad`."""
    good = []
    for label, number, row in SourceReader(Source.model_validate({"path": str(path), "format": format})).rows(bad):
        try:
            parse_row(row, format)
        except BadRow as error:
            bad(label, number, str(error))
        else:
            good.append((label, number, row))
    return good


def check_message(message: str, path: Path, parts: list[str]) -> None:
    for part in parts:
        assert any(either in message for either in part.split("|")), message[:2000]
    assert len(message) < LONGEST_MESSAGE + len(str(path))


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row(tmp_path, name):
    bad, numbers = BAD_ROWS[name]
    path = tmp_path / bad.name
    path.write_bytes(bad.content)
    with pytest.raises(UserError) as caught:
        list(prepared(path, bad.format))
    message = str(caught.value)
    assert message.startswith(f"{path}:{numbers[1]}: ")
    assert "\nFix: correct the row, or set `data.on_bad_row: skip`, which leaves such rows out" in message
    check_message(message, path, bad.parts)

    skipped: list[tuple[str, int, str]] = []
    good = read(path, bad.format, lambda *found: skipped.append(found))
    assert [(label, number) for label, number, _ in good] == [(str(path), numbers[0]), (str(path), numbers[2])]
    for _, _, row in good:
        assert row | GOOD[bad.format] == row
    ((label, number, reason),) = skipped
    assert (label, number) == (str(path), numbers[1])
    check_message(reason, path, bad.parts)


def prepared(path: Path, format: str, **options: Any) -> Any:
    tokenizer = byte_level(bos_token="<s>", eos_token="</s>")
    return prepare(path, format, tokenizer=tokenizer, model__chat_template="plain", **options)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize("kind", ALL_BAD_CELLS)
def test_a_column_of_another_type(tmp_path, kind, suffix):
    column, expected = ALL_BAD_CELLS[kind]
    path = tmp_path / f"a{suffix}"
    path.write_bytes(table(suffix, text=column))
    with pytest.raises(UserError) as caught:
        prepared(path, "text")
    assert str(caught.value).startswith(f"{path}:1: ")
    assert expected in str(caught.value)


# --- bad files: an error under either policy

GOOD_LINE = b'{"text": "good"}\n'
PARQUET = table(".parquet", text=pyarrow.array([str(i) * 50 for i in range(5000)]))
ARROW = table(".arrow", text=pyarrow.array([str(i) * 50 for i in range(5000)]))
LINES = b"".join(b'{"text": "%d"}\n' % i for i in range(2000))
ZSTD = pyarrow.compress(LINES, "zstd", asbytes=True)
BROKEN_GZIP = bytearray(gzip.compress(LINES))
BROKEN_GZIP[len(BROKEN_GZIP) // 2] ^= 0xFF

BAD_FILES = {
    # nothing in it
    "empty jsonl": Bad("a.jsonl", b"", ["a.jsonl: the file has no rows", "take it out of the recipe"]),
    "blank jsonl": Bad("a.jsonl", b"\n \r\n\t\n", ["a.jsonl: the file has no rows"]),
    "a mark alone": Bad("a.jsonl", b"\xef\xbb\xbf", ["a.jsonl: the file has no rows"]),
    "empty json": Bad("a.json", b"", ["a.json: the file has no rows"]),
    "an empty array": Bad("a.json", b" [ ]\n", ["a.json: the file has no rows"]),
    "empty csv": Bad("a.csv", b"", ["a.csv: the file has no rows"]),
    "a header alone": Bad("a.csv", b"text\n", ["a.csv: the file has no rows"]),
    "empty txt": Bad("a.txt", b"\n\n", ["a.txt: the file has no rows"]),
    "empty gz": Bad("a.jsonl.gz", b"", ["a.jsonl.gz: the file has no rows"]),
    "gz of nothing": Bad("a.jsonl.gz", gzip.compress(b""), ["a.jsonl.gz: the file has no rows"]),
    "a table of no rows": Bad("a.parquet", table(".parquet", text=pyarrow.array([], "string")), ["has no rows"]),
    "an arrow of no rows": Bad("a.arrow", table(".arrow", text=pyarrow.array([], "string")), ["has no rows"]),
    # arrays of JSON: where the next item begins, nobody knows
    "an array never closed": Bad("a.json", b'[{"text": "a"}', ["a.json:1: not valid JSON", "the file ends"]),
    "an item never closed": Bad("a.json", b'[{"text": "a"},\n{"text": "b"', ["a.json:2: not valid JSON"]),
    "a string never closed": Bad("a.json", b'[{"text":\n"a}]', ["a.json:2:", "Unterminated string"]),
    "no comma between": Bad("a.json", b'[{"text": "a"},\n{"text": "b"}\n{"text"]', ["a.json:3: not valid JSON"]),
    "a comma at the end": Bad("a.json", b'[{"text": "a"},\n]', ["a.json:2: not valid JSON"]),
    "a comma alone": Bad("a.json", b"[,]", ["a.json:1: not valid JSON"]),
    "more after the array": Bad("a.json", b'[{"text": "a"}]\n[]', ["a.json:2:", "after the end of the array"]),
    "an array with a tab": Bad("a.json", b'[\n{"text": "a\tb"}]', ["a.json:2:", "Invalid control character"]),
    "an array nested deeply": Bad("a.json", b"[" * 100_000, ["a.json:1: JSON that cannot be read", "recursion"]),
    "an array of long numbers": Bad("a.json", b"[" + b"1" * 5000 + b"]", ["a.json:1: JSON that cannot be read"]),
    "ten megabytes in an array": Bad(
        "a.json", b'[{"text": "' + b"x" * MEGABYTES + b'"}, oh]', ["a.json:1: not valid JSON", "near"]
    ),
    # tables of text
    "a quote never closed": Bad("a.csv", b'text\nx\n"y\nz\n', ["a.csv:3:", "never closed", "double the quotes"]),
    "a quote in the middle": Bad("a.csv", b'text,b\nx,y\n"x" y,z\n', ["a.csv:3:", "not valid CSV"]),
    "a quote in a tsv": Bad("a.tsv", b'text\tb\n"x" y\tz\n', ["a.tsv:2:", "not valid CSV"]),
    "a header that has a name twice": Bad("a.csv", b"text,text\nx,y\n", ["a.csv:1:", "`text` twice", "rename"]),
    "a header of Latin-1": Bad("a.csv", b"caf\xe9\nx\n", ["a.csv:1: the header is not UTF-8"]),
    "csv of an old Mac": Bad("a.csv", b"text,b\rx,y\r", ["a.csv:1:", "carriage returns", "\\n as line ends"]),
    # another kind of file than the name says
    "UTF-16": Bad("a.jsonl", '{"text": "a"}'.encode("utf-16"), ["a.jsonl: it is UTF-16", "save the file as UTF-8"]),
    "UTF-16, the other way": Bad("a.csv", b"\xfe\xff" + "text\nx".encode("utf-16-be"), ["a.csv: it is UTF-16"]),
    "UTF-32": Bad("a.json", "[]".encode("utf-32"), ["a.json: it is UTF-16"]),
    "parquet named jsonl": Bad("a.jsonl", PARQUET, ["a.jsonl: it is a parquet file. Fix: name it .parquet"]),
    "parquet named csv": Bad("a.csv", PARQUET, ["a.csv: it is a parquet file"]),
    "arrow named txt": Bad("a.txt", ARROW, ["a.txt: it is an arrow file. Fix: name it .arrow"]),
    "gzip named jsonl": Bad("a.jsonl", gzip.compress(LINES), ["a.jsonl: it is compressed with gzip. Fix: add .gz"]),
    "bzip2 named csv": Bad("a.csv", bz2.compress(LINES), ["a.csv: it is compressed with bzip2. Fix: add .bz2"]),
    "xz named json": Bad("a.json", lzma.compress(LINES), ["a.json: it is compressed with xz. Fix: add .xz"]),
    "zstd named txt": Bad("a.txt", ZSTD, ["a.txt: it is compressed with zstd. Fix: add .zst"]),
    "gzip of gzip": Bad("a.txt.gz", gzip.compress(gzip.compress(LINES)), ["a.txt.gz: it is compressed with gzip"]),
    "zip named csv": Bad("a.csv", b"PK\3\4" + b"\0" * 50, ["a.csv: it is a zip archive (or a spreadsheet)"]),
    "a web page": Bad("a.jsonl", b"\n<!DOCTYPE html><html>", ["a.jsonl: it is a web page"]),
    "a pointer of Git LFS": Bad(
        "a.json", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", ["pointer of Git LFS", "git lfs pull"]
    ),
    "a pointer named parquet": Bad("a.parquet", b"version https://git-lfs.github.com/spec/v1\n", ["git lfs pull"]),
    "text named gz": Bad("a.jsonl.gz", LINES, ["a.jsonl.gz: not a .gz file. Fix: rename it"]),
    "zstd named gz": Bad(
        "a.jsonl.gz", ZSTD, ["a.jsonl.gz: it is compressed with zstd. Fix: add .zst", "; its name ends in .gz"]
    ),
    "text named zst": Bad("a.jsonl.zst", LINES, ["a.jsonl.zst: not a .zst file"]),
    "text named parquet": Bad("a.parquet", LINES, ["a.parquet: not a readable parquet file"]),
    "text named arrow": Bad("a.arrow", LINES, ["a.arrow: not a readable arrow file"]),
    "parquet named arrow": Bad("a.arrow", PARQUET, ["a.arrow: it is a parquet file"]),
    "arrow named parquet": Bad("a.parquet", ARROW, ["a.parquet: it is an arrow file"]),
    "a spreadsheet that is none": Bad(
        "a.xlsx", b"PK\3\4", ["a.xlsx: not a readable spreadsheet", "Fix: save the sheet as CSV"]
    ),
    "an old spreadsheet": Bad("a.xls", b"\xd0\xcf", ["`.xls` is not a kind of file", "save it as .xlsx, or as CSV"]),
    "a web page by its name": Bad("a.html", b"<html>", ["`.html` is not a kind of file", "pandoc -f html -t gfm"]),
    "a PDF": Bad("a.pdf", b"%PDF-1.7", ["`.pdf` is not a kind of file", "pdftotext"]),
    "a pickle": Bad("a.pkl", b"\x80", ["a.pkl: `.pkl` is not a kind of file"]),
    "no kind": Bad("data", LINES, ["data: `data` is not a kind of file"]),
    "compressed, of no kind": Bad("a.gz", gzip.compress(LINES), ["a.gz: `.gz` is not a kind of file"]),
    # damaged
    "a parquet cut short": Bad("a.parquet", PARQUET[:-100], ["a.parquet: not a readable parquet", "incomplete"]),
    "a parquet of zeros": Bad("a.parquet", PARQUET[:4] + b"\0" * (len(PARQUET) - 8) + b"PAR1", ["a.parquet:"]),
    "an empty parquet": Bad("a.parquet", b"", ["a.parquet: not a readable parquet file"]),
    "an arrow cut short": Bad("a.arrow", ARROW[:-100], ["a.arrow: not a readable arrow file", "incomplete"]),
    "a gz cut short": Bad("a.jsonl.gz", gzip.compress(LINES)[:-9], ["a.jsonl.gz: not a readable gz", "incomplete"]),
    "a gz with a wrong bit": Bad("a.jsonl.gz", bytes(BROKEN_GZIP), ["a.jsonl.gz: not a readable gz", "damaged"]),
    "a gz and more": Bad("a.jsonl.gz", gzip.compress(GOOD_LINE) + b"more", ["a.jsonl.gz: not a readable gz"]),
    "a bz2 cut short": Bad("a.csv.bz2", bz2.compress(b"text\n" + LINES)[:-50], ["a.csv.bz2: not a readable bz2"]),
    "an xz cut short": Bad("a.txt.xz", lzma.compress(LINES)[:-50], ["a.txt.xz: not a readable xz", "incomplete"]),
    "a zst cut short": Bad("a.json.zst", ZSTD[:-50], ["a.json.zst: not a readable zst", "incomplete"]),
    "a bz2 and more": Bad("a.jsonl.bz2", bz2.compress(GOOD_LINE) + b"more", ["a.jsonl.bz2: not a readable bz2"]),
    "an xz and more": Bad("a.jsonl.xz", lzma.compress(GOOD_LINE) + LINES, ["a.jsonl.xz: not a readable xz"]),
    "a zst and more": Bad(
        "a.jsonl.zst", pyarrow.compress(GOOD_LINE, "zstd", asbytes=True) + b"more", ["a.jsonl.zst: not a readable zst"]
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file(tmp_path, name):
    bad = BAD_FILES[name]
    path = tmp_path / bad.name
    path.write_bytes(bad.content)
    messages = []
    for policy in ("error", "skip"):
        with pytest.raises(UserError) as caught:
            prepared(path, bad.format, data__on_bad_row=policy, data__max_bad_share=1.0)
        messages.append(str(caught.value))
        assert str(path) in messages[-1]
        check_message(messages[-1], path, bad.parts)
    assert messages[0] == messages[1]


def test_there_are_a_hundred():
    assert len(BAD_ROWS) > 100
    assert len(BAD_FILES) > 50


# --- the whole way, with the counts


def test_one_bad_file_among_good_ones(tmp_path):
    """The good files are not trained on without the bad one: under either policy it is an error with its name."""
    for name in ("a.jsonl", "c.jsonl"):
        (tmp_path / name).write_bytes(GOOD_LINE)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(LINES * 10)[:-9])
    with pytest.raises(UserError, match=r"b\.jsonl\.gz: not a readable gz file beyond row \d+"):
        prepared(tmp_path, "text", data__on_bad_row="skip", data__max_bad_share=1.0)


def test_every_bad_row_at_once(tmp_path):
    """One file with all the bad lines of this table, a good one after each: counted to the last."""
    rows = [row for name, (row, _) in {**JSON_ROWS, **JSON_VALUES}.items() if len(row) < 1000]
    lines = [line for row in rows for line in (row, dumped({"text": f"good {len(row)}"}))]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    examples = prepared(path, "text", data__on_bad_row="skip", data__max_bad_share=1.0)
    (report,) = examples.report.sources
    assert (report.rows, report.bad, report.examples) == (len(lines), len(rows), len(rows))
    assert [example.row for example in examples] == list(range(2, len(lines) + 1, 2))
    assert all(line.startswith(f"{path}:{2 * i + 1}: ") for i, line in enumerate(report.bad_rows))
    with pytest.raises(UserError, match=f"{len(rows)} of {len(lines)} rows are bad, more than data.max_bad_share"):
        prepared(path, "text", data__on_bad_row="skip", data__max_bad_share=0.49)
