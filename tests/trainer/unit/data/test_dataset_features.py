"""Tables as `datasets` 1.x to 5.x wrote them give the rows of the same data in JSON Lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from finetune.data.formats.detect import parse_row
from finetune.data.sources.source import SourceReader, dataset_rows
from finetune.errors import UserError
from finetune.recipe.schema import Source

TEXT, NUMBER = pyarrow.string(), pyarrow.int64()
JSON = pyarrow.json_() if hasattr(pyarrow, "json_") else TEXT
MESSAGE = pyarrow.struct({"role": TEXT, "content": TEXT})


def value(dtype: str, **more: Any) -> dict[str, Any]:
    """A leaf as `datasets` 2 and 3 wrote it; `old` has every default."""
    return {"dtype": dtype, "_type": "Value", **more}


OLD = {"id": None}  # until datasets 4 every feature has it
ROLE_CONTENT = {"role": value("string", **OLD), "content": value("string", **OLD)}
PARTS = [{"type": "text", "text": "ok"}]
CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
CLASSES = {"names": ["neg", "pos"], "_type": "ClassLabel"}


def class_label(**more: Any) -> dict[str, Any]:
    return {**CLASSES, **more}


# (features of the column `x`, its Arrow type, values in the file, values in the rows)
TABLES: dict[str, tuple[Any, pyarrow.DataType, list[Any], list[Any]]] = {
    # leaves
    "1.x text": (value("string", **OLD), TEXT, ["a", None], ["a", None]),
    "5.x text that is JSON": (value("string"), TEXT, ['"a"', "[1]"], ['"a"', "[1]"]),
    "2.x large text": (value("large_string", **OLD), pyarrow.large_string(), ["a", "[1]"], ["a", "[1]"]),
    "2.x number": (value("int32", **OLD), pyarrow.int32(), [1, None], [1, None]),
    "2.x truth": (value("bool", **OLD), pyarrow.bool_(), [True, None], [True, None]),
    "2.x small number": (value("float32", **OLD), pyarrow.float32(), [0.5, 2.0], [0.5, 2.0]),
    "3.x bytes": (value("binary", **OLD), pyarrow.binary(), [b"\xff", None], [b"\xff", None]),
    "text that Arrow keeps once": (
        value("string"),
        pyarrow.dictionary(pyarrow.int32(), TEXT),
        ["a", "a"],
        ["a", "a"],
    ),
    # classes
    "1.x class": (class_label(num_classes=2, names_file=None, id=None), NUMBER, [1, 0], ["pos", "neg"]),
    "2.x class": (class_label(**OLD), NUMBER, [1, None], ["pos", None]),
    "5.x class, one missing": (CLASSES, NUMBER, [0, -1], ["neg", -1]),
    "classes without names": ({"names": ["0", "1"], "_type": "ClassLabel"}, NUMBER, [0, 1], [0, 1]),
    "names of classes as text": (CLASSES, TEXT, ["pos"], ["pos"]),
    "2.x classes in a sequence": (
        {"feature": class_label(**OLD), "length": -1, "id": None, "_type": "Sequence"},
        pyarrow.list_(NUMBER),
        [[1, 0], [], None],
        [["pos", "neg"], [], None],
    ),
    "4.x class in a struct": (
        {"y": CLASSES, "z": value("string")},
        pyarrow.struct({"y": NUMBER, "z": TEXT}),
        [{"y": 1, "z": "a"}],
        [{"y": "pos", "z": "a"}],
    ),
    # lists and structs
    "2.x list of structs": ([ROLE_CONTENT], pyarrow.list_(MESSAGE), [CHAT], [CHAT]),
    "4.x list of structs": ({"feature": ROLE_CONTENT, "_type": "List"}, pyarrow.list_(MESSAGE), [CHAT], [CHAT]),
    "2.21 large list": (
        {"feature": ROLE_CONTENT, "id": None, "_type": "LargeList"},
        pyarrow.large_list(MESSAGE),
        [CHAT],
        [CHAT],
    ),
    "2.x sequence of structs": (
        {"feature": {"role": value("string"), "y": class_label(**OLD)}, "length": -1, "id": None, "_type": "Sequence"},
        pyarrow.struct({"role": pyarrow.list_(TEXT), "y": pyarrow.list_(NUMBER)}),
        [{"role": ["a", "b"], "y": [1, 0]}],
        [{"role": ["a", "b"], "y": ["pos", "neg"]}],
    ),
    "3.x list of a fixed length": (
        {"feature": value("int64", **OLD), "length": 2, "id": None, "_type": "Sequence"},
        pyarrow.list_(NUMBER, 2),
        [[1, 2]],
        [[1, 2]],
    ),
    "4.x lists in lists": (
        {"feature": {"feature": CLASSES, "length": -1, "_type": "List"}, "length": -1, "_type": "List"},
        pyarrow.list_(pyarrow.list_(NUMBER)),
        [[[0], [1, 0]]],
        [[["neg"], ["pos", "neg"]]],
    ),
    "a column `_type` in a struct": (
        {"_type": value("string"), "y": CLASSES},
        pyarrow.struct({"_type": TEXT, "y": NUMBER}),
        [{"_type": "t", "y": 1}],
        [{"_type": "t", "y": "pos"}],
    ),
    "2.x translation": (
        {"languages": ["de", "en"], "id": None, "_type": "Translation"},
        pyarrow.struct({"de": TEXT, "en": TEXT}),
        [{"de": "ja", "en": "yes"}],
        [{"de": "ja", "en": "yes"}],
    ),
    "3.x image": (
        {"mode": None, "decode": True, "id": None, "_type": "Image"},
        pyarrow.struct({"bytes": pyarrow.binary(), "path": TEXT}),
        [{"bytes": b"x", "path": None}],
        [{"bytes": b"x", "path": None}],
    ),
    # JSON
    "5.x json": ({"_type": "Json"}, JSON, ['{"a": null}', '"ok"', "null", None], [{"a": None}, "ok", None, None]),
    "4.x json as text": ({"decode": True, "_type": "Json"}, TEXT, ["[1, 2.5]"], [[1, 2.5]]),
    "json that stays text": ({"decode": False, "_type": "Json"}, TEXT, ["[1]"], ["[1]"]),
    "5.x json in a list": (
        {"feature": {"_type": "Json"}, "_type": "List"},
        pyarrow.list_(TEXT),
        [['"a"', '{"b": null}'], None],
        [["a", {"b": None}], None],
    ),
    "5.x messages of text and parts": (
        {"feature": {"role": value("string"), "content": {"_type": "Json"}}, "_type": "List"},
        pyarrow.list_(MESSAGE),
        [[{"role": "user", "content": '"q"'}, {"role": "assistant", "content": json.dumps(PARTS)}]],
        [[{"role": "user", "content": "q"}, {"role": "assistant", "content": PARTS}]],
    ),
    "5.x json in a large list": (
        {"feature": {"_type": "Json"}, "_type": "LargeList"},
        pyarrow.large_list(pyarrow.large_string()),
        [["1", '"1"']],
        [[1, "1"]],
    ),
    # no features, or stale ones: another program rewrote the column
    "no features": (None, TEXT, ['"a"'], ['"a"']),
    "a type that the feature is not of": ({"_type": "Json"}, NUMBER, [1], [1]),
    "a list that became a text": ({"feature": CLASSES, "_type": "List"}, TEXT, ["a"], ["a"]),
    "Arrow's own JSON without features": (None, JSON, ["[1]"], [[1] if JSON != TEXT else "[1]"]),
}


def table_of(feature: Any, type_: pyarrow.DataType, values: list[Any]) -> pyarrow.Table:
    metadata = {"info": {"features": {"x": feature}}, "fingerprint": "1f"} if feature else {"info": {"features": None}}
    if type_ == JSON and JSON != TEXT:
        array = pyarrow.ExtensionArray.from_storage(JSON, pyarrow.array(values, TEXT))
    else:
        array = pyarrow.array(values, type_)
    return pyarrow.table({"x": array}).replace_schema_metadata({"huggingface": json.dumps(metadata)})


def write(table: pyarrow.Table, path: Path, form: str) -> Path:
    """form: parquet, file or stream, the two kinds of Arrow's own files."""
    if form == "parquet":
        pyarrow.parquet.write_table(table, path)
        return path
    writer = pyarrow.ipc.new_file if form == "file" else pyarrow.ipc.new_stream
    with writer(path, table.schema) as out:
        out.write_table(table)
    return path


