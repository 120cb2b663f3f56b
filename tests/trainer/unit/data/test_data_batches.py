"""Packing, order and dealing, by examples; what holds for all lengths and sizes is in test_data_order_properties."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from data_helpers import document, labelled, prepare, recipe, renderer_of, write_jsonl

from finetune.data.batch import Batch, TokenShare, collate, dummy_batch, token_shard
from finetune.data.dataset import Dataset, build_dataset
from finetune.data.loader import Loader, assign_micro_batches
from finetune.data.packing import RowOrder, group_rows, one_per_row, pack, row_work
from finetune.data.samples import Example
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


def questions(count: int) -> np.ndarray:
    """Lengths as GSM8K has them (172 +- 62 tokens, 59 to 493): few are short enough to fill what others leave."""
    lengths = np.random.default_rng(0).gamma(7.7, 22.3, count)
    return np.clip(lengths, 59, 493).astype(np.int64)


@pytest.mark.parametrize(("max_length", "count"), [(1024, 7473), (2048, 7473), (4096, 7473), (1024, 747_300)])
def test_rows_are_full_where_no_document_is_short(max_length, count):
    """Best-fit decreasing alone leaves 1.4 % of rows of 1024 places empty."""
    lengths = questions(count)
    rows = pack(lengths, max_length)
    assert np.array_equal(np.sort(rows.members), np.arange(count))
    assert np.add.reduceat(lengths[rows.members], rows.offsets[:-1]).max() <= max_length
    assert rows.efficiency(lengths, max_length) >= 0.99


def test_documents_of_a_row_ascend():
    rows = pack(realistic(500), 4096)
    assert all((np.diff(rows[i]) > 0).all() for i in range(len(rows)))


def test_the_example_of_pack():
    rows = pack([5, 3, 7, 2, 3], 10)
    assert [tuple(rows[i].tolist()) for i in range(len(rows))] == [(1, 2), (0, 3, 4)]


def test_packing_at_its_edges():
    assert len(pack([], 10)) == 0
    assert pack([], 10).efficiency([], 10) == 1.0
    assert len(pack([3, 4], 10**6)) == 1
    assert len(pack([10**6, 1, 10**6 - 1, 7], 10**6)) == 3
    assert len(pack([10, 10], 10)) == 2
    for lengths in ([11], [0]):
        with pytest.raises(ValueError, match=r"within 1\.\.10"):
            pack(lengths, 10)
    with pytest.raises(IndexError):
        pack([1], 10)[1]


def test_the_work_of_a_row():
    lengths = [5, 3, 7, 2, 3]
    assert row_work(pack(lengths, 10), np.square(lengths)).tolist() == [9 + 49, 25 + 4 + 9]
    assert row_work(pack([], 10), []).tolist() == []
    assert row_work(one_per_row([10**6]), [10**12]).tolist() == [10**12]


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


def test_balanced_order_does_not_change_between_versions():
    order = RowOrder(10, 42, np.arange(10)[::-1] ** 2, group=2)
    assert [order.row_at(i) for i in range(20)] == GOLDEN_BALANCED


GOLDEN_BALANCED = [7, 6, 2, 0, 5, 3, 4, 1, 9, 8, 4, 3, 8, 7, 1, 0, 5, 2, 9, 6]


def test_without_balance_work_does_not_enter_the_order():
    work = np.arange(50) ** 2
    assert np.array_equal(RowOrder(50, 1, work, group=1).epoch(3), RowOrder(50, 1).epoch(3))


def test_groups_are_of_like_work_and_their_order_is_random():
    work = np.random.default_rng(0).permutation(8192)
    order = RowOrder(8192, 1, work, group=8)
    groups = work[order.epoch(0)].reshape(-1, 8)
    assert np.ptp(groups, axis=1).mean() < 20  # two windows: neighbours are two ranks apart; at random 6371
    assert abs(np.corrcoef(np.arange(1024), groups[:, 0])[0, 1]) < 0.1


def test_a_row_has_other_neighbours_in_the_next_epoch():
    order = RowOrder(8192, 1, np.arange(8192), group=8)
    groups = [{frozenset(group) for group in order.epoch(epoch).reshape(-1, 8).tolist()} for epoch in range(2)]
    assert len(groups[0] & groups[1]) < 20


def test_a_large_epoch_is_sorted_in_windows():
    order = RowOrder(80_000, 1, np.arange(80_000), group=8)
    spread = np.ptp(order.epoch(0).reshape(-1, 8), axis=1)
    assert 40 < spread.mean() < 100  # ten windows of 1000 groups: neighbours are ten ranks apart


def test_groups_begin_with_steps_in_every_epoch():
    """50 rows in steps of 24 and groups of 8: the groups of epoch 1 begin 6 rows into it, those of epoch 2 4 rows."""
    work = np.arange(50) ** 2
    order = RowOrder(50, 1, work, group=8)
    run = np.array([order.row_at(i) for i in range(400)])
    for start in range(0, 400, 8):
        if start // 50 == (start + 7) // 50:  # not a group that two epochs share
            assert (np.diff(work[run[start : start + 8]]) > 0).all()
    assert all(sorted(run[start : start + 50]) == list(range(50)) for start in range(0, 400, 50))


def test_a_group_divides_the_step():
    found = [group_rows(balance, rows) for balance, rows in ((8, 64), (8, 60), (8, 4), (1, 64), (8, 7), (8, 11))]
    assert found == [8, 6, 4, 1, 7, 1]


# --- batches


def literal() -> list[Example]:
    a = labelled(1, [-100, -100, 12, 2], [1, 11, 12, 2])
    b = labelled(2, [-100, -100, 2], [1, 21, 2])
    return [a, b]


def input_ids(batch: Batch) -> torch.Tensor:
    return batch.inputs["input_ids"]


def targets(batch: Batch) -> list[list[int]]:
    return [column.tolist() for column in batch.targets]


def counted(batch: Batch) -> tuple[int, ...]:
    return tuple(batch.counts[name] for name in ("target_tokens", "tokens", "sequences", "examples"))


def test_the_worked_example_of_collate():
    batch = collate(literal(), index=5)
    # fmt: off
    assert input_ids(batch).tolist()              == [[1, 11, 12, 2, 1, 21, 2]]
    assert batch.inputs["position_ids"].tolist()  == [[0,  1,  2, 3, 0,  1, 2]]
    # fmt: on
    assert {tensor.dtype for tensor in batch.tensors()} == {torch.int64}
    assert batch.sequence_lengths == batch.sequence_tokens == (4, 3)
    assert batch.sequence_targets == (2, 1)
    assert batch.example_of_sequence.tolist() == [0, 1]
    assert batch.origins == (("f", 1, 0), ("f", 2, 0))
    assert (counted(batch), batch.index) == ((3, 7, 2, 2), 5)
    assert targets(batch) == [[1, 2, 5], [12, 2, 2], [0, 0, 1]]


def test_a_pair_keeps_its_order_its_columns_and_its_counts():
    pair = replace(document(3, 4, 2), columns={"margin": 0.5, "reference": (-1.0, -2.0)}, source=1)
    batch = collate([pair, replace(document(4, 3, 3), columns={"margin": 2.0, "reference": (-3.0, -4.0)})])
    assert batch.sequence_lengths == (4, 2, 3, 3)
    assert batch.example_of_sequence.tolist() == [0, 0, 1, 1]
    assert targets(batch)[2] == [0, 0, 0, 1, 2, 2, 3, 3]
    assert {name: column.tolist() for name, column in batch.columns.items()} == {
        "margin": [0.5, 2.0],
        "reference": [-1.0, -2.0, -3.0, -4.0],
    }
    assert batch.sequence_sources == (1, 1, 0, 0)
    assert counted(batch) == (8, 12, 4, 2)
    assert batch.counts["first_target_tokens"] == 3 + 2


def test_columns_of_targets_go_with_their_targets():
    """Through a micro-batch, onto the ranks that share its row, and none of them into a dummy."""
    examples = [
        replace(one, target_columns={"top": np.array([[10 * n + i, -i] for i in range(one.num_targets)])})
        for n, one in enumerate(literal())
    ]
    batch = collate(examples, padded_to=8)
    assert batch.target_columns["top"].tolist() == [[0, 0], [1, -1], [10, 0]]
    parts = [token_shard(batch, TokenShare(context=2, context_rank=rank)) for rank in (0, 1)]
    assert [part.target_columns["top"].tolist() for part in parts] == [[[0, 0]], [[1, -1], [10, 0]]]
    assert [targets(part)[1] for part in parts] == [[12], [2, 2]]
    assert dummy_batch(examples[0], 0, None).target_columns["top"].shape == (0, 2)
    moved = batch.map_tensors(lambda tensor: tensor + 1)
    assert moved.target_columns["top"].tolist() == [[1, 1], [2, 0], [11, 1]]
    assert any(tensor is batch.target_columns["top"] for tensor in batch.tensors())


def test_a_trained_first_token_is_refused():
    bad = labelled(3, [1, 2])
    with pytest.raises(ValueError, match="f:3: the first token"):
        collate([*literal(), bad])


def test_padding_is_made_of_short_documents_that_train_nothing():
    plain, padded = collate(literal()), collate(literal(), padded_to=7 + 128 + 5)
    assert padded.sequence_lengths == (4, 3, 128, 5)
    for name, values in padded.inputs.items():
        assert values.shape == (1, 140)
        assert torch.equal(values[:, :7], plain.inputs[name])
    assert input_ids(padded)[0, 7:].unique().tolist() == [0]
    assert padded.inputs["position_ids"][0, [7, 134, 135, 139]].tolist() == [0, 127, 0, 4]
    for name in ("origins", "sequence_tokens", "sequence_targets", "counts"):
        assert getattr(padded, name) == getattr(plain, name)
    assert (plain.num_padding, padded.num_padding) == (0, 133)
    assert targets(padded) == targets(plain)
    assert collate(literal(), padded_to=7).sequence_lengths == (4, 3)
    with pytest.raises(ValueError, match="7 tokens do not fit into a forward of 6"):
        collate(literal(), padded_to=6)


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_forward_is_padded_to_one_length(tmp_path, world_size):
    """Those that only fill up the last step as well."""
    for loader in loaders(tmp_path, world_size, total_rows=24 + 5):
        padded = replace(loader, padded_to=100)
        for step in (0, 1):
            for ours, theirs in zip(padded.step(step).batches, loader.step(step).batches, strict=True):
                assert input_ids(ours).shape == (1, 100)
                assert sum(ours.sequence_lengths) == 100
                assert (ours.counts, ours.origins) == (theirs.counts, theirs.origins)


def test_targets_never_cross_sequences():
    batch = collate([document(n, length) for n, length in enumerate((5, 1, 7, 2, 3))])
    assert len(batch.targets.positions) == batch.counts["target_tokens"] == 13
    predicting = input_ids(batch)[0, batch.targets.positions]
    assert (predicting // 100 == batch.targets.ids // 100).all()
    assert (predicting // 100 == batch.targets.sequence).all()
    assert (batch.targets.ids == predicting + 1).all()


# --- dealing


def loaders(
    tmp_path, world_size: int, *, rows: int = 30, total_rows: int = 72, tokens: int | None = None
) -> list[Loader]:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "hello world " * (1 + i % 5)} for i in range(rows)])
    examples = prepare(path)
    ordered = Dataset(examples, one_per_row(examples.lengths), order=RowOrder(rows, 1, examples.lengths**2, 4))
    return [Loader(ordered, 24, 2, rank, world_size, total_rows, tokens) for rank in range(world_size)]


def content(batch: Batch) -> tuple:
    return (batch.index, input_ids(batch).tolist(), targets(batch), batch.origins, batch.counts)


def step_of_all(ranks: list[Loader], step: int) -> list[tuple]:
    """A step's micro-batches by their number, dealt to whichever rank; without dummies."""
    dealt = [loader.step(step).batches for loader in ranks]
    assert len({len(batches) for batches in dealt}) == 1
    return sorted(content(batch) for batches in dealt for batch in batches if batch.origins)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_micro_batches_do_not_depend_on_the_world_size(tmp_path, world_size):
    one, many = loaders(tmp_path, 1), loaders(tmp_path, world_size)
    for step in range(3):
        found = step_of_all(many, step)
        assert [index for index, *_ in found] == list(range(12))
        assert found == step_of_all(one, step)


