"""Lengths of a recipe's rows, for `plan`: of the token cache, of a sample, or the most that the recipe can ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PretrainedConfig

from finetune.data.building import OpenedSources
from finetune.data.cache_entries import entries_folder
from finetune.data.dataset import build_training, on_disk
from finetune.data.examples import Examples, entry_key, recipe_renderer, rendering_key, row_images
from finetune.data.packing import Rows, one_per_row, pack
from finetune.data.samples import ExampleSizes
from finetune.data.token_cache import load
from finetune.errors import UserError
from finetune.models.tokenizer import load_tokenizer
from finetune.plan.images import most_images
from finetune.recipe import Recipe

SAMPLE_ROWS = 500  # of each source, where the cache has no entry
ROWS_KEPT = 128  # whose documents are counted one by one


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
    images: tuple[int, ...] = ()  # tokens of each image of the heaviest row, which is one document then
    sample_images: tuple[tuple[int, ...], ...] = ()  # of each row of the sample

    @property
    def supervised_share(self) -> float:
        return self.targets_per_row / self.tokens_per_row


@dataclass(frozen=True)
class Lengths:
    """Tokens and supervised tokens of sequences, and how many times as many there are."""

    source: str
    examples: Examples
    times: float | None  # examples of the data over those here; None: not known
    image_token: int | None = None  # None: the recipe sees no images

    @property
    def sizes(self) -> ExampleSizes:
        return self.examples.sizes

    def rows(self, recipe: Recipe, config: PretrainedConfig) -> RowFacts:
        """Packs them as the recipe says. Those beyond its max_length are left out, as `overlong: drop` does."""
        tokens = np.asarray(self.sizes.tokens, np.int64)
        kept = np.flatnonzero(tokens <= recipe.data.max_length)
        if not len(kept):
            none = f"no example of {self.source} has at most {recipe.data.max_length} tokens"
            return widest(recipe, none, config)
        packed = (pack if recipe.data.packing else lambda lengths, _: one_per_row(lengths))(
            tokens[kept], recipe.data.max_length
        )
        rows = None if self.times is None else max(1, round(len(packed) * self.times))
        unknown = None if self.times else "how many rows there are: run `prepare` with these data"
        packed = Rows(packed.offsets, kept[packed.members])
        return facts_of(self.examples, packed, self.source, rows, self.image_token, unknown)


def facts_of(
    examples: Examples, packed: Rows, source: str, rows: int | None, image_token: int | None, unknown: str | None = None
) -> RowFacts:
    """image_token: None where the recipe sees no images."""
    sizes = examples.sizes
    totals, targets = (
        np.add.reduceat(np.asarray(counts, np.int64)[packed.members], packed.offsets[:-1])
        for counts in (sizes.tokens, sizes.target_tokens)
    )
    sample, fullest = [packed[row] for row in _some(len(packed))], packed[int(totals.argmax())]
    images = [_images(examples, row, image_token) for row in (*sample, fullest)]
    most = max(images, key=sum)
    heaviest = _documents(sizes, fullest)
    return RowFacts(
        source=source,
        sample=tuple(_documents(sizes, row) for row in sample),
        tokens_per_row=float(totals.mean()),
        targets_per_row=float(targets.mean()),
        # The fullest row with the images of the row that has most of them.
        heaviest=(sum(heaviest),) if most else heaviest,
        most_targets=int(targets.max()),
        rows=rows,
        unknown=unknown,
        images=most,
        sample_images=tuple(images[:-1]) if most else (),
    )


def _images(examples: Examples, chosen: NDArray[np.int64], image_token: int | None) -> tuple[int, ...]:
    """Returns the tokens of each image of some examples, without marks between them."""
    if image_token is None:
        return ()
    sequences = [sequence for i in chosen for sequence in examples[int(i)].sequences]
    return tuple(
        int(np.count_nonzero(sequence.input_ids[image.begin : image.end] == image_token))
        for sequence in sequences
        for image in sequence.images
    )


def _some(rows: int) -> list[int]:
    return np.unique(np.linspace(0, rows - 1, min(rows, ROWS_KEPT)).astype(int)).tolist()


def _documents(sizes: Any, examples: NDArray[np.int64]) -> tuple[int, ...]:
    """Returns the lengths of the sequences of some examples."""
    parts = [sizes.lengths[sizes.offsets[i] : sizes.offsets[i + 1]] for i in examples]
    return tuple(int(n) for n in np.concatenate(parts))


def widest(recipe: Recipe, reason: str, config: PretrainedConfig) -> RowFacts:
    """Returns the most that a recipe can ask for: every row one document of max_length, all supervised, and full of
    images where it sees any."""
    length, images = recipe.data.max_length, most_images(recipe, config)
    full = f" with {len(images)} images of {images[0]:,} tokens" if images else ""
    return RowFacts(
        f"not known ({reason}): every row is taken as one document of data.max_length tokens{full}, all supervised, "
        "which is the most there can be",
        ((length,),),
        length,
        length - 1,
        (length,),
        length - 1,
        None,
        "steps per epoch, hours and price of the run" if recipe.train.max_steps is None else None,
        images,
        (images,) if images else (),
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


def _lengths(recipe: Recipe, tokenizer: Any, source: str, times: float | None) -> Lengths:
    data = on_disk(build_training(recipe, tokenizer))
    images = row_images(recipe, tokenizer)
    return Lengths(source, data.examples, times, images.family.token_id if images else None)


def _is_cached(recipe: Recipe, tokenizer: Any) -> bool:
    opened, rendering = OpenedSources(recipe), rendering_key(recipe_renderer(recipe, tokenizer))
    entries = [
        entries_folder() / entry_key(recipe, (one := opened.open(source)).source, one.reader.digest(), rendering)
        for source in recipe.data.train
    ]
    return all(load(folder) is not None for folder in entries)