def rows_of(path: Path, streaming: bool = False) -> list[Any]:
    return [row for _, _, row in SourceReader(Source.model_validate({"path": str(path)}), streaming).rows()]


@pytest.mark.parametrize("form", ["parquet", "file", "stream"])
@pytest.mark.parametrize(("feature", "type_", "stored", "meant"), TABLES.values(), ids=TABLES.keys())
def test_a_table_gives_the_rows_that_were_written(tmp_path, feature, type_, stored, meant, form):
    path = write(table_of(feature, type_, stored), tmp_path / f"a.{'parquet' if form == 'parquet' else 'arrow'}", form)
    assert rows_of(path) == [{"x": one} for one in meant]


REFUSED = {
    "an unknown feature": ({"_type": "Hologram"}, TEXT, "a", ["column `x` has the feature type 'Hologram'", "Fix: "]),
    "a list of nothing": ({"_type": "List"}, pyarrow.list_(TEXT), [], ["column `x` has the feature type 'List'"]),
    "no JSON": ({"_type": "Json"}, TEXT, "{", [":1: `x`: not valid JSON: "]),
    "a number that JSON has not": ({"_type": "Json"}, TEXT, "[NaN]", [":1: `x`: its JSON has NaN"]),
    "a name twice": ({"_type": "Json"}, TEXT, '{"a": 1, "a": 2}', [":1: `x`: an object has `a` twice"]),
}


