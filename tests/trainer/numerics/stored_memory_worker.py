"""Reads a base that stays as it is stored, and says in bytes what it keeps and the largest resident set while it is
read, above the one before: `python stored_memory_worker.py RECIPE`."""

from __future__ import annotations

import gc
import json
import re
import sys
from pathlib import Path

import torch

from finetune.models.attention import attention_for
from finetune.models.base_model import Base
from finetune.models.config import model_config
from finetune.models.weights import Placement, load_model
from finetune.recipe import load_recipe


def resident(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1]) * 1024


def read(recipe_file: str, weights: str) -> int:
    recipe = load_recipe(Path(recipe_file))
    config = model_config(recipe.model)
    attention = attention_for(recipe, config, "cpu")
    model = load_model(recipe, Base.of(recipe, config), attention, Placement(weights, torch.device("cpu")))  # pyright: ignore
    return sum(p.nbytes for p in model.parameters() if not p.is_meta)


if __name__ == "__main__":
    read(sys.argv[1], "meta")  # imports, and the trial of attention
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak begins here
    kept = read(sys.argv[1], "load")
    print(json.dumps({"kept": kept, "peak": resident("VmHWM") - before}))
