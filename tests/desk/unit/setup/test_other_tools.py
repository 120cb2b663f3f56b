"""Configs of other tools become recipes that load; the values that decide the maths are the tool's.

The YAMLs are our own, with the keys of the public example configs of each tool.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from rich.console import Console
from usual import usual

from finetune.desk.setup.foreign_command import is_command
from finetune.desk.setup.foreign_keys import foreign_tool
from finetune.desk.setup.other_tools import write_converted
from finetune.errors import UserError
from finetune.features import load_recipe
from finetune.recipe import Recipe
from finetune.recipe.objective_settings import OBJECTIVE_SECTIONS, Grpo, PolicyLoss, PreferenceLoss

Convert = Callable[..., tuple[Recipe, str, str]]


@pytest.fixture
def convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Convert:
    """Converts a config; returns the recipe, what was printed, and the recipe's text."""
    monkeypatch.chdir(tmp_path)

    def run(config: str, devices: int | None = None, name: str | None = None, *overrides: str) -> Any:
        source = config
        if "\n" in config and not is_command(config.splitlines()[0]):
            source = "theirs.yaml"
            Path(source).write_text(config, encoding="utf-8")
        output, console = tmp_path / "ours.yaml", Console(file=io.StringIO(), width=200)
        output.unlink(missing_ok=True)
        write_converted(source, output, name, devices, overrides, console)
        assert isinstance(console.file, io.StringIO)
        return load_recipe(output), console.file.getvalue(), output.read_text(encoding="utf-8")

    return run


def values(recipe: Recipe, *keys: str) -> list[Any]:
    """Returns values by dotted key."""
    found = []
    for key in keys:
        value: Any = recipe.model_dump()
        for part in key.split("."):
            value = value[part]
        found.append(value)
    return found


# --- axolotl

AXOLOTL_LORA = """
base_model: org/llama
load_in_8bit: true
load_in_4bit: false
datasets:
  - path: org/rows
    type: alpaca
dataset_prepared_path:
val_set_size: 0.05
output_dir: ./outputs/lora-out
sequence_len: 4096
sample_packing: true
eval_sample_packing: false
adapter: lora
lora_model_dir:
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
lora_modules_to_save: [embed_tokens, lm_head]
wandb_project:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
tf32: false
gradient_checkpointing: true
logging_steps: 1
attn_implementation: flash_attention_2
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
special_tokens:
  pad_token: <|end_of_text|>
"""


def test_axolotl_lora(convert: Convert) -> None:
    recipe, printed, text = convert(AXOLOTL_LORA, devices=2)
    assert values(recipe, "mode", "lora.rank", "lora.alpha", "lora.dropout", "lora.targets") == [
        *("qlora", 32, 16.0, 0.05, "all-linear")
    ]
    assert recipe.quantization is not None
    assert (recipe.quantization.type, recipe.lora and recipe.lora.modules_to_save) == (
        "fp8",
        ("embed_tokens", "lm_head"),
    )
    assert values(recipe, "batch.rows", "batch.rows_per_device", "train.epochs", "train.precision") == [
        16,
        2,
        4,
        "bf16",
    ]
    assert values(recipe, "data.max_length", "data.packing", "data.overlong") == [4096, True, "drop"]
    assert values(recipe, "optimizer.name", "optimizer.lr", "optimizer.betas") == ["adamw_8bit", 2e-4, (0.9, 0.999)]
    assert values(recipe, "schedule.name", "schedule.warmup_ratio", "run.seed") == ["cosine", 0.1, 42]
    assert values(recipe, "run.name", "data.eval.share", "train.activation_checkpointing") == ["lora-out", 0.05, True]
    assert recipe.data.train[0].format == "alpaca"
    assert "batch:\n  rows: 16  # 2 a device x 4 accumulated x 2 devices" in text
    for line in (
        "saves_per_epoch=1: set `checkpoint.every_steps`",
        "logging_steps=1: every step is written to metrics.jsonl",
        "special_tokens.pad_token=<|end_of_text|>: sequences are never padded",
        "eval_sample_packing=false, tf32=false: off there as well",
    ):
        assert line in printed
        assert line in text
    assert "To do" not in printed


AXOLOTL_FULL = """
base_model: org/llama
datasets:
  - path: json
    data_files: [a.jsonl, b.jsonl]
    type: chat_template
    field_messages: conversations
    message_property_mappings: {role: from, content: value}
  - {path: org/pages, type: completion, field: content}
chat_template: llama3
sequence_len: 8192
excess_length_strategy: truncate
train_on_inputs: true
gradient_accumulation_steps: 8
micro_batch_size: 1
optimizer: paged_adamw_8bit
learning_rate: 2e-5
cosine_min_lr_ratio: 0.1
bf16: true
deepspeed: deepspeed_configs/zero3_bf16_cpuoffload_params.json
"""


def test_axolotl_full_with_files_and_zero3(convert: Convert) -> None:
    recipe, printed, _ = convert(AXOLOTL_FULL)
    assert values(recipe, "mode", "lora", "objective.train_on", "data.overlong") == ["full", None, "all", "truncate"]
    sources = [(one.path, one.format, one.columns) for one in recipe.data.train]
    assert sources == [
        ("a.jsonl", "sharegpt", None),
        ("b.jsonl", "sharegpt", None),
        ("org/pages", "text", {"text": "content"}),
    ]
    assert values(recipe, "model.chat_template", "schedule.min_lr_ratio", "batch.rows") == ["llama3", 0.1, 8]
    # Defaults that differ from ours are written: axolotl warms up for 3 %, and does not pack.
    assert values(recipe, "schedule.warmup_ratio", "data.packing", "train.epochs") == [0.03, False, 1]
    assert recipe.train.precision == "bf16"  # ZeRO keeps fp32 masters
    assert "--config-file accelerate_configs/zero3_offload.yaml" in printed
    assert "zero3_offload ran on several; say how many with --devices" in printed
    recipe, printed, _ = convert(AXOLOTL_FULL.partition("deepspeed")[0])
    assert (recipe.train.precision, "--config-file" in printed) == ("bf16_true", False)


AXOLOTL_PAIRS = """
base_model: org/llama-instruct
load_in_4bit: true
adapter: qlora
lora_r: 8
lora_alpha: 16
lora_dropout: 0.05
lora_target_modules: [q_proj, v_proj]
rl: {rl}
{extra}
datasets:
  - path: org/pairs
    split: train_prefs
    type: {type}
sequence_len: 2048
micro_batch_size: 2
learning_rate: 0.0002
lr_scheduler: linear
warmup_steps: 20
max_steps: 100
fsdp: [full_shard, auto_wrap]
fsdp_config: {{fsdp_offload_params: true}}
"""


