"""The page of `inspect` shows frames of the videos of a row at their tokens."""

from __future__ import annotations

import base64
import io
import shutil
from pathlib import Path
from typing import Any

import filming
import numpy as np
import tiny
from PIL import Image

from finetune.data.examples import prepare_examples
from finetune.desk.view.inspect.page import tokens_of, with_pictures
from finetune.models.base_model import Base
from finetune.recipe import load_recipe


def test_a_page_has_frames_of_each_video(recipe: dict[str, Any], write_recipe: Any, tmp_path: Path) -> None:
    film = np.stack([np.full((60, 80, 3), 20 * i, np.uint8) for i in range(12)])
    filming.write_frames(tmp_path / "film", film)
    content = [{"type": "text", "text": "which "}, {"type": "video", "video": "film"}]
    answer = {"role": "assistant", "content": "red"}
    rows = tiny.write_rows(tmp_path / "rows.jsonl", [{"messages": [{"role": "user", "content": content}, answer]}])
    recipe["model"] = {"name": str(filming.save_filming(tmp_path, "qwen3_vl"))}
    video = {"max_frames": 3, "frame_rate": 4}
    recipe["data"] = {"train": [{"path": str(rows), "format": "messages"}], "max_length": 512, "video": video}
    del recipe["evaluate"]
    loaded = load_recipe(write_recipe(recipe))
    base = Base.of(loaded)
    (example,) = prepare_examples(loaded, loaded.data.train, base.renderer(loaded.objective))
    (sequence,) = example.sequences
    page = str(with_pictures(tokens_of(sequence, base.tokenizer), sequence, base.media))
    assert page.count("<img ") == 1
    assert "<|video_pad|>" not in page
    assert "seconds" not in page  # the times are part of the video
    assert "film/0.png and more, 3.00 s of 80 x 60 pixels, 3 of 12 frames, " in page
    encoded = page.partition("base64,")[2].partition('"')[0]
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded))))
    assert shown.shape == (60, 3 * 88 - 8, 3)
    assert shown[30, 40::88, 0].tolist() == [0, 120, 220]  # the first, the sixth (5.5 to an even one) and the last
    shutil.rmtree(tmp_path / "film")
    assert "No such file" in str(with_pictures(tokens_of(sequence, base.tokenizer), sequence, base.media))
