"""torchtune: its configs, which name classes with their arguments.

Keys and defaults: https://github.com/pytorch/torchtune, recipes, torchtune/models and torchtune/datasets. Arguments
that transformers' trainer and peft have as well are put beside under those names, which `foreign_arguments` reads.
"""

from __future__ import annotations

from typing import Any

from finetune.desk.setup.conversion import TODO, Conversion, Source
from finetune.desk.setup.foreign_arguments import (
    FILES,
    convert_adapters,
    convert_model,
    convert_run,
    convert_training,
)
from finetune.desk.setup.foreign_values import ForeignTable

COMPONENT = "_component_"
_ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
_MLP = ("gate_proj", "up_proj", "down_proj")
_ALPACA = {"alpaca_dataset": "tatsu-lab/alpaca", "alpaca_cleaned_dataset": "yahma/alpaca-cleaned"}
_SECTIONS = ("profiler", "checkpointer", "tokenizer", "metric_logger")  # whose other keys cannot change a result


def is_torchtune(theirs: dict[str, Any]) -> bool:
    """Returns whether sections name classes."""
    return any(isinstance(one, dict) and COMPONENT in one for one in theirs.values())


def convert_torchtune(c: Conversion) -> None:
    t = c.theirs
    t.put("model_name_or_path", (t.table("checkpointer").word("checkpoint_dir") or "").rstrip("/"))
    c.defaults.pop("seed")  # null draws one there
    convert_run(c)
    convert_model(c)
    _mode(c, t.table("model"))
    _objective(c, t.table("loss"))
    _data(c)
    _trainer_arguments(c)
    _logger(c, t.table("metric_logger"))
    t.ignore("device", "log_every_n_steps", "log_peak_memory_stats", "save_adapter_weights_only")
    for name in _SECTIONS:
        t.table(name).ignore(*t.table(name).values)
    convert_training(c, keeps_16_bits=True)


def _class(table: ForeignTable) -> str:
    """Returns the name of the class or function, without its modules."""
    return (table.word(COMPONENT) or "").rpartition(".")[2]


def _mode(c: Conversion, model: ForeignTable) -> None:
    """Mode and adapters, by the builder: llama3_2_1b, lora_llama3_2_1b, qlora_llama3_2_1b."""
    builder, t = _class(model), c.theirs
    in_four = builder.startswith("qlora_") or model.is_on("quantize_base")
    if not (in_four or builder.startswith("lora_")):
        c.set("mode", "full")
        return
    for name, theirs, default in (("lora_r", "rank", 8), ("lora_alpha", "alpha", 16), ("lora_dropout", "dropout", 0)):
        t.put(name, model.number(f"lora_{theirs}", default=default))
    t.put("use_dora", model.is_on("use_dora"))
    targets = [_ATTENTION.get(one, one) for one in model.words("lora_attn_modules")]
    targets += _MLP if model.is_on("apply_lora_to_mlp") else ()
    if model.is_on("apply_lora_to_output"):
        model.leave("apply_lora_to_output", "the head gets no adapter: train it whole by `lora.modules_to_save`")
    convert_adapters(c, targets, bits="nf4" if in_four else None)


def _objective(c: Conversion, loss: ForeignTable) -> None:
    name = _class(loss)
    row = c.data.value("objective.name", name)
    c.set("objective.name", row.ours or "sft", "" if row.ours or not name else f"{TODO}{name} is not offered")
    if row.ours == "dpo":
        c.set("objective.loss", row.sets["objective.loss"])
        c.copy("objective.beta", "beta", default=0.1, table=loss)
        if loss.number("label_smoothing"):
            c.copy("objective.label_smoothing", "label_smoothing", table=loss)
    loss.ignore("num_output_chunks", "ignore_index")  # memory of the same loss


def _data(c: Conversion) -> None:
    """Sources, the loss mask and the length."""
    t = c.theirs
    train, held_out = t.tables("dataset"), t.tables("dataset_val")
    c.sources["train"] = [_source(one) for one in train] or [({"path": "rows.jsonl"}, f"{TODO}no dataset is named")]
    if held_out:
        c.sources["eval"] = [_source(one) for one in held_out]
    on_input = {one.is_on("train_on_input", default=_class(one) in _ALPACA) for one in (*train, *held_out)}
    if c.value("objective.name") == "sft":
        is_text = {source.get("format") for source, _ in c.sources["train"]} == {"text"}
        doubt = f"{TODO}sources differ there in train_on_input" if len(on_input) > 1 else ""
        c.set("objective.train_on", "all" if is_text or on_input == {True} else "assistant", doubt)
    packs = {one.is_on("packed") for one in train} == {True}
    length = t.table("tokenizer").count("max_seq_len")
    c.set("data.max_length", length or 4096, "" if length else f"{TODO}no limit there; the longest example, in tokens")
    c.set("data.overlong", "truncate")
    c.set("data.packing", packs)
    if not t.is_on("shuffle", default=True):
        t.leave("shuffle", "rows are shuffled in each epoch, by `run.seed`")
    if "prompt_template" in t.table("tokenizer"):
        t.table("tokenizer").leave("prompt_template", "write it as a chat template: `model.chat_template: FILE.jinja`")


