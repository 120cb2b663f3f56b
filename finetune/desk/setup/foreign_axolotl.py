"""axolotl's YAML. Keys and defaults: https://github.com/axolotl-ai-cloud/axolotl, src/axolotl/utils/schemas; formats of
rows: docs/dataset-formats and src/axolotl/prompt_strategies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple, get_args

from finetune.desk.setup.conversion import TODO, Conversion, Source
from finetune.desk.setup.foreign_arguments import (
    chosen_objective,
    convert_adapters,
    convert_held_out,
    convert_model,
    convert_run,
    convert_training,
    copy_objective_keys,
    file_paths,
)
from finetune.desk.setup.foreign_rollouts import convert_grpo, fit_length
from finetune.desk.setup.foreign_values import ForeignTable
from finetune.recipe.objective_settings import PreferenceLoss, RowKind


class DatasetType(NamedTuple):
    """What a `type` says about its rows: format, columns (field -> column), template and doubts."""

    format: str | None
    columns: dict[str, str] = {}  # noqa: RUF012 (never changed)
    doubts: tuple[str, ...] = ()
    template: str | None = None  # its text around the rows, by its name there
    comment: str = ""


_QUESTION = {"prompt": "question"}
_ARGILLA = {"prompt": "instruction", "chosen": "chosen_response", "rejected": "rejected_response"}
# By what follows the template in a type, such as `intel` in chatml.intel.
_PAIRS: dict[str, dict[str, str]] = {
    "argilla": _ARGILLA,
    "icr": {"prompt": "input"},
    "intel": _QUESTION,
    **{name: {} for name in ("", "default", "ultra", "argilla_chat", "prompt_pairs", "passthrough")},
}
_MARKED: dict[str, dict[str, str]] = {
    "argilla": {"prompt": "instruction"},
    "intel": _QUESTION,
    "argilla_chat": {"prompt": "chosen"},
    **{name: {} for name in ("", "ultra", "prompt_pairs")},
}
_WRITTEN = ("chatml", "llama3", "zephyr")  # templates that types such as llama3.ultra write around pairs
_ROLES = {"assistant": {"gpt", "assistant"}, "user": {"human", "user"}, "system": {"system"}, "tool": {"tool"}}


def convert_axolotl(c: Conversion) -> None:
    t = c.theirs
    convert_run(c)
    convert_model(c)
    if t.word("base_model_config", default="") not in ("", c.value("model.name")):
        t.leave("base_model_config", "a model keeps its own config")
    t.ignore("type_of_model", "model_type", "tokenizer_type")  # classes follow from the model's config
    _template(c, t.word("chat_template"), t.word("chat_template_jinja"))
    if "chat_template_kwargs" in t:
        c.set("model.chat_template_arguments", _copied(t.table("chat_template_kwargs")))
    adapter, four, eight = t.word("adapter"), t.is_on("load_in_4bit"), t.is_on("load_in_8bit")
    if adapter in (None, "False", "none"):
        c.set("mode", "full")
        if "unfrozen_parameters" in t:
            c.doubt("mode", "unfrozen_parameters trains a part there, and full trains all")
            t.leave("unfrozen_parameters", "all weights (`mode: full`), or adapters in the modules of `lora.targets`")
    else:
        if adapter not in ("lora", "qlora"):
            t.leave("adapter", f"{adapter} is not offered; `mode` has full, lora and qlora")
        if adapter == "qlora" and "load_in_4bit" in t and not four:
            t.leave("load_in_4bit", "`adapter: qlora` is in 4 bits")
        if eight and (four or adapter == "qlora"):
            t.leave("load_in_8bit", "the base is in 4 bits")
        _adapters(c, "nf4" if four or adapter == "qlora" else "fp8" if eight else None)
    _objective(c)
    _data(c)
    convert_training(c, keeps_16_bits=c.value("mode") == "full")
    if c.value("schedule.warmup_ratio") == c.defaults["warmup_ratio"] and "warmup_ratio" not in t:
        c.set("schedule.warmup_ratio", c.defaults["warmup_ratio"], "the default of axolotl, there at most 100 steps")


def _template(c: Conversion, name: str | None, jinja: str | None) -> None:
    if jinja and Path(jinja).suffix in (".jinja", ".jinja2"):
        c.set("model.chat_template", jinja)
    elif jinja:
        c.theirs.leave("chat_template_jinja", "save it to a file and name that in `model.chat_template`")
        c.set("model.chat_template", None, f"{TODO}a template of its own there: save it to a file and name it here")
    elif name in c.data.values["model.chat_template"]:
        if ours := c.data.value("model.chat_template", name).ours:
            c.set("model.chat_template", ours)
    elif name:
        c.set("model.chat_template", None, f"the tokenizer's own, in place of axolotl's {name}")


def _copied(table: ForeignTable) -> dict[str, Any]:
    return {name: table.take(name) for name in table.values}


def _adapters(c: Conversion, bits: str | None) -> None:
    t = c.theirs
    targets: Any = "all-linear"
    comment = ""
    named = c.words("lora.targets")
    text = ",".join(named)
    if t.is_on("lora_target_linear"):
        if named:
            t.leave("lora_target_modules", "lora_target_linear takes all of them")
    elif match := _OF_ALL_LAYERS.fullmatch(text):
        targets, comment = [f"{name}_proj" for name in match[1].split("|")], "of each layer"
    elif any(sign in text for sign in "()|\\*"):
        comment = f"{TODO}list the modules that lora_target_modules fits"
    elif not named:
        targets, comment = ["q_proj", "v_proj"], "the default of peft for Llama, Mistral and Qwen"
    elif named != ["all-linear"]:
        targets = named
    convert_adapters(c, targets, comment, bits)


# A regular expression that takes the same modules of every layer, such as `model.layers.[\d]+.mlp.(up|down)_proj`.
_OF_ALL_LAYERS = re.compile(r".*layers\\?\.(?:\[\\d\]|\\d)\+.*\.\(((?:\w+\|)*\w+)\)_proj")


def _objective(c: Conversion) -> None:
    t = c.theirs
    is_reward, is_process = t.is_on("reward_model"), t.is_on("process_reward_model")
    rl = t.word("rl", default="reward" if is_reward or is_process else "sft")
    row = c.data.value("objective.name", rl)
    name = row.ours or "sft"
    if name == "grpo":
        convert_grpo(c, t.table("trl"))
        if row.doubt:
            c.doubt("objective.name", row.doubt)
        return
    c.set("objective.name", name)
    if not row.ours:
        c.doubt("objective.name", f"`rl: {rl}` is not offered")
    if is_process:
        c.doubt("objective.name", "process rewards are not offered; reward scores whole answers")
    if name == "reward" and t.values.get("num_labels") == 1:
        t.ignore("num_labels")  # the one score of a reward model
    if name == "sft":
        c.set("objective.train_on", "all" if t.is_on("train_on_inputs") else "assistant")
        return
    t.ignore("train_on_inputs")  # pairs and marked answers have no loss on their prompts
    if name == "dpo":
        _pair_loss(c, row.sets.get("objective.loss"))
    if name != "reward":
        c.copy("objective.beta", *c.data.names("objective.beta")[: None if rl == "orpo" else 1])  # the other is ORPO's
    if rl == "simpo":
        c.copy("objective.margin")
        c.copy("objective.sft_weight")
    copy_objective_keys(c, "desirable_weight", "undesirable_weight")
    if rl == "dpo" and c.number("objective.label_smoothing"):
        c.copy("objective.label_smoothing")
    if name == "reward" and c.number("objective.centering"):
        c.copy("objective.centering")


def _pair_loss(c: Conversion, fixed: str | None) -> None:
    """The loss of `rl: ipo` and `simpo`, or those of `dpo_loss_type`."""
    t = c.theirs
    losses = [fixed] if fixed else c.words("objective.loss") or ["sigmoid"]
    known = fixed or losses[0] in get_args(PreferenceLoss)
    c.set("objective.loss", losses[0] if known else "sigmoid", "" if known else f"{TODO}{losses[0]} is not offered")
    if others := [loss for loss in losses[1:] if loss != "sft"]:
        c.doubt("objective.loss", f"one loss is trained: {', '.join(others)} is left out")
    if "sft" in losses[1:]:
        weights = [float(weight) for weight in t.listed("dpo_loss_weights")] or [1.0] * len(losses)
        c.set("objective.sft_weight", weights[losses.index("sft")])


def _data(c: Conversion) -> None:
    t = c.theirs
    pretraining = t.tables("pretraining_dataset")
    train = _sources(c, t.tables("datasets")) + _sources(c, pretraining, "pretrain")
    c.sources["train"] = train or [({"path": "rows.jsonl"}, f"{TODO}no dataset is named")]
    if tests := t.tables("test_datasets"):
        c.sources["eval"] = _sources(c, tests)
    convert_held_out(c, "val_set_size")
    overlong = c.data.value("data.overlong", c.word("data.overlong")).ours or "drop"
    packs = t.is_on("sample_packing", default=bool(pretraining))
    if c.value("objective.name") == "grpo":
        fit_length(c, "sequence_len")
        return
    c.copy("data.max_length")
    kinds = {source.get("format") for source, _ in c.sources["train"]}
    c.set("data.overlong", "split" if kinds == {"text"} else overlong)
    c.set("data.packing", packs)
    if t.word("processor_type"):
        c.set("data.image", {}, "pictures in the rows")
        t.ignore("skip_prepare_dataset", "remove_unused_columns")
    if pretraining or c.is_on("data.streaming"):
        c.set("data.streaming", True)


def _sources(c: Conversion, theirs: list[ForeignTable], kind: str | None = None) -> list[Source]:
    """Returns a recipe's sources, one for each file, with comments. kind: the type, if there is none."""
    sources: list[Source] = []
    for one in theirs:
        split = one.word("split", default="train")
        named = {"config": one.word("name"), "split": None if split == "train" else split}
        source: dict[str, Any] = {key: value for key, value in named.items() if value}
        rows = _rows(c, one.take("type", default=kind), one)
        if rows.format:
            source["format"] = rows.format
        if rows.columns:
            source["columns"] = rows.columns
        doubts = [*rows.doubts, *_of_source(c, one, rows)]
        comment = TODO + "; ".join(doubts) if doubts else rows.comment
        sources += [({"path": file, **source}, comment) for file in file_paths(one)]
    return sources


