"""Clips, rows and an untrained model of the quickstart's stage with sound: name the tone and the rhythm.

    python scripts/make_tones.py                 # into runs/quickstart-tones
    python scripts/make_tones.py --out DIR

    DIR/train.parquet                            clips in the rows, as `datasets` writes them
    DIR/test.jsonl  DIR/clips/                   clips as files, none of which is in train
    DIR/model/                                   Qwen2-Audio's classes at 0.26 M parameters, random weights; tokenizer

Every run writes the same rows.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from make_shapes import chat_tokenizer
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForMultimodalLM, PreTrainedTokenizerFast, set_seed
from transformers.models.whisper.modeling_whisper import sinusoids

SEED = 2021
RATE = 8_000  # samples a second; the model hears 16,000, so that every clip is resampled
SECONDS = 1  # at most; what the model hears
NUM_TRAIN, NUM_TEST = 4000, 200
VOCAB_SIZE = 320
TONES = dict(  # Hz, equal temperament from C5: https://en.wikipedia.org/wiki/Equal_temperament
    zip(
        ("do", "re", "mi", "fa", "sol", "la", "ti", "high do"),
        (523.25 * 2 ** (step / 12) for step in (0, 2, 4, 5, 7, 9, 11, 12)),
        strict=True,
    )
)
RHYTHMS = {  # lengths of the beats; the shorter part of each is silence
    "once": (4,),
    "twice": (2, 2),
    "waltz": (2, 1, 1),
    "gallop": (1, 1, 2),
}
QUESTIONS = ("which tone and rhythm?", "what is this?", "name the tone and the rhythm")
TOKENS = {"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"}


def play(tone: str, rhythm: str, rng: random.Random) -> NDArray[np.float32]:
    """A tone of any loudness and colour in its rhythm, begun at any time, with noise."""
    length = round(rng.uniform(0.7, 0.9) * SECONDS * RATE)  # of all beats
    beats, lead = RHYTHMS[rhythm], round(rng.uniform(0.0, 0.1) * SECONDS * RATE)
    time = np.arange(length) / RATE
    pitch = 2 * np.pi * TONES[tone] * rng.uniform(0.99, 1.01) * time + rng.uniform(0, 6.28)
    sound = np.sin(pitch) + rng.uniform(0, 0.6) * np.sin(2 * pitch) + rng.uniform(0, 0.4) * np.sin(3 * pitch)
    strength, begin = np.zeros(length), 0.0
    for beat in beats:
        end = begin + beat * length / sum(beats)
        strength[round(begin) : round(begin + 0.75 * (end - begin))] = 1.0
        begin = end
    noise = np.random.default_rng(rng.randrange(2**32)).normal(0, rng.uniform(0.002, 0.02), lead + length)
    noise[lead:] += rng.uniform(0.1, 0.4) * sound * strength
    return noise.astype(np.float32)


def wav(samples: NDArray[np.float32]) -> bytes:
    """The content of a WAV file of 16 bits."""
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
    return content.getvalue()


def rows(count: int, rng: random.Random) -> list[tuple[bytes, str, str]]:
    """(clip, question, answer), all answers equally often."""
    pairs = [(tone, rhythm) for tone in TONES for rhythm in RHYTHMS]
    wanted = [pairs[i % len(pairs)] for i in range(count)]
    rng.shuffle(wanted)
    return [(wav(play(tone, rhythm, rng)), rng.choice(QUESTIONS), f"{tone} {rhythm}") for tone, rhythm in wanted]


def messages(question: str, answer: str, **where: str) -> list[dict[str, Any]]:
    said = [{"type": "audio", **where}, {"type": "text", "text": question}]
    return [{"role": "user", "content": said}, {"role": "assistant", "content": [{"type": "text", "text": answer}]}]


def write_rows(out: Path) -> None:
    rng = random.Random(SEED)
    test, train = rows(NUM_TEST, rng), rows(NUM_TRAIN, rng)
    (out / "clips").mkdir(parents=True, exist_ok=True)
    with (out / "test.jsonl").open("w", encoding="utf-8") as file:
        for i, (clip, question, answer) in enumerate(test):
            (out / "clips" / f"{i:03}.wav").write_bytes(clip)
            file.write(json.dumps({"messages": messages(question, answer, audio=f"clips/{i:03}.wav")}) + "\n")
    table = {
        "messages": [messages(question, answer) for _, question, answer in train],
        "audios": [[{"bytes": clip, "path": None}] for clip, _, _ in train],
    }
    pyarrow.parquet.write_table(pyarrow.table(table), out / "train.parquet")


def write_model(folder: Path, fast: PreTrainedTokenizerFast) -> None:
    """Qwen2-Audio (https://arxiv.org/abs/2407.10759) with every size reduced; it hears one second, as 25 tokens."""
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    text = {"model_type": "qwen2", "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 192} | ids
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "initializer_range": 0.06}
    text |= {"max_position_embeddings": 128, "tie_word_embeddings": False}
    audio = {"model_type": "qwen2_audio_encoder", "d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4}
    audio |= {"encoder_ffn_dim": 192, "num_mel_bins": 64, "initializer_range": 0.06}
    audio |= {"max_source_positions": 50 * SECONDS}
    set_seed(SEED)
    token = fast.convert_tokens_to_ids(TOKENS["audio_token"])
    config = AutoConfig.for_model("qwen2_audio", text_config=text, audio_config=audio, audio_token_id=token, **ids)
    model: Any = AutoModelForMultimodalLM.from_config(config)
    # The tower's positions are never trained: Whisper's (https://arxiv.org/abs/2212.04356, 2.2), as in the real model.
    positions = model.model.audio_tower.embed_positions.weight
    positions.data.copy_(sinusoids(*positions.shape))
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    settings = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 64, "chunk_length": SECONDS}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make clips, rows and model of the quickstart's stage with sound.")
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart-tones"), help="default: %(default)s")
    out = parser.parse_args().out
    write_rows(out)
    answers = [f"{tone} {rhythm}" for tone in TONES for rhythm in RHYTHMS]
    written = "".join(TOKENS[f"audio_{mark}token"] for mark in ("bos_", "", "eos_"))
    write_model(out / "model", chat_tokenizer([*QUESTIONS, *answers], TOKENS, "audio", written))
    print(f"{out}: {NUM_TRAIN} rows to train on, {NUM_TEST} held out; a model of random weights")


if __name__ == "__main__":
    main()
