"""GGUF files of models that were not trained, written as the result of a run of full training."""

from __future__ import annotations

from pathlib import Path

import yaml

from finetune.checkpoints.trained import find_trained
from finetune.release.export.gguf_export import export_gguf


def write_gguf(model: Path, out: Path, kind: str) -> Path:
    """Returns the file in `out`; the folder of the run is next to it. The recipe is not needed to write."""
    run = out.with_name(f"{out.name}-run")
    run.mkdir()
    (run / "model").symlink_to(model.resolve())
    recipe = {
        "run": {"name": "tiny"},
        "model": {"name": str(model)},
        "mode": "full",
        "data": {"train": [{"path": "rows.jsonl"}], "max_length": 64},
        "batch": {"rows": 1},
        "optimizer": {"lr": 1e-3},
        "train": {"max_steps": 1, "precision": "fp32"},
    }
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    export_gguf(find_trained(run), out, kind)
    (file,) = out.glob("*.gguf")
    return file