@pytest.mark.parametrize(
    ("rl", "extra", "kind", "expected", "columns"),
    [
        (
            "dpo",
            "rl_beta: 0.2",
            "chatml.intel",
            {"name": "dpo", "loss": "sigmoid", "beta": 0.2},
            {"prompt": "question"},
        ),
        ("ipo", "", "llama3.argilla", {"name": "dpo", "loss": "ipo", "beta": 0.1}, {"chosen": "chosen_response"}),
        (
            "simpo",
            "simpo_gamma: 0.3\ncpo_alpha: 0.5",
            "chatml.ultra",
            {"name": "dpo", "loss": "simpo", "margin": 0.3, "sft_weight": 0.5, "reference": None},
            {},
        ),
        ("orpo", "orpo_alpha: 0.3", "chat_template.argilla", {"name": "orpo", "beta": 0.3}, {}),
        (
            "kto",
            "kto_desirable_weight: 0.2",
            "llama3.argilla",
            {"name": "kto", "desirable_weight": 0.2, "undesirable_weight": 1.0, "reference": "adapters_off"},
            {"prompt": "instruction"},
        ),
        (
            "dpo",
            "dpo_loss_type: [sigmoid, sft]\ndpo_loss_weights: [1.0, 0.25]",
            "chat_template.default",
            {"loss": "sigmoid", "sft_weight": 0.25, "reference": "adapters_off"},
            {"prompt": "messages"},
        ),
    ],
    ids=["dpo", "ipo", "simpo", "orpo", "kto", "two losses"],
)
def test_axolotl_preferences(
    convert: Convert, rl: str, extra: str, kind: str, expected: dict[str, Any], columns: dict[str, str]
) -> None:
    recipe, printed, text = convert(AXOLOTL_PAIRS.format(rl=rl, extra=extra, type=kind))
    assert {key: getattr(recipe.objective, key) for key in expected} == expected
    source = recipe.data.train[0]
    assert (source.split, source.format) == ("train_prefs", "unpaired" if rl == "kto" else "preference")
    assert columns.items() <= (source.columns or {}).items()
    assert values(recipe, "mode", "lora.targets", "lora.dropout") == ["qlora", ("q_proj", "v_proj"), 0.0]
    assert "0.05 there, but disable_dropout turns it off" in text
    assert values(recipe, "data.packing", "train.max_steps", "train.epochs") == [False, 100, None]
    assert values(recipe, "schedule.name", "schedule.warmup_steps") == ["linear", 20]
    assert "--config-file accelerate_configs/fsdp2_offload.yaml" in printed


# --- LLaMA-Factory

