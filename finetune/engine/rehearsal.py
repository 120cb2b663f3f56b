"""Rehearsal: any accelerate config on CPU processes, for a machine without an accelerator.

accelerate 1.15 recognises several processes without a GPU only as plain data parallel: it never names a communication
backend for FSDP or DeepSpeed there, and starts N runs of one process each instead (accelerate/state.py,
`PartialState._prepare_backend` and `AcceleratorState.__init__`). This file gives it the missing answer, and only where
no accelerator exists.
"""

from __future__ import annotations

import inspect
import os
import socket

import torch

from finetune.engine.launch import Launch
from finetune.errors import UserError

_KNOWN_SIGNATURE = ["self", "cpu", "sagemaker_dp", "backend"]


def is_rehearsal() -> bool:
    return not torch.accelerator.is_available()


def prepare_rehearsal(launch: Launch) -> None:
    """Make accelerate treat CPU processes as it treats GPUs. Call before `Accelerator()`.

    Raises UserError where accelerate's private method is not the one this knows how to replace.
    """
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.pop("ACCELERATE_USE_CPU", None)  # would force plain data parallel
    if launch.kind != "replicated" and "LOCAL_RANK" not in os.environ:
        _stand_alone()
    if launch.kind == "zero":
        _leave_out_shared_memory()
    if "LOCAL_RANK" in os.environ:
        _replace_prepare_backend(sharded=launch.kind != "replicated")


def _stand_alone() -> None:
    """A group of one: the launcher starts a single process without the variables that a process group needs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    group = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(group, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def _leave_out_shared_memory() -> None:
    """DeepSpeed's all-reduce for inference on one machine, which training never calls.

    It would be compiled at the first start, for most of a minute and with a compiler that may not be there. A process
    killed while it looks at the build leaves torch's lock file behind, for which every later start waits forever.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _replace_prepare_backend(sharded: bool) -> None:
    from accelerate.state import DistributedType, PartialState

    found = getattr(PartialState, "_prepare_backend", None)
    if found is None or list(inspect.signature(found).parameters) != _KNOWN_SIGNATURE:
        import accelerate

        raise UserError(
            f"rehearsal on CPU processes does not know accelerate {accelerate.__version__} "
            "(PartialState._prepare_backend has changed): pip install 'accelerate==1.15.*', or run on GPUs"
        )
    # DDP refuses device_ids on the CPU, so replicas must be MULTI_CPU; FSDP and DeepSpeed are only looked for on
    # MULTI_GPU.
    kind = DistributedType.MULTI_GPU if sharded else DistributedType.MULTI_CPU

    def _prepare_backend(self, cpu=False, sagemaker_dp=False, backend=None):
        return "gloo", kind

    PartialState._prepare_backend = _prepare_backend
