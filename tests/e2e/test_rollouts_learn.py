"""From right answers alone a small model learns what it half knows: to write four digits in reverse."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import metrics, run_script, train_here

SHAPE = {"model_type": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.06}
SHAPE |= {"tie_word_embeddings": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def write_rows(path: Path, numbers: list[str]) -> None:
    rows = [[{"role": "user", "content": n}, {"role": "assistant", "content": n[::-1]}] for n in numbers]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))


def exact_matches(run: Path) -> list[float]:
    return [line["exact_match"] for line in metrics(run) if "exact_match" in line]


@pytest.mark.long
def test_exact_match_rises_from_a_half_to_nearly_all(write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    run_script("make_quickstart.py", "--out", tmp_path / "made")
    numbers = [f"{i:04d}" for i in range(10_000)]
    random.Random(1).shuffle(numbers)
    write_rows(tmp_path / "train.jsonl", numbers[:8000])
    write_rows(tmp_path / "test.jsonl", numbers[8000:8200])
    recipe: dict[str, Any] = {
        "run": {"name": "taught", "dir": str(tmp_path)},
        "model": {"config": SHAPE, "tokenizer": str(tmp_path / "made" / "tokenizer")},
        "mode": "full",
        "data": {
            "train": [{"path": str(tmp_path / "train.jsonl"), "format": "messages"}],
            "eval": [{"path": str(tmp_path / "test.jsonl"), "format": "messages"}],
            "max_length": 32,
            "packing": False,
        },
        "batch": {"rows": 64, "rows_per_device": 64},
        "optimizer": {"lr": 3e-3},
        "schedule": {"name": "constant", "warmup_steps": 10},
        "train": {"max_steps": 50, "precision": "fp32"},
        "evaluate": {"exact_match": 200, "max_new_tokens": 8},
    }
    train_here(write_recipe(recipe))
    recipe |= {
        "run": {"name": "rewarded", "dir": str(tmp_path)},
        "model": {"name": str(tmp_path / "taught" / "model")},
        "objective": {"name": "grpo"},
        "rollouts": {"prompts": 32, "samples": 16, "max_new_tokens": 8, "cohort": 256},
        "rewards": [{"name": "exact_match"}],
        "batch": {"rows": 512, "rows_per_device": 256},
        "optimizer": {"lr": 1e-3},
        "schedule": {"name": "constant"},
    }
    train_here(write_recipe(recipe))
    before, after = exact_matches(tmp_path / "rewarded")
    assert before < 0.8
    assert after > 0.95
