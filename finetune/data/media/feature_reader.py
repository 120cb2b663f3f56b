"""Tensors that the model's forward takes for the images of a micro-batch.

A few threads decode and scale images while the steps before are computed (`data/prefetch.py`). The tensors are not
kept: pixels take about a hundred times the room of their file.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from finetune.data.media.families import Features, MediaFamily
from finetune.data.media.image_files import BROKEN, decode
from finetune.data.samples import Image
from finetune.errors import UserError


@dataclass(frozen=True)
class FeatureReader:
    """Builds the image inputs of a forward for a row, see `batch.MediaInputs`."""

    family: MediaFamily
    pool: ThreadPoolExecutor

    def __call__(self, images: Sequence[Image], input_ids: Tensor) -> dict[str, Tensor]:
        """input_ids: (1, T). An image that several sequences have, as both answers of a pair, is read once. Raises
        UserError for a file that is damaged, or not the one that was tokenized."""
        distinct = {image.source: image for image in images}
        pixels = dict(zip(distinct, self.pool.map(self.read, distinct.values()), strict=True))
        return self.family.join([pixels[image.source] for image in images], input_ids)

    def plain_inputs(self, images: Sequence[Image], input_ids: Tensor) -> dict[str, Tensor]:
        """Returns the inputs of transformers' own forward and `generate` for images of texts (B, T); {} without images.
        Raises as `__call__`."""
        inputs = self(images, input_ids) if images else {}
        if "image_grid_thw" in inputs:  # from which they count positions
            inputs["mm_token_type_ids"] = (input_ids == self.family.token_id).int()
        return inputs

    def read(self, image: Image) -> Features:
        name = image.source if isinstance(image.source, str) else "an image in the data"
        try:
            decoded = decode(image.source)
        except BROKEN as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise UserError(
                f"{name}: cannot be decoded: {reason}. Fix: restore it; `data.image: {{verify: pixels}}` finds such "
                "images before the run, and with `data.on_bad_row: skip` leaves their rows out"
            ) from None
        if decoded.size != (image.width, image.height):
            raise UserError(
                f"{name}: {decoded.width} x {decoded.height} pixels, but it had {image.width} x {image.height} when "
                "its row was tokenized. Fix: put it back, or `finetune cache clean` and start again"
            )
        return self.family.call(decoded)


def feature_reader(family: MediaFamily, threads: int) -> FeatureReader:
    return FeatureReader(family, ThreadPoolExecutor(threads, "images"))
