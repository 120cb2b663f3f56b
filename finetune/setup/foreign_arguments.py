"""Arguments that TRL, axolotl, LLaMA-Factory and Unsloth share: those of transformers' trainer, peft and bitsandbytes.

axolotl renames some of them. Defaults are those of https://github.com/huggingface/transformers,
src/transformers/training_args.py; each tool's own are given by its module.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from finetune.recipe.foreign_keys import FOREIGN_KEYS
from finetune.setup.conversion import TODO, Conversion, run_name
from finetune.setup.foreign_launch import ForeignLaunch, read_foreign_launch
from finetune.setup.foreign_rollouts import fit_rollouts
from finetune.setup.foreign_values import ForeignTable

OPTIMIZERS = {
    **dict.fromkeys(("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), "adamw"),
    **dict.fromkeys(("optimi_adamw", "flash_adamw"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "ao_adamw_8bit"), "adamw_8bit"),
    **dict.fromkeys(("paged_adamw", "paged_adamw_32bit"), "paged_adamw"),
    **{name: name for name in ("paged_adamw_8bit", "muon", "sgd")},
}
SCHEDULES = {
    **{name: name for name in ("cosine", "linear", "constant")},
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "wsd",
    "polynomial": "linear",  # power 1, its default
}
COMPARING = ("dpo", "kto", "orpo", "reward")
FILES = ("json", "csv", "parquet", "text", "arrow")  # kinds of files that stand in place of a hub id
# Keys that cannot change what is trained: names of folders, and switches of the command.
_WITHOUT_EFFECT = ("overwrite_output_dir", "do_train")


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
    precision: str = "bf16"  # if neither bf16 nor fp16 is said
    checkpointing: bool = True
    save_steps: int | None = 500  # None: only the result
    project: str = "huggingface"  # at W&B and Trackio


def convert_training(c: Conversion, defaults: ToolDefaults, keeps_16_bits: bool = False) -> None:
    """Converts all but run, model, adapters, objective and data, which precede.

    keeps_16_bits: whether trained weights are in 16 bits there, unless ZeRO or FSDP has copies in fp32.
    """
    launch = read_foreign_launch(c)
    _batch(c, defaults, launch)
    _optimizer(c, defaults)
    _schedule(c, defaults)
    _length(c, defaults)
    _precision(c, defaults.precision, launch, keeps_16_bits)
    _memory(c, defaults.checkpointing)
    _evaluation(c)
    _checkpoints(c, defaults)
    _tracking(c, defaults.project)
    _reference(c)
    fit_rollouts(c)
    c.theirs.ignore(*_WITHOUT_EFFECT)


def _batch(c: Conversion, defaults: ToolDefaults, launch: ForeignLaunch) -> None:
    """Rows of a step: micro-batch x accumulation x devices that have rows of their own."""
    t = c.theirs
    micro = t.count("per_device_train_batch_size", "micro_batch_size", default=defaults.micro)
    accumulation = defaults.accumulation
    if c.tool == "axolotl" and "batch_size" in t:  # its older way to say the accumulation
        accumulation = max(1, t.count("batch_size", default=micro) // micro)
    steps = t.count("gradient_accumulation_steps", default=accumulation)
    devices = launch.row_devices or 1
    counted = f"{devices} device{'s' if devices > 1 else ''}"
    if launch.sharing > 1 and launch.devices:
        counted = f"{devices} of {launch.devices} devices ({launch.sizes} share rows)"
    parts = f"{micro} a device x {steps} accumulated x {counted}"
    if launch.needs_devices:
        kind = c.launch or "its launch"
        shared = f" ({launch.sizes} share rows)" if launch.sizes else ""
        several = f"{kind} ran on several{shared}; say how many with --devices, or set the rows of all together"
        parts = f"{TODO}{parts}: {several}"
    elif not launch.devices:
        parts += " (not said how many: --devices); rows are of all devices together"
    elif launch.devices % launch.sharing or launch.by_sizes not in (None, launch.devices):
        sizes = f"{launch.by_sizes} processes by its parallel sizes" if launch.by_sizes else launch.sizes
        parts = f"{TODO}{parts}: {launch.devices} devices do not fit {sizes}"
    c.set("batch.rows", micro * steps * devices, parts)
    c.set("batch.rows_per_device", micro)


def _length(c: Conversion, defaults: ToolDefaults) -> None:
    passes = c.theirs.number("num_train_epochs", "num_epochs", default=defaults.epochs)
    most = c.theirs.number("max_steps", default=-1)
    if most and most > 0:
        c.set("train.max_steps", int(most), f"before {passes:g} epochs are over" if "num_epochs" in c.theirs else "")
    else:
        is_given = "num_train_epochs" in c.theirs or "num_epochs" in c.theirs
        c.set("train.epochs", passes, "" if is_given else f"the default of {c.tool}")


def convert_held_out(c: Conversion, name: str, table: ForeignTable | None = None) -> None:
    """Rows for evaluation: a share of the training rows, or a number of them, which has no counterpart."""
    held_out = (table or c.theirs).number(name)
    if held_out and "eval" in c.sources:
        (table or c.theirs).leave(name, "evaluation has rows of its own")
    elif held_out and 0 < held_out < 1:
        c.set("data.eval", {"share": float(held_out)})
    elif held_out:
        c.set("data.eval", {"share": 0.05}, f"{TODO}{held_out} rows there; here a share of them")


def convert_run(c: Conversion, seed: int = 42) -> None:
    t = c.theirs
    names = ("run_name", "wandb_name", "output_dir", "base_model", "model_name_or_path", "model_name")
    name = next((str(t.values[name]) for name in names if name in t), "run")
    t.ignore("run_name", "wandb_name", "output_dir")
    c.set("run.name", run_name(name))
    c.copy("run.seed", "seed", "random_state", "random_seed", default=seed)


def convert_model(c: Conversion, *names: str) -> None:
    """Name, revision, tokenizer and added tokens of the model; names: the tool's keys of its id or folder."""
    t = c.theirs
    name = t.word(*names) or "org/model"
    plain = re.sub(r"(-unsloth)?-bnb-4bit$", "", name)
    comment = f"{name} is quantized already; this is taken for the model before" if plain != name else ""
    if re.search(r"(?i)-(awq|gptq|aqlm)", name):
        comment = f"{TODO}it is quantized already: name the model before, with `mode: qlora`"
    c.set("model.name", plain, f"{TODO}no model is named" if name == "org/model" else comment)
    if (revision := t.word("model_revision", "revision_of_model", "revision")) not in (None, "main"):
        c.set("model.revision", revision)
    tokenizer = t.word("tokenizer_config", "tokenizer_name", "tokenizer_name_or_path")
    if tokenizer not in (None, name):
        c.set("model.tokenizer", tokenizer)
    if t.is_on("trust_remote_code"):
        c.set("model.trust_remote_code", True)
    if isinstance(t.values.get("tokens"), ForeignTable):  # axolotl's older form of `special_tokens`
        t.leave("tokens", FOREIGN_KEYS["special_tokens"])
    added = [one for key in ("add_tokens", "add_special_tokens", "tokens") for one in t.words(key)]
    if added:
        c.set("tokens.add", list(dict.fromkeys(added)))
    settings = t.table("model_config")
    if settings.is_on("output_router_logits"):
        _router(c, settings)


