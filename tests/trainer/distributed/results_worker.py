"""Inside a launch: train each model of a plan for its steps in this process group and write its result.

    accelerate launch --config_file ... tests/trainer/distributed/results_worker.py plan.json

plan.json   {"recipe": file, "out": folder, "cases": [{"name", "overrides"}, ...]}
out/        <name>-<rank>.json: {"error": null, or the kind of exception, "message"}
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

from worker import main


def run_case(recipe: str, _out: Path, name: str, overrides: list[str]) -> dict[str, Any]:
    from rich.console import Console

    from finetune.errors import RunFailure, UserError
    from finetune.recipe import load_recipe
    from finetune.training.run import train
    from finetune.training.signals import StopRequest

    try:
        train(load_recipe(recipe, [*overrides, f"run.name={name}"]), recipe, StopRequest(), Console(file=io.StringIO()))
    except (RunFailure, UserError) as error:  # on every rank; others end the launch
        return {"error": type(error).__name__, "message": str(error)}
    return {"error": None, "message": None}


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), run_case)
