"""Arguments that TRL, axolotl, LLaMA-Factory and Unsloth share: those of transformers' trainer, peft and bitsandbytes.

axolotl renames some of them. Defaults are those of https://github.com/huggingface/transformers,
src/transformers/training_args.py; each tool's own are given by its module.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.recipe.foreign_keys import FOREIGN_KEYS
from finetune.setup.conversion import TODO, Conversion, run_name

_OPTIMIZERS = {
    **dict.fromkeys(("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), "adamw"),
    **dict.fromkeys(("optimi_adamw", "flash_adamw"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "ao_adamw_8bit"), "adamw_8bit"),
    **dict.fromkeys(("paged_adamw", "paged_adamw_32bit"), "paged_adamw"),
    **{name: name for name in ("paged_adamw_8bit", "muon", "sgd")},
}
_SCHEDULES = {
    **{name: name for name in ("cosine", "linear", "constant")},
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "wsd",
    "polynomial": "linear",  # power 1, its default
}
_COMPARING = ("dpo", "kto", "orpo", "reward")


@dataclass(frozen=True)
class ToolDefaults:
    """Values that a tool takes for keys that are left out."""

    micro: int = 8  # rows of a device in one forward
    accumulation: int = 1
    optimizer: str = "adamw_torch_fused"
    lr: float | None = None
    weight_decay: float = 0.0
    schedule: str = "linear"
    warmup_ratio: float = 0.0
    warmup_steps: int = 0
    epochs: float = 3.0
    precision: str = "bf16"
    checkpointing: bool = True
    save_steps: int | None = 500  # None: only the result
    project: str = "huggingface"  # at W&B and Trackio


def convert_training(c: Conversion, defaults: ToolDefaults, keeps_16_bits: bool = False) -> None:
    """Converts all but run, model, adapters, objective and data, which precede.

    keeps_16_bits: whether trained weights are in 16 bits there, unless ZeRO or FSDP has copies in fp32.
    """
    micro = int(c.number("per_device_train_batch_size", "micro_batch_size", default=defaults.micro))
    accumulation = defaults.accumulation
    if "batch_size" in c.theirs and c.tool == "axolotl":
        accumulation = max(1, int(c.number("batch_size")) // micro)
    steps = int(c.number("gradient_accumulation_steps", default=accumulation))
    devices = c.devices or int(c.number("num_processes", default=0) or 0)
    parts = f"{micro} a device x {steps} accumulated x {devices or 1} device{'s' if devices > 1 else ''}"
    said = "" if devices else " (not said how many: --devices); rows are of all devices together"
    c.set("batch.rows", micro * steps * (devices or 1), parts + said)
    c.set("batch.rows_per_device", micro)
    _optimizer(c, defaults)
    _schedule(c, defaults)
    passes, most = (
        c.number("num_train_epochs", "num_epochs", default=defaults.epochs),
        c.number("max_steps", default=-1),
    )
    if most and most > 0:
        c.set("train.max_steps", int(most))
    else:
        c.set("train.epochs", passes)
    _launch(c)
    _precision(c, defaults.precision, keeps_16_bits and c.launch is None)
    _memory(c, defaults.checkpointing)
    _evaluation(c)
    every = c.number("save_steps", default=None if c.take("saves_per_epoch") else defaults.save_steps)
    strategy = c.take("save_strategy", default="steps")
    if isinstance(every, int) and every > 0 and strategy == "steps":
        c.set("checkpoint.every_steps", every, "" if "save_steps" in c.theirs else f"the default of {c.tool}")
    elif strategy == "epoch" or c.theirs.get("saves_per_epoch") or every:
        c.leave("saves_per_epoch" if "saves_per_epoch" in c.theirs else "save_strategy", "set `checkpoint.every_steps`")
    if (keep := c.number("save_total_limit")) is not None:
        c.set("checkpoint.keep", max(1, int(keep)))
    _tracking(c, defaults.project)
    _reference(c)


def convert_held_out(c: Conversion, name: str) -> None:
    """Rows for evaluation: a share of the training rows, or a number of them, which has no counterpart."""
    held_out = c.number(name)
    if held_out and 0 < held_out < 1:
        c.set("data.eval", {"share": float(held_out)})
    elif held_out:
        c.set("data.eval", {"share": 0.05}, f"{TODO}{held_out} rows there; here a share of them")


def convert_run(c: Conversion, seed: int = 42) -> None:
    name = c.take("run_name", "wandb_name") or c.take("output_dir") or c.take("base_model", "model_name_or_path")
    c.take("output_dir", "overwrite_output_dir", "do_train")
    c.set("run.name", run_name(str(name or "run")))
    c.copy("run.seed", "seed", "random_state", "random_seed", default=seed)


def convert_model(c: Conversion, *names: str) -> None:
    """Name, revision, tokenizer and added tokens of the model; names: the tool's keys of its id or folder."""
    name = str(c.take(*names, default="org/model"))
    plain = re.sub(r"(-unsloth)?-bnb-4bit$", "", name)
    comment = f"{name} is quantized already; this is taken for the model before" if plain != name else ""
    c.set("model.name", plain, f"{TODO}no model is named" if name == "org/model" else comment)
    if (revision := c.take("model_revision", "revision")) not in (None, "main"):
        c.set("model.revision", revision)
    tokenizer = c.take("tokenizer_config", "tokenizer_name", "tokenizer_name_or_path")
    if tokenizer not in (None, name):
        c.set("model.tokenizer", tokenizer)
    if c.is_on("trust_remote_code"):
        c.set("model.trust_remote_code", True)
    added = c.listed("add_tokens", "add_special_tokens", "tokens")
    if any(isinstance(token, dict) for token in added):  # axolotl's older form of `special_tokens`
        c.leave("tokens", FOREIGN_KEYS["special_tokens"])
    elif added:
        c.set("tokens.add", added)


