"""Unsloth: the arguments of a script as YAML, or the config of its command line.

Keys and defaults: https://github.com/unslothai/unsloth, unsloth/models/loader.py, llama.py and rl.py, and
unsloth_cli/config.py.
"""

from __future__ import annotations

from typing import Any

from finetune.setup.conversion import TODO, Conversion
from finetune.setup.foreign_arguments import (
    ToolDefaults,
    convert_adapters,
    convert_model,
    convert_run,
    convert_training,
)

_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_SECTIONS = ("data", "training", "lora", "logging")  # of its command line's config
_OF_SCRIPTS = ToolDefaults(
    micro=4, accumulation=2, optimizer="adamw_8bit", lr=5e-5, weight_decay=0.001, warmup_ratio=0.1
)
_OF_CONFIGS = ToolDefaults(
    micro=2,
    accumulation=4,
    optimizer="adamw_8bit",
    lr=2e-4,
    weight_decay=0.01,
    warmup_steps=5,
    project="unsloth-training",
)
_FORMATS = {"alpaca": "alpaca", "chatml": "messages", "sharegpt": "sharegpt"}


def flattened(theirs: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of the sections of a config at one level; other values stay."""
    flat = {name: value for name, value in theirs.items() if name not in _SECTIONS or not isinstance(value, dict)}
    for section in _SECTIONS:
        flat |= theirs[section] if isinstance(theirs.get(section), dict) else {}
    return flat


def convert_unsloth(c: Conversion) -> None:
    is_nested = any(isinstance(c.theirs.get(section), dict) for section in _SECTIONS)
    c.theirs = flattened(c.theirs)
    convert_run(c, seed=3407)
    convert_model(c, "model_name", "model")
    eight, fp8, in_16 = c.is_on("load_in_8bit"), c.is_on("load_in_fp8"), c.is_on("load_in_16bit")
    four = c.is_on("load_in_4bit", default=not (eight or fp8 or in_16))
    if c.is_on("full_finetuning") or c.take("training_type") == "full":
        c.set("mode", "full")
        c.take("r", "lora_r", "lora_alpha", "lora_dropout", "target_modules", "bias", "dtype")
    else:
        c.take("bias", "dtype", "finetune_language_layers")
        targets = c.listed("target_modules") or list(_TARGETS)
        convert_adapters(
            c,
            rank=c.number("r", "lora_r", default=64 if is_nested else 16),
            alpha=c.number("lora_alpha", default=16),
            dropout=c.number("lora_dropout", default=0.0),
            targets="all-linear" if targets == ["all-linear"] else targets,
            bits="nf4" if four else "fp8" if eight or fp8 else None,
        )
    c.set("objective.name", "sft")
    if c.is_on("train_on_completions", "train_on_responses_only"):
        c.set("objective.train_on", "assistant")
    else:
        c.set("objective.train_on", "all", "`assistant` trains the answers alone")
    names, kind = c.listed("local_dataset", "dataset_name", "dataset", "train_file"), str(c.take("format_type"))
    split, column = c.take("split", default="train"), c.take("dataset_text_field", default="text")
    source: dict[str, Any] = {} if split == "train" else {"split": split}
    if kind in _FORMATS:
        source["format"] = _FORMATS[kind]
    elif column != "text":
        source |= {"format": "text", "columns": {"text": column}}
    doubt = "" if kind in _FORMATS else f"{TODO}the format is detected: their script may build its text itself"
    c.sources["train"] = [({"path": name, **source}, doubt) for name in names]
    if not names:
        c.sources["train"] = [({"path": "rows.jsonl"}, f"{TODO}no dataset is named")]
    c.copy("data.max_length", "max_seq_length", "max_length", default=2048)
    c.set("data.overlong", "truncate")
    c.set("data.packing", c.is_on("packing"))
    if "batch_size" in c.theirs:
        c.theirs["per_device_train_batch_size"] = c.take("batch_size")
    convert_training(c, _OF_CONFIGS if is_nested else _OF_SCRIPTS, keeps_16_bits=True)
