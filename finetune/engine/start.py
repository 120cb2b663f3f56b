"""From a launch to an engine, with the launch checked against what was asked."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Iterator

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs
from torch.torch_version import TorchVersion

from finetune.engine.base import Engine
from finetune.engine.fsdp2 import Fsdp2
from finetune.engine.launch import Launch, check_started, chose_threads
from finetune.engine.rehearsal import is_rehearsal, prepare_rehearsal
from finetune.engine.replicated import Replicated
from finetune.engine.timeout import collective_timeout
from finetune.engine.zero import Zero, require_deepspeed
from finetune.errors import RunFailure, Stopped, UserError
from finetune.recipe import Recipe

log = logging.getLogger(__name__)

_KINDS = {DistributedType.FSDP: "fsdp2", DistributedType.DEEPSPEED: "zero"}


def leave_group() -> None:
    """At the end of a process that trained: without it, communicators complain at exit."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def left_when_broken() -> Iterator[None]:
    """Around a run: what fails here without the other ranks' knowing ends the process at once, with its traceback.

    Python would wait for threads at its exit, and the one that writes a checkpoint may wait for a rank that is gone.
    """
    try:
        yield
    except (UserError, RunFailure, Stopped):
        raise
    except BaseException:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        raise


def start_engine(recipe: Recipe, launch: Launch) -> Engine:
    """Join the process group and check that it is the one asked for. Raises UserError where it is not."""
    if launch.kind == "zero":
        require_deepspeed()
    if is_rehearsal():
        prepare_rehearsal(launch)
    # The launcher passes the words of the config file on; accelerate cannot read its own `auto` here.
    os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "1"
    os.environ.pop("ACCELERATE_GRADIENT_CLIPPING", None)
    os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)  # ours to read: see parallelism.py
    _pass_nvme_paths(launch)
    accelerator = Accelerator(
        mixed_precision="no",  # precision is the model's own; see precision.py
        gradient_accumulation_steps=1,  # so is accumulation: the loop's
        kwargs_handlers=[
            DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
            InitProcessGroupKwargs(timeout=collective_timeout()),
        ],
    )
    if accelerator.device.type == "cuda":
        check_cuda(recipe, launch)
        if (threads := optimizer_threads(launch)) is not None:
            torch.set_num_threads(threads)
    kind = _KINDS.get(accelerator.distributed_type, "replicated")
    check_started(launch, accelerator.num_processes, kind)
    if launch.parallelism.pipeline > 1:
        from finetune.engine.pipeline import Pipeline  # and torch's, a third of a second

        engine = Pipeline(accelerator, launch, recipe)
    else:
        wrapped = "fsdp2" if launch.parallelism.tensor > 1 else kind  # replicas of cut matrices: shards of one
        engine = {"fsdp2": Fsdp2, "zero": Zero, "replicated": Replicated}[wrapped](accelerator, launch, recipe)
    if isinstance(engine, Fsdp2):
        engine.configure(recipe)
    if is_rehearsal() and engine.is_main and launch.processes > 1:
        log.warning(
            "REHEARSAL: no accelerator here. %d CPU processes stand in for %d devices; "
            "the maths is the same, speed and memory are not.",
            launch.processes,
            launch.processes,
        )
    return engine


def check_cuda(recipe: Recipe, launch: Launch) -> None:
    """Raises UserError for what this device, or this torch on any CUDA device, cannot do right or fast."""
    if "bf16" in recipe.train.precision and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(f"train.precision: {torch.cuda.get_device_name()} has no bf16: use fp16 or fp32")
    check_in_backward(recipe, launch, torch.__version__)


def check_in_backward(recipe: Recipe, launch: Launch, torch_version: str) -> None:
    """Refuse to step offloaded gradients inside the backward on CUDA with a torch that does not wait for them.

    Before 2.13 FSDP2 calls the hook of a parameter while its gradient is still being copied to pinned memory
    (https://github.com/pytorch/pytorch/pull/180666). Raises UserError.
    """
    in_backward = recipe.optimizer.in_backward and launch.kind == "fsdp2" and launch.offloads_optimizer
    if in_backward and TorchVersion(torch_version) < "2.13":
        raise UserError(
            f"`optimizer.in_backward` with {launch.name}: torch {torch_version} steps offloaded parameters before "
            "their gradients have arrived in host memory: use torch 2.13 or newer, `in_backward: false`, or fsdp2"
        )


def optimizer_threads(launch: Launch) -> int | None:
    """Threads for an optimizer that runs on the CPU: this process's share of the cores. None: leave what is set.

    Launchers set OMP_NUM_THREADS=1 where the user has set nothing.
    """
    if not launch.offloads_optimizer or chose_threads(launch):
        return None
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _pass_nvme_paths(launch: Launch) -> None:
    """Where accelerate 1.15 reads them. Its launcher forgets them, and everything would go to a folder named `none`."""
    for what in ("optimizer", "param"):
        if path := (launch.config.get("deepspeed_config") or {}).get(f"offload_{what}_nvme_path"):
            os.environ[f"ACCELERATE_DEEPSPEED_OFFLOAD_{what.upper()}_NVME_PATH"] = str(path)
