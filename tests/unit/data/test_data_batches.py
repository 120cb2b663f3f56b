"""Packing, order and dealing: every document once, the same rows in the same micro-batches at any world size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from data_helpers import document, prepare, write_jsonl

from finetune.data import UNTRAINED, Batch, Example, Loader, RowOrder, collate, one_per_row, pack, shifted_targets
from finetune.errors import UserError

# --- packing


def realistic(count: int, seed: int = 0) -> np.ndarray:
    """Lengths as chats have them: log-normal, median 300, the longest cut at 4096."""
    lengths = np.random.default_rng(seed).lognormal(np.log(300), 0.9, count)
    return np.clip(lengths, 8, 4096).astype(np.int64)


@pytest.mark.parametrize("seed", range(5))
def test_packing_keeps_every_document_once_and_fills_the_rows(seed):
    lengths = realistic(5000, seed)
    rows = pack(lengths, 4096)
    assert sorted(rows.members.tolist()) == list(range(5000))
    sizes = [int(lengths[rows[i]].sum()) for i in range(len(rows))]
    assert max(sizes) <= 4096
    assert rows.efficiency(lengths, 4096) >= 0.99
    assert rows.efficiency(lengths, 4096) == pytest.approx(sum(sizes) / (len(rows) * 4096))


def test_packing_is_the_same_every_time_and_is_best_fit_decreasing():
    lengths = realistic(500)
    assert pack(lengths, 4096).members.tolist() == pack(lengths.tolist(), 4096).members.tolist()
    # the slow way: longest first, each into the fullest row with room
    bins: list[list[int]] = []
    for document_number in np.argsort(-lengths, kind="stable"):
        rooms = [(4096 - lengths[members].sum(), i) for i, members in enumerate(bins)]
        fitting = [pair for pair in rooms if pair[0] >= lengths[document_number]]
        if fitting:
            bins[min(fitting)[1]].append(int(document_number))
        else:
            bins.append([int(document_number)])
    rows = pack(lengths, 4096)
    assert len(rows) == len(bins)
    sizes = sorted(int(lengths[rows[i]].sum()) for i in range(len(rows)))
    assert sizes == sorted(int(lengths[members].sum()) for members in bins)


def test_the_example_of_pack():
    rows = pack([5, 3, 7, 2, 3], 10)
    assert [tuple(rows[i].tolist()) for i in range(len(rows))] == [(1, 2), (0, 3, 4)]


def test_packing_at_its_edges():
    assert len(pack([], 10)) == 0
    assert pack([], 10).efficiency([], 10) == 1.0
    assert len(pack([3, 4], 10**6)) == 1
    assert len(pack([10, 10], 10)) == 2
    for lengths in ([11], [0]):
        with pytest.raises(ValueError, match=r"within 1\.\.10"):
            pack(lengths, 10)
    with pytest.raises(IndexError):
        pack([1], 10)[1]


def test_packing_many_documents_is_quick():
    rows = pack(realistic(100_000), 4096)
    assert len(rows.members) == 100_000


def test_one_per_row():
    rows = one_per_row([3, 9, 4])
    assert [rows[i].tolist() for i in range(len(rows))] == [[0], [1], [2]]
    assert rows.efficiency([3, 9, 4], 9) == pytest.approx(16 / 27)


# --- order


def test_order_is_a_permutation_of_each_epoch_and_a_pure_function():
    order = RowOrder(10, seed=3)
    first = [order.row_at(i) for i in range(30)]
    for epoch in range(3):
        assert sorted(first[10 * epoch : 10 * (epoch + 1)]) == list(range(10))
    assert first[:10] != first[10:20]
    again = RowOrder(10, seed=3)
    assert [again.row_at(i) for i in reversed(range(30))] == first[::-1]
    assert [RowOrder(10, seed=4).row_at(i) for i in range(10)] != first[:10]
    with pytest.raises(ValueError, match="at least one row"):
        RowOrder(0, 1)


def test_order_does_not_change_between_versions():
    """A golden permutation: a resumed run must go on in the order that it began with."""
    assert [RowOrder(8, seed=42).row_at(i) for i in range(8)] == GOLDEN_ORDER


GOLDEN_ORDER = [3, 4, 2, 7, 6, 1, 5, 0]

# --- batches


def literal() -> list[Example]:
    a = Example("f", 1, np.array([1, 11, 12, 2], np.int32), np.array([-100, -100, 12, 2], np.int32))
    b = Example("f", 2, np.array([1, 21, 2], np.int32), np.array([-100, -100, 2], np.int32))
    return [a, b]


def test_the_worked_example_of_collate():
    batch = collate(literal(), index=5)
    # fmt: off
    assert batch.input_ids.tolist()    == [[   1,   11, 12, 2,    1,   21, 2]]
    assert batch.labels.tolist()       == [[-100, -100, 12, 2, -100, -100, 2]]
    assert batch.position_ids.tolist() == [[   0,    1,  2, 3,    0,    1, 2]]
    # fmt: on
    assert batch.input_ids.dtype == batch.labels.dtype == batch.position_ids.dtype == torch.int64
    assert batch.document_lengths == (4, 3)
    assert batch.documents == (("f", 1), ("f", 2))
    assert (batch.num_supervised, batch.num_tokens, batch.index) == (3, 7, 5)
    positions, targets = shifted_targets(batch)
    assert (positions.tolist(), targets.tolist()) == ([1, 2, 5], [12, 2, 2])
    assert batch.to("cpu").labels.tolist() == batch.labels.tolist()


def test_a_trained_first_token_is_refused():
    bad = Example("f", 3, np.array([1, 2], np.int32), np.array([1, 2], np.int32))
    with pytest.raises(ValueError, match="f:3: the first token"):
        collate([*literal(), bad])


def test_targets_never_cross_documents():
    batch = collate([document(n, length) for n, length in enumerate((5, 1, 7, 2, 3))])
    positions, targets = shifted_targets(batch)
    assert len(positions) == batch.num_supervised == 13
    predicting = batch.input_ids[0, positions]
    assert (predicting // 100 == targets // 100).all()
    assert (targets == predicting + 1).all()


# --- dealing


def loaders(tmp_path, world_size: int, *, rows: int = 30, total_rows: int = 72) -> list[Loader]:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "hello world " * (1 + i % 5)} for i in range(rows)])
    examples = prepare(path)
    order = RowOrder(rows, seed=1)
    return [
        Loader(examples, one_per_row(examples.lengths), order, 24, 2, rank, world_size, total_rows)
        for rank in range(world_size)
    ]


def content(batch: Batch) -> tuple:
    return (batch.index, batch.input_ids.tolist(), batch.labels.tolist(), batch.documents, batch.num_tokens)


def step_of_all(ranks: list[Loader], step: int) -> list[tuple]:
    """A step's micro-batches by their number, dealt to whichever rank."""
    dealt = [loader.step(step) for loader in ranks]
    assert len({len(batches) for batches in dealt}) == 1
    for rank, batches in enumerate(dealt):
        assert [batch.index % len(ranks) for batch in batches] == [rank] * len(batches)
    return sorted(content(batch) for batches in dealt for batch in batches)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_micro_batches_do_not_depend_on_the_world_size(tmp_path, world_size):
    one, many = loaders(tmp_path, 1), loaders(tmp_path, world_size)
    for step in range(3):
        found = step_of_all(many, step)
        assert [index for index, *_ in found] == list(range(12))
        assert found == step_of_all(one, step)


