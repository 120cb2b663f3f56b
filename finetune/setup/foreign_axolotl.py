"""axolotl's YAML. Keys and defaults: https://github.com/axolotl-ai-cloud/axolotl, src/axolotl/utils/schemas; formats of
rows: docs/dataset-formats and src/axolotl/prompt_strategies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from finetune.setup.conversion import TODO, Conversion
from finetune.setup.foreign_arguments import (
    ToolDefaults,
    convert_adapters,
    convert_held_out,
    convert_model,
    convert_run,
    convert_training,
)

Format = tuple[str, dict[str, str]]  # of the rows, and its columns: field -> column
_ALPACA = "the Alpaca text is around prompts there; here the chat template is"
_QUESTION = {"prompt": "question"}
_ARGILLA = {"prompt": "instruction", "chosen": "chosen_response", "rejected": "rejected_response"}
# `type` up to the first dot or colon, or all of it.
_ANSWERS: dict[str, Format] = {
    "alpaca": ("alpaca", {}),
    "alpaca_w_system": ("alpaca", {}),
    "alpaca_w_system.load_open_orca": (
        "prompt_completion",
        {"prompt": "question", "completion": "response", "system": "system_prompt"},
    ),
    "alpaca_chat": ("alpaca", {"output": "response"}),
    "alpaca_chat.load_qa": ("prompt_completion", {"prompt": "question", "completion": "answer"}),
    "gpteacher": ("alpaca", {"output": "response"}),
    "oasst": ("alpaca", {"instruction": "INSTRUCTION", "output": "RESPONSE"}),
    "jeopardy": ("prompt_completion", {"prompt": "question", "completion": "answer"}),
    "summarizetldr": ("prompt_completion", {"prompt": "article", "completion": "summary"}),
    "metharme": ("prompt_completion", {"completion": "generation"}),
    "creative_acr.load_answer": ("prompt_completion", {"prompt": "instruction", "completion": "revision"}),
    "sharegpt": ("sharegpt", {}),
}
_PAIRS: dict[str, dict[str, str]] = {  # by what follows the template, such as chatml.intel
    "argilla": _ARGILLA,
    "icr": {"prompt": "input"},
    "intel": _QUESTION,
    **{name: {} for name in ("", "ultra", "argilla_chat", "prompt_pairs", "passthrough")},
}
_MARKED: dict[str, dict[str, str]] = {
    "argilla": {"prompt": "instruction"},
    "intel": _QUESTION,
    "argilla_chat": {"prompt": "chosen"},
    **{name: {} for name in ("", "ultra", "prompt_pairs")},
}
_TEMPLATES = {
    **{name: name for name in ("chatml", "llama3", "gemma")},
    "mistral_v1": "mistral",
    "mistral_v2v3": "mistral-v3",
    "mistral_v3_tekken": "mistral-tekken",
    **dict.fromkeys(("tokenizer_default", "tokenizer_default_fallback_chatml"), None),
}
_DEFAULTS = ToolDefaults(
    micro=1, schedule="cosine", warmup_ratio=0.03, epochs=1.0, checkpointing=False, save_steps=None
)
_OVERLONG = {"drop": "drop", "truncate": "truncate", "raise": "error"}


def convert_axolotl(c: Conversion) -> None:
    convert_run(c)
    convert_model(c, "base_model")
    c.take("model_type", "tokenizer_type", "base_model_config")
    name, jinja = c.word("chat_template"), c.word("chat_template_jinja")
    if jinja and Path(str(jinja)).suffix in (".jinja", ".jinja2"):
        c.set("model.chat_template", str(jinja))
    elif jinja:
        c.leave("chat_template_jinja", "save it to a file and name that in `model.chat_template`")
    elif name in _TEMPLATES:
        if _TEMPLATES[name]:
            c.set("model.chat_template", _TEMPLATES[name])
    elif name:
        c.set("model.chat_template", None, f"the tokenizer's own, in place of axolotl's {name}")
    if arguments := c.table("chat_template_kwargs"):
        c.set("model.chat_template_arguments", arguments)
    adapter, four, eight = c.take("adapter"), c.is_on("load_in_4bit"), c.is_on("load_in_8bit")
    if adapter in (None, "", False):
        c.set("mode", "full")
    else:
        if adapter not in ("lora", "qlora"):
            c.leave("adapter", f"{adapter} is not offered; `mode` has full, lora and qlora")
        targets: Any = "all-linear"
        comment = ""
        named = [] if c.is_on("lora_target_linear") else c.listed("lora_target_modules")
        text = ",".join(map(str, named))
        if match := _OF_ALL_LAYERS.fullmatch(text):
            targets, comment = [f"{name}_proj" for name in match[1].split("|")], "of each layer"
        elif any(sign in text for sign in "()|\\*"):
            comment = f"{TODO}list the modules that lora_target_modules fits"
        elif named not in ([], ["all-linear"]):
            targets = named
        bits = "nf4" if four or adapter == "qlora" else "fp8" if eight else None
        rank = c.number("lora_r", default=8)
        convert_adapters(
            c,
            rank=rank,
            alpha=c.number("lora_alpha", default=rank),
            dropout=c.number("lora_dropout", default=0.0),
            targets=targets,
            comment=comment,
            bits=bits,
        )
    _objective(c)
    _data(c)
    convert_training(c, _DEFAULTS, keeps_16_bits=True)


# A regular expression that takes the same modules of every layer, such as `model.layers.[\d]+.mlp.(up|down)_proj`.
_OF_ALL_LAYERS = re.compile(r".*layers\\?\.(?:\[\\d\]|\\d)\+.*\.\(((?:\w+\|)*\w+)\)_proj")


def _objective(c: Conversion) -> None:
    rl = c.take("rl") or ("reward" if c.is_on("reward_model") else "sft")
    losses = c.listed("dpo_loss_type") or ["ipo" if rl == "ipo" else "sigmoid"]
    names = {"sft": "sft", "reward": "reward", "dpo": "dpo", "ipo": "dpo", "simpo": "dpo", "orpo": "orpo", "kto": "kto"}
    name = names.get(str(rl))
    if name is None:
        c.set(
            "objective.name",
            "sft",
            f"{TODO}`rl: {rl}` trains on the model's own samples: set grpo, with `rollouts` and `rewards`",
        )
        return
    c.set("objective.name", name)
    if name == "sft":
        c.set("objective.train_on", "all" if c.is_on("train_on_inputs") else "assistant")
        return
    if name == "dpo":
        c.set("objective.loss", "simpo" if rl == "simpo" else losses[0])
        if "sft" in losses[1:]:
            weights = c.listed("dpo_loss_weights") or [1.0] * len(losses)
            c.set("objective.sft_weight", float(weights[losses.index("sft")]))
    if name != "reward":
        c.copy("objective.beta", "orpo_alpha" if rl == "orpo" else "rl_beta", default=0.1)
    if rl == "simpo":
        c.copy("objective.margin", "simpo_gamma", default=0.5)
        c.copy("objective.sft_weight", "cpo_alpha", default=1.0)
    if name == "kto":
        c.copy("objective.desirable_weight", "kto_desirable_weight", default=1.0)
        c.copy("objective.undesirable_weight", "kto_undesirable_weight", default=1.0)
    if name == "dpo" and c.number("dpo_label_smoothing"):
        c.copy("objective.label_smoothing", "dpo_label_smoothing")
    if name == "reward" and c.number("center_rewards_coefficient"):
        c.copy("objective.centering", "center_rewards_coefficient")


def _data(c: Conversion) -> None:
    pretraining = c.listed("pretraining_dataset")
    pretraining = [{"type": "pretrain", **(one if isinstance(one, dict) else {"path": one})} for one in pretraining]
    c.sources["train"] = _sources(c, [*c.listed("datasets"), *pretraining])
    if not c.sources["train"]:
        c.sources["train"] = [({"path": "rows.jsonl"}, f"{TODO}no dataset is named")]
    if tests := c.listed("test_datasets"):
        c.sources["eval"] = _sources(c, tests)
    convert_held_out(c, "val_set_size")
    c.copy("data.max_length", "sequence_len", default=512)
    kinds = {source.get("format") for source, _ in c.sources["train"]}
    strategy = str(c.take("excess_length_strategy", default="drop"))
    c.set("data.overlong", "split" if kinds == {"text"} else _OVERLONG.get(strategy, "drop"))
    c.set("data.packing", c.is_on("sample_packing") or bool(pretraining))
    if c.take("processor_type"):
        c.set("data.image", {}, "pictures in the rows")
        c.take("skip_prepare_dataset", "remove_unused_columns")
    if pretraining or c.is_on("streaming"):
        c.set("data.streaming", True)


def _sources(c: Conversion, theirs: list[Any]) -> list[tuple[dict[str, Any], str]]:
    """Returns a recipe's sources, one for each file, with comments."""
    sources = []
    for one in theirs:
        one = one if isinstance(one, dict) else {"path": str(one)}
        source = {ours: one[key] for ours, key in (("config", "name"), ("split", "split")) if one.get(key)}
        source = {key: value for key, value in source.items() if (key, value) != ("split", "train")}
        format, columns, comment = _of_type(c.value("objective.name"), one.get("type"), one)
        if format:
            source["format"] = format
        if columns:
            source["columns"] = columns
        path, files = str(one.get("path", "")), one.get("data_files") or []
        files = [files] if isinstance(files, str) else list(files)
        if files and path not in ("", "json", "csv", "parquet", "text", "arrow"):
            files = [f"hf://datasets/{path}/{file}" for file in files]
        sources += [({"path": file, **source}, comment) for file in files or [path]]
    return sources