def convert_adapters(
    c: Conversion, rank: int, alpha: float, dropout: float, targets: Any, comment: str = "", bits: str | None = None
) -> None:
    """Mode and sections of adapters; the values are the tool's or its defaults. bits: type of quantization."""
    c.set("mode", "qlora" if bits else "lora")
    c.set("lora.rank", int(rank))
    c.set("lora.alpha", alpha)
    c.set("lora.dropout", dropout)
    c.set("lora.targets", targets, comment)
    if c.is_on("use_rslora", "peft_use_rslora"):
        c.set("lora.rslora", True)
    if c.is_on("use_dora", "peft_use_dora"):
        c.set("lora.dora", True)
    if saved := c.listed("lora_modules_to_save", "modules_to_save", "additional_target"):
        c.set("lora.modules_to_save", saved)
    if bits:
        c.set("quantization.type", bits, "8-bit integers there; 8-bit floats here" if bits == "fp8" else "")


def _optimizer(c: Conversion, defaults: ToolDefaults) -> None:
    given = str(c.take("optim", "optimizer", default=defaults.optimizer))
    ours = "muon" if c.is_on("use_muon") else _OPTIMIZERS.get(given)
    unknown = f"{TODO}{given} is not offered; another optimizer needs another learning rate"
    if ours != "adamw":
        c.set("optimizer.name", ours or "adamw", "" if ours else unknown)
    rate = c.number("learning_rate", default=defaults.lr)
    if rate is None:
        c.set("optimizer.lr", 2e-5, f"{TODO}no learning rate is given")
    else:
        c.set("optimizer.lr", float(rate), "" if "learning_rate" in c.theirs else f"the default of {c.tool}")
    c.copy("optimizer.weight_decay", "weight_decay", default=defaults.weight_decay)
    betas = [float(c.number(f"adam_beta{i}", default=default)) for i, default in ((1, 0.9), (2, 0.999))]
    c.set("optimizer.betas", betas)
    c.copy("optimizer.eps", "adam_epsilon", default=1e-8)
    c.copy("optimizer.max_grad_norm", "max_grad_norm", default=1.0)
    if not c.value("optimizer.max_grad_norm"):
        c.set("optimizer.max_grad_norm", None, "no clipping")
    if ours == "sgd":
        c.set("optimizer.momentum", 0.0)