FACTORY = """
### model
model_name_or_path: org/qwen
trust_remote_code: true
### method
stage: {stage}
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: {targets}
{extra}
### dataset
dataset: {dataset}
template: {template}
cutoff_len: 2048
max_samples: 1000
preprocessing_num_workers: 16
### output
output_dir: saves/qwen3-4b/lora/sft
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
report_to: none
### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
"""
DATASETS = {
    "plain": {"file_name": "plain.json"},
    "renamed": {
        "hf_hub_url": "org/renamed",
        "subset": "en",
        "num_samples": 50,
        "columns": {"prompt": "question", "query": "context", "response": "reply", "system": "sys", "history": "past"},
    },
    "talks": {"file_name": "talks.json", "formatting": "sharegpt", "columns": {"messages": "talk", "tools": "tools"}},
    "chats": {
        "file_name": "chats.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "pairs": {
        "file_name": "pairs.json",
        "formatting": "sharegpt",
        "ranking": True,
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
    "texts": {
        "file_name": "texts.json",
        "ranking": True,
        "columns": {"prompt": "instruction", "query": "input", "chosen": "better", "rejected": "worse"},
    },
    "pictures": {
        "file_name": "pictures.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "images": "images"},
        "tags": {"role_tag": "role", "content_tag": "content"},
    },
    "marked": {"file_name": "marked.json", "columns": {"prompt": "q", "response": "a", "kto_tag": "kto_tag"}},
    "pages": {"file_name": "pages.jsonl", "columns": {"prompt": "content"}},
}


def factory(
    stage: str = "sft", dataset: str = "plain", extra: str = "", targets: str = "all", template: str = "x"
) -> str:
    Path("data").mkdir(exist_ok=True)
    Path("data/dataset_info.json").write_text(json.dumps(DATASETS), encoding="utf-8")
    return FACTORY.format(stage=stage, dataset=dataset, extra=extra, targets=targets, template=template)


def test_llama_factory_sft(convert: Convert) -> None:
    recipe, printed, text = convert(factory(dataset="plain,renamed, talks,chats", template="qwen3_nothink"), devices=2)
    # alpha is twice the rank, and dropout 0, if left out
    assert values(recipe, "mode", "lora.rank", "lora.alpha", "lora.dropout", "lora.targets") == [
        *("lora", 8, 16.0, 0.0, "all-linear")
    ]
    sources = [(one.path, one.config, one.format, one.columns, one.limit) for one in recipe.data.train]
    assert sources == [
        ("data/plain.json", None, "alpaca", None, 1000),
        (
            *("org/renamed", "en", "alpaca"),
            {"instruction": "question", "input": "context", "output": "reply", "history": "past", "system": "sys"},
            50,
        ),
        ("data/talks.json", None, "sharegpt", {"conversations": "talk"}, 1000),
        ("data/chats.json", None, "messages", None, 1000),
    ]
    assert values(recipe, "batch.rows", "batch.rows_per_device", "optimizer.lr", "train.epochs") == [16, 1, 1e-4, 3]
    assert values(recipe, "data.overlong", "data.packing", "data.max_length") == ["truncate", False, 2048]
    assert values(recipe, "schedule.warmup_ratio", "checkpoint.every_steps", "run.name") == [0.1, 500, "sft"]
    # It recomputes activations unless told otherwise.
    assert values(recipe, "train.activation_checkpointing", "model.trust_remote_code") == [True, True]
    assert "the tokenizer's own, in place of LLaMA-Factory's qwen3_nothink" in text
    assert "preprocessing_num_workers=16: rows are tokenized once" in printed


def test_llama_factory_qlora_with_neat_packing_and_zero3(convert: Convert) -> None:
    extra = "quantization_bit: 4\ndouble_quantization: false\nneat_packing: true\nmask_history: true\nval_size: 0.1\n"
    extra += "eval_strategy: steps\neval_steps: 50\ndeepspeed: examples/deepspeed/ds_z3_config.json"
    recipe, printed, _ = convert(factory(extra=extra, targets="q_proj,v_proj", template="llama3"))
    assert recipe.quantization is not None
    assert (recipe.mode, recipe.quantization.type, recipe.quantization.double_quant) == ("qlora", "nf4", False)
    assert values(recipe, "lora.targets", "data.packing", "model.chat_template") == [
        ("q_proj", "v_proj"),
        True,
        "llama3",
    ]
    assert values(recipe, "objective.train_on", "data.eval.share", "evaluate.every_steps") == [
        "last_assistant",
        0.1,
        50,
    ]
    assert "--config-file accelerate_configs/zero3.yaml" in printed


@pytest.mark.parametrize(
    ("stage", "dataset", "extra", "expected", "rows"),
    [
        (
            "dpo",
            "pairs",
            "pref_beta: 0.2\npref_ftx: 0.5",
            {"name": "dpo", "beta": 0.2, "sft_weight": 0.5},
            ("preference", None),
        ),
        ("dpo", "pairs", "pref_loss: simpo\nsimpo_gamma: 0.7", {"loss": "simpo", "margin": 0.7}, ("preference", None)),
        (
            "dpo",
            "texts",
            "pref_loss: orpo",
            {"name": "orpo", "beta": 0.1},
            ("preference", {"chosen": "better", "rejected": "worse", "prompt": "instruction"}),
        ),
        (
            "kto",
            "marked",
            "kto_chosen_weight: 0.5",
            {"name": "kto", "desirable_weight": 0.5, "undesirable_weight": 1.0, "reference": "adapters_off"},
            ("unpaired", {"label": "kto_tag", "prompt": "q", "completion": "a"}),
        ),
        ("rm", "pairs", "", {"name": "reward"}, ("preference", None)),
        ("pt", "pages", "", {"name": "sft"}, ("text", {"text": "content"})),
    ],
    ids=["dpo", "simpo", "orpo", "kto", "reward", "pre-training"],
)
def test_llama_factory_stages(
    convert: Convert, stage: str, dataset: str, extra: str, expected: dict[str, Any], rows: tuple[str, Any]
) -> None:
    recipe, printed, _ = convert(factory(stage, dataset, extra))
    assert {key: getattr(recipe.objective, key) for key in expected} == expected
    assert (recipe.data.train[0].format, recipe.data.train[0].columns) == rows
    assert values(recipe, "data.packing", "data.overlong") == [stage == "pt", "split" if stage == "pt" else "drop"]
    assert ("`input` is not read: join it to `instruction`" in printed) == (dataset == "texts")


def test_llama_factory_pictures(convert: Convert) -> None:
    recipe, _, _ = convert(factory(dataset="pictures", extra="image_max_pixels: 262144\nfreeze_vision_tower: false"))
    assert recipe.data.image is not None
    assert (recipe.data.image.max_pixels, recipe.model.train) == (262144, ("language", "tower"))
    assert (recipe.data.train[0].format, recipe.data.train[0].columns) == ("messages", None)


def test_llama_factory_full_without_its_table_of_datasets(convert: Convert) -> None:
    config = FACTORY.format(stage="sft", dataset="mine", extra="", targets="all", template="default")
    recipe, printed, _ = convert(config.replace("finetuning_type: lora", "finetuning_type: full\npure_bf16: true"))
    assert (recipe.mode, recipe.lora, recipe.train.precision) == ("full", None, "bf16_true")
    assert "data.train: data/dataset_info.json is not here; give `path`, `format` and `columns`" in printed
    Path("data").mkdir()
    Path("data/dataset_info.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"dataset_info\.json: cannot be read"):
        convert(config)


# --- TRL

TRL_SFT = """
model_name_or_path: org/qwen
dataset_name: org/chats
learning_rate: 2.0e-4
num_train_epochs: 1
packing: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
eval_strategy: steps
eval_steps: 100
use_peft: true
lora_r: 32
lora_alpha: 16
output_dir: Qwen2-0.5B-SFT
report_to: none
push_to_hub: true
"""


def test_trl_sft(convert: Convert) -> None:
    recipe, printed, text = convert(TRL_SFT, devices=4)
    # peft's targets and TRL's dropout, if left out
    assert values(recipe, "mode", "lora.rank", "lora.alpha", "lora.dropout", "lora.targets") == [
        *("lora", 32, 16.0, 0.05, ("q_proj", "v_proj"))
    ]
    assert values(recipe, "batch.rows", "batch.rows_per_device", "optimizer.lr", "schedule.name") == [
        64,
        2,
        2e-4,
        "linear",
    ]
    assert values(recipe, "data.max_length", "data.packing", "data.overlong") == [1024, True, "truncate"]
    assert [(one.path, one.split, one.format) for one in (*recipe.data.train, *recipe.data.eval_sources)] == [
        ("org/chats", "train", "auto"),
        ("org/chats", "test", "auto"),
    ]
    assert values(recipe, "evaluate.every_steps", "checkpoint.every_steps", "run.name") == [100, 500, "Qwen2-0.5B-SFT"]
    assert values(recipe, "train.precision", "train.activation_checkpointing") == ["bf16", True]
    assert values(recipe, "optimizer.betas", "optimizer.eps") == [(0.9, 0.999), 1e-8]
    assert "unless assistant_only_loss: `all` is the same" in printed
    assert "push_to_hub=true: set `run.push: org/name`" in printed
    assert "max_length: 1024  # the default of TRL" in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "trl dpo --model_name_or_path org/qwen --dataset_name org/pairs --learning_rate 5.0e-7 --max_steps 1000 "
            "--per_device_train_batch_size 2 --gradient_accumulation_steps 8 --no_remove_unused_columns",
            {
                "mode": "full",
                "objective.name": "dpo",
                "objective.loss": "sigmoid",
                "objective.reference": None,
                "optimizer.lr": 5e-7,
                "train.max_steps": 1000,
                "train.epochs": None,
                "batch.rows": 16,
                "train.precision": "bf16",
            },
        ),
        (
            "accelerate launch --num_processes 2 trl/scripts/dpo.py --model_name_or_path org/qwen --dataset_name org/p "
            "--load_in_4bit --lora_target_modules q_proj k_proj --loss_type sigmoid sft --loss_weights 1.0 0.5 "
            "--beta=0.2",
            {
                "mode": "qlora",
                "lora.targets": ("q_proj", "k_proj"),
                "quantization.double_quant": False,
                "lora.dropout": 0.0,
                "objective.beta": 0.2,
                "objective.sft_weight": 0.5,
                "objective.reference": "adapters_off",
                "batch.rows": 16,
                "optimizer.lr": 1e-6,
            },
        ),
        (
            "trl kto --model_name_or_path org/qwen --dataset_name org/marked --desirable_weight 0.7 --dtype bfloat16",
            {
                "objective.name": "kto",
                "objective.desirable_weight": 0.7,
                "train.precision": "bf16_true",
                "data.overlong": "drop",
            },
        ),
        (
            "trl reward --model_name_or_path org/qwen --dataset_name org/pairs --center_rewards_coefficient 0.01",
            {"objective.name": "reward", "objective.centering": 0.01, "optimizer.lr": 1e-4},
        ),
        (
            "python cpo.py --model_name_or_path org/qwen --dataset_name org/pairs --loss_type simpo --cpo_alpha 0.0",
            {"objective.loss": "simpo", "objective.margin": 0.5, "objective.sft_weight": 0.0, "objective.beta": 0.1},
        ),
        (
            "trl sft --model_name_or_path org/qwen --dataset_name org/t --dataset_text_field body "
            "--completion_only_loss --lr_scheduler_type cosine_with_min_lr "
            "--lr_scheduler_kwargs '{\"min_lr_rate\": 0.1}' --warmup_steps 0.03 "
            "--accelerate_config zero3 --max_grad_norm 0",
            {
                "objective.train_on": "assistant",
                "schedule.name": "cosine",
                "schedule.min_lr_ratio": 0.1,
                "schedule.warmup_ratio": 0.03,
                "schedule.warmup_steps": 0,
                "optimizer.max_grad_norm": None,
            },
        ),
    ],
    ids=["dpo", "dpo qlora", "kto", "reward", "simpo", "sft"],
)
def test_trl_arguments(convert: Convert, words: str, expected: dict[str, Any]) -> None:
    recipe, printed, _ = convert(words)
    assert dict(zip(expected, values(recipe, *expected), strict=True)) == expected
    assert ("accelerate_configs/zero3.yaml" in printed) == ("zero3" in words)
    columns = {"text": "body"} if "body" in words else None
    assert recipe.data.train[0].columns == columns


