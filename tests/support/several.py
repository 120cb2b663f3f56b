"""Tiny models that take files of several kinds, and rows that mix them: what is shown or heard is the answer."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import filming
import hearing
import tiny
from PIL import Image

# Of the tokenizer of Gemma 4: (role, token).
GEMMA4_TOKENS = {
    "image_token": "<|image|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
    "video_token": "<|video|>",
}
GEMMA4_PROCESSORS: dict[str, Any] = {
    "image_processor": {"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 70},
    "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor", "feature_size": 8},
    "video_processor": {"video_processor_type": "Gemma4VideoProcessor", "num_frames": 3},
}
PARTS = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}IMAGE{% elif p.type == 'audio' %}AUDIO{% elif p.type == 'video' %}VIDEO"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
)


def template(image: str, audio: str, video: str) -> str:
    """A chat template that writes these for the parts of a message."""
    parts = PARTS.replace("IMAGE", image).replace("AUDIO", audio).replace("VIDEO", video)
    return tiny.CHATML.replace("{{ m.content }}", parts)


def gemma4_config(whole: bool = False, sound: bool = True) -> dict[str, Any]:
    """whole: tokens of an image see each other, as in the larger models, which have no sound."""
    config: dict[str, Any] = json.loads(json.dumps(hearing.HEARING["gemma4"].config))
    config["vision_config"] |= {"position_embedding_size": 256, "num_hidden_layers": 2}
    config["text_config"] |= {"max_position_embeddings": 4096}
    if whole:
        config["text_config"]["use_bidirectional_attention"] = "vision"
    if not sound:
        config["audio_config"] = None
    return config


def save_gemma4(folder: Path, name: str = "gemma4", **changes: Any) -> Path:
    """A Gemma 4 with tokenizer, template and processors, in `folder/<name>`. changes: see `gemma4_config`."""
    import torch
    from transformers import AutoConfig, AutoModelForMultimodalLM, PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tiny.tokenizer().backend_tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        extra_special_tokens=GEMMA4_TOKENS,
    )
    fast.chat_template = template(*(GEMMA4_TOKENS[f"{kind}_token"] for kind in ("image", "audio", "video")))
    ids = {f"{kind}_token_id": fast.convert_tokens_to_ids(f"<|{kind}|>") for kind in ("image", "audio", "video")}
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(AutoConfig.for_model(**{**gemma4_config(**changes), **ids}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)  # nothing is zero or one
        for module in model.modules():  # roundings would grow where attention is sharp
            if getattr(module, "scaling", None) == 1.0 and hasattr(module, "q_norm"):
                module.q_norm.weight.mul_(module.head_dim**-0.5)
    shutil.rmtree(into := folder / name, ignore_errors=True)
    model.save_pretrained(into)
    fast.save_pretrained(into)
    (into / "processor_config.json").write_text(json.dumps(GEMMA4_PROCESSORS), encoding="utf-8")
    return into


def write_rows(
    folder: Path, name: str, count: int, kinds: Sequence[str], seed: int = 0, numbers: Sequence[int] = (0, 1, 1, 2, 3)
) -> Path:
    """Rows `name.jsonl` with files of these kinds among their words: first, last, several, one or none. numbers: of
    files, one of which is drawn for each row."""
    rng = random.Random(seed)
    (folder / name).mkdir(exist_ok=True)
    rows = []
    for i, row in enumerate(tiny.conversations(count, seed)):
        parts, words = [], []
        for n in range(rng.choice(numbers)):
            kind, word = rng.choice(list(kinds)), rng.choice(sorted(filming.COLOURS))
            parts.append({"type": kind, kind: write_file(folder, f"{name}/{i}-{n}", kind, word, rng)})
            words.append(word)
        question, answer = row["messages"]
        said: list[dict[str, str]] = [*parts]
        said.insert(rng.randint(0, len(said)), {"type": "text", "text": question["content"]})
        if rng.random() < 0.5:
            said.append({"type": "text", "text": "\nand so on"})
        if words:
            question, answer = {"role": "user", "content": said}, {"role": "assistant", "content": " ".join(words)}
        rows.append({"messages": [question, answer]})
    return tiny.write_rows(folder / f"{name}.jsonl", rows)


def write_file(folder: Path, name: str, kind: str, word: str, rng: random.Random) -> str:
    """Writes a file of a kind, and returns its path from the folder."""
    if kind == "audio":
        rate = rng.choice((8_000, 16_000, 22_050))
        samples = hearing.tone(hearing.TONES[word], rng.uniform(0.2, 0.9), rate, rng.randrange(1000))
        hearing.write_wav(folder / f"{name}.wav", samples, rate)
        return f"{name}.wav"
    height, width = rng.randint(28, 100), rng.randint(28, 100)
    if kind == "video":
        filming.write_frames(folder / name, filming.square(word, rng.randint(2, 6), height, width, rng))
        return name
    Image.fromarray(filming.square(word, 1, height, width, rng)[0]).save(folder / f"{name}.png")
    return f"{name}.png"


def recipe_of(folder: Path, model: str, rows: str, kinds: Sequence[str], **changes: Any) -> Any:
    """The recipe of a run of a model on `rows.jsonl`, both in `folder`."""
    from finetune.recipe import Recipe

    files: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
    if "video" in files:
        files["video"] = {"frame_rate": filming.RATE}
    data = {"train": [{"path": str(folder / f"{rows}.jsonl"), "format": "messages"}], "max_length": 100_000, **files}
    return Recipe.model_validate(
        {
            "run": {"name": "r", "dir": str(folder / "runs")},
            "model": {"name": str(folder / model), "train": ["language", "projector", "tower"]},
            "mode": "full",
            "train": {"max_steps": 1, "precision": "fp32"},
            "batch": {"rows": 1},
            "optimizer": {"lr": 1e-3},
            **changes,
            "data": {**data, **changes.get("data", {})},
        }
    )
