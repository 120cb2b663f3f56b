"""TRL's command line and its YAML.

Keys and defaults: https://github.com/huggingface/trl, trl/trainer, trl/experimental and trl/scripts.
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

COMMAND = "trl"  # key of the word after `trl`, such as dpo
TRAINERS = ("sft", "dpo", "kto", "reward", "orpo", "cpo", "grpo", "rloo")
_RATES = {"sft": 2e-5, "dpo": 1e-6, "kto": 1e-6, "orpo": 1e-6, "cpo": 1e-6, "reward": 1e-4}  # defaults
_LOSSES = ("sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "apo_zero", "apo_down")
_MARKS = {  # keys that only one trainer has
    "kto": ("desirable_weight", "undesirable_weight"),
    "reward": ("center_rewards_coefficient",),
    "cpo": ("cpo_alpha", "simpo_gamma"),
    "dpo": ("beta", "precompute_ref_log_probs", "label_smoothing", "loss_weights", "sync_ref_model"),
}
_LAUNCHES = {
    "single_gpu": "single",
    "multi_gpu": "ddp",
    "fsdp1": "fsdp2",
    "fsdp2": "fsdp2",
    "zero1": "zero2",
    "zero2": "zero2",
    "zero3": "zero3",
}


def convert_trl(c: Conversion) -> None:
    # The trainer of the command, or the one that has such keys.
    by_keys = (name for name, keys in _MARKS.items() if set(keys) & c.theirs.keys())
    trainer = str(c.take(COMMAND) or next(by_keys, "sft"))
    convert_run(c)
    convert_model(c, "model_name_or_path")
    if template := c.take("chat_template_path"):
        c.set("model.chat_template", template)
    settings = c.table("model_init_kwargs")
    dtype = c.take("dtype", "torch_dtype") or settings.get("dtype") or settings.get("torch_dtype")
    is_on, four, eight = c.is_on("use_peft"), c.is_on("load_in_4bit"), c.is_on("load_in_8bit")
    if not (is_on or four or eight):
        c.set("mode", "full")
    else:
        targets, comment = c.listed("lora_target_modules"), ""
        if not targets:
            targets, comment = ["q_proj", "v_proj"], "the default of peft for Llama, Mistral and Qwen"
        convert_adapters(
            c,
            rank=c.number("lora_r", default=16),
            alpha=c.number("lora_alpha", default=32),
            dropout=c.number("lora_dropout", default=0.05),
            targets="all-linear" if targets == ["all-linear"] else targets,
            comment=comment,
            bits=str(c.take("bnb_4bit_quant_type", default="nf4")) if four else "fp8" if eight else None,
        )
        c.take("lora_task_type", "bnb_4bit_quant_storage", "bnb_4bit_compute_dtype")
        if four:
            c.set("quantization.double_quant", c.is_on("use_bnb_nested_quant", "bnb_4bit_use_double_quant"))
    _objective(c, trainer)
    _data(c)
    c.launch = _LAUNCHES.get(str(c.take("accelerate_config")))
    precision = "fp32" if c.theirs.get("bf16") is False else "bf16"
    in_16_bits = str(dtype) in ("bfloat16", "torch.bfloat16", "auto")
    convert_training(c, ToolDefaults(lr=_RATES.get(trainer, 2e-5), precision=precision), in_16_bits)


def _objective(c: Conversion, trainer: str) -> None:
    losses = c.listed("loss_type") or ["sigmoid"]
    if trainer == "sft":
        c.set("objective.name", "sft")
        if losses[0] not in ("sigmoid", "nll", "chunked_nll"):
            c.leave("loss_type", "is not offered; `objective.name: focal` also weights tokens by their probability")
        completions = c.take("completion_only_loss")
        if c.is_on("assistant_only_loss") or completions is True:
            c.set("objective.train_on", "assistant")
        elif completions is False:
            c.set("objective.train_on", "all")
        else:
            doubt = "for rows of messages TRL trains all tokens unless assistant_only_loss: `all` is the same"
            c.set("objective.train_on", "assistant", TODO + doubt)
    elif trainer == "dpo":
        c.set("objective.name", "dpo")
        if losses[0] in _LOSSES:
            c.set("objective.loss", losses[0])
        else:
            c.set("objective.loss", "sigmoid", f"{TODO}{losses[0]} is not offered")
        if "sft" in losses[1:]:
            weights = c.listed("loss_weights") or [1.0] * len(losses)
            c.set("objective.sft_weight", float(weights[losses.index("sft")]))
        if c.number("label_smoothing"):
            c.copy("objective.label_smoothing", "label_smoothing")
    elif trainer == "cpo":
        c.set("objective.name", "dpo")
        doubt = "" if losses[0] == "simpo" else f"{TODO}CPO has no counterpart; SimPO comes nearest"
        c.set("objective.loss", "simpo", doubt)
        c.copy("objective.margin", "simpo_gamma", default=0.5)
        c.copy("objective.sft_weight", "cpo_alpha", default=1.0)
    elif trainer in ("kto", "orpo", "reward"):
        c.set("objective.name", trainer)
    else:
        c.set(
            "objective.name",
            "sft",
            f"{TODO}trl {trainer} trains on the model's own samples: set grpo, with `rollouts` and `rewards`",
        )
    if trainer in ("dpo", "kto", "orpo", "cpo"):
        c.copy("objective.beta", "beta", default=0.1)
    if trainer == "kto":
        c.copy("objective.desirable_weight", "desirable_weight", default=1.0)
        c.copy("objective.undesirable_weight", "undesirable_weight", default=1.0)
    if trainer == "reward" and c.number("center_rewards_coefficient"):
        c.copy("objective.centering", "center_rewards_coefficient")
    if "router_aux_loss_coef" in c.theirs:
        c.copy("objective.router_aux_loss_coef", "router_aux_loss_coef")


def _data(c: Conversion) -> None:
    """Sources, whose format is detected: TRL's types of datasets are ours by their columns."""
    column = c.take("dataset_text_field", default="text")
    common: dict[str, Any] = {"format": "text", "columns": {"text": column}} if column != "text" else {}
    listed = [one for one in c.listed("datasets") if isinstance(one, dict)]
    for one in listed:
        source = {key: one[name] for key, name in (("config", "name"), ("split", "split")) if one.get(name)}
        path, files = str(one.get("path", "")), one.get("data_files")
        files = [files] if isinstance(files, str) else list(files or [])
        if path not in ("json", "csv", "parquet", "text", "arrow"):  # else the files are local, and this their kind
            files = [f"hf://datasets/{path}/{file}" for file in files]
        for file in files or [path]:
            c.sources.setdefault("train", []).append(({"path": file, **source, **common}, ""))
    name, config = c.take("dataset_name"), c.take("dataset_config")
    split, test = c.take("dataset_train_split", default="train"), c.take("dataset_test_split", default="test")
    source = ({"config": config} if config else {}) | common
    if name and not listed:
        taken = {} if split == "train" else {"split": split}
        c.sources["train"] = [({"path": name, **taken, **source}, "")]
    c.sources.setdefault("train", [({"path": "rows.jsonl"}, f"{TODO}no dataset is named")])
    if share := c.number("test_split_size"):
        c.set("data.eval", {"share": float(share)})
    elif c.theirs.get("eval_strategy", "no") not in ("no", False) and name:
        c.sources["eval"] = [({"path": name, "split": test, **source}, "")]
    length = c.number("max_length", "max_seq_length", default=1024)
    doubt = f"{TODO}no limit there; the longest example, in tokens" if c.theirs.get("max_length", 0) is None else ""
    c.set("data.max_length", length, doubt or ("" if "max_length" in c.theirs else f"the default of {c.tool}"))
    strategy, packs = c.take("packing_strategy", default="bfd"), c.is_on("packing")
    c.take("truncation_mode", "padding_free")
    c.set("data.overlong", "split" if packs and strategy != "bfd" else "truncate")
    c.set("data.packing", packs, "documents stay whole here" if packs and strategy == "wrapped" else "")
    if c.is_on("dataset_streaming", "streaming"):
        c.set("data.streaming", True)
