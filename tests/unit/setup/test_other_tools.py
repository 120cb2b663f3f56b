"""Configs of other tools become recipes that load; the values that decide the maths are the tool's.

The YAMLs are our own, with the keys of the public example configs of each tool.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from finetune.errors import UserError
from finetune.recipe import Recipe, load_recipe
from finetune.setup.other_tools import write_converted

Convert = Callable[..., tuple[Recipe, str, str]]


@pytest.fixture
def convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Convert:
    """Converts a config; returns the recipe, what was printed, and the recipe's text."""
    monkeypatch.chdir(tmp_path)

    def run(config: str, devices: int | None = None, name: str | None = None, *overrides: str) -> Any:
        source = config
        if "\n" in config:
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
        "saves_per_epoch: set `checkpoint.every_steps`",
        "logging_steps: every step is written to metrics.jsonl",
        "special_tokens: end and padding are the tokenizer's own",
        "eval_sample_packing",
    ):
        assert (line in printed) == (line in text) == (line != "eval_sample_packing")  # false there: not set
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
    recipe, printed, text = convert(AXOLOTL_FULL)
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
    assert "x 1 device (not said how many: --devices)" in text
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
    assert "0.05 there, where disable_dropout turns it off" in text
    assert values(recipe, "data.packing", "train.max_steps", "train.epochs") == [False, 100, None]
    assert values(recipe, "schedule.name", "schedule.warmup_steps") == ["linear", 20]
    assert "--config-file accelerate_configs/fsdp2_offload.yaml" in printed


def test_what_has_no_equal_is_to_do(convert: Convert) -> None:
    config = AXOLOTL_LORA.replace("adamw_bnb_8bit", "lion_8bit").replace("cosine", "rex")
    config = config.replace("type: alpaca", "type: context_qa") + "neftune_noise_alpha: 5\nunheard_of: 1\n"
    recipe, printed, text = convert(config)
    assert values(recipe, "optimizer.name", "schedule.name") == ["adamw", "cosine"]
    assert recipe.data.train[0].format == "auto"
    assert text.count("# TODO: ") == 3
    assert "optimizer.name: lion_8bit is not offered" in printed
    assert "data.train: `type: context_qa` has no counterpart" in printed
    assert "neftune_noise_alpha: noise on embeddings is not offered" in printed
    assert "unheard_of: is not known as a key of axolotl" in printed


def test_names_devices_and_overrides_of_the_command_line(convert: Convert) -> None:
    recipe, _, text = convert(AXOLOTL_LORA, 4, "mine", "optimizer.lr=1e-4", "mode=lora", "data.max_length=512")
    assert values(recipe, "run.name", "batch.rows", "optimizer.lr", "data.max_length") == ["mine", 32, 1e-4, 512]
    assert "lr: 0.0001  # from the command line" in text
    with pytest.raises(UserError, match=r"expected section.key=value"):
        convert(AXOLOTL_LORA, 4, "mine", "lr")


def test_other_files_are_refused(convert: Convert, tmp_path: Path) -> None:
    for text, message in (
        ("a: 1\nb: 2\n", "not a config of axolotl"),
        ("base_model: a\n  b: 2\n", "not valid YAML"),
        ("absent.yaml", "no such file"),
    ):
        with pytest.raises(UserError, match=message):
            convert(text)
    (tmp_path / "ours.yaml").write_text("mine", encoding="utf-8")
    (tmp_path / "theirs.yaml").write_text(AXOLOTL_LORA, encoding="utf-8")
    with pytest.raises(UserError, match="exists already and is left as it is"):
        write_converted("theirs.yaml", tmp_path / "ours.yaml", None, None, (), Console(file=io.StringIO()))
