"""Overlaps of ranges of flattened parameters, against the index arrays that they represent."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from finetune.engine.state_shards import Overlap, Range, overlaps


def elements(r: Range) -> Tensor:
    """(numel,) their places in the flattened parameter."""
    return (r.start + r.stride * torch.arange(r.count)[:, None] + torch.arange(r.run)).flatten()


def numbers(overlap: Overlap) -> tuple[Tensor, Tensor]:
    """Of the shared elements, in the first range and in the second."""
    runs, columns = torch.arange(overlap.count)[:, None], torch.arange(overlap.run)
    first = overlap.low + runs * overlap.from_pitch + columns
    return first.flatten(), (overlap.at + runs * overlap.to_pitch + columns).flatten()


@st.composite
def two_ranges(draw: Any) -> tuple[Range, Range]:
    """Of one matrix, cut by columns, by rows, or anywhere."""
    rows, columns = draw(st.integers(1, 7)), draw(st.integers(1, 7))

    def one() -> Range:
        if draw(st.booleans()):
            start = draw(st.integers(0, rows * columns - 1))
            return Range(start, draw(st.integers(1, rows * columns - start)))
        width = draw(
            st.sampled_from([columns, *([columns * 2] if rows % 2 == 0 else [])])
        )  # cut along other dimensions
        top, left = draw(st.integers(0, rows * columns // width - 1)), draw(st.integers(0, width - 1))
        run, count = draw(st.integers(1, width - left)), draw(st.integers(1, rows * columns // width - top))
        return Range(top * width + left, run, width, count)

    return one(), one()


def shared(first: Range, second: Range) -> list[tuple[int, int]]:
    """(number in the first, number in the second) of what is in both."""
    ours, theirs = elements(first).tolist(), elements(second).tolist()
    return sorted((i, theirs.index(place)) for i, place in enumerate(ours) if place in theirs)


@given(two_ranges())
def test_overlaps_are_the_common_elements(ranges: tuple[Range, Range]) -> None:
    found = [pair for o in overlaps(*ranges) for pair in zip(*(n.tolist() for n in numbers(o)), strict=True)]
    assert sorted(found) == shared(*ranges)


@given(two_ranges(), st.integers(0, 49), st.integers(0, 49))
def test_within_gives_the_elements_of_an_interval(ranges: tuple[Range, Range], start: int, length: int) -> None:
    for overlap in overlaps(*ranges):
        wanted = [(i, at - start) for i, at in zip(*numbers(overlap), strict=True) if start <= at < start + length]
        inside = [pair for o in overlap.within(start, start + length) for pair in zip(*numbers(o), strict=True)]
        assert sorted(inside) == sorted(wanted)


def test_columns_of_a_large_matrix_are_one_overlap() -> None:
    columns, rows = Range(100, 50, 200, 1000), Range(200 * 17, 200 * 100)
    assert list(overlaps(columns, rows)) == [Overlap(17 * 50, 100, 50, 50, 200, 100)]
    assert list(overlaps(columns, Range(200 * 17 + 100, 50, 200, 100))) == [Overlap(17 * 50, 0, 5000)]
