"""A teacher's parquet file: what a good one gives, and the message of each that cannot be used, with file and row."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from data_helpers import prepare, text_tokenizer, write_jsonl

from finetune.data.batch import collate
from finetune.data.cache_entries import entries_folder, list_entries
from finetune.data.dataset import Dataset
from finetune.data.examples import Examples
from finetune.data.packing import one_per_row
from finetune.data.predictions import IDS, LOG_PROBS, check_complete, load_predictions, vocabulary_digest
from finetune.data.teacher_file import file_predictions, read_teacher_file
from finetune.errors import UserError
from finetune.recipe.objective_settings import Distill

TEXTS = ["the quick brown fox", "hello world", "what is two and two? It is four", "fine thanks"]
VOCABULARY, K = 600, 3
METADATA: dict[str, Any] = {"vocabulary": vocabulary_digest(text_tokenizer()), "temperature": 1.0, "sampled": False}


def examples_of(folder: Path, **source: Any) -> Examples:
    return prepare(write_jsonl(folder / "rows.jsonl", [{"text": text} for text in TEXTS]), source=source)


def rows_of(examples: Examples) -> list[dict[str, Any]]:
    """Ids that tell example and target: 100 * row + target, and the next ones."""
    rows = []
    for example in examples:
        (sequence,) = example.sequences
        ids = [[100 * example.row + n + i for i in range(K)] for n in range(sequence.num_targets)]
        rows.append(
            {
                "input_ids": sequence.input_ids.tolist(),
                "labels": np.where(sequence.loss_mask, sequence.input_ids, -100).tolist(),
                "ids": ids,
                "log_probs": [[-1.0, -2.0, -3.5] for _ in ids],
            }
        )
    return rows


def write(folder: Path, rows: list[dict[str, Any]], metadata: Any = METADATA) -> Path:
    table = pyarrow.Table.from_pylist(rows)
    if metadata is not None:
        text = metadata if isinstance(metadata, str) else json.dumps(metadata)
        table = table.replace_schema_metadata({"finetune": text})
    pyarrow.parquet.write_table(table, folder / "teacher.parquet")
    return folder / "teacher.parquet"


def settings(file: Path, **keys: Any) -> Distill:
    return Distill(teacher=str(file), **keys)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))


def test_examples_find_their_predictions_by_their_tokens(tmp_path: Path) -> None:
    """In another order, with rows for examples that are not there, and with a source that is read twice."""
    examples = examples_of(tmp_path, weight=2.0)
    other = {"input_ids": [1, 2], "labels": [-100, 2], "ids": [[1, 2, 3]], "log_probs": [[-1.0, -2.0, -3.0]]}
    file = write(tmp_path, [*rows_of(examples)[: len(TEXTS)][::-1], other])
    predictions = file_predictions(settings(file), text_tokenizer(), VOCABULARY)
    check_complete(examples, predictions, str(file))
    taught = examples.with_predictions(predictions)
    assert len(taught) == 2 * len(TEXTS)
    for example in taught:
        first = [100 * example.row + n for n in range(example.num_targets)]
        assert example.target_columns[IDS][:, 0].tolist() == first
        assert example.target_columns[LOG_PROBS].shape == (example.num_targets, K)
    batch = collate([taught[2], taught[0]])
    assert batch.target_columns[IDS].dtype.is_signed
    assert batch.target_columns[IDS][:, 1].tolist() == [
        *(301 + n for n in range(taught[2].num_targets)),
        *(101 + n for n in range(taught[0].num_targets)),
    ]


def test_a_file_is_converted_once_and_again_where_its_entry_is_damaged(tmp_path: Path) -> None:
    examples = examples_of(tmp_path)
    file = write(tmp_path, rows_of(examples))
    first = file_predictions(settings(file), text_tokenizer(), VOCABULARY)
    entry = entries_folder() / first.identity
    before, made = np.array(first.log_probs), (entry / "ids.bin").stat().st_mtime_ns
    file_predictions(settings(file, top_k=K), text_tokenizer(), VOCABULARY)
    assert (entry / "ids.bin").stat().st_mtime_ns == made
    (entry / "log_probs.bin").write_bytes(b"1234")
    assert load_predictions(first.identity) is None
    again = file_predictions(settings(file), text_tokenizer(), VOCABULARY)
    assert np.array_equal(again.log_probs, before)
    assert not list(entries_folder().glob("*.tmp"))


def test_its_entry_is_listed(tmp_path: Path) -> None:
    """It has no tokenizer and no max_length, as entries of tokens have."""
    file = write(tmp_path, rows_of(examples_of(tmp_path)))
    file_predictions(settings(file), text_tokenizer(), VOCABULARY)
    entries = [entry for entry in list_entries() if (entry.of or {})["format"] == "teacher"]
    assert [entry.examples for entry in entries] == [len(TEXTS)]
    assert not {"tokenizer", "max_length"} & (entries[0].of or {}).keys()


def test_a_flipped_bit_in_pages_with_checksums_names_the_file(tmp_path: Path) -> None:
    examples = examples_of(tmp_path)
    table = pyarrow.Table.from_pylist(rows_of(examples)).replace_schema_metadata({"finetune": json.dumps(METADATA)})
    file = tmp_path / "teacher.parquet"
    pyarrow.parquet.write_table(table, file, write_page_checksum=True, compression="none", write_statistics=False)
    before = file_predictions(settings(file), text_tokenizer(), VOCABULARY)
    whole, seen = file.read_bytes(), 0
    end = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")  # of the pages; the footer follows
    for bit in np.random.Generator(np.random.PCG64(0)).choice(8 * end, 30, replace=False).tolist():
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        try:
            after = file_predictions(settings(file), text_tokenizer(), VOCABULARY)
        except UserError as error:
            seen += str(file) in str(error)
            continue
        assert all(np.array_equal(getattr(after, name), getattr(before, name)) for name in ("keys", "ids", "log_probs"))
    assert seen > 20


def test_a_checkpoint_knows_its_teacher(tmp_path: Path) -> None:
    examples = examples_of(tmp_path)
    summaries = []
    for log_prob in (-1.0, -1.1):
        rows = rows_of(examples)
        rows[0]["log_probs"][0][0] = log_prob
        predictions = file_predictions(settings(write(tmp_path, rows)), text_tokenizer(), VOCABULARY)
        taught = examples.with_predictions(predictions)
        summaries.append(Dataset(taught, one_per_row(taught.lengths)).summary())
    assert [key for key in summaries[0] if summaries[0][key] != summaries[1][key]] == ["teacher"]
    assert "teacher" not in Dataset(examples, one_per_row(examples.lengths)).summary()


# --- files that cannot be used


def cut(rows: list[dict[str, Any]], row: int, name: str, change: Callable[[Any], Any]) -> None:
    rows[row - 1][name] = change(rows[row - 1][name])


BAD_ROWS: dict[str, tuple[Callable[[list[dict[str, Any]]], None], str]] = {
    "fewer labels": (lambda rows: cut(rows, 2, "labels", lambda x: x[1:]), r"row 2: \d+ `labels` for \d+ `input_ids`"),
    "shifted labels": (
        lambda rows: cut(rows, 1, "labels", lambda x: [*x[1:], -100]),
        "row 1: `labels` are not the tokens themselves: expected each at its own place, not shifted",
    ),
    "a trained first token": (
        lambda rows: cut(rows, 3, "labels", lambda x: [rows[2]["input_ids"][0], *x[1:]]),
        "row 3: the first token is trained, which nothing predicts",
    ),
    "a target without ids": (
        lambda rows: cut(rows, 4, "ids", lambda x: x[1:]),
        r"row 4: \d+ lists of `ids` for \d+ trained tokens",
    ),
    "a target without log-probabilities": (
        lambda rows: cut(rows, 2, "log_probs", lambda x: x[:-1]),
        r"row 2: \d+ lists of `log_probs` for \d+ trained tokens",
    ),
    "another number of ids": (
        lambda rows: cut(rows, 2, "ids", lambda x: [x[0], x[1][:2], *x[2:]]),
        "row 2: `ids` of trained token 2 has 2 numbers; in row 1 there are 3",
    ),
    "a negative id": (
        lambda rows: cut(rows, 1, "ids", lambda x: [[-1, 2, 3], *x[1:]]),
        "row 1: `ids`: -1 is not an id",
    ),
    "an id twice": (
        lambda rows: cut(rows, 1, "ids", lambda x: [x[0], [7, 8, 7], *x[2:]]),
        "row 1: `ids` of trained token 2: an id occurs twice, as only `sampled` ones may",
    ),
    "probabilities in place of logarithms": (
        lambda rows: cut(rows, 3, "log_probs", lambda x: [[0.6, 0.2, 0.1], *x[1:]]),
        r"row 3: `log_probs`: expected finite numbers that are not above 0 \(natural logarithms\)",
    ),
    "not a number": (
        lambda rows: cut(rows, 3, "log_probs", lambda x: [[float("-inf"), -1.0, -2.0], *x[1:]]),
        "row 3: `log_probs`: expected finite numbers",
    ),
    "more than 1": (
        lambda rows: cut(rows, 2, "log_probs", lambda x: [x[0], [-0.1, -0.2, -3.0], *x[2:]]),
        r"row 2: `log_probs` of trained token 2: the probabilities add up to 1\.77",
    ),
    "a missing list": (
        lambda rows: cut(rows, 2, "ids", lambda x: [None, *x[1:]]),
        r"row 2: `ids`: a list is missing \(null\)",
    ),
    "a missing number": (
        lambda rows: cut(rows, 2, "log_probs", lambda x: [[None, -1.0, -2.0], *x[1:]]),
        r"row 2: `log_probs`: a number is missing \(null\)",
    ),
    "text": (
        lambda rows: [row.update(ids=[["a", "b", "c"]] * len(row["ids"])) for row in rows].clear(),
        "row 1: `ids`: expected large_list<item: large_list<item: int32>>, got list<element: list<element: string>>",
    ),
    "an id beyond the vocabulary": (
        lambda rows: cut(rows, 1, "ids", lambda x: [[1, 2, 600], *x[1:]]),
        "has id 600, but the model's vocabulary has 600 tokens",
    ),
    "no ids at all": (
        lambda rows: cut(rows, 1, "ids", lambda x: []),
        "row 1: `ids`: expected lists of ids. Fix: write one for every trained token",
    ),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows(name: str, tmp_path: Path) -> None:
    damage, message = BAD_ROWS[name]
    damage(rows := rows_of(examples_of(tmp_path)))
    file = write(tmp_path, rows)
    with pytest.raises(UserError, match=message) as caught:
        file_predictions(settings(file), text_tokenizer(), VOCABULARY)
    assert str(file) in str(caught.value)
    assert not list(entries_folder().glob("*.tmp"))


BAD_METADATA = {
    "none": (
        None,
        r"the schema's metadata needs a JSON object under `finetune`, and has none\. Fix: write one like \{",
    ),
    "not JSON": ("{vocabulary", "and has none"),
    "a key too few": ({"vocabulary": "a", "temperature": 1.0}, 'and has {"vocabulary": "a", "temperature": 1.0}'),
    "a temperature of 0": ({**METADATA, "temperature": 0}, r"metadata: `temperature` is 0\. Fix: write it as in"),
    "sampled as text": ({**METADATA, "sampled": "no"}, 'metadata: `sampled` is "no"'),
    "another vocabulary": (
        {**METADATA, "vocabulary": "1234"},
        "metadata: `vocabulary` is '1234', but the recipe's tokenizer has .*. Their token ids differ. Fix: use",
    ),
    "another temperature": (
        {**METADATA, "temperature": 2.0},
        "objective.temperature: 1, but the log-probabilities of .* are at 2. .* Fix: set 2",
    ),
    "draws": ({**METADATA, "sampled": True}, "objective.samples: the ids of .* are drawn .*Fix: set `samples: 3`"),
}


@pytest.mark.parametrize("name", BAD_METADATA)
def test_bad_metadata(name: str, tmp_path: Path) -> None:
    metadata, message = BAD_METADATA[name]
    file = write(tmp_path, rows_of(examples_of(tmp_path)), metadata)
    with pytest.raises(UserError, match=message):
        file_predictions(settings(file), text_tokenizer(), VOCABULARY)


def test_settings_that_the_file_does_not_fit(tmp_path: Path) -> None:
    file = write(tmp_path, rows_of(examples_of(tmp_path)))
    for keys, vocabulary, message in (
        ({"top_k": 64}, VOCABULARY, "objective.top_k: 64, but .* has 3 ids for each token. Fix: set 3, or remove it"),
        (
            {"samples": 3},
            VOCABULARY,
            "objective.samples: the ids of .* are the likeliest, not draws .*Fix: remove `samples`",
        ),
        ({}, 3, r"3 ids for each token of a vocabulary of 3\. Fix: keep fewer"),
    ):
        with pytest.raises(UserError, match=message):
            file_predictions(settings(file, **keys), text_tokenizer(), vocabulary)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"objective.teacher: .*none.parquet: cannot be read: .*No such file"):
        read_teacher_file(tmp_path / "none.parquet")
    (tmp_path / "text.parquet").write_text("not parquet, but long enough for its head")
    with pytest.raises(UserError, match=r"text.parquet: cannot be read as parquet: "):
        read_teacher_file(tmp_path / "text.parquet")
    with pytest.raises(
        UserError, match=r"no column `ids`\. A teacher's file has input_ids, labels, ids, log_probs, and"
    ):
        read_teacher_file(write(tmp_path, [{"input_ids": [1], "labels": [1], "log_probs": [[1.0]]}]))
    empty = pyarrow.table({name: pyarrow.array([]) for name in ("input_ids", "labels", "ids", "log_probs")})
    pyarrow.parquet.write_table(empty, tmp_path / "empty.parquet")
    with pytest.raises(UserError, match=r"empty.parquet: the file has no rows"):
        read_teacher_file(tmp_path / "empty.parquet")


def test_examples_without_predictions_are_named(tmp_path: Path) -> None:
    """Of one the row is missing, of another other tokens are trained."""
    examples = examples_of(tmp_path)
    rows = rows_of(examples)
    rows[2]["labels"][1] = -100
    rows[2]["ids"], rows[2]["log_probs"] = rows[2]["ids"][1:], rows[2]["log_probs"][1:]
    file = write(tmp_path, [rows[0], rows[2], rows[3]])
    predictions = file_predictions(settings(file), text_tokenizer(), VOCABULARY)
    with pytest.raises(UserError, match=r"has no predictions for 2 examples, such as .*rows.jsonl:2, .*rows.jsonl:3\."):
        check_complete(examples, predictions, str(file))
