"""The cache of videos: their scaled frames, from which come the features that the family computes."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import filming
import numpy as np
import pytest
import several
from rich.console import Console
from usual import usual

from finetune.data.dataset import build_training, on_disk
from finetune.data.examples import media_reader
from finetune.data.media.feature_cache import FeatureCache, make_features
from finetune.models.base_model import Base


def films(folder: Path, name: str) -> tuple[Any, list[Any]]:
    """A model, and the videos of rows: folders of pictures."""
    if name == "gemma4":
        several.save_gemma4(folder, "gemma4_films")
    else:
        filming.save_filming(folder, name)
    filming.write_films(folder, "films", 5, numbers=(1,), listed=True)
    recipe = several.recipe_of(folder, f"{name}_films", "films", ("video",), data={"video": {"cache": True}})
    base = Base.of(recipe)
    return base, list(on_disk(build_training(recipe, base.renderer(recipe.objective))).examples.media())


@pytest.mark.parametrize("name", usual((*filming.FILMING, "gemma4"), "qwen2_5_vl"))
def test_frames_are_kept_once_and_features_are_the_family_s(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    base, videos = films(tmp_path, name)
    family, said = base.media.family, Console(file=io.StringIO())
    cache = FeatureCache.of(family)
    made = make_features(cache, [*videos, *videos], said)
    assert (made.clips, made.made) == (5, 5)
    assert str(made).startswith("data.video.cache: 5 videos, ")
    assert "; 5 were missing, made in " in str(made)
    assert made.bytes < 0.4 * sum(values.nbytes for one in videos for values in family.read(one).values())
    assert make_features(cache, videos, said).made == 0
    reader, own = media_reader(base.media), [family.read(one) for one in videos]
    assert reader is not None
    with monkeypatch.context() as patch:
        patch.setattr(type(family), "frames", None)  # nothing is decoded again
        kept = [reader.read(one) for one in videos]
    for features, found in zip(own, kept, strict=True):
        assert features.keys() == found.keys()
        for key, values in features.items():
            assert np.array_equal(found[key], values)
            assert found[key].dtype == values.dtype


def test_a_changed_picture_is_another_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    base, (video, *_) = films(tmp_path, "qwen3_vl")
    cache = FeatureCache.of(base.media.family)
    before = cache.path(video)
    assert before == cache.path(video)
    os.utime(tmp_path / "films" / "0-0" / "1.png", ns=(1, 1))
    assert cache.path(video) != before