def test_steps_walk_the_order(tmp_path):
    (loader,) = loaders(tmp_path, 1)
    seen = [row for step in range(3) for batch in loader.step(step) for _, row in batch.documents]
    assert seen == [loader.order.row_at(position) + 1 for position in range(72)]
    with pytest.raises(IndexError, match="step 3 begins at row 72 of a run of 72 rows"):
        loader.step(3)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_last_step_is_filled_with_rows_that_train_nothing(tmp_path, world_size):
    ranks = loaders(tmp_path, world_size, total_rows=24 + 5)
    found = step_of_all(ranks, 1)
    assert len(found) == 12
    trained = [documents for _, _, labels, documents, _ in found if (np.array(labels) != UNTRAINED).any()]
    assert len(trained) == 3
    real = [ranks[0].order.row_at(position) for position in range(24, 29)]
    lengths = ranks[0].examples.lengths[real]
    assert sum(number for *_, number in found) == lengths.sum()
    supervised = sum(batch.num_supervised for loader in ranks for batch in loader.step(1))
    assert supervised == (lengths - 1).sum()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [1, 7, 30])
def test_evaluation_sees_every_row_once(tmp_path, world_size, rows):
    ranks = loaders(tmp_path, world_size, rows=rows)
    dealt = [list(loader.all_batches()) for loader in ranks]
    assert len({len(batches) for batches in dealt}) == 1
    counted = [batch for batches in dealt for batch in batches if batch.num_tokens]
    assert sorted(row for batch in counted for _, row in batch.documents) == list(range(1, rows + 1))
    assert sum(batch.num_supervised for batches in dealt for batch in batches) == ranks[0].examples.num_trained.sum()
    assert sorted(batch.index for batches in dealt for batch in batches) == list(range(len(dealt[0]) * world_size))


def test_packed_rows_of_a_step(tmp_path):
    (plain,) = loaders(tmp_path, 1)
    rows = pack(plain.examples.lengths, 64)
    loader = Loader(plain.examples, rows, RowOrder(len(rows), 1), 2, 1, 0, 1, len(rows))
    batch = loader.step(0)[0]
    assert len(batch.documents) == len(batch.document_lengths) == len(rows[loader.order.row_at(0)])
    assert sum(batch.document_lengths) == batch.input_ids.shape[1] <= 64


def test_rows_that_cannot_be_dealt(tmp_path):
    with pytest.raises(UserError, match="24 rows a step cannot be dealt in forwards of 2 rows to 5 processes"):
        loaders(tmp_path, 5)
