"""TRL's command line and its YAML, and the recipes of the alignment handbook.

Keys and defaults: https://github.com/huggingface/trl, trl/trainer, trl/experimental and trl/scripts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from finetune.setup.conversion import TODO, Conversion, Source
from finetune.setup.foreign_arguments import (
    ToolDefaults,
    convert_adapters,
    convert_held_out,
    convert_model,
    convert_run,
    convert_training,
    file_paths,
)
from finetune.setup.foreign_command import COMMAND
from finetune.setup.foreign_rollouts import convert_distillation, convert_grpo
from finetune.setup.foreign_values import ForeignTable


class TrlTrainer(NamedTuple):
    """A trainer of TRL: our objective, its default rate, keys that no other trainer has, and what is not the same."""

    objective: str
    lr: float
    marks: tuple[str, ...] = ()
    doubt: str = ""


_ONLINE = "trains on pairs or values of the model's own samples; grpo compares samples by their rewards"
TRAINERS: dict[str, TrlTrainer] = {
    "sft": TrlTrainer("sft", 2e-5),
    "kto": TrlTrainer("kto", 1e-6, ("desirable_weight", "undesirable_weight")),
    "reward": TrlTrainer("reward", 1e-4, ("center_rewards_coefficient",)),
    "cpo": TrlTrainer("dpo", 1e-6, ("cpo_alpha", "simpo_gamma")),
    "orpo": TrlTrainer("orpo", 1e-6),
    "grpo": TrlTrainer("grpo", 1e-6, ("reward_funcs", "num_generations")),
    "rloo": TrlTrainer("grpo", 1e-6),
    "gkd": TrlTrainer("distill", 5e-5, ("teacher_model_name_or_path", "lmbda")),
    "dpo": TrlTrainer("dpo", 1e-6, ("beta", "precompute_ref_log_probs", "label_smoothing", "loss_weights")),
    "bco": TrlTrainer("kto", 5e-5, (), "BCO is not offered; kto also learns from marked answers"),
    "prm": TrlTrainer("reward", 1e-5, (), "process rewards are not offered; reward scores whole answers"),
    **{name: TrlTrainer("grpo", 5e-7, (), f"{name} {_ONLINE}") for name in ("ppo", "online_dpo", "xpo", "nash_md")},
}
_PAIR_LOSSES = ("sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "apo_zero", "apo_down")
_PLAIN_LOSSES = ("sigmoid", "nll", "chunked_nll")  # of SFT
_NO_LIMIT = f"{TODO}no limit there; the longest example, in tokens"


def trainer_of(c: Conversion, other: str = "sft") -> tuple[str, str]:
    """Returns the trainer of the command, or the one that has such keys; and a doubt."""
    given = c.theirs.word(COMMAND)
    if given in TRAINERS:
        return given, ""
    by_keys = (name for name, one in TRAINERS.items() if any(mark in c.theirs for mark in one.marks))
    name = next(by_keys, other)
    return name, f"the trainer of {given} is not known; by its keys it is {name}" if given else ""


def convert_trl(c: Conversion) -> None:
    t = c.theirs
    trainer, doubt = trainer_of(c)
    convert_run(c)
    convert_model(c, "model_name_or_path")
    if template := t.word("chat_template_path"):
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
    convert_training(c, ToolDefaults(lr=TRAINERS[trainer].lr), in_16_bits)


def _adapters(c: Conversion, four: bool, eight: bool) -> None:
    t = c.theirs
    targets, comment = t.words("lora_target_modules"), ""
    if not targets:
        targets, comment = ["q_proj", "v_proj"], "the default of peft for Llama, Mistral and Qwen"
    convert_adapters(
        c,
        rank=t.count("lora_r", default=16),
        alpha=t.number("lora_alpha", default=32),
        dropout=t.number("lora_dropout", default=0.05),
        targets="all-linear" if targets == ["all-linear"] else targets,
        comment=comment,
        bits=str(t.word("bnb_4bit_quant_type", default="nf4")) if four else "fp8" if eight else None,
    )
    if four:
        c.set("quantization.double_quant", t.is_on("use_bnb_nested_quant", "bnb_4bit_use_double_quant"))


def convert_trainer(c: Conversion, trainer: str, doubt: str = "") -> None:
    """Sets the objective of a trainer, with its rollouts and rewards."""
    t, row = c.theirs, TRAINERS[trainer]
    if row.objective == "grpo":
        is_rloo = trainer == "rloo"
        convert_grpo(c, t, *(("rloo", 2, 0.05) if is_rloo else ("dapo", 8, 0.0)))
    elif row.objective == "distill":
        convert_distillation(c, t)
    else:
        c.set("objective.name", row.objective)
        {"sft": _sft, "dpo": _pairs}.get(trainer, lambda c: None)(c)
    if trainer == "cpo":
        _cpo(c)
    if trainer in ("dpo", "kto", "orpo", "cpo", "bco"):
        c.copy("objective.beta", "beta", default=0.1)
    if row.objective == "kto":
        c.copy("objective.desirable_weight", "desirable_weight", default=1.0)
        c.copy("objective.undesirable_weight", "undesirable_weight", default=1.0)
        if (loss := t.word("loss_type", default="kto")) not in ("kto", "bco"):
            c.doubt("objective.name", f"{loss} is not offered")
    if row.objective == "reward" and t.number("center_rewards_coefficient"):
        c.copy("objective.centering", "center_rewards_coefficient")
    if "router_aux_loss_coef" in t:
        c.copy("objective.router_aux_loss_coef", "router_aux_loss_coef")
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
    if losses[0] in _PAIR_LOSSES:
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
    if t.number("label_smoothing"):
        c.copy("objective.label_smoothing", "label_smoothing")


def _cpo(c: Conversion) -> None:
    loss = c.theirs.word("loss_type", default="sigmoid")
    c.set("objective.loss", "simpo", "" if loss == "simpo" else f"{TODO}CPO has no counterpart; SimPO comes nearest")
    c.copy("objective.margin", "simpo_gamma", default=0.5)
    c.copy("objective.sft_weight", "cpo_alpha", default=1.0)


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
    length = t.number("max_length", "max_seq_length", default=1024)
    is_unlimited = "max_length" in t.values and t.values["max_length"] in (None, "None")
    said = "" if "max_length" in t or "max_seq_length" in t else f"the default of {c.tool}"
    c.set("data.max_length", int(length), _NO_LIMIT if is_unlimited else said)
    strategy, packs = t.word("packing_strategy", default="bfd"), t.is_on("packing")
    if t.word("truncation_mode", default="keep_start") != "keep_start":
        t.leave("truncation_mode", "the beginning of a long example is kept")
    c.set("data.overlong", "split" if packs and strategy != "bfd" else "truncate")
    c.set("data.packing", packs, "documents stay whole here" if packs and strategy == "wrapped" else "")
    if t.is_on("dataset_streaming", "streaming"):
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
