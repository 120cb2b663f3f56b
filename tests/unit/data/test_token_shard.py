"""A row cut over ranks: every token and every target is somewhere, once, and what is counted adds up."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from finetune.data.batch import Batch, collate
from finetune.data.examples import Example
from finetune.data.loader import Loader
from finetune.data.token_shard import TokenShare, token_shard

CUTS = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 4))


def shares(context: int, sequence: int) -> list[TokenShare]:
    return [TokenShare(context, sequence, c, s) for c, s in product(range(context), range(sequence))]


def example(number: int, labels: list[int]) -> Example:
    ids = np.arange(1, len(labels) + 1) + 100 * number
    return Example("rows.jsonl", number, ids.astype(np.int32), np.array(labels, np.int32), number % 2)


def batch_of(lengths: list[int], share: TokenShare, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    labels = [[-100, *np.where(rng.random(n - 1) < 0.6, rng.integers(1, 90, n - 1), -100).tolist()] for n in lengths]
    examples = [example(i, found) for i, found in enumerate(labels)]
    return collate(examples, padded_to=share.padded(sum(lengths)))


def test_the_example_of_the_docstring() -> None:
    a, b = example(0, [-100, -100, 12, 2]), example(1, [-100, -100, 2])
    first, second = (token_shard(collate([a, b], padded_to=8), share) for share in shares(2, 1))
    assert (first.input_ids.tolist(), second.input_ids.tolist()) == ([[1, 2, 103, 0]], [[3, 4, 101, 102]])
    assert (first.position_ids.tolist(), second.position_ids.tolist()) == ([[0, 1, 2, 0]], [[2, 3, 0, 1]])
    assert (first.positions.tolist(), second.positions.tolist()) == ([1], [0, 3])
    assert (first.targets.tolist(), second.targets.tolist()) == ([12], [2, 2])
    assert first.document_lengths == second.document_lengths == (4, 3, 1)
    assert (first.tokens, second.tokens) == ((2, 1), (2, 2))
    assert (first.trained, second.trained) == ((1, 0), (1, 1))
    assert (first.num_tokens, second.num_tokens, first.num_padding, second.num_padding) == (3, 4, 1, 0)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    cut=st.sampled_from(CUTS),
    seed=st.integers(0, 2**16),
)
def test_the_parts_are_the_whole(lengths: list[int], cut: tuple[int, int], seed: int) -> None:
    ranks = shares(*cut)
    whole = batch_of(lengths, ranks[0], seed)
    parts = [token_shard(whole, share) for share in ranks]
    tokens = whole.input_ids.shape[1]
    places = [share.places(tokens) for share in ranks]
    assert sorted(np.concatenate(places).tolist()) == list(range(tokens))
    assert {part.input_ids.shape for part in parts} == {(1, tokens // len(ranks))}
    targets = {}
    for part, here in zip(parts, places, strict=True):
        for name in ("input_ids", "labels", "position_ids"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[:, here])
        found = zip(part.positions.tolist(), part.targets.tolist(), part.target_sources.tolist(), strict=True)
        targets |= {int(here[position]): (token, source) for position, token, source in found}
        assert part.num_supervised == len(part.targets) == sum(part.trained)
    expected = zip(whole.positions.tolist(), whole.targets.tolist(), whole.target_sources.tolist(), strict=True)
    assert targets == {position: (token, source) for position, token, source in expected}
    for name in ("num_supervised", "num_tokens", "num_padding"):
        assert sum(getattr(part, name) for part in parts) == getattr(whole, name)
    for name in ("tokens", "trained"):
        assert np.sum([getattr(part, name) for part in parts], axis=0).tolist() == list(getattr(whole, name))


def test_context_ranks_see_as_many_pairs() -> None:
    """Of one document: what a token costs is its place."""
    work = [(share.places(64) + 1).sum() for share in shares(4, 1)]
    assert len(set(work)) == 1


def test_a_row_that_cannot_be_cut_is_said() -> None:
    with pytest.raises(ValueError, match="7 tokens cannot be cut"):
        token_shard(collate([example(0, [-100, *[1] * 6])]), TokenShare(context=2))


class FourRows:
    """Of 5, 7, 3 and 6 tokens."""

    LENGTHS = (5, 7, 3, 6)

    def lengths(self, position: int) -> np.ndarray:
        return np.array([self.LENGTHS[position]])

    def num_trained(self, position: int) -> int:
        return self.LENGTHS[position] - 1

    def documents(self, position: int) -> list[Example]:
        return [example(position, [-100, *range(1, self.LENGTHS[position])])]

    def epochs(self, position: int) -> float:
        return position / 4


@pytest.mark.parametrize("rows_per_step", [4, 3])  # with 3 the other group of ranks runs a filler
def test_what_a_step_counts_is_what_its_ranks_have(rows_per_step: int) -> None:
    """Two groups of two ranks."""
    total = 4 if rows_per_step == 4 else 3
    made = [
        Loader(FourRows(), 4, 1, rank, 2, total, share=share).step(0) for rank in range(2) for share in shares(2, 1)
    ]
    batches = [batch for one in made for batch in one.batches]
    counted = tuple(sum(getattr(b, f"num_{what}") for b in batches) for what in ("tokens", "supervised", "padding"))
    assert {(one.tokens, one.supervised_tokens, one.padding) for one in made} == {counted}
    assert made[0].tokens == sum(FourRows.LENGTHS[:total])