def _router(c: Conversion, settings: ForeignTable) -> None:
    """The load-balancing loss of a mixture of experts, which `model_config: {output_router_logits: true}` turns on."""
    given = settings.number("router_aux_loss_coef")
    doubt = "" if given else f"{TODO}the coefficient of the model's own config, router_aux_loss_coef"
    c.set("objective.router_aux_loss_coef", given or 0.001, doubt)


def convert_adapters(
    c: Conversion, rank: int, alpha: float, dropout: float, targets: Any, comment: str = "", bits: str | None = None
) -> None:
    """Mode and sections of adapters; the values are the tool's or its defaults. bits: type of quantization."""
    t = c.theirs
    c.set("mode", "qlora" if bits else "lora")
    c.set("lora.rank", int(rank))
    c.set("lora.alpha", alpha)
    c.set("lora.dropout", dropout)
    c.set("lora.targets", targets, comment)
    if t.is_on("use_rslora", "peft_use_rslora"):
        c.set("lora.rslora", True)
    if t.is_on("use_dora", "peft_use_dora"):
        c.set("lora.dora", True)
    if saved := t.words("lora_modules_to_save", "modules_to_save", "additional_target"):
        c.set("lora.modules_to_save", saved)
    if bits:
        c.set("quantization.type", bits, "8-bit integers there; 8-bit floats here" if bits == "fp8" else "")


