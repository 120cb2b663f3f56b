"""Rollouts of prompts with clips: samples and steps are those of plain transformers, one document at a time, and the
same on several processes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import hearing
import pytest
from conftest import train_here
from media_rollouts import Plain, Write, assert_as_plain_transformers, assert_processes_alike, recipe_on
from test_rollouts import steps_of

from finetune.errors import UserError

pytest.importorskip("soundfile")
pytest.importorskip("soxr")

# A random Gemma 4 is so badly conditioned that its log-probabilities differ by 4e-5 between two ways to add.
SAMPLING = [one for one in hearing.families("qwen2_audio") if one.values[0] != "gemma4"]


@pytest.fixture(scope="module")
def ears(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound-rollouts")
    for name in hearing.available():
        hearing.save_hearing(folder, name)
    hearing.write_clips(folder, "clips", 12, seed=5, numbers=(0, 1, 1, 2))
    hearing.write_clips(folder, "single", 12, seed=5, numbers=(0, 1, 1))
    return folder


def recipe_of(folder: Path, name: str, out: Path, **changes: Any) -> dict[str, Any]:
    rows = folder / ("single.jsonl" if name in hearing.ALONE else "clips.jsonl")
    return recipe_on(folder / f"{name}_hears", rows, {"audio": {}}, out, max_length=128, tokens=256, **changes)


@pytest.mark.parametrize("name", SAMPLING)
def test_samples_and_steps_are_those_of_plain_transformers(
    name: str, ears: Path, write_recipe: Write, tmp_path: Path
) -> None:
    recipe = recipe_of(ears, name, tmp_path)
    recipe["train"]["max_steps"] = 3
    path = write_recipe(recipe)
    train_here(path)
    # By the steps: without them the comparison would say little.
    assert assert_as_plain_transformers(path, tmp_path / "runs" / "run") > 0.1


@pytest.mark.long
@pytest.mark.parametrize(("config", "name"), [("ddp", "voxtral"), ("fsdp2", "qwen3_asr"), ("zero3", "qwen2_audio")])
def test_processes_sample_the_same_tokens_and_train_on_them_alike(
    config: str, name: str, ears: Path, write_recipe: Write, tmp_path: Path
) -> None:
    """With older samples and a reference, whose log-probabilities are passes of their own; also from the record."""
    changes = {"objective": {"name": "grpo", "kl": 0.1}, "optimizer": {"lr": 3e-3}}
    recipe = recipe_of(ears, name, tmp_path, **changes)
    recipe["rollouts"]["reuse"] = 2
    assert_processes_alike(config, recipe, write_recipe)


def test_rows_that_have_changed_are_no_replay(ears: Path, write_recipe: Write, tmp_path: Path) -> None:
    """Records hold ids; the clips are read from the rows."""
    recipe = recipe_of(ears, "qwen2_audio", tmp_path)
    recipe["train"]["max_steps"] = 1
    train_here(write_recipe(recipe))
    assert len(steps_of(tmp_path / "runs" / "run")) == 1
    (tmp_path / "other").mkdir()
    for place in ("qwen2_audio_hears", "clips"):
        shutil.copytree(ears / place, tmp_path / "other" / place)
    lines = (ears / "clips.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "other" / "clips.jsonl").write_text("".join(lines[1:] + lines[:1]))
    other = recipe_of(tmp_path / "other", "qwen2_audio", tmp_path)
    other |= {"run": {**recipe["run"], "name": "again"}, "rewards": [], "evaluate": {}, "train": recipe["train"]}
    other["rollouts"]["replay"] = str(tmp_path / "runs" / "run" / "rollouts")
    with pytest.raises(UserError, match=r"rollouts\.replay: .*clips\.jsonl:\d+ has another prompt now than its sample"):
        train_here(write_recipe(other, "again.yaml"))


def test_a_row_without_an_answer_is_the_same_prompt_with_its_clips(
    ears: Path, write_recipe: Write, tmp_path: Path
) -> None:
    prompts = []
    for name in ("clips", "asked"):
        lines = [json.loads(line) for line in (ears / "clips.jsonl").read_text().splitlines()]
        rows = [{"messages": row["messages"][: 2 if name == "clips" else 1]} for row in lines]
        (ears / f"{name}-rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        recipe = recipe_of(ears, "qwen2_audio", tmp_path)
        recipe["data"] |= {"train": [{"path": str(ears / f"{name}-rows.jsonl"), "format": "messages"}], "eval": []}
        recipe["evaluate"] = {}
        prompts.append(Plain(write_recipe(recipe, f"{name}.yaml")).prompts)
    ours, theirs = ([(prompt.ids, prompt.media) for prompt in of_rows.values()] for of_rows in prompts)
    assert ours == theirs
    assert sum(bool(media) for _, media in ours) > 4
