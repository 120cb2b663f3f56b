"""Checks that recipe and launch are compatible: the recipe owns the maths, and a backend takes only what it computes
exactly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from finetune.engine.launch import Launch
from finetune.engine.parallelism_rules import check_combination
from finetune.errors import UserError
from finetune.recipe import Recipe, divisibility_message
from finetune.recipe.schema import Quantization, Train


def check_launch(recipe: Recipe, recipe_file: str, launch: Launch, config: Any | None = None) -> int:
    """Check all settings that recipe and launch decide together, before a process group exists. Raises UserError.

    config: of transformers, if available. Returns the micro-batches that each process runs per step; with
    `tokens_per_device` and with `rows_per_device: auto` the largest possible number.
    """
    automatic = recipe.batch.rows_per_device == "auto"
    rows = 1 if recipe.batch.rows_per_device == "auto" else recipe.batch.rows_per_device
    check_combination(recipe, recipe_file, launch, config)
    unit = rows * launch.parallelism.data
    if recipe.batch.rows % unit and recipe.batch.tokens_per_device is None:
        message = divisibility_message(recipe.batch.rows, rows, launch.parallelism.data)
        raise UserError(
            f"{recipe_file} on {launch.name}: batch.rows: {message}. Fix: use one of these, or another number of "
            "processes"
        )
    micro_batches = -(-recipe.batch.rows // unit)
    clip, train = recipe.optimizer.max_grad_norm, recipe.train
    problems = [*_contradictions(train, clip, launch, None if automatic else micro_batches)]
    problems += _not_offered(recipe.optimizer.name, train, launch)
    if recipe.optimizer.in_backward and not automatic:  # a recipe rule refuses it with `auto`
        problems += _not_in_backward(recipe.batch.rows, rows, launch, micro_batches)
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise UserError(
            f"{launch.name} and {recipe_file} do not agree; the recipe owns the maths:\n{lines}\nFix: change the "
            "accelerate config or the recipe as each line says"
        )
    return micro_batches


def check_products(train: Train, quantization: Quantization | None, device: str, capability: tuple[int, int]) -> None:
    """Raises UserError if the recipe needs 8-bit products that the GPU does not support. capability: CUDA's."""
    scaled = quantization is not None and quantization.compute == "scaled"
    for key, needed, other in (
        ("train.precision", train.precision == "fp8", "bf16"),
        ("quantization.compute", scaled, "dequantised"),
    ):
        if needed and capability < (9, 0):
            raise UserError(
                f"{key}: {device} has no products of 8 bits with a scale for each row. Hopper and later have them. "
                f"Fix: use {other}"
            )


