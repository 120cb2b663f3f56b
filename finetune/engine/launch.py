"""What `accelerate launch` or `torchrun` was told.

accelerate's launcher passes its choices on through environment variables, but not the name of the config file nor how
many processes were asked for; both are read from the launching process itself, so that an error can name the file and a
launch that came out smaller than asked (accelerate starts one process, without a word, for some configs on a machine
without GPUs) is noticed.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import psutil
import yaml

from finetune.engine.parallelism import Parallelism, read_parallelism
from finetune.engine.torchrun import apply_config, is_torchrun
from finetune.errors import UserError

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
            "deepspeed": self.deepspeed,
            "parallelism": self.config.get("parallelism_config"),
        }

    @property
    def deepspeed(self) -> dict[str, Any]:
        """The config's section; where it names a JSON file, that file's content as well. Raises UserError."""
        section = dict(self.config.get("deepspeed_config") or {})
        path = section.get("deepspeed_config_file")
        if path and path != "none":
            try:
                section.update(json.loads(Path(path).read_text(encoding="utf-8")))
            except (OSError, ValueError) as error:
                raise UserError(f"{path}: the DeepSpeed config cannot be read: {error}") from None
        return section

    @property
    def offloads_optimizer(self) -> bool:
        """Whether optimizer state lies outside the device, so that the CPU steps."""
        if self.kind == "fsdp2":
            return str((self.config.get("fsdp_config") or {}).get("fsdp_offload_params", "")).lower() == "true"
        section = self.deepspeed
        ours = ((section.get("zero_optimization") or {}).get("offload_optimizer") or {}).get("device")
        return any(device in ("cpu", "nvme") for device in (section.get("offload_optimizer_device"), ours))

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


def chose_threads(launch: Launch) -> bool:
    """Whether OMP_NUM_THREADS is the user's: it was there when the launcher started, which sets it where it was not."""
    if "OMP_NUM_THREADS" not in os.environ or not launch.launched:
        return "OMP_NUM_THREADS" in os.environ
    try:
        return "OMP_NUM_THREADS" in psutil.Process(os.getppid()).environ()
    except (psutil.Error, OSError):
        return True  # a container may hide the processes above


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
