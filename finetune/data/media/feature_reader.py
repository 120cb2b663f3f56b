"""Tensors that the model's forward takes for the files of a micro-batch.

A few threads decode files, and scale or resample them, while the steps before are computed (`data/prefetch.py`). The
tensors of pixels are not kept: they take about a hundred times the room of their file. Those of sound take twice the
room of their samples, and may be kept (`feature_cache.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from finetune.data.media.families import Features, MediaFamily
from finetune.data.samples import Medium, kind_of


@dataclass(frozen=True)
class FeatureReader:
    """Builds the inputs of a forward for the files of a row, see `batch.MediaInputs`."""

    family: MediaFamily
    pool: ThreadPoolExecutor
    read: Callable[[Medium], Features]  # the family's, or that of a cache
    also: tuple[tuple[MediaFamily, Callable[[Medium], Features]], ...] = ()  # of other kinds of files

    def __call__(self, media: Sequence[Medium], input_ids: Tensor) -> dict[str, Tensor]:
        """input_ids: (1, T). A file that several sequences have, as both answers of a pair, is read once. Raises
        UserError for a file that is damaged, or not the one that was tokenized."""
        distinct = {(kind_of(one), one.source): one for one in media}
        readers = {family.kind: read for family, read in self._readers}
        read = self.pool.map(lambda item: readers[item[0][0]](item[1]), distinct.items())
        features = dict(zip(distinct, read, strict=True))
        inputs: dict[str, Tensor] = {}
        for family, _ in self._readers:
            if mine := [features[kind_of(one), one.source] for one in media if kind_of(one) == family.kind]:
                inputs |= family.join(mine, input_ids)
        return inputs

    @property
    def _readers(self) -> tuple[tuple[MediaFamily, Callable[[Medium], Features]], ...]:
        return ((self.family, self.read), *self.also)

    def plain_inputs(self, media: Sequence[Medium], input_ids: Tensor) -> dict[str, Tensor]:
        """Returns the inputs of transformers' own forward and `generate` for files of texts (B, T); {} without files.
        Raises as `__call__`."""
        inputs = self(media, input_ids) if media else {}
        typed = [family for family, _ in self._readers if inputs and family.type_id]
        if typed:  # by which they count positions, or let tokens see each other
            types = [family.type_id * (input_ids == family.token_id).int() for family in typed]
            inputs["mm_token_type_ids"] = torch.stack(types).sum(0, dtype=torch.int32)
        return inputs


def feature_reader(
    family: MediaFamily, threads: int, caches: bool = False, also: Sequence[tuple[MediaFamily, bool]] = ()
) -> FeatureReader:
    """Returns the reader of a model's files. caches: whether features are kept on the disk; also: families of other
    kinds of files, and whether theirs are."""
    others = tuple((one, _reading(one, kept)) for one, kept in also)
    return FeatureReader(family, ThreadPoolExecutor(threads, "media"), _reading(family, caches), others)


def _reading(family: MediaFamily, caches: bool) -> Callable[[Medium], Features]:
    if not caches:
        return family.read
    from finetune.data.media.feature_cache import FeatureCache

    return FeatureCache.of(family).read
