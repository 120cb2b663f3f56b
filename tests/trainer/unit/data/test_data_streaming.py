"""Streams: every row in its place, whoever asks, however often they start."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from data_helpers import renderer_of, write_jsonl

from finetune.data.dataset import build_training
from finetune.data.loader import Loader
from finetune.data.streaming import Stream, open_stream
from finetune.errors import UserError
from finetune.recipe import Recipe

ROWS = 60
WINDOW = 16


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    rows = [{"text": " ".join(f"{number}" for _ in range(1 + number % 7))} for number in range(ROWS)]
    return write_jsonl(tmp_path / "texts.jsonl", rows)


@pytest.fixture
def others(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "others.jsonl", [{"text": f"fox {number}"} for number in range(25)])


def streaming(*sources: dict, seed: int = 1, max_steps: int = 30, **data: object) -> Recipe:
    return Recipe.model_validate(
        {
            "run": {"name": "test", "seed": seed},
            "model": {"config": {"model_type": "llama"}, "tokenizer": "none"},
            "mode": "full",
            "data": {"train": list(sources), "max_length": 32, "streaming": True, "window": WINDOW, **data},
            "batch": {"rows": 4},
            "optimizer": {"lr": 1e-3},
            "train": {"max_steps": max_steps},
        }
    )


def rows_of(recipe: Recipe) -> Stream:
    return open_stream(recipe, renderer_of(recipe))


def seen(rows: Stream, positions: range) -> list[list[tuple[str, int]]]:
    return [[(Path(one.path).name, one.row) for one in rows.row(position)] for position in positions]


def entries(cache: Path) -> set[Path]:
    return {path.parent for path in cache.glob("data/*/report.json")}


def test_a_pass_has_every_row_once_and_the_next_pass_again_in_another_order(texts):
    rows = rows_of(streaming({"path": str(texts), "format": "text"}))
    ends = [rows.window(number).end_row for number in range(8)]
    first = [place for row in seen(rows, range(ends[3])) for place in row]  # 60 rows are four windows
    again = [place for row in seen(rows, range(ends[3], ends[7])) for place in row]
    assert sorted(first) == sorted(again) == [("texts.jsonl", number) for number in range(1, ROWS + 1)]
    assert first != again
    assert (rows.epoch_at(0), rows.epoch_at(ends[3]), rows.epoch_at(ends[3] + 1), rows.epoch_at(ends[7] + 1)) == (
        0,
        0,
        1,
        2,
    )


def test_rows_are_packed_and_no_longer_than_a_row_may_be(texts):
    rows = rows_of(streaming({"path": str(texts), "format": "text"}))
    end = rows.window(3).end_row
    assert max(rows.lengths(position).sum() for position in range(end)) <= 32
    assert end < ROWS / 2
    for position in range(end):
        assert rows.lengths(position).tolist() == [one.num_tokens for one in rows.row(position)]


def test_any_position_is_the_same_from_anywhere_and_tokenizes_nothing_twice(texts, cache_folder):
    recipe = streaming({"path": str(texts), "format": "text"})
    rows = rows_of(recipe)
    walked = seen(rows, range(30))
    made = {path: path.stat().st_mtime_ns for folder in entries(cache_folder) for path in folder.glob("*.npy")}
    assert [seen(rows_of(recipe), range(p, p + 1))[0] for p in (29, 0, 17)] == [walked[29], walked[0], walked[17]]
    assert {path: path.stat().st_mtime_ns for path in made} == made


def test_without_its_cache_a_position_is_the_same(texts, cache_folder, tmp_path, monkeypatch):
    recipe = streaming({"path": str(texts), "format": "text"})
    walked = seen(rows_of(recipe), range(30))
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "another"))
    assert seen(rows_of(recipe), range(25, 30)) == walked[25:]


def test_no_more_is_read_than_is_needed(tmp_path, cache_folder):
    good = "".join(json.dumps({"text": f"row {number}"}) + "\n" for number in range(3 * WINDOW))
    path = tmp_path / "rows.jsonl"
    path.write_text(good + "no json\n")
    rows = rows_of(streaming({"path": str(path), "format": "text"}))
    rows.window(2)
    assert len(entries(cache_folder)) == 3
    with pytest.raises(UserError, match=rf"rows.jsonl:{3 * WINDOW + 1}: not valid JSON"):
        rows.window(3)


@pytest.mark.parametrize(("by", "expected"), [("rows", 0.75), ("tokens", 0.75)])
def test_sources_are_mixed_by_weight(texts, others, by, expected):
    sources = ({"path": str(texts), "weight": 3.0}, {"path": str(others), "weight": 1.0})
    rows = rows_of(streaming(*sources, mixture={"by": by}))
    documents = [one for position in range(rows.window(9).end_row) for one in rows.row(position)]
    counts: Counter[int] = Counter()
    for one in documents:
        counts[one.source] += one.num_tokens if by == "tokens" else 1
    assert counts[0] / counts.total() == pytest.approx(expected, abs=0.01)


def test_changing_a_weight_tokenizes_nothing_again(texts, others, cache_folder):
    for weight in (1.0, 2.0):
        sources = ({"path": str(texts), "weight": weight}, {"path": str(others)})
        rows_of(streaming(*sources)).window(8)
        found = entries(cache_folder)
    assert len(found) == 4 + 2  # chunks of 60 and of 25 rows


def test_a_source_is_read_no_more_often_than_it_may_be(texts, others):
    sources = ({"path": str(texts)}, {"path": str(others), "max_epochs": 2.0})
    rows = rows_of(streaming(*sources))
    documents = [one for position in range(rows.window(12).end_row) for one in rows.row(position)]
    times = Counter((one.source, one.row) for one in documents)
    assert {count for (source, _), count in times.items() if source == 1} == {2}


def test_a_stream_that_ends_says_when(texts):
    rows = rows_of(streaming({"path": str(texts), "max_epochs": 1.0}))
    with pytest.raises(UserError, match=r"the stream ends after \d+ steps: every source was read `max_epochs` times"):
        rows.row(1000)


def test_rows_that_fill_the_last_window_exactly(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": f"row {number}"} for number in range(2 * WINDOW)])
    rows = rows_of(streaming({"path": str(path), "format": "text"}))
    documents = [one.row for position in range(rows.window(4).end_row) for one in rows.row(position)]
    assert Counter(Counter(documents).values()) == {2: 2 * WINDOW}  # windows 0, 1; none behind the end; 3, 4


@pytest.mark.parametrize("beside", [False, True])
def test_a_stream_of_nothing_is_an_error(texts, tmp_path, beside):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "much too long " * 50}] * 5)
    sources = ([{"path": str(texts)}] if beside else []) + [{"path": str(path), "format": "text"}]
    with pytest.raises(UserError, match=rf"data.train\[{int(beside)}\]: none of its rows can be trained on"):
        rows_of(streaming(*sources)).row(0)


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_world_size_and_stop_sees_the_same_rows(texts, world_size):
    recipe = streaming({"path": str(texts), "format": "text"})

    def step(step: int, world_size: int) -> Counter[tuple[str, int]]:
        loaders = [Loader(rows_of(recipe), 4, 1, rank, world_size, 120) for rank in range(world_size)]
        return Counter(place for loader in loaders for batch in loader.step(step).batches for place in batch.origins)

    alone = Loader(rows_of(recipe), 4, 1, 0, 1, 120)
    for number in (0, 3, 7, 11):
        assert step(number, world_size) == Counter(p for batch in alone.step(number).batches for p in batch.origins)


def test_every_rank_knows_what_all_ranks_count_in_a_step(texts, others):
    """Over the border of a window, too."""
    recipe = streaming({"path": str(texts), "format": "text"}, {"path": str(others), "format": "text"})
    ranks = [Loader(rows_of(recipe), 4, 1, rank, 2, 120) for rank in range(2)]
    for number in range(8):
        made = [loader.step(number) for loader in ranks]
        batches = [batch for one in made for batch in one.batches]
        for name in ("tokens", "target_tokens", "sequences", "examples"):
            assert {one.counts[name] for one in made} == {sum(batch.counts[name] for batch in batches)}


def test_what_tells_a_stream_from_another(texts, others):
    facts = [
        build_training(recipe, renderer_of(recipe)).summary()["stream"]
        for recipe in (
            streaming({"path": str(texts), "format": "text"}),
            streaming({"path": str(texts), "format": "text", "weight": 2.0}),
            streaming({"path": str(others), "format": "text"}),
            streaming({"path": str(texts), "format": "text"}, window=8),
        )
    ]
    assert facts[0] == facts[1]  # weights are compared with the recipe's
    assert len(set(facts)) == 3
