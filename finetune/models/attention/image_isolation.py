"""Tests whether packed documents with images get the loss and the gradients that plain transformers gives each alone.

As `isolation` does for texts: on a tiny copy of the model's config, on the CPU and in fp32, and not by the name of the
family. Documents begin and end with text, one is text alone, one has two images of different size.

Letters: T tokens of a row, N documents.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, PretrainedConfig

from finetune.data.batch import Batch, ImagePlace, collate
from finetune.data.samples import Example
from finetune.data.samples import Sequence as Document
from finetune.models.attention.isolation import Computed, compare, verdict_file, why_not
from finetune.models.attention.kernels import with_unread_mask
from finetune.models.attention.per_document import prepare, with_whole_images
from finetune.models.remote_code import from_config
from finetune.models.tiny_config import HEAD_SIZE, HEADS, HIDDEN_SIZE, VOCABULARY, tiny_config
from finetune.models.trials import FAILURES, quietly, randomize
from finetune.models.vision import Family, attention_of_parts, family_of, image_tokens, row_positions
from finetune.utils import write_atomically

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
    if family_of(config).fixed:
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
    with quietly():
        return why_not(lambda: _differences(tiny_whole(config)))


def trial_with_images(config: PretrainedConfig) -> str | None:
    """Returns `why_not_isolated`. A trial that has passed is not repeated with the same config, versions and code."""
    try:
        path = verdict_file(tiny_whole(config), "images")
    except FAILURES:
        return why_not_isolated(config)
    if path.is_file():
        return None
    why = why_not_isolated(config)
    if why is None:
        with contextlib.suppress(OSError):  # if the folder cannot be written, the next run tries again
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, "null\n", shared=True)
    return why


def _differences(tiny: Any) -> Any:
    plain, packed = ImageTrial(tiny, None), ImageTrial(tiny, "finetune_documents")
    return compare(plain.alone(), packed.packed())


@dataclass(frozen=True)
class _Made:
    ids: Tensor  # (1, t)
    cells: tuple[int, ...]  # of its images


class ImageTrial:
    """A tiny model with its tower; implementation: of the language model's attention, None: transformers' own."""

    def __init__(self, tiny: Any, implementation: str | None):
        torch.manual_seed(0)
        self.config = copy.deepcopy(tiny)
        self.family: Family = family_of(tiny)
        attention = attention_of_parts(self.config, implementation or "sdpa")
        self.model: Any = from_config(
            AutoModelForImageTextToText, self.config, dtype=torch.float32, attn_implementation=attention
        )
        randomize(self.model)
        with torch.no_grad():
            for parameter in self.model.parameters():  # convolutions: as large as their inputs
                if parameter.dim() > 2:
                    parameter.mul_((parameter.shape[-1] / parameter[0].numel()) ** 0.5)
        self.model.train()
        generator = torch.Generator().manual_seed(1)
        self.documents = [self._made(pieces, generator) for pieces in DOCUMENTS]
        self.pictures = self._pictures()

    def _made(self, pieces: Sequence[int], generator: torch.Generator) -> _Made:
        ids, cells = [], []
        for piece in pieces:
            if piece > 0:
                ids.append(torch.randint(_FIRST, _LAST, (piece,), generator=generator))
            else:
                cells.append(-piece)
                ids.append(torch.full((image_tokens(self.config, [-piece])[0],), _IMAGE))
        return _Made(torch.cat(ids)[None], tuple(cells))

    def _pictures(self) -> list[dict[str, Tensor]]:
        """Returns the pictures of each document, as parts of those of all: no two images are equal."""
        cells = [count for document in self.documents for count in document.cells]
        whole, pictures, first = self.family.pictures(self.config, cells), [], 0
        for document in self.documents:
            places = range(first, first + len(document.cells))
            pictures.append(part_of_pictures(self.family, whole, list(places)) if document.cells else {})
            first += len(document.cells)
        self.whole = whole
        return pictures

    def alone(self) -> Computed:
        """Returns the losses of each document as plain transformers computes them."""
        losses = []
        for document, pictures in zip(self.documents, self.pictures, strict=True):
            types = {}
            if pictures and "image_grid_thw" in pictures:
                types["mm_token_type_ids"] = (document.ids == _IMAGE).int()
            if self.family.sees_whole_images:
                types["token_type_ids"] = (document.ids == _IMAGE).long()
            logits = self.model(input_ids=document.ids, use_cache=False, **pictures, **types).logits
            losses.append(_losses(logits, document.ids))
        return self._computed(losses)

    def packed(self) -> Computed:
        return self._computed(self.row_losses())

    def row_losses(self) -> list[Tensor]:
        """Returns the losses of all documents in one row, as in a run's forward."""
        batch = self.row()
        arguments = with_unread_mask(prepare(batch.sequence_lengths), torch.device("cpu"))
        if self.family.sees_whole_images:
            with_whole_images(arguments, batch.inputs["input_ids"], _IMAGE)
        logits = self.model(**batch.inputs, **arguments, use_cache=False).logits
        each = logits.split([document.ids.shape[1] for document in self.documents], dim=1)
        return [_losses(one, document.ids) for one, document in zip(each, self.documents, strict=True)]

    def own_pixels(self, document: int) -> Tensor | None:
        """Returns the mask of the pixels of a document's images in `whole`; None if it has no images."""
        if not self.pictures[document]:
            return None
        marked = {name: torch.zeros_like(tensor, requires_grad=False) for name, tensor in self.whole.items()}
        counts = [len(one.cells) for one in self.documents]
        first = sum(counts[:document])
        pixels = marked["pixel_values"]
        if "image_grid_thw" in self.whole:
            patches = self.whole["image_grid_thw"].prod(1).tolist()
            pixels[sum(patches[:first]) : sum(patches[: first + counts[document]])] = 1
        elif "pixel_attention_mask" in self.whole:
            pixels[:, first : first + counts[document]] = 1
        else:
            pixels[first : first + counts[document]] = 1
        return pixels.bool()

    def row(self) -> Batch:
        """Returns all documents end to end, with the pixels of all images."""
        examples = [_example(document) for document in self.documents]
        batch = collate(examples)
        owners = [i for i, document in enumerate(self.documents) for _ in document.cells]
        images = tuple(ImagePlace(owner, 0, 0) for owner in owners)
        batch = replace(batch, inputs={**batch.inputs, **self.whole}, images=images)
        positions = row_positions(self.config)
        return positions(batch) if positions else batch

    def _computed(self, losses: Sequence[Tensor]) -> Computed:
        self.model.zero_grad(set_to_none=True)
        torch.stack([one.sum() for one in losses]).sum().backward()
        gradients = {name: p.grad for name, p in self.model.named_parameters()}
        return Computed(tuple(one.detach() for one in losses), gradients)


def part_of_pictures(family: Family, whole: dict[str, Tensor], places: list[int]) -> dict[str, Tensor]:
    """Returns the pixels of some of the images."""
    if "image_grid_thw" in whole:
        patches = whole["image_grid_thw"].prod(1).tolist()
        pixels = torch.cat([whole["pixel_values"].split(patches)[place] for place in places])
        return {"pixel_values": pixels, "image_grid_thw": whole["image_grid_thw"][places]}
    if "pixel_attention_mask" in whole:
        return {name: tensor[:, places] for name, tensor in whole.items()}
    return {name: tensor[places] for name, tensor in whole.items()}


def _example(document: _Made) -> Example:
    ids = document.ids[0].numpy().astype(np.int32)
    return Example("trial", 0, 0, sequences=(Document(ids, np.zeros(len(ids), bool)),))


def _losses(logits: Tensor, ids: Tensor) -> Tensor:  # (t - 1,)
    return torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="none")
