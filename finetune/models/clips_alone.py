"""Towers that would compute a clip otherwise beside a longer one: their forward runs once for each clip.

    model_type        module         what reaches a shorter clip
    gemma3n           audio_tower    its second convolution sees what the first one makes of the frames behind the end
    granite_speech    encoder        no mask at all: attention and convolutions see them
    phi4_multimodal   encoder        its mask adds one to what may be seen, and nothing to the rest

The loop is inside the module's own forward, so that backends gather its weights once, however many clips a rank has.
Frames behind a clip's end are zero in all bins, which no frame of these extractors is: they return logarithms. Phi-4's
has no logarithm below that of 1: its frames of silence are zero as well, and its mask tells what is a clip's. A clip
alone gets no mask, as transformers' processor makes none for it.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from finetune.data.media.family_table import Family
from finetune.models.patches import replace_forward, set_attribute


def run_clips_alone(model: Any, family: Family) -> None:
    """Let the tower of such a family run once for each clip, in place. model: transformers'."""
    if family.alone is None or is_run_alone(module := model.base_model.get_submodule(family.alone)):
        return
    own, by_mask = module.forward, family.alone_by_mask

    @functools.wraps(own)
    def forward(features: Tensor, *masks: Tensor | None, **arguments: Any) -> Any:  # (N, frames, bins), (N, frames)
        frames = _frames(features, masks[0]) if by_mask else _frames_with_sound(features)
        masks = (None,) if by_mask else masks
        if min(frames) == features.shape[1] and not by_mask:  # Phi-4's fails at several clips of more than 40 s
            return own(features, *masks, **arguments)
        outputs = []
        for i, count in enumerate(frames):
            clip = [None if one is None else one[i : i + 1, :count] for one in (features, *masks)]
            outputs.append(own(*clip, **arguments))
        return _joined(outputs)

    replace_forward(module, forward, "clip by clip")
    module.runs_clips_alone = True
    # Units of a sharded model: the whole module, as units within it would be gathered once for each clip.
    inner = {type(one).__name__ for one in module.modules()}
    units = {*(model._no_split_modules or ())} - inner | {type(module).__name__}  # transformers' name for layers
    set_attribute(model, "_no_split_modules", units, "clip by clip")


def is_run_alone(module: Any) -> bool:
    """Returns whether a module's own modules run once for each clip, which ranks have different numbers of."""
    return getattr(module, "runs_clips_alone", False)


def is_run_in_parts(module: Any) -> bool:
    """Returns whether a module's own modules run once for so many seconds of a step's clips (Qwen3-Omni's)."""
    return hasattr(module, "conv_chunksize")


def _frames(features: Tensor, mask: Tensor | None) -> list[int]:
    """Returns the frames of each clip. features: (N, frames, bins); mask: (N, frames), None: all are real."""
    return [features.shape[1]] * len(features) if mask is None else mask.sum(1).tolist()


def _frames_with_sound(features: Tensor) -> list[int]:
    return (features == 0).all(-1).logical_not().sum(1).tolist()


def _joined(outputs: list[Any]) -> Any:
    """Returns the outputs (1, T, D) of clips as one (N, longest, D), its mask of what is no sound as well."""
    if isinstance(outputs[0], Tensor):
        longest = max(one.shape[1] for one in outputs)
        return torch.cat([_lengthened(one, longest, 0) for one in outputs])
    joined = copy.copy(outputs[0])
    longest = max(one.last_hidden_state.shape[1] for one in outputs)
    for name, behind in (("last_hidden_state", 0), ("audio_mel_mask", True)):
        if getattr(joined, name, None) is not None:
            rows = [getattr(one, name) for one in outputs]
            setattr(joined, name, torch.cat([_lengthened(row, longest, behind) for row in rows]))
    return joined


def _lengthened(row: Tensor, to: int, value: Any) -> Tensor:
    return pad(row, (*(0, 0) * (row.dim() - 2), 0, to - row.shape[1]), value=value)
