"""Generation settings of a base that transformers reads but does not save: the rest is in the result, valid."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import train_alone
from transformers import GenerationConfig

from finetune.models.generation_config import valid_generation_config

VICUNA = {"temperature": 0.9, "top_p": 0.6, "max_length": 4096}


@pytest.mark.parametrize(
    ("settings", "left_out"),
    [
        (VICUNA, ["temperature", "top_p"]),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, []),  # Llama 3.1 Instruct
        ({"temperature": 1e-6, "repetition_penalty": 1.05}, ["temperature"]),  # Qwen2-VL
        ({"length_penalty": 2.0, "early_stopping": True}, ["length_penalty", "early_stopping"]),
        ({"num_beams": 4, "length_penalty": 2.0, "early_stopping": True}, []),
        ({}, []),
    ],
)
def test_settings_that_are_not_saved_are_left_out(
    settings: dict[str, Any], left_out: list[str], tmp_path: Path
) -> None:
    config, names = valid_generation_config(SimpleNamespace(generation_config=GenerationConfig(**settings)))
    assert sorted(names) == sorted(left_out)
    config.save_pretrained(tmp_path)
    read = GenerationConfig.from_pretrained(tmp_path)
    for name, value in settings.items():
        assert (getattr(read, name) == value) == (name not in left_out)


@pytest.mark.parametrize("mode", [(), ("mode=lora", "lora={rank: 4}")], ids=["full", "lora"])
def test_a_base_with_such_settings_trains(
    made: Path, recipe: dict[str, Any], write_recipe: Any, tmp_path: Path, mode: tuple[str, ...]
) -> None:
    base = Path(shutil.copytree(made / "llama", tmp_path / "vicuna"))
    (base / "generation_config.json").write_text(json.dumps(VICUNA), encoding="utf-8")
    said = train_alone(write_recipe(recipe), f"model.name={base}", "train.max_steps=1", *mode)
    assert "note: the result leaves out temperature, top_p of the base's generation_config.json" in said
    written = json.loads((tmp_path / "runs" / "run" / "model" / "generation_config.json").read_text(encoding="utf-8"))
    assert written["max_length"] == 4096
    assert "temperature" not in written
