"""Rollouts of prompts with images and with videos: samples and steps are those of plain transformers, one document at a
time, and the same on several processes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import filming
import pytest
import tiny
from conftest import train_here
from media_rollouts import Write, assert_as_plain_transformers, assert_processes_alike, recipe_on
from usual import usual

from finetune.errors import UserError
from finetune.features import load_recipe

CASES = [*(("image", name) for name in tiny.SEEING), *(("video", name) for name in filming.FILMING)]
HAS_AV = importlib.util.find_spec("av") is not None


@pytest.fixture(scope="module")
def eyes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seen-rollouts")
    for name in tiny.SEEING:
        tiny.save_seeing(folder, name)
    for name in filming.FILMING:
        filming.save_filming(folder, name)
    tiny.write_pictures(folder, "image", 12, seed=5)
    filming.write_films(folder, "video", 12, seed=5, listed=not HAS_AV)
    return folder


def recipe_of(folder: Path, kind: str, name: str, out: Path, **changes: Any) -> dict[str, Any]:
    base, rules = (f"{name}_sees", {}) if kind == "image" else (f"{name}_films", {"max_frames": 4})
    rows = folder / f"{kind}.jsonl"
    return recipe_on(folder / base, rows, {kind: rules}, out, max_length=256, tokens=256, **changes)


@pytest.mark.parametrize("case", usual(CASES, ("video", "qwen3_vl")), ids="-".join)
def test_samples_and_steps_are_those_of_plain_transformers(
    case: tuple[str, str], eyes: Path, write_recipe: Write, tmp_path: Path
) -> None:
    recipe = recipe_of(eyes, *case, tmp_path)
    recipe["train"]["max_steps"] = 2
    path = write_recipe(recipe)
    train_here(path)
    assert_as_plain_transformers(path, tmp_path / "runs" / "run")


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "kind", "name"),
    [
        ("ddp", "image", "smolvlm"),
        ("fsdp2", "image", "qwen2_5_vl"),
        ("ddp", "video", "qwen2_5_vl"),
        ("fsdp2", "video", "qwen3_vl"),
    ],
)
def test_processes_sample_the_same_tokens_and_train_on_them_alike(
    config: str, kind: str, name: str, eyes: Path, write_recipe: Write, tmp_path: Path
) -> None:
    """With older samples and a reference, whose log-probabilities are passes of their own; also from the record."""
    changes = {"objective": {"name": "grpo", "kl": 0.1}, "optimizer": {"lr": 3e-3}}
    recipe = recipe_of(eyes, kind, name, tmp_path, **changes)
    recipe["rollouts"]["reuse"] = 2
    assert_processes_alike(config, recipe, write_recipe)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"objective": {"name": "distill", "teacher": "teacher"}, "rewards": [], "evaluate": {}},
            "a teacher does not read the samples of prompts with files",
        ),
        ({"rollouts": {"environment": "game.py"}}, "its turns follow prompts of text alone"),
        ({"rollouts": {"engine": "vllm", "url": "http://localhost:8000"}}, "vllm gets the weights of models of text"),
    ],
)
def test_what_is_not_sampled_is_refused(
    changes: dict[str, Any], message: str, eyes: Path, write_recipe: Write, tmp_path: Path
) -> None:
    recipe = recipe_of(eyes, "video", "qwen3_vl", tmp_path)
    of_rollouts = {**recipe["rollouts"], **changes.get("rollouts", {})}
    with pytest.raises(UserError, match=message):
        load_recipe(write_recipe({**recipe, **changes, "rollouts": of_rollouts}))
