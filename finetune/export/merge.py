"""`merge`: an adapter becomes part of its base."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from finetune.errors import UserError


def merge_adapter(run_dir: Path, out: Path) -> Path:
    """Write base + adapter as one plain model folder; `out` is whole or absent.

    The base is loaded unquantised also after qlora: merging into 4-bit weights would round the adapter away. The sum is
    taken in fp32 and saved in the base's own type. Raises UserError.
    """
    adapter = run_dir / "model" if (run_dir / "model").is_dir() else run_dir
    settings = adapter / "adapter_config.json"
    if not settings.is_file():
        raise UserError(f"{run_dir}: no adapter here (no model/adapter_config.json); a full run needs no merging")
    if out.exists():
        raise UserError(f"{out} exists already: remove it, or give another --out")
    name = json.loads(settings.read_text(encoding="utf-8"))["base_model_name_or_path"]
    try:
        base: Any = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
    except OSError as error:
        raise UserError(f"the adapter's base {name!r} cannot be loaded: {str(error).splitlines()[0]}") from error
    dtype = base.dtype
    merged: Any = PeftModel.from_pretrained(base.to(torch.float32), str(adapter)).merge_and_unload()
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    merged.to(dtype).save_pretrained(partial)
    GenerationConfig.from_pretrained(adapter).save_pretrained(partial)
    AutoTokenizer.from_pretrained(adapter).save_pretrained(partial)
    partial.rename(out)
    return out
