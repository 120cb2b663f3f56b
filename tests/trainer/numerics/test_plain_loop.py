"""A run of one process against a plain loop: transformers on each document alone, torch's AdamW, clipping, schedule."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from conftest import metrics, train_alone
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from finetune.data.examples import prepare_examples
from finetune.models.base_model import Base
from finetune.recipe import load_recipe

STEPS, LR, DECAY, LIMIT, WARMUP = 8, 3e-3, 0.1, 0.2, 3


def plain_loop(model: Any, steps: list[list[Any]]) -> list[tuple[float, float]]:
    """Trains in place; returns loss and norm of the gradient of each step. steps: examples."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    lines = []
    for i, examples in enumerate(steps):
        sequences = [example.sequences[0] for example in examples]
        count, total = sum(sequence.num_targets for sequence in sequences), 0.0
        for sequence in sequences:
            ids, mask = torch.from_numpy(sequence.input_ids).long(), torch.from_numpy(sequence.loss_mask)
            logits = model(input_ids=ids[None]).logits[0, :-1]
            loss = cross_entropy(logits[mask[1:]], ids[1:][mask[1:]], reduction="sum") / count
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT).item()
        progress = max(0, i - WARMUP) / (STEPS - WARMUP)
        factor = (i + 1) / (WARMUP + 1) if i < WARMUP else 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = LR * factor
        optimizer.step()
        optimizer.zero_grad()
        lines.append((total, norm))
    return lines


def test_a_run_is_a_plain_loop(recipe: dict[str, Any], write_recipe: Any, made: Path, tmp_path: Path) -> None:
    recipe["optimizer"] = {"lr": LR, "weight_decay": DECAY, "max_grad_norm": LIMIT}
    recipe.update(schedule={"warmup_steps": WARMUP}, tracking={"samples": True})
    recipe["train"]["max_steps"] = STEPS
    del recipe["data"]["eval"], recipe["evaluate"]
    path = write_recipe(recipe)
    train_alone(path)

    loaded = load_recipe(path)
    examples = prepare_examples(loaded, loaded.data.train, Base.of(loaded).renderer(loaded.objective))
    by_row = {f"{example.path}:{example.row}": example for example in examples}
    run = tmp_path / "runs" / "run"
    samples = [json.loads(line) for line in (run / "samples" / "rank-00000.jsonl").read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(made / "llama")
    expected = plain_loop(model, [[by_row[row] for row in line["rows"]] for line in samples])

    lines = [line for line in metrics(run) if "loss" in line]
    for line, (loss, norm) in zip(lines, expected, strict=True):
        assert math.isclose(line["loss"], loss, rel_tol=2e-6)
        assert math.isclose(line["grad_norm"], norm, rel_tol=2e-5)
        assert norm > LIMIT  # every step is clipped
    result = AutoModelForCausalLM.from_pretrained(run / "model").state_dict()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(result[name], weight, rtol=0, atol=1e-5)