def _schedule(c: Conversion, defaults: ToolDefaults) -> None:
    """Decay and warm-up."""
    ratio, steps = defaults.warmup_ratio, defaults.warmup_steps
    given = str(c.take("lr_scheduler_type", "lr_scheduler", default=defaults.schedule))
    ours = _SCHEDULES.get(given)
    nearest = "" if ours else f"{TODO}{given} is not offered; this comes nearest"
    c.set("schedule.name", ours or "cosine", nearest)
    further = c.table("lr_scheduler_kwargs")
    least = c.number("cosine_min_lr_ratio", default=further.get("min_lr_rate"))
    if least is None and further.get("min_lr"):
        least = round(float(further["min_lr"]) / c.value("optimizer.lr"), 6)
    if least:
        c.set("schedule.min_lr_ratio", float(least))
    if ours == "wsd":
        c.set("schedule.decay_ratio", 0.1, f"{TODO}num_decay_steps there, of all steps")
    warmup, share = c.number("warmup_steps"), c.number("warmup_ratio")
    if given == "constant":  # transformers has no warm-up with it
        return
    if warmup is not None and 0 < warmup < 1:  # transformers 5 reads it as a share
        warmup, share = None, warmup
    if warmup or (warmup is None and share is None and steps):
        c.set("schedule.warmup_steps", int(warmup or steps), "" if warmup else f"the default of {c.tool}")
    elif share or (warmup is None and share is None and ratio):
        c.set("schedule.warmup_ratio", float(share or ratio), "" if share else f"the default of {c.tool}")


def _memory(c: Conversion, checkpointing: bool) -> None:
    """Recomputation, offloading and compilation. checkpointing: the tool's default."""
    given = c.take("gradient_checkpointing", "use_gradient_checkpointing", default=checkpointing)
    c.take("gradient_checkpointing_kwargs", "use_reentrant_gc")
    is_on = given not in (False, "false", "False", "none") and not c.is_on("disable_gradient_checkpointing")
    c.set("train.activation_checkpointing", is_on, "same result, less memory" if is_on else "")
    if c.is_on("activation_offloading") or given == "offload":
        c.set("train.activation_offload", True)
    if c.is_on("torch_compile"):
        c.set("train.compile", True)
    if c.is_on("use_liger_kernel", "enable_liger_kernel"):
        c.set("model.cross_entropy", "auto", "`liger` takes its kernels and needs them installed")


def _precision(c: Conversion, default: str, keeps_16_bits: bool) -> None:
    """Precision. default: the tool's; keeps_16_bits: whether trained weights stay in 16 bits there."""
    bf16, fp16 = c.take("bf16"), c.is_on("fp16")
    given = "fp16" if fp16 else "bf16" if bf16 in (True, "auto", "true", "full") else default
    if c.is_on("float16"):
        given = "fp16"
    if c.is_on("float32"):
        given = "fp32"
    if c.is_on("pure_bf16", "bfloat16") or (keeps_16_bits and given == "bf16" and c.value("mode") == "full"):
        c.set("train.precision", "bf16_true", "weights in bf16 throughout, as there; `bf16` keeps them in fp32")
    else:
        c.set("train.precision", given)
    if c.is_on("fp8"):
        c.leave("fp8", "set `train.precision: fp8`, which is for `mode: full`, on Hopper and later")


