"""Lengths of a recipe's rows, for `plan`: of the token cache, of a sample, or the most that the recipe can ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune.data.building import OpenedSources
from finetune.data.dataset import Dataset, build_training
from finetune.data.examples import entry_key, recipe_renderer, rendering_key
from finetune.data.packing import Rows, one_per_row, pack
from finetune.data.token_cache import entries_folder, load
from finetune.errors import UserError
from finetune.models.config import load_tokenizer
from finetune.recipe import Recipe

SAMPLE_ROWS = 500  # of each source, where the cache has no entry
_ROWS_KEPT = 128  # whose documents are counted one by one


@dataclass(frozen=True)
class RowFacts:
    """Packed sequences of an epoch."""

    source: str  # where these numbers are from
    sample: tuple[tuple[int, ...], ...]  # tokens of each document, of some rows
    tokens_per_row: float
    targets_per_row: float  # supervised
    heaviest: tuple[int, ...]  # documents of the row with the most tokens
    most_targets: int
    rows: int | None  # of an epoch; None: not known
    unknown: str | None = None  # what is not known, and why

    @property
    def supervised_share(self) -> float:
        return self.targets_per_row / self.tokens_per_row


@dataclass(frozen=True)
class Lengths:
    """Tokens and supervised tokens of sequences, and how many times as many there are."""

    source: str
    sizes: Any  # ExampleSizes
    times: float | None  # examples of the data over those here; None: not known

    def rows(self, recipe: Recipe) -> RowFacts:
        """Packs them as the recipe says. Those beyond its max_length are left out, as `overlong: drop` does."""
        tokens = np.asarray(self.sizes.tokens, np.int64)
        kept = np.flatnonzero(tokens <= recipe.data.max_length)
        if not len(kept):
            return widest(recipe, f"no example of {self.source} has at most {recipe.data.max_length} tokens")
        packed = (pack if recipe.data.packing else lambda lengths, _: one_per_row(lengths))(
            tokens[kept], recipe.data.max_length
        )
        rows = None if self.times is None else max(1, round(len(packed) * self.times))
        unknown = None if self.times else "how many rows there are: run `prepare` with these data"
        return facts_of(self.sizes, Rows(packed.offsets, kept[packed.members]), self.source, rows, unknown)


def facts_of(sizes: Any, packed: Rows, source: str, rows: int | None, unknown: str | None = None) -> RowFacts:
    """sizes: ExampleSizes."""
    totals, targets = (
        np.add.reduceat(np.asarray(counts, np.int64)[packed.members], packed.offsets[:-1])
        for counts in (sizes.tokens, sizes.target_tokens)
    )
    return RowFacts(
        source=source,
        sample=tuple(_documents(sizes, packed[row]) for row in _some(len(packed))),
        tokens_per_row=float(totals.mean()),
        targets_per_row=float(targets.mean()),
        heaviest=_documents(sizes, packed[int(totals.argmax())]),
        most_targets=int(targets.max()),
        rows=rows,
        unknown=unknown,
    )


def _some(rows: int) -> list[int]:
    return np.unique(np.linspace(0, rows - 1, min(rows, _ROWS_KEPT)).astype(int)).tolist()


def _documents(sizes: Any, examples: NDArray[np.int64]) -> tuple[int, ...]:
    """Returns the lengths of the sequences of some examples."""
    parts = [sizes.lengths[sizes.offsets[i] : sizes.offsets[i + 1]] for i in examples]
    return tuple(int(n) for n in np.concatenate(parts))


def widest(recipe: Recipe, reason: str) -> RowFacts:
    """Returns the most that a recipe can ask for: every row one document of max_length, all supervised."""
    length = recipe.data.max_length
    return RowFacts(
        f"not known ({reason}): every row is taken as one document of data.max_length tokens, all supervised, which is "
        "the most there can be",
        ((length,),),
        length,
        length - 1,
        (length,),
        length - 1,
        None,
        "steps per epoch, hours and price of the run" if recipe.train.max_steps is None else None,
    )


def read_lengths(recipe: Recipe) -> Lengths | str:
    """Returns the lengths of `data.train`, or why they are not known. Nothing is downloaded."""
    if recipe.data.streaming:
        return "data.streaming reads them during the run"
    try:
        tokenizer = load_tokenizer(recipe.model, recipe.tokens)
        if _is_cached(recipe, tokenizer):
            return _lengths(recipe, tokenizer, "the token cache", 1.0)
        limits = [min(source.limit or SAMPLE_ROWS, SAMPLE_ROWS) for source in recipe.data.train]
        sources = tuple(
            source.model_copy(update={"limit": limit}) for source, limit in zip(recipe.data.train, limits, strict=True)
        )
        some = recipe.model_copy(update={"data": recipe.data.model_copy(update={"train": sources})})
        opened = OpenedSources(recipe)
        counts = [(opened.open(source).reader.estimated_rows(), source.limit) for source in recipe.data.train]
        known = [min(count, limit or count) for count, limit in counts if count is not None]
        times = None
        if len(known) == len(counts):
            times = sum(known) / sum(min(count, limit) for count, limit in zip(known, limits, strict=True))
        what = "all rows" if times == 1 else f"a sample of {' and '.join(map(str, limits))} rows"
        return _lengths(some, tokenizer, what, times)
    except UserError as error:
        return str(error).splitlines()[0]


def _lengths(recipe: Recipe, tokenizer: Any, source: str, times: float | None) -> Lengths | str:
    data = build_training(recipe, tokenizer)
    return Lengths(source, data.examples.sizes, times) if isinstance(data, Dataset) else "a stream"


def _is_cached(recipe: Recipe, tokenizer: Any) -> bool:
    opened, rendering = OpenedSources(recipe), rendering_key(recipe_renderer(recipe, tokenizer))
    entries = [
        entries_folder() / entry_key(recipe, (one := opened.open(source)).source, one.reader.digest(), rendering)
        for source in recipe.data.train
    ]
    return all(load(folder) is not None for folder in entries)
