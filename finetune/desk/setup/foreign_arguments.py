"""Arguments that TRL, axolotl, LLaMA-Factory and Unsloth share: those of transformers' trainer, peft and bitsandbytes.

axolotl renames some of them. Defaults are those of https://github.com/huggingface/transformers,
src/transformers/training_args.py; each tool's own are given by its module.
"""

from __future__ import annotations

import math
import re
from typing import Any

from finetune.desk.setup.conversion import TODO, Conversion, run_name
from finetune.desk.setup.foreign_keys import foreign_tool
from finetune.desk.setup.foreign_launch import ForeignLaunch, read_foreign_launch
from finetune.desk.setup.foreign_rollouts import fit_rollouts
from finetune.desk.setup.foreign_values import ForeignTable
from finetune.recipe.objective_settings import OBJECTIVE_SECTIONS, AgainstReference, ObjectiveSection

FILES = ("json", "csv", "parquet", "text", "arrow")  # kinds of files that stand in place of a hub id
# Keys that cannot change what is trained: names of folders, and switches of the command.
_WITHOUT_EFFECT = ("overwrite_output_dir", "do_train")


def convert_training(c: Conversion, keeps_16_bits: bool = False) -> None:
    """Converts all but run, model, adapters, objective and data, which precede.

    keeps_16_bits: whether trained weights are in 16 bits there, unless ZeRO or FSDP has copies in fp32.
    """
    launch = read_foreign_launch(c)
    _batch(c, launch)
    _optimizer(c)
    _schedule(c)
    _length(c)
    _precision(c, launch, keeps_16_bits)
    _memory(c)
    _evaluation(c)
    _checkpoints(c)
    _tracking(c)
    _reference(c)
    fit_rollouts(c)
    c.theirs.ignore(*_WITHOUT_EFFECT)


def _batch(c: Conversion, launch: ForeignLaunch) -> None:
    """Rows of a step: micro-batch x accumulation x devices that have rows of their own."""
    t = c.theirs
    micro = c.count("batch.rows_per_device")
    accumulation = c.defaults["gradient_accumulation_steps"]
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


def _length(c: Conversion) -> None:
    passes, most = c.number("train.epochs"), c.number("train.max_steps")
    if most and most > 0:
        c.set("train.max_steps", int(most), f"before {passes:g} epochs are over" if "num_epochs" in c.theirs else "")
    else:
        c.copy("train.epochs")


def convert_held_out(c: Conversion, name: str, table: ForeignTable | None = None) -> None:
    """Rows for evaluation: a share of the training rows, or a number of them, which has no counterpart."""
    held_out = (table or c.theirs).number(name)
    if held_out and "eval" in c.sources:
        (table or c.theirs).leave(name, "evaluation has rows of its own")
    elif held_out and 0 < held_out < 1:
        c.set("data.eval", {"share": float(held_out)})
    elif held_out:
        c.set("data.eval", {"share": 0.05}, f"{TODO}{held_out} rows there; here a share of them")


def convert_run(c: Conversion) -> None:
    t = c.theirs
    names = ("run_name", "wandb_name", "output_dir", *c.data.names("model.name"))
    name = next((str(t.values[name]) for name in names if name in t), "run")
    t.ignore("run_name", "wandb_name", "output_dir")
    c.set("run.name", run_name(name))
    c.copy("run.seed")


def convert_model(c: Conversion) -> None:
    """Name, revision, tokenizer and added tokens of the model."""
    t = c.theirs
    name = c.word("model.name") or "org/model"
    plain = re.sub(r"(-unsloth)?-bnb-4bit$", "", name)
    comment = f"{name} is quantized already; this is taken for the model before" if plain != name else ""
    if re.search(r"(?i)-(awq|gptq|aqlm)", name):
        comment = f"{TODO}it is quantized already: name the model before, with `mode: qlora`"
    c.set("model.name", plain, f"{TODO}no model is named" if name == "org/model" else comment)
    if (revision := c.word("model.revision")) not in (None, "main"):
        c.set("model.revision", revision)
    if (tokenizer := c.word("model.tokenizer")) not in (None, name):
        c.set("model.tokenizer", tokenizer)
    if c.is_on("model.trust_remote_code"):
        c.set("model.trust_remote_code", True)
    if isinstance(t.values.get("tokens"), ForeignTable):  # axolotl's older form of `special_tokens`
        t.leave("tokens", foreign_tool().keys["special_tokens"].note)
    added = [one for key in c.data.names("tokens.add") for one in t.words(key)]
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
    c: Conversion, targets: Any, comment: str = "", bits: str | None = None, alpha_per_rank: int = 1
) -> None:
    """Mode and sections of adapters. bits: type of quantization; alpha_per_rank: if the tool has no other default."""
    rank = c.count("lora.rank")
    c.set("mode", "qlora" if bits else "lora")
    c.set("lora.rank", int(rank))
    c.set("lora.alpha", c.number("lora.alpha", default=alpha_per_rank * rank))
    c.set("lora.dropout", c.number("lora.dropout"))
    c.set("lora.targets", targets, comment)
    for key in ("lora.rslora", "lora.dora"):
        if c.is_on(key):
            c.set(key, True)
    if saved := c.words("lora.modules_to_save"):
        c.set("lora.modules_to_save", saved)
    if bits:
        c.set("quantization.type", bits, "8-bit integers there; 8-bit floats here" if bits == "fp8" else "")


