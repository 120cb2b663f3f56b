"""What `accelerate launch` or `torchrun` was told, and whether the recipe agrees.

accelerate's launcher passes its choices on through environment variables, but not the name of the config file nor how
many processes were asked for; both are read from the launching process itself, so that an error can name the file and a
launch that came out smaller than asked (accelerate starts one process, without a word, for some configs on a machine
without GPUs) is noticed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import psutil
import yaml

from finetune.engine.combinations import check_combination
from finetune.engine.parallelism import Parallelism, read_parallelism
from finetune.engine.torchrun import apply_config, is_torchrun
from finetune.errors import UserError
from finetune.recipe import Recipe, divisibility_message

Kind = Literal["replicated", "fsdp2", "zero"]


@dataclass(frozen=True)
class Launch:
    """How this process was started. `processes` counts all machines."""

    kind: Kind
    processes: int
    config_file: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    launched: bool = False  # a launcher runs above this process

    @property
    def name(self) -> str:
        """For messages: the config file, or what stands in for one."""
        return self.config_file or "the accelerate launch"

    @cached_property
    def parallelism(self) -> Parallelism:
        """How the processes divide the work. Raises UserError where the config's sizes do not fit their number."""
        return read_parallelism(self.config, self.kind != "replicated", self.processes, self.name)

    @property
    def backend(self) -> dict[str, Any]:
        """How the backend is set up: what lies where, and what is offloaded."""
        return {
            "kind": self.kind,
            "fsdp": self.config.get("fsdp_config"),
            "deepspeed": _deepspeed(self.config),
            "parallelism": self.config.get("parallelism_config"),
        }

    @property
    def where(self) -> str:
        """For reports: `zero3_offload`, `ddp`, or `single`."""
        if self.config_file:
            return Path(self.config_file).stem
        return "single" if self.processes == 1 and self.kind == "replicated" else self.kind


def read_launch(config_file: str | None = None) -> Launch:
    """From the environment, and the `accelerate launch` above this process if there is one.

    config_file: an accelerate config for what torchrun started. Raises UserError where nothing can come of it.
    """
    arguments = _launcher_arguments()
    if config_file is not None:
        return _torchrun_launch(config_file, arguments)
    config_file, config = _config(arguments)
    started = int(os.environ.get("WORLD_SIZE", "1"))
    asked = _number(arguments, "num_processes") or config.get("num_processes") or started
    kind = _kind(config)
    for variable, sharded in _SHARDED:  # without a config file: options of the launcher
        if os.environ.get(variable, "").lower() == "true":
            kind = sharded
    if kind == "fsdp2" and not config:
        config = {"fsdp_config": {"fsdp_version": os.environ.get("FSDP_VERSION", "1")}}  # its default, too
    return Launch(kind, int(asked), config_file, config, launched=arguments is not None or is_torchrun())


def _torchrun_launch(config_file: str, arguments: list[str] | None) -> Launch:
    """torchrun decides how many processes there are, also when their number changes; the file decides all else."""
    if arguments is not None:
        raise UserError(f"--config-file {config_file}: accelerate launch has an option of its own, --config_file")
    config = _load_config(config_file)
    apply_config(config_file, str(config["distributed_type"]))
    return Launch(_kind(config), int(os.environ["WORLD_SIZE"]), config_file, config, launched=True)


def read_config_file(path: str, processes: int | None = None) -> Launch:
    """The launch that `accelerate launch --config_file path` would be; for `check` without launching anything.

    Raises UserError where the file is not an accelerate config.
    """
    config = _load_config(path)
    return Launch(_kind(config), int(processes or config.get("num_processes") or 1), path, config)


_SHARDED: tuple[tuple[str, Kind], ...] = (("ACCELERATE_USE_FSDP", "fsdp2"), ("ACCELERATE_USE_DEEPSPEED", "zero"))