def test_steps_walk_the_order(tmp_path):
    (loader,) = loaders(tmp_path, 1)
    seen = [o.row for step in range(3) for _, _, _, origins, _ in step_of_all([loader], step) for o in origins]
    assert seen == [loader.rows.order.row_at(position) + 1 for position in range(72)]
    with pytest.raises(IndexError, match="step 3 begins at row 72 of a run of 72 rows"):
        loader.step(3)


@pytest.mark.parametrize(
    ("work", "dealt"),
    [
        ([5, 9, 8, 4], [[1, 3], [2, 0]]),
        ([1, 1, 1, 1], [[0, 3], [1, 2]]),  # of equal work: in order
        ([7, 6, 5], [[0, 3], [1, 2]]),  # 3 is a dummy
        ([7], [[0], [1]]),
    ],
)
def test_who_runs_a_micro_batch(work, dealt):
    assert [assign_micro_batches(work, rank, 2) for rank in range(2)] == dealt


def test_processes_work_equally_long_at_the_same_time(tmp_path):
    (plain,) = loaders(tmp_path, 1, rows=240)
    examples = plain.rows.examples
    rows = one_per_row(examples.lengths)

    def waits(group: int) -> float:
        """Share of the attention work that the slower of two processes has more than their mean."""
        order = RowOrder(len(rows), 1, examples.lengths**2, group)
        ranks = [Loader(Dataset(examples, rows, order=order), 4, 2, rank, 2, 240) for rank in range(2)]
        slots = [[loader.step(step).batches[0] for loader in ranks] for step in range(60)]
        work = np.array([[sum(n * n for n in batch.sequence_lengths) for batch in slot] for slot in slots])
        return work.max(1).sum() / work.mean(1).sum() - 1

    assert waits(4) < 0.02 < 0.2 < waits(1)


