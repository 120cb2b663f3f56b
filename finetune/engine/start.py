"""Starts an engine from a launch: join the process group, check it against the launch, choose the backend.

On a machine without an accelerator any accelerate config runs on CPU processes, as a rehearsal. accelerate 1.15
supports several processes without a GPU as plain data parallel only: for FSDP and DeepSpeed it sets no communication
backend there and starts N runs of one process each (accelerate/state.py, `PartialState._prepare_backend` and
`AcceleratorState.__init__`). `prepare_rehearsal` supplies the backend, only if there is no accelerator.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import logging
import os
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs
from torch.distributed import distributed_c10d
from torch.torch_version import TorchVersion
from transformers import PretrainedConfig

from finetune.engine.base import Engine
from finetune.engine.compatibility import check_products
from finetune.engine.ddp import Ddp
from finetune.engine.fsdp2 import Fsdp2
from finetune.engine.launch import Kind, Launch, check_started, collective_timeout, kind_of
from finetune.engine.lost_ranks import is_lost_rank, leave_lost, lost_ranks, note_host
from finetune.engine.zero import Zero
from finetune.errors import RunFailure, Stopped, UserError, unforeseen
from finetune.recipe import Recipe
from finetune.recipe.schema import Optimizer
from finetune.utils import num_cores

log = logging.getLogger(__name__)

ENGINES: dict[Kind, type[Engine]] = {"replicated": Ddp, "fsdp2": Fsdp2, "zero": Zero}


def start_engine(recipe: Recipe, launch: Launch, config: PretrainedConfig) -> Engine:
    """Join the process group, and return the engine of this process. config: of the base, see `Base`. Raises UserError
    if the group is another one."""
    if launch.kind == "zero" and importlib.util.find_spec("deepspeed") is None:
        raise UserError("this accelerate config needs DeepSpeed. Fix: pip install 'deepspeed>=0.19'")
    if is_rehearsal():
        prepare_rehearsal(launch)
    # The launcher passes the config file's values; accelerate cannot read its own `auto` here.
    os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "1"
    os.environ.pop("ACCELERATE_GRADIENT_CLIPPING", None)
    os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)  # read in parallelism.py
    for tensors in ("optimizer", "param"):  # without these accelerate 1.15 would offload to a folder named `none`
        if path := (launch.config.get("deepspeed_config") or {}).get(f"offload_{tensors}_nvme_path"):
            os.environ[f"ACCELERATE_DEEPSPEED_OFFLOAD_{tensors.upper()}_NVME_PATH"] = str(path)
    accelerator = join_group()
    note_host()
    if accelerator.device.type == "cuda":
        check_cuda(recipe, launch)
        if (threads := optimizer_threads(launch)) is not None:
            torch.set_num_threads(threads)
    check_started(launch, accelerator.num_processes, kind_of(accelerator.distributed_type.value))
    backend = ENGINES["fsdp2" if launch.parallelism.tensor > 1 else launch.kind]  # its replicas are shards of one
    if launch.parallelism.pipeline > 1:
        if launch.parallelism.tensor > 1 or launch.kind == "fsdp2":
            from finetune.engine.sharded_pipeline import ShardedPipeline as backend
        else:
            from finetune.engine.pipeline import Pipeline as backend  # takes a third of a second to import
    if is_rehearsal() and accelerator.is_main_process and launch.processes > 1:
        log.warning(
            "REHEARSAL: no accelerator here. %d CPU processes stand in for %d devices; "
            "the maths is the same, speed and memory are not.",
            launch.processes,
            launch.processes,
        )
    return backend(accelerator, launch, recipe, config)


# --- CUDA


def check_cuda(recipe: Recipe, launch: Launch) -> None:
    """Raises UserError for what this GPU, or this version of torch on any GPU, does not support."""
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    if recipe.train.precision in ("bf16", "bf16_true", "fp8") and not has_bf16:
        raise UserError(f"train.precision: {torch.cuda.get_device_name()} has no bf16. Fix: use fp16 or fp32")
    check_products(recipe.train, recipe.quantization, torch.cuda.get_device_name(), torch.cuda.get_device_capability())
    check_in_backward(recipe.optimizer, launch, torch.__version__)


def check_in_backward(optimizer: Optimizer, launch: Launch, torch_version: str) -> None:
    """Raises UserError for steps inside the backward of offloaded shards if torch does not wait for gradients:
    before 2.13 FSDP2 calls a parameter's hook during the copy (https://github.com/pytorch/pytorch/pull/180666)."""
    in_backward = optimizer.in_backward and launch.kind == "fsdp2" and launch.offloads_optimizer
    if in_backward and TorchVersion(torch_version) < "2.13":
        raise UserError(
            f"`optimizer.in_backward` with {launch.name}: torch {torch_version} steps offloaded parameters too early. "
            "Their gradients have not arrived in host memory. Fix: use torch 2.13 or newer, `in_backward: false`, or "
            "fsdp2"
        )