def _optimizer(c: Conversion, defaults: ToolDefaults) -> None:
    t = c.theirs
    given = t.word("optim", "optimizer", default=defaults.optimizer)
    ours = "muon" if t.is_on("use_muon") else OPTIMIZERS.get(str(given))
    unknown = f"{TODO}{given} is not offered; another optimizer needs another learning rate"
    if ours != "adamw":
        c.set("optimizer.name", ours or "adamw", "" if ours else unknown)
    for key in ("use_galore", "use_apollo", "use_badam", "use_adam_mini"):
        if t.is_on(key):
            c.set("optimizer.name", "adamw", f"{TODO}{key} there, which is not offered")
            t.leave(key, f"is not an optimizer here: {c.value('optimizer.name')} is set")
    rate = t.number("learning_rate", default=defaults.lr)
    if rate is None:
        c.set("optimizer.lr", 2e-5, f"{TODO}no learning rate is given")
    else:
        c.set("optimizer.lr", float(rate), "" if "learning_rate" in t else f"the default of {c.tool}")
    for key in ("loraplus_lr_ratio", "embedding_lr", "embedding_learning_rate", "embedding_lr_scale"):
        if key in t and t.take(key):
            c.doubt("optimizer.lr", f"{key} gives some weights another rate there")
            t.leave(key, "all weights have one rate, `optimizer.lr`")
    c.copy("optimizer.weight_decay", "weight_decay", default=defaults.weight_decay)
    betas = [float(t.number(f"adam_beta{i}", default=default)) for i, default in ((1, 0.9), (2, 0.999))]
    c.set("optimizer.betas", betas)
    c.copy("optimizer.eps", "adam_epsilon", default=1e-8)
    c.copy("optimizer.max_grad_norm", "max_grad_norm", default=1.0)
    if not c.value("optimizer.max_grad_norm"):
        c.set("optimizer.max_grad_norm", None, "no clipping")
    if ours == "sgd":
        c.set("optimizer.momentum", 0.0)


def _schedule(c: Conversion, defaults: ToolDefaults) -> None:
    """Decay and warm-up."""
    t, ratio, steps = c.theirs, defaults.warmup_ratio, defaults.warmup_steps
    given = t.word("lr_scheduler_type", "lr_scheduler", default=defaults.schedule)
    ours = SCHEDULES.get(str(given))
    nearest = "" if ours else f"{TODO}{given} is not offered; this comes nearest"
    c.set("schedule.name", ours or "cosine", nearest)
    further = t.table("lr_scheduler_kwargs")
    least, rate = further.number("min_lr_rate"), further.number("min_lr")
    if least is None and rate:
        least = round(rate / c.value("optimizer.lr"), 6)
    least = t.number("cosine_min_lr_ratio", default=least)
    if least:
        c.set("schedule.min_lr_ratio", float(least))
    if ours == "wsd":
        decay = further.number("num_decay_steps")
        said = f"{decay} steps there" if decay else "num_decay_steps there"
        c.set("schedule.decay_ratio", 0.1, f"{TODO}{said}; here a share of all steps")
    warmup, share = t.number("warmup_steps"), t.number("warmup_ratio")
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
    t = c.theirs
    given = str(t.take("gradient_checkpointing", "use_gradient_checkpointing", default=checkpointing)).lower()
    if "gradient_checkpointing_kwargs" in t:
        t.table("gradient_checkpointing_kwargs").ignore("use_reentrant")
    is_on = given not in ("false", "none", "no") and not t.is_on("disable_gradient_checkpointing")
    c.set("train.activation_checkpointing", is_on, "same result, less memory" if is_on else "")
    if str(t.take("activation_offloading", default=False)).lower() not in ("false", "none") or given == "offload":
        c.set("train.activation_offload", True)
    if t.is_on("torch_compile"):
        c.set("train.compile", True)
    if t.is_on("use_liger_kernel", "enable_liger_kernel"):
        c.set("model.cross_entropy", "auto", "`liger` takes its kernels and needs them installed")


