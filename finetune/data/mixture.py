"""How often an epoch takes each source, and which of its examples.

    sizes 900 and 100 tokens, mixture {by: tokens, temperature: 2}
    shares  like 900^(1/2) : 100^(1/2) = 3 : 1         an epoch has 1,000 tokens, as the sources together
    takes   750 of 900 tokens, 250 of 100              0.83 passes over the first source, 2.5 over the second

Weights choose among examples that are tokenised already: to change one tokenises nothing again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePosixPath

import numpy as np
from numpy.typing import NDArray

from finetune.errors import UserError
from finetune.recipe.schema import Mixture, Source

UNBOUNDED = 1e30  # passes; not infinity, for 0 times that is not a number


def source_names(sources: Sequence[Source]) -> list[str]:
    """Names of the sources in metrics and tables: `name`, or the last part of `path`, numbered where two are alike."""
    names = [source.name or _short(source.path) for source in sources]
    counts = Counter(names)
    return [name if counts[name] == 1 else f"{name}-{i}" for i, name in enumerate(names)]


def _short(path: str) -> str:
    last = PurePosixPath(path.rstrip("/")).name or path
    stem = last.split(".")[0] or last
    plain = "".join(character if character.isalnum() or character in "._" else "-" for character in stem)
    return plain.strip("-") or "source"


def passes_per_epoch(
    sizes: Sequence[int], sources: Sequence[Source], mixture: Mixture | None, epochs: float | None
) -> list[float]:
    """How often an epoch of the run takes each source; sizes in what `mixture.by` counts (any, without a mixture).

    Without a mixture that is `weight`. With one, shares like weight * size^(1/temperature) of as many rows or tokens
    as the sources have together. What `max_epochs` keeps a source from giving, the others give in proportion.
    epochs: of the run, where it is known; None: `max_epochs` is checked when the run's length is known.
    """
    most = [source.max_epochs / epochs if source.max_epochs and epochs else UNBOUNDED for source in sources]
    if mixture is None:
        return [min(source.weight, cap) for source, cap in zip(sources, most, strict=True)]
    size = np.asarray(sizes, np.float64)
    power = 0.0 if mixture.temperature is None else 1.0 / mixture.temperature
    wanted = np.array([source.weight for source in sources]) * np.where(size > 0, size, 0.0) ** power
    wanted[size == 0] = 0.0
    room = np.asarray(most) * size
    return [float(share / n) if n else 0.0 for share, n in zip(filled(wanted, room, size.sum()), size, strict=True)]


def filled(wanted: NDArray[np.float64], room: NDArray[np.float64], total: float) -> NDArray[np.float64]:
    """`total` poured out in proportion to `wanted`, no part above its `room`; less than `total` where none has more.

    filled([1, 1, 2], [5, inf, inf], 40) -> [5, 11.67, 23.33]
    """
    amounts = np.zeros_like(wanted)
    open_parts = wanted > 0
    while open_parts.any() and total > 0:
        shares = np.zeros_like(wanted)
        shares[open_parts] = wanted[open_parts] / wanted[open_parts].sum() * total
        over = open_parts & (shares > room)
        if not over.any():
            amounts[open_parts] = shares[open_parts]
            break
        amounts[over] = room[over]
        total -= room[over].sum()
        open_parts &= ~over
    return amounts


def choose(count: int, weight: float, seed: int, source_index: int) -> NDArray[np.int64]:
    """The round(weight * count) examples that an epoch takes of a source: full passes, then a fixed choice.

    choose(4, 1.5, ...) -> 0 1 2 3 and two of them again, always the same two for a seed.
    """
    passes, rest = divmod(round(weight * count), count) if count else (0, 0)
    return _passes_and_rest(count, passes, _permutation(count, seed, source_index)[:rest])


def choose_by_tokens(lengths: NDArray[np.integer], weight: float, seed: int, source_index: int) -> NDArray[np.int64]:
    """The same by tokens: as many examples as come nearest to weight * sum(lengths) tokens."""
    passes, rest = divmod(weight, 1.0)
    order = _permutation(len(lengths), seed, source_index)
    reached = np.cumsum(np.asarray(lengths, np.int64)[order])
    wanted = rest * (reached[-1] if len(reached) else 0)
    last = int(np.searchsorted(reached, wanted))  # the first example that reaches it
    before = int(reached[last - 1]) if last else 0
    nearer = last < len(reached) and reached[last] - wanted < wanted - before
    return _passes_and_rest(len(lengths), int(passes), order[: last + nearer])


def _permutation(count: int, seed: int, source_index: int) -> NDArray[np.int64]:
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, source_index])))
    return generator.permutation(count)


def _passes_and_rest(count: int, passes: int, again: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.tile(np.arange(count), passes), np.sort(again)]).astype(np.int64)


def check_caps(sources: Sequence[Source], passes: Sequence[float], epochs: float) -> None:
    """Raises UserError where a run of `epochs` passes over the mixture takes a source more often than it may."""
    for source_index, (source, each) in enumerate(zip(sources, passes, strict=True)):
        if source.max_epochs is not None and each * epochs > source.max_epochs * (1 + 1e-6):
            fewer = source.max_epochs / each / epochs
            raise UserError(
                f"data.train[{source_index}] ({source.path}): this run would read it {each * epochs:.2f} times, more "
                f"than its max_epochs ({source.max_epochs:g}): make the run {1 - fewer:.0%} shorter (train.max_steps), "
                "lower its `weight`, or raise `max_epochs`"
            )