def _of_source(c: Conversion, one: ForeignTable, rows: DatasetType) -> list[str]:
    """Returns doubts about keys of a source, whatever its type, and sets its template."""
    doubts = []
    template = one.word("chat_template") or one.word("conversation") or rows.template
    jinja = one.word("chat_template_jinja")
    if template or jinja:
        before = c.value("model.chat_template")
        if (before is None or before == c.data.value("model.chat_template", template).ours) and not jinja:
            _template(c, template, None)
            given = c.theirs.values.get("chat_template")
            if rows.template and given not in (None, rows.template):
                said = f"written around the rows by their type; chat_template is {given} there"
                c.set("model.chat_template", c.value("model.chat_template"), said)
        elif template != "tokenizer_default" or jinja:
            doubts.append(f"its template is {template or 'its own'}; all sources have `model.chat_template`")
    if (parts := one.count("shards")) is not None:
        index = one.number("shards_idx", default=0)
        doubts.append(f"part {index} of {parts} there: see `split`")
    return doubts


def _rows(c: Conversion, kind: Any, one: ForeignTable) -> DatasetType:
    """Returns what a `type` says."""
    rows = chosen_objective(c).row_kind
    if rows.sequences:
        return _of_answers(rows, kind, one)
    if c.value("objective.name") == "grpo":
        doubt = f"`type: {kind}` is a function there: give `format` and `columns`, for prompts and answers"
        return DatasetType(None, doubts=(doubt,) if kind else ())
    if isinstance(kind, ForeignTable):
        return _of_texts(kind)
    name = str(kind or "")
    if name in ("completion", "pretrain") or name.startswith("completion:"):
        column = one.word("field", "text_column", default="text")
        return DatasetType("text", {} if column == "text" else {"text": str(column)})
    if name.startswith("chat_template"):
        return _of_turns(one)
    if not name:
        return DatasetType("tokens", comment="tokenized already: input_ids, and labels with -100")
    names = (name, name.partition(":")[0], name.partition(".")[0])
    rows = [c.data.value("data.train.format", one) for one in names]
    row = next((row for row in rows if row.ours), None)
    if row is None:
        return DatasetType(None, doubts=(f"`type: {name}` has no counterpart; give `format` and `columns`",))
    if name.startswith("sharegpt"):
        turns = _of_turns(one, "from", "value", "conversations")
        return turns._replace(format="sharegpt") if turns.format == "messages" else turns
    return DatasetType(row.ours, row.sets.get("columns", {}), comment=row.comment)