def _precision(c: Conversion, default: str, launch: ForeignLaunch, keeps_16_bits: bool) -> None:
    """Precision, as transformers decides: bf16 and fp16 of the arguments, else the launcher's mixed_precision."""
    t, comment = c.theirs, ""
    bf16, fp16 = t.take("bf16"), t.is_on("fp16")
    is_16 = str(bf16).lower() in ("true", "auto", "full", "yes", "1")
    if "bf16" not in t and not fp16:
        given, comment = default, f"the default of {c.tool}"
    else:
        given = "fp16" if fp16 else "bf16" if is_16 else "fp32"
    if given == "fp32" and launch.mixed_precision in ("bf16", "fp16"):
        given, comment = launch.mixed_precision, "mixed_precision of the launch"
    elif given == "fp32" and launch.mixed_precision == "fp8":
        t.leave("mixed_precision", FP8)
    if t.is_on("float16"):
        given, comment = "fp16", ""
    if t.is_on("float32"):
        given, comment = "fp32", ""
    sharded = c.launch is not None and c.launch.startswith(("fsdp", "zero", "hsdp"))
    pure = t.is_on("pure_bf16") or (keeps_16_bits and given == "bf16" and not sharded)
    without_autocast = t.is_on("bfloat16")  # axolotl's; adapters are in fp32 all the same
    if pure or (without_autocast and c.value("mode") == "full"):
        c.set("train.precision", "bf16_true", "what is trained is in bf16, as there; `bf16` keeps it in fp32")
    else:
        c.set("train.precision", "bf16" if without_autocast else given, comment)
    if t.is_on("fp8") and c.value("mode") == "full":
        c.set("train.precision", "fp8", "products in 8 bits: Hopper and later")
    elif t.is_on("fp8"):
        t.leave("fp8", FP8)


FP8 = "set `train.precision: fp8`, which is for `mode: full`, on Hopper and later"
_NO_ROWS = "there are no rows to evaluate on: set `data.eval`, such as `{share: 0.05}`"


def _every(c: Conversion, name: str) -> int | None:
    """Returns an interval in steps; transformers reads a value below 1 as a share of the run's steps."""
    every = c.theirs.number(name)
    if every is None or every == 0:
        return None
    if every >= 1:
        return int(every)
    if (steps := c.value("train.max_steps")) and every > 0:
        return math.ceil(every * steps)
    key = {"save_steps": "checkpoint.every_steps", "eval_steps": "evaluate.every_steps"}[name]
    c.theirs.leave(name, f"a share of the run's steps there: set `{key}`, a number of steps")
    return None


def _evaluation(c: Conversion) -> None:
    """Intervals of evaluation, early stopping and the best checkpoint; after the data."""
    t = c.theirs
    t.ignore("do_eval", "per_device_eval_batch_size", "eval_batch_size")
    if "eval" not in c.sources and not c.value("data.eval"):
        for name in ("eval_steps", "evals_per_epoch", "eval_strategy", "evaluation_strategy"):
            if str(t.take(name)).lower() not in ("none", "no", "false"):
                t.leave(name, _NO_ROWS)
        for name in ("early_stopping_patience", "early_stopping_steps", "load_best_model_at_end"):
            if t.take(name) not in (None, False):
                t.leave(name, _NO_ROWS)
        return
    strategy = t.word("eval_strategy", "evaluation_strategy", default="steps")
    every = _every(c, "eval_steps")
    if strategy == "steps" and every:
        c.set("evaluate.every_steps", every)
    elif strategy == "epoch":
        t.leave("eval_strategy" if "eval_strategy" in t else "evaluation_strategy", "set `evaluate.every_steps`")
    patience = t.count("early_stopping_patience", "early_stopping_steps")
    if patience and c.value("evaluate.every_steps"):
        c.set("train.stop_when", {"metric": "eval_loss", "patience": patience})
    elif patience:
        name = "early_stopping_patience" if "early_stopping_patience" in t else "early_stopping_steps"
        t.leave(name, "set `evaluate.every_steps` and `train.stop_when`")
    metric = t.word("metric_for_best_model", default="eval_loss")
    if metric not in ("eval_loss", "loss"):
        t.leave("metric_for_best_model", f"`checkpoint.best` knows eval_loss and others, not {metric}")
    t.ignore("greater_is_better")
    if t.is_on("load_best_model_at_end"):
        c.set("checkpoint.best", "eval_loss")
        c.set("train.result", "best")