def test_trl_arguments_with_a_file(convert: Convert, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(TRL_SFT, encoding="utf-8")
    recipe, _, _ = convert("trl dpo --config config.yaml --learning_rate 1e-5 --no_packing")
    assert values(recipe, "objective.name", "optimizer.lr", "data.packing", "lora.rank") == ["dpo", 1e-5, False, 32]
    recipe, printed, _ = convert("trl grpo --config config.yaml --reward_funcs accuracy_reward")
    assert (recipe.objective.name, recipe.objective.loss, recipe.rewards[0].name) == ("grpo", "dapo", "boxed")
    assert "packing=true: a row is one sample" in printed


# --- Unsloth

UNSLOTH = """
model_name: unsloth/llama-3-8b-Instruct-bnb-4bit
max_seq_length: 4096
load_in_4bit: true
r: 16
target_modules: [q_proj, v_proj]
lora_alpha: 16
lora_dropout: 0
bias: none
use_gradient_checkpointing: unsloth
random_state: 3407
dataset_name: org/chats
dataset_text_field: text
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
warmup_steps: 5
max_steps: 60
learning_rate: 2e-4
optim: adamw_8bit
weight_decay: 0.01
lr_scheduler_type: linear
"""


def test_unsloth_arguments(convert: Convert) -> None:
    recipe, printed, text = convert(UNSLOTH)
    assert recipe.model.name == "unsloth/llama-3-8b-Instruct"
    assert "is quantized already; this is taken for the model before" in text
    assert values(recipe, "mode", "lora.rank", "lora.alpha", "lora.dropout", "run.seed") == [
        "qlora",
        16,
        16.0,
        0.0,
        3407,
    ]
    assert values(recipe, "batch.rows", "train.max_steps", "optimizer.name", "optimizer.lr") == [
        8,
        60,
        "adamw_8bit",
        2e-4,
    ]
    assert values(recipe, "schedule.warmup_steps", "optimizer.weight_decay", "data.max_length") == [5, 0.01, 4096]
    assert values(recipe, "train.activation_checkpointing", "objective.train_on") == [True, "all"]
    assert "data.train: the format is detected" in printed


def test_unsloth_defaults_and_full_training(convert: Convert) -> None:
    recipe, _, _ = convert("model_name: org/m\ndataset_name: rows.jsonl\nrandom_state: 1\n")
    assert values(recipe, "mode", "batch.rows", "optimizer.lr", "schedule.warmup_ratio") == ["qlora", 8, 5e-5, 0.1]
    assert recipe.lora is not None
    assert len(recipe.lora.targets) == 7
    recipe, _, _ = convert("model_name: org/m\ndataset_name: rows.jsonl\nfull_finetuning: true\nload_in_4bit: false\n")
    assert values(recipe, "mode", "lora", "train.precision") == ["full", None, "bf16_true"]


UNSLOTH_SCRIPT = """
from unsloth import FastLanguageModel
max_seq_length = 1024  # a literal, once
rank = 8
rank = 32  # twice: only a run would tell
model, tokenizer = FastLanguageModel.from_pretrained(
    "unsloth/Qwen3-4B", max_seq_length=max_seq_length, load_in_4bit=False, load_in_16bit=True, dtype=None
)
model = FastLanguageModel.get_peft_model(
    model, r=rank, lora_alpha=64, target_modules=["q_proj", "v_proj"], lora_dropout=0, random_state=7
)
from datasets import load_dataset
dataset = load_dataset("json", data_files="rows.jsonl", split="train")
dataset = dataset.map(lambda row: open("/written/by/the/script", "w"))
trainer = SFTTrainer(
    model=model, tokenizer=tokenizer, train_dataset=dataset, formatting_func=to_text,
    args=SFTConfig(
        per_device_train_batch_size=2, gradient_accumulation_steps=4, num_train_epochs=3, learning_rate=base_lr * 2,
        warmup_steps=5, bf16=is_bf16_supported(), optim="adamw_torch", lr_scheduler_type="cosine", output_dir="outputs",
        dataset_text_field="body",
    ),
)
trainer = train_on_responses_only(trainer, instruction_part="a", response_part="b")
"""


@pytest.mark.parametrize("is_notebook", [False, True])
def test_unsloth_scripts_and_notebooks(convert: Convert, is_notebook: bool, tmp_path: Path) -> None:
    text, name = UNSLOTH_SCRIPT, "train.py"
    if is_notebook:
        lines = ["%%capture\n", "!pip install unsloth\n", "if True:\n", "    !pip install trl\n"]
        cells = [{"cell_type": "code", "source": lines}, {"cell_type": "markdown", "source": ["# Train"]}]
        cells.append({"cell_type": "code", "source": UNSLOTH_SCRIPT.splitlines(keepends=True)})
        text, name = json.dumps({"cells": cells}), "train.ipynb"
    Path(name).write_text(text, encoding="utf-8")
    recipe, printed, _ = convert(name)
    assert (recipe.model.name, recipe.mode, recipe.data.max_length) == ("unsloth/Qwen3-4B", "lora", 1024)
    assert recipe.lora is not None
    assert (recipe.lora.alpha, recipe.lora.targets) == (64, ("q_proj", "v_proj"))
    assert (recipe.data.train[0].path, recipe.data.train[0].columns) == ("rows.jsonl", {"text": "body"})
    assert (recipe.train.epochs, recipe.batch.rows, recipe.schedule.warmup_steps) == (3, 8, 5)
    assert (recipe.objective.train_on, recipe.run.seed, recipe.run.name) == ("assistant", 7, "outputs")
    todo = printed.partition("To do, marked in the recipe:")[2]
    assert re.search(r"lora\.rank: computed there \(line \d+: rank\)", todo)
    assert re.search(r"optimizer\.lr: computed there \(line \d+: base_lr \* 2\)", todo)
    assert "formatting_func=" in printed
    assert re.search(r"bf16.*is_bf16_supported\(\)", printed)
    assert not (tmp_path / "written").exists()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.py", "print(1)", "no call of Unsloth's FastLanguageModel, .*, or of a trainer of TRL"),
        ("a.py", "x = = 1", r"a\.py:1: not valid Python: invalid syntax. Fix: "),
        ("a.py", "(" * 5000, "not valid Python|cannot be read"),
        ("a.ipynb", "{}", "not a notebook. Fix: save it again"),
        ("a.ipynb", '{"cells": [{"cell_type": "code", "source": ["x = = 1"]}]}', "not valid Python"),
    ],
)
def test_scripts_that_cannot_be_read(convert: Convert, name: str, text: str, message: str) -> None:
    Path(name).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        convert(name)


TRL_SCRIPT = """
import torch
name = "org/m"
model = AutoModelForCausalLM.from_pretrained(
    name, dtype=torch.bfloat16, attn_implementation="sdpa",
    quantization_config=BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
)
train = load_dataset("org/pairs", split="train_sft")
test = load_dataset("org/pairs", split="test_sft")
args = DPOConfig(beta=0.2, output_dir="out/pairs", learning_rate=rate * 2, per_device_train_batch_size=2)
peft_config = LoraConfig(r=32, task_type="CAUSAL_LM")
trainer = DPOTrainer(model, args=args, train_dataset=train, eval_dataset=test, peft_config=peft_config)
"""