def _of_texts(kind: ForeignTable) -> DatasetType:
    """Returns the same for a type that is a section of fields and texts around them."""
    fields = {name: kind.word(f"field_{name}") for name in ("instruction", "input", "output", "system")}
    columns = {name: column for name, column in fields.items() if column and column != name}
    texts = [kind.word(name) for name in ("format", "no_input_format", "system_prompt", "system_format")]
    doubts = ("its own text around prompts becomes the chat template",) if any(texts) else ()
    return DatasetType("alpaca", columns, doubts)


def _of_turns(one: ForeignTable, role: str = "role", content: str = "content", column: str = "messages") -> DatasetType:
    """Returns the same for `type: chat_template`, with the names of a turn's keys and of the column."""
    names = one.table("message_property_mappings")
    role = names.word("role") or one.word("message_field_role") or role
    content = names.word("content") or one.word("message_field_content") or content
    turns, tools = one.word("field_messages", default=column), one.word("field_tools")
    format, field = ("sharegpt", "conversations") if (role, content) == ("from", "value") else ("messages", "messages")
    columns = {field: str(turns)} if turns != field else {}
    if tools and tools != "tools":
        columns["tools"] = tools
    doubts = []
    if (role, content) not in (("role", "content"), ("from", "value")):
        doubts.append(f"turns have {role} and {content}; rename them to role and content")
    return DatasetType(format, columns, (*doubts, *_masks(one)))


