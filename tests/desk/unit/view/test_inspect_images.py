"""The page of `inspect` shows the images of a row."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import tiny
from PIL import Image

from finetune.data.examples import prepare_examples
from finetune.desk.view.inspect.page import tokens_of, with_pictures
from finetune.models.base_model import Base
from finetune.recipe import load_recipe


def test_a_page_has_each_image_of_a_row(recipe: dict[str, Any], write_recipe: Any, tmp_path: Path) -> None:
    Image.new("RGB", (60, 90), "red").save(tmp_path / "a.png")
    content = [{"type": "text", "text": "which "}, {"type": "image", "image": "a.png"}]
    answer = {"role": "assistant", "content": "red"}
    rows = tiny.write_rows(tmp_path / "rows.jsonl", [{"messages": [{"role": "user", "content": content}, answer]}])
    model = tiny.save_seeing(tmp_path, "qwen2_5_vl")
    recipe["model"] = {"name": str(model)}
    recipe["data"] = {"train": [{"path": str(rows), "format": "messages"}], "max_length": 512, "image": {}}
    del recipe["evaluate"]
    loaded = load_recipe(write_recipe(recipe))
    base = Base.of(loaded)
    (example,) = prepare_examples(loaded, loaded.data.train, base.renderer(loaded.objective))
    (sequence,) = example.sequences
    page = with_pictures(tokens_of(sequence, base.tokenizer), sequence)
    assert page.count("<img ") == 1
    assert "<|image_pad|>" not in page
    encoded = str(page).partition("base64,")[2].partition('"')[0]
    assert Image.open(io.BytesIO(base64.b64decode(encoded))).size == (60, 90)
