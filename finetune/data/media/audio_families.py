"""Clips as tokens, and the tensors that a forward takes for them, of each family.

    model_type     the chat template writes     a clip becomes                                  features
    qwen2_audio    <|AUDIO|>                    one token for 40 ms, at most 30 s               30 s, the rest masked
    voxtral        [AUDIO]                      375 tokens for each 30 s that have begun        pieces of 30 s
    qwen3_asr      <|audio_pad|>                13 tokens a second, at least half a second      whole seconds, masked

All follow from the number of samples alone. A clip's features are those that transformers' extractor computes for it
by itself: within a batch, some pad a clip to the longest, and reflect its end otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finetune.data.media.audio_files import StoredClip, broken, find_clip, load_clip, resampled_length
from finetune.data.media.families import FamilySettings, Features, MediaFamily, Written
from finetune.data.samples import BadRow, Clip
from finetune.errors import UserError


class AudioFamily(MediaFamily):
    """Handling of clips. Subclasses say how many tokens they become, and which features."""

    def __init__(self, settings: FamilySettings, marks: Sequence[str] = (), *more: Any):
        self.extractor: Any = settings.load_processor()
        self.rate = int(self.extractor.sampling_rate)
        super().__init__(settings, self.extractor, settings.row.placeholder, marks, *more)

    def find(self, reference: str | bytes, data_file: str) -> StoredClip:
        return find_clip(reference, self.rules, data_file)

    def written(self, stored: StoredClip) -> Written:
        length = resampled_length(stored.samples, stored.rate, self.rate)
        try:
            count = self.count(length)
        except ValueError as error:
            raise BadRow(f"a clip of {stored.samples / stored.rate:.2f} s cannot be used: {error}") from None
        return Written(self.token * count, count)

    def placed(self, stored: StoredClip, begin: int, end: int) -> Clip:
        return Clip(stored.source, stored.samples, stored.rate, begin, end)

    def read(self, medium: Clip) -> Features:
        name = medium.source if isinstance(medium.source, str) else "a clip in the data"
        try:
            wave = load_clip(medium.source, medium.samples, medium.rate, self.rate)
        except broken() as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise UserError(
                f"{name}: cannot be read: {reason}. Fix: restore it, or `finetune cache clean` and start again; "
                "`data.audio: {verify: samples}` finds broken clips before the run"
            ) from None
        return self.features_of(wave)

    def count(self, length: int) -> int:
        """Returns the tokens of a clip of so many samples. Raises ValueError for a length that it cannot take."""
        raise NotImplementedError

    def features_of(self, wave: NDArray[np.float32]) -> Features:
        """Returns the extractor's output for a clip (samples,) at its rate."""
        raise NotImplementedError

    def join(self, features: Sequence[Features], input_ids: Tensor) -> dict[str, Tensor]:
        """input_features (N, bins, frames) of clips, or pieces, of one length."""
        return {name: torch.from_numpy(np.concatenate([of_clip[name] for of_clip in features])) for name in features[0]}


class Qwen2AudioClips(AudioFamily):
    def __init__(self, settings: FamilySettings):
        super().__init__(settings, ("<|audio_bos|>", "<|audio_eos|>"))

    def count(self, length: int) -> int:
        if length > self.extractor.n_samples:
            most = self.extractor.n_samples / self.rate
            raise ValueError(f"this model hears {most:g} s, and its processor drops the rest: cut the clip")
        frames = -(-length // self.extractor.hop_length)
        count = ((frames - 1) // 2 + 1 - 2) // 2 + 1
        if count < 2:  # transformers' forward takes single tokens for those of an older processor
            raise ValueError("too short: it would be fewer than two tokens")
        return count

    def features_of(self, wave: NDArray[np.float32]) -> Features:
        found = self.extractor(
            wave, sampling_rate=self.rate, padding="max_length", return_attention_mask=True, return_tensors="np"
        )
        return {"input_features": found["input_features"], "feature_attention_mask": found["attention_mask"]}


class VoxtralClips(AudioFamily):
    def __init__(self, settings: FamilySettings):
        audio: Any = settings.config.audio_config
        self.frames = 2 * audio.max_source_positions  # of a piece: the first convolutions halve them
        self.tokens = audio.max_source_positions * audio.d_model // audio.intermediate_size
        super().__init__(settings, ("[BEGIN_AUDIO]",), self.frames, self.tokens)
        self.piece = self.frames * self.extractor.hop_length  # samples

    def count(self, length: int) -> int:
        return -(-length // self.piece) * self.tokens

    def features_of(self, wave: NDArray[np.float32]) -> Features:
        found = self.extractor(
            wave,
            sampling_rate=self.rate,
            padding=True,
            truncation=False,
            pad_to_multiple_of=self.piece,
            return_tensors="np",
        )
        mel = found["input_features"].reshape(self.extractor.feature_size, -1, self.frames)
        return {"input_features": np.ascontiguousarray(mel.transpose(1, 0, 2))}


class Qwen3AsrClips(AudioFamily):
    def __init__(self, settings: FamilySettings):
        audio: Any = settings.config.audio_config
        self.window = 2 * audio.n_window  # frames that the convolutions see at a time
        super().__init__(settings, ("<|audio_start|>", "<|audio_end|>"), self.window)

    def count(self, length: int) -> int:
        frames = max(length, self.extractor.min_length) // self.extractor.hop_length
        whole, rest = divmod(frames, self.window)
        return whole * _thrice_halved(self.window) + _thrice_halved(rest)

    def features_of(self, wave: NDArray[np.float32]) -> Features:
        found = self.extractor(
            wave,
            sampling_rate=self.rate,
            padding=True,
            n_window=self.window // 2,
            return_attention_mask=True,
            return_tensors="np",
        )
        return {
            "input_features": np.asarray(found["input_features"]),
            "input_features_mask": np.asarray(found["attention_mask"]),
        }

    def join(self, features: Sequence[Features], input_ids: Tensor) -> dict[str, Tensor]:
        """input_features (N, bins, frames) and input_features_mask (N, frames), padded to the longest clip."""
        longest = max(of_clip["input_features"].shape[-1] for of_clip in features)
        padded = [
            {
                name: np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, longest - values.shape[-1])])
                for name, values in of_clip.items()
            }
            for of_clip in features
        ]
        return super().join(padded, input_ids)


def _thrice_halved(frames: int) -> int:
    """Returns the frames after three convolutions of stride 2; 0 for 0."""
    for _ in range(3):
        frames = -(-frames // 2)
    return frames