def _masks(one: ForeignTable) -> list[str]:
    """Returns doubts about keys of a chat that decide what is trained, or which turns there are."""
    doubts = []
    trained = one.words("roles_to_train") if one.values.get("roles_to_train") is not None else ["assistant"]
    if set(trained) - {"assistant", "gpt"} or not trained:
        named = ", ".join(trained) or "no role"
        doubts.append(f"trains {named}; set `objective.train_on: all`, or assistant alone")
    for name in ("message_field_training", "message_field_training_detail"):
        if field := one.word(name):
            doubts.append(f"turns are trained by their field {field} there; here all answers are")
    for name in ("train_on_eos", "train_on_eot"):
        if (ends := one.word(name, default="turn")) != "turn":
            doubts.append(f"{name} is {ends} there; here the end of each trained turn is trained")
    if one.is_on("drop_system_message"):
        doubts.append("system messages are dropped there; remove them from the rows")
    roles = one.table("roles")
    for role in roles.values:
        if unknown := set(roles.words(role)) - _ROLES.get(role, set()):
            doubts.append(f"{', '.join(sorted(unknown))} is {role} there; rename it in the rows")
    return doubts


def _of_answers(rows: RowKind, kind: Any, one: ForeignTable) -> DatasetType:
    """Returns the same for pairs of answers, and for marked ones."""
    format = rows.formats[0]
    if isinstance(kind, ForeignTable):
        fields = ("prompt", "system", *(("completion", "label") if rows.is_unpaired else ("chosen", "rejected")))
        named = {name: kind.word(f"field_{name}") for name in fields}
        texts = [kind.word(f"{name}_format") for name in (*fields, "prompt") if name != "system"]
        doubts = ("its own text around prompts and answers becomes the chat template",) if any(texts) else ()
        return DatasetType(
            format, {name: column for name, column in named.items() if column and name != column}, doubts
        )
    name, _, variant = str(kind or "").partition(".")
    if name == "chat_template" and variant == "default":
        named = {"prompt": one.word("field_messages", default="messages")}
        named |= {field: one.word(f"field_{field}") for field in ("chosen", "rejected")}
        columns = {field: column for field, column in named.items() if column and field != column}
        return DatasetType(format, columns, tuple(_masks(one)))
    template = name if name in _WRITTEN else None
    if name == "bradley_terry":
        return DatasetType(format, {"prompt": "input"}, template="llama3" if variant == "llama3" else None)
    known = (_MARKED if rows.is_unpaired else _PAIRS).get(variant)
    if known is None or (name not in _WRITTEN and name not in ("chat_template", "")):
        return DatasetType(format, {}, (f"`type: {kind}` has no counterpart; give `columns`",), template)
    return DatasetType(format, known, template=template)