def _contradictions(train: Train, clip: float | None, launch: Launch, micro_batches: int | None) -> Iterator[str]:
    """Yields settings of the accelerate config that the recipe decides: each must be equal, `auto`, or absent.

    clip: `optimizer.max_grad_norm`; micro_batches: number per process and step; None with `rows_per_device: auto`,
    before the trial.
    """
    config, deepspeed, fsdp = launch.config, launch.deepspeed, launch.config.get("fsdp_config") or {}
    precision = {"bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}.get(train.precision, "no")
    accumulation = f"batch.rows / batch.rows_per_device / processes = {micro_batches}"
    if micro_batches is None:
        accumulation = "batch.rows_per_device: auto"
    shared: list[tuple[str, Any, Any, str]] = [  # name in the accelerate config, its value, the recipe's, its key
        ("mixed_precision", config.get("mixed_precision"), precision, f"train.precision: {train.precision}")
    ]
    for kind in ("bf16", "fp16"):
        enabled = (deepspeed.get(kind) or {}).get("enabled")
        shared.append((f"deepspeed {kind}.enabled", enabled, precision == kind, "train.precision"))
    for name, value, key in (
        ("gradient_accumulation_steps", micro_batches, accumulation),
        ("gradient_clipping", clip or 0.0, f"optimizer.max_grad_norm: {clip}"),
    ):
        shared += [(name, config.get(name), value, key), (f"deepspeed {name}", deepspeed.get(name), value, key)]
    for key in ("activation_checkpointing", "activation_offload"):
        name = "fsdp_activation_checkpointing" + ("_offload" if key == "activation_offload" else "")
        value = getattr(train, key)
        shared.append((name, fsdp.get(name), value, f"train.{key}: {str(value).lower()}"))
    for name, configured, expected, key in shared:
        if configured not in (None, "auto", "none") and not _same(configured, expected):
            yield f"`{name}: {configured}` against `{key}`: remove it from the accelerate config, or write `auto`"
    if config.get("mixed_precision") == "fp8" or config.get("fp8_config"):
        yield (
            "`mixed_precision: fp8` and `fp8_config` (Transformer Engine, MS-AMP, torchao) would replace layers, with "
            "scales of whole tensors, and the optimizer: remove both, and set `train.precision: fp8` in the recipe"
        )
    for name in ("msamp", "torch_autocast", "quantize_training"):
        if (deepspeed.get(name) or {}).get("enabled"):
            yield f"deepspeed `{name}` computes or steps in other types: remove it; `train.precision` decides them"
    for name in ("optimizer", "scheduler", "train_micro_batch_size_per_gpu", "train_batch_size"):
        if deepspeed.get(name) not in (None, "auto"):
            yield f"deepspeed `{name}` is decided by the recipe: remove it from the accelerate config"
    if str((config.get("dynamo_config") or {}).get("dynamo_backend", "NO")).upper() != "NO":
        yield "`dynamo_config` is decided by `train.compile`: remove it from the accelerate config"


def _same(configured: Any, expected: Any) -> bool:
    if isinstance(expected, str) or isinstance(configured, bool) or isinstance(expected, bool):
        return str(configured).lower() == str(expected).lower()
    try:
        return float(configured) == float(expected)
    except (TypeError, ValueError):
        return False


def _not_offered(optimizer: str, train: Train, launch: Launch) -> Iterator[str]:
    """Yields settings that a backend does not offer with the recipe's meaning."""
    kind, precision = launch.kind, train.precision
    if kind == "fsdp2" and int((launch.config.get("fsdp_config") or {}).get("fsdp_version", 1)) != 2:
        yield "`fsdp_version: 1` loses the optimizer state on resume: set `fsdp_version: 2`"
    if kind == "zero" and precision == "bf16_true":
        yield "DeepSpeed keeps fp32 copies of what it trains, against `bf16_true`: use ddp or fsdp2, or `bf16`"
    if kind == "zero" and precision == "fp8":
        yield "DeepSpeed gathers a weight for one layer's call, and torchao's products keep it: use ddp, fsdp2 or bf16"
    if launch.parallelism.tensor > 1 and precision == "fp8":
        yield "`train.precision: fp8` has a scale for each row, which tensor parallel divides: use fsdp2, or `bf16`"
    if optimizer.endswith("8bit") and launch.uses_nvme:
        yield (
            f"DeepSpeed swaps optimizer state to NVMe as fp32, which `{optimizer}` does not survive: "
            "use `adamw`, or another config such as zero3_offload"
        )
    if optimizer == "muon" and launch.uses_nvme:
        yield "`muon` was not tried with optimizer state on NVMe: use another config such as zero3_offload, or `adamw`"
    if kind == "zero" and train.compile:
        yield "`train.compile` does not support DeepSpeed's hooks on parameters: use ddp or fsdp2, or `compile: false`"


def _not_in_backward(rows: int, rows_per_device: int, launch: Launch, micro_batches: int) -> Iterator[str]:
    """Yields why the optimizer cannot step inside the backward here."""
    if launch.kind == "replicated" and launch.processes > 1:
        yield (
            "`optimizer.in_backward`: DDP stores every gradient until it is reduced over all ranks, so nothing would "
            "be saved: use fsdp2, or `in_backward: false`"
        )
    if launch.kind == "zero":
        yield (
            "`optimizer.in_backward`: DeepSpeed steps its own groups of gradients, after the backward: use fsdp2, or "
            "`in_backward: false`"
        )
    if micro_batches > 1:
        sharing = launch.parallelism.data
        one = f", or `batch.rows_per_device: {rows // sharing}`" if rows % sharing == 0 else ""
        yield (
            f"`optimizer.in_backward` needs one micro-batch a step on each process, and `batch.rows: {rows}` is "
            f"{micro_batches} micro-batches of {rows_per_device} on each of {sharing}: "
            f"set `batch.rows: {rows_per_device * sharing}`{one}"
        )
