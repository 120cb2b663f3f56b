"""Clips as tokens, and the tensors that a forward takes for them, of each family.

    model_type     the chat template writes     a clip becomes                                  features
    qwen2_audio    <|AUDIO|>                    one token for 40 ms, at most 30 s               30 s, the rest masked
    voxtral        [AUDIO]                      375 tokens for each 30 s that have begun        pieces of 30 s
    qwen3_asr      <|audio_pad|>                13 tokens a second, at least half a second      whole seconds, masked
    qwen2_5_omni   <|AUDIO|>                    one token for 40 ms, at most 300 s              masked
    qwen3_omni     <|audio_pad|>                13 tokens a second                              masked
    gemma4         <|audio|>                    <|audio>, a token for 40 ms, <audio|>           masked
    gemma3n        <audio_soft_token>           a mark, 188 tokens, a mark                      masked
    granite        <|audio|>                    3 tokens for 300 ms that have begun             pairs of frames
    phi4           <|audio|>                    a token for 80 ms that have begun               masked if several

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
from transformers.utils import cached_file

from finetune.data.media.audio_files import StoredClip, broken, find_clip, load_clip, resampled_length
from finetune.data.media.clip_shapes import halved, thrice_halved, voxtral_tokens
from finetune.data.media.families import FamilySettings, Features, MediaFamily, Written
from finetune.data.samples import BadRow, Clip
from finetune.errors import UserError
from finetune.recipe.schema import Model


class AudioFamily(MediaFamily):
    """Handling of clips. Subclasses say how many tokens they become, and which features."""

    # The dimension of `input_features` in which clips differ: they are padded to the longest. None: all have one size.
    frames_axis: int | None = None

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
        return Written(self.written_as(count), count)

    def placed(self, stored: StoredClip, begin: int, end: int) -> Clip:
        return Clip(stored.source, stored.samples, stored.rate, begin, end)

    def kept(self, medium: Clip) -> Features:
        """Its features, of samples that are checked again: the file may have changed since its row was tokenized."""
        return self.read(medium, checks=self.rules.verify == "samples")

    def read(self, medium: Clip, checks: bool = False) -> Features:
        name = medium.source if isinstance(medium.source, str) else "a clip in the data"
        try:
            wave = load_clip(medium.source, medium.samples, medium.rate, self.rate, checks)
        except broken() as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise UserError(
                f"{name}: cannot be read: {reason}. Fix: restore it, or `finetune cache clean` and start again; "
                "`data.audio: {verify: samples}` finds broken clips before the run"
            ) from None
        return self.features_of(wave)

    def written_as(self, count: int) -> str:
        """Returns the text of a clip of so many tokens."""
        return self.token * count

    def count(self, length: int) -> int:
        """Returns the tokens of a clip of so many samples. Raises ValueError for a length that it cannot take."""
        raise NotImplementedError

    def features_of(self, wave: NDArray[np.float32]) -> Features:
        """Returns the extractor's output for a clip (samples,) at its rate."""
        raise NotImplementedError

    def join(self, features: Sequence[Features], input_ids: Tensor) -> dict[str, Tensor]:
        """The extractor's tensors of all clips, or pieces, (N, ...)."""
        if self.frames_axis is not None:
            features = _to_longest(features, self.frames_axis)
        return {name: torch.from_numpy(np.concatenate([of_clip[name] for of_clip in features])) for name in features[0]}