def test_trl_scripts(convert: Convert) -> None:
    Path("dpo.py").write_text(TRL_SCRIPT, encoding="utf-8")
    recipe, printed, text = convert("dpo.py", devices=2)
    names = ("model.name", "mode", "objective.name", "objective.beta", "batch.rows", "run.name")
    assert values(recipe, *names) == ["org/m", "qlora", "dpo", 0.2, 4, "pairs"]
    # What the script leaves out has peft's defaults, which are not those of TRL's command line.
    assert values(recipe, "lora.rank", "lora.alpha", "lora.dropout") == [32, 8.0, 0.0]
    assert values(recipe, "quantization.type", "quantization.double_quant") == ["nf4", True]
    assert (recipe.data.train[0].path, recipe.data.train[0].split) == ("org/pairs", "train_sft")
    assert re.search(r"optimizer\.lr: computed there \(line \d+: rate \* 2\)", printed)
    assert re.search(r"eval_dataset.*test", printed)
    assert "dpo.py of TRL" in text
    script = """SFTTrainer(
        model="org/small", args=SFTConfig(max_length=512, packing=True, assistant_only_loss=True),
        train_dataset=datasets.load_dataset("json", data_files="rows.jsonl", split="train"),
    )"""
    Path("sft.py").write_text(script, encoding="utf-8")
    recipe, _, _ = convert("sft.py")
    assert values(recipe, "model.name", "mode", "data.max_length", "data.packing") == ["org/small", "full", 512, True]
    assert (recipe.data.train[0].path, recipe.objective.train_on) == ("rows.jsonl", "assistant")


UNSLOTH_CONFIG = """
model: org/m
data: {local_dataset: [a.jsonl, b.jsonl], format_type: sharegpt}
training:
  num_epochs: 2
  batch_size: 4
  train_on_completions: true
  packing: true
lora: {lora_alpha: 32, target_modules: "q_proj,v_proj"}
logging: {enable_wandb: true}
"""


def test_unsloth_config_of_its_command_line(convert: Convert) -> None:
    recipe, printed, _ = convert(UNSLOTH_CONFIG)
    assert values(recipe, "mode", "lora.rank", "lora.alpha", "lora.targets") == [
        "qlora",
        64,
        32.0,
        ("q_proj", "v_proj"),
    ]
    assert [(one.path, one.format) for one in recipe.data.train] == [("a.jsonl", "sharegpt"), ("b.jsonl", "sharegpt")]
    assert values(recipe, "batch.rows", "train.epochs", "optimizer.lr", "schedule.warmup_steps") == [16, 2, 2e-4, 5]
    assert values(recipe, "objective.train_on", "data.packing", "run.seed") == ["assistant", True, 3407]
    assert recipe.tracking.wandb is not None
    assert recipe.tracking.wandb.project == "unsloth-training"
    assert "To do" not in printed


# --- all


@pytest.mark.parametrize(
    ("written", "targets", "is_open"),
    [
        (
            "model.language_model.layers.[\\d]+.(mlp|self_attn).(up|down|q)_proj",
            ("up_proj", "down_proj", "q_proj"),
            False,
        ),
        (".*\\.layers\\.(3|7)\\.self_attn\\.(q|k)_proj|.*\\.mlp\\.(up|down)_proj", "all-linear", True),
        ("q_proj,v_proj", ("q_proj", "v_proj"), False),
    ],
)
def test_targets_by_a_regular_expression(convert: Convert, written: str, targets: Any, is_open: bool) -> None:
    config = AXOLOTL_LORA.replace("lora_target_linear: true", f"lora_target_modules: '{written}'")
    recipe, printed, _ = convert(config)
    assert recipe.lora is not None
    assert (recipe.lora.targets, "lora.targets: list the modules" in printed) == (targets, is_open)


def test_what_has_no_equal_is_to_do(convert: Convert) -> None:
    config = AXOLOTL_LORA.replace("adamw_bnb_8bit", "lion_8bit").replace("cosine", "rex")
    config = config.replace("type: alpaca", "type: context_qa") + "neftune_noise_alpha: 5\nunheard_of: 1\n"
    recipe, printed, text = convert(config)
    assert values(recipe, "optimizer.name", "schedule.name") == ["adamw", "cosine"]
    assert recipe.data.train[0].format == "auto"
    assert text.count("# TODO: ") == 3
    assert "optimizer.name: lion_8bit is not offered" in printed
    assert "data.train: `type: context_qa` has no counterpart" in printed
    assert "neftune_noise_alpha=5: noise on embeddings is not offered" in printed
    assert "unheard_of=1: no counterpart is known" in printed


@pytest.mark.parametrize("tool", usual(("axolotl", "LLaMA-Factory", "TRL", "Unsloth"), "axolotl", "TRL"))
def test_values_of_another_kind_are_messages(convert: Convert, tool: str) -> None:
    config = {"axolotl": AXOLOTL_LORA, "LLaMA-Factory": factory(), "TRL": TRL_SFT, "Unsloth": UNSLOTH}[tool]
    values = yaml.safe_load(config)
    refused = []
    for name in (*values, "lr_scheduler_kwargs", "report_to", "deepspeed", "datasets", "chat_template", "fsdp_config"):
        for value in ("x", [1], {"a": 1}):
            try:
                convert(yaml.safe_dump(values | {name: value}))
            except UserError as error:
                refused.append(str(error))
    assert len(refused) < len(values)
    assert [text for text in refused if "ours.yaml" not in text and "not a config of" not in text] == []


def test_names_devices_and_overrides_of_the_command_line(convert: Convert) -> None:
    recipe, _, text = convert(AXOLOTL_LORA, 4, "mine", "optimizer.lr=1e-4", "mode=lora", "data.max_length=512")
    assert values(recipe, "run.name", "batch.rows", "optimizer.lr", "data.max_length") == ["mine", 32, 1e-4, 512]
    assert "lr: 0.0001  # from the command line" in text
    recipe, _, _ = convert(AXOLOTL_LORA, 4, None, "data.train=mine.jsonl", "data.eval=0.2")
    assert (recipe.data.train[0].path, recipe.data.eval.share) == ("mine.jsonl", 0.2)  # type: ignore[union-attr]
    with pytest.raises(UserError, match=r"not of the form section.key=value\. Fix: "):
        convert(AXOLOTL_LORA, 4, "mine", "lr")


def test_other_files_are_refused(convert: Convert, tmp_path: Path) -> None:
    for text, message in (
        ("a: 1\nb: 2\n", "not a config of a tool that is known here"),
        ("base_model: a\n  b: 2\n", "not valid YAML"),
        ("absent.yaml", "no such file"),
    ):
        with pytest.raises(UserError, match=message):
            convert(text)
    (tmp_path / "ours.yaml").write_text("mine", encoding="utf-8")
    (tmp_path / "theirs.yaml").write_text(AXOLOTL_LORA, encoding="utf-8")
    with pytest.raises(UserError, match="exists already and is left as it is"):
        write_converted("theirs.yaml", tmp_path / "ours.yaml", None, None, (), Console(file=io.StringIO()))


