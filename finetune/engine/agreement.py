"""Whether recipe and launch go together: the recipe owns the maths, and a backend offers what it can do exactly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from finetune.engine.combinations import check_combination
from finetune.engine.launch import Launch
from finetune.errors import UserError
from finetune.recipe import Recipe, divisibility_message


def check_launch(recipe: Recipe, recipe_file: str, launch: Launch, config: Any | None = None) -> int:
    """Everything about the pair of recipe and launch that can be known before a process group exists.

    config: of the model, transformers', where it is at hand. Returns the micro-batches that each process runs per step;
    with `tokens_per_device`, and where a trial is to find the rows of a forward, the most there can be. Raises
    UserError.
    """
    automatic = recipe.batch.rows_per_device == "auto"
    rows = 1 if recipe.batch.rows_per_device == "auto" else recipe.batch.rows_per_device
    check_combination(recipe, recipe_file, launch, config)
    unit = rows * launch.parallelism.data
    if recipe.batch.rows % unit and recipe.batch.tokens_per_device is None:
        message = divisibility_message(recipe.batch.rows, rows, launch.parallelism.data)
        raise UserError(f"{recipe_file} on {launch.name}: batch.rows: {message}")
    micro_batches = -(-recipe.batch.rows // unit)
    check_agreement(recipe, recipe_file, launch, None if automatic else micro_batches)
    return micro_batches


def check_agreement(recipe: Recipe, recipe_file: str, launch: Launch, micro_batches: int | None) -> None:
    """Training maths belongs to the recipe: raises UserError naming both files where the accelerate config differs.

    micro_batches: of each process in a step; None where a trial is to find them.
    """
    wrong = [*_disagreements(recipe, launch, micro_batches), *_not_offered(recipe, launch)]
    if recipe.optimizer.in_backward and micro_batches is not None:  # a rule refuses it where a trial finds them
        wrong += _not_in_backward(recipe, launch, micro_batches)
    if wrong:
        lines = "\n".join(f"  {line}" for line in wrong)
        raise UserError(f"{launch.name} and {recipe_file} do not agree; the recipe owns the maths:\n{lines}")


def _disagreements(recipe: Recipe, launch: Launch, micro_batches: int | None) -> Iterator[str]:
    """Settings that both files could hold: each must say the same, `auto`, or nothing."""
    config, deepspeed = launch.config, launch.deepspeed
    fsdp = config.get("fsdp_config") or {}
    precision = {"fp32": "no", "bf16": "bf16", "fp16": "fp16", "bf16_true": "no"}[recipe.train.precision]
    accumulation = f"batch.rows / batch.rows_per_device / processes = {micro_batches}"
    if micro_batches is None:
        accumulation = "batch.rows_per_device: auto"
    owned = [
        ("mixed_precision", config.get("mixed_precision"), precision, f"train.precision: {recipe.train.precision}"),
        *(
            (
                f"deepspeed {kind}.enabled",
                (deepspeed.get(kind) or {}).get("enabled"),
                precision == kind,
                "train.precision",
            )
            for kind in ("bf16", "fp16")
        ),
        *(
            (
                f"{where}gradient_accumulation_steps",
                section.get("gradient_accumulation_steps"),
                micro_batches,
                accumulation,
            )
            for where, section in (("", config), ("deepspeed ", deepspeed))
        ),
        *(
            (
                f"{where}gradient_clipping",
                section.get("gradient_clipping"),
                recipe.optimizer.max_grad_norm or 0.0,
                f"optimizer.max_grad_norm: {recipe.optimizer.max_grad_norm}",
            )
            for where, section in (("", config), ("deepspeed ", deepspeed))
        ),
        (
            "fsdp_activation_checkpointing",
            fsdp.get("fsdp_activation_checkpointing"),
            recipe.train.activation_checkpointing,
            f"train.activation_checkpointing: {str(recipe.train.activation_checkpointing).lower()}",
        ),
        (
            "fsdp_activation_checkpointing_offload",
            fsdp.get("fsdp_activation_checkpointing_offload"),
            recipe.train.activation_offload,
            f"train.activation_offload: {str(recipe.train.activation_offload).lower()}",
        ),
    ]
    for name, theirs, ours, key in owned:
        if theirs not in (None, "auto", "none") and not _same(theirs, ours):
            yield f"`{name}: {theirs}` against `{key}`: remove it from the accelerate config, or write `auto`"
    for name in ("optimizer", "scheduler", "train_micro_batch_size_per_gpu", "train_batch_size"):
        if deepspeed.get(name) not in (None, "auto"):
            yield f"deepspeed `{name}` is decided by the recipe: remove it from the accelerate config"
    if str((config.get("dynamo_config") or {}).get("dynamo_backend", "NO")).upper() != "NO":
        yield "`dynamo_config` is decided by `train.compile`: remove it from the accelerate config"


def _same(theirs: Any, ours: Any) -> bool:
    if isinstance(ours, str) or isinstance(theirs, bool) or isinstance(ours, bool):
        return str(theirs).lower() == str(ours).lower()
    try:
        return float(theirs) == float(ours)
    except (TypeError, ValueError):
        return False


def _not_offered(recipe: Recipe, launch: Launch) -> Iterator[str]:
    """What a backend cannot do with the meaning that the recipe gives it."""
    fsdp_version = (launch.config.get("fsdp_config") or {}).get("fsdp_version", 1 if launch.kind == "fsdp2" else 2)
    if launch.kind == "fsdp2" and int(fsdp_version) != 2:
        yield "`fsdp_version: 1` loses the optimizer state on resume: set `fsdp_version: 2`"
    name, precision = recipe.optimizer.name, recipe.train.precision
    if launch.kind != "replicated" and name == "muon":
        yield "Muon needs whole matrices, and shards are handed to the optimizer here: use ddp, or another optimizer"
    if launch.kind == "zero" and precision == "bf16_true":
        yield "DeepSpeed keeps fp32 copies of what it trains, against `bf16_true`: use ddp or fsdp2, or `bf16`"
    if name.endswith("8bit") and _optimizer_on_nvme(launch.deepspeed):
        yield (
            f"DeepSpeed swaps optimizer state to NVMe as fp32, which `{name}` does not survive: "
            "use `adamw`, or another config such as zero3_offload"
        )
    if launch.kind == "zero" and recipe.train.compile:
        yield "`train.compile` does not go with DeepSpeed's hooks on parameters: use ddp or fsdp2, or `compile: false`"


def _not_in_backward(recipe: Recipe, launch: Launch, micro_batches: int) -> Iterator[str]:
    """Why the optimizer cannot step inside the backward here."""
    if launch.kind == "replicated" and launch.processes > 1:
        yield (
            "`optimizer.in_backward`: DDP holds every gradient until all ranks have added theirs, so nothing would be "
            "saved: use fsdp2, or `in_backward: false`"
        )
    if launch.kind == "zero":
        yield (
            "`optimizer.in_backward`: DeepSpeed steps its own groups of gradients, after the backward: use fsdp2, or "
            "`in_backward: false`"
        )
    if micro_batches > 1:
        sharing = launch.parallelism.data
        rows, unit = recipe.batch.rows, recipe.batch.rows_per_device * sharing
        one = f", or `batch.rows_per_device: {rows // sharing}`" if rows % sharing == 0 else ""
        yield (
            f"`optimizer.in_backward` needs one forward a step on each process, and {rows} rows a step are "
            f"{micro_batches} forwards of {recipe.batch.rows_per_device} on each of {sharing}: "
            f"set `batch.rows: {unit}`{one}"
        )


def _optimizer_on_nvme(deepspeed: dict[str, Any]) -> bool:
    """In accelerate's words, or in those of a DeepSpeed file."""
    section = (deepspeed.get("zero_optimization") or {}).get("offload_optimizer") or {}
    return "nvme" in (deepspeed.get("offload_optimizer_device"), section.get("device"))
