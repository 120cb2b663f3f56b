"""Rollouts of prompts with files: a recipe, the samples and steps of plain transformers, and those of several ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import launch, train_here
from test_rollouts import assert_same_curve, curve, evaluations
from transformers import AutoModelForMultimodalLM

from finetune.data.dataset import build_training, on_disk
from finetune.data.examples import media_reader
from finetune.data.media.family_table import family_of
from finetune.features import load_recipe
from finetune.models.base_model import Base
from finetune.rl.rollouts.advantages import advantages
from finetune.rl.rollouts.prompts import RunPrompts
from finetune.rl.rollouts.records import Sample, read_record

Write = Callable[..., Path]
PROMPTS, SAMPLES, RATE = 4, 4, 1.0
WHOLE = ["language", "projector", "tower"]


def recipe_on(
    model: Path, rows: Path, files: dict[str, Any], out: Path, max_length: int, tokens: int, **changes: Any
) -> dict[str, Any]:
    """Answers with an `e` are rewarded, which a random model writes now and then. files: settings of the kinds of
    files; tokens: of a micro-batch."""
    source = [{"path": str(rows), "format": "messages"}]
    return {
        "run": {"name": "run", "dir": str(out / "runs"), "seed": 3},
        "model": {"name": str(model), "train": WHOLE},
        "mode": "full",
        "data": {"train": source, "eval": source, "max_length": max_length, "packing": False, **files},
        "objective": {"name": "grpo", "loss": "dapo"},
        "rollouts": {"prompts": PROMPTS, "samples": SAMPLES, "max_new_tokens": 6, "cohort": 4},
        "rewards": [{"name": "regex", "pattern": "e"}],
        "batch": {"rows": PROMPTS * SAMPLES, "tokens_per_device": tokens},
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


def assert_processes_alike(config: str, recipe: dict[str, Any], write_recipe: Write) -> None:
    """Two processes sample the same tokens as one, and train on them alike; also on those that the one recorded."""
    train_here(write_recipe(recipe))
    runs = Path(recipe["run"]["dir"])
    replay = {**recipe["rollouts"], "replay": str(runs / "run" / "rollouts")}
    for label, more in {"sampled": {}, "replayed": {"rollouts": replay, "rewards": [], "evaluate": {}}}.items():
        run = {**recipe["run"], "name": label}
        done = launch(config, 2, "train", write_recipe({**recipe, **more, "run": run}, f"{label}.yaml"))
        assert done.returncode == 0, done.stderr
        assert_same_curve(curve(runs / "run"), curve(runs / label))
    records = [(read_record(runs / label / "rollouts", 3) or ([], ""))[0] for label in ("run", "sampled")]
    assert [one.ids for one in records[0]] == [one.ids for one in records[1]]
    assert evaluations(runs / "sampled") == evaluations(runs / "run")
