"""Optimizer state in DeepSpeed's swap files: trained from there, saved from there, restored to there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import parity
import pytest
import tiny
import yaml
from conftest import ROOT, launch

VOCABULARY = 8192  # groups of less than a megabyte are not swapped


@pytest.mark.long  # DeepSpeed first compiles for minutes
@pytest.mark.skipif(not Path("/usr/include/libaio.h").exists(), reason="DeepSpeed compiles against libaio-dev")
def test_state_on_nvme_resumes_bitwise(
    recipe: dict[str, Any], write_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe["model"]["name"] = str(tiny.save_model(tmp_path, "llama", vocab_size=VOCABULARY))
    recipe["checkpoint"] = {"every_steps": 3, "keep": 2}
    path, config, run = write_recipe(recipe), config_in(tmp_path), tmp_path / "runs" / "run"
    reference = launch("single", 1, "train", path, "run.name=single")
    assert reference.returncode == 0, reference.stderr
    done = launch(config, 2, "train", path)
    assert done.returncode == 0, done.stderr
    assert losses(run) == pytest.approx(losses(tmp_path / "runs" / "single"), rel=5e-6)
    swapped = {file.name.split("-")[0] for file in (tmp_path / "nvme").rglob("exp_avg*.tensor.swp")}
    assert swapped == {"exp_avg", "exp_avg_sq"}
    assert not (tmp_path / "none").exists(), "accelerate's own idea of the path"

    whole = shutil.move(run, tmp_path / "whole")
    shutil.copytree(whole / "checkpoints" / "step-00000003", run / "checkpoints" / "step-00000003")
    shutil.copy(whole / "metrics.jsonl", run)
    shutil.rmtree(tmp_path / "nvme")  # another machine
    done = launch(config, 2, "train", path)
    assert done.returncode == 0, done.stderr
    assert "step 3 of 6" in done.stdout
    assert losses(run) == losses(whole)
    assert parity.parameter_difference(run / "model", whole / "model") == 0


def config_in(folder: Path) -> Path:
    """The shipped config, with its swap files in `folder`."""
    values = yaml.safe_load((ROOT / "accelerate_configs" / "zero3_nvme.yaml").read_text(encoding="utf-8"))
    values["deepspeed_config"]["offload_optimizer_nvme_path"] = str(folder / "nvme")
    path = folder / "zero3_nvme.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line["loss"] for line in lines if "loss" in line]
