"""From rows to examples: what is kept, dropped and counted, weights, and the cache."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from data_helpers import (
    byte_level,
    conversation,
    ids,
    labels,
    prepare,
    recipe,
    renderer_of,
    text_tokenizer,
    trained_ids,
    write_jsonl,
)

from finetune.data.chat.renderer import UNTRAINED
from finetune.data.epochs import source_order
from finetune.data.examples import prepare_examples
from finetune.data.token_cache import ARRAYS
from finetune.errors import UserError

TEXTS = ["hello world", "the quick brown fox jumps over the lazy dog", "two and two is four", "thanks"]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])


def lengths_of(texts: list[str]) -> list[int]:
    return [len(text_tokenizer()(text)["input_ids"]) + 1 for text in texts]  # with eos


def test_examples_are_the_rows(texts):
    examples = prepare(texts)
    tokenizer = text_tokenizer()
    assert len(examples) == 4
    assert [(e.path, e.row) for e in examples] == [(str(texts), n) for n in (1, 2, 3, 4)]
    for example, text in zip(examples, TEXTS, strict=True):
        assert example.sequences[0].input_ids.dtype == np.int32
        assert ids(example) == [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        assert labels(example) == [UNTRAINED, *ids(example)[1:]]
    assert examples.lengths.tolist() == lengths_of(TEXTS)
    assert examples.num_targets.tolist() == [n - 1 for n in lengths_of(TEXTS)]
    totals = examples.report.totals()
    assert totals["rows"] == totals["examples"] == totals["taken"] == 4
    assert totals["tokens"] == sum(lengths_of(TEXTS))
    assert totals["supervised_tokens"] == sum(lengths_of(TEXTS)) - 4
    assert json.loads(json.dumps(examples.report.as_dict()))["sources"][0]["path"] == str(texts)
    with pytest.raises(IndexError):
        examples[4]


def test_conversations(tmp_path):
    path = write_jsonl(tmp_path / "chat.jsonl", [{"messages": conversation("hello", "fine", "and?", "good")}])
    tokenizer = byte_level(("<|im_start|>", "<|im_end|>"))
    examples = prepare(path, "messages", tokenizer=tokenizer, model__chat_template="chatml")
    assert tokenizer.decode(trained_ids(examples[0])) == "fine<|im_end|>good<|im_end|>"
    everything = prepare(
        path, "messages", tokenizer=tokenizer, model__chat_template="chatml", objective__train_on="all"
    )
    assert everything.num_targets.tolist() == [everything.lengths[0] - 1]


# --- longer than max_length


def test_overlong_rows_are_dropped_and_counted(texts):
    most = sorted(lengths_of(TEXTS))[-2]
    examples = prepare(texts, data__max_length=most)
    assert [e.row for e in examples] == [1, 3, 4]
    assert examples.report.totals()["dropped_overlong"] == 1


def test_overlong_rows_are_cut_at_the_end(texts):
    whole, cut = prepare(texts), prepare(texts, data__max_length=5, data__overlong="truncate")
    longer = sum(n > 5 for n in lengths_of(TEXTS))
    assert 1 < longer < 4
    assert cut.report.totals()["truncated"] == longer
    for long, short in zip(whole, cut, strict=True):
        assert labels(short) == labels(long)[:5]


def test_a_row_without_its_trained_part_is_dropped_and_counted(tmp_path):
    rows = [conversation("hello " * 30, "fine"), conversation("hello", "fine")]
    path = write_jsonl(tmp_path / "chat.jsonl", [{"messages": row} for row in rows])
    options = {"tokenizer": byte_level(("<|im_start|>", "<|im_end|>")), "model__chat_template": "chatml"}
    examples = prepare(path, "messages", data__max_length=32, data__overlong="truncate", **options)
    totals = examples.report.totals()
    assert [e.row for e in examples] == [2]
    assert (totals["truncated"], totals["no_supervised_token"]) == (1, 1)


def test_overlong_rows_are_split(texts):
    whole, cut = prepare(texts), prepare(texts, data__max_length=5, data__overlong="split")
    for row in (1, 2, 3, 4):
        pieces = [e for e in cut if e.row == row]
        (long,) = [e for e in whole if e.row == row]
        joined = [token for e in pieces for token in ids(e)]
        # a last piece of one token has nothing to predict and is dropped
        assert joined == ids(long)[: len(joined)]
        assert long.num_tokens - len(joined) <= 1
        assert all(e.num_tokens <= 5 and labels(e)[0] == UNTRAINED for e in pieces)
    assert cut.report.totals()["split"] == sum(n > 5 for n in lengths_of(TEXTS))


def test_overlong_rows_are_an_error(texts):
    longest = max(lengths_of(TEXTS))
    with pytest.raises(UserError, match=rf"texts\.jsonl:2: {longest} tokens, but data\.max_length is {longest - 1}"):
        prepare(texts, data__max_length=longest - 1, data__overlong="error")


def test_nothing_left_shows_one_example_with_its_mask(tmp_path):
    path = write_jsonl(tmp_path / "chat.jsonl", [{"messages": conversation("hello " * 30, "fine")}])
    options = {"tokenizer": byte_level(("<|im_start|>", "<|im_end|>")), "model__chat_template": "chatml"}
    with pytest.raises(UserError) as caught:
        prepare(path, "messages", data__max_length=16, data__overlong="truncate", **options)
    message = str(caught.value)
    assert "none of its 1 rows can be trained on" in message
    assert "1 without a trained token" in message
    assert f"{path}:1, with [[ ]] around what is trained:\n<|im_start|>user\nhello hello" in message
    with pytest.raises(UserError, match=r"0 bad, 1 longer than data\.max_length \(16\), 0 without"):
        prepare(path, "messages", data__max_length=16, **options)


# --- bad rows


def test_bad_rows_are_skipped_counted_and_listed(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "hello"}\n{"text": null}\nnot json\n{"text": "\xff"}\n' * 5)
    examples = prepare(path, data__on_bad_row="skip", data__max_bad_share=0.75)
    report = examples.report.sources[0]
    assert (report.rows, report.bad, report.examples) == (20, 15, 5)
    assert len(report.bad_rows) == 10
    assert report.bad_rows[0] == f"{path}:2: format `text`: `text` is null; expected text"
    assert [int(line.split(":")[1]) for line in report.bad_rows] == [2, 3, 4, 6, 7, 8, 10, 11, 12, 14]


def test_too_many_bad_rows_are_an_error(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "hello"}] * 98 + [{"text": ""}] * 2)
    with pytest.raises(UserError) as caught:
        prepare(path, data__on_bad_row="skip")
    assert "2 of 100 rows are bad, more than data.max_bad_share (0.01) allows" in str(caught.value)
    assert f"{path}:99: format `text`: `text` is empty" in str(caught.value)


def test_rows_the_template_refuses_are_bad_rows(tmp_path):
    rows = [conversation("hello", "fine", system="x"), conversation("hello", "fine")]
    path = write_jsonl(tmp_path / "chat.jsonl", [{"messages": row} for row in rows])
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    template += "{% for m in messages %}{{ m['role'] + '\n' + m['content'] + '</s>' }}{% endfor %}"
    tokenizer = byte_level(template=template, eos_token="</s>")
    with pytest.raises(UserError, match=r"chat\.jsonl:1: the tokenizer's chat template refuses .*: no system"):
        prepare(path, "messages", tokenizer=tokenizer)
    skipped = prepare(path, "messages", tokenizer=tokenizer, data__on_bad_row="skip", data__max_bad_share=0.5)
    assert [e.row for e in skipped] == [2]


def test_a_template_that_no_mask_fits_is_an_error_with_its_row_even_where_bad_rows_are_skipped(tmp_path):
    path = write_jsonl(tmp_path / "chat.jsonl", [{"messages": conversation("hello", "fine")}])
    tokenizer = byte_level(
        eos_token="</s>", template="{% for m in messages %}{{ m['content'] | upper }}</s>{% endfor %}"
    )
    with pytest.raises(
        UserError, match=r"chat\.jsonl:1: the tokenizer's chat template changes the content of message 1"
    ):
        prepare(path, "messages", tokenizer=tokenizer, data__on_bad_row="skip")


# --- weights


@pytest.mark.parametrize(("weight", "expected"), [(0.5, 2), (1.0, 4), (1.5, 6), (2.0, 8), (0.3, 1)])
def test_weight_is_the_rows_of_an_epoch(texts, weight, expected):
    examples = prepare(texts, source={"weight": weight})
    rows = [e.row for e in examples]
    assert len(rows) == expected == examples.report.totals()["taken"]
    counts = [rows.count(row) for row in (1, 2, 3, 4)]
    assert max(counts) - min(counts) <= 1
    assert examples.report.totals()["examples"] == 4
    assert rows == [e.row for e in prepare(texts, source={"weight": weight})]


def test_the_choice_depends_on_seed_and_source_only():
    assert source_order(100, 1, 0).tolist() == source_order(100, 1, 0).tolist()
    assert source_order(100, 1, 0).tolist() != source_order(100, 2, 0).tolist()
    assert source_order(100, 1, 0).tolist() != source_order(100, 1, 1).tolist()


def test_weights_that_leave_nothing_are_an_error(texts):
    with pytest.raises(UserError, match="raise `weight`"):
        prepare(texts, source={"weight": 0.01})


def test_several_sources(texts, tmp_path):
    other = write_jsonl(tmp_path / "other.jsonl", [{"text": "hello"}] * 3)
    made = recipe(
        texts,
        data__train=[{"path": str(p), "format": "text", "weight": 2} for p in (texts, other)],
        data__max_length=64,
    )
    examples = prepare_examples(made, made.data.train, renderer_of(made))
    assert [Path(e.path).name for e in examples] == ["texts.jsonl"] * 8 + ["other.jsonl"] * 6
    assert examples.lengths.tolist() == [e.num_tokens for e in examples]
    assert examples.num_targets.tolist() == [len(trained_ids(e)) for e in examples]
    assert [source.examples for source in examples.report.sources] == [4, 3]


# --- the cache


def entries(cache: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in cache.rglob("*.npy")}


def test_the_second_time_reads_the_cache(texts, cache_folder):
    calls: list[int] = []
    made, tokenizer = recipe(texts), text_tokenizer()
    first = prepare_examples(made, made.data.train, renderer_of(made, tokenizer), calls.append)
    before = entries(cache_folder)
    second = prepare_examples(made, made.data.train, renderer_of(made), calls.append)
    assert calls == [4]
    assert len(before) == len(ARRAYS)
    assert entries(cache_folder) == before
    assert [labels(e) for e in first] == [labels(e) for e in second]
    assert first.report == second.report


def test_weight_and_seed_do_not_tokenize_again(texts, cache_folder):
    prepare(texts)
    before = entries(cache_folder)
    prepare(texts, source={"weight": 2.5})
    prepare(texts, run__seed=7)
    assert entries(cache_folder) == before


def test_everything_that_matters_makes_a_new_entry(texts, cache_folder):
    def count() -> int:
        return len({Path(path).parent for path in entries(cache_folder)})

    options = [
        {},
        {"data__max_length": 63},
        {"data__overlong": "truncate"},
        {"data__on_bad_row": "skip"},
        {"objective__train_on": "all"},
        {"source": {"limit": 3}},
        {"model__chat_template": "chatml"},
        {"tokenizer": byte_level(bos_token="<s>", eos_token="</s>")},
        {"tokenizer": byte_level(("<s>", "</s>", "<x>"), bos_token="<s>", eos_token="</s>", adds_bos=True)},
    ]
    for number, option in enumerate(options, start=1):
        prepare(texts, **option)
        assert count() == number, option
    texts.write_text(texts.read_text().replace("hello", "howdy"))
    prepare(texts)
    assert count() == len(options) + 1


def test_an_entry_that_someone_deleted_in_part_is_built_again(texts, cache_folder):
    prepare(texts)
    for path in cache_folder.rglob("loss_mask.npy"):
        path.unlink()
    assert len(prepare(texts)) == 4


def test_a_failed_build_leaves_nothing(tmp_path, cache_folder):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "hello"}, {"text": None}])
    with pytest.raises(UserError):
        prepare(path)
    assert [p for p in cache_folder.rglob("*") if p.is_file() and p.suffix != ".lock"] == []


def test_a_cache_that_cannot_be_written(texts, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"file.*: the data cache cannot be written: .*set FINETUNE_CACHE"):
        prepare(texts)
