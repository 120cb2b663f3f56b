"""Sizes of clips in the towers that hear: frames of features, positions of the tower's layers, tokens.

    model_type                tokens of a clip of F frames             positions              a position sees
    qwen2_audio               (ceil(F / 2) - 2) // 2 + 1               30 s, whatever F       all of its 30 s
    voxtral                   375 of 3000 frames                       1500 of 3000 frames    all of its 30 s
    qwen3_asr                 13 of 100 frames                         one a token            the clip
    qwen3_omni_moe_thinker    13 of 100 frames                         one a token            8 s of it
    qwen2_5_omni_thinker      (ceil(F / 2) - 2) // 2 + 1               ceil(F / 2)            2 s of it
    gemma4                    ceil(ceil(F / 2) / 2)                    one a token            its neighbours
    gemma3n                   188, whatever F                          ceil(ceil(F / 2) / 2)  its neighbours
    granite_speech            3 of 15 positions that have begun        F                      4 s of it
    phi4_multimodal           ceil(F / 8)                              one a token            the clip, or 40 s of it

A row of `family_table.py` names an `Ear`: both directions, F from tokens for trials and plans, positions from F for
counts of operations. Frames of Granite Speech are pairs of frames.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def values(*shape: int) -> Tensor:
    """Returns numbers between -1 and 1, different in neighbouring places."""
    return torch.sin(torch.arange(math.prod(shape), dtype=torch.float32) * 0.7311).reshape(shape)


@dataclass(frozen=True)
class Ear:
    """Sizes of clips in a tower, of a model's config."""

    frames: Callable[[Any, int], int]  # (config, tokens) -> frames of a clip of so many
    positions: Callable[[Any, int], list[int]]  # (config, frames) -> positions, by what sees each other
    bins: Callable[[Any], int]  # of a frame
    most: Callable[[Any, float], float] = lambda _config, seconds: 25 * seconds  # -> tokens of so long a clip
    per_token: Callable[[Any], int] = lambda _config: 1  # positions that the projector joins to a token
    features: str = "input_features"
    mask: str | None = None  # (N, frames) of real ones
    frames_first: bool = False  # features are (N, frames, bins), not (N, bins, frames)
    mask_type: torch.dtype = torch.int32
    padded: Callable[[Any, int], int] = lambda _config, longest: longest  # -> frames of the features' tensor

    def clips(self, config: Any, cells: Sequence[int]) -> dict[str, Tensor]:
        """Returns features of clips of so many tokens each, zero behind a clip's end."""
        frames = torch.tensor([self.frames(config, count) for count in cells])
        longest = self.padded(config, int(frames.max()))
        mask = torch.arange(longest) < frames[:, None]
        shape = (longest, self.bins(config)) if self.frames_first else (self.bins(config), longest)
        there = mask[:, :, None] if self.frames_first else mask[:, None]
        features = values(len(cells), *shape) * there
        return {self.features: features, **({self.mask: mask.to(self.mask_type)} if self.mask else {})}

    def frames_in(self, inputs: Any) -> list[int]:
        """Returns the frames of each clip, or piece of one, among the inputs of a forward."""
        if self.mask is not None and inputs.get(self.mask) is not None:
            return inputs[self.mask].sum(1).tolist()
        if (features := inputs.get(self.features)) is None:
            return []
        if self.frames_first and self.mask is None:  # Granite Speech has zeros behind a clip's end
            return (features == 0).all(-1).logical_not().sum(1).tolist()
        return [features.shape[1 if self.frames_first else 2]] * len(features)


