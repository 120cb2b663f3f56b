"""Cells of `test_fake_cuda.py`, each in a fork of this process: RECIPE FOLDER, and on standard input a JSON object of
[config, processes, rank, key=value ...] by name. FOLDER gets NAME.json of each, and NAME.log with its output.

Forks, because imports take longer than a cell; not those of tests/forks.py, where DeepSpeed has already seen that there
is no CUDA.
"""

from __future__ import annotations

import io
import json
import os
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import peft  # noqa: F401  (for the forks)
from rich.console import Console

from finetune.data.building import OpenedSources
from finetune.data.dataset import build_training
from finetune.engine.base import Engine
from finetune.engine.compatibility import check_launch
from finetune.engine.launch import read_config_file
from finetune.errors import UserError
from finetune.models.config import load_tokenizer, training_config
from finetune.planning.fake_run import fake_run
from finetune.recipe import load_recipe
from finetune.training.run import build_trainer
from finetune.training.signals import StopRequest
from finetune.training.trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent.parent


def measure(recipe_file: str, where: str, processes: int, rank: int, *overrides: str) -> dict[str, Any]:
    recipe = load_recipe(recipe_file, overrides)
    config, tokenizer = training_config(recipe), load_tokenizer(recipe.model)
    training = build_training(recipe, tokenizer, OpenedSources(recipe))

    def start(engine: Engine) -> Trainer:
        data = (training, None)
        micro_batches = recipe.batch.rows // engine.parallelism.data
        console = Console(file=io.StringIO())
        trainer = build_trainer(recipe, engine, tokenizer, config, data, micro_batches, StopRequest(), console)
        trainer.saver = SimpleNamespace(failed=False)  # pyright: ignore[reportAttributeAccessIssue]  (`_run` makes it)
        return trainer

    file = str(ROOT / "accelerate_configs" / f"{where}.yaml")
    try:
        check_launch(recipe, recipe_file, read_config_file(file, processes), config)
    except UserError as refusal:
        return {"refused": str(refusal)}
    meter = fake_run(recipe, config, file, processes, start, rank)
    return {
        "phases": {
            name: {**vars(counts), "collectives": [[*key, n] for key, n in counts.collectives.items()]}
            for name, counts in meter.phases.items()
        },
        "at_peak": meter.at_peak.most_common(12),
    }


def run_fork(recipe_file: str, folder: Path, name: str, cell: list[Any]) -> NoReturn:
    log = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        (folder / f"{name}.json").write_text(json.dumps(measure(recipe_file, *cell)), encoding="utf-8")
    except BaseException:  # noqa: BLE001  (into the log: the test shows it)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # libtorch's teardown would call into the changed tables


if __name__ == "__main__":
    for name, cell in json.load(sys.stdin).items():
        os.waitpid(os.fork() or run_fork(sys.argv[1], Path(sys.argv[2]), name, cell), 0)