def _of_type(objective: str, kind: Any, one: dict[str, Any]) -> tuple[str | None, dict[str, str], str]:
    """Returns format, columns and a comment for a `type`."""
    if objective in ("dpo", "orpo", "reward", "kto"):
        return _of_answers(objective, kind, one)
    if isinstance(kind, dict):
        fields = {"instruction": "instruction", "input": "input", "output": "output", "system": "system"}
        columns = {ours: kind[f"field_{ours}"] for ours in fields if kind.get(f"field_{ours}")}
        columns = {ours: column for ours, column in columns.items() if ours != column}
        texts = kind.get("format") or kind.get("no_input_format") or kind.get("system_prompt")
        return "alpaca", columns, f"{TODO}its own text around prompts becomes the chat template" if texts else ""
    name = str(kind or "")
    if name in ("completion", "pretrain") or name.startswith("completion:"):
        column = str(one.get("field") or one.get("text_column") or "text")
        return "text", {} if column == "text" else {"text": column}, ""
    if name.startswith("chat_template"):
        return _of_turns(one)
    if not name:
        return "tokens", {}, "tokenized already: input_ids, and labels with -100"
    found = _ANSWERS.get(name) or _ANSWERS.get(name.partition(":")[0]) or _ANSWERS.get(name.partition(".")[0])
    if found is None:
        return None, {}, f"{TODO}`type: {name}` has no counterpart; give `format` and `columns`"
    is_text = found[0] == "alpaca" and not name.startswith("alpaca_chat")
    return found[0], found[1], _ALPACA if is_text else ""


