"""Bases that stay as they are stored, sharded as bytes over ranks: the losses of one process, on which they are those
of the unpacked checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import stored
from conftest import launch, train_alone
from usual import usual

CASES = [
    ("fp8", "llama", "fsdp2"),
    ("fp8", "qwen3_moe", "fsdp2"),
    ("mxfp4", "gpt_oss", "fsdp2"),
    ("fp8", "qwen3_moe", "ep"),
    ("mxfp4", "gpt_oss", "ep"),
    ("nvfp4", "llama", "fsdp2"),
    ("w4a16", "llama", "ddp"),
    ("gptq", "llama", "zero2"),
    ("awq", "llama", "fsdp2"),
    ("fp8", "qwen3_moe", "fsdp2_offload"),
    ("fp8", "llama", "zero3"),
    ("fp8", "qwen3_moe", "zero3"),
    ("mxfp4", "gpt_oss", "zero3"),
    ("gptq", "llama", "zero3_offload"),
]


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize("case", usual(CASES, ("fp8", "qwen3_moe", "fsdp2")), ids="-".join)
@pytest.mark.parametrize("precision", usual(("fp32", "bf16"), "fp32"))
def test_losses_on_ranks_are_those_of_one_process(
    recipe: dict[str, Any], write_recipe: Any, made: Path, tmp_path: Path, case: tuple[str, str, str], precision: str
) -> None:
    kind, name, config = case
    folder, plain = stored.store(made / name, tmp_path, kind)
    recipe |= {"mode": "lora", "lora": {"rank": 4, "alpha": 8}, "optimizer": {"lr": 5e-3}}
    recipe["batch"] = {"rows": 4, "rows_per_device": 1}
    recipe["train"] |= {"max_steps": 4, "precision": precision}
    recipe["model"]["name"] = str(folder)
    path = write_recipe(recipe)
    train_alone(path, "run.name=single")
    train_alone(path, "run.name=unpacked", f"model.name={plain}")
    done = launch(config, 2, "train", path, "run.name=ranks")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    single, unpacked, ranks = (losses(tmp_path / "runs" / run) for run in ("single", "unpacked", "ranks"))
    assert len(single) == 4
    assert single == pytest.approx(unpacked, rel=5e-6 if precision == "fp32" else 1e-2)
    assert ranks == pytest.approx(single, rel=5e-6 if precision == "fp32" else 1e-2)
