"""A run's own set-up and steps as one rank of N, on CUDA devices that are not there (`fake_devices`).

What it finds: wrong devices, types and shapes, what is in a device's memory in each phase, and what a step waits
for, casts, copies and sends. In a process of its own, which ends by `os._exit`.
"""

# Functions of libraries are replaced here.
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from device_meter import DeviceMeter
from fake_devices import enable, fake_cuda
from numpy.typing import NDArray
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AutoModelForCausalLM, PretrainedConfig

from finetune.checkpoints.saver import Staging
from finetune.checkpoints.shards import part_tensors
from finetune.data.loader import Loader, StepBatches
from finetune.data.row_source import RunRows
from finetune.data.samples import Example, ExampleSizes
from finetune.engine import zero
from finetune.engine.base import Engine
from finetune.engine.launch import CONFIG_VARIABLES, Launch, read_config_file, read_launch
from finetune.engine.start import start_engine
from finetune.engine.zero import Zero
from finetune.models import packed_linear
from finetune.models.attention import attention_for
from finetune.models.base_config import without_weights
from finetune.models.weights import Placement
from finetune.objectives.table import OBJECTIVES
from finetune.plan.meter import BLOCK
from finetune.plan.micro_batch import HeaviestBatch, examples_of
from finetune.recipe import Recipe

STEPS = 2  # the second one begins with an optimizer that has its state


class HeaviestRows(RunRows):
    """Rows of a run (`RunRows`) whose every micro-batch is the largest that `plan` reckons with. Documents of no
    content; for objectives that read more than the tokens of a batch there are none."""

    def __init__(self, recipe: Recipe, batch: HeaviestBatch):
        self._rows = [[example] for example in examples_of(recipe.objective, batch)]

    def lengths(self, position: int) -> NDArray[np.int64]:
        return np.array([len(example.sequences[0].input_ids) for example in self.row(position)])

    def counts(self, position: int) -> dict[str, int]:
        lengths = self.lengths(position)
        targets = np.array([example.num_targets for example in self.row(position)])
        return ExampleSizes(np.arange(len(lengths) + 1), lengths, targets, np.zeros_like(lengths)).counts()

    def row(self, position: int) -> list[Example]:
        return self._rows[position % len(self._rows)]

    def epoch_at(self, position: int) -> float:
        return 0.0


def with_heaviest(loader: Loader, recipe: Recipe) -> Loader:
    """Returns a loader of rows of one document, as long as they can be, if the objective reads tokens alone; or the
    same."""
    row = OBJECTIVES.get(recipe.objective.name)
    if row is None or not row.reads_tokens_alone or loader.media_inputs:
        return loader
    batch = HeaviestBatch.of_rows(loader.rows_per_device, recipe.data.max_length)
    return replace(loader, rows=HeaviestRows(recipe, batch))


class Steps(Protocol):
    """A run that is ready for its steps: a `Trainer`."""

    engine: Engine
    loader: Loader

    def train_step(self, step: StepBatches) -> Any: ...