def _of_turns(one: dict[str, Any]) -> tuple[str | None, dict[str, str], str]:
    """Returns the same for `type: chat_template`."""
    names = one.get("message_property_mappings") or {}
    role = names.get("role") or one.get("message_field_role") or "role"
    content = names.get("content") or one.get("message_field_content") or "content"
    column, tools = one.get("field_messages") or "messages", one.get("field_tools")
    format, field = {
        ("role", "content"): ("messages", "messages"),
        ("from", "value"): ("sharegpt", "conversations"),
    }.get((role, content), ("messages", "messages"))
    columns = {field: column} if column != field else {}
    if tools and tools != "tools":
        columns["tools"] = tools
    if (role, content) not in (("role", "content"), ("from", "value")):
        return format, columns, f"{TODO}turns have {role} and {content}; rename them to role and content"
    trained = one.get("roles_to_train", ["assistant"])
    if trained and set(trained) - {"assistant", "gpt"}:
        return format, columns, f"{TODO}trains {', '.join(trained)}; set `objective.train_on: all`, or assistant alone"
    return format, columns, ""


def _of_answers(objective: str, kind: Any, one: dict[str, Any]) -> tuple[str | None, dict[str, str], str]:
    """Returns the same for pairs of answers, and for marked ones."""
    format = "unpaired" if objective == "kto" else "preference"
    if isinstance(kind, dict):
        fields = ("prompt", "system", "completion", "label") if objective == "kto" else ("prompt", "system", "chosen")
        fields = fields if objective == "kto" else (*fields, "rejected")
        columns = {name: kind[f"field_{name}"] for name in fields if kind.get(f"field_{name}")}
        return format, {name: column for name, column in columns.items() if name != column}, ""
    name, _, variant = str(kind or "").partition(".")
    if name == "chat_template" and variant == "default":
        columns = {"prompt": one.get("field_messages") or "messages"}
        columns |= {name: one[f"field_{name}"] for name in ("chosen", "rejected") if one.get(f"field_{name}")}
        return format, {name: column for name, column in columns.items() if name != column}, ""
    if name == "bradley_terry":
        return format, {"prompt": "input"}, ""
    known = (_MARKED if objective == "kto" else _PAIRS).get(variant)
    if known is None:
        return format, {}, f"{TODO}`type: {kind}` has no counterpart; give `columns`"
    return format, known, ""
