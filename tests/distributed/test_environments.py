"""Samples of several turns, which an environment answers: the same tokens on processes, never tokenized again, trained
if the model sampled them, and recorded as a whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from conftest import launch, metrics, train_here
from transformers import AutoModelForCausalLM

from finetune.errors import UserError
from finetune.models.tokenizer import read_tokenizer
from finetune.rollouts.environment import LOG
from finetune.rollouts.records import EVALUATION, STEP, Sample, read_record, record_file
from finetune.rollouts.step_rows import example_of

Write = Callable[..., Path]
STEPS, PROMPTS, SAMPLES = 4, 4, 4
REPLAYED = 5e-6  # of a loss

ECHO = """
import random


class Environment:
    def reset(self, row, messages, seed):
        self.lengths = []
        if seed % 2:
            return [*messages[:-1], {"role": "user", "content": f"task {random.randrange(100)}"}]

    def step(self, text):
        self.lengths.append(len(text))
        if sum(self.lengths) % 5 == 4:
            return None
        return f"{len(text)} letters, {random.randrange(10)}"

    def reward(self):
        return sum(self.lengths) % 7
"""


def talkative(folder: Path) -> Path:
    """Returns a model that ends a turn after about six tokens: the first dimension of all embeddings is large, and
    the head reads the end of a turn from it."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 0.1
        model.get_output_embeddings().weight[2, 0] = 1.0
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("talkative") / "llama"
    shutil.copytree(made / "llama", folder)
    return talkative(folder)


@pytest.fixture
def online(recipe: dict[str, Any], model: Path, tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "env.py").write_text(ECHO)
    recipe["data"] |= {"packing": False, "max_length": 128}
    recipe["model"]["name"] = str(model)
    return recipe | {
        "objective": {"name": "grpo"},
        "rollouts": {"prompts": PROMPTS, "samples": SAMPLES, "max_new_tokens": 48, "cohort": 4, "temperature": 0.8}
        | {"environment": {"file": str(tmp_path / "env.py"), "max_turns": 4}},
        "rewards": [{"name": "environment"}, {"name": "regex", "pattern": "[aeiou]"}],
        "batch": {"rows": PROMPTS * SAMPLES, "tokens_per_device": 256},
        "train": {"max_steps": STEPS, "precision": "fp32"},
        "evaluate": {"every_steps": 4, "at_start": False, "prompts": 2},
    }


def samples_of(run: Path, step: int, kind: str = STEP) -> list[Sample]:
    return (read_record(run / "rollouts", step, kind) or ([], ""))[0]


def lines_of(run: Path, step: int, kind: str = STEP) -> list[dict[str, Any]]:
    return [json.loads(line) for line in record_file(run / "rollouts", step, kind).read_text().splitlines()]


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(run) if "loss" in line]


def curve(run: Path) -> list[float]:
    return [line["loss"] for line in steps_of(run)]


def test_first(online, write_recipe, tmp_path):
    train_here(write_recipe(online))
    run = tmp_path / "runs" / "run"
    for line in metrics(run): print(line)
    for s in samples_of(run, 1): print(repr(s.text), s.turns, s.reward)
    assert 0
