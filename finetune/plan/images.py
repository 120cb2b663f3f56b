"""Images of the heaviest micro-batch: the largest number of them, and their forward on fake tensors.

A tower's forward reads sizes of images and places of their tokens, so integers keep their values here; pixels and all
that is computed from them have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

# torch documents this mode, and has it under no other name.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # as this one
from torch.utils._pytree import tree_leaves  # as this function
from transformers import PretrainedConfig

from finetune.data.batch import Batch, MediaPlace
from finetune.data.media.family_table import family_of
from finetune.models.towers import image_tokens, patches_per_token, row_positions
from finetune.recipe.schema import Audio, Data, Videos

_MARKS = 2  # tokens around an image
_LARGE = 2**24  # elements
_BY_INDEX = tuple(getattr(torch.ops.aten, name) for name in ("index", "index_put", "index_put_", "_index_put_impl_"))


def most_images(data: Data, config: PretrainedConfig) -> tuple[int, ...]:
    """Returns the tokens of each image of a row that has as many as fit into it; () if the recipe sees none."""
    if data.media is None:
        return ()
    whole: Any = config
    room = data.max_length - 1
    if data.audio is not None:
        return _most_clips(data.audio, whole, room)
    if data.video is not None:
        return _most_frames(data.video, whole, room)
    assert data.image is not None
    if family_of(config).tokens is not None:
        each = image_tokens(config, [1])[0]
    else:
        side = whole.vision_config.patch_size * int(patches_per_token(config) ** 0.5)
        pixels = data.image.max_pixels
        each = min(room - _MARKS, max(2, pixels // side**2) if pixels else room)
    return (each,) * (room // (each + _MARKS)) if each > 1 else ()


def _most_clips(audio: Audio, config: Any, room: int) -> tuple[int, ...]:
    """Returns the tokens of each clip of a row of clips as long as they may be."""
    family = family_of(config)
    if family.tokens is not None:
        each = family.tokens(config)
    else:
        assert family.ear is not None  # of every family that hears
        each = min(int(family.ear.most(config, audio.max_seconds)), room - _MARKS)
    return (each,) * (room // (each + _MARKS)) if each > 1 else ()


def _most_frames(video: Videos, config: Any, room: int) -> tuple[int, ...]:
    """Returns the tokens of each two frames of a row of videos as large as they may be: a tower computes each two as an
    image."""
    side = config.vision_config.patch_size * int(patches_per_token(config) ** 0.5)
    most = video.max_pixels
    if most and config.model_type == "qwen3_vl":  # of all frames
        most //= 2
    each = min(room - _MARKS, max(2, most // side**2) if most else room)
    return (each,) * (room // (each + _MARKS)) if each > 1 else ()


def with_pictures(
    batch: Batch, config: PretrainedConfig, images: Sequence[Sequence[int]], fakes: FakeTensorMode
) -> Batch:
    """Returns a batch with fake pixels of its images and their real sizes. images: tokens of each, by document."""
    cells = [count for of_document in images for count in of_document]
    if not cells:
        return batch
    with fakes, KnownIntegers():
        pictures = family_of(config).pictures(config, cells)
    places = tuple(MediaPlace(i, 0, 0) for i, of_document in enumerate(images) for _ in of_document)
    batch = replace(batch, inputs={**batch.inputs, **pictures}, media=places)
    positions = row_positions(config)
    return positions(batch) if positions else batch


class KnownIntegers(TorchDispatchMode):
    """On top of fake tensors, computes integers that do not depend on fake ones, and floats that count.

    So a mask can be read. No pixel equals a number that it is compared with, so no image is taken for padding.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
        if tensors and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return _with_values(func, args, named)
        if not tensors:
            out = func(*args, **named)
            counts = func.overloadpacket in (torch.ops.aten.arange, torch.ops.aten.linspace)
            has_values = isinstance(out, Tensor) and (counts or not out.is_floating_point()) and out.numel() < _LARGE
            return _with_values(func, args, named) if has_values else out
        if func is torch.ops.aten.eq.Scalar:
            with _disable_current_modes():
                return torch.zeros((), dtype=torch.bool).expand(args[0].shape)
        if func.overloadpacket in _BY_INDEX:
            indices: list[Tensor | None] = []  # in place of masks, whose shape does not tell how many there are
            for index in args[1]:
                is_mask = index is not None and index.dtype == torch.bool and not isinstance(index, FakeTensor)
                with _disable_current_modes():
                    indices += index.nonzero(as_tuple=True) if index is not None and is_mask else [index]
            args = (args[0], indices, *args[2:])
        return func(*args, **named)


def _with_values(func: Any, args: Any, named: Any) -> Any:
    with _disable_current_modes():
        return func(*args, **named)
