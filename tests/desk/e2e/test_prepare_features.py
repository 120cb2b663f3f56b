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
    recipe["data"] = {"train": [{"path": str(rows)}], "max_length": 128, "audio": {"cache": True}}
    del recipe["evaluate"]
    for made in ("10 made in ", "none made, 10 from the cache"):
        done = finetune("prepare", write_recipe(recipe), "--json")
        assert done.returncode == 0, done.stderr
        (note,) = [note for note in json.loads(done.stdout)["notes"] if note.startswith("data.audio.cache")]
        assert note.startswith(f"data.audio.cache: 10 clips, 0.00 h of sound, {made}")
