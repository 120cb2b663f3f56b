"""How often a run shows each row: counted over epochs, shares, mixtures, held-out rows and streams."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_helpers import renderer_of, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data.dataset import Dataset, build_held_out, build_training
from finetune.data.epochs import (
    UNBOUNDED,
    EpochOrder,
    EpochRows,
    RunLength,
    SourceShare,
    epochs_differ,
    source_order,
)
from finetune.data.streaming import Stream
from finetune.errors import UserError
from finetune.recipe import Recipe
from finetune.training.run_plan import run_length

quick = settings(derandomize=True, max_examples=100, deadline=None)
WORDS = ("hello", "world", "fox", "dog", "quick", "lazy")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a.jsonl and b.jsonl of 20 and 33 rows of different lengths."""
    folder = tmp_path_factory.mktemp("sources")
    for name, count in (("a", 20), ("b", 33)):
        random = np.random.Generator(np.random.PCG64(count))
        rows = [{"text": f"{name} {i} " + " ".join(random.choice(WORDS, random.integers(1, 9)))} for i in range(count)]
        write_jsonl(folder / f"{name}.jsonl", rows)
    return folder


def training(folder: Path, *names: str, train: dict[str, Any], **data: Any) -> tuple[Recipe, Dataset]:
    """A recipe and its training data; names: sources such as "a" or "a weight=0.5 max_epochs=1"."""
    listed = []
    for name in names:
        path, *keys = name.split()
        values = {key: float(value) for key, _, value in (each.partition("=") for each in keys)}
        listed.append({"path": str(folder / f"{path}.jsonl"), "format": "text", **values})
    recipe = Recipe.model_validate(
        {
            "run": {"name": "epochs", "seed": 3},
            "model": {"config": {"model_type": "llama"}, "tokenizer": "none"},
            "mode": "full",
            "data": {"train": listed, "max_length": 64, **data},
            "batch": {"rows": 4},
            "train": train,
            "optimizer": {"lr": 1e-3},
        }
    )
    built = build_training(recipe, renderer_of(recipe))
    assert isinstance(built, Dataset)
    return recipe, built


def order_of(recipe: Recipe, data: Dataset) -> list[list[tuple[int, int]]]:
    """(source, row) of the examples in each packed sequence of the run, in its order."""
    size, rows = data.size(recipe.data.max_length), data.in_order(recipe)
    _, total_rows = run_length(recipe.train, recipe.batch.rows, size.rows, size.run_rows)
    return [[(one.source, one.row) for one in rows.row(position)] for position in range(total_rows)]


def exposure(order: list[list[tuple[int, int]]], source: int, count: int) -> list[int]:
    """How often each of the `count` rows of a source is in it."""
    counts = Counter(row for members in order for row in members)
    return [counts[source, row] for row in range(1, count + 1)]


# --- shares


@quick
@given(
    st.integers(1, 60), st.floats(0.01, 3.7), st.integers(1, 9), st.booleans(), st.integers(0, 3), st.floats(0.05, 1)
)
def test_no_example_is_taken_more_than_once_oftener_than_another(count, passes, epochs, by_tokens, seed, part):
    lengths = np.random.Generator(np.random.PCG64(seed)).integers(1, 50, count) if by_tokens else None
    share, taken = SourceShare(source_order(count, seed, 0), passes, lengths=lengths), np.zeros(count, int)
    ends = [*range(1, epochs), epochs - 1 + part]
    for begin, end in zip([0, *ends], ends, strict=False):
        taken += np.bincount(share.taken(begin, end), minlength=count)
        assert taken.max() - taken.min() <= 1
        assert taken.sum() == share.position(end)
    if lengths is None:
        assert taken.sum() == round(ends[-1] * passes * count)
    else:
        assert abs(taken @ lengths - ends[-1] * passes * lengths.sum()) <= lengths.max()


@quick
@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 9), st.booleans())
def test_a_cap_that_is_divided_over_epochs_is_reached_exactly(count, most, epochs, by_tokens):
    lengths = np.arange(1, count + 1) if by_tokens else None
    share = SourceShare(source_order(count, 1, 0), most / epochs, most, lengths)
    taken = np.concatenate([share.taken(epoch, epoch + 1) for epoch in range(epochs)])
    assert np.bincount(taken, minlength=count).tolist() == [most] * count
    assert not len(share.taken(epochs, epochs + 5))


SHARES = st.lists(
    st.tuples(st.integers(0, 25), st.floats(0.05, 2.5), st.booleans()).map(
        lambda drawn: (drawn[0], drawn[1], 1.5 if drawn[2] else UNBOUNDED)
    ),
    min_size=1,
    max_size=3,
)


