"""TRL's command line and its YAML, and the recipes of the alignment handbook.

Keys and defaults: https://github.com/huggingface/trl, trl/trainer, trl/experimental and trl/scripts.
"""

from __future__ import annotations

from typing import Any, get_args

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
from finetune.desk.setup.foreign_command import COMMAND
from finetune.desk.setup.foreign_keys import ForeignRow, foreign_tool
from finetune.desk.setup.foreign_rollouts import convert_distillation, convert_grpo
from finetune.desk.setup.foreign_values import ForeignTable
from finetune.recipe.objective_settings import PreferenceLoss

_PLAIN_LOSSES = ("sigmoid", "nll", "chunked_nll")  # of SFT
_NO_LIMIT = f"{TODO}no limit there; the longest example, in tokens"


def trainers() -> dict[str, ForeignRow]:
    """Returns TRL's trainers: our objective, defaults, and keys that no other trainer has."""
    return foreign_tool("trl").values["objective.name"]


def trainer_of(c: Conversion) -> tuple[str, str]:
    """Returns the trainer of the command, or the one that has such keys; and a doubt."""
    given = c.theirs.word(COMMAND)
    if given in trainers():
        return given, ""
    by_keys = (name for name, one in trainers().items() if any(mark in c.theirs for mark in one.marks))
    name = next(by_keys, "sft")
    return name, f"the trainer of {given} is not known; by its keys it is {name}" if given else ""


def convert_trl(c: Conversion) -> None:
    t = c.theirs
    trainer, doubt = trainer_of(c)
    convert_run(c)
    convert_model(c)
    if template := c.word("model.chat_template"):
        c.set("model.chat_template", template)
    elif "chat_template" in t:  # the handbook's, in Jinja
        t.leave("chat_template", "save it to a file and name that in `model.chat_template`")
        c.set("model.chat_template", None, f"{TODO}a template of its own there: save it to a file and name it here")
    settings = t.table("model_init_kwargs")
    dtype = str(t.word("dtype", "torch_dtype") or settings.word("dtype", "torch_dtype")).removeprefix("torch.")
    four, eight = t.is_on("load_in_4bit"), t.is_on("load_in_8bit")
    if not (t.is_on("use_peft") or four or eight):
        c.set("mode", "full")
    else:
        _adapters(c, four, eight)
    convert_trainer(c, trainer, doubt)
    _data(c, trainer)
    in_16_bits = dtype in ("bfloat16", "auto") if c.value("mode") == "full" else four or eight
    c.defaults |= trainers()[trainer].defaults
    convert_training(c, in_16_bits)


def _adapters(c: Conversion, four: bool, eight: bool) -> None:
    targets, comment = c.words("lora.targets"), ""
    if not targets:
        targets, comment = ["q_proj", "v_proj"], "the default of peft for Llama, Mistral and Qwen"
    bits = c.word("quantization.type") if four else "fp8" if eight else None
    convert_adapters(c, "all-linear" if targets == ["all-linear"] else targets, comment, bits)
    if four:
        c.set("quantization.double_quant", c.is_on("quantization.double_quant"))


def convert_trainer(c: Conversion, trainer: str, doubt: str = "") -> None:
    """Sets the objective of a trainer, with its rollouts and rewards."""
    t, row = c.theirs, trainers()[trainer]
    if row.ours == "grpo":
        convert_grpo(c, t, "rloo" if trainer == "rloo" else "grpo")
    elif row.ours == "distill":
        convert_distillation(c, t)
    else:
        c.set("objective.name", row.ours)
        {"sft": _sft, "dpo": _pairs}.get(trainer, lambda c: None)(c)
    if trainer == "cpo":
        _cpo(c)
    copy_objective_keys(c, "beta", "desirable_weight", "undesirable_weight")
    if chosen_objective(c).row_kind.is_unpaired:
        alike = [name for name, one in trainers().items() if one.ours == row.ours]  # their losses have their names
        if (loss := t.word("loss_type", default=trainer)) not in alike:
            c.doubt("objective.name", f"{loss} is not offered")
    if row.ours == "reward" and c.number("objective.centering"):
        c.copy("objective.centering")
    c.copy("objective.router_aux_loss_coef")
    if problem := row.doubt or doubt:
        c.doubt("objective.name", problem)


def _sft(c: Conversion) -> None:
    t = c.theirs
    losses, completions = t.words("loss_type"), t.take("completion_only_loss")
    if losses and losses[0] not in _PLAIN_LOSSES:
        t.leave("loss_type", "is not offered; `objective.name: focal` also weights tokens by their probability")
        c.doubt("objective.name", f"loss_type {losses[0]} is not offered")
    if t.is_on("assistant_only_loss") or str(completions).lower() == "true":
        c.set("objective.train_on", "assistant")
    elif str(completions).lower() == "false":
        c.set("objective.train_on", "all")
    elif t.is_on("packing") and t.word("dataset_text_field") not in (None, "text", "messages"):
        c.set("objective.train_on", "all", "texts are trained as a whole")
    else:
        doubt = "for rows of messages TRL trains all tokens unless assistant_only_loss: `all` is the same"
        c.set("objective.train_on", "assistant", TODO + doubt)


