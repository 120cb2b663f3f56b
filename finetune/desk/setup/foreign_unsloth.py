"""Unsloth: the arguments of a script as YAML, or the config of its command line.

Keys and defaults: https://github.com/unslothai/unsloth, unsloth/models/loader.py, llama.py and rl.py, and
unsloth_cli/config.py.
"""

from __future__ import annotations

from typing import Any

from finetune.desk.setup.conversion import TODO, Conversion
from finetune.desk.setup.foreign_arguments import (
    convert_adapters,
    convert_model,
    convert_run,
    convert_training,
)
from finetune.desk.setup.foreign_keys import foreign_tool
from finetune.desk.setup.foreign_rollouts import fit_length
from finetune.desk.setup.foreign_trl import convert_trainer, trainer_of
from finetune.desk.setup.foreign_values import plain

_SECTIONS = ("data", "training", "lora", "logging")  # of its command line's config


def is_nested(theirs: dict[str, Any]) -> bool:
    """Returns whether it is the config of the command line, which has sections."""
    return any(isinstance(theirs.get(section), dict) for section in _SECTIONS)


def flattened(theirs: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of the sections of a config at one level; other values stay."""
    flat = {name: value for name, value in theirs.items() if name not in _SECTIONS or not isinstance(value, dict)}
    for section in _SECTIONS:
        flat |= theirs[section] if isinstance(theirs.get(section), dict) else {}
    return flat


def convert_unsloth(c: Conversion) -> None:
    nested = is_nested(plain(c.theirs))
    if nested:
        c.defaults |= foreign_tool("unsloth_cli").defaults
    for section in _SECTIONS:  # their keys are read at one level
        if nested and section in c.theirs:
            inner = c.theirs.table(section)
            inner.ignore(*inner.values)
            for name, value in inner.values.items():
                c.theirs.put(name, plain(value))
    t = c.theirs
    convert_run(c)
    convert_model(c)
    _mode(c)
    _objective(c)
    _data(c)
    if "batch_size" in t:
        t.put("per_device_train_batch_size", t.take("batch_size"))
    in_16_bits = c.value("mode") == "full" and not t.is_on("float32_mixed_precision")
    convert_training(c, keeps_16_bits=in_16_bits)


def _mode(c: Conversion) -> None:
    t = c.theirs
    eight, fp8, in_16 = t.is_on("load_in_8bit"), t.is_on("load_in_fp8"), t.is_on("load_in_16bit")
    four = t.is_on("load_in_4bit", default=not (eight or fp8 or in_16))
    if t.word("bias", default="none") != "none":
        t.leave("bias", "biases are frozen under adapters")
    t.ignore("dtype")  # of the products, which is bf16 or fp16 by the GPU
    if t.is_on("full_finetuning") or t.word("training_type") == "full":
        c.set("mode", "full")
        return
    if four:
        for name in ("load_in_8bit", "load_in_16bit", "load_in_fp8"):
            if name in t and t.is_on(name):
                t.leave(name, "the base is in 4 bits")
    targets = c.words("lora.targets")
    bits = "nf4" if four else "fp8" if eight or fp8 else None
    convert_adapters(c, "all-linear" if targets == ["all-linear"] else targets, bits=bits)


def _objective(c: Conversion) -> None:
    """The objective: that of TRL's trainer by its keys, or SFT."""
    t = c.theirs
    trainer, doubt = trainer_of(c)
    if trainer != "sft":
        convert_trainer(c, trainer, doubt)
        return
    c.set("objective.name", "sft", TODO + doubt if doubt else "")
    if t.is_on("train_on_completions", "train_on_responses_only", "assistant_only_loss", "completion_only_loss"):
        c.set("objective.train_on", "assistant")
    else:
        c.set("objective.train_on", "all", "`assistant` trains the answers alone")


def _data(c: Conversion) -> None:
    t = c.theirs
    names = t.words("local_dataset", "dataset_name", "dataset", "train_file")
    kind, split = t.word("format_type"), t.word("split", "dataset_train_split", default="train")
    source: dict[str, Any] = {} if split == "train" else {"split": split}
    column = t.word("dataset_text_field", default="text")
    is_answer = c.value("objective.name") == "sft"
    format = c.data.value("data.train.format", kind).ours
    if format and is_answer:
        source["format"] = format
    elif column != "text" and is_answer:
        source |= {"format": "text", "columns": {"text": column}}
    doubt = "" if format else f"{TODO}the format is detected: their script may build its text itself"
    c.sources["train"] = [({"path": name, **source}, doubt) for name in names]
    if not names:
        c.sources["train"] = [({"path": "rows.jsonl"}, f"{TODO}no dataset is named")]
    if (template := t.word("chat_template")) is not None:
        c.set("model.chat_template", None, f"{TODO}Unsloth's {template} there; here the tokenizer's own")
    if c.value("objective.name") == "grpo":
        fit_length(c, *c.data.names("data.max_length"))
        return
    c.copy("data.max_length")
    c.set("data.overlong", "truncate")
    c.set("data.packing", t.is_on("packing"))