def _source(one: ForeignTable) -> Source:
    """Returns a recipe's source of one dataset, by its builder."""
    builder, files, split = _class(one), one.words("data_files"), one.word("split", default="train")
    path = one.word("source", default=_ALPACA.get(builder, "org/dataset")) or ""
    source: dict[str, Any] = {"path": files[0] if path in FILES and files else path}
    source |= {"split": split} if split != "train" else {}
    names, doubt = one.table("column_map"), ""
    if len(files) > 1:
        doubt = f"{TODO}{len(files)} files there: a source of its own for each, or a pattern"
    if builder in _ALPACA:
        source |= {"format": "alpaca"} | _columns(names, {"instruction": "instruction", "output": "output"})
    elif builder == "instruct_dataset":
        named = {"prompt": names.word("input", default="input"), "completion": names.word("output", default="output")}
        source |= {"format": "prompt_completion", "columns": named}
    elif builder == "chat_dataset":
        column, style = one.word("conversation_column"), one.word("conversation_style")
        format, field = ("sharegpt", "conversations") if style == "sharegpt" else ("messages", "messages")
        source |= {"format": format} | ({"columns": {field: column}} if column not in (None, field) else {})
    elif builder == "text_completion_dataset":
        column = one.word("column", default="text")
        source |= {"format": "text"} | ({"columns": {"text": column}} if column != "text" else {})
    elif builder == "preference_dataset":
        source |= {"format": "preference"} | _columns(names, {"chosen": "chosen", "rejected": "rejected"})
    else:
        doubt = f"{TODO}{builder} has no counterpart: name its rows, `format` and `columns`"
    return source, doubt


def _columns(names: ForeignTable, fields: dict[str, str]) -> dict[str, Any]:
    """Returns `columns` of a source for fields that have another name there."""
    named = {ours: names.word(theirs, default=theirs) for ours, theirs in fields.items()}
    other = {ours: name for ours, name in named.items() if name != ours}
    return {"columns": other} if other else {}


def _trainer_arguments(c: Conversion) -> None:
    """Puts batch, optimizer, schedule, length and precision under the names of transformers' trainer."""
    t, optimizer, scheduler = c.theirs, c.theirs.table("optimizer"), c.theirs.table("lr_scheduler")
    betas = optimizer.listed("betas") or (0.9, 0.999)
    decays = _class(scheduler)
    for name, value in {
        "per_device_train_batch_size": t.count("batch_size", default=1),
        "optim": _class(optimizer) or "AdamW",
        "learning_rate": optimizer.number("lr", default=1e-3),
        "weight_decay": optimizer.number("weight_decay", default=0.01),
        "adam_beta1": betas[0],
        "adam_beta2": betas[1],
        "adam_epsilon": optimizer.number("eps", default=1e-8),
        "max_grad_norm": t.number("clip_grad_norm", default=0),
        "lr_scheduler_type": decays or "constant",
        "warmup_steps": scheduler.number("num_warmup_steps", default=0),
        "num_train_epochs": t.number("epochs", default=1),
        "eval_steps": t.number("run_val_every_n_steps"),
        "save_strategy": "no",  # at the end of an epoch there
        "bf16": t.word("dtype", default="bf16") in ("bf16", "bfloat16"),
        "gradient_checkpointing": t.is_on("enable_activation_checkpointing"),
        "activation_offloading": t.is_on("enable_activation_offloading"),
        "torch_compile": t.is_on("compile"),
    }.items():
        t.put(name, value)
    optimizer.ignore("fused", "foreach")


def _logger(c: Conversion, logger: ForeignTable) -> None:
    tracker = {"WandBLogger": "wandb", "TensorBoardLogger": "tensorboard"}.get(_class(logger))
    if tracker:
        c.theirs.put("report_to", tracker)
        c.theirs.put("wandb_project", logger.word("project", default="torchtune") if tracker == "wandb" else None)
