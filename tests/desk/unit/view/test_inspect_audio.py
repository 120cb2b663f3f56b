"""The page of `inspect` plays the clips of a row."""

from __future__ import annotations

import base64
import io
import wave
from pathlib import Path
from typing import Any

import hearing
import pytest
import tiny

from finetune.data.examples import prepare_examples
from finetune.desk.view.inspect.page import tokens_of, with_pictures
from finetune.models.base_model import Base
from finetune.recipe import load_recipe

pytest.importorskip("soundfile")
pytest.importorskip("soxr")


def test_a_page_plays_each_clip_of_a_row(recipe: dict[str, Any], write_recipe: Any, tmp_path: Path) -> None:
    clip = hearing.write_wav(tmp_path / "a.wav", hearing.tone(300, 0.5, 8_000), 8_000)
    row = {"audio": "a.wav", "prompt": "which", "text": "red"}
    rows = tiny.write_rows(tmp_path / "rows.jsonl", [row])
    recipe["model"] = {"name": str(hearing.save_hearing(tmp_path, "qwen2_audio"))}
    recipe["data"] = {"train": [{"path": str(rows), "format": "speech"}], "max_length": 512, "audio": {}}
    del recipe["evaluate"]
    loaded = load_recipe(write_recipe(recipe))
    base = Base.of(loaded)
    (example,) = prepare_examples(loaded, loaded.data.train, base.renderer(loaded.objective))
    (sequence,) = example.sequences
    page = str(with_pictures(tokens_of(sequence, base.tokenizer), sequence))
    assert page.count("<audio ") == 1
    assert "<|AUDIO|>" not in page
    assert "a.wav, 0.50 s at 8,000 Hz, 12 tokens" in page
    with wave.open(io.BytesIO(base64.b64decode(page.partition("base64,")[2].partition('"')[0]))) as played:
        assert (played.getframerate(), played.getnframes()) == (16_000, 8_000)
    clip.unlink()
    assert "No such file" in str(with_pictures(tokens_of(sequence, base.tokenizer), sequence))
