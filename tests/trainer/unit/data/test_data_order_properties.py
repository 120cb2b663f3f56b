"""What holds for any lengths, seeds, sizes and stop points: nothing is lost or repeated, and nobody's rank matters."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from data_helpers import prepare, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data.dataset import Dataset
from finetune.data.examples import Examples
from finetune.data.loader import Loader, assign_micro_batches
from finetune.data.packing import RowOrder, group_rows, pack, row_work

quick = settings(derandomize=True, max_examples=60)


# --- packing


@st.composite
def documents(draw: st.DrawFn) -> tuple[list[int], int]:
    """(lengths, max_length): few or many distinct lengths, short and long beside max_length."""
    max_length = draw(st.sampled_from([1, 2, 10, 100, 1024, 4096, 1_000_000]))
    shortest = draw(st.integers(1, max_length))
    longest = draw(st.integers(shortest, max_length))
    lengths = st.integers(shortest, longest)
    return draw(st.lists(lengths, max_size=60) | st.lists(lengths, min_size=100, max_size=300)), max_length


def best_fit_decreasing(lengths: list[int], max_length: int) -> int:
    """Rows that it needs, found the slow way."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else max_length) - length)
    return len(rooms)


@quick
@given(documents())
def test_packing_loses_and_repeats_no_document(made):
    lengths, max_length = made
    rows = pack(lengths, max_length)
    assert sorted(rows.members.tolist()) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in rows[row]) <= max_length for row in range(len(rows)))
    assert all((np.diff(rows[row]) > 0).all() for row in range(len(rows)))
    again = pack(np.array(lengths, np.int32), max_length)
    assert np.array_equal(rows.members, again.members)
    assert np.array_equal(rows.offsets, again.offsets)


@quick
@given(documents())
def test_packing_needs_no_more_rows_than_best_fit_decreasing(made):
    lengths, max_length = made
    assert len(pack(lengths, max_length)) <= best_fit_decreasing(lengths, max_length)


# --- order


@quick
@given(
    num_rows=st.integers(1, 200),
    seed=st.integers(0, 2**31 - 1),
    rows_per_step=st.integers(1, 48),
    balance=st.integers(1, 64),
    spread=st.integers(1, 1000),
)
def test_each_epoch_sees_each_row_once_in_groups_of_like_work(num_rows, seed, rows_per_step, balance, spread):
    work = np.random.default_rng(seed).integers(1, spread + 1, num_rows)
    group = group_rows(balance, rows_per_step)
    assert group <= balance
    assert rows_per_step % group == 0
    order = RowOrder(num_rows, seed, work, group)
    run = [order.row_at(position) for position in range(3 * num_rows)]
    for epoch in range(3):
        assert sorted(run[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))
    for start in range(0, 3 * num_rows - group, group):
        if start // num_rows == (start + group - 1) // num_rows and group > 1:
            assert (np.diff(work[run[start : start + group]]) >= 0).all()
    backwards = RowOrder(num_rows, seed, work, group)
    assert [backwards.row_at(position) for position in reversed(range(3 * num_rows))] == run[::-1]


# --- dealing


@quick
@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=100), st.integers(1, 16))
def test_every_micro_batch_is_run_once_and_all_ranks_run_as_many(work, world_size):
    dealt = [assign_micro_batches(work, rank, world_size) for rank in range(world_size)]
    assert len({len(numbers) for numbers in dealt}) == 1
    numbers = sorted(number for share in dealt for number in share)
    assert numbers == list(range(len(numbers)))
    assert 0 <= len(numbers) - len(work) < world_size
    costs = [[work[number] if number < len(work) else 0 for number in slot] for slot in zip(*dealt, strict=True)]
    assert all(min(slot) >= max(after) for slot, after in itertools.pairwise(costs))


# --- the loader


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Examples:
    lengths = np.random.default_rng(0).integers(1, 9, 60)
    rows = [{"text": "hello world " * int(length)} for length in lengths]
    path = write_jsonl(tmp_path_factory.mktemp("rows") / "rows.jsonl", rows)
    return prepare(Path(path))


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, int]:
    rows_per_device = draw(st.integers(1, 3))
    world_size = draw(st.integers(1, 6))
    return {
        "rows_per_device": rows_per_device,
        "world_size": world_size,
        "rows_per_step": rows_per_device * world_size * draw(st.integers(1, 3)),
        "documents": draw(st.integers(1, 60)),
        "max_length": draw(st.sampled_from([64, 100, 1_000_000])),
        "seed": draw(st.integers(0, 1000)),
        "balance": draw(st.integers(1, 12)),
        "total_rows": draw(st.integers(1, 90)),
        "stop": draw(st.integers(0, 90)),
    }


def seen(
    examples: Examples, shape: dict[str, int], world_size: int, tokens: int | None, start: int = 0
) -> list[Counter]:
    """What all ranks together train on in each step from `start`: (micro-batch, its documents and tokens)."""
    rows = pack(examples.lengths[: shape["documents"]], shape["max_length"])
    work = row_work(rows, examples.sizes.attention_work)
    order = RowOrder(len(rows), shape["seed"], work, group_rows(shape["balance"], shape["rows_per_step"]))
    ranks = [
        Loader(
            Dataset(examples, rows, order=order),
            shape["rows_per_step"],
            shape["rows_per_device"],
            rank,
            world_size,
            shape["total_rows"],
            tokens,
        )
        for rank in range(world_size)
    ]
    steps = range(start, -(-shape["total_rows"] // shape["rows_per_step"]))
    found = []
    for step in steps:
        dealt = [loader.step(step).batches for loader in ranks]
        assert len({len(batches) for batches in dealt}) == 1
        assert tokens is None or all(
            batch.inputs["input_ids"].shape[1] <= tokens for batches in dealt for batch in batches
        )
        real = [batch for batches in dealt for batch in batches if batch.origins]
        found.append(Counter((batch.index, batch.origins, batch.counts["target_tokens"]) for batch in real))
    return found


@settings(quick, max_examples=30)
@given(shape=shapes(), budget=st.booleans())
def test_the_rows_of_a_step_are_the_same_for_any_world_size_and_stop_point(examples, shape, budget):
    tokens = 80 if budget else None
    shape = {**shape, "max_length": 64} if budget else shape
    alone = seen(examples, shape, 1, tokens)
    assert seen(examples, shape, shape["world_size"], tokens) == alone
    stop = shape["stop"] % len(alone)
    assert seen(examples, shape, shape["world_size"], tokens, start=stop) == alone[stop:]
    rows = len(pack(examples.lengths[: shape["documents"]], shape["max_length"]))
    times = Counter(row for step in alone for _, origins, _ in step.elements() for _, row, _ in origins)
    assert max(times.values()) == -(-shape["total_rows"] // rows)
    if shape["total_rows"] >= rows:
        assert sorted(times) == list(range(1, shape["documents"] + 1))
        assert min(times.values()) == shape["total_rows"] // rows