def optimizer_threads(launch: Launch) -> int | None:
    """Returns the threads of a CPU optimizer, this process's share of the cores; None leaves them unchanged."""
    set_by_user = "OMP_NUM_THREADS" in os.environ
    if set_by_user and launch.launched:  # launchers set it to 1 if it is unset, so their environment decides
        with contextlib.suppress(psutil.Error, OSError):  # a container may hide parent processes
            set_by_user = "OMP_NUM_THREADS" in psutil.Process(os.getppid()).environ()
    if set_by_user or not launch.offloads_optimizer:
        return None
    return max(1, num_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


# --- the process group


def join_group() -> Accelerator:
    """Join the launcher's process group. Raises UserError if another program has rank 0's port."""
    try:
        return Accelerator(
            mixed_precision="no",  # the model handles precision: see `CausalLMWithLoss`
            gradient_accumulation_steps=1,  # the trainer accumulates
            kwargs_handlers=[
                DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
                InitProcessGroupKwargs(timeout=collective_timeout()),
            ],
        )
    except torch.distributed.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise UserError(
            f"port {os.environ.get('MASTER_PORT')} (MASTER_PORT) of rank 0's machine is taken. Another program has it, "
            "or a launch that has not ended. Fix: end it, or choose a free port, for accelerate with "
            "--main_process_port"
        ) from error


def set_group_timeouts(timeout: timedelta) -> None:
    """Set the timeout of every process group of this rank: device meshes and DeepSpeed create groups with torch's."""
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timeout, group)


def leave_group() -> None:
    """Leave the process group after training: without it, communicators complain at exit."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def abort_on_crash() -> Iterator[None]:
    """End the process at once, with one line, if one rank fails and the others cannot know: at a normal exit
    Python would join its threads, and the checkpoint writer may wait for a crashed rank."""
    try:
        yield
    except (UserError, RunFailure, Stopped):
        raise
    except BaseException as error:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            is_lost = is_lost_rank(error)
            message = lost_ranks(error) if is_lost else unforeseen(error)
            if message is not None:
                print(f"[rank {torch.distributed.get_rank()}] error: {message}", file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            if is_lost and message is not None:
                leave_lost()
            os._exit(1)
        raise


# --- rehearsal


def is_rehearsal() -> bool:
    return not torch.accelerator.is_available()


def prepare_rehearsal(launch: Launch) -> None:
    """Make accelerate treat CPU processes like GPUs. Call before `Accelerator()`. Raises UserError."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.pop("ACCELERATE_USE_CPU", None)  # would force plain data parallel
    if launch.is_sharded and "LOCAL_RANK" not in os.environ:
        with socket.socket() as probe:  # the launcher describes no process group to a single process
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        group = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ.update(group, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if launch.kind == "zero":
        # Without DeepSpeed's all-reduce for inference on one machine, which training never calls. It would be compiled
        # at the first start, taking most of a minute and a compiler that may be missing. A process killed while
        # checking the build leaves torch's lock file, and every later start waits for it forever.
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if "LOCAL_RANK" in os.environ:
        _replace_prepare_backend(sharded=launch.is_sharded)


def _replace_prepare_backend(sharded: bool) -> None:
    """Make accelerate choose gloo. Raises UserError if its private method has other arguments than 1.15's."""
    from accelerate.state import PartialState

    method = getattr(PartialState, "_prepare_backend", None)
    if method is None or list(inspect.signature(method).parameters) != ["self", "cpu", "sagemaker_dp", "backend"]:
        import accelerate

        raise UserError(
            f"rehearsal on CPU processes does not know accelerate {accelerate.__version__}. "
            "PartialState._prepare_backend has changed. Fix: pip install 'accelerate==1.15.*', or run on GPUs"
        )
    # DDP refuses device_ids on the CPU, so replicas must be MULTI_CPU; accelerate considers FSDP and DeepSpeed on
    # MULTI_GPU only.
    chosen = "gloo", DistributedType.MULTI_GPU if sharded else DistributedType.MULTI_CPU
    PartialState._prepare_backend = lambda self, cpu=False, sagemaker_dp=False, backend=None: chosen
