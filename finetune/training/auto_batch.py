"""`batch.rows_per_device: auto`: the largest micro-batch that fits into memory, tried before step 1.

The result is the same on every rank and does not change the maths: it only decides the number of micro-batches into
which the sequences of a step are split.

The first trial is the planner's estimate, or one from the measured memory of one sequence if the planner has none;
while a size does not fit, the next smaller one is tried. A trial that runs out of memory ends a run whose ranks wait
for each other inside a forward, so these take the smaller of both estimates.

`MARGIN` of the memory stays free: the documents of a run's steps differ in length from those of a trial, so that
memory is fragmented differently; communicators and libraries allocate at first use; evaluation and generation add to
allocations. 8 % is 6 GiB of an 80 GiB device; PyTorch's fragmentation alone is commonly a few per cent.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import Tensor

from finetune.data.batch import UNSHARDED, Batch, TokenShare, collate, token_shard, with_ahead
from finetune.data.row_source import RowSource
from finetune.data.samples import Example
from finetune.data.samples import Sequence as TokenSequence
from finetune.engine.base import Engine
from finetune.engine.costs import Shard, Weight
from finetune.errors import RunFailure, UserError
from finetune.models.casts import cast_once
from finetune.models.parameter_roles import parameter_roles
from finetune.objectives.forward import ForwardPass
from finetune.recipe import Recipe
from finetune.recipe.schema import Optimizer
from finetune.training.optim import state_bytes
from finetune.utils import peak_resident_bytes

MARGIN = 0.08
_GIB = 2**30
_QUADRATIC_ATTENTION = ("eager", "sdpa")  # one call over the micro-batch: scores or a mask of tokens x tokens


@dataclass(frozen=True)
class RowsPerDevice:
    rows: int
    reason: str


def find_rows(
    engine: Engine,
    recipe: Recipe,
    forward: ForwardPass,
    data: RowSource,
    memory: CudaMemory | HostMemory,
    estimate: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> RowsPerDevice:
    """Returns the micro-batch size. Collective.

    estimate: size that is expected to fit, on the main rank. Leaves weights, gradients, optimizer and random numbers as
    they were. Raises UserError and RunFailure.
    """
    heaviest = data.heaviest_row(recipe.data.max_length, forward.attention.shares_prompts)
    row = HeaviestRow(data.row(0)[0], *heaviest, ahead=recipe.mtp_weight is not None)
    rows_of_step = recipe.batch.rows // engine.parallelism.data
    sizes = engine.micro_batch_sizes(rows_of_step)
    limit = min(engine.ranks.gather(memory.limit))
    start: int | None = engine.ranks.gather(estimate)[0]
    say(f"batch.rows_per_device: auto: trying micro-batches of up to {sizes[-1]} x {row.tokens:,} tokens")
    trials = Trials(engine, memory, forward, row, rows_of_step, optimizer_bytes(engine, recipe.optimizer))

    def attempt(rows: int) -> float:
        required = trials.attempt(rows)
        say(f"  {rows}: {required / _GIB:.1f} of {limit / _GIB:.1f} GiB")
        return required

    with torch.random.fork_rng([engine.device] if engine.device.type == "cuda" else []):
        try:
            trials.begin()
            if start is None or engine.trial_is_collective:
                power = 2 if forward.attention.implementation in _QUADRATIC_ATTENTION else 1
                start = min(start or sizes[-1], rows_by_one(attempt, limit, power))
            rows, required = largest_that_fits(sizes, limit, attempt, start)
        finally:
            engine.drop_gradients()
            memory.release()  # the run allocates blocks of its own sizes
            if recipe.train.compile:
                torch.compiler.reset()  # forgets the trial sizes: the run compiles for its own
    needs = f"{required / _GIB:.1f} of {limit / _GIB:.1f} GiB, measured"
    if required > limit:
        return RowsPerDevice(rows, f"auto: the smallest, although it needs {needs}")
    what = f"the largest up to {start} that fits"
    if rows == sizes[-1]:
        what = "all of a step, no accumulation" if rows == rows_of_step else "the largest with a small bubble"
    return RowsPerDevice(rows, f"auto: {what}, {needs}")


def rows_by_one(attempt: Callable[[int], float], limit: float, power: int) -> int:
    """Returns how many sequences are expected to fit, from the bytes that none and one take.

    power: memory grows with rows ** power: linearly, or quadratically if attention uses a mask or scores of
    tokens x tokens.
    """
    none, one = attempt(0), attempt(1)
    return int(max(0.0, (limit - none) / max(1.0, one - none)) ** (1 / power))


def largest_that_fits(
    sizes: Sequence[int], limit: float, attempt: Callable[[int], float], start: int
) -> tuple[int, float]:
    """Returns the largest size up to `start` that takes at most `limit` bytes, or the smallest of all; and its bytes.

    sizes: ascending. attempt: measures the bytes that a size needs; infinite if it ran out of memory.
    """
    size, required = sizes[0], math.inf
    for size in reversed([size for size in sizes if size <= max(sizes[0], start)]):
        required = attempt(size)
        if required <= limit:
            break
    return size, required


# --- the trials


@dataclass(frozen=True)
class HeaviestRow:
    """A sequence as long, and with as many targets, as any in the data; the maxima may come from different ones."""

    example: Example  # repeated to fill it
    tokens: int
    supervised: int
    ahead: bool = False  # of a head, see `with_ahead`

    def batch(self, rows: int, share: TokenShare = UNSHARDED) -> Batch:
        """Returns a micro-batch of `rows` such sequences, each a single example: attention within it costs no less than
        within several."""
        num_sequences = len(self.example.sequences)
        length = max(1, self.tokens // num_sequences)  # tokens per sequence
        targets = min(self.supervised // num_sequences, length - 1)
        loss_mask = np.arange(length) >= length - targets
        sequences = [TokenSequence(np.resize(one.input_ids, length), loss_mask) for one in self.example.sequences]
        of_targets = {
            name: np.resize(values, (targets * num_sequences, *values.shape[1:]))
            for name, values in self.example.target_columns.items()
        }
        example = replace(self.example, sequences=tuple(sequences), target_columns=of_targets)
        batch = collate([example] * rows, padded_to=share.padded(length * num_sequences * rows))
        return token_shard(with_ahead(batch) if self.ahead else batch, share)


@dataclass(frozen=True)
class Trials:
    """Micro-batches on one engine. Gradients accumulate, as between the micro-batches of a step, until
    `Engine.drop_gradients`.

    Every rank must run the same trials in the same order.
    """

    engine: Engine
    memory: CudaMemory | HostMemory
    forward: ForwardPass
    row: HeaviestRow
    rows_of_step: int  # on each data-parallel rank
    optimizer_bytes: int  # state not allocated yet

    def begin(self) -> None:
        """Allocates the gradients and all one-time allocations. Call before `attempt`; raises UserError."""
        try:
            self._run(1)
        except torch.OutOfMemoryError:
            raise UserError(
                f"batch.rows_per_device: auto: one sequence of {self.row.tokens:,} tokens does not fit into "
                f"{self.memory.name}. Fix: use train.activation_checkpointing: true, fsdp2, a smaller data.max_length, "
                "mode: lora or qlora, or an offload config"
            ) from None

    def attempt(self, rows: int) -> float:
        """Returns the bytes that a micro-batch needs on the rank with the highest peak; infinite if a rank ran out.

        rows: 0: what is in memory between micro-batches. Raises RunFailure if other ranks wait for one that ran out.
        """
        peak = math.inf
        try:
            peak = self.memory.peak(lambda: self._run(rows))
        except torch.OutOfMemoryError:
            if self.engine.trial_is_collective:
                raise RunFailure(
                    f"batch.rows_per_device: auto: a micro-batch of {rows} ran out of memory. It was predicted to "
                    f"fit. Fix: set a number below {rows}"
                ) from None
        # Outside of the handler: the error keeps the forward's tensors alive.
        return max(self.engine.ranks.gather(peak + self.optimizer_bytes))

    def _run(self, rows: int) -> None:
        if not rows:
            return
        engine, objective = self.engine, self.forward.objective
        batch = self.row.batch(rows, engine.context_shard).map_tensors(lambda tensor: tensor.to(engine.device))
        with cast_once():
            engine.trial([batch] * max(1, self.rows_of_step // rows), self.forward, objective.trial_loss)


def optimizer_bytes(engine: Engine, optimizer: Optimizer) -> int:
    """Returns the bytes of the optimizer's state on this device after the first step, without paged state."""
    if not engine.copies_state:  # state on NVMe
        return 0
    tables, stepped = parameter_roles(engine.unwrapped).tables, dict[int, Shard]()
    for part in engine.parts(reading=True):
        tensor: Tensor = part.stepped
        if tensor.device.type == engine.device.type:
            weight = Weight(part.name, part.shape, tensor.element_size(), True, None, "rest", table=part.name in tables)
            stepped[id(tensor)] = Shard(weight, tensor.numel(), tensor.numel())
    return state_bytes(optimizer, list(stepped.values()), engine.device.type)[0]


