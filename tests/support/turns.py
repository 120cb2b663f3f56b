"""Environments of rollouts, and a recipe whose samples have several turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

STEPS, PROMPTS, SAMPLES = 4, 4, 4

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

BROKEN = """
import os, time


class Environment:
    def reset(self, row):
        self.turns = 0

    def step(self, text):
        self.turns += 1
        print("reading", text)
        action = len(text) % 4
        if action == 0:
            raise KeyError(f"no key in turn {self.turns}")
        if action == 1:
            os._exit(3)
        if action == 2:
            return 7
        return "go on"

    def reward(self):
        return self.turns
"""


def recipe_with_turns(made: Path, model: Path, runs: Path) -> dict[str, Any]:
    environment = {"file": str(model.parent / "env.py"), "max_turns": 3}
    data = {
        name: [{"path": str(made / file), "format": "messages"}]
        for name, file in (("train", "rows.jsonl"), ("eval", "held_out.jsonl"))
    }
    return {
        "run": {"name": "run", "dir": str(runs)},
        "model": {"name": str(model)},
        "mode": "full",
        "data": {**data, "packing": False, "max_length": 128},
        "objective": {"name": "grpo"},
        "rollouts": {"prompts": PROMPTS, "samples": SAMPLES, "max_new_tokens": 72, "cohort": 4, "temperature": 0.8}
        | {"environment": environment},
        "rewards": [{"name": "environment"}, {"name": "regex", "pattern": "[aeiou]"}],
        "batch": {"rows": PROMPTS * SAMPLES, "tokens_per_device": 256},
        "optimizer": {"lr": 1e-3},
        "train": {"max_steps": STEPS, "precision": "fp32"},
        "evaluate": {"every_steps": 4, "at_start": False, "prompts": 2},
        "checkpoint": {"every_steps": 2},
    }
