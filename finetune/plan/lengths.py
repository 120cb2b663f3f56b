"""Lengths of a recipe's rows, for `plan`: from the token cache, from a sample, or the longest that the recipe allows.

A plan works without a tokenizer, rows and network, which `training.prepare` needs, so it shares with a run only the
functions that build rows of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from transformers import PretrainedConfig

from finetune.data.building import OpenedSources
from finetune.data.cache_entries import entries_folder
from finetune.data.dataset import build_training, on_disk
from finetune.data.examples import Examples, entry_key, rendering_key
from finetune.data.packing import Rows, one_per_row, pack
from finetune.data.samples import MediaKind, Medium, Video, kind_of
from finetune.data.token_cache import load
from finetune.errors import UserError
from finetune.models.base_model import Base
from finetune.plan.images import SeenFile, most_images
from finetune.recipe import Recipe

SAMPLE_ROWS = 500  # of each source, if the cache has no entry
ROWS_KEPT = 128  # whose documents are counted one by one


@dataclass(frozen=True)
class RowFacts:
    """Packed sequences of an epoch."""

    source: str  # origin of these numbers
    sample: tuple[tuple[int, ...], ...]  # tokens of each document, of some rows
    tokens_per_row: float
    targets_per_row: float  # supervised
    heaviest: tuple[int, ...]  # documents of the row with the most tokens
    most_targets: int
    rows: int | None  # of an epoch; None: not known
    unknown: str | None = None  # facts that are not known, and the reason
    images: tuple[SeenFile, ...] = ()  # of the heaviest row, which is one document then
    sample_images: tuple[tuple[SeenFile, ...], ...] = ()  # of each row of the sample

    @property
    def supervised_share(self) -> float:
        return self.targets_per_row / self.tokens_per_row


@dataclass(frozen=True)
class Lengths:
    """Tokens and supervised tokens of the examples of some rows."""

    source: str
    examples: Examples
    times: float | None  # examples of the data over those here; None: not known
    tokens: Mapping[MediaKind, int] = field(default_factory=dict)  # see `file_tokens`; without files none

    def rows(self, recipe: Recipe, config: PretrainedConfig) -> RowFacts:
        """Packs the examples as the recipe says, without those beyond its max_length, as `overlong: drop` does."""
        tokens = np.asarray(self.examples.sizes.tokens, np.int64)
        length = recipe.data.max_length
        if recipe.rollouts is not None:
            prompts = tokens - np.asarray(self.examples.sizes.target_tokens, np.int64)
            facts = sampled_rows(recipe, prompts, self.source, config)
            fitting = np.flatnonzero(prompts <= length - recipe.rollouts.max_new_tokens)
            return facts if not self.tokens or not len(fitting) else self._with_files(facts, fitting)
        kept = np.flatnonzero(tokens <= length)
        if not len(kept):
            return widest(recipe, f"no example of {self.source} has at most {length} tokens", config)
        packed = pack(tokens[kept], length) if recipe.data.packing else one_per_row(tokens[kept])
        rows = None if self.times is None else max(1, round(len(packed) * self.times))
        unknown = None if self.times else "number of rows: run `prepare` with these data"
        packed = Rows(packed.offsets, kept[packed.members])
        return facts_of(self.examples, packed, self.source, rows, self.tokens, unknown)

    def _with_files(self, facts: RowFacts, kept: NDArray[np.int64]) -> RowFacts:
        """Returns the rows of samples with the files of their prompts. kept: the prompts that leave room for one."""
        rows = one_per_row(np.asarray(self.examples.sizes.tokens, np.int64)[kept])
        seen = facts_of(self.examples, Rows(rows.offsets, kept[rows.members]), self.source, None, self.tokens)
        return replace(facts, images=seen.images, sample_images=seen.sample_images)


def sampled_rows(recipe: Recipe, prompts: NDArray[np.int64], source: str, config: PretrainedConfig) -> RowFacts:
    """Returns the rows of a run that samples them, as if every sample had `max_new_tokens`. prompts: tokens of each;
    those that leave no room are left out, as in the run."""
    assert recipe.rollouts is not None
    new = recipe.rollouts.max_new_tokens
    prompts = prompts[prompts <= recipe.data.max_length - new]
    if not len(prompts):
        return widest(recipe, f"no prompt of {source} leaves room for a sample", config)
    some = prompts[np.unique(np.linspace(0, len(prompts) - 1, min(len(prompts), ROWS_KEPT)).astype(int))]
    return RowFacts(
        source=f"prompts by {source}, every sample taken as rollouts.max_new_tokens ({new:,}), the most there can be",
        sample=tuple((int(prompt) + new,) for prompt in some),
        tokens_per_row=float(prompts.mean()) + new,
        targets_per_row=new,
        heaviest=(int(prompts.max()) + new,),
        most_targets=new,
        rows=None,
    )


def facts_of(
    examples: Examples,
    packed: Rows,
    source: str,
    rows: int | None,
    tokens: Mapping[MediaKind, int],
    unknown: str | None = None,
) -> RowFacts:
    """tokens: see `file_tokens`; without files none."""
    sizes = examples.sizes
    totals, targets = (
        np.add.reduceat(np.asarray(counts, np.int64)[packed.members], packed.offsets[:-1])
        for counts in (sizes.tokens, sizes.target_tokens)
    )

    def documents(members: NDArray[np.int64]) -> tuple[int, ...]:
        parts = [sizes.lengths[sizes.offsets[i] : sizes.offsets[i + 1]] for i in members]
        return tuple(int(n) for n in np.concatenate(parts))

    def images_of(members: NDArray[np.int64]) -> tuple[SeenFile, ...]:
        """Returns the files of some examples, without the marks between them."""
        return tuple(
            SeenFile(kind, count)
            for i in (members if tokens else ())
            for sequence in examples[int(i)].sequences
            for medium in sequence.media
            for kind in (kind_of(medium),)
            for count in _tower_sequences(medium, sequence.input_ids[medium.begin : medium.end] == tokens[kind])
        )

    some = np.unique(np.linspace(0, len(packed) - 1, min(len(packed), ROWS_KEPT)).astype(int)).tolist()
    sample, fullest = [packed[row] for row in some], packed[int(totals.argmax())]
    images = [images_of(row) for row in (*sample, fullest)]
    most, heaviest = max(images, key=lambda row: sum(one.tokens for one in row)), documents(fullest)
    return RowFacts(
        source=source,
        sample=tuple(map(documents, sample)),
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


def _tower_sequences(medium: Medium, filled: NDArray[np.bool_]) -> tuple[int, ...]:
    """Returns the tokens that a tower computes together: all of a file; of a video those between its times, or of two
    frames, if it has none. filled: (t,) of the file's tokens, those that the model fills."""
    tokens = int(np.count_nonzero(filled))
    if not isinstance(medium, Video):
        return (tokens,)
    apart = int(np.count_nonzero(filled[1:] & ~filled[:-1])) + int(filled[0])
    places = apart if apart > 1 else -(-medium.seen // 2)
    return (tokens // places,) * places


_PLURALS: dict[MediaKind, str] = {"image": "images", "audio": "clips", "video": "videos"}


def widest(recipe: Recipe, reason: str, config: PretrainedConfig) -> RowFacts:
    """Returns the largest rows that a recipe allows: every row one document of max_length, all supervised, and full of
    images if it sees any."""
    length, images = recipe.data.max_length, most_images(recipe.data, config)
    if recipe.rollouts is not None:
        room = length - recipe.rollouts.max_new_tokens
        of_prompt = most_images(recipe.data.model_copy(update={"max_length": room}), config)
        source = f"data.max_length, as lengths are not known ({reason})"
        facts = sampled_rows(recipe, np.array([room]), source, config)
        return replace(facts, images=of_prompt, sample_images=(of_prompt,) if of_prompt else ())
    full = f" with {len(images)} {_PLURALS[images[0].kind]} of {images[0].tokens:,} tokens" if images else ""
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
    """Returns the lengths of `data.train`, or the reason why they are not known. Nothing is downloaded."""
    if recipe.data.streaming:
        return "data.streaming reads them during the run"
    try:
        base = Base.of(recipe)
        renderer = base.renderer(recipe.objective)
        opened, rendering = OpenedSources(recipe), rendering_key(renderer)
        sources = [(source, opened.open(source)) for source in recipe.data.train]
        folders = [entries_folder() / entry_key(recipe, o.source, o.reader.digest(), rendering) for _, o in sources]
        times: float | None = 1.0
        what = "the token cache"
        if any(load(folder) is None for folder in folders):
            limits = [min(source.limit or SAMPLE_ROWS, SAMPLE_ROWS) for source, _ in sources]
            some = tuple(source.model_copy(update={"limit": n}) for (source, _), n in zip(sources, limits, strict=True))
            recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"train": some})})
            counts = [(one.reader.estimated_rows(), source.limit) for source, one in sources]
            rows = [min(count, limit or count) for count, limit in counts if count is not None]
            times = None
            if len(rows) == len(counts):
                times = sum(rows) / sum(min(count, limit) for count, limit in zip(rows, limits, strict=True))
            what = "all rows" if times == 1 else f"a sample of {' and '.join(map(str, limits))} rows"
        data, images = on_disk(build_training(recipe, renderer)), base.media
        families = images.families.items() if images else ()
        tokens: dict[MediaKind, int] = {kind: family.token_id for kind, family in families}
        return Lengths(what, data.examples, times, tokens)
    except UserError as error:
        return str(error).splitlines()[0]
