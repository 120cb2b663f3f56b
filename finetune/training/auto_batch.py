"""`batch.rows_per_device: auto`: measures the largest micro-batch that fits into memory, and caches the result.

The result is the same on every rank and does not change the maths: it only decides the number of micro-batches into
which the sequences of a step are split.

A trial that runs out of memory ends a run whose ranks wait for each other inside a forward. So sizes at most
double, and only if the measurements so far predict that the next one fits: memory grows linearly in the sequences of
a micro-batch, or quadratically if attention uses a mask or scores of tokens x tokens.

`MARGIN` of the memory stays free: the documents of a run's steps differ in length from those of a trial, so that
memory is fragmented differently; communicators and libraries allocate at first use; evaluation and generation add to
allocations. 8 % is 6 GiB of an 80 GiB device; PyTorch's fragmentation alone is commonly a few per cent.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import PretrainedConfig

from finetune.data.batch import UNSHARDED, Batch, TokenShare, collate, token_shard
from finetune.data.checksums import Damaged, sealed, unsealed
from finetune.data.row_source import RowSource
from finetune.data.samples import Example
from finetune.data.samples import Sequence as TokenSequence
from finetune.data.sources.files import cache_root
from finetune.engine.base import Engine
from finetune.errors import RunFailure, UserError
from finetune.objectives.forward import ForwardPass
from finetune.recipe import Recipe
from finetune.training.run_plan import versions
from finetune.utils import divisors, peak_resident_bytes, write_atomically

log = logging.getLogger(__name__)

HALF = 0.5  # one sequence of half the tokens: with a full one, the first two points of the line
_GIB = 2**30
_PROBE_ELEMENTS = 8192  # at most; bitsandbytes keeps 8-bit state from 4096 on
_QUADRATIC_ATTENTION = ("eager", "sdpa")  # one call over the micro-batch: scores or a mask of tokens x tokens
# Recipe keys without effect on a micro-batch's memory. Length and number of sequences are compared separately.
_IGNORED_KEYS = {
    "run": True,
    "data": True,
    "batch": True,
    "schedule": True,
    "evaluate": True,
    "checkpoint": True,
    "tracking": True,
    "profile": True,
    "optimizer": {"lr", "weight_decay", "betas", "eps", "momentum", "max_grad_norm"},
    "train": {"epochs", "max_steps"},
}

BuildOptimizers = Callable[[list[tuple[str, Tensor]]], list[Optimizer]]


@dataclass(frozen=True)
class RowsPerDevice:
    rows: int
    reason: str


def find_rows(
    engine: Engine,
    recipe: Recipe,
    config: PretrainedConfig,
    forward: ForwardPass,
    data: RowSource,
    build: BuildOptimizers,
    memory: DeviceMemory,
    say: Callable[[str], None] = lambda text: None,
) -> RowsPerDevice:
    """Returns the micro-batch size, cached or measured. Collective.

    Leaves weights, gradients, optimizer and random numbers as they were. Raises UserError and RunFailure.
    """
    heaviest = data.heaviest_row(recipe.data.max_length, forward.attention.shares_prompts)
    row = HeaviestRow(data.row(0)[0], *heaviest)
    sizes = divisors(recipe.batch.rows // engine.parallelism.data)
    depends_on = dependencies(
        recipe,
        model=config.to_dict(),
        row={"tokens": row.tokens, "supervised": row.supervised},
        rows_per_rank=sizes[-1],
        attention=forward.attention.implementation,
        backend=engine.launch.backend,
        hardware=engine.ranks.gather(memory.name),
        versions=versions(),
    )
    path, limit = entry_file(depends_on), min(engine.ranks.gather(memory.limit))
    cached: FittingSize | None = engine.ranks.gather(read_entry(path) if engine.is_main else None)[0]
    if cached is not None and cached.required_bytes <= limit < cached.next_required_bytes:
        say(f"batch.rows_per_device: auto: {cached.size} (cached in {path})")
        return _with_reason(cached, limit, sizes, "cached")
    say(f"batch.rows_per_device: auto: trying micro-batches of up to {sizes[-1]} x {row.tokens:,} tokens")
    trials = Trials(engine, memory, forward, row, optimizer_bytes(engine, build))
    fitting = _measure(trials, recipe.train.compile, sizes, limit, say)
    if engine.is_main:
        try:
            write_entry(path, depends_on, fitting)
        except OSError as error:
            log.warning("%s cannot be written (%s): the next run measures again", path, error.strerror)
    return _with_reason(fitting, limit, sizes, "measured")


def _measure(trials: Trials, compiles: bool, sizes: list[int], limit: float, say: Callable[[str], None]) -> FittingSize:
    engine = trials.engine

    def attempt(rows: float) -> float:
        required = trials.attempt(rows)
        say(f"  {rows:g}: {required / _GIB:.1f} of {limit / _GIB:.1f} GiB")
        return required

    power = 2 if trials.forward.attention.implementation in _QUADRATIC_ATTENTION else 1
    devices = [engine.device] if engine.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        try:
            trials.begin()
            return largest_that_fits(sizes, limit, attempt, power)
        finally:
            engine.drop_gradients()
            trials.memory.release()  # the run allocates blocks of its own sizes
            if compiles:
                torch.compiler.reset()  # forgets the trial sizes: the run compiles for its own


def _with_reason(fitting: FittingSize, limit: float, sizes: list[int], how: str) -> RowsPerDevice:
    memory = f"{fitting.required_bytes / _GIB:.1f} of {limit / _GIB:.1f} GiB, {how}"
    if fitting.required_bytes > limit:
        return RowsPerDevice(fitting.size, f"auto: the smallest, although it needs {memory}")
    what = "all of a step, no accumulation" if fitting.size == sizes[-1] else "the largest that fits"
    return RowsPerDevice(fitting.size, f"auto: {what}, {memory}")


# --- the search


@dataclass(frozen=True)
class FittingSize:
    size: int
    required_bytes: float
    next_required_bytes: float  # lower bound for the next larger size, which was rejected; infinite if there is none


def largest_that_fits(
    sizes: Sequence[int], limit: float, attempt: Callable[[float], float], power: int = 1
) -> FittingSize:
    """Returns the largest size that needs at most `limit` bytes; the smallest of all if none does.

    sizes: ascending, from 1. attempt: measures the bytes that a size needs; infinite if it ran out of memory.
    power: memory grows with size ** power.
    """
    required = {size: attempt(size) for size in (HALF, 1)}
    best, refused = 1, math.inf
    while candidates := [size for size in sizes if best < size and size not in required]:
        too_large = min((size for size, need in required.items() if need > limit), default=math.inf)
        reachable = [size for size in candidates if size <= max(2 * best, candidates[0]) and size < too_large]
        fitting = [size for size in reachable if predicted(required, best, size, power) <= limit]
        if not fitting:
            refused = min((predicted(required, best, size, power) for size in reachable), default=math.inf)
            break
        required[fitting[-1]] = attempt(fitting[-1])
        if required[fitting[-1]] <= limit:
            best = fitting[-1]
    larger = [need for size, need in required.items() if size > best]
    return FittingSize(best, required[best], min([refused, *larger]))


def predicted(required: dict[float, float], best: int, size: int, power: int) -> float:
    """Returns the bytes of `size` on the line in size ** power through the best size and the one measured below it."""
    below = max(other for other in required if other < best)
    slope = (required[best] - required[below]) / (best**power - below**power)
    return required[best] + max(slope, 0.0) * (size**power - best**power)


# --- the trials


@dataclass(frozen=True)
class HeaviestRow:
    """A sequence as long, and with as many targets, as any in the data; the two maxima may come from different
    sequences."""

    example: Example  # repeated to fill it
    tokens: int
    supervised: int

    def batch(self, rows: float, share: TokenShare = UNSHARDED) -> Batch:
        """Returns a micro-batch of `rows` such sequences; HALF: of one with half the tokens.

        Each is a single example: attention within it costs no less than within several.
        """
        part = min(rows, 1)
        num_sequences = len(self.example.sequences)
        length = max(1, int(self.tokens * part) // num_sequences)  # tokens per sequence
        targets = min(int(self.supervised * part) // num_sequences, length - 1)
        loss_mask = np.arange(length) >= length - targets
        sequences = [TokenSequence(np.resize(one.input_ids, length), loss_mask) for one in self.example.sequences]
        of_targets = {
            name: np.resize(values, (targets * num_sequences, *values.shape[1:]))
            for name, values in self.example.target_columns.items()
        }
        example = replace(self.example, sequences=tuple(sequences), target_columns=of_targets)
        examples = [example] * max(1, int(rows))
        return token_shard(collate(examples, padded_to=share.padded(length * num_sequences * len(examples))), share)


@dataclass(frozen=True)
class Trials:
    """Micro-batches on one engine. Gradients accumulate, as between the micro-batches of a step, until
    `Engine.drop_gradients`.

    Every rank must run the same trials in the same order.
    """

    engine: Engine
    memory: DeviceMemory
    forward: ForwardPass
    row: HeaviestRow
    optimizer_bytes: int  # state not allocated yet

    def begin(self) -> None:
        """Allocates the gradients and all one-time allocations. Call before `attempt`; raises UserError."""
        try:
            self._run(1)
        except torch.OutOfMemoryError:
            raise UserError(
                f"batch.rows_per_device: auto: one sequence of {self.row.tokens:,} tokens does not fit into "
                f"{self.memory.name}: train.activation_checkpointing: true, fsdp2, a smaller data.max_length, "
                "mode: lora or qlora, or an offload config"
            ) from None

    def attempt(self, rows: float) -> float:
        """Returns the bytes that a micro-batch needs on the rank with the highest peak; infinite if a rank ran out."""
        return max(self.engine.ranks.gather(self._peak(rows) + self.optimizer_bytes))

    def _peak(self, rows: float) -> float:
        try:
            return self.memory.peak(lambda: self._run(rows))
        except torch.OutOfMemoryError:
            if self.engine.trial_is_collective:
                # The others wait inside this forward, and end with this process.
                raise RunFailure(
                    f"batch.rows_per_device: auto: a micro-batch of {rows:g} was predicted to fit, but ran out of "
                    f"memory: set a number below {rows:g}"
                ) from None
        return math.inf  # outside of the handler: the error keeps the forward's tensors alive

    def _run(self, rows: float) -> None:
        batch = self.row.batch(rows, self.engine.context_shard).map_tensors(
            lambda tensor: tensor.to(self.engine.device)
        )
        objective = self.forward.objective

        def loss(model: Any) -> Tensor:
            return objective.trial_loss(self.forward(model, batch), batch)

        self.engine.trial(loss)


def optimizer_bytes(engine: Engine, build: BuildOptimizers) -> int:
    """Returns the bytes of the optimizer's state on this device after the first step.

    Steps a small probe in place of each tensor, and scales its state's size to the tensor's.
    """
    if not engine.copies_state:  # state on NVMe
        return 0
    stepped = {id(part.stepped): part for part in engine.parts(reading=True)}
    probes = []
    for part in stepped.values():
        probe = part.stepped.new_zeros(min(part.stepped.numel(), _PROBE_ELEMENTS))
        probe = probe.view(-1, 1) if len(part.shape) > 1 else probe
        probe.grad = torch.zeros_like(probe)
        probes.append((part, probe))
    optimizers = build([(part.name, probe) for part, probe in probes])
    for optimizer in optimizers:
        optimizer.step()
    total = 0.0
    for part, probe in probes:
        optimizer = next(optimizer for optimizer in optimizers if probe in optimizer.state)
        if engine.device.type == "cuda" and getattr(optimizer, "is_paged", False):
            continue  # in memory that CUDA evicts if others need the device
        state = [
            value
            for field, value in optimizer.state[probe].items()
            if isinstance(value, Tensor) and value.ndim and not field.startswith("qmap")  # one table for all
        ]
        state_bytes = sum(value.nbytes for value in state if value.device.type == engine.device.type)
        total += state_bytes / probe.numel() * part.stepped.numel()
    return int(total)


# --- the cache


def dependencies(recipe: Recipe, **others: Any) -> dict[str, Any]:
    """Returns all dependencies of a result, as plain values."""
    # pydantic's stubs do not accept nested names from a variable.
    return {"recipe": recipe.model_dump(mode="json", exclude=_IGNORED_KEYS), **others}  # pyright: ignore[reportArgumentType]


def entry_file(depends_on: dict[str, Any]) -> Path:
    text = json.dumps(depends_on, sort_keys=True, default=str)
    return cache_root() / "rows_per_device" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def read_entry(path: Path) -> FittingSize | None:
    """Returns None if the file is missing, unreadable or damaged."""
    try:
        entry = unsealed(path)
        after = entry["next_needs_bytes"]
        return FittingSize(int(entry["rows"]), float(entry["needs_bytes"]), math.inf if after is None else float(after))
    except (OSError, Damaged):
        return None


def write_entry(path: Path, depends_on: dict[str, Any], fitting: FittingSize) -> None:
    """Writes a file that is complete or absent. Raises OSError."""
    after = fitting.next_required_bytes if math.isfinite(fitting.next_required_bytes) else None
    entry = {"rows": fitting.size, "needs_bytes": fitting.required_bytes, "next_needs_bytes": after, "of": depends_on}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, sealed(json.loads(json.dumps(entry, default=str))), shared=True)


# --- the memory limit of this process, and its peak during a call

MARGIN = 0.08

_CGROUPS = (  # (limit, used, key of reclaimable memory in memory.stat), of version 2 and 1
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


class DeviceMemory(Protocol):
    name: str  # name of the hardware, with its size: a result is valid for this hardware only
    limit: int  # bytes that this process may use

    def release(self) -> None:
        """Returns cached memory to the system."""
        ...

    def peak(self, work: Callable[[], None]) -> int:
        """Runs `work` and returns the peak bytes of this process meanwhile."""
        ...


def memory_of(engine: Engine) -> DeviceMemory:
    """Returns the meter for the engine's device. Raises UserError if its memory cannot be measured."""
    if engine.device.type == "cuda":
        return CudaMemory(engine.device)
    if engine.device.type == "cpu":
        return HostMemory(engine.local_processes)
    raise UserError(f"batch.rows_per_device: auto: cannot measure memory on {engine.device.type}: set a number")


