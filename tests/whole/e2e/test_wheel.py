"""The wheel, installed without the repository: its recipes and configs are found by name from any folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from conftest import ROOT

import finetune


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a shell in which the wheel, and not this clone, is what `finetune` means."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder, ROOT]
    subprocess.run(build, check=True)
    (wheel,) = folder.glob("*.whl")
    assert wheel.name.startswith(f"finetune_recipes-{finetune.__version__}-")
    assert wheel.stat().st_size < 2 * 2**20
    target = folder / "site-packages"
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", target, wheel], check=True)
    return {**os.environ, "PYTHONPATH": str(target), "TARGET": str(target)}


def started(installed: dict[str, str], folder: Path, *words: object) -> str:
    """What `python -m finetune WORDS` prints, started in a folder that is not the clone."""
    command = [sys.executable, "-m", "finetune", *map(str, words)]
    done = subprocess.run(command, env=installed, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def own_rows(folder: Path) -> None:
    tiny.save_model(folder, "llama")
    rows = [
        {"prompt": turns["messages"][0]["content"], "completion": turns["messages"][-1]["content"]}
        for turns in tiny.conversations(60)
    ]
    tiny.write_rows(folder / "rows.jsonl", rows)


def test_recipes_are_found_by_name_in_an_empty_folder(installed: dict[str, str], tmp_path: Path) -> None:
    """`new` reads the shipped bases, and `check` the package that was installed."""
    own_rows(tmp_path)
    program = "import sys, finetune, finetune.desk.cli; print(finetune.__file__); sys.exit(finetune.desk.cli.main())"
    command = [
        sys.executable,
        "-c",
        program,
        "new",
        "--data",
        "rows.jsonl",
        "--model",
        "llama",
        "--mode",
        "full",
        "--name",
        "own",
    ]
    done = subprocess.run(command, env=installed, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(installed["TARGET"])
    assert (tmp_path / "own.yaml").is_file()
    started(installed, tmp_path, "check", "recipes/llama3.1-8b/lora.yaml", "--recipe-only")
    words = "trl grpo --model_name_or_path llama --dataset_name rows.jsonl --max_steps 4"
    started(installed, tmp_path, "new", "--from", words, "--output", "theirs.yaml")
    assert "  name: grpo" in (tmp_path / "theirs.yaml").read_text()


@pytest.mark.long
def test_a_run_from_an_empty_folder(installed: dict[str, str], tmp_path: Path) -> None:
    assert "fsdp2" in started(installed, tmp_path, "plan", "recipes/llama3.1-8b/lora.yaml", "--on", "8xH100-80")
    rows = [sys.executable, "-m", "finetune.quickstart"]
    subprocess.run(rows, env=installed, cwd=tmp_path, check=True)
    short = ("train.max_steps=2", "schedule.warmup_steps=1", "evaluate.every_steps=2")
    said = started(installed, tmp_path, "launch", "recipes/quickstart/full.yaml", *short)
    assert "saved runs/quickstart-full/model" in said
    own_rows(tmp_path)
    started(installed, tmp_path, "new", "--data", "rows.jsonl", "--model", "llama", "--mode", "lora", "--name", "own")
    few = ("train.epochs=null", "train.max_steps=2", "schedule.warmup_ratio=null", "evaluate.every_steps=2")
    config = ("--config-file", "accelerate_configs/single.yaml")
    assert "saved runs/own/model" in started(installed, tmp_path, "launch", *config, "own.yaml", *few)
    started(installed, tmp_path, "export", "runs/own", "--to", "hf", "-o", "exported")
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["model_type"] == "llama"
