"""The plan of samples counts the files of their prompts, as the tower computes them in each step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import filming
import pytest
import yaml

from finetune.features import load_recipe
from finetune.models.base_model import Base
from finetune.plan import command
from finetune.plan.command import PlanOptions
from finetune.plan.lengths import Lengths, read_lengths, widest


def test_samples_are_planned_with_the_videos_of_their_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A micro-batch of samples has the tower's work of as many prompts."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    filming.save_filming(tmp_path, "qwen3_vl")
    filming.write_films(tmp_path, "films", 4, numbers=(1, 2), listed=True)
    rows = [{"path": str(tmp_path / "films.jsonl"), "format": "messages"}]
    values: dict[str, Any] = {
        "run": {"name": "r", "dir": str(tmp_path)},
        "model": {"name": str(tmp_path / "qwen3_vl_films"), "train": ["language", "tower"]},
        "mode": "full",
        "data": {"train": rows, "max_length": 200, "packing": False, "video": {"max_frames": 4}},
        "batch": {"rows": 4, "tokens_per_device": 400},
        "optimizer": {"lr": 1e-3},
        "train": {"max_steps": 1, "precision": "fp32"},
    }
    online = {
        "objective": {"name": "grpo"},
        "rollouts": {"prompts": 2, "samples": 2, "max_new_tokens": 16},
        "rewards": [{"name": "regex", "pattern": "e"}],
    }
    facts = []
    for label, more in {"sft": {"evaluate": {"at_start": False}}, "grpo": online}.items():
        (tmp_path / f"{label}.yaml").write_text(yaml.safe_dump({**values, **more}), encoding="utf-8")
        recipe = load_recipe(tmp_path / f"{label}.yaml")
        lengths = read_lengths(recipe)
        assert isinstance(lengths, Lengths)
        facts.append(lengths.rows(recipe, Base.of(recipe).config))
    assert facts[0].images == facts[1].images
    assert facts[0].sample_images == facts[1].sample_images
    path = tmp_path / "grpo.yaml"
    assert command.plan(path, [], PlanOptions(("1xH100-80",)), load_recipe)[1][0].memory.phases["sampling"] > 0
    online_recipe = load_recipe(path)
    assert widest(online_recipe, "no tokenizer", Base.of(online_recipe).config).images
