"""The largest of some sizes that fits, in few trials and without one that does not if it can be helped.

A trial that runs out of memory ends a run whose ranks wait for each other in the middle of a forward. So sizes grow at
most twofold, and only where what was measured says that the next one fits: memory grows along a straight line in the
rows of a forward, or in their square where attention goes through a mask or scores of tokens x tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

HALF = 0.5  # a row of half the tokens: with one whole row, the first two points of the line


@dataclass(frozen=True)
class Found:
    size: int
    needs: float  # bytes
    next_needs: float  # at least, of the next size that was not taken; infinite where there is none


def largest_that_fits(sizes: Sequence[int], limit: float, attempt: Callable[[float], float], power: int = 1) -> Found:
    """The largest size whose measured need is within `limit`; the smallest of all where none is.

    sizes: ascending, from 1. attempt: bytes that a size needs, measured; infinite where there was no such memory.
    power: of a size, with which its need grows.
    """
    needs = {size: attempt(size) for size in (HALF, 1)}
    best, refused = 1, math.inf
    while candidates := [size for size in sizes if best < size and size not in needs]:
        ceiling = min((size for size, need in needs.items() if need > limit), default=math.inf)
        within = [size for size in candidates if size <= max(2 * best, candidates[0]) and size < ceiling]
        fitting = [size for size in within if predicted(needs, best, size, power) <= limit]
        if not fitting:
            refused = min((predicted(needs, best, size, power) for size in within), default=math.inf)
            break
        needs[fitting[-1]] = attempt(fitting[-1])
        if needs[fitting[-1]] <= limit:
            best = fitting[-1]
    beyond = [need for size, need in needs.items() if size > best]
    return Found(best, needs[best], min([refused, *beyond]))


def predicted(needs: dict[float, float], best: int, size: int, power: int) -> float:
    """On the line in size ** power through the best size and the one that was measured below it."""
    below = max(other for other in needs if other < best)
    slope = (needs[best] - needs[below]) / (best**power - below**power)
    return needs[best] + max(slope, 0.0) * (size**power - best**power)
