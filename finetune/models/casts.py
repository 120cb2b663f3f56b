"""Casts of trained weights that the micro-batches of a step share, recomputations included."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")

# {ids of weights: (the weights, what was made of them)}; None: nothing is kept. Not by thread: a recomputation runs in
# one of autograd's.
_kept: dict[tuple[int, ...], tuple[tuple[Tensor, ...], object]] | None = None


@contextlib.contextmanager
def cast_once() -> Iterator[None]:
    """Keeps casts until the context ends: for forwards and backwards between which no weight changes."""
    global _kept
    before, _kept = _kept, {}
    try:
        yield
    finally:
        _kept = before


@contextlib.contextmanager
def cast_anew() -> Iterator[None]:
    """Makes each cast, and keeps none, until the context ends: within what is captured for other steps, too."""
    global _kept
    before, _kept = _kept, None
    try:
        yield
    finally:
        _kept = before


def shared_cast(weights: tuple[Tensor, ...], cast: Callable[[tuple[Tensor, ...]], T]) -> T:
    """Returns cast(weights), made once within `cast_once`."""
    if _kept is None:
        return cast(weights)
    key = tuple(map(id, weights))
    if key not in _kept:
        _kept[key] = weights, cast(weights)
    return _kept[key][1]  # pyright: ignore[reportReturnType]: of this cast