@pytest.mark.parametrize(("feature", "type_", "stored", "parts"), REFUSED.values(), ids=REFUSED.keys())
def test_a_table_that_cannot_be_read_is_refused(tmp_path, feature, type_, stored, parts):
    path = write(table_of(feature, type_, [stored]), tmp_path / "a.parquet", "parquet")
    with pytest.raises(UserError) as caught:
        rows_of(path)
    assert all(part in str(caught.value) for part in (str(path), *parts))


def test_metadata_that_is_no_json_is_refused(tmp_path):
    table = pyarrow.table({"x": ["a"]}).replace_schema_metadata({"huggingface": "{"})
    with pytest.raises(UserError, match=r"the metadata `huggingface` of its schema cannot be read\. Fix: "):
        rows_of(write(table, tmp_path / "a.parquet", "parquet"))


def test_one_bad_value_is_one_bad_row(tmp_path):
    path = write(table_of({"_type": "Json"}, TEXT, ["1", "{", "2"]), tmp_path / "a.parquet", "parquet")
    bad: list[int] = []
    reader = SourceReader(Source.model_validate({"path": str(path)}))
    rows = [row["x"] for _, _, row in reader.rows(lambda _, number, __: bad.append(number))]
    assert (rows, bad) == ([1, 2], [2])


# --- rows that the installed `datasets` writes

WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"days": {"default": None, "const": 0}}}}


def called(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


WRITTEN: dict[str, list[dict[str, Any]]] = {
    "text and parts": [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": PARTS}]},
        {"messages": CHAT},
    ],
    "arguments of many shapes": [
        {"messages": [CHAT[0], called({"q": "x", "limit": None})]},
        {"messages": [CHAT[0], called({"q": ["x"], "deep": {"a": None}})]},
    ],
    "schemas of tools": [
        {"messages": CHAT, "tools": [WEATHER]},
        {"messages": CHAT, "tools": [{"name": "g", "parameters": {"type": "object", "properties": {"x": [1, "a"]}}}]},
    ],
    "pairs": [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": "q2", "chosen": "a2", "rejected": "b2"},
    ],
    "pairs of messages": [
        {"chosen": CHAT, "rejected": [CHAT[0], {"role": "assistant", "content": PARTS}]},
        {"chosen": CHAT, "rejected": [CHAT[0], {"role": "assistant", "content": "b"}]},
    ],
}


@pytest.fixture
def own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    datasets.disable_progress_bars()


@pytest.mark.parametrize("rows", WRITTEN.values(), ids=WRITTEN.keys())
def test_what_datasets_writes_is_the_same_in_every_form(tmp_path, own_cache, rows):
    lines = tmp_path / "a.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)))
    dataset: Any = datasets.load_dataset("json", data_files=str(lines), split="train")
    dataset.to_parquet(tmp_path / "a.parquet")
    dataset.save_to_disk(tmp_path / "saved")
    stream = datasets.load_dataset("parquet", data_files=str(tmp_path / "a.parquet"), split="train", streaming=True)
    format = "preference" if "chosen" in rows[0] else "messages"
    meant = [parse_row(row, format) for row in rows]
    for read in (
        rows_of(lines),
        rows_of(tmp_path / "a.parquet"),
        rows_of(tmp_path / "saved"),
        rows_of(next((tmp_path / "saved").glob("*.arrow"))),
        [row for _, _, row in dataset_rows(stream, "hub")],
    ):
        assert [parse_row(row, format) for row in read] == meant


def test_nulls_stay_in_json_lines_and_padding_goes(tmp_path):
    rows = [
        {"messages": [CHAT[0], called({"q": "x", "limit": None, "deep": {"a": None}})], "tools": [WEATHER]},
        {"messages": [CHAT[0], called({"q": "y", "limit": 2, "deep": {"a": 1}})], "tools": [WEATHER]},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = {}
    for name in ("a.jsonl", "a.parquet"):
        (sample, _) = (parse_row(row, "messages") for row in rows_of(tmp_path / name))
        found[name] = [sample.messages[1].tool_calls[0]["function"]["arguments"], sample.tools[0]["function"]]
    assert found["a.jsonl"] == [{"q": "x", "limit": None, "deep": {"a": None}}, WEATHER]
    days = {"days": {"const": 0}}
    assert found["a.parquet"] == [
        {"q": "x", "deep": {}},
        {"name": "weather", "parameters": {"type": "object", "properties": days}},
    ]


def test_classes_have_their_names_on_the_hub_and_on_the_disk(tmp_path):
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])})
    dataset = datasets.Dataset.from_dict({"text": ["good", "bad"], "label": [1, 0]}, features=features)
    dataset.save_to_disk(tmp_path / "saved")
    meant = [{"text": "good", "label": "pos"}, {"text": "bad", "label": "neg"}]
    assert rows_of(tmp_path / "saved") == [row for _, _, row in dataset_rows(dataset, "hub")] == meant
    assert [row for _, _, row in dataset_rows(dataset.to_iterable_dataset(), "hub")] == meant
