"""Launch of this process: by `accelerate launch`, by `torchrun` with an accelerate config, or alone.

accelerate's launcher passes its options to its processes as environment variables, but neither the name of the config
file nor the requested number of processes. Both are read from the launcher's command line, so that an error can name
the file, and so that a launch with fewer processes than requested is noticed: without GPUs accelerate silently starts
one process for some configs.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import psutil
import yaml

from finetune.engine.parallelism import Parallelism, read_parallelism
from finetune.errors import UserError
from finetune.shipped import here_or_shipped

Kind = Literal["replicated", "fsdp2", "zero"]

TIMEOUT_VARIABLE = "FINETUNE_TIMEOUT_S"
PROCESSES_VARIABLE = (
    "FINETUNE_PROCESSES"  # of a job that `launch --on` wrote: a launcher can miss the others in silence
)
_DEFAULT_TIMEOUT_S = 1800.0  # torch's own for gloo (torch/distributed/constants.py); with NCCL it would be 600
_VISIBLE_AFTER_S = 5.0  # for a file created by another machine
_KINDS: dict[str, Kind] = {"FSDP": "fsdp2", "DEEPSPEED": "zero"}  # by accelerate's `distributed_type`
_TORCHRUN = "TORCHELASTIC_RUN_ID"  # set by torch elastic, also for several processes of `accelerate launch`
CONFIG_VARIABLES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")  # prefixes of variables that describe a config


@dataclass(frozen=True)
class Launch:
    """Launch of this process. `processes` counts all machines."""

    kind: Kind
    processes: int
    config_file: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    launched: bool = False  # True if by a launcher, not directly

    @property
    def name(self) -> str:
        """Config file, or its substitute in messages."""
        return self.config_file or "the accelerate launch"

    @cached_property
    def parallelism(self) -> Parallelism:
        """Sizes of the parallel dimensions. Raises UserError if their product is not the number of processes."""
        return read_parallelism(self.config, self.is_sharded, self.processes, self.name)

    @property
    def is_sharded(self) -> bool:
        return self.kind in ("fsdp2", "zero")

    @property
    def backend(self) -> dict[str, Any]:
        """Settings of the backend that decide how much memory it needs: sharding and offload."""
        return {
            "kind": self.kind,
            "fsdp": self.config.get("fsdp_config"),
            "deepspeed": self.deepspeed,
            "parallelism": self.config.get("parallelism_config"),
        }

    @property
    def frees_gathered(self) -> bool:
        """Returns whether FSDP2 frees a layer's gathered weights after its forward; it does by default."""
        fsdp = self.config.get("fsdp_config") or {}
        return self.kind == "fsdp2" and str(fsdp.get("fsdp_reshard_after_forward", True)).lower() != "false"

    @property
    def with_other_freeing(self) -> Launch:
        """Returns the launch with the other value of `fsdp_reshard_after_forward`; itself if it has none."""
        if self.kind != "fsdp2":
            return self
        fsdp = {**self.config["fsdp_config"], "fsdp_reshard_after_forward": not self.frees_gathered}
        return replace(self, config={**self.config, "fsdp_config": fsdp})

    @property
    def deepspeed(self) -> dict[str, Any]:
        """The config's DeepSpeed section, with the content of a JSON file that it names. Raises UserError."""
        section = dict(self.config.get("deepspeed_config") or {})
        path = section.get("deepspeed_config_file")
        if path and path != "none":
            try:
                section.update(json.loads(Path(path).read_text(encoding="utf-8")))
            except (OSError, ValueError) as error:
                raise UserError(
                    f"{path}: the DeepSpeed config cannot be read: {error}. Fix: correct the path, or the JSON in it"
                ) from None
        return section

    @property
    def offloads_optimizer(self) -> bool:
        """Returns whether the optimizer state is in host memory or on NVMe, and the CPU steps."""
        if self.kind == "fsdp2":
            return str((self.config.get("fsdp_config") or {}).get("fsdp_offload_params", "")).lower() == "true"
        return bool({"cpu", "nvme"} & self._optimizer_devices)

    @property
    def zero_stage(self) -> int:
        """Returns DeepSpeed's ZeRO stage, by its own file's key and by accelerate's."""
        section = self.deepspeed
        return int((section.get("zero_optimization") or {}).get("stage", section.get("zero_stage", 2)))

    @property
    def uses_nvme(self) -> bool:
        """Returns whether the optimizer state is on a disk."""
        return "nvme" in self._optimizer_devices

    @property
    def _optimizer_devices(self) -> set[Any]:
        """Devices of DeepSpeed's optimizer state, by accelerate's key and by that of a DeepSpeed file."""
        section = self.deepspeed
        in_file = (section.get("zero_optimization") or {}).get("offload_optimizer") or {}
        return {section.get("offload_optimizer_device"), in_file.get("device")}

    @property
    def where(self) -> str:
        """Name for reports: `zero3_offload`, `ddp` or `single`."""
        if self.config_file:
            return Path(self.config_file).stem
        return "single" if self.processes == 1 and not self.is_sharded else self.kind


