"""Tiny models that hear, and rows with clips: tones whose names are the answer."""

from __future__ import annotations

import importlib.util
import inspect
import json
import random
import shutil
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tiny
from numpy.typing import NDArray
from transformers.audio_utils import load_audio

from finetune.data.media.family_table import FAMILIES, set_file_token

_EAR = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "num_mel_bins": 8}
_TEXT: dict[str, Any] = {**tiny.WIDE, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
_TOKENS = {"audio_token_id": 370}
_QWEN_EYE: dict[str, Any] = {
    "depth": 1,
    "num_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": 64,
}
_OMNI_TEXT: dict[str, Any] = {
    **_TEXT,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
}


def loaded(path: Path) -> NDArray[np.float32]:
    """Returns a clip as transformers reads it, at 16 kHz. Skips the test where that needs librosa, as in 5.17."""
    if '"soundfile"' not in inspect.getsource(load_audio):
        pytest.skip("this transformers does not read sound by soundfile")
    return load_audio(str(path), 16_000, backend="soundfile")


class Hearing(NamedTuple):
    config: dict[str, Any]
    tokens: tuple[str, ...]  # the one that the model fills comes first
    written: str  # by the chat template for a clip
    extractor: dict[str, Any]  # preprocessor_config.json
    roles: tuple[str, ...] = ("audio_token", "audio_bos_token", "audio_eos_token")  # of the tokens, in the tokenizer
    processor: dict[str, Any] = {}  # noqa: RUF012 (processor_config.json, which nobody changes)
    needs: tuple[str, ...] = ()  # packages without which transformers has no such model or extractor


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
    "gemma4": Hearing(
        {
            "model_type": "gemma4",
            "text_config": {
                **_TEXT,
                "model_type": "gemma4_text",
                "num_hidden_layers": 4,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "sliding_window": 8,
                "num_kv_shared_layers": 2,
                "global_head_dim": 32,
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": 384,
                "tie_word_embeddings": True,
                "final_logit_softcapping": 30.0,
                "pad_token_id": 0,
            },
            "vision_config": {
                "model_type": "gemma4_vision",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "position_embedding_size": 16,
            },
            "audio_config": {
                "model_type": "gemma4_audio",
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "subsampling_conv_channels": [8, 8],
                "attention_chunk_size": 4,
                "attention_context_left": 5,
                "output_proj_dims": 48,
            },
            "image_token_id": 380,
            "video_token_id": 381,
            "vision_start_token_id": 382,
            **_TOKENS,
        },
        ("<|audio|>", "<|audio>", "<audio|>"),
        "<|audio|>",
        {"feature_extractor_type": "Gemma4AudioFeatureExtractor", "feature_size": 8},
        ("audio_token", "boa_token", "eoa_token"),
    ),
    "gemma3n": Hearing(
        {
            "model_type": "gemma3n",
            "text_config": {
                **_TEXT,
                "model_type": "gemma3n_text",
                "num_hidden_layers": 4,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "sliding_window": 8,
                "num_kv_shared_layers": 2,
                "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": 352,
                "laurel_rank": 8,
                "pad_token_id": 0,
            },
            "vision_config": {
                "model_type": "gemma3n_vision",
                "architecture": "test_resnet",
                "hidden_size": 32,
                "vocab_size": 8,
                "vocab_offset": 352,
                "label_names": ["none"],
            },
            "audio_config": {
                "model_type": "gemma3n_audio",
                "vocab_size": 24,
                "vocab_offset": 360,
                "input_feat_size": 8,
                "hidden_size": 32,
                "sscp_conv_channel_size": [8, 8],
                "conf_num_attention_heads": 2,
                "conf_num_hidden_layers": 2,
                "conf_attention_chunk_size": 4,
                "conf_attention_context_left": 5,
            },
            "audio_soft_tokens_per_image": 7,
            "image_token_id": 353,
            **_TOKENS,
        },
        ("<audio_soft_token>", "<start_of_audio>", "<end_of_audio>"),
        "<audio_soft_token>",
        {"feature_extractor_type": "Gemma3nAudioFeatureExtractor", "feature_size": 8},
        ("audio_token", "boa_token", "eoa_token"),
        {"audio_seq_length": 7},
        ("timm",),
    ),
    "granite_speech": Hearing(
        {
            "model_type": "granite_speech",
            "text_config": {**_TEXT, "model_type": "granite", "tie_word_embeddings": True},
            "encoder_config": {
                "model_type": "granite_speech_encoder",
                "input_dim": 16,
                "num_layers": 2,
                "hidden_dim": 32,
                "num_heads": 2,
                "context_size": 20,
                "max_pos_emb": 32,
                "output_dim": 12,
            },
            "projector_config": {
                "model_type": "blip_2_qformer",
                "hidden_size": 32,
                "encoder_hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 64,
            },
            "has_lora_adapter": False,
            "tie_word_embeddings": True,
            "audio_token_index": 370,
        },
        ("<|audio|>",),
        "<|audio|>",
        {"feature_extractor_type": "GraniteSpeechFeatureExtractor", "n_mels": 8},
        ("audio_token",),
        {},
        ("torchaudio",),
    ),
    "phi4_multimodal": Hearing(
        {
            **{key: value for key, value in _TEXT.items() if key != "head_dim"},
            "model_type": "phi4_multimodal",
            "num_attention_heads": 4,
            "pad_token_id": 0,
            "eos_token_id": 2,
            "vision_config": {
                "model_type": "phi4_multimodal_vision",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 56,
                "crop_size": 56,
                "image_token_id": 380,
            },
            "audio_config": {
                "model_type": "phi4_multimodal_audio",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_blocks": 2,
                "num_attention_heads": 2,
                "ext_pw_out_channel": 32,
                "depthwise_separable_out_channel": 32,
                "nemo_conv_channels": 8,
                "input_size": 8,
                "bias_max_distance": 6,
                # Positions that see each other, and where they begin in training mode is drawn.
                "chunk_size": 3,
                "left_chunk": 1,
                "dropout_rate": 0.1,
                "audio_token_id": 370,
            },
        },
        ("<|audio|>",),
        "<|audio|>",
        {"feature_extractor_type": "Phi4MultimodalFeatureExtractor", "feature_size": 8},
        ("audio_token",),
    ),
    "qwen2_5_omni_thinker": Hearing(
        {
            "model_type": "qwen2_5_omni_thinker",
            "text_config": {**_OMNI_TEXT, "model_type": "qwen2_5_omni_text"},
            "vision_config": {"model_type": "qwen2_5_omni_vision_encoder", **_QWEN_EYE, "fullatt_block_indexes": [0]},
            "audio_config": {**_EAR, "model_type": "qwen2_5_omni_audio_encoder", "n_window": 8, "output_dim": 64},
            "image_token_index": 380,
            "video_token_index": 381,
            "vision_start_token_id": 382,  # as published: positions of a generation ask for it
            "audio_token_index": 370,
        },
        ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
        "<|audio_bos|><|AUDIO|><|audio_eos|>",
        {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 8, "chunk_length": 2},
    ),
    "qwen3_omni_moe_thinker": Hearing(
        {
            "model_type": "qwen3_omni_moe_thinker",
            "text_config": {
                **_OMNI_TEXT,
                "model_type": "qwen3_omni_moe_text",
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
            },
            "vision_config": {
                "model_type": "qwen3_omni_moe_vision_encoder",
                **_QWEN_EYE,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
            "audio_config": {
                **_EAR,
                "model_type": "qwen3_omni_moe_audio_encoder",
                "conv_chunksize": 1,  # its convolutions run once for each second of sound
                "n_window_infer": 200,
                "downsample_hidden_size": 8,
                "output_dim": 64,
            },
            "image_token_id": 380,
            "video_token_id": 381,
            "vision_start_token_id": 382,
            **_TOKENS,
        },
        ("<|audio_pad|>", "<|audio_start|>", "<|audio_end|>"),
        "<|audio_start|><|audio_pad|><|audio_end|>",
        {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 8, "chunk_length": 2},
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


def available() -> list[str]:
    """The names of `HEARING` whose packages are here."""
    return [name for name, row in HEARING.items() if all(importlib.util.find_spec(one) for one in row.needs)]


def families(*default: str) -> list[Any]:
    """The names of `HEARING`; skipped without their packages, and long but for the default ones, if any are given."""
    lacking = [name for name in HEARING if name not in available()]
    return [
        pytest.param(
            name,
            marks=[
                *[pytest.mark.skipif(True, reason=f"needs {', '.join(HEARING[name].needs)}")] * (name in lacking),
                *[pytest.mark.long] * bool(default and name not in default),
            ],
        )
        for name in HEARING
    ]


# A row has one clip at most; of the last, for its processor.
ALONE = ("gemma3n", "granite_speech", "phi4_multimodal", "qwen3_asr")


def save_hearing(folder: Path, name: str, **changes: Any) -> Path:
    """A model of `HEARING` with tokenizer, template and extractor, in `folder/<name>_hears`."""
    import torch
    from transformers import AutoConfig, AutoModelForMultimodalLM, PreTrainedTokenizerFast

    hearing, into = HEARING[name], folder / f"{name}_hears"
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tiny.tokenizer().backend_tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        extra_special_tokens=dict(zip(hearing.roles, hearing.tokens, strict=False)),
    )
    content = tiny.PARTS_OF_CONTENT.replace("'image'", "'audio'").replace("PLACEHOLDER", hearing.written)
    fast.chat_template = tiny.CHATML.replace("{{ m.content }}", content)
    config = AutoConfig.for_model(**{**hearing.config, **changes})
    token: Any = fast.convert_tokens_to_ids(hearing.tokens[0])
    set_file_token(config, FAMILIES[name], token)
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)  # nothing is zero or one
        for module in model.modules():  # Gemma 3n and 4: roundings would grow where attention is sharp
            if getattr(module, "scaling", None) == 1.0 and hasattr(module, "q_norm"):
                module.q_norm.weight.mul_(module.head_dim**-0.5)
    shutil.rmtree(into, ignore_errors=True)
    model.save_pretrained(into)
    fast.save_pretrained(into)
    (into / "preprocessor_config.json").write_text(json.dumps(hearing.extractor), encoding="utf-8")
    if hearing.processor:
        (into / "processor_config.json").write_text(json.dumps(hearing.processor), encoding="utf-8")
    return into


def save_talking(folder: Path, name: str) -> Path:
    """The files of a model that also talks, whose thinker is `folder/<name>_hears`, in `folder/<name>_talks`: its
    config within that of the whole, its tensors below `thinker.`."""
    import torch
    from safetensors.torch import load_file, save_file

    into = folder / f"{name}_talks"
    shutil.rmtree(into, ignore_errors=True)
    shutil.copytree(folder / f"{name}_hears", into)
    tensors = {f"thinker.{key}": value for key, value in load_file(into / "model.safetensors").items()}
    save_file({**tensors, "talker.norm.weight": torch.ones(4)}, into / "model.safetensors", {"format": "pt"})
    thinker = json.loads((into / "config.json").read_text())
    config = {"model_type": "qwen2_5_omni", "architectures": ["Qwen2_5OmniModel"], "thinker_config": thinker}
    (into / "config.json").write_text(json.dumps(config))
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
