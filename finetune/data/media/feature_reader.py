"""Tensors that the model's forward takes for the files of a micro-batch.

A few threads decode files, and scale or resample them, while the steps before are computed (`data/prefetch.py`). The
tensors of pixels are not kept: they take about a hundred times the room of their file. Those of sound take twice the
room of their samples, and may be kept (`feature_cache.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from finetune.data.media.families import Features, MediaFamily
from finetune.data.samples import Medium


@dataclass(frozen=True)
class FeatureReader:
    """Builds the inputs of a forward for the files of a row, see `batch.MediaInputs`."""

    family: MediaFamily
    pool: ThreadPoolExecutor
    read: Callable[[Medium], Features]  # the family's, or that of a cache

    def __call__(self, media: Sequence[Medium], input_ids: Tensor) -> dict[str, Tensor]:
        """input_ids: (1, T). A file that several sequences have, as both answers of a pair, is read once. Raises
        UserError for a file that is damaged, or not the one that was tokenized."""
        distinct = {one.source: one for one in media}
        features = dict(zip(distinct, self.pool.map(self.read, distinct.values()), strict=True))
        return self.family.join([features[one.source] for one in media], input_ids)

    def plain_inputs(self, media: Sequence[Medium], input_ids: Tensor) -> dict[str, Tensor]:
        """Returns the inputs of transformers' own forward and `generate` for files of texts (B, T); {} without files.
        Raises as `__call__`."""
        inputs = self(media, input_ids) if media else {}
        if "image_grid_thw" in inputs:  # from which they count positions
            inputs["mm_token_type_ids"] = (input_ids == self.family.token_id).int()
        if "video_grid_thw" in inputs:
            inputs["mm_token_type_ids"] = 2 * (input_ids == self.family.token_id).int()
        return inputs


def feature_reader(family: MediaFamily, threads: int, caches: bool = False) -> FeatureReader:
    read = family.read
    if caches:
        from finetune.data.media.feature_cache import FeatureCache

        read = FeatureCache.of(family).read
    return FeatureReader(family, ThreadPoolExecutor(threads, "media"), read)