def pieces(count: int, size: int) -> list[int]:
    """
    >>> pieces(5, 2)
    [2, 2, 1]
    """
    return [size] * (count // size) + ([count % size] if count % size else [])


def halved(frames: int, times: int) -> int:
    """Returns the frames after so many convolutions of stride 2; 0 for 0."""
    for _ in range(times):
        frames = -(-frames // 2)
    return frames


def thrice_halved(frames: int) -> int:
    return halved(frames, 3)


def _all_positions(config: Any, _frames: int) -> list[int]:
    return [config.audio_config.max_source_positions]


def _of_windows(config: Any, tokens: int) -> int:
    """Frames of windows of 100, which are 13 tokens each; eight frames of the last one are a token."""
    window = 2 * config.audio_config.n_window
    of_window = thrice_halved(window)
    return window * (tokens // of_window) + 8 * (tokens % of_window)


def _tokens_of_windows(config: Any, frames: int) -> int:
    window = 2 * config.audio_config.n_window
    return frames // window * thrice_halved(window) + thrice_halved(frames % window)


def _whole_windows(config: Any, longest: int) -> int:
    window = 2 * config.audio_config.n_window
    return -(-longest // window) * window


def _window_seen(config: Any) -> int:
    window = 2 * config.audio_config.n_window
    return config.audio_config.n_window_infer // window * thrice_halved(window)


def _mel_bins(config: Any) -> int:
    return config.audio_config.num_mel_bins


def voxtral_tokens(config: Any) -> int:
    """Returns the tokens of a piece of 30 s: its positions are as many, joined to rows of the feed-forward's width."""
    audio = config.audio_config
    return audio.max_source_positions * audio.d_model // audio.intermediate_size


def _voxtral_frames(config: Any, tokens: int) -> int:
    return max(tokens // voxtral_tokens(config), 1) * 2 * config.audio_config.max_source_positions


def _of_neighbours(prefix: str) -> Callable[[Any, int], list[int]]:
    """Positions after two convolutions of stride 2; a chunk sees itself and some before it, under one mask."""

    def positions(config: Any, frames: int) -> list[int]:
        left, right, chunk = (
            getattr(config.audio_config, f"{prefix}attention_{name}")
            for name in ("context_left", "context_right", "chunk_size")
        )
        return pieces(halved(frames, 2), chunk + left - 1 + right)

    return positions


def _of_chunks(config: Any, frames: int) -> list[int]:
    """Phi-4: a clip of more than 500 positions is computed in chunks of as many, the last one with zeros behind."""
    count = -(-frames // config.audio_config.time_reduction)
    return [count] if count <= _CHUNK else [_CHUNK] * -(-count // _CHUNK)


_CHUNK = 500  # positions: `max_seq_len` in transformers' Phi4MultimodalAudioModel.forward
THIRTY_SECONDS = Ear(
    frames=lambda _config, tokens: 4 * tokens - 1,
    positions=_all_positions,
    bins=_mel_bins,
    most=lambda config, seconds: min(25 * seconds, config.audio_config.max_source_positions // 2),
    per_token=lambda _config: 2,
    mask="feature_attention_mask",
    padded=lambda config, _longest: 2 * config.audio_config.max_source_positions,
)
PIECES_OF_THIRTY = Ear(
    frames=_voxtral_frames,
    positions=lambda config, frames: pieces(frames // 2, config.audio_config.max_source_positions),
    bins=_mel_bins,
    per_token=lambda config: config.audio_config.max_source_positions // voxtral_tokens(config),
)
WHOLE_SECONDS = Ear(
    frames=_of_windows,
    positions=lambda config, frames: [_tokens_of_windows(config, frames)],
    bins=_mel_bins,
    most=lambda _config, seconds: 13 * seconds,
    mask="input_features_mask",
    padded=_whole_windows,
)
EIGHT_SECONDS = Ear(
    frames=_of_windows,
    positions=lambda config, frames: pieces(_tokens_of_windows(config, frames), _window_seen(config)),
    bins=_mel_bins,
    most=lambda _config, seconds: 13 * seconds,
    mask="feature_attention_mask",
)
TWO_SECONDS = Ear(
    frames=lambda _config, tokens: 4 * tokens - 1,
    positions=lambda config, frames: pieces(-(-frames // 2), config.audio_config.n_window),
    bins=_mel_bins,
    per_token=lambda _config: 2,
    mask="feature_attention_mask",
)
GEMMA_4 = Ear(
    frames=lambda _config, tokens: 4 * tokens - 1,
    positions=_of_neighbours(""),
    # The projection behind its two convolutions has a quarter of the first one's channels as height.
    bins=lambda config: config.audio_config.subsampling_conv_channels[0],
    most=lambda _config, seconds: min(25 * seconds, 750),
    mask="input_features_mask",
    frames_first=True,
    mask_type=torch.bool,
)
GEMMA_3N = Ear(
    frames=lambda _config, tokens: 16 * tokens - 5,
    positions=_of_neighbours("conf_"),
    bins=lambda config: config.audio_config.input_feat_size,
    per_token=lambda config: config.audio_config.conf_reduction_factor,
    mask="input_features_mask",
    frames_first=True,
    mask_type=torch.bool,
)
GRANITE = Ear(
    frames=lambda config, tokens: tokens * config.downsample_rate - 2,
    positions=lambda config, frames: pieces(frames, config.encoder_config.context_size),
    bins=lambda config: config.encoder_config.input_dim,
    most=lambda _config, seconds: 10 * seconds,
    per_token=lambda config: config.downsample_rate,
    frames_first=True,
)
PHI_4 = Ear(
    frames=lambda config, tokens: tokens * config.audio_config.time_reduction - 3,
    positions=_of_chunks,
    bins=lambda config: config.audio_config.input_size,
    most=lambda _config, seconds: 12.5 * seconds,
    features="audio_input_features",
    mask="audio_attention_mask",
    frames_first=True,
    mask_type=torch.bool,
)


def gemma3n_clips(config: Any, cells: Sequence[int]) -> dict[str, Tensor]:
    """Gemma 3n: clips of so many tokens, or as many as all have: the rest of these is without sound."""
    return GEMMA_3N.clips(config, [min(count, config.audio_soft_tokens_per_image) for count in cells])


def granite_clips(config: Any, cells: Sequence[int]) -> dict[str, Tensor]:
    """Granite Speech: frames behind a clip's end are zero, and tokens, not frames, have a mask."""
    mask = torch.arange(max(cells)) < torch.tensor(cells)[:, None]
    return {**GRANITE.clips(config, cells), "input_features_mask": mask}


def phi4_clips(config: Any, cells: Sequence[int]) -> dict[str, Tensor]:
    """Phi-4: the tokens of each clip are an input as well."""
    return {**PHI_4.clips(config, cells), "audio_embed_sizes": torch.tensor(cells)}