class CudaMemory:
    """Memory that PyTorch's allocator reserves on the device, including fragmentation."""

    def __init__(self, device: torch.device):
        self.device = device
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        others = total - free - torch.cuda.memory_reserved(device)  # CUDA's context, communicators, other processes
        self.limit = int((total - others) * (1 - MARGIN))
        self.name = f"{torch.cuda.get_device_name(device)}, {total / 2**30:.1f} GiB"

    def release(self) -> None:
        torch.cuda.empty_cache()

    def peak(self, work: Callable[[], None]) -> int:
        self.release()
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_reserved(self.device)


class HostMemory:
    """Resident memory of a CPU process. processes: number on this machine or container."""

    def __init__(self, processes: int = 1, limit: int | None = None):
        total, available = psutil.virtual_memory().total, psutil.virtual_memory().available
        container_total, container_available = _container_memory()
        total, available = min(total, container_total), min(available, container_available)
        self.limit = limit or int((psutil.Process().memory_info().rss + available / processes) * (1 - MARGIN))
        self.name = f"CPU, {total / 2**30:.1f} GiB for {processes} processes"

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
                "(/proc/self/clear_refs): set a number"
            ) from None
        work()
        return peak_resident_bytes()


def _container_memory() -> tuple[float, float]:
    """Returns (limit, available) bytes of this process's cgroup; infinite without a limit."""
    root = Path("/sys/fs/cgroup")
    for limit, used, reclaimable in _CGROUPS:
        try:
            total = float((root / limit).read_text(encoding="ascii"))
            used_bytes = float((root / used).read_text(encoding="ascii"))
            stat = (root / limit).with_name("memory.stat").read_text(encoding="ascii")
        except (OSError, ValueError):  # another version of cgroups, or `max`
            continue
        cached = dict(line.split() for line in stat.splitlines()).get(reclaimable, "0")
        return total, total - used_bytes + float(cached)
    return float("inf"), float("inf")
