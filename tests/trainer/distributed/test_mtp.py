"""The head that predicts a token further ahead, on several processes: losses and results are those of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mtp_bases
import parity
import pytest
import torch
from conftest import launch, metrics, train_alone
from safetensors.torch import load_file
from torch import Tensor

LOSSES = ("loss", "mtp_loss", "eval_loss", "eval_mtp_loss", "eval_mtp_acceptance")
LORA = ("mode=lora", "lora={rank: 4, targets: all-linear}", "optimizer.lr=1e-3")
CASES = [  # config, base, overrides
    ("fsdp2", "deepseek_v3", ()),
    ("zero3", "deepseek_v3", ()),
    ("pp", "deepseek_v3", ()),
    ("tp", "glm4_moe", ()),
    ("ddp", "qwen3_next", ()),
    ("zero2", "glm4_moe", ()),
    ("cp", "deepseek_v3", ()),
    ("ulysses", "glm4_moe", ()),
    ("ep", "glm4_moe", ()),
    ("tp", "deepseek_v3", ()),
    ("tp", "qwen3_5_text", ()),
    ("tp", "qwen3_next", ()),
    ("pp", "qwen3_5_text", ("model.mtp_weight=1",)),
    ("fsdp2", "qwen3_5_moe_text", ("train.activation_checkpointing=true",)),
    ("fsdp2", "qwen3_next", ("train.activation_checkpointing=selective",)),
    ("fsdp2", "deepseek_v3", LORA),
    ("zero3", "qwen3_5_text", LORA),
    ("pp", "glm4_moe", LORA),
    ("tp", "glm4_moe", LORA),
]


def tensors(folder: Path) -> dict[str, Tensor]:
    return {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}


@pytest.mark.long  # the default tests have cells of tests/trainer/distributed/test_parity.py
@pytest.mark.parametrize("case", CASES)
def test_losses_and_results_are_those_of_one_process(
    case: tuple[str, str, tuple[str, ...]],
    recipe: dict[str, Any],
    write_recipe: Callable[..., Path],
    tmp_path: Path,
) -> None:
    config, name, overrides = case
    base = mtp_bases.save_base(tmp_path, name)
    batch = {"rows": 4, "rows_per_device": 1}
    path = write_recipe({**recipe, "model": {"name": str(base), "mtp": "train"}, "batch": batch})
    settings = ("optimizer.eps=1e-6", "evaluate.every_steps=3", "objective.router_aux_loss_coef=0", *overrides)
    train_alone(path, *settings, "run.name=one")
    done = launch(config, 2, "train", path, *settings, "run.name=two")
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (metrics(tmp_path / "runs" / run) for run in ("one", "two"))
    for ours, theirs in zip(two, one, strict=True):
        shown = [key for key in LOSSES if key in theirs]
        assert shown
        assert {key: ours[key] for key in shown} == pytest.approx(
            {key: theirs[key] for key in shown}, rel=parity.LOSS_RELATIVE, abs=1e-9
        )
    ours, theirs = (tensors(tmp_path / "runs" / run / "model") for run in ("two", "one"))
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        torch.testing.assert_close(
            ours[key], tensor, rtol=0, atol=parity.PARAMETER, msg=lambda text, k=key: f"{k}: {text}"
        )