def read_launch(config_file: str | None = None) -> Launch:
    """Returns the launch of this process. config_file: for processes that torchrun started. Raises UserError."""
    arguments = _launcher_arguments()
    if config_file is not None:
        return _torchrun_launch(config_file, arguments)
    config: dict[str, Any] = {}
    if arguments is not None:
        from accelerate.commands.config.config_args import default_config_file

        default = default_config_file if os.path.isfile(default_config_file) else None
        config_file = _option(arguments, "config_file") or default
        config = _load_config(config_file) if config_file else {}
    requested = _option(arguments, "num_processes") or ""
    processes = int(requested) if requested.isdigit() else 0
    processes = processes or config.get("num_processes") or os.environ.get("WORLD_SIZE", "1")
    kind = kind_of(config.get("distributed_type"))
    for name, sharded in _KINDS.items():  # options of the launcher, without a config file
        if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() == "true":
            kind = sharded
    if kind == "fsdp2" and not config:
        config = {"fsdp_config": {"fsdp_version": os.environ.get("FSDP_VERSION", "1")}}  # accelerate's default
    return Launch(kind, int(processes), config_file, config, launched=arguments is not None or _TORCHRUN in os.environ)


def read_config_file(path: str | None, processes: int | None = None) -> Launch:
    """Returns the launch of `accelerate launch --config_file path`; without a file of replicas. Raises UserError."""
    if path is None:
        return Launch("replicated", processes or 1)
    config = _load_config(path)
    return Launch(kind_of(config["distributed_type"]), int(processes or config.get("num_processes") or 1), path, config)


def check_started(launch: Launch, world_size: int, kind: str) -> None:
    """Raises UserError if the running processes differ from the config; accelerate does not check this."""
    if world_size != launch.processes:
        raise UserError(
            f"{launch.name} asks for {launch.processes} processes, but {world_size} "
            f"{'is' if world_size == 1 else 'are'} running. Each would train alone. Fix: use one of "
            "accelerate_configs/ and set the size with `accelerate launch --num_processes N`"
        )
    expected = os.environ.get(PROCESSES_VARIABLE, "")
    if expected and expected != str(world_size):
        raise UserError(
            f"{PROCESSES_VARIABLE}={expected}, but {world_size} {'is' if world_size == 1 else 'are'} running. The "
            "launchers of this job did not find each other, or it has other sizes than it was written for. Fix: check "
            "that its machines reach each other, or write the job again for these sizes"
        )
    if kind != launch.kind:
        raise UserError(
            f"{launch.name} asks for {launch.kind}, but accelerate started {kind}. Fix: check its `distributed_type`"
        )


def kind_of(distributed_type: str | None) -> Kind:
    return _KINDS.get(str(distributed_type), "replicated")


def _load_config(path: str) -> dict[str, Any]:
    try:
        config = yaml.safe_load(here_or_shipped(Path(path)).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}. Fix: check the path") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not an accelerate config: {error}. Fix: correct the YAML") from None
    if not isinstance(config, dict) or "distributed_type" not in config:
        raise UserError(
            f"{path}: not an accelerate config: it has no `distributed_type`. Fix: use one of accelerate_configs/, or "
            "add it"
        )
    return config


# --- accelerate launch


