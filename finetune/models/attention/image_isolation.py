"""Tests whether packed documents with images get the loss and the gradients that plain transformers gives each alone.

As `isolation` does for texts: on a tiny copy of the model's config, on the CPU and in fp32, and not by the name of the
family. Documents begin and end with text, one is text alone, one has two images of different size.

Letters: T tokens of a row, N documents.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, PretrainedConfig

from finetune.data.batch import ImagePlace, collate
from finetune.data.samples import Example
from finetune.data.samples import Sequence as Document
from finetune.models.attention.isolation import Computed, Differences, TinyModel, cached, compare, why_not
from finetune.models.attention.kernels import with_unread_mask
from finetune.models.attention.per_document import prepare, with_whole_images
from finetune.models.remote_code import from_config
from finetune.models.tiny_config import HEAD_SIZE, HEADS, HIDDEN_SIZE, VOCABULARY, tiny_config
from finetune.models.trials import FAILURES, failure_text, quietly, randomize
from finetune.models.vision import attention_of_parts, family_of, image_tokens, row_positions

_IMAGE, _VIDEO = VOCABULARY - 1, VOCABULARY - 2  # ids, beyond those of texts
_FIRST, _LAST = 3, 100  # ids of texts
# Of each document: tokens of text, or an image of so many cells (negative).
DOCUMENTS: tuple[tuple[int, ...], ...] = ((4, -2, 9), (11,), (3, -3, 2, -2, 6))
_WIDTH = HEADS * HEAD_SIZE // 2
_SMALL_TOWER: dict[str, Any] = {
    "hidden_size": _WIDTH,
    "intermediate_size": 2 * _WIDTH,
    "num_attention_heads": 2,
    "num_heads": 2,
    "num_hidden_layers": 2,
    "depth": 2,
    "head_dim": HEAD_SIZE,
    "out_hidden_size": HIDDEN_SIZE,
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0, 1],
    "num_position_embeddings": 16,
}


def tiny_whole(config: PretrainedConfig) -> Any:
    """Returns a tiny copy of a multimodal config: small text model, small tower, few patches."""
    tiny: Any = copy.deepcopy(config)
    text = tiny.get_text_config(decoder=True)
    name = next(name for name in tiny.sub_configs if getattr(tiny, name) is text)
    setattr(tiny, name, tiny_config(text))
    getattr(tiny, name).pad_token_id = 0
    vision = tiny.vision_config
    for key, value in _SMALL_TOWER.items():
        if hasattr(vision, key):
            setattr(vision, key, value)
    if family_of(config).tokens is not None:
        side = 2 * getattr(tiny, "scale_factor", 1)
        vision.image_size = vision.patch_size * side
        if hasattr(tiny, "mm_tokens_per_image"):
            vision.image_size, tiny.mm_tokens_per_image = vision.patch_size * 4, 4
    tiny.image_token_id = _IMAGE
    if hasattr(tiny, "video_token_id"):
        tiny.video_token_id = _VIDEO
    return tiny


def why_not_isolated(config: PretrainedConfig) -> str | None:
    """Returns why packed documents with images differ from each alone; None if they do not."""

    def differences() -> Differences:
        tiny = tiny_whole(config)
        return compare(ImageTrial(tiny, None).alone(), ImageTrial(tiny, "finetune_documents").packed())

    with quietly():
        return why_not(differences)


def trial_with_images(config: PretrainedConfig) -> str | None:
    """Returns `why_not_isolated`. A trial that has passed is not repeated with the same config, versions and code."""
    try:
        tiny = tiny_whole(config)
    except FAILURES as error:
        return failure_text(error)
    trial, passed = (lambda: {"why": why_not_isolated(config)}), (lambda outcome: outcome["why"] is None)
    return cached(tiny, "images", trial, may_keep=passed)["why"]


class ImageTrial(TinyModel):
    """A tiny model with its tower; implementation: of the language model's attention, None: transformers' own."""

    def __init__(self, tiny: Any, implementation: str | None):
        torch.manual_seed(0)
        self.config, self.family = copy.deepcopy(tiny), family_of(tiny)
        attention = attention_of_parts(self.config, implementation or "sdpa")
        model: Any = from_config(
            AutoModelForImageTextToText, self.config, dtype=torch.float32, attn_implementation=attention
        )
        randomize(model)
        with torch.no_grad():
            for parameter in model.parameters():  # convolutions: as large as their inputs
                if parameter.dim() > 2:
                    parameter.mul_((parameter.shape[-1] / parameter[0].numel()) ** 0.5)
        generator = torch.Generator().manual_seed(1)

        def ids(piece: int) -> Tensor:
            if piece > 0:
                return torch.randint(_FIRST, _LAST, (piece,), generator=generator)
            return torch.full((image_tokens(self.config, [-piece])[0],), _IMAGE)

        super().__init__(model, [torch.cat([ids(piece) for piece in pieces])[None] for pieces in DOCUMENTS])
        self.cells = [[-piece for piece in pieces if piece < 0] for pieces in DOCUMENTS]  # of each document's images
        self.pictures = self.family.pictures(self.config, [count for cells in self.cells for count in cells])

    def pictures_of(self, document: int) -> dict[str, Tensor]:
        """Returns views of a document's pictures among those of all, of which no two are equal."""
        first, count = sum(map(len, self.cells[:document])), len(self.cells[document])
        if not count:
            return {}
        if (grid := self.pictures.get("image_grid_thw")) is not None:
            patches = grid.prod(1).tolist()
            pixels = self.pictures["pixel_values"].narrow(0, sum(patches[:first]), sum(patches[first : first + count]))
            return {"pixel_values": pixels, "image_grid_thw": grid.narrow(0, first, count)}
        dimension = 1 if "pixel_attention_mask" in self.pictures else 0
        return {name: tensor.narrow(dimension, first, count) for name, tensor in self.pictures.items()}

    def alone(self) -> Computed:
        """Returns the losses of each document as plain transformers computes them."""
        logits = []
        for i, ids in enumerate(self.documents):
            inputs = self.pictures_of(i)
            if "image_grid_thw" in inputs:
                inputs["mm_token_type_ids"] = (ids == _IMAGE).int()
            if self.family.sees_whole_images:
                inputs["token_type_ids"] = (ids == _IMAGE).long()
            logits.append(self.model(input_ids=ids, use_cache=False, **inputs).logits)
        return self.computed(logits)

    def packed(self) -> Computed:
        return self.computed(self.row_logits())

    def row_logits(self) -> tuple[Tensor, ...]:  # (1, t, V) each
        """Returns the logits of all documents in one row with the pixels of all images, as in a run's forward."""
        rows = [ids[0].numpy().astype(np.int32) for ids in self.documents]
        batch = collate([Example("trial", 0, 0, (Document(ids, np.zeros(len(ids), bool)),)) for ids in rows])
        images = tuple(ImagePlace(i, 0, 0) for i, cells in enumerate(self.cells) for _ in cells)
        batch = replace(batch, inputs={**batch.inputs, **self.pictures}, images=images)
        if positions := row_positions(self.config):
            batch = positions(batch)
        arguments = with_unread_mask(prepare(batch.sequence_lengths), torch.device("cpu"))
        if self.family.sees_whole_images:
            with_whole_images(arguments, batch.inputs["input_ids"], _IMAGE)
        logits = self.model(**batch.inputs, **arguments, use_cache=False).logits
        return logits.split(list(map(len, rows)), dim=1)