def _pairs(c: Conversion) -> None:
    t = c.theirs
    losses = t.words("loss_type") or ["sigmoid"]
    if losses[0] in get_args(PreferenceLoss):
        c.set("objective.loss", losses[0])
    else:
        c.set("objective.loss", "sigmoid", f"{TODO}{losses[0]} is not offered")
    if others := [loss for loss in losses[1:] if loss != "sft"]:
        c.doubt("objective.loss", f"one loss is trained: {', '.join(others)} is left out")
    weights = [float(weight) for weight in t.listed("loss_weights")] or [1.0] * len(losses)
    if "sft" in losses[1:]:
        c.set("objective.sft_weight", weights[losses.index("sft")])
    elif "rpo_alpha" in t:
        c.copy("objective.sft_weight", "rpo_alpha")
    if weights[0] != 1:
        c.doubt("objective.loss", f"has the weight {weights[0]:g} there, and 1 here")
    if c.number("objective.label_smoothing"):
        c.copy("objective.label_smoothing")


def _cpo(c: Conversion) -> None:
    loss = c.theirs.word("loss_type", default="sigmoid")
    c.set("objective.loss", "simpo", "" if loss == "simpo" else f"{TODO}CPO has no counterpart; SimPO comes nearest")
    c.copy("objective.margin")
    c.copy("objective.sft_weight", "cpo_alpha")


def _data(c: Conversion, trainer: str) -> None:
    """Sources, whose format is detected: TRL's types of datasets are ours by their columns."""
    t = c.theirs
    common: dict[str, Any] = {}
    if trainer == "sft" and (column := t.word("dataset_text_field", default="text")) != "text":
        common = {"format": "text", "columns": {"text": column}}
    c.sources["train"] = _mixture(t, common) or _mixture(t.table("dataset_mixture"), common) or _handbook(c)
    name = t.word("dataset_name")
    config, split = t.word("dataset_config"), t.word("dataset_train_split", default="train")
    test = t.word("dataset_test_split", default="test")
    named = {"path": name} | ({"config": config} if config else {})
    if name and c.sources["train"]:
        t.leave("dataset_name", "`datasets` takes precedence")
    elif name:
        c.sources["train"] = [({**named, **({} if split == "train" else {"split": split}), **common}, "")]
    if not c.sources["train"]:
        c.sources["train"] = [({"path": "rows.jsonl"}, f"{TODO}no dataset is named")]
    convert_held_out(c, "test_split_size", t.table("dataset_mixture") if "dataset_mixture" in t else t)
    evaluates = str(t.values.get("eval_strategy", "no")).lower() not in ("no", "false")
    if evaluates and name and not c.value("data.eval"):
        c.sources["eval"] = [({**named, "split": test, **common}, "")]
    if c.value("objective.name") == "grpo":
        return
    length = c.number("data.max_length")
    is_unlimited = "max_length" in t.values and t.values["max_length"] in (None, "None")
    said = "" if any(name in t for name in c.data.names("data.max_length")) else f"the default of {c.tool}"
    c.set("data.max_length", int(length), _NO_LIMIT if is_unlimited else said)
    strategy, packs = t.word("packing_strategy", default="bfd"), t.is_on("packing")
    if t.word("truncation_mode", default="keep_start") != "keep_start":
        t.leave("truncation_mode", "the beginning of a long example is kept")
    c.set("data.overlong", "split" if packs and strategy != "bfd" else "truncate")
    c.set("data.packing", packs, "documents stay whole here" if packs and strategy == "wrapped" else "")
    if c.is_on("data.streaming"):
        c.set("data.streaming", True)


def _mixture(table: ForeignTable, common: dict[str, Any]) -> list[Source]:
    """Returns the sources of `datasets`, TRL's mixture, or the handbook's, whose sections have an `id`."""
    sources: list[Source] = []
    for one in table.tables("datasets"):
        config, split = one.word("name", "config", default="default"), one.word("split", default="train")
        source = ({} if config == "default" else {"config": config}) | ({} if split == "train" else {"split": split})
        comment = ""
        if (part := one.number("fraction", "weight")) not in (None, 1):
            comment = f"{TODO}the first {part:g} of the rows there: see `split` and `limit`"
        one.ignore("columns")  # those of the format are read
        paths = [str(one.word("id"))] if "id" in one else file_paths(one)
        sources += [({"path": path, **source, **common}, comment) for path in paths]
    return sources


def _handbook(c: Conversion) -> list[Source]:
    """Returns the sources of the alignment handbook's `dataset_mixer`, and sets those of evaluation."""
    t = c.theirs
    mixer = t.table("dataset_mixer")
    splits = t.words("dataset_splits") if mixer.values else []
    configs = t.words("dataset_configs") if mixer.values else []
    for i, path in enumerate(mixer.values):
        part = mixer.number(path, default=1)
        named = {"path": path} | ({"config": configs[i]} if i < len(configs) and configs[i] != "default" else {})
        comment = f"{TODO}the first {part:g} of the rows there: see `split` and `limit`" if part != 1 else ""
        for split in splits or ["train"]:
            kind = "eval" if "test" in split or "eval" in split else "train"
            if kind == "train" or part > 0:
                taken = {} if split == "train" else {"split": split}
                c.sources.setdefault(kind, []).append(({**named, **taken}, comment if kind == "train" else ""))
    return c.sources.get("train", [])
