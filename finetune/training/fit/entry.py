"""What was found once, kept by what it depends on: <cache>/rows_per_device/<key>.json."""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

from finetune.data.sources.files import cache_root
from finetune.recipe import Recipe
from finetune.training.fit.search import Found

# Of a recipe: what no forward's memory depends on. The rows' length and number are looked at in themselves.
_WITHOUT = {
    "run": True,
    "data": True,
    "batch": True,
    "schedule": True,
    "evaluate": True,
    "checkpoint": True,
    "tracking": True,
    "profile": True,
    "optimizer": {"lr", "weight_decay", "betas", "eps", "momentum", "max_grad_norm"},
    "train": {"epochs", "max_steps"},
}


def dependencies(recipe: Recipe, **others: Any) -> dict[str, Any]:
    """All that a result depends on, as plain values."""
    # pydantic's stubs do not take nested names where they are held in a variable.
    return {"recipe": recipe.model_dump(mode="json", exclude=_WITHOUT), **others}  # pyright: ignore[reportArgumentType]


def entry_file(of: dict[str, Any]) -> Path:
    text = json.dumps(of, sort_keys=True, default=str)
    return cache_root() / "rows_per_device" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def read_entry(path: Path) -> Found | None:
    """None where there is none that can be read."""
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        after = about["next_needs_bytes"]
        return Found(int(about["rows"]), float(about["needs_bytes"]), math.inf if after is None else float(after))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_entry(path: Path, of: dict[str, Any], found: Found) -> None:
    """Complete or absent. Raises OSError."""
    after = found.next_needs if math.isfinite(found.next_needs) else None
    about = {"rows": found.size, "needs_bytes": found.needs, "next_needs_bytes": after, "of": of}
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(about, file, indent=1, default=str)
    os.replace(name, path)