class Qwen2AudioClips(AudioFamily):
    fewest = 2  # tokens: transformers' forward takes single ones for those of an older processor

    def __init__(self, settings: FamilySettings):
        super().__init__(settings, ("<|audio_bos|>", "<|audio_eos|>"))

    def count(self, length: int) -> int:
        if length > self.extractor.n_samples:
            most = self.extractor.n_samples / self.rate
            raise ValueError(f"this model hears {most:g} s, and its processor drops the rest: cut the clip")
        frames = -(-length // self.extractor.hop_length)
        count = ((frames - 1) // 2 + 1 - 2) // 2 + 1
        if count < self.fewest:
            few = "no token" if self.fewest == 1 else f"fewer than {self.fewest} tokens"
            raise ValueError(f"too short: it would be {few}")
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
        self.tokens = voxtral_tokens(settings.config)
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
    frames_axis = -1  # of (1, bins, frames)

    def __init__(self, settings: FamilySettings):
        audio: Any = settings.config.audio_config
        self.window = 2 * audio.n_window  # frames that the convolutions see at a time
        super().__init__(settings, ("<|audio_start|>", "<|audio_end|>"), self.window)

    def count(self, length: int) -> int:
        frames = max(length, self.extractor.min_length) // self.extractor.hop_length
        whole, rest = divmod(frames, self.window)
        return whole * thrice_halved(self.window) + thrice_halved(rest)

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


class QwenOmniClips(Qwen2AudioClips):
    """Qwen2.5-Omni: as Qwen2-Audio, of up to 300 s and without what is behind a clip's end."""

    fewest = 1
    frames_axis = -1  # of (1, bins, frames)

    def features_of(self, wave: NDArray[np.float32]) -> Features:
        found = super().features_of(wave)
        frames = int(found["feature_attention_mask"].sum())
        return {name: values[..., :frames] for name, values in found.items()}


class Qwen3OmniClips(AudioFamily):
    frames_axis = -1  # of (1, bins, frames)

    def __init__(self, settings: FamilySettings):
        self.window = 2 * settings.config.audio_config.n_window
        super().__init__(settings, ("<|audio_start|>", "<|audio_end|>"), self.window)

    def count(self, length: int) -> int:
        whole, rest = divmod(length // self.extractor.hop_length, self.window)
        if not whole + rest:
            raise ValueError("too short: it would be no token")
        return whole * thrice_halved(self.window) + thrice_halved(rest)

    def features_of(self, wave: NDArray[np.float32]) -> Features:
        found = self.extractor(
            wave,
            sampling_rate=self.rate,
            padding=True,
            truncation=False,
            return_attention_mask=True,
            return_tensors="np",
        )
        return {
            "input_features": np.asarray(found["input_features"]),
            "feature_attention_mask": np.asarray(found["attention_mask"]),
        }


class Gemma4Clips(AudioFamily):
    """Gemma 4: marks around one token for four frames; frames end where the samples do."""

    frames_axis = 1  # of (1, frames, bins)

    def __init__(self, settings: FamilySettings):
        self.begin, self.end = _named_tokens(settings, "boa_token", "eoa_token")
        super().__init__(settings, (self.begin, self.end))
        self.most = 30 * self.rate  # samples that its extractor keeps

    def written_as(self, count: int) -> str:
        return f"{self.begin}{self.token * count}{self.end}"

    def count(self, length: int) -> int:
        if length > self.most:
            raise ValueError("this model hears 30 s, and its processor drops the rest: cut the clip")
        frames = self._frames(length)
        if frames < 1:
            raise ValueError("too short: it would be no token")
        return halved(frames, 2)

    def _frames(self, length: int) -> int:
        """Returns the frames of which all samples are the clip's, half a frame before it aside."""
        extractor = self.extractor
        return (length + extractor.frame_length // 2 - extractor.frame_length - 1) // extractor.hop_length + 1

    def features_of(self, wave: NDArray[np.float32]) -> Features:
        found = self.extractor([wave], return_tensors="np")  # it fails at an array alone
        return {name: np.asarray(found[name]) for name in ("input_features", "input_features_mask")}


class Gemma3nClips(AudioFamily):
    """Gemma 3n: as many tokens for every clip, the last of them without sound if it is shorter than 30 s."""

    frames_axis = 1  # of (1, frames, bins)

    def __init__(self, settings: FamilySettings):
        self.begin, self.end = _named_tokens(settings, "boa_token", "eoa_token")
        self.tokens = int(settings.processor.get("audio_seq_length", 188))
        super().__init__(settings, (self.begin, self.end), self.tokens)
        self.most = 30 * self.rate  # samples that its extractor keeps

    def written_as(self, count: int) -> str:
        return f"\n\n{self.begin}{self.token * count}{self.end}\n\n"

    def count(self, length: int) -> int:
        if length > self.most:
            raise ValueError("this model hears 30 s, and its processor drops the rest: cut the clip")
        if -(-length // _PADDED) * _PADDED <= self.extractor.frame_length:
            raise ValueError("too short: it has no frame")
        return self.tokens

    def features_of(self, wave: NDArray[np.float32]) -> Features:
        found = self.extractor(wave, return_tensors="np")
        return {name: np.asarray(found[name]) for name in ("input_features", "input_features_mask")}


_PADDED = 128  # samples: Gemma 3n's extractor pads to a multiple of it


class GraniteClips(AudioFamily):
    """Granite Speech: three tokens for fifteen pairs of frames that have begun. Its mask is of tokens."""

    frames_axis = 1  # of (1, pairs of frames, their 2 bins)

    def __init__(self, settings: FamilySettings):
        if getattr(settings.config, "has_lora_adapter", False):
            raise UserError(
                f"{settings.model.name}: it hears by a LoRA adapter beside its weights (has_lora_adapter). Fix: merge "
                "that into a copy of the model, and set `has_lora_adapter` to false in its config.json"
            )
        super().__init__(settings, ())

    def count(self, length: int) -> int:
        if length <= self.extractor.melspec_kwargs["n_fft"] // 2:
            raise ValueError("too short: it has no frame")
        window, rate = self.extractor.projector_window_size, self.extractor.projector_downsample_rate
        pairs = (length // self.extractor.melspec_kwargs["hop_length"] + 1) // 2
        return -(-pairs // window) * (window // rate)

    def features_of(self, wave: NDArray[np.float32]) -> Features:
        found = self.extractor(wave)
        return {name: np.asarray(found[name]) for name in ("input_features", "input_features_mask")}


class Phi4Clips(AudioFamily):
    """Phi-4: a token for eight frames, which begin as long as a whole one fits. Clips have a mask if there are several:
    silence is zero in all bins, too."""

    frames_axis = 1  # of (1, frames, bins)
    bytes_a_sample = 100  # 99 measured: windows that overlap, in fp64

    def __init__(self, settings: FamilySettings):
        self._check_merged(settings.model)
        super().__init__(settings)

    @staticmethod
    def _check_merged(model: Model) -> None:
        """Raises UserError if a model has its adapter for sound beside its weights: those alone were not trained to
        hear."""
        adapter = cached_file(
            str(model.name),
            "adapter_config.json",
            subfolder=_SPEECH,
            revision=model.revision or "main",
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if adapter is not None:
            raise UserError(
                f"{model.name}: it hears by a LoRA adapter beside its weights ({_SPEECH}). Fix: merge that into a copy "
                "of the model (docs/reference/audio.md has the lines for it), and name the copy"
            )

    def count(self, length: int) -> int:
        if length < self.extractor.win_length:
            raise ValueError("too short: it has no frame")
        return self._tokens((length - self.extractor.win_length) // self.extractor.hop_length + 1)

    def _tokens(self, frames: int) -> int:
        joined = -(-frames * self.extractor.audio_feat_stride // self.extractor.audio_compression_rate)
        return -(-joined // self.extractor.audio_downsample_rate)

    def features_of(self, wave: NDArray[np.float32]) -> Features:
        found = self.extractor(wave, sampling_rate=self.rate)
        return {"audio_input_features": np.asarray(found["audio_input_features"])}

    def join(self, features: Sequence[Features], input_ids: Tensor) -> dict[str, Tensor]:
        frames = torch.tensor([one["audio_input_features"].shape[1] for one in features])
        joined = super().join(features, input_ids)
        joined["audio_embed_sizes"] = torch.tensor([self._tokens(count) for count in frames.tolist()])
        if len(frames) > 1:
            joined["audio_attention_mask"] = torch.arange(int(frames.max())) < frames[:, None]
        return joined


_SPEECH = "speech-lora"  # folder of the published adapter


def _to_longest(features: Sequence[Features], axis: int) -> list[Features]:
    """Returns features (1, ...) and their masks (1, frames) with zeros up to the longest. axis: of frames."""
    names = {name: axis if values.ndim > 2 else 1 for name, values in features[0].items()}
    longest = {name: max(of_clip[name].shape[at] for of_clip in features) for name, at in names.items()}

    def padded(values: NDArray[Any], name: str) -> NDArray[Any]:
        widths = [(0, 0)] * values.ndim
        widths[names[name]] = (0, longest[name] - values.shape[names[name]])
        return np.pad(values, widths)

    return [{name: padded(values, name) for name, values in of_clip.items()} for of_clip in features]


def _named_tokens(settings: FamilySettings, *names: str) -> list[str]:
    """Returns the tokens of sound that a tokenizer names. Raises UserError."""
    tokenizer: Any = settings.tokenizer
    try:
        return [getattr(tokenizer, name) for name in names]
    except AttributeError as error:
        raise UserError(
            f"{settings.model.name}: its tokenizer does not name the tokens of sound ({error}). Fix: use the model's "
            "own tokenizer"
        ) from None