def _launcher_arguments() -> list[str] | None:
    """Returns the arguments after `accelerate launch` of the nearest such parent process."""
    try:
        command_lines = [process.cmdline() for process in psutil.Process().parents()]
    except (psutil.Error, OSError):
        return None  # a container may hide parent processes
    for words in command_lines:
        names = [Path(word).name for word in words]
        for i, name in enumerate(names[:-1]):
            if name in ("accelerate", "accelerate_cli.py") and names[i + 1] == "launch":
                return words[i + 2 :]
            if name == "accelerate-launch" or words[i + 1] == "accelerate.commands.launch":
                return words[i + 1 :]
    return None


def _option(arguments: list[str] | None, name: str) -> str | None:
    """Returns the value of `--name value` or `--name=value`, with dashes or underscores, before `finetune`."""
    spellings = (f"--{name}", f"--{name.replace('_', '-')}")
    for i, word in enumerate(arguments or []):
        if word in spellings and arguments is not None and i + 1 < len(arguments):
            return arguments[i + 1]
        if word.split("=")[0] in spellings and "=" in word:
            return word.split("=", 1)[1]
        if word == "finetune":
            return None
    return None


# --- torchrun: `accelerate launch` starts a fixed number of machines, torchrun as many as there are (`--nnodes 1:4`)


def _torchrun_launch(config_file: str, arguments: list[str] | None) -> Launch:
    """Returns the launch of torchrun, which decides the number of processes; the file decides the rest."""
    if arguments is not None:
        raise UserError(
            f"--config-file {config_file}: accelerate launch has an option of its own. Fix: use --config_file"
        )
    config = _load_config(config_file)
    if _TORCHRUN not in os.environ:
        raise UserError(
            f"--config-file {config_file} is for processes that torchrun started. Fix: under accelerate, use "
            f"`accelerate launch --config_file {config_file} -m finetune train ...`"
        )
    world_size = os.environ["WORLD_SIZE"]
    if str(config["distributed_type"]) == "NO" and world_size != "1":
        raise UserError(
            f"{config_file} is for one process, and torchrun started {world_size}. Fix: use accelerate_configs/ddp.yaml"
        )
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    # The environment that `accelerate launch` would give its processes, by accelerate's own functions. They start no
    # process, and require the options that torchrun has decided already.
    decided = ["--config_file", config_file, "--num_processes", world_size, "--num_machines", "1"]
    decided += ["--main_process_port", "0", "--num_cpu_threads_per_process", "1", "finetune"]
    options, defaults, precision_from_config = _validate_launch_command(launch_command_parser().parse_args(decided))
    if options.use_deepspeed:
        keys = [*getattr(defaults, "deepspeed_config", {}), *(["mixed_precision"] if precision_from_config else [])]
        options.deepspeed_fields_from_accelerate_config = ",".join(keys)
        variables = prepare_deepspeed_cmd_env(options)[1]
    else:
        variables = prepare_multi_gpu_env(options)
    os.environ.update({name: value for name, value in variables.items() if name.startswith(CONFIG_VARIABLES)})
    return Launch(kind_of(config["distributed_type"]), int(world_size), config_file, config, launched=True)


# --- every launch


def collective_timeout() -> timedelta:
    """Returns how long a collective waits before it fails; a broken link has no other symptom. Raises UserError.

    torch accepts it only in code, so the environment variable is ours.
    """
    text = os.environ.get(TIMEOUT_VARIABLE, str(_DEFAULT_TIMEOUT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e7:
        raise UserError(
            f"{TIMEOUT_VARIABLE}={text}: not a number of seconds above 0. Ranks wait for each other that long. Fix: "
            "set a number of seconds, such as 300"
        )
    return timedelta(seconds=seconds)


def hosts_without_shared_folder(gather: Callable[[Any], list[Any]], rank: int, folder: Path) -> list[str]:
    """Returns the machines that do not see a file that rank 0 creates in the existing `folder`. Collective."""
    probe = folder / f".shared-{gather(uuid.uuid4().hex)[0]}"  # a new name: NFS caches the absence of files
    if rank == 0:
        probe.touch()
    gather(None)  # the file exists from here on
    deadline = time.monotonic() + _VISIBLE_AFTER_S
    while not (visible := probe.exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    hosts = gather(None if visible else socket.gethostname())
    if rank == 0:
        probe.unlink()
    return sorted({host for host in hosts if host})
