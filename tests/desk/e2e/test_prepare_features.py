"""`prepare` of a recipe whose features of sound are kept: it makes them, and says how many."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hearing
import pytest
from conftest import finetune

pytest.importorskip("soundfile")
pytest.importorskip("soxr")


def test_prepare_makes_features_and_says_how_many(
    recipe: dict[str, Any], write_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    base, rows = hearing.save_hearing(tmp_path, "qwen2_audio"), hearing.write_clips(tmp_path, "clips", 10, numbers=(1,))
    recipe["model"] = {"name": str(base), "train": ["language"]}
    recipe["data"] = {"train": [{"path": str(rows)}], "max_length": 128}
    del recipe["evaluate"]
    # Of clips that are checked features are made at once.
    for verify, said in (("header", "10 were missing, made in "), ("header", "none was missing"), ("samples", "none")):
        recipe["data"]["audio"] = {"cache": True, "verify": verify}
        done = finetune("prepare", write_recipe(recipe), "--json")
        assert done.returncode == 0, done.stderr
        (note,) = [note for note in json.loads(done.stdout)["notes"] if note.startswith("data.audio.cache")]
        assert note.startswith("data.audio.cache: 10 clips, 0.00 h of sound, ")
        assert f"; {said}" in note
