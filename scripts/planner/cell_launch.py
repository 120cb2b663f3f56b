"""The launch of cells that a script of this folder measures."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def launch_cells(
    script: Path, folder: Path, recipe: Path, config: Path | None, processes: int, cells: dict[str, list[str]]
) -> None:
    """Runs `script --measure` in one launch; each rank writes `<cell>-<rank>.json` to `folder` for every cell.

    config: of accelerate; None: one process without a launcher. cells: overrides of the recipe by the name of the cell.
    """
    import forks

    file = str(config) if config else None
    cases = [{"name": name, "overrides": overrides, "config_file": file} for name, overrides in cells.items()]
    plan = folder / "plan.json"
    plan.write_text(json.dumps({"recipe": str(recipe), "out": str(folder), "cases": cases}), encoding="utf-8")
    if config is None:
        done = forks.python(script, "--measure", plan)
    else:
        os.environ["TORCHELASTIC_RUN_ID"] = script.stem
        done = forks.torchrun(processes, script, "--measure", plan)
        del os.environ["TORCHELASTIC_RUN_ID"]
    if done.returncode:
        print(f"{next(iter(cells))}: {done.stderr[-3000:]}", file=sys.stderr)
