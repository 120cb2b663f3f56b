"""The only room that knows accelerate, FSDP, DeepSpeed and torch.distributed."""

from finetune.engine.base import Engine
from finetune.engine.launch import Launch, read_config_file, read_launch
from finetune.engine.precision import NonFinite, autocast_forward
from finetune.engine.start import check_launch, leave_group, start_engine

__all__ = [
    "Engine",
    "Launch",
    "NonFinite",
    "autocast_forward",
    "check_launch",
    "leave_group",
    "read_config_file",
    "read_launch",
    "start_engine",
]
