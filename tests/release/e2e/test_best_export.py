"""The best weights of a sharded run are in its result and in an export of their checkpoint alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import parity
import yaml
from conftest import launch, metrics
from repository import ROOT
from rich.console import Console

from finetune.release.export.commands import ExportOptions, export_run


def test_weights_that_an_evaluation_left_whole_are_not_saved_as_the_best(
    recipe: dict[str, Any], write_recipe: Any, tmp_path: Path
) -> None:
    """Under ZeRO-3 a forward fetches weights ahead for its backward, which an evaluation does not have: some are whole
    then, or still under way. Here none is small enough to be kept always. The rate ruins the model, so that the last
    weights are not the best."""
    recipe |= {"optimizer": {"lr": 0.3}, "schedule": {"name": "constant"}}
    recipe["train"] |= {"max_steps": 4, "result": "best"}
    recipe["evaluate"] |= {"every_steps": 1}
    recipe["checkpoint"] = {"best": "eval_loss", "every_steps": 1, "keep": 1}
    sizes = {"param_persistence_threshold": 0, "max_reuse_distance": 0, "prefetch_bucket_size": 3000}
    stage = {"stage": 3, **{f"stage3_{name}": size for name, size in sizes.items()}}
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": stage}))
    config = yaml.safe_load((ROOT / "accelerate_configs" / "zero3.yaml").read_text())
    config["deepspeed_config"] = {"deepspeed_config_file": str(tmp_path / "zero.json"), "zero3_init_flag": True}
    (tmp_path / "zero3.yaml").write_text(yaml.safe_dump(config))
    done = launch(tmp_path / "zero3.yaml", 1, "train", write_recipe(recipe))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    run = tmp_path / "runs" / "run"
    losses = {line["step"]: line["eval_loss"] for line in metrics(run) if "eval_loss" in line}
    assert min(losses, key=lambda step: losses[step]) < 4
    export_run(run, ExportOptions(step="best", out=tmp_path / "best"), Console(quiet=True))
    assert parity.same_tensors(run / "model", tmp_path / "best")
