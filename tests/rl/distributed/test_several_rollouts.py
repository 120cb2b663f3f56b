"""Rollouts of prompts with files of several kinds: samples and steps are those of plain transformers, one document at a
time, and the same on several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import filming
import pytest
import several
from conftest import train_here
from media_rollouts import Write, assert_as_plain_transformers, assert_processes_alike, recipe_on
from usual import usual

from finetune.errors import UserError
from finetune.features import load_recipe

CASES = {  # of a model: the kinds of files of a run
    "gemma4": ("image", "audio"),
    "gemma4_all": ("image", "audio", "video"),
    "gemma4_whole": ("image", "video"),
    "qwen3_vl_films": ("image", "video"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several-rollouts")
    several.save_gemma4(folder)
    several.save_gemma4(folder, "gemma4_whole", whole=True)
    filming.save_filming(folder, "qwen3_vl")
    for kinds in {*CASES.values()}:
        several.write_rows(folder, "_".join(kinds), 12, kinds, seed=5, numbers=(0, 1, 2, 2))
    return folder


def recipe_of(folder: Path, name: str, out: Path, **changes: Any) -> dict[str, Any]:
    kinds = CASES[name]
    rows, files = "_".join(kinds), {kind: {"max_frames": 2} if kind == "video" else {} for kind in kinds}
    model = folder / name.removesuffix("_all")
    return recipe_on(model, folder / f"{rows}.jsonl", files, out, max_length=600, tokens=600, **changes)


@pytest.mark.parametrize("name", usual(CASES, "gemma4"))
def test_samples_and_steps_are_those_of_plain_transformers(
    name: str, folder: Path, write_recipe: Write, tmp_path: Path
) -> None:
    recipe = recipe_of(folder, name, tmp_path)
    recipe["train"]["max_steps"] = 2
    path = write_recipe(recipe)
    train_here(path)
    assert_as_plain_transformers(path, tmp_path / "runs" / "run")


@pytest.mark.long
@pytest.mark.parametrize(("config", "name"), [("ddp", "gemma4"), ("fsdp2", "gemma4_all"), ("zero3", "qwen3_vl_films")])
def test_processes_sample_the_same_tokens_and_train_on_them_alike(
    config: str, name: str, folder: Path, write_recipe: Write, tmp_path: Path
) -> None:
    """With older samples and a reference, whose log-probabilities are passes of their own; also from the record."""
    changes = {"objective": {"name": "grpo", "kl": 0.1}, "optimizer": {"lr": 3e-3, "eps": 1e-6}}
    recipe = recipe_of(folder, name, tmp_path, **changes)
    recipe["rollouts"]["reuse"] = 2
    assert_processes_alike(config, recipe, write_recipe)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"objective": {"name": "distill", "teacher": "teacher"}, "rewards": [], "evaluate": {}},
            "the samples of prompts with files: use `grpo`, or remove `data.image` and `data.audio`",
        ),
        ({"rollouts": {"environment": "game.py"}}, "remove it, or `data.image` and `data.audio`"),
        (
            {"rollouts": {"engine": "vllm", "url": "http://localhost:8000"}},
            "use `own`, or remove `model.train`, `data.image`, `data.audio`",
        ),
    ],
)
def test_what_is_not_sampled_is_refused(
    changes: dict[str, Any], message: str, folder: Path, write_recipe: Write, tmp_path: Path
) -> None:
    """With all keys that would have to go."""
    recipe = recipe_of(folder, "gemma4", tmp_path)
    of_rollouts = {**recipe["rollouts"], **changes.get("rollouts", {})}
    with pytest.raises(UserError, match=message):
        load_recipe(write_recipe({**recipe, **changes, "rollouts": of_rollouts}))