def test_the_heaviest_run_first(tmp_path):
    """What does not fit into memory shows at once."""
    for loader in loaders(tmp_path, 2):
        work = [sum(n * n for n in batch.sequence_lengths) for batch in loader.step(0).batches]
        assert work == sorted(work, reverse=True)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_last_step_is_short(tmp_path, world_size):
    """5 rows in forwards of 2 are 3 forwards; one that trains nothing stands in for what is missing to a multiple."""
    ranks = loaders(tmp_path, world_size, total_rows=24 + 5)
    dealt = [batch for loader in ranks for batch in loader.step(1).batches]
    assert sorted(batch.index for batch in dealt) == list(range(-(-3 // world_size) * world_size))
    dummies = [batch for batch in dealt if batch.index >= 3]
    real = [ranks[0].rows.order.row_at(position) for position in range(24, 29)]
    lengths = ranks[0].rows.examples.lengths[real]
    for dummy in dummies:
        assert (targets(dummy), set(dummy.counts.values()), dummy.origins) == ([[], [], []], {0}, ())
        assert dummy.example_of_sequence.tolist() == []
        assert dummy.sequence_lengths == (lengths.min(),)  # the cheapest
    assert [origin.row for *_, origins, _ in step_of_all(ranks, 1) for origin in origins] == [row + 1 for row in real]
    assert sum(batch.counts["tokens"] for batch in dealt) == lengths.sum()
    assert sum(batch.counts["target_tokens"] for batch in dealt) == (lengths - 1).sum()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [1, 7, 30])
@pytest.mark.parametrize("tokens", [None, 64])
def test_evaluation_sees_every_row_once(tmp_path, world_size, rows, tokens):
    (plain, *_) = loaders(tmp_path, 1, rows=rows)
    examples = plain.rows.examples
    everything = Dataset(examples, one_per_row(examples.lengths))
    ranks = [Loader(everything, 24, 2, rank, world_size, rows, tokens) for rank in range(world_size)]
    dealt = [list(loader.all_batches()) for loader in ranks]
    assert len({len(batches) for batches in dealt}) == 1
    counted = [batch for batches in dealt for batch in batches if batch.origins]
    assert sorted(origin.row for batch in counted for origin in batch.origins) == list(range(1, rows + 1))
    assert sum(batch.counts["target_tokens"] for batches in dealt for batch in batches) == examples.num_targets.sum()
    assert sorted(batch.index for batches in dealt for batch in batches) == list(range(len(dealt[0]) * world_size))


def test_packed_rows_of_a_step(tmp_path):
    (plain,) = loaders(tmp_path, 1)
    examples = plain.rows.examples
    rows = pack(examples.lengths, 64)
    loader = Loader(Dataset(examples, rows, order=RowOrder(len(rows), 1)), 2, 1, 0, 1, len(rows))
    (batch,) = [batch for batch in loader.step(0).batches if batch.index == 0]
    assert len(batch.origins) == len(batch.sequence_lengths) == len(rows[loader.rows.order.row_at(0)])
    assert sum(batch.sequence_lengths) == input_ids(batch).shape[1] <= 64


def test_rows_longer_than_all_documents_together(tmp_path):
    (plain,) = loaders(tmp_path, 1)
    examples = plain.rows.examples
    rows = pack(examples.lengths, 10**6)
    loader = Loader(Dataset(examples, rows, order=RowOrder(len(rows), 1)), 4, 1, 0, 1, len(rows))
    (batch,) = loader.step(0).batches
    assert batch.counts["tokens"] == examples.lengths.sum()


def test_rows_that_cannot_be_distributed(tmp_path):
    with pytest.raises(
        UserError, match=r"batch.rows: 24 must be divisible by rows_per_device x processes \(2 x 5 = 10\)"
    ):
        loaders(tmp_path, 5)


# --- a budget of tokens


def test_a_forward_is_as_many_tokens_as_fit(tmp_path):
    """Lengths 3, 5, 7, 9, 11 or so: sorted, longest first, and cut at the budget."""
    (loader,) = loaders(tmp_path, 1, tokens=40)
    batches = sorted(loader.step(0).batches, key=lambda batch: batch.index)
    lengths = [length for batch in batches for length in batch.sequence_lengths]
    assert lengths == sorted(lengths, reverse=True)
    assert len(lengths) == 24
    for batch, following in itertools.pairwise(batches):
        assert input_ids(batch).shape[1] <= 40 < input_ids(batch).shape[1] + following.sequence_lengths[0]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_a_budget_of_tokens_at_any_world_size(tmp_path, world_size):
    """5 does not divide the 24 rows: with a budget it need not."""
    one, many = loaders(tmp_path, 1, tokens=40), loaders(tmp_path, world_size, tokens=40)
    for step in range(3):
        assert step_of_all(many, step) == step_of_all(one, step)


def test_the_recipe_s_order_does_not_depend_on_micro_batches(tmp_path):
    """A run may go on with other `rows_per_device`, or with a budget of tokens: on the same rows."""
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "hello world " * (1 + i % 5)} for i in range(30)])
    orders = []
    for batch in ({"batch__rows_per_device": 1}, {"batch__rows_per_device": 4}, {"batch__tokens_per_device": 64}):
        made = recipe(path, data__packing=False, **batch)
        orders.append(build_dataset(made, made.data.train, renderer_of(made)).in_order(made).order.epoch(0).tolist())
    assert orders[0] == orders[1] == orders[2]
    made = recipe(path, data__packing=False, data__balance=1)
    plain = build_dataset(made, made.data.train, renderer_of(made)).in_order(made).order
    assert plain.epoch(0).tolist() == RowOrder(30, made.run.seed).epoch(0).tolist() != orders[0]