# --- the memory limit of this process, and its peak during a call

_CGROUPS = (  # (limit, used, key of reclaimable memory in memory.stat), of version 2 and 1
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def memory_of(engine: Engine) -> CudaMemory | HostMemory:
    """Returns the meter for the engine's device. Raises UserError if its memory cannot be measured."""
    if engine.device.type == "cuda":
        return CudaMemory(engine.device)
    if engine.device.type == "cpu":
        return HostMemory(engine.local_processes)
    raise UserError(f"batch.rows_per_device: auto: cannot measure memory on {engine.device.type}. Fix: set a number")


class CudaMemory:
    """Memory that PyTorch's allocator reserves on the device, including fragmentation.

    name: for messages; limit: bytes that this process may use.
    """

    def __init__(self, device: torch.device):
        self.device = device
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        others = total - free - torch.cuda.memory_reserved(device)  # CUDA's context, communicators, other processes
        self.limit = int((total - others) * (1 - MARGIN))
        self.name = f"{torch.cuda.get_device_name(device)}, {total / _GIB:.1f} GiB"

    def release(self) -> None:
        """Returns cached memory to the system."""
        torch.cuda.empty_cache()

    def peak(self, work: Callable[[], None]) -> int:
        """Runs `work` and returns the peak bytes of this process meanwhile."""
        self.release()
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_reserved(self.device)


class HostMemory:
    """Resident memory of a CPU process. processes: number on this machine or container."""

    def __init__(self, processes: int = 1, limit: int | None = None):
        machine = psutil.virtual_memory()
        total, available = float(machine.total), float(machine.available)
        for limit_file, used_file, reclaimable in _CGROUPS:
            file = Path("/sys/fs/cgroup", limit_file)
            try:
                container, used = (
                    float(path.read_text(encoding="ascii")) for path in (file, file.with_name(used_file))
                )
                stat = file.with_name("memory.stat").read_text(encoding="ascii")
            except (OSError, ValueError):  # another version of cgroups, or `max`
                continue
            cached = dict(line.split() for line in stat.splitlines()).get(reclaimable, "0")
            total, available = min(total, container), min(available, container - used + float(cached))
        self.limit = limit or int((psutil.Process().memory_info().rss + available / processes) * (1 - MARGIN))
        self.name = f"CPU, {total / _GIB:.1f} GiB for {processes} processes"

    def release(self) -> None:
        """Trims freed memory: glibc keeps freed memory in the resident set until it is trimmed."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

    def peak(self, work: Callable[[], None]) -> int:
        """Returns the kernel's high-water mark, which a process on Linux can reset (proc_pid_clear_refs(5))."""
        self.release()
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            raise UserError(
                "batch.rows_per_device: auto: this system cannot reset the peak memory of a process "
                "(/proc/self/clear_refs). Fix: set a number"
            ) from None
        work()
        return peak_resident_bytes()