def _evaluation(c: Conversion) -> None:
    """Intervals of evaluation, early stopping and the best checkpoint; after the data."""
    if "eval" not in c.sources and not c.value("data.eval"):
        for name in (
            "eval_steps",
            "evals_per_epoch",
            "eval_strategy",
            "evaluation_strategy",
            "early_stopping_patience",
        ):
            if c.take(name) not in (None, "no", False):
                c.leave(name, "there are no rows to evaluate on: set `data.eval`, such as `{share: 0.05}`")
        return
    c.take("eval_strategy", "evaluation_strategy", "do_eval", "per_device_eval_batch_size", "eval_batch_size")
    every = c.number("eval_steps")
    if isinstance(every, int) and every > 0:
        c.set("evaluate.every_steps", every)
    elif every is not None:
        c.leave("eval_steps", "a share of the run; set `evaluate.every_steps`, a number of steps")
    patience = c.number("early_stopping_patience")
    if patience and c.value("evaluate.every_steps"):
        c.set("train.stop_when", {"metric": "eval_loss", "patience": int(patience)})
    elif patience:
        c.leave("early_stopping_patience", "set `evaluate.every_steps` and `train.stop_when`")
    metric = c.take("metric_for_best_model", default="eval_loss")
    if metric not in ("eval_loss", "loss"):
        c.leave("metric_for_best_model", f"`checkpoint.best` knows eval_loss and others, not {metric}")
    c.take("greater_is_better")
    if c.is_on("load_best_model_at_end"):
        c.set("checkpoint.best", "eval_loss")
        c.set("train.result", "best")


def _tracking(c: Conversion, project: str) -> None:
    """Trackers. project: the tool's default at W&B and Trackio."""
    trackers = set(map(str, c.listed("report_to")))
    name, entity = c.take("wandb_project"), c.take("wandb_entity")
    if name or c.is_on("use_wandb", "enable_wandb") or trackers & {"wandb", "all"}:
        c.set("tracking.wandb", {"project": str(name or project)} | ({"entity": entity} if entity else {}))
    if c.is_on("use_tensorboard", "enable_tensorboard") or trackers & {"tensorboard", "all"}:
        c.set("tracking.tensorboard", True)
    if "trackio" in trackers:
        c.set("tracking.trackio", str(c.take("project", "trackio_space_id", default=project)))
    if others := trackers - {"wandb", "tensorboard", "trackio", "none", "all"}:
        c.leave("report_to", f"there is no tracker {', '.join(sorted(others))}; metrics.jsonl is always written")


def _launch(c: Conversion) -> None:
    """Chooses the accelerate config for what their config says about devices."""
    deepspeed, fsdp, further = c.take("deepspeed"), c.take("fsdp"), c.take("fsdp_config")
    c.take("fsdp_version", "ddp_timeout", "ddp_find_unused_parameters", "accelerator_config")
    if deepspeed:
        text = Path(deepspeed).name.lower() if isinstance(deepspeed, str) else json.dumps(deepspeed)
        stage = re.search(r"(?:z|zero|stage\W*)_?(\d)", text)
        number = int(stage[1]) if stage else 3
        name = {0: "ddp", 1: "zero2", 2: "zero2"}.get(number, "zero3")
        c.launch = f"{name}_offload" if "offload" in text and number >= 2 else name
    elif fsdp or further:
        settings = further if isinstance(further, dict) else {}
        says = settings.get("offload_params") or settings.get("fsdp_offload_params")
        offloads = "offload" in str(fsdp) or str(says).lower() == "true"
        c.launch = "fsdp2_offload" if offloads else "fsdp2"
    for key, config in (("tensor_parallel_size", "fsdp2_tp"), ("context_parallel_size", "fsdp2_cp")):
        if (c.number(key) or 1) > 1:
            c.launch = config


def _reference(c: Conversion) -> None:
    """Reference and dropout of an objective that compares answers; after objective and adapters."""
    name = c.value("objective.name")
    base_is_first = c.value("mode") != "full" and not c.value("lora.modules_to_save") and not c.value("tokens.add")
    if name in ("dpo", "kto") and c.value("objective.loss") != "simpo":
        if c.take("ref_model"):
            c.set("objective.reference_model", c.theirs["ref_model"])
        elif base_is_first and not c.is_on("precompute_ref_log_probs"):
            c.set("objective.reference", "adapters_off", "the model without its adapters, as there")
    if name in _COMPARING:
        if not c.is_on("disable_dropout", default=True):
            c.set("objective.dropout", True)
        elif c.value("lora.dropout"):
            c.set("lora.dropout", 0.0, f"{c.value('lora.dropout')} there, but disable_dropout turns it off")
        c.set("data.packing", False, "one example a row, as there")
        c.set("data.overlong", "drop", "examples that do not fit are left out whole, and counted")
