"""`torchrun` with an accelerate config: what `accelerate launch` would have told its processes.

`accelerate launch` starts a fixed number of machines; only torchrun starts as many as there are (`--nnodes 1:4`).
"""

from __future__ import annotations

import os

from finetune.errors import UserError

_TOLD = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")  # beginnings of the variables that describe a config


def is_torchrun() -> bool:
    """Whether an agent of torch elastic started this process; `accelerate launch` of several is one, too."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def apply_config(path: str, distributed_type: str) -> None:
    """Into this process's environment, by accelerate's own reading of the file. Raises UserError."""
    if not is_torchrun():
        raise UserError(
            f"--config-file {path} is for processes that torchrun started; under accelerate, "
            f"`accelerate launch --config_file {path} -m finetune train ...`"
        )
    world_size = os.environ["WORLD_SIZE"]
    if distributed_type == "NO" and world_size != "1":
        raise UserError(
            f"{path} is for one process, and torchrun started {world_size}: use accelerate_configs/ddp.yaml"
        )
    os.environ.update({name: value for name, value in _told(path, world_size).items() if name.startswith(_TOLD)})


def _told(path: str, world_size: str) -> dict[str, str]:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    # What torchrun has decided already is said here only because both functions want it; they start nothing.
    ours = ["--config_file", path, "--num_processes", world_size, "--num_machines", "1", "--main_process_port", "0"]
    words = launch_command_parser().parse_args([*ours, "--num_cpu_threads_per_process", "1", "finetune"])
    words, config, precision_from_config = _validate_launch_command(words)
    if not words.use_deepspeed:
        return prepare_multi_gpu_env(words)
    fields = [*getattr(config, "deepspeed_config", {}), *(["mixed_precision"] if precision_from_config else [])]
    words.deepspeed_fields_from_accelerate_config = ",".join(fields)
    return prepare_deepspeed_cmd_env(words)[1]
