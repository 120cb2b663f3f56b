"""The plan counts a video as its tower computes it: each two frames by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import filming
import pytest

from finetune.data.batch import collate
from finetune.data.dataset import build_training, on_disk
from finetune.data.examples import media_reader
from finetune.models.base_model import Base
from finetune.models.towers import patches_in, patches_of
from finetune.plan.images import most_images
from finetune.plan.lengths import Lengths, read_lengths


@pytest.mark.parametrize("name", filming.FILMING)
def test_a_tower_s_work_is_that_of_each_two_frames(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    filming.save_filming(tmp_path, name)
    for i, frames in enumerate((4, 7)):
        filming.write_frames(tmp_path / str(i), filming.noise(frames, 60, 90, i))
    parts: list[dict[str, str]] = [{"type": "video", "video": str(i)} for i in range(2)]
    asked = {"role": "user", "content": [*parts, {"type": "text", "text": "what"}]}
    row = {"messages": [asked, {"role": "assistant", "content": "red"}]}
    recipe = filming.recipe_of(tmp_path, name, [row], video={}, max_length=400)
    base = Base.of(recipe)
    reader: Any = media_reader(base.media)
    (example,) = on_disk(build_training(recipe, base.renderer(recipe.objective))).examples
    lengths = read_lengths(recipe)
    assert isinstance(lengths, Lengths)
    (images,) = lengths.rows(recipe, base.config).sample_images
    assert len(images) == {"qwen3_vl": 2 + 4, "qwen2_5_vl": 2 + 3}[name]
    inputs = collate([example], media_inputs=reader).inputs
    assert patches_of(base.config, [one.tokens for one in images], "video") == patches_in(base.config, inputs, "video")
    most = most_images(recipe.data, base.config)
    assert most
    assert sum(one.tokens for one in most) < 400