def _checkpoints(c: Conversion, defaults: ToolDefaults) -> None:
    t = c.theirs
    strategy = t.word("save_strategy", default="steps")
    every = _every(c, "save_steps")
    if "save_steps" not in t and "saves_per_epoch" not in t and strategy == "steps":
        every = defaults.save_steps
    if strategy == "steps" and every:
        c.set("checkpoint.every_steps", every, "" if "save_steps" in t else f"the default of {c.tool}")
    elif strategy not in ("steps", "no"):
        t.leave("save_strategy", "set `checkpoint.every_steps`, or `checkpoint.best`")
    if "saves_per_epoch" in t:
        t.leave("saves_per_epoch", "set `checkpoint.every_steps`")
    if (keep := t.number("save_total_limit")) is not None:
        c.set("checkpoint.keep", max(1, int(keep)))


def _tracking(c: Conversion, project: str) -> None:
    """Trackers. project: the tool's default at W&B and Trackio."""
    t = c.theirs
    trackers = set(t.words("report_to"))
    name, entity = t.word("wandb_project"), t.word("wandb_entity")
    if name or t.is_on("use_wandb", "enable_wandb") or trackers & {"wandb", "all"}:
        c.set("tracking.wandb", {"project": name or project} | ({"entity": entity} if entity else {}))
    if t.is_on("use_tensorboard", "enable_tensorboard") or trackers & {"tensorboard", "all"}:
        c.set("tracking.tensorboard", True)
    if "trackio" in trackers:
        c.set("tracking.trackio", t.word("project", "trackio_space_id", default=project))
    if others := trackers - {"wandb", "tensorboard", "trackio", "none", "all"}:
        t.leave("report_to", f"there is no tracker {', '.join(sorted(others))}; metrics.jsonl is always written")


def _reference(c: Conversion) -> None:
    """Reference and dropout of an objective that compares answers; after objective and adapters."""
    t, name = c.theirs, c.value("objective.name")
    base_is_first = c.value("mode") != "full" and not c.value("lora.modules_to_save") and not c.value("tokens.add")
    if name in ("dpo", "kto") and c.value("objective.loss") != "simpo":
        if other := t.word("ref_model"):
            c.set("objective.reference_model", other)
        elif base_is_first and not t.is_on("precompute_ref_log_probs"):
            c.set("objective.reference", "adapters_off", "the model without its adapters, as there")
        t.ignore("precompute_ref_log_probs")
    if name in COMPARING:
        if not t.is_on("disable_dropout", default=True):
            c.set("objective.dropout", True)
        elif c.value("lora.dropout"):
            c.set("lora.dropout", 0.0, f"{c.value('lora.dropout')} there, but disable_dropout turns it off")
        if c.value("data.packing"):
            t.leave(next(name for name in ("packing", "sample_packing") if name in t), "one example is a row")
        c.set("data.packing", False, "one example a row, as there")
        c.set("data.overlong", "drop", "examples that do not fit are left out whole, and counted")


def file_paths(one: ForeignTable) -> list[str]:
    """Returns the paths of a section with `path` and `data_files`, as recipes write them."""
    path, files = one.word("path", default="") or "", one.words("data_files")
    if files and path not in ("", *FILES):  # else the files are local, and this their kind
        files = [f"hf://datasets/{path}/{file}" for file in files]
    return files or [path]
