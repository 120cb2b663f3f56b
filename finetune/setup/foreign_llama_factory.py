"""LLaMA-Factory's YAML and dataset_info.json. Keys and defaults: https://github.com/hiyouga/LLaMA-Factory,
src/llamafactory/hparams and data/README.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from finetune.errors import UserError
from finetune.setup.conversion import TODO, Conversion
from finetune.setup.foreign_arguments import (
    ToolDefaults,
    convert_adapters,
    convert_held_out,
    convert_model,
    convert_run,
    convert_training,
)

_TEMPLATES = {
    **{name: name for name in ("chatml", "gemma", "llama3", "zephyr")},
    "mistral": "mistral-v3",
}
_PAIR_LOSSES = {**{name: ("dpo", name) for name in ("sigmoid", "hinge", "ipo", "simpo")}, "orpo": ("orpo", None)}
Rows = tuple[dict[str, Any], str]  # a source of a recipe, and a comment


def convert_llama_factory(c: Conversion) -> None:
    convert_run(c)
    convert_model(c, "model_name_or_path")
    name = c.word("template")
    if name in _TEMPLATES:
        c.set("model.chat_template", _TEMPLATES[name], "or null, for the tokenizer's own")
    elif name not in (None, "default", "empty"):
        c.set("model.chat_template", None, f"the tokenizer's own, in place of LLaMA-Factory's {name}")
    if not c.is_on("enable_thinking", default=True):
        c.set("model.empty_thought", "given")
    kind, bits = c.take("finetuning_type", default="lora"), c.number("quantization_bit")
    if kind == "full":
        c.set("mode", "full")
    else:
        rank = c.number("lora_rank", default=8)
        targets = c.listed("lora_target")
        comment = "" if kind == "lora" else f"{TODO}{kind} is not offered; adapters come nearest"
        type = str(c.take("quantization_type", default="nf4")) if bits == 4 else "fp8" if bits == 8 else None
        if bits not in (None, 4, 8):
            c.leave("quantization_bit", "set `mode: qlora` and `quantization.type`: nf4, fp4 or fp8")
        convert_adapters(
            c,
            rank=rank,
            alpha=c.number("lora_alpha", default=2 * rank),
            dropout=c.number("lora_dropout", default=0.0),
            targets="all-linear" if targets in ([], ["all"]) else targets,
            comment=comment,
            bits=type,
        )
        if type in ("nf4", "fp4") and not c.is_on("double_quantization", default=True):
            c.set("quantization.double_quant", False)
        if c.take("quantization_method", default="bnb") not in ("bnb", "bitsandbytes"):
            c.leave(
                "quantization_method", "weights are quantized by bitsandbytes; `quantization.type` has nf4, fp4, fp8"
            )
    _objective(c)
    _data(c)
    convert_training(c, ToolDefaults(lr=5e-5))


def _objective(c: Conversion) -> None:
    stage, loss = c.word("stage", default="sft"), c.word("pref_loss", default="sigmoid")
    if stage in ("pt", "sft"):
        c.set("objective.name", "sft")
        alone = "last_assistant" if c.is_on("mask_history") else "assistant"
        c.set("objective.train_on", "all" if c.is_on("train_on_prompt") else alone)
        return
    if stage == "dpo" and loss in _PAIR_LOSSES:
        name, ours = _PAIR_LOSSES[loss]
        c.set("objective.name", name)
        if ours:
            c.set("objective.loss", ours)
    elif stage in ("kto", "rm"):
        c.set("objective.name", {"rm": "reward"}.get(stage, stage))
    elif stage == "dpo":
        c.set("objective.name", "dpo")
        c.set("objective.loss", "sigmoid", f"{TODO}`pref_loss: {loss}` is not offered")
    else:
        c.set("objective.name", "sft", f"{TODO}`stage: {stage}` is not offered")
        return
    if stage != "rm":
        c.copy("objective.beta", "pref_beta", default=0.1)
    if c.value("objective.loss") == "simpo":
        c.copy("objective.margin", "simpo_gamma", default=0.5)
    if stage == "dpo" and c.number("pref_ftx"):
        c.copy("objective.sft_weight", "pref_ftx")
    if c.number("dpo_label_smoothing"):
        c.copy("objective.label_smoothing", "dpo_label_smoothing")
    if stage == "kto":
        c.copy("objective.desirable_weight", "kto_chosen_weight", default=1.0)
        c.copy("objective.undesirable_weight", "kto_rejected_weight", default=1.0)


def _data(c: Conversion) -> None:
    stage, folder = str(c.word("stage", default="sft")), Path(str(c.take("dataset_dir", default="data")))
    limit, file = c.number("max_samples"), folder / "dataset_info.json"
    entries: dict[str, Any] = {}
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        pass  # not here
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from None
    for part, key in (("train", "dataset"), ("eval", "eval_dataset")):
        if names := c.listed(key):
            c.sources[part] = [_source(str(name), folder, entries, stage, limit) for name in names]
    c.sources.setdefault("train", [({"path": "rows.jsonl"}, f"{TODO}no dataset is named")])
    convert_held_out(c, "val_size")
    c.copy("data.max_length", "cutoff_len", default=2048)
    c.set("data.overlong", "split" if stage == "pt" else "truncate")
    given, is_neat = c.is_on("packing", default=stage == "pt"), c.is_on("neat_packing")
    apart = "" if is_neat or not given else "documents of a row do not see each other; there they do"
    c.set("data.packing", given or is_neat, apart)
    if c.is_on("streaming"):
        c.set("data.streaming", True)
    if any(entries.get(str(name), {}).get("columns", {}).get("images") for name in c.listed("dataset")):
        c.set("data.image", {"max_pixels": int(c.number("image_max_pixels", default=768 * 768))})
        frozen = {  # part of the model: whether it is frozen
            "language": c.is_on("freeze_language_model"),
            "projector": c.is_on("freeze_multi_modal_projector", default=True),
            "vision": c.is_on("freeze_vision_tower", default=True),
        }
        c.set("model.train", [part for part, is_frozen in frozen.items() if not is_frozen])


def _source(name: str, folder: Path, entries: dict[str, Any], stage: str, limit: int | None) -> Rows:
    """Returns the source of one dataset by its name in dataset_info.json."""
    entry = entries.get(name)
    if entry is None:
        known = f"{folder}/dataset_info.json has no {name}" if entries else f"{folder}/dataset_info.json is not here"
        return {"path": f"{folder.as_posix()}/{name}.json"}, f"{TODO}{known}; give `path`, `format` and `columns`"
    source: dict[str, Any] = {"path": entry.get("hf_hub_url") or (folder / str(entry.get("file_name"))).as_posix()}
    comment = "" if {"hf_hub_url", "file_name"} & entry.keys() else f"{TODO}give a file or a dataset of the hub"
    if entry.get("subset"):
        source["config"] = entry["subset"]
    if entry.get("split", "train") != "train":
        source["split"] = entry["split"]
    format, columns, doubt = _rows(entry, stage)
    source["format"] = format
    if columns := {field: column for field, column in columns.items() if column and field != column}:
        source["columns"] = columns
    if smallest := min((int(count) for count in (limit, entry.get("num_samples")) if count), default=None):
        source["limit"] = smallest
    return source, comment or doubt


def _rows(entry: dict[str, Any], stage: str) -> tuple[str, dict[str, str | None], str]:
    """Returns format and columns (field: column) of an entry, and a comment."""
    theirs, tags = entry.get("columns", {}), entry.get("tags", {})
    common = {field: theirs.get(field) for field in ("system", "tools", "images")}
    question, answer = theirs.get("prompt", "instruction"), theirs.get("response", "output")
    is_chat = entry.get("formatting", "alpaca") in ("sharegpt", "openai")
    turns = theirs.get("messages", "conversations")
    if stage == "pt":
        return "text", {"text": question}, ""
    if entry.get("ranking"):
        pair = {"chosen": theirs.get("chosen"), "rejected": theirs.get("rejected"), **common}
        if is_chat:
            return "preference", {**pair, "conversations": turns}, ""
        doubt = f"`{theirs['query']}` is not read: join it to `{question}`" if theirs.get("query") else ""
        return "preference", {**pair, "prompt": question}, TODO + doubt if doubt else ""
    if theirs.get("kto_tag"):
        label = {"label": theirs["kto_tag"], **common}
        if not is_chat:
            return "unpaired", {**label, "prompt": question, "completion": answer}, ""
        is_openai = tags.get("role_tag", "from") == "role"
        doubt = "" if is_openai else f"{TODO}turns need `role` and `content` in place of `from` and `value`"
        return "unpaired", {**label, "messages": turns}, doubt
    if not is_chat:
        columns = {"instruction": question, "input": theirs.get("query", "input"), "output": answer}
        return (
            "alpaca",
            {**columns, "history": theirs.get("history"), **common},
            "`input` follows after an empty line here, there in the next line",
        )
    names = tags.get("role_tag", "from"), tags.get("content_tag", "value")
    if entry.get("formatting") == "openai" or names == ("role", "content"):
        return "messages", {"messages": turns, **common}, ""
    doubt = "" if names == ("from", "value") else f"{TODO}turns have {names[0]} and {names[1]}; rename them"
    return "sharegpt", {"conversations": turns, **common}, doubt