@quick
@given(SHARES, st.none() | st.floats(0.3, 5), st.none() | st.integers(1, 60), st.booleans(), st.integers(1, 4))
def test_rows_and_order_have_what_the_shares_take(parts, epochs, num_rows, packs, group):
    """Every row of an epoch once, in another order in each; whoever asks, in any order of positions."""
    if epochs is None and num_rows is None:
        epochs = 2.0
    shares = [
        SourceShare(source_order(count, 1, i), passes if epochs is None else min(passes, most / epochs), most)
        for i, (count, passes, most) in enumerate(parts)
    ]
    if not any(len(share.taken(0, 1)) for share in shares):
        return
    lengths = [np.arange(1, count + 1, dtype=np.int64) for count, _, _ in parts]
    length = RunLength(epochs, num_rows)
    rows = EpochRows(shares, lengths, length, 40 if packs else None)
    firsts = np.cumsum([0, *map(len, rows.chosen)])
    order = EpochOrder(rows, 7, np.arange(firsts[-1]) ** 2, group)
    for epoch in reversed(range(rows.num_epochs)):
        first, end = rows.starts[epoch : epoch + 2]
        places = [order.row_at(position) for position in range(first, end)]
        assert sorted(places) == list(range(first, end))
        members = np.sort(np.concatenate([np.empty(0, int), *(rows[place] for place in places)]))
        expected = [
            firsts[i] + np.searchsorted(rows.chosen[i], share.taken(*length.span(epoch)))
            for i, share in enumerate(shares)
        ]
        assert members.tolist() == np.sort(np.concatenate(expected)).tolist()
    if len(rows):
        last = max(epoch for epoch in range(rows.num_epochs) if rows.starts[epoch] < len(rows))
        assert rows.epochs(0) == 0
        assert rows.epochs(len(rows)) == pytest.approx(length.span(last)[1])
    for share in shares:
        whole = np.concatenate([share.taken(*length.span(epoch)) for epoch in range(rows.num_epochs)])
        assert not len(whole) or np.bincount(whole).max() <= math.ceil(share.most)
    if num_rows is not None and epochs is None:
        assert len(rows) >= num_rows or all(share.most < UNBOUNDED or not len(share.order) for share in shares)


def test_whole_passes_have_equal_epochs():
    whole = [SourceShare(source_order(10, 1, 0), 1.0), SourceShare(source_order(7, 1, 1), 2.0, most=6)]
    assert not epochs_differ(whole, RunLength(3, None), 9)
    assert not epochs_differ(whole, RunLength(None, 27), 9)
    assert epochs_differ(whole, RunLength(None, 28), 9)  # in the fourth epoch nothing of the second is left
    assert not epochs_differ([SourceShare(source_order(10, 1, 0), 0.5)], RunLength(None, 9), 9)
    assert epochs_differ([SourceShare(source_order(10, 1, 0), 0.5)], RunLength(None, 10), 9)


# --- runs


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("epochs", [3, 2.5, 7])
def test_one_pass_over_several_epochs_shows_every_row_once(sources, packing, epochs):
    recipe, data = training(sources, "a max_epochs=1", train={"epochs": epochs}, packing=packing)
    assert exposure(order_of(recipe, data), 0, 20) == [1] * 20


@pytest.mark.parametrize("packing", [True, False])
def test_the_last_of_two_and_a_half_epochs_is_half_as_long(sources, packing):
    recipe, data = training(sources, "a weight=0.4", "b weight=1.2", train={"epochs": 2.5}, packing=packing)
    order = order_of(recipe, data)
    assert exposure(order, 0, 20) == [1] * 20
    assert exposure(order, 1, 33) == [3] * 33
    assert data.in_order(recipe).epoch_at(len(order)) == 2.5


def test_weights_cut_a_source_into_consecutive_parts(sources):
    recipe, data = training(sources, "a weight=0.3", "b", train={"epochs": 10})
    order, rows = order_of(recipe, data), data.in_order(recipe)
    ends = [next(i for i in range(len(order) + 1) if rows.epoch_at(i) >= epoch) for epoch in range(11)]
    for epoch, end in enumerate(ends):
        counts = exposure(order[:end], 0, 20)
        assert max(counts) - min(counts) <= 1
        assert sum(counts) == 6 * epoch
        assert exposure(order[:end], 1, 33) == [epoch] * 33


