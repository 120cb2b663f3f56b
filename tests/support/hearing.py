"""Tiny models that hear, and rows with clips: tones whose names are the answer."""

from __future__ import annotations

import json
import random
import shutil
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiny
from numpy.typing import NDArray

_EAR = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "num_mel_bins": 8}
_TEXT: dict[str, Any] = {**tiny.WIDE, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
_TOKENS = {"audio_token_id": 370}


class Hearing(NamedTuple):
    config: dict[str, Any]
    tokens: tuple[str, ...]  # the one that the model fills comes first
    written: str  # by the chat template for a clip
    extractor: dict[str, Any]  # preprocessor_config.json


HEARING: dict[str, Hearing] = {
    "qwen2_audio": Hearing(
        {
            "model_type": "qwen2_audio",
            "text_config": {**_TEXT, "model_type": "qwen2"},
            "audio_config": {**_EAR, "model_type": "qwen2_audio_encoder", "max_source_positions": 50},
            **_TOKENS,
        },
        ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
        "<|audio_bos|><|AUDIO|><|audio_eos|>",
        {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 8, "chunk_length": 1},
    ),
    "voxtral": Hearing(
        {
            "model_type": "voxtral",
            "text_config": {**_TEXT, "model_type": "llama"},
            # 48 positions of a piece, four of which are a token.
            "audio_config": {
                "model_type": "voxtral_encoder",
                "hidden_size": 32,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_mel_bins": 8,
                "max_source_positions": 48,
            },
            **_TOKENS,
        },
        ("[AUDIO]", "[BEGIN_AUDIO]"),
        "[BEGIN_AUDIO][AUDIO]",
        {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 8, "chunk_length": 1},
    ),
    "qwen3_asr": Hearing(
        {
            "model_type": "qwen3_asr",
            "text_config": {**_TEXT, "model_type": "qwen3", "tie_word_embeddings": True},
            "audio_config": {
                **_EAR,
                "model_type": "qwen3_asr_encoder",
                "n_window_infer": 200,
                "downsample_hidden_size": 8,
                "output_dim": 64,
            },
            "tie_word_embeddings": True,
            "pad_token_id": 0,
            "eos_token_id": 2,
            **_TOKENS,
        },
        ("<|audio_pad|>", "<|audio_start|>", "<|audio_end|>"),
        "<|audio_start|><|audio_pad|><|audio_end|>",
        {"feature_extractor_type": "Qwen3ASRFeatureExtractor", "feature_size": 8},
    ),
}


def save_hearing(folder: Path, name: str, **changes: Any) -> Path:
    """A model of `HEARING` with tokenizer, template and extractor, in `folder/<name>_hears`."""
    import torch
    from transformers import AutoConfig, AutoModelForMultimodalLM, PreTrainedTokenizerFast

    hearing, into = HEARING[name], folder / f"{name}_hears"
    roles = ("audio_token", "audio_bos_token", "audio_eos_token")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tiny.tokenizer().backend_tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        extra_special_tokens=dict(zip(roles, hearing.tokens, strict=False)),
    )
    content = tiny.PARTS_OF_CONTENT.replace("'image'", "'audio'").replace("PLACEHOLDER", hearing.written)
    fast.chat_template = tiny.CHATML.replace("{{ m.content }}", content)
    ids = {"audio_token_id": fast.convert_tokens_to_ids(hearing.tokens[0])}
    config = AutoConfig.for_model(**{**hearing.config, **ids, **changes})
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)  # nothing is zero or one
    shutil.rmtree(into, ignore_errors=True)
    model.save_pretrained(into)
    fast.save_pretrained(into)
    (into / "preprocessor_config.json").write_text(json.dumps(hearing.extractor), encoding="utf-8")
    return into


TONES = {"red": 220.0, "green": 440.0, "blue": 880.0}  # words of the tokenizer, and Hz


def tone(frequency: float, seconds: float, rate: int = 16_000, seed: int = 0) -> NDArray[np.float32]:
    """A tone with a little noise."""
    time = np.arange(round(seconds * rate)) / rate
    noise = np.random.default_rng(seed).normal(0, 0.02, len(time))
    return (0.4 * np.sin(2 * np.pi * frequency * time) + noise).astype(np.float32)


def write_wav(path: Path, samples: NDArray[np.float32], rate: int = 16_000) -> Path:
    """Writes (n,) or (n, channels) in 16 bits, by the standard library."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
    return path


def write_clips(
    folder: Path, name: str, count: int, seed: int = 0, numbers: Sequence[int] = (0, 1, 1, 2), longest: float = 0.9
) -> Path:
    """Rows `name.jsonl` with tones, whose names are the answer; without a clip, answers to a text. numbers: of clips,
    one of which is drawn for each row."""
    rng = random.Random(seed)
    (folder / name).mkdir(exist_ok=True)
    rows = []
    for i, row in enumerate(tiny.conversations(count, seed)):
        heard = [rng.choice(sorted(TONES)) for _ in range(rng.choice(numbers))]
        parts: list[dict[str, str]] = []
        for n, word in enumerate(heard):
            samples = tone(TONES[word], rng.uniform(0.2, longest), rate := rng.choice((8_000, 16_000, 22_050)), i)
            write_wav(folder / name / f"{i}-{n}.wav", samples, rate)
            parts.append({"type": "audio", "audio": f"{name}/{i}-{n}.wav"})
        question, answer = row["messages"]
        if heard:
            said = [*parts, {"type": "text", "text": question["content"]}]
            if rng.random() < 0.3:
                said = [said[-1], *parts]
            question = {"role": "user", "content": said}
            answer = {"role": "assistant", "content": " ".join(heard)}
        rows.append({"messages": [question, answer]})
    return tiny.write_rows(folder / f"{name}.jsonl", rows)