def join(config_file: str, processes: int, rank: int = 0) -> Launch:
    """Make this process a rank of a launch whose collectives do nothing. Returns the launch."""

    for name in [name for name in os.environ if name.startswith((*CONFIG_VARIABLES, "DS_"))]:
        del os.environ[name]  # of the launch in which a person planned, such as a rehearsal's
    if processes == 1 and read_config_file(config_file, 1).kind == "replicated":
        return read_config_file(config_file, 1)
    size = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    # Autograd's guard answers "CUDA 0": every rank is the first of its machine.
    place = {"RANK": str(rank), "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    os.environ.update(size, **place, TORCHELASTIC_RUN_ID="fake")
    import torch.distributed._tools.fake_collectives  # noqa: F401  (registers them for fake tensors)

    dist.init_process_group("fake", rank=rank, world_size=processes, store=dist.HashStore())
    # Objects are sent as tensors, of values: every rank has this rank's.
    dist.broadcast_object_list = lambda *_, **__: None
    dist.all_gather_object = lambda values, own, **_: values.__setitem__(slice(None), [own] * len(values))
    new_group = dist.new_group
    dist.new_group = lambda *arguments, **named: new_group(*arguments, **{**named, "backend": "fake"})
    return read_launch(config_file)


def fake_run(
    recipe: Recipe,
    config: PretrainedConfig,
    config_file: str,
    processes: int,
    start: Callable[[Engine], Steps],
    rank: int = 0,
    block: int = BLOCK,
) -> DeviceMeter:
    """Runs set-up, two steps, the parts of a checkpoint and the tensors of the result; returns what was measured.

    start: loads and wraps, as `Trainer` does. rank: of the one that runs. block: bytes that a tensor takes a
    multiple of.
    """
    with contextlib.suppress(ImportError):
        import bitsandbytes  # noqa: F401  (once there seem to be devices, it looks for functions of CUDA builds)
    if recipe.mode != "full":
        import peft  # noqa: F401
    enable()
    launch = join(config_file, processes, rank)
    engine = start_engine(recipe, launch, config)
    # DDP's reducer is C++ that reads the parameters' memory: replicas run without it.
    engine.accelerator.prepare_model = lambda model, **_: model.to(engine.device)
    attention_for(recipe, config, "cuda")  # a trial on real tensors, which is remembered
    with fake_cuda(block) as meter, _weights_without_values(), _without_agreement(launch):
        meter.begin("load")
        wrap = engine.wrap
        engine.wrap = lambda *arguments: (meter.begin("wrap"), wrap(*arguments))[1]
        steps = start(engine)
        for number in range(STEPS):
            _step(steps, meter, number)
        meter.begin("save")
        meter.may_read = True  # bitsandbytes reads a number of each packed weight
        _read_state(engine, meter, recipe.mode != "full")
    return meter


def _step(steps: Steps, meter: DeviceMeter, number: int) -> None:
    """One `train_step`, in phases of its own names; those of an earlier step are forgotten."""
    with _disable_current_modes():
        made = steps.loader.step(number)
    meter.begin("batch")
    batches = made.map_tensors(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda"))
    engine, phase = steps.engine, steps.engine.stopwatch.phase
    for name in ("forward", "backward", "reduction", "optimizer", "end of the step"):
        meter.phases.pop(name, None)
        meter.peaks.pop(name, None)

    @contextlib.contextmanager
    def named(name: str) -> Iterator[None]:
        outer, read = meter.phase, meter.may_read
        meter.begin(name)
        meter.may_read = name == "optimizer"
        with phase(name):
            yield
        meter.may_read = True if name == "optimizer" else read
        meter.begin("end of the step" if name == "optimizer" else outer)

    def accumulate(*arguments: Any) -> None:
        type(engine).accumulate(engine, *arguments)
        meter.begin("reduction")
        meter.may_read = True

    engine.stopwatch.phase, engine.accumulate = named, accumulate
    meter.begin("forward")
    try:
        steps.train_step(batches)
    finally:
        meter.may_read = False
        engine.stopwatch.phase = phase
        del engine.accumulate


def _read_state(engine: Engine, meter: DeviceMeter, trainable_only: bool) -> None:
    """Asks for what a checkpoint and the result hold. Raises RuntimeError where a tensor of the result is not on the
    CPU."""
    parts = engine.parts(reading=False)
    tensors = part_tensors(parts, engine.optimizers)
    outer = meter.phase
    meter.begin("copies of a checkpoint")
    Staging().copies(tensors)
    meter.begin(outer)
    for name, tensor in engine.full_tensors(trainable_only):
        if tensor is not None and tensor.device.type != "cpu":
            raise RuntimeError(f"{name} of the result is on {tensor.device}")


# --- libraries


@contextlib.contextmanager
def _without_agreement(launch: Launch) -> Iterator[None]:
    """DeepSpeed compares numbers over ranks, which here have none, and moves parameters in place, which fake tensors
    cannot: packed and frozen weights are on the device from the start."""
    if launch.kind == "zero":
        import deepspeed.runtime.zero.partitioned_param_coordinator as coordinator
        import deepspeed.runtime.zero.utils as utils

        coordinator.assert_ints_same_as_other_ranks = utils.assert_ints_same_as_other_ranks = lambda _ints: None
        placement = Zero.placement

        def on_device(self: Zero, recipe: Recipe) -> Placement:
            return replace(placement(self, recipe), packed_on=None, direct=self.plugin.zero_stage != 3)

        Zero.placement = on_device
        zero.linear_weights = lambda _model: iter(())  # `wrap` shards none
    yield


@contextlib.contextmanager
def _weights_without_values() -> Iterator[None]:
    """transformers reads weights in threads, into real tensors: a model of the same shapes, types and devices stands in
    for what it has read."""
    from transformers.initialization import no_init_weights
    from transformers.integrations import is_deepspeed_zero3_enabled

    original = AutoModelForCausalLM.from_pretrained
    if importlib.util.find_spec("bitsandbytes") is not None:
        _pack_without_values()

    def from_pretrained(
        _name: str,
        config: PretrainedConfig,
        dtype: torch.dtype,
        attn_implementation: str,
        device_map: Any = None,
        **_: Any,
    ) -> tuple[Any, dict[str, Any]]:
        common = {"dtype": dtype, "attn_implementation": attn_implementation}
        placed = (device_map or {"": None})[""]
        if is_deepspeed_zero3_enabled():
            with no_init_weights():
                return AutoModelForCausalLM.from_config(config, trust_remote_code=False, **common), {
                    "missing_keys": set()
                }
        model = without_weights(config, AutoModelForCausalLM, **common)
        _fill(model, placed or torch.device("cpu"))
        model.tie_weights()
        return model, {"missing_keys": set()}

    AutoModelForCausalLM.from_pretrained = from_pretrained
    try:
        yield
    finally:
        AutoModelForCausalLM.from_pretrained = original


def _fill(model: Any, device: torch.device) -> None:
    """Give all that is on `meta` a place on `device`."""
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or not tensor.is_meta:
                continue
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            if name in module._buffers:
                module._buffers[name] = made
            else:
                module._parameters[name] = torch.nn.Parameter(made, tensor.requires_grad)


def _pack_without_values() -> None:
    """`Params4bit` cannot be a fake tensor, nor is it a parameter's type any more where FSDP2 has sharded one: layers
    have their state themselves."""
    from bitsandbytes import functional
    from bitsandbytes.nn import Linear4bit

    create = Linear4bit.__init__

    def without_values(self: Any, *arguments: Any, **named: Any) -> None:
        with _disable_current_modes():
            create(self, *arguments, **named)

    def pack(layer: Any, weight: torch.Tensor) -> None:
        settings = vars(layer.weight)
        names = ("compress_statistics", "quant_type", "quant_storage")
        packed, state = functional.quantize_4bit(weight, **{name: settings[name] for name in names})
        layer.weight = torch.nn.Parameter(packed, requires_grad=False)
        vars(layer.weight).update({**settings, "bnb_quantized": True})
        layer.quant_state = state

    functional.create_dynamic_map = lambda *_, **__: torch.empty(256)  # made of numbers
    Linear4bit.__init__, Linear4bit.forward, packed_linear.pack_4bit = without_values, _forward_4bit, pack


def _forward_4bit(self: Any, x: torch.Tensor) -> torch.Tensor:
    """As `Linear4bit.forward` computes, without its repairs of the parameter's type."""
    import bitsandbytes

    bias = None if self.bias is None else self.bias.to(self.compute_dtype)
    inner = x.to(self.compute_dtype)
    return bitsandbytes.matmul_4bit(inner, self.weight, bias=bias, quant_state=self.quant_state).to(x.dtype)
