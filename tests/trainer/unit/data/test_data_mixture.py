"""How often an epoch takes each source, and what of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.data.epochs import SourceShare, source_order
from finetune.data.examples import check_caps, filled, passes_per_epoch, source_names
from finetune.errors import UserError
from finetune.recipe.schema import Mixture, Source


def sources(*weights: float, **caps: float) -> list[Source]:
    """Sources a, b, c, ... of these weights; caps: max_epochs by path."""
    names = "abcdefgh"[: len(weights)]
    return [
        Source(path=name, weight=weight, max_epochs=caps.get(name)) for name, weight in zip(names, weights, strict=True)
    ]


def test_without_a_mixture_a_weight_is_the_passes():
    assert passes_per_epoch([10, 20], sources(0.5, 2.0), None, 1.0) == [0.5, 2.0]


def test_a_cap_bounds_the_passes_of_the_run():
    assert passes_per_epoch([10, 20], sources(0.5, 2.0, b=3.0), None, 2.0) == [0.5, 1.5]


def test_the_example_of_the_module():
    assert passes_per_epoch([900, 100], sources(1, 1), Mixture(temperature=2.0), 1.0) == pytest.approx([750 / 900, 2.5])


@pytest.mark.parametrize(
    ("weights", "temperature", "tokens"),
    [
        ((1, 1), None, (500, 500)),  # weights alone
        ((3, 1), None, (750, 250)),
        ((1, 1), 1.0, (900, 100)),  # in proportion to size: every source once
        ((1, 9), 1.0, (500, 500)),
    ],
)
def test_shares_are_of_as_much_as_the_sources_have(weights, temperature, tokens):
    passes = passes_per_epoch([900, 100], sources(*weights), Mixture(temperature=temperature), 1.0)
    assert np.multiply(passes, [900, 100]) == pytest.approx(tokens)


def test_what_a_capped_source_may_not_give_the_others_give():
    passes = passes_per_epoch([900, 100, 100], sources(1, 1, 2, b=2.0), Mixture(), 1.0)
    assert np.multiply(passes, [900, 100, 100]) == pytest.approx([300, 200, 600])


def test_an_epoch_is_shorter_where_every_source_is_capped():
    passes = passes_per_epoch([900, 100], sources(1, 1, a=0.5, b=0.5), Mixture(), 1.0)
    assert passes == pytest.approx([0.5, 0.5])


def test_a_source_without_examples_takes_nothing():
    assert passes_per_epoch([10, 0], sources(1, 1), Mixture(), 1.0) == [1.0, 0.0]


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 100)), min_size=1, max_size=6),
    st.floats(0, 300),
)
def test_pouring_keeps_within_every_bound(parts, total):
    wanted, room = (np.array(column) for column in zip(*parts, strict=True))
    given_out = filled(wanted, room, total)
    assert (given_out <= room + 1e-6).all()
    assert (given_out[wanted == 0] == 0).all()
    # All is given out, or every part that wants some is full.
    full = np.isclose(given_out, room, atol=1e-6) | (wanted == 0)
    assert given_out.sum() == pytest.approx(total, abs=1e-6) or full.all()


def test_a_choice_by_tokens_comes_nearest_to_them():
    lengths = np.array([10, 20, 30, 40, 50] * 20)
    for weight in (0.1, 0.33, 0.5, 1.0, 1.7, 3.0):
        taken = SourceShare(source_order(100, 1, 0), weight, lengths=lengths).taken(0, 1)
        assert abs(lengths[taken].sum() - weight * lengths.sum()) <= 25
        assert np.bincount(taken, minlength=100).max() <= np.ceil(weight)
        assert np.bincount(taken, minlength=100).min() >= np.floor(weight)


def test_tokens_of_one_length_are_rows():
    order, lengths = source_order(100, 1, 0), np.full(100, 7)
    for epoch in range(5):
        by_rows, by_tokens = SourceShare(order, 0.3), SourceShare(order, 0.3, lengths=lengths)
        assert by_rows.taken(epoch, epoch + 1).tolist() == by_tokens.taken(epoch, epoch + 1).tolist()


def test_names_are_distinct():
    named = [
        Source(path="data/code.jsonl.gz"),
        Source(path="HuggingFaceH4/no_robots"),
        Source(path="a/rows.jsonl"),
        Source(path="b/rows.jsonl"),
        Source(path="c/rows.jsonl", name="third"),
        Source(path="data/part-*.jsonl"),
    ]
    assert source_names(named) == ["code", "no_robots", "rows-2", "rows-3", "third", "part"]


def test_a_run_longer_than_a_cap_allows_is_refused_with_what_would_do():
    check_caps(sources(1, 1, b=2.0), [1.0, 0.5], 4.0)
    with pytest.raises(
        UserError, match=r"data.train\[1\] \(b\): .* 4.00 times, .* max_epochs \(2\)\. Fix: .* 50% shorter"
    ):
        check_caps(sources(1, 1, b=2.0), [1.0, 1.0], 4.0)