def _optimizer(c: Conversion) -> None:
    t, given = c.theirs, c.word("optimizer.name")
    ours = "muon" if t.is_on("use_muon") else c.data.value("optimizer.name", given).ours
    unknown = f"{TODO}{given} is not offered; another optimizer needs another learning rate"
    if ours != "adamw":
        c.set("optimizer.name", ours or "adamw", "" if ours else unknown)
    for key in ("use_galore", "use_apollo", "use_badam", "use_adam_mini"):
        if t.is_on(key):
            c.set("optimizer.name", "adamw", f"{TODO}{key} there, which is not offered")
            t.leave(key, f"is not an optimizer here: {c.value('optimizer.name')} is set")
    rate = c.number("optimizer.lr")
    if rate is None:
        c.set("optimizer.lr", 2e-5, f"{TODO}no learning rate is given")
    else:
        c.set("optimizer.lr", float(rate), "" if "learning_rate" in t else f"the default of {c.tool}")
    for key in ("loraplus_lr_ratio", "embedding_lr", "embedding_learning_rate", "embedding_lr_scale"):
        if key in t and t.take(key):
            c.doubt("optimizer.lr", f"{key} gives some weights another rate there")
            t.leave(key, "all weights have one rate, `optimizer.lr`")
    c.copy("optimizer.weight_decay")
    betas = c.data.names("optimizer.betas")
    c.set("optimizer.betas", [float(t.number(name, default=c.defaults[name])) for name in betas])
    c.copy("optimizer.eps")
    c.copy("optimizer.max_grad_norm")
    if not c.value("optimizer.max_grad_norm"):
        c.set("optimizer.max_grad_norm", None, "no clipping")
    if ours == "sgd":
        c.set("optimizer.momentum", 0.0)


def _schedule(c: Conversion) -> None:
    """Decay and warm-up."""
    t, ratio, steps = c.theirs, c.defaults["warmup_ratio"], c.defaults["warmup_steps"]
    given = c.word("schedule.name")
    ours = c.data.value("schedule.name", given).ours
    nearest = "" if ours else f"{TODO}{given} is not offered; this comes nearest"
    c.set("schedule.name", ours or "cosine", nearest)
    further = t.table("lr_scheduler_kwargs")
    least, rate = further.number("min_lr_rate"), further.number("min_lr")
    if least is None and rate:
        least = round(rate / c.value("optimizer.lr"), 6)
    if least := c.number("schedule.min_lr_ratio", default=least):
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


def _memory(c: Conversion) -> None:
    """Recomputation, offloading and compilation."""
    t, names = c.theirs, c.data.names("train.activation_checkpointing")
    given = str(t.take(*names, default=c.default(names))).lower()
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