# --- command lines, launches, objectives


SFT = "trl sft --model_name_or_path org/m --dataset_name org/d "


@pytest.mark.parametrize(
    ("words", "key", "expected", "printed_part"),
    [
        (SFT + "--seed 010", "run.seed", 10, ""),
        (SFT + "--seed=0010", "run.seed", 10, ""),
        (SFT + "--warmup_steps 1:30", "schedule.warmup_steps", 0, "warmup_steps=1:30: is not a number"),
        (SFT + "--learning_rate nan", "optimizer.lr", 2e-5, "learning_rate=nan: is not a number"),
        (SFT + "--learning-rate 1e-4 --learning_rate 2e-4", "optimizer.lr", 2e-4, ""),
        (SFT + "--packing False", "data.packing", False, ""),
        (SFT + "--packing yes", "data.packing", True, ""),
        (SFT + "--packing --no_packing", "data.packing", False, ""),
        (SFT + "--packing maybe", "data.packing", False, "packing=maybe: is neither true nor false"),
        (SFT + "--output_dir 1e3", "run.name", "1e3", ""),
        (SFT + "--max_steps -1", "train.epochs", 3, ""),
        (SFT + "--max_steps 50 --save_steps 0.1", "checkpoint.every_steps", 5, ""),
        (SFT + "--save_steps 0.2", "checkpoint.every_steps", None, "save_steps=0.2: a share of the run's steps there"),
        (SFT + "--use_peft --lora_target_modules q_proj v_proj", "lora.targets", ("q_proj", "v_proj"), ""),
        (SFT + "\\\n  --seed 5", "run.seed", 5, ""),
        (SFT + "--num_processes 4", "batch.rows", 32, ""),
        (SFT + "--accelerate_config zero3", "batch.rows", 64, "accelerate_configs/zero3.yaml"),  # 8 processes
        (SFT + "--accelerate_config zero3 --dtype bfloat16", "train.precision", "bf16", ""),
        (SFT + "--dtype bfloat16", "train.precision", "bf16_true", ""),
        (SFT + "--bf16 false", "train.precision", "fp32", ""),
        (SFT + "--bf16 false --mixed_precision bf16", "train.precision", "bf16", ""),
        (SFT + "--fp16", "train.precision", "fp16", ""),
        ("CUDA_VISIBLE_DEVICES=0,1 " + SFT, "batch.rows", 16, ""),
        ("torchrun --nproc_per_node 4 --nnodes 2 sft.py " + SFT[8:], "batch.rows", 64, ""),
        ("accelerate launch --config_file fsdp.yaml sft.py " + SFT[8:], "batch.rows", 8, "fsdp2 ran on several"),
        (
            "accelerate launch --use_fsdp --num_processes 2 -m trl.scripts.sft " + SFT[8:],
            "batch.rows",
            16,
            "fsdp2.yaml",
        ),
        ("axolotl train theirs.yaml --learning-rate 1e-3", "optimizer.lr", 1e-3, ""),
        ("llamafactory-cli train factory.yaml learning_rate=3e-4", "optimizer.lr", 3e-4, ""),
    ],
)
def test_words_of_a_command_line(
    convert: Convert, tmp_path: Path, words: str, key: str, expected: Any, printed_part: str
) -> None:
    (tmp_path / "theirs.yaml").write_text(AXOLOTL_LORA, encoding="utf-8")
    (tmp_path / "factory.yaml").write_text(factory(), encoding="utf-8")
    recipe, printed, _ = convert(words)
    assert values(recipe, key) == [expected]
    assert printed_part in printed


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("trl sft --model_name_or_path 'org/m", "--from: the command line has no closing quotation"),
        ("trl sft --model_name_or_path org/m\\", "--from: the command line has no escaped character"),
        ("trl --config a.yaml", "`trl` without a command"),
        ("trl sft stray --model_name_or_path a", "`stray` belongs to no option"),
        ("rm -rf --no-preserve-root", "`rm` is not a known command"),
        ("accelerate launch --num_processes 2", "`accelerate` without a script"),
        ("trl sft --config absent.yaml", "absent.yaml: no such file"),
        ("/dev/zero", "/dev/zero: is not a regular file"),
        ("/dev/stdin", "is not a regular file"),
        (".", "is a folder"),
        ("pipe.yaml", "pipe.yaml: is not a regular file"),
        ("huge.yaml", "larger than 256 KiB"),
        ("deep.yaml", "nested deeper than 40"),
        ("many.yaml", "more than 10,000 values"),
        ("laughs.yaml", "more than 10,000 values"),
        ("cycle.yaml", "nested deeper than 40"),
        ("twice.yaml", "the key lora_r is given twice"),
        ("latin.yaml", "latin.yaml:2: not UTF-8 text"),
        ("tag.yaml", "not valid YAML"),
        ("nul.yaml", "not valid YAML"),
        ("list.yaml", "expected keys and values"),
        ("deep.json", "nested deeper than 40"),
        ("bad.json", "not valid JSON"),
        ("a\nb.yaml", "no such file"),
        ("x" * 5000, "cannot be read"),
    ],
    ids=lambda text: text[:24].replace("\n", "_"),
)
def test_hostile_sources_are_refused_in_one_line(convert: Convert, tmp_path: Path, source: str, message: str) -> None:
    levels = "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(9))
    contents = {
        "huge.yaml": b"a: " + b"x" * 300_000,
        "deep.yaml": b"a: " + b"[" * 100 + b"]" * 100,
        "many.yaml": b"a: [" + b"1, " * 20_000 + b"1]",
        "laughs.yaml": b"a0: &a0 [1]\n" + levels.encode(),
        "cycle.yaml": b"a: &a [*a]\n",
        "twice.yaml": b"base_model: a\nlora_r: 1\nlora_r: 2\n",
        "latin.yaml": b"a: 1\nb: \xe9\n",
        "tag.yaml": b"a: !!python/object:os.system 1\n",
        "nul.yaml": b"a: \x00\n",
        "list.yaml": b"- 1\n",
        "deep.json": b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}",
        "bad.json": b"{",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    os.mkfifo(tmp_path / "pipe.yaml")
    console = Console(file=io.StringIO())
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        write_converted(source, tmp_path / "ours.yaml", None, None, (), console)
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value).replace("a\nb", "ab")
    assert not (tmp_path / "ours.yaml").exists()


def test_control_characters_stay_in_their_value(convert: Convert, tmp_path: Path) -> None:
    config = yaml.safe_load(AXOLOTL_LORA)
    evil = "x\nmode: full\r\x85\u2028y\x1b[2J"
    config |= {"wandb_project": evil, evil: evil, "chat_template": evil, "tokenizer_config": evil}
    config["datasets"] = [{"path": evil, "type": evil, evil: 1}]
    recipe, printed, text = convert(yaml.safe_dump(config))
    assert recipe.mode == "qlora"
    assert (recipe.model.tokenizer, recipe.tracking.wandb and recipe.tracking.wandb.project) == (evil, evil)
    assert recipe.data.train[0].path == evil
    assert [line for line in text.splitlines() if line.startswith("mode:")] == ["mode: qlora"]
    for written in (printed, text):
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]", written)