@pytest.mark.parametrize("mixture", [{"by": "tokens"}, {"by": "rows"}, {"by": "tokens", "temperature": 3.0}])
def test_a_mixture_shows_rows_evenly_and_none_beyond_its_cap(sources, mixture):
    recipe, data = training(
        sources, "a weight=3 max_epochs=2", "b weight=1", train={"epochs": 3}, mixture=mixture, balance=2
    )
    order = order_of(recipe, data)
    assert exposure(order, 0, 20) == [2] * 20
    counts = exposure(order, 1, 33)
    assert max(counts) - min(counts) <= 1


def test_held_out_rows_are_never_shown_and_the_others_evenly(sources):
    recipe, data = training(sources, "b weight=0.4", train={"epochs": 5}, eval={"share": 0.2})
    held_out = build_held_out(recipe, renderer_of(recipe))
    assert held_out is not None
    held = {one.row for one in held_out.examples}
    counts = exposure(order_of(recipe, data), 0, 33)
    assert [row for row, count in enumerate(counts, 1) if not count] == sorted(held)
    assert {count for count in counts if count} == {2}


def test_steps_are_a_beginning_of_longer_runs(sources):
    """So that a run that ended may train further; and a checkpoint knows it by its first epoch."""
    orders, summaries = [], []
    for train in ({"max_steps": 2}, {"max_steps": 9}, {"max_steps": 40}, {"epochs": 12}, {"epochs": 5, "max_steps": 7}):
        recipe, data = training(sources, "a weight=0.4", "b weight=1.3", train=train)
        orders.append(order_of(recipe, data))
        summaries.append(data.summary())
    longest = max(orders, key=len)
    assert all(order == longest[: len(order)] for order in orders)
    assert len({len(order) for order in orders}) == 5
    assert all(summary == summaries[0] for summary in summaries)
    half = training(sources, "a weight=0.4", "b weight=1.3", train={"epochs": 2.5})[1]
    assert half.summary() == {**summaries[0], "epochs": 2.5}


def test_a_cap_that_leaves_nothing_is_refused(sources):
    with pytest.raises(UserError, match="the weights of the sources leave no example"):
        training(sources, "a weight=2 max_epochs=0.01", train={"epochs": 0.005})


def test_steps_beyond_what_all_sources_give_are_refused(sources):
    with pytest.raises(UserError, match=r"max_epochs"):
        training(sources, "a weight=0.3 max_epochs=1", train={"max_steps": 400})
    names = ("a weight=0.3 max_epochs=1", "b weight=0.2 max_epochs=1")  # 12.6 sequences an epoch, 3.3 epochs
    for steps in (4, 7, 10):
        recipe, data = training(sources, *names, train={"max_steps": steps}, packing=False)
        order = order_of(recipe, data)
        assert len(order) == 4 * steps
        assert max(exposure(order, 0, 20) + exposure(order, 1, 33)) == 1
    with pytest.raises(UserError, match=r"read it 3\.\d+ times|would read it 1\.\d+ times"):
        training(sources, *names, train={"max_steps": 11}, packing=False)


def test_numbers_of_an_epoch_are_those_of_the_first(sources):
    one, several = (training(sources, "a weight=0.5", "b weight=1.2", train={"epochs": epochs})[1] for epochs in (1, 4))
    assert one.epochs is None
    assert several.epochs is not None
    assert replace(several.size(64), run_rows=None) == one.size(64)
    assert several.summary() == one.summary()
    assert several.size(64).run_rows == len(several.epochs)
    assert len(several.once().examples) == 53
    assert sorted(several.once().rows.members) == list(range(53))
    assert several.heaviest_row(64) >= one.heaviest_row(64)
    apart = several.unpacked()
    assert (len(apart.rows), apart.size(64).run_rows) == (50, 198)
    assert apart.examples is several.examples


def test_a_stream_shows_every_row_as_often_as_its_passes(sources):
    recipe = Recipe.model_validate(
        {
            "run": {"name": "stream", "seed": 3},
            "model": {"config": {"model_type": "llama"}, "tokenizer": "none"},
            "mode": "full",
            "data": {
                "train": [
                    {"path": str(sources / "a.jsonl"), "format": "text", "max_epochs": 2},
                    {"path": str(sources / "b.jsonl"), "format": "text", "max_epochs": 1},
                ],
                "max_length": 64,
                "streaming": True,
                "window": 8,
            },
            "batch": {"rows": 4},
            "train": {"max_steps": 100},
            "optimizer": {"lr": 1e-3},
        }
    )
    data = build_training(recipe, renderer_of(recipe))
    assert isinstance(data, Stream)
    rows, order = data.in_order(recipe), []
    with contextlib.suppress(UserError):  # at its end
        order.extend([(one.source, one.row) for one in rows.row(position)] for position in range(400))
    assert exposure(order, 0, 20) == [2] * 20
    assert exposure(order, 1, 33) == [1] * 33
