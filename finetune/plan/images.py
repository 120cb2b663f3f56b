"""Images of the heaviest micro-batch: the largest number of them, and their forward on fake tensors.

A tower's forward reads sizes of images and places of their tokens, so integers keep their values here; pixels and all
that is computed from them have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

# torch documents this mode, and has it under no other name.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # as this one
from torch.utils._pytree import tree_leaves  # as this function
from transformers import PretrainedConfig

from finetune.data.batch import Batch, MediaPlace
from finetune.data.media.family_table import family_of
from finetune.data.samples import MediaKind
from finetune.models.towers import patches_of, patches_per_token, row_positions
from finetune.recipe.schema import Audio, Data, Images, Videos

_MARKS = 2  # tokens around an image
_LARGE = 2**24  # elements
_BY_INDEX = tuple(getattr(torch.ops.aten, name) for name in ("index", "index_put", "index_put_", "_index_put_impl_"))


class SeenFile(NamedTuple):
    """What a tower computes by itself of a file: all of it, of a video a frame, or those that it takes as one."""

    kind: MediaKind
    tokens: int

    @property
    def as_still(self) -> MediaKind:
        """The kind by which a forward is tried: a frame as an image."""
        return "image" if self.kind == "video" else self.kind


def most_images(data: Data, config: PretrainedConfig) -> tuple[SeenFile, ...]:
    """Returns the files of a row that has as many as fit into it, as large as they may be; () if it has none. Of a run
    on several kinds those whose tower has the most work."""
    room, found = data.max_length - 1, list[tuple[SeenFile, ...]]()
    for rules in data.media or ():
        kind: MediaKind = "audio" if isinstance(rules, Audio) else "video" if isinstance(rules, Videos) else "image"
        each = _most_tokens(rules, config, room, kind)
        found.append((SeenFile(kind, each),) * (room // (each + _MARKS)) if each > 1 else ())

    def work(files: tuple[SeenFile, ...]) -> int:
        return sum(n * n for n in patches_of(config, [one.tokens for one in files], files[0].kind)) if files else 0

    return max(found, key=work, default=())


def _most_tokens(rules: Images | Audio | Videos, config: Any, room: int, kind: MediaKind) -> int:
    """Returns the tokens of the largest `SeenFile` of a kind."""
    family = family_of(config, kind)
    if family.tokens is not None:
        return family.tokens(config)
    if isinstance(rules, Audio):
        assert family.ear is not None  # of every family that hears
        return min(int(family.ear.most(config, rules.max_seconds)), room - _MARKS)
    side, pixels = config.vision_config.patch_size * int(patches_per_token(config, kind) ** 0.5), rules.max_pixels
    if pixels and kind == "video" and config.model_type == "qwen3_vl":  # of all frames
        pixels //= 2
    most = (pixels // side**2 if pixels else None) or family.most_tokens or room
    return min(room - _MARKS, max(2, most))


def with_pictures(
    batch: Batch, config: PretrainedConfig, images: Sequence[Sequence[SeenFile]], fakes: FakeTensorMode
) -> Batch:
    """Returns a batch with fake pixels of its images and their real sizes. images: files of each document."""
    files = [one for of_document in images for one in of_document]
    if not files:
        return batch
    kinds: tuple[MediaKind, ...] = tuple(dict.fromkeys(one.as_still for one in files))
    pictures: dict[str, Tensor] = {}
    with fakes, KnownIntegers():
        for row in family_of(config, kinds).each:
            pictures |= row.pictures(config, [one.tokens for one in files if one.as_still == row.kind])
    places = tuple(
        MediaPlace(i, 0, 0, kind=one.as_still) for i, of_document in enumerate(images) for one in of_document
    )
    batch = replace(batch, inputs={**batch.inputs, **pictures}, media=places)
    positions = row_positions(config)
    return positions(batch) if positions else batch


class KnownIntegers(TorchDispatchMode):
    """On top of fake tensors, computes integers that do not depend on fake ones, and floats that count.

    So a mask can be read. No pixel equals a number that it is compared with, so no image is taken for padding.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):  # as in `Meter`
            return args[0].fake_device
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