@pytest.mark.parametrize(
    ("written", "experiment", "uri"),
    [
        (TRL_SFT.replace("report_to: none", "report_to: [mlflow, tensorboard]"), "huggingface", None),
        (
            AXOLOTL_LORA + "\nuse_mlflow: true\nmlflow_experiment_name: a\nmlflow_tracking_uri: http://host\n",
            "a",
            "http://host",
        ),
    ],
)
def test_mlflow(convert: Convert, written: str, experiment: str, uri: str | None) -> None:
    recipe, printed, _ = convert(written)
    assert (recipe.tracking.mlflow.experiment, recipe.tracking.mlflow.uri) == (experiment, uri)
    assert all(word not in printed for word in ("report_to", "use_mlflow", "mlflow_tracking_uri", "mlflow_experiment"))


def test_secrets_are_not_shown(convert: Convert) -> None:
    _, printed, text = convert(TRL_SFT + "hub_token: hf_secret\nwandb_api_key: also_secret\n")
    assert "hub_token=...: run `hf auth login`" in printed
    assert "hf_secret" not in printed + text
    assert "also_secret" not in printed + text


def test_rows_for_evaluation_are_written_once(convert: Convert) -> None:
    recipe, printed, text = convert(factory(extra="eval_dataset: chats\nval_size: 0.1\neval_strategy: steps"))
    assert text.count("  eval:") == 1
    assert [one.path for one in recipe.data.eval_sources] == ["data/chats.json"]
    assert "val_size=0.1: evaluation has rows of its own" in printed
    config = AXOLOTL_LORA + "test_datasets: [{path: org/test, type: alpaca}]\n"
    recipe, printed, text = convert(config)
    assert (text.count("  eval:"), recipe.data.eval_sources[0].path) == (1, "org/test")
    recipe, _, text = convert(config, 1, None, "data.eval=0.2")
    assert (text.count("  eval:"), recipe.data.eval.share) == (1, 0.2)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("written", "todo"),
    [
        ("message_field_training: train", "turns are trained by their field train"),
        ("train_on_eos: all", "train_on_eos is all there"),
        ("train_on_eot: none", "train_on_eot is none there"),
        ("drop_system_message: true", "system messages are dropped there"),
        ("roles: {assistant: [bot], user: [human]}", "bot is assistant there"),
        ("roles_to_train: [user, assistant]", "trains user, assistant"),
        ("shards: 10", "part 0 of 10 there"),
        ("train_on_eos: turn", ""),
    ],
)
def test_keys_of_a_source_that_decide_masks_and_rows(convert: Convert, written: str, todo: str) -> None:
    source = f"    type: chat_template\n    conversation: chatml\n    {written}\n"
    recipe, printed, _ = convert(AXOLOTL_LORA.replace("    type: alpaca\n", source), 1)
    assert recipe.model.chat_template == "chatml"
    assert ("To do, marked in the recipe:\n  data.train: " + todo in printed) == bool(todo)


# The objectives of the recipe, and what becomes them; a loss or another key that tells it.
OBJECTIVES = [
    ("TRL", "sft", ("sft", None)),
    ("TRL", "dpo", ("dpo", "sigmoid")),
    *[("TRL", f"dpo --loss_type {loss}", ("dpo", loss)) for loss in ("hinge", "ipo", "robust", "apo_zero", "apo_down")],
    ("TRL", "dpo --loss_type sigmoid_norm", ("dpo", "sigmoid_norm")),
    ("TRL", "kto", ("kto", None)),
    ("TRL", "orpo", ("orpo", None)),
    ("TRL", "cpo --loss_type simpo", ("dpo", "simpo")),
    ("TRL", "reward", ("reward", None)),
    ("TRL", "gkd --teacher_model_name_or_path org/t --lmbda 0.0", ("distill", None)),
    ("TRL", "grpo", ("grpo", "dapo")),
    *[("TRL", f"grpo --loss_type {loss}", ("grpo", loss)) for loss in ("grpo", "dapo", "dr_grpo")],
    ("TRL", "grpo --loss_type cispo --num_iterations 2", ("grpo", "cispo")),
    ("TRL", "grpo --loss_type grpo --importance_sampling_level sequence --num_iterations 2", ("grpo", "gspo")),
    ("TRL", "rloo", ("grpo", "rloo")),
    *[("axolotl", rl, ("dpo", loss)) for rl, loss in (("dpo", "sigmoid"), ("ipo", "ipo"), ("simpo", "simpo"))],
    *[("axolotl", rl, (rl, None)) for rl in ("kto", "orpo")],
    ("axolotl", "grpo", ("grpo", "dapo")),
    *[("LLaMA-Factory", stage, (name, None)) for stage, name in (("sft", "sft"), ("pt", "sft"), ("kto", "kto"))],
    ("LLaMA-Factory", "rm", ("reward", None)),
    ("LLaMA-Factory", "ppo", ("grpo", "dapo")),
    *[("LLaMA-Factory", f"dpo {loss}", ("dpo", loss)) for loss in ("sigmoid", "hinge", "ipo", "simpo")],
    ("LLaMA-Factory", "dpo orpo", ("orpo", None)),
]


@pytest.mark.parametrize(("tool", "named", "expected"), OBJECTIVES)
def test_every_objective_has_its_mapping(convert: Convert, tool: str, named: str, expected: tuple[str, Any]) -> None:
    if tool == "TRL":
        config = f"trl {named} --model_name_or_path org/m --dataset_name org/d --max_steps 4 --num_processes 1"
    elif tool == "axolotl":
        config = AXOLOTL_LORA.replace("type: alpaca", "type: chatml.ultra") + f"rl: {named}\n"
    else:
        stage, _, loss = named.partition(" ")
        rows = {"dpo": "pairs", "rm": "pairs", "kto": "marked", "pt": "pages"}.get(stage, "plain")
        config = factory(stage, rows, f"pref_loss: {loss}" if loss else "")
    recipe, _, _ = convert(config)
    assert (recipe.objective.name, recipe.objective.loss if expected[1] else None) == expected


def test_objectives_without_a_counterpart_elsewhere() -> None:
    """Every objective is reached from another tool, but for those that no tool has in its configs."""
    reached = {name for _, _, (name, _) in OBJECTIVES}
    assert set(OBJECTIVE_SECTIONS) - reached == {"focal", "classify", "own"}
    losses = {(name, loss) for _, _, (name, loss) in OBJECTIVES}
    assert {loss for loss in get_args(PreferenceLoss) if ("dpo", loss) not in losses} == set()
    assert {loss for loss in get_args(PolicyLoss) if ("grpo", loss) not in losses} == {"reinforce_pp"}


GRPO = """
model_name_or_path: org/m
dataset_name: org/maths
command: grpo
reward_funcs: [accuracy_reward, think_format_reward, get_soft_overlong_punishment, mine.rewards.correct]
reward_weights: [1.0, 0.5, 1.0, 2.0]
num_generations: 4
max_prompt_length: 256
max_completion_length: 512
num_iterations: 2
epsilon: 0.1
epsilon_high: 0.3
beta: 0.04
loss_type: dr_grpo
scale_rewards: false
mask_truncated_completions: true
temperature: 0.9
top_p: 0.95
use_vllm: true
max_steps: 100
per_device_train_batch_size: 8
gradient_accumulation_steps: 2
"""


