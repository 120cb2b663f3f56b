"""Cells of `test_fake_cuda.py`, each in a fork of this process: RECIPE FOLDER, and on standard input a JSON object of
[config, processes, rank, key=value ...] by name. FOLDER gets NAME.json of each, and NAME.log with its output.

Forks, because imports take longer than a cell; not those of tests/support/forks.py, where DeepSpeed has already seen
that there is no CUDA.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import counts
import fake_run  # noqa: F401  (for the forks)
import peft  # noqa: F401  (for the forks)

import finetune.training.run  # noqa: F401  (for the forks)


def run_fork(recipe_file: str, folder: Path, name: str, cell: list[Any]) -> NoReturn:
    log = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        (folder / f"{name}.json").write_text(json.dumps(counts.measure(recipe_file, *cell)), encoding="utf-8")
    except BaseException:  # noqa: BLE001  (into the log: the test shows it)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # libtorch's teardown would call into the changed tables


if __name__ == "__main__":
    for name, cell in json.load(sys.stdin).items():
        os.waitpid(os.fork() or run_fork(sys.argv[1], Path(sys.argv[2]), name, cell), 0)