def _precision(c: Conversion, launch: ForeignLaunch, keeps_16_bits: bool) -> None:
    """Precision, as transformers decides: bf16 and fp16 of the arguments, else the launcher's mixed_precision."""
    t, comment = c.theirs, ""
    bf16, fp16 = t.take("bf16"), t.is_on("fp16")
    is_16 = str(bf16).lower() in ("true", "auto", "full", "yes", "1")
    if "bf16" not in t and not fp16:
        given, comment = "bf16" if c.defaults["bf16"] else "fp32", f"the default of {c.tool}"
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
    t, patience_names = c.theirs, c.data.names("train.stop_when.patience")
    t.ignore("do_eval", "per_device_eval_batch_size", "eval_batch_size")
    if "eval" not in c.sources and not c.value("data.eval"):
        for name in ("eval_steps", "evals_per_epoch", "eval_strategy", "evaluation_strategy"):
            if str(t.take(name)).lower() not in ("none", "no", "false"):
                t.leave(name, _NO_ROWS)
        for name in (*patience_names, "load_best_model_at_end"):
            if t.take(name) not in (None, False):
                t.leave(name, _NO_ROWS)
        return
    strategy = t.word("eval_strategy", "evaluation_strategy", default="steps")
    every = _every(c, "eval_steps")
    if strategy == "steps" and every:
        c.set("evaluate.every_steps", every)
    elif strategy == "epoch":
        t.leave("eval_strategy" if "eval_strategy" in t else "evaluation_strategy", "set `evaluate.every_steps`")
    patience = c.count("train.stop_when.patience")
    if patience and c.value("evaluate.every_steps"):
        c.set("train.stop_when", {"metric": "eval_loss", "patience": patience})
    elif patience:
        t.leave(next(name for name in patience_names if name in t), "set `evaluate.every_steps` and `train.stop_when`")
    metric = t.word("metric_for_best_model", default="eval_loss")
    if metric not in ("eval_loss", "loss"):
        t.leave("metric_for_best_model", f"`checkpoint.best` knows eval_loss and others, not {metric}")
    t.ignore("greater_is_better")
    if t.is_on("load_best_model_at_end"):
        c.set("checkpoint.best", "eval_loss")
        c.set("train.result", "best")


def _checkpoints(c: Conversion) -> None:
    t = c.theirs
    strategy = t.word("save_strategy", default="steps")
    every = _every(c, "save_steps")
    if "save_steps" not in t and "saves_per_epoch" not in t and strategy == "steps":
        every = c.defaults["save_steps"]
    if strategy == "steps" and every:
        c.set("checkpoint.every_steps", every, "" if "save_steps" in t else f"the default of {c.tool}")
    elif strategy not in ("steps", "no"):
        t.leave("save_strategy", "set `checkpoint.every_steps`, or `checkpoint.best`")
    if "saves_per_epoch" in t:
        t.leave("saves_per_epoch", "set `checkpoint.every_steps`")
    if (keep := c.number("checkpoint.keep")) is not None:
        c.set("checkpoint.keep", max(1, int(keep)))


def _tracking(c: Conversion) -> None:
    """Trackers; the tool has one default for the project at W&B and at Trackio."""
    t, project = c.theirs, c.defaults["wandb_project"]
    trackers = set(t.words("report_to"))
    name, entity = t.word("wandb_project"), t.word("wandb_entity")
    if name or t.is_on("use_wandb", "enable_wandb") or trackers & {"wandb", "all"}:
        c.set("tracking.wandb", {"project": name or project} | ({"entity": entity} if entity else {}))
    if t.is_on("use_tensorboard", "enable_tensorboard") or trackers & {"tensorboard", "all"}:
        c.set("tracking.tensorboard", True)
    if t.is_on("use_mlflow") or "mlflow" in trackers:
        address = t.word("mlflow_tracking_uri")
        experiment = {"experiment": t.word("mlflow_experiment_name", default=project)}
        c.set("tracking.mlflow", experiment | ({"uri": address} if address else {}))
    if "trackio" in trackers:
        c.set("tracking.trackio", t.word("project", "trackio_space_id", default=project))
    if others := trackers - {"wandb", "mlflow", "tensorboard", "trackio", "none", "all"}:
        t.leave("report_to", f"there is no tracker {', '.join(sorted(others))}; metrics.jsonl is always written")


def chosen_objective(c: Conversion) -> type[ObjectiveSection]:
    return OBJECTIVE_SECTIONS[c.value("objective.name") or "sft"]


def copy_objective_keys(c: Conversion, *keys: str) -> None:
    """Copies those of the keys that the objective has."""
    for key in keys:
        if key in chosen_objective(c).model_fields:
            c.copy(f"objective.{key}")


def _reference(c: Conversion) -> None:
    """Reference and dropout of an objective that compares answers; after objective and adapters."""
    t, objective = c.theirs, chosen_objective(c)
    base_is_first = c.value("mode") != "full" and not c.value("lora.modules_to_save") and not c.value("tokens.add")
    if issubclass(objective, AgainstReference) and c.value("objective.loss") != "simpo":
        if other := c.word("objective.reference_model"):
            c.set("objective.reference_model", other)
        elif base_is_first and not t.is_on("precompute_ref_log_probs"):
            c.set("objective.reference", "adapters_off", "the model without its adapters, as there")
        t.ignore("precompute_ref_log_probs")
    if objective.row_kind.sequences:
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