def test_grpo(convert: Convert) -> None:
    recipe, printed, _ = convert(GRPO, devices=2)
    assert recipe.rollouts is not None
    assert recipe.objective == Grpo(scale_rewards="none", overlong="mask", kl=0.04, clip=(0.1, 0.3))
    assert recipe.objective.loss == "dr_grpo"
    rollouts = {"prompts": 8, "samples": 4, "max_new_tokens": 512, "temperature": 0.9, "top_p": 0.95, "reuse": 2}
    assert recipe.rollouts.model_dump(exclude_defaults=True) == rollouts
    assert values(recipe, "batch.rows", "data.max_length", "data.packing", "data.overlong") == [32, 768, False, "drop"]
    assert values(recipe, "train.max_steps", "train.epochs", "optimizer.lr") == [100, None, 1e-6]
    rewards = [
        (one.kind(), *(getattr(one, key, None) for key in ("function", "target")), one.weight) for one in recipe.rewards
    ]
    assert rewards == [
        ("boxed", None, None, 1.0),
        ("regex", None, None, 0.5),
        ("length", None, 1024, 1.0),
        ("file", "correct", None, 2.0),
    ]
    assert recipe.rewards[3].file == "mine/rewards.py"
    assert "use_vllm=true: vLLM in the trainer's processes" in printed
    server = GRPO + "vllm_mode: server\nvllm_server_port: 9000\n"
    recipe, printed, _ = convert(server.replace("top_p: 0.95\n", ""), devices=2)
    assert recipe.rollouts is not None
    assert (recipe.rollouts.engine, recipe.rollouts.url) == ("vllm", "http://0.0.0.0:9000")
    assert recipe.objective.correction == "sequence_mask"
    assert "rollouts.url: start `vllm serve` there" in printed


@pytest.mark.parametrize(
    ("pattern", "text", "fits"),
    [("think_format_reward", "<think>\na\n</think>\nb", True), ("think_format_reward", "b <think>a</think>", False)],
)
def test_rewards_of_trl_score_alike(pattern: str, text: str, fits: bool) -> None:
    """The two cases of TRL's own docstring and tests."""
    assert (re.search(foreign_tool("trl").value("rewards.name", pattern).sets["pattern"], text) is not None) == fits


# --- torchtune

TORCHTUNE_LORA = """
output_dir: out/tuned
model:
  _component_: torchtune.models.llama3_2.lora_llama3_2_1b
  lora_attn_modules: ['q_proj', 'v_proj', 'output_proj']
  apply_lora_to_mlp: True
  lora_rank: 64
  lora_alpha: 128
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: /models/tokenizer.model, max_seq_len: 1024}
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: /models/llama/
  checkpoint_files: [model.safetensors]
resume_from_checkpoint: False
dataset: {_component_: torchtune.datasets.alpaca_cleaned_dataset, packed: True}
seed: null
shuffle: True
batch_size: 4
optimizer: {_component_: bitsandbytes.optim.PagedAdamW8bit, lr: 3e-4, weight_decay: 0.05}
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 100
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
epochs: 2
max_steps_per_epoch: 50
gradient_accumulation_steps: 8
device: cuda
dtype: bf16
metric_logger: {_component_: torchtune.training.metric_logging.WandBLogger, project: mine}
profiler: {_component_: torchtune.training.setup_torch_profiler, enabled: False, cpu: True}
"""


def test_torchtune_lora(convert: Convert) -> None:
    recipe, printed, text = convert(TORCHTUNE_LORA, devices=2)
    keys = ("model.name", "mode", "lora.rank", "lora.alpha", "lora.targets", "objective.name", "objective.train_on")
    targets = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert values(recipe, *keys) == ["/models/llama", "lora", 64, 128.0, targets, "sft", "all"]
    (source,) = recipe.data.train
    assert (source.path, source.format) == ("yahma/alpaca-cleaned", "alpaca")
    keys = ("data.max_length", "data.packing", "batch.rows", "batch.rows_per_device", "train.epochs", "train.precision")
    assert values(recipe, *keys) == [1024, True, 64, 4, 2, "bf16_true"]
    keys = ("optimizer.name", "optimizer.lr", "optimizer.weight_decay", "optimizer.max_grad_norm", "schedule.name")
    assert values(recipe, *keys, "schedule.warmup_steps") == ["paged_adamw_8bit", 3e-4, 0.05, None, "cosine", 100]
    assert recipe.tracking.wandb is not None
    assert (recipe.tracking.wandb.project, recipe.checkpoint.every_steps) == ("mine", None)
    assert "max_steps_per_epoch=50: set `train.max_steps`" in printed
    assert "TODO" not in text


@pytest.mark.parametrize(
    ("before", "after", "keys", "expected"),
    [
        ("lora_llama3_2_1b", "qlora_llama3_2_1b", ("mode", "quantization.type"), ["qlora", "nf4"]),
        ("llama3_2.lora_llama3_2_1b", "llama3_2.llama3_2_1b", ("mode", "lora"), ["full", None]),
        ("modules.loss.LinearCrossEntropyLoss", "rlhf.loss.DPOLoss, beta: 0.2", ("objective.beta",), [0.2]),
        ("dtype: bf16", "dtype: fp32", ("train.precision",), ["fp32"]),
        ("packed: True", "packed: False, train_on_input: False", ("objective.train_on",), ["assistant"]),
        ("lr_scheduler:", "other:", ("schedule.name", "optimizer.lr"), ["constant", 3e-4]),
    ],
)
def test_what_torchtune_s_components_decide(
    before: str, after: str, keys: tuple[str, ...], expected: list[Any], convert: Convert
) -> None:
    assert before in TORCHTUNE_LORA
    config = TORCHTUNE_LORA.replace(before, after)
    if "DPOLoss" in after:
        rows = "preference_dataset, source: json, data_files: pairs.jsonl, column_map: {chosen: good}"
        config = config.replace("alpaca_cleaned_dataset, packed: True", rows)
    recipe, _, _ = convert(config)
    assert values(recipe, *keys) == expected


@pytest.mark.parametrize(
    ("component", "expected"),
    [
        (
            "instruct_dataset, source: csv, data_files: faq.csv, column_map: {input: q, output: a}",
            {"path": "faq.csv", "format": "prompt_completion", "columns": {"prompt": "q", "completion": "a"}},
        ),
        (
            "chat_dataset, source: org/chats, conversation_column: turns, conversation_style: sharegpt, split: test",
            {"path": "org/chats", "format": "sharegpt", "columns": {"conversations": "turns"}, "split": "test"},
        ),
        ("text_completion_dataset, source: org/books, column: body", {"format": "text", "columns": {"text": "body"}}),
        ("samsum_dataset", {"path": "org/dataset"}),
    ],
)
def test_rows_of_torchtune_s_builders(component: str, expected: dict[str, Any], convert: Convert) -> None:
    recipe, printed, _ = convert(TORCHTUNE_LORA.replace("alpaca_cleaned_dataset, packed: True", component))
    (source,) = recipe.data.train
    assert source.model_dump(exclude_unset=True).items() >= expected.items()
    assert ("samsum_dataset has no counterpart" in printed) == ("samsum" in component)