def _kind(config: dict[str, Any]) -> Kind:
    kinds: dict[str, Kind] = {"DEEPSPEED": "zero", "FSDP": "fsdp2"}
    return kinds.get(str(config.get("distributed_type")), "replicated")


def _launcher_arguments() -> list[str] | None:
    """Arguments after `accelerate launch` of the nearest process above this one that is one."""
    try:
        above = psutil.Process().parents()
        command_lines = [process.cmdline() for process in above]
    except (psutil.Error, OSError):
        return None  # a container may hide the processes above
    for words in command_lines:
        names = [Path(word).name for word in words]
        for i, name in enumerate(names[:-1]):
            if name in ("accelerate", "accelerate_cli.py") and names[i + 1] == "launch":
                return words[i + 2 :]
            if name == "accelerate-launch" or words[i + 1] == "accelerate.commands.launch":
                return words[i + 1 :]
    return None


def _option(arguments: list[str] | None, name: str) -> str | None:
    """The value of `--name value`, `--name=value` or the same with dashes, before the program's own arguments."""
    spellings = (f"--{name}", f"--{name.replace('_', '-')}")
    for i, word in enumerate(arguments or []):
        if word in spellings and arguments is not None and i + 1 < len(arguments):
            return arguments[i + 1]
        if word.split("=")[0] in spellings and "=" in word:
            return word.split("=", 1)[1]
        if word == "finetune":
            return None
    return None


def _number(arguments: list[str] | None, name: str) -> int | None:
    value = _option(arguments, name)
    return int(value) if value and value.isdigit() else None


def _config(arguments: list[str] | None) -> tuple[str | None, dict[str, Any]]:
    if arguments is None:
        return None, {}
    from accelerate.commands.config.config_args import default_config_file

    path = _option(arguments, "config_file") or (default_config_file if os.path.isfile(default_config_file) else None)
    return (path, _load_config(path)) if path else (None, {})


def _load_config(path: str) -> dict[str, Any]:
    try:
        config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not an accelerate config: {error}") from None
    if not isinstance(config, dict) or "distributed_type" not in config:
        raise UserError(f"{path}: not an accelerate config: it has no `distributed_type`")
    return config


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
    wrong = [*_disagreements(recipe, launch.config, micro_batches), *_not_offered(recipe, launch)]
    if recipe.optimizer.in_backward and micro_batches is not None:  # a rule refuses it where a trial finds them
        wrong += _not_in_backward(recipe, launch, micro_batches)
    if wrong:
        lines = "\n".join(f"  {line}" for line in wrong)
        raise UserError(f"{launch.name} and {recipe_file} do not agree; the recipe owns the maths:\n{lines}")


def _disagreements(recipe: Recipe, config: dict[str, Any], micro_batches: int | None) -> Iterator[str]:
    """Settings that both files could hold: each must say the same, `auto`, or nothing."""
    deepspeed = _deepspeed(config)
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


def _deepspeed(config: dict[str, Any]) -> dict[str, Any]:
    """The deepspeed section; where it names a JSON file, that file's content as well."""
    section = dict(config.get("deepspeed_config") or {})
    path = section.get("deepspeed_config_file")
    if path and path != "none":
        try:
            section.update(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: the DeepSpeed config cannot be read: {error}") from None
    return section


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
    if name.endswith("8bit") and _optimizer_on_nvme(_deepspeed(launch.config)):
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


def check_started(launch: Launch, world_size: int, kind: str) -> None:
    """Raises UserError where the launch came out other than the config says; accelerate itself would go on in
    silence.
    """
    if world_size != launch.processes:
        raise UserError(
            f"{launch.name} asks for {launch.processes} processes, but {world_size} "
            f"{'is' if world_size == 1 else 'are'} running: each would train alone. "
            "Use one of accelerate_configs/ and set the size with `accelerate launch --num_processes N`"
        )
    if kind != launch.kind:
        raise UserError(
            f"{launch.name} asks for {launch.kind}, but accelerate started {kind}: check its `distributed_type`"
        )
