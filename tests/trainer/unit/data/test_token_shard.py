"""A row cut over ranks: every token and every target is somewhere, once, and what is counted adds up."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from data_helpers import labelled
from hypothesis import given
from hypothesis import strategies as st

from finetune.data.batch import Batch, TokenShare, collate, token_shard
from finetune.data.loader import Loader
from finetune.data.row_source import RunRows
from finetune.data.samples import Example

CUTS = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 4))


def shares(context: int, sequence: int) -> list[TokenShare]:
    return [TokenShare(context, sequence, c, s) for c, s in product(range(context), range(sequence))]


def example(number: int, labels: list[int]) -> Example:
    return labelled(number, labels, [1 + 100 * number + i for i in range(len(labels))], number % 2)


def batch_of(lengths: list[int], share: TokenShare, seed: int = 0) -> Batch:
    """Of pairs, and of a single sequence where there is one left."""
    rng = np.random.default_rng(seed)
    labels = [[-100, *np.where(rng.random(n - 1) < 0.6, rng.integers(1, 90, n - 1), -100).tolist()] for n in lengths]
    single = [example(i, found) for i, found in enumerate(labels)]
    pairs = [
        replace(single[i], sequences=tuple(s for one in single[i : i + 2] for s in one.sequences), columns={"x": i})
        for i in range(0, len(single), 2)
    ]
    return collate(pairs, padded_to=share.padded(sum(lengths)))


def test_the_example_of_the_docstring() -> None:
    a, b = example(0, [-100, -100, 12, 2]), example(1, [-100, -100, 2])
    first, second = (token_shard(collate([a, b], padded_to=8), share) for share in shares(2, 1))
    assert [one.inputs["input_ids"].tolist() for one in (first, second)] == [[[1, 2, 103, 0]], [[3, 4, 101, 102]]]
    assert [one.inputs["position_ids"].tolist() for one in (first, second)] == [[[0, 1, 2, 0]], [[2, 3, 0, 1]]]
    assert [column.tolist() for column in first.targets] == [[1], [3], [0]]
    assert [column.tolist() for column in second.targets] == [[0, 3], [4, 103], [0, 1]]
    assert first.sequence_lengths == second.sequence_lengths == (4, 3, 1)
    assert (first.sequence_tokens, second.sequence_tokens) == ((2, 1), (2, 2))
    assert (first.sequence_targets, second.sequence_targets) == ((1, 0), (1, 1))
    assert [one.counts["tokens"] for one in (first, second)] == [3, 4]
    assert (first.num_padding, second.num_padding) == (1, 0)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    cut=st.sampled_from(CUTS),
    seed=st.integers(0, 2**16),
)
def test_the_parts_are_the_full_row(lengths: list[int], cut: tuple[int, int], seed: int) -> None:
    ranks = shares(*cut)
    whole = batch_of(lengths, ranks[0], seed)
    parts = [token_shard(whole, share) for share in ranks]
    tokens = whole.inputs["input_ids"].shape[1]
    places = [share.places(tokens) for share in ranks]
    assert sorted(np.concatenate(places).tolist()) == list(range(tokens))
    targets = {}
    for part, here in zip(parts, places, strict=True):
        for name, values in part.inputs.items():
            assert torch.equal(values, whole.inputs[name][:, here])
        found = zip(*(column.tolist() for column in part.targets), strict=True)
        targets |= {int(here[position]): (token, sequence) for position, token, sequence in found}
        assert part.counts["target_tokens"] == len(part.targets.ids) == sum(part.sequence_targets)
        # What sums over sequences and examples need is every rank's.
        for name in ("sequence_lengths", "origins", "sequence_sources"):
            assert getattr(part, name) == getattr(whole, name)
        assert torch.equal(part.example_of_sequence, whole.example_of_sequence)
        assert torch.equal(part.columns["x"], whole.columns["x"])
        assert [part.counts[name] for name in ("sequences", "examples")] == [len(lengths), -(-len(lengths) // 2)]
    expected = zip(*(column.tolist() for column in whole.targets), strict=True)
    assert targets == {position: (token, sequence) for position, token, sequence in expected}
    for name in ("target_tokens", "first_target_tokens", "tokens"):
        assert sum(part.counts[name] for part in parts) == whole.counts[name]
    assert sum(part.num_padding for part in parts) == whole.num_padding
    for name in ("sequence_tokens", "sequence_targets"):
        assert np.sum([getattr(part, name) for part in parts], axis=0).tolist() == list(getattr(whole, name))


def test_context_ranks_see_as_many_pairs() -> None:
    """Of one document: what a token costs is its place."""
    work = [(share.places(64) + 1).sum() for share in shares(4, 1)]
    assert len(set(work)) == 1


def test_a_row_that_cannot_be_cut_is_an_error() -> None:
    with pytest.raises(ValueError, match="7 tokens cannot be cut"):
        token_shard(collate([example(0, [-100, *[1] * 6])]), TokenShare(context=2))


class FourRows(RunRows):
    """Of 5, 7, 3 and 6 tokens."""

    LENGTHS = (5, 7, 3, 6)

    def lengths(self, position: int) -> np.ndarray:
        return np.array([self.LENGTHS[position]])

    def counts(self, position: int) -> dict[str, int]:
        return {"target_tokens": self.LENGTHS[position] - 1, "tokens": self.LENGTHS[position]}

    def row(self, position: int) -> list[Example]:
        return [example(position, [-100, *range(1, self.LENGTHS[position])])]

    def epoch_at(self, position: int) -> float:
        return position / 4


@pytest.mark.parametrize("rows_per_step", [4, 3])  # with 3 the other group of ranks runs a dummy
def test_what_a_step_counts_is_what_its_ranks_have(rows_per_step: int) -> None:
    """Two groups of two ranks."""
    total = 4 if rows_per_step == 4 else 3
    made = [
        Loader(FourRows(), 4, 1, rank, 2, total, share=share).step(0) for rank in range(2) for share in shares(2, 1)
    ]
    batches = [batch for one in made for batch in one.batches]
    counts = {name: sum(batch.counts[name] for batch in batches) for name in ("target_tokens", "tokens")}
    padding = sum(batch.num_padding for batch in batches)
    assert all((one.counts, one.padding) == (counts, padding) for one in made)
    assert made[0].counts["tokens"] == sum(FourRows.LENGTHS[:total])
