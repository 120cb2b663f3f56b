"""LLaMA-Factory's YAML and dataset_info.json. Keys and defaults: https://github.com/hiyouga/LLaMA-Factory,
src/llamafactory/hparams and data/README.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

from finetune.desk.setup.conversion import TODO, Conversion, Source
from finetune.desk.setup.foreign_arguments import (
    convert_adapters,
    convert_held_out,
    convert_model,
    convert_run,
    convert_training,
    copy_objective_keys,
)
from finetune.desk.setup.foreign_rollouts import convert_grpo
from finetune.desk.setup.foreign_values import MAX_TABLE_BYTES, ForeignTable, read_bounded
from finetune.errors import UserError
from finetune.recipe.objective_settings import PreferenceLoss

_OWN_TEXTS = {"default": "`Human: ...` and `Assistant:`", "empty": "texts without any mark"}
_NO_TABLE = "give `path`, `format` and `columns`"


def convert_llama_factory(c: Conversion) -> None:
    t = c.theirs
    convert_run(c)
    convert_model(c)
    _template(c)
    kind = t.word("finetuning_type", default="lora")
    if kind == "full":
        c.set("mode", "full")
    else:
        _adapters(c, str(kind))
    _objective(c)
    _data(c)
    convert_training(c)


def _template(c: Conversion) -> None:
    t, name = c.theirs, c.theirs.word("template")
    is_text = t.word("stage") == "pt"
    if ours := c.data.value("model.chat_template", name).ours:
        c.set("model.chat_template", ours, "or null, for the tokenizer's own")
    elif name in _OWN_TEXTS and not is_text:
        c.set("model.chat_template", None, f"{TODO}{name} is {_OWN_TEXTS[str(name)]} there; here the tokenizer's own")
    elif name is not None and not is_text:
        c.set("model.chat_template", None, f"the tokenizer's own, in place of LLaMA-Factory's {name}")
    if not t.is_on("enable_thinking", default=True):
        c.set("model.empty_thought", "given")


def _adapters(c: Conversion, kind: str) -> None:
    t = c.theirs
    bits, method = t.number("quantization_bit"), t.word("quantization_method", default="bnb")
    targets = c.words("lora.targets")
    type = str(c.word("quantization.type")) if bits == 4 else "fp8" if bits == 8 else None
    if bits not in (None, 4, 8):
        t.leave("quantization_bit", "set `mode: qlora` and `quantization.type`: nf4, fp4 or fp8")
    convert_adapters(
        c,
        targets="all-linear" if targets in ([], ["all"]) else targets,
        comment="" if kind == "lora" else f"{TODO}{kind} is not offered; adapters come nearest",
        bits=type,
        alpha_per_rank=2,
    )
    if type in ("nf4", "fp4") and not c.is_on("quantization.double_quant"):
        c.set("quantization.double_quant", False)
    t.ignore("double_quantization")
    if method not in ("bnb", "bitsandbytes"):
        t.leave("quantization_method", "weights are quantized by bitsandbytes; `quantization.type` has nf4, fp4, fp8")


def _objective(c: Conversion) -> None:
    t = c.theirs
    stage, loss = t.word("stage", default="sft"), t.word("pref_loss", default="sigmoid")
    row = c.data.value("objective.name", stage)
    name, doubt = row.ours or "sft", row.doubt if row.ours else f"`stage: {stage}` is not offered"
    if name == "grpo":
        _ppo(c)
    else:
        c.set("objective.name", name)
    if doubt:
        c.doubt("objective.name", doubt)
    if name == "sft":
        alone = "last_assistant" if t.is_on("mask_history") else "assistant"
        is_all = t.is_on("train_on_prompt") or stage == "pt"
        c.set("objective.train_on", "all" if is_all else alone, "texts are trained as a whole" if stage == "pt" else "")
        for key in ("use_dft_loss", "use_asft_loss", "use_eaft_loss"):
            if t.is_on(key):
                c.doubt("objective.name", f"{key} is not offered")
    if stage == "dpo":
        further = c.data.value("objective.loss", loss).sets  # `orpo` is an objective here
        c.set("objective.name", further.get("objective.name", name))
        if not further:
            unknown = "" if loss in get_args(PreferenceLoss) else f"{TODO}`pref_loss: {loss}` is not offered"
            c.set("objective.loss", "sigmoid" if unknown else loss, unknown)
        if t.number("pref_ftx"):
            c.copy("objective.sft_weight", "pref_ftx")
    copy_objective_keys(c, "beta")
    if c.value("objective.loss") == "simpo":
        c.copy("objective.margin")
    if stage == "dpo" and loss == "sigmoid" and c.number("objective.label_smoothing"):
        c.copy("objective.label_smoothing")
    copy_objective_keys(c, "desirable_weight", "undesirable_weight")
    c.copy("objective.router_aux_loss_coef")


def _ppo(c: Conversion) -> None:
    """The nearest to PPO: samples of the model, with its reward model."""
    t = c.theirs
    convert_grpo(c, ForeignTable({}), samples=4)
    c.copy("rollouts.max_new_tokens", "max_new_tokens", default=512)
    c.copy("rollouts.temperature", "temperature", default=0.95)
    if (top_p := t.number("top_p")) is not None and top_p < 1:
        c.set("rollouts.top_p", float(top_p))
    if (top_k := t.number("top_k")) is not None and top_k > 0:
        c.set("rollouts.top_k", int(top_k))
    if model := t.word("reward_model"):
        c.rewards = [({"reward_model": model}, f"{TODO}a run or a folder of `objective.name: reward`")]


def _data(c: Conversion) -> None:
    t = c.theirs
    stage, folder = str(t.word("stage", default="sft")), Path(t.word("dataset_dir", default="data") or "data")
    limit, entries = t.count("max_samples"), _table(folder / "dataset_info.json")
    for part, key in (("train", "dataset"), ("eval", "eval_dataset")):
        if names := t.words(key):
            c.sources[part] = [_source(name, folder, entries, stage, limit) for name in names]
    c.sources.setdefault("train", [({"path": "rows.jsonl"}, f"{TODO}no dataset is named")])
    convert_held_out(c, "val_size")
    if c.value("objective.name") != "grpo":
        c.copy("data.max_length")
    c.set("data.overlong", "split" if stage == "pt" else "truncate")
    given, is_neat = t.is_on("packing", default=stage == "pt"), t.is_on("neat_packing")
    apart = "" if is_neat or not given else "documents of a row do not see each other; there they do"
    c.set("data.packing", given or is_neat, apart)
    if c.is_on("data.streaming"):
        c.set("data.streaming", True)
    entry_columns = [entries.get(name, {}).get("columns") for name in t.words("dataset")]
    if any(isinstance(columns, dict) and columns.get("images") for columns in entry_columns):
        c.set("data.image", {"max_pixels": int(t.count("image_max_pixels", default=768 * 768))})
        frozen = {  # part of the model: whether it is frozen
            "language": t.is_on("freeze_language_model"),
            "projector": t.is_on("freeze_multi_modal_projector", default=True),
            "tower": t.is_on("freeze_vision_tower", default=True),
        }
        c.set("model.train", [part for part, is_frozen in frozen.items() if not is_frozen])


def _table(file: Path) -> dict[str, Any]:
    """Returns dataset_info.json; empty if it is not here. Raises UserError."""
    if not file.exists():
        return {}
    try:
        entries = json.loads(read_bounded(file, MAX_TABLE_BYTES))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: cannot be read: not valid JSON: {error}. Fix: correct the file") from None
    if not isinstance(entries, dict):
        raise UserError(f"{file}: cannot be read: no table of datasets. Fix: give LLaMA-Factory's own")
    return {name: entry for name, entry in entries.items() if isinstance(entry, dict)}


def _source(name: str, folder: Path, entries: dict[str, Any], stage: str, limit: int | None) -> Source:
    """Returns the source of one dataset by its name in dataset_info.json."""
    if name not in entries:
        known = f"{folder}/dataset_info.json has no {name}" if entries else f"{folder}/dataset_info.json is not here"
        return {"path": f"{folder.as_posix()}/{name}.json"}, f"{TODO}{known}; {_NO_TABLE}"
    entry = ForeignTable(entries[name])
    hub, file = entry.word("hf_hub_url"), entry.word("file_name")
    source: dict[str, Any] = {"path": hub or (folder / str(file or name)).as_posix()}
    doubts = [] if hub or file else ["give a file or a dataset of the hub"]
    entry.ignore("ms_hub_url", "om_hub_url")  # mirrors of the same rows
    if config := entry.word("subset"):
        source["config"] = config
    if (split := entry.word("split", default="train")) != "train":
        source["split"] = split
    format, columns, comment = _rows(entry, stage)
    source["format"] = format
    if columns := {field: column for field, column in columns.items() if column and field != column}:
        source["columns"] = columns
    if smallest := min((count for count in (limit, entry.count("num_samples")) if count), default=None):
        source["limit"] = smallest
    doubts += [f"{one.path} of dataset_info.json is not converted" for one in entry.unread() if one.value is not False]
    if comment.startswith(TODO):
        doubts.append(comment.removeprefix(TODO))
    return source, TODO + "; ".join(doubts) if doubts else comment


_TAGS = ("role_tag", "content_tag", "user_tag", "assistant_tag", "observation_tag", "function_tag", "system_tag")
_ROLES = {  # the tags of roles that our formats read
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"),
    "system_tag": ("system",),
    "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call", "function"),
}


def _rows(entry: ForeignTable, stage: str) -> tuple[str, dict[str, str | None], str]:
    """Returns format and columns (field: column) of an entry, and a comment."""
    theirs, tags = entry.table("columns"), entry.table("tags")
    common = {field: theirs.word(field) for field in ("system", "tools", "images")}
    question, answer = theirs.word("prompt", default="instruction"), theirs.word("response", default="output")
    formatting = entry.word("formatting", default="alpaca")
    is_chat, turns = formatting in ("sharegpt", "openai"), theirs.word("messages", default="conversations")
    role, content, *others = (tags.word(name) for name in _TAGS)
    names = (role or "from", content or "value")
    renamed = [tag for name, tag in zip(_TAGS[2:], others, strict=True) if tag and tag not in _ROLES[name]]
    if stage == "pt":
        return "text", {"text": question}, ""
    if entry.is_on("ranking"):
        pair = {"chosen": theirs.word("chosen"), "rejected": theirs.word("rejected"), **common}
        if is_chat:
            return "preference", {**pair, "conversations": turns}, ""
        query = theirs.word("query")
        doubt = f"{TODO}`{query}` is not read: join it to `{question}`" if query else ""
        return "preference", {**pair, "prompt": question}, doubt
    if label := theirs.word("kto_tag"):
        marked = {"label": label, **common}
        if not is_chat:
            return "unpaired", {**marked, "prompt": question, "completion": answer}, ""
        doubt = "" if names[0] == "role" else f"{TODO}turns need `role` and `content` in place of `from` and `value`"
        return "unpaired", {**marked, "messages": turns}, doubt
    if not is_chat:
        columns = {"instruction": question, "input": theirs.word("query", default="input"), "output": answer}
        return (
            "alpaca",
            {**columns, "history": theirs.word("history"), **common},
            "`input` follows after an empty line here, there in the next line",
        )
    doubt = f"{TODO}rename the roles {', '.join(renamed)} in the rows" if renamed else ""
    if formatting == "openai" or names == ("role", "content"):
        return "messages", {"messages": turns, **common}, doubt
    if names != ("from", "value"):
        doubt = f"{TODO}turns have {names[0]} and {names[1]}; rename them"
    return "sharegpt", {"conversations": turns, **common}, doubt