# --- what a step has


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("tokens", [None, 40])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("padded_to", [None, 48])
def test_every_rank_knows_what_all_ranks_count_in_a_step(tmp_path, world_size, tokens, packed, padded_to):
    """From the lengths alone what adding up over ranks and micro-batches gives; the last step is short."""
    (plain,) = loaders(tmp_path, 1)
    examples = plain.rows.examples
    rows = pack(examples.lengths, 32) if packed else one_per_row(examples.lengths)
    ordered = Dataset(examples, rows, order=RowOrder(len(rows), 1))
    ranks = [Loader(ordered, 12, 1, rank, world_size, 12 + 5, tokens, padded_to) for rank in range(world_size)]
    for step in range(2):
        made = [loader.step(step) for loader in ranks]
        batches = [batch for one in made for batch in one.batches]
        places = sum(input_ids(batch).numel() for batch in batches)
        found: Counter[str] = Counter()
        for batch in batches:
            found.update(batch.counts)
        epoch = min(12 * (step + 1), 17) / len(rows)
        for one in made:
            assert (Counter(one.counts), one.padding, one.epoch) == (found, places - found["tokens"], epoch)


def test_sequences_know_their_source():
    first, second = literal()
    batch = collate([first, replace(second, source=3)])
    assert batch.sequence_sources == (0, 3)
    assert [origin.source for origin in batch.origins] == [0, 3]
