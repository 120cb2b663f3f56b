"""A student that is taught on its own samples."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import train_here
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.errors import UserError
from finetune.features import load_recipe
from finetune.training.run import compute_reference
from finetune.training.signals import StopRequest
from finetune.utils import common_prefix_length


@pytest.mark.long
def test_a_student_learns_more_from_its_own_samples_than_from_other_answers(
    made: Path, recipe: dict[str, Any], write_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: Any
) -> None:
    """As many steps on as many answers: of the student, and at random. What to learn is known, the teacher's likeliest
    tokens; what follows them depends on all of them, and random answers hardly ever have the first two."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    teacher = tiny.save_teacher(made / "qwen3", tmp_path)
    rng, tokens, words = random.Random(0), 8, ("river", "stone", "light", "cloud", "paper", "green", "seven", "house")
    prompts = [" ".join(rng.sample(words, 3)) for _ in range(8)]
    rows = [{"prompt": one, "completion": " ".join(rng.choices(words, k=3))} for one in prompts for _ in range(16)]
    tiny.write_rows(tmp_path / "rows.jsonl", rows)
    del recipe["evaluate"]
    recipe["data"] = {"train": str(tmp_path / "rows.jsonl"), "max_length": 64, "packing": False}
    recipe |= {
        "objective": {"name": "distill", "teacher": str(teacher), "divergence": "reverse_kl", "top_k": 16},
        "batch": {"rows": 32, "tokens_per_device": 2048},
        "optimizer": {"lr": 3e-3},
        "train": {"max_steps": 120, "precision": "fp32"},
    }
    rollouts = {"prompts": 8, "samples": 4, "max_new_tokens": tokens}
    tokenizer = AutoTokenizer.from_pretrained(teacher)

    def likeliest(model: Path) -> list[list[int]]:
        one, answers = AutoModelForCausalLM.from_pretrained(model), []
        for prompt in prompts:
            chat = [{"role": "user", "content": prompt}]
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            generated = one.generate(torch.tensor([ids]), max_new_tokens=tokens, do_sample=False, eos_token_id=None)
            answers.append(generated[0, len(ids) :].tolist())
        return answers

    quiet = Console(quiet=True)
    known, right = likeliest(teacher), {}
    for name, changes in (("off_policy", {}), ("on_policy", {"rollouts": rollouts})):
        recipe["run"]["name"] = name
        path = write_recipe({**recipe, **changes}, f"{name}.yaml")
        if changes:
            with pytest.raises(UserError, match=r"nothing to compute\. The teacher predicts on the samples"):
                compute_reference(load_recipe(path), str(path), StopRequest(), quiet)
        else:
            compute_reference(load_recipe(path), str(path), StopRequest(), quiet)
        train_here(path)
        answers = likeliest(tmp_path / "runs" / name / "model")
        right[name] = sum(common_prefix_length(*pair) for pair in zip(answers, known, strict=True)) / (8 * tokens)
    assert right["on_policy"] > 0.4
    assert right["on_policy"] > 1.5 * right["off_policy"]
