"""KTO's groups: each answer with one of another row after its prompt, by the data alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from data_helpers import prepare, recipe, renderer_of, text_tokenizer, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data.mismatched import partners
from finetune.data.streaming import open_stream
from finetune.errors import UserError

ROWS = [
    {"prompt": "one ", "completion": "red", "label": True},
    {"prompt": "two ", "completion": "green leaves", "label": False},
    {"prompt": "three ", "completion": "blue", "label": 1},
]


def ids(text: str) -> list[int]:
    return text_tokenizer()(text)["input_ids"] + [text_tokenizer().eos_token_id]


def texts(example: object) -> list[str]:
    return [text_tokenizer().decode(one.input_ids, skip_special_tokens=True) for one in example.sequences]  # pyright: ignore


def trained(example: object) -> list[str]:
    return [text_tokenizer().decode(one.input_ids[one.loss_mask]) for one in example.sequences]  # pyright: ignore


def test_each_answer_is_next_to_one_of_another_row(tmp_path: Path) -> None:
    examples = prepare(write_jsonl(tmp_path / "a.jsonl", ROWS), "unpaired")
    assert [texts(example) for example in examples] == [
        ["one red", "one green leaves"],
        ["two green leaves", "two blue"],
        ["three blue", "three red"],
    ]
    assert [trained(example) for example in examples] == [
        ["red</s>", "green leaves</s>"],
        ["green leaves</s>", "blue</s>"],
        ["blue</s>", "red</s>"],
    ]
    assert [example.columns for example in examples] == [{"label": 1.0}, {"label": 0.0}, {"label": 1.0}]
    assert examples.lengths.tolist() == [example.num_tokens for example in examples]
    assert examples.num_targets.tolist() == [example.num_targets for example in examples]
    totals = examples.report.totals()
    assert (totals["rows"], totals["examples"], totals["tokens"]) == (3, 3, int(examples.lengths.sum()))
    assert totals["supervised_tokens"] == int(examples.num_targets.sum())


def test_a_pair_gives_a_good_and_a_bad_answer_each_next_to_its_like(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i} ", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(3)]
    examples = prepare(write_jsonl(tmp_path / "a.jsonl", rows), "preference", objective__name="kto")
    assert [(texts(one), one.columns["label"]) for one in examples][:3] == [
        (["0 good 0", "0 good 1"], 1.0),
        (["0 bad 0", "0 bad 1"], 0.0),
        (["1 good 1", "1 good 2"], 1.0),
    ]
    assert [len(one.sequences) for one in prepare(tmp_path / "a.jsonl", "preference")] == [2, 2, 2]  # another entry


def test_a_stream_pairs_within_its_window(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{**ROWS[0], "completion": f"answer {i}"} for i in range(4)])
    made = recipe(path, "unpaired", data__streaming=True, data__window=2)
    rows = open_stream(made, renderer_of(made))
    found = {tuple(text.split()[-1] for text in texts(one)) for i in range(4) for one in rows.row(i)}
    assert found == {("0", "1"), ("1", "0"), ("2", "3"), ("3", "2")}


def test_an_answer_that_no_other_fits_is_counted(tmp_path: Path) -> None:
    long = {"prompt": "two ", "completion": "green " * 20, "label": True}
    examples = prepare(write_jsonl(tmp_path / "a.jsonl", [*ROWS, long]), "unpaired", data__max_length=30)
    assert [texts(example)[1] for example in examples] == ["one green leaves", "two blue", "three red"]
    assert examples.report.totals()["no_other_answer"] + examples.report.totals()["dropped_overlong"] == 1


@settings(derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=0, max_size=12), st.integers(1, 2))
def test_the_partner_is_the_first_that_fits(sizes: list[tuple[int, int]], per_row: int) -> None:
    prompts, answers = np.array(sizes, np.int64).reshape(-1, 2).T
    rows = np.arange(len(sizes)) // per_row
    found = partners(prompts, answers, rows, 20, per_row).tolist()
    for i, (prompt, answer) in enumerate(sizes):
        order = [(i + d) % len(sizes) for d in (*range(per_row, len(sizes)), *range(1, per_row))]
        fitting = [j for j in order if 2 * prompt + answer + sizes[j][1] <= 20 and rows[j] != rows[i]]
        assert found[i] == (fitting[0] if fitting else -1)


@pytest.mark.parametrize("rows", [ROWS[:1], [{**ROWS[0], "completion": "red " * 20}] * 3])
def test_without_any_other_answer_the_source_is_refused(rows: list[dict[str, object]], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.jsonl: none of its \d rows .* next to which no other row's answer fits"):
        prepare(write_jsonl(tmp_path / "a.jsonl", rows), "unpaired", data__max_length=60)
