"""Rollouts of prompts with clips: samples and steps are those of plain transformers, one document at a time, and the
same on several processes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hearing
import numpy as np
import pytest
import torch
from conftest import launch, train_here
from test_rollouts import assert_same_curve, curve, evaluations, steps_of
from transformers import AutoModelForMultimodalLM

from finetune.data.dataset import build_training, on_disk
from finetune.data.examples import media_reader
from finetune.data.media.family_table import family_of
from finetune.errors import UserError
from finetune.features import load_recipe
from finetune.models.base_model import Base
from finetune.rl.rollouts.advantages import advantages
from finetune.rl.rollouts.prompts import RunPrompts
from finetune.rl.rollouts.records import Sample, read_record

pytest.importorskip("soundfile")
pytest.importorskip("soxr")

Write = Callable[..., Path]
PROMPTS, SAMPLES, RATE = 4, 4, 1.0
WHOLE = ["language", "projector", "tower"]
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
    """Answers with an `e` are rewarded, which a random model writes now and then."""
    clips = "single" if name in hearing.ALONE else "clips"
    rows = [{"path": str(folder / f"{clips}.jsonl"), "format": "messages"}]
    return {
        "run": {"name": "run", "dir": str(out / "runs"), "seed": 3},
        "model": {"name": str(folder / f"{name}_hears"), "train": WHOLE},
        "mode": "full",
        "data": {"train": rows, "eval": rows, "max_length": 128, "packing": False, "audio": {}},
        "objective": {"name": "grpo", "loss": "dapo"},
        "rollouts": {"prompts": PROMPTS, "samples": SAMPLES, "max_new_tokens": 6, "cohort": 4},
        "rewards": [{"name": "regex", "pattern": "e"}],
        "batch": {"rows": PROMPTS * SAMPLES, "tokens_per_device": 256},
        "optimizer": {"name": "sgd", "lr": RATE, "momentum": 0.0, "max_grad_norm": None},
        "schedule": {"name": "constant"},
        "train": {"max_steps": 4, "precision": "fp32"},
        "evaluate": {"every_steps": 2, "at_start": False, "prompts": 3, "samples": 2},
        **changes,
    }


class Plain:
    """Log-probabilities of samples by plain transformers, each document alone."""

    def __init__(self, recipe_file: Path):
        recipe = load_recipe(recipe_file)
        base = Base.of(recipe)
        self.prompts = RunPrompts(recipe, on_disk(build_training(recipe, base.renderer(recipe.objective)))).by_row
        self.reader: Any = media_reader(base.media)
        self.model: Any = AutoModelForMultimodalLM.from_pretrained(str(recipe.model.name))
        self.family = family_of(self.model.config, recipe.data.media_kinds)

    def trained(self) -> list[torch.nn.Parameter]:
        """What a run trains: not the projector of images of Gemma 3n, which embeds tokens as well."""
        unused = [path for row in self.family.each for path in row.unused]
        left = [f".{path}." for path in (*unused, *self.family.others)]
        return [one for name, one in self.model.named_parameters() if not any(path in name for path in left)]

    def log_probs(self, sample: Sample) -> torch.Tensor:  # (num_sampled,)
        prompt = self.prompts[sample.source, sample.path, sample.row]
        assert prompt.ids == sample.prompt
        ids = torch.tensor([sample.prompt + sample.ids])
        logits = self.model(ids, use_cache=False, **self.reader.plain_inputs(prompt.media, ids)).logits[0, :-1]
        return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[len(sample.prompt) - 1 :, 0]


def assert_as_plain_transformers(recipe_file: Path, run: Path) -> float:
    """Log-probabilities of samples are those of their documents, each alone, and losses those of a loop over them.
    Returns the most that a log-probability moved by the steps."""
    plain, objective = Plain(recipe_file), load_recipe(recipe_file).objective
    optimizer = torch.optim.SGD(plain.trained(), lr=RATE)
    initial, with_files, moved = Plain(recipe_file), 0, 0.0
    for step, loss in enumerate(curve(run), start=1):
        samples, _ = read_record(run / "rollouts", step) or ([], "")
        with_files += sum(bool(plain.prompts[one.source, one.path, one.row].media) for one in samples)
        log_probs = [plain.log_probs(sample) for sample in samples]
        for sample, ours in zip(samples, log_probs, strict=True):
            assert sample.log_probs == pytest.approx(ours.detach().numpy(), abs=2e-5), step
        moved = max(
            float((ours - initial.log_probs(one)).detach().abs().max())
            for one, ours in zip(samples, log_probs, strict=True)
        )
        rewards = np.array([sample.reward.total for sample in samples]).reshape(-1, SAMPLES)
        weights = advantages(rewards, objective).ravel()
        total = sum(-weight * one.sum() for weight, one in zip(weights.tolist(), log_probs, strict=True))
        mean = total / sum(map(len, log_probs))
        assert loss == pytest.approx(mean.item(), rel=5e-6, abs=1e-6)
        optimizer.zero_grad()
        mean.backward()
        optimizer.step()
    assert with_files > PROMPTS * SAMPLES
    return moved


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
    train_here(write_recipe(recipe))
    single = tmp_path / "runs" / "run"
    for label, more in {
        "sampled": {},
        "replayed": {
            "rollouts": {**recipe["rollouts"], "replay": str(single / "rollouts")},
            "rewards": [],
            "evaluate": {},
        },
    }.items():
        run = {**recipe["run"], "name": label}
        done = launch(config, 2, "train", write_recipe({**recipe, **more, "run": run}, f"{label}.yaml"))
        assert done.returncode == 0, done.stderr
        assert_same_curve(curve(single), curve(tmp_path / "runs" / label))
    records = [(read_record(tmp_path / "runs" / label / "rollouts", 3) or ([], ""))[0] for label in ("run", "sampled")]
    assert [one.ids for one in records[0]] == [one.ids for one in records[1]]
    assert evaluations(tmp_path / "runs" / "sampled") == evaluations(single)


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
