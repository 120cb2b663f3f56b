"""Meters of a training step: speed, device utilization, memory, time by phase, stragglers.

Every rank measures itself; once a step one small collective gathers the numbers of all. Keys are absent if a value
is unknown: no MFU without a known peak, no communication if a backend hides its waits, no power without NVML.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from finetune.data.batch import Batch
from finetune.engine.base import Engine, StorageCounter, measure_state_bytes
from finetune.engine.timing import COMMUNICATION, PHASES, STALLS
from finetune.models.flops import ModelFlops
from finetune.tracking.metrics import Line
from finetune.utils import peak_resident_bytes

GIB = 2**30

_STORED = ("weights", "gradients", "optimizer_state")


class DeviceReading(NamedTuple):
    """Readings of a device; NaN if unknown."""

    utilization: float = math.nan  # share of the driver's last sampling period in which a kernel ran
    power_w: float = math.nan
    energy_j: float = math.nan  # since the meter was created


# Readings that one rank sends of a step, in this order; NaN: unknown.
_FIELDS = ("step", *PHASES, *STALLS, "model_flops", "hardware_flops", "peak", *_STORED, *DeviceReading._fields)


@dataclass(frozen=True)
class Measured:
    """Meters of a step, over all ranks."""

    seconds: float
    line: Line


class Meters:
    """Meters of a run. Call `step` once per step, on every rank."""

    def __init__(self, engine: Engine, flops: ModelFlops | None = None, peak_tflops: float | None = None):
        """peak_tflops: of one device, in the type of matrix products; None if unknown."""
        self._engine, self._flops, self._peak = engine, flops, peak_tflops
        self._device = DeviceMeter(engine.device)
        self._gradients: int | None = None
        self._state: tuple[int, int] | None = None
        self._tokens = 0.0

    def measure_gradients(self) -> None:
        """Counts gradient bytes, once, while all gradients exist."""
        if self._gradients is None:
            self._gradients = StorageCounter(self._engine.device).add(self._engine.gradients())

    def step(self, batches: Sequence[Batch], tokens: float, supervised: float) -> Measured:
        """tokens, supervised: of the step, over all ranks. Collective."""
        local = self._measure_rank(batches)
        gathered = self._engine.ranks.gather_numbers([local[name] for name in _FIELDS])
        ranks = [dict(zip(_FIELDS, numbers, strict=True)) for numbers in gathered]
        seconds = statistics.fmean(rank["step"] for rank in ranks)
        self._tokens += tokens

        def mean(name: str) -> float:
            return statistics.fmean(rank[name] for rank in ranks)

        model, hardware = (mean(name) / seconds / 1e12 for name in ("model_flops", "hardware_flops"))
        fullest = max(ranks, key=lambda rank: rank["peak"])
        other = max(0.0, fullest["peak"] - sum(fullest[name] for name in _STORED))
        energy = sum(rank["energy_j"] for rank in ranks)
        line = {
            "supervised_tokens_per_s": supervised / seconds,
            "tokens_per_s_per_device": tokens / seconds / len(ranks),
            "supervised_tokens_per_s_per_device": supervised / seconds / len(ranks),
            "tflops_per_device": model,
            **({} if self._peak is None else {"mfu": model / self._peak, "hfu": hardware / self._peak}),
            "memory_peak_gib": fullest["peak"] / GIB,
            **{f"memory/{name}_gib": fullest[name] / GIB for name in _STORED},
            "memory/other_gib": other / GIB,
            **_times(mean, self._engine.stopwatch.knows_waits),
        }
        if len(ranks) > 1 and self._engine.stopwatch.knows_waits:
            busy = [rank["step"] - rank[COMMUNICATION] for rank in ranks]  # the one that waits least keeps the others
            line |= {"straggler": busy.index(max(busy)), "rank_spread": max(busy) / statistics.median(busy)}
        line |= {
            "device_utilization": mean("utilization"),
            "power_w": sum(rank["power_w"] for rank in ranks),
            "energy_j": energy,
            "tokens_per_j": self._tokens / energy if energy > 0 else math.nan,
        }
        return Measured(seconds, {key: value for key, value in line.items() if math.isfinite(value)})

    def _measure_rank(self, batches: Sequence[Batch]) -> dict[str, float]:
        # Before the lap, which waits for the device: it ends the optimizer's step meanwhile.
        (model, hardware), reading = self._count_flops(batches), self._device.read()
        lap, device = self._engine.stopwatch.lap(), self._engine.device
        if self._state is None:
            self._state = measure_state_bytes(self._engine)
        on_gpu = device.type == "cuda"
        weights, optimizer_state = self._state
        return {
            "step": lap.step,
            **{name: lap.phases.get(name, 0.0) for name in PHASES},
            **lap.stalls,
            "model_flops": model,
            "hardware_flops": hardware,
            "peak": torch.cuda.max_memory_allocated(device) if on_gpu else peak_resident_bytes(),
            "weights": weights,
            "gradients": self._gradients or 0,
            "optimizer_state": optimizer_state,
            **reading._asdict(),
        }

    def _count_flops(self, batches: Sequence[Batch]) -> tuple[float, float]:
        if self._flops is None:
            return math.nan, math.nan
        # Ranks that share a row have equal parts of it: the FLOPs of the full row, divided by their number.
        parallelism, work = self._engine.parallelism, []
        for batch in batches:
            at_head = (
                batch.counts["target_tokens"] if batch.distinct_targets is None else len(batch.distinct_targets.ids)
            )
            work.append(
                self._flops.of(
                    batch.sequence_lengths[: len(batch.sequence_tokens)],  # padding comes after those of examples
                    batch.sequence_lengths,
                    at_head * parallelism.tokens,
                    batch.prefix_lengths,
                    self._flops.patches_in(batch.inputs),
                )
            )
        ranks = parallelism.processes / parallelism.data
        return sum(model for model, _ in work) / ranks, sum(hardware for _, hardware in work) / ranks


def _times(mean: Callable[[str], float], knows_waits: bool) -> Line:
    """Returns times averaged over ranks. `other` is the step without its phases; stalls are added to the step."""
    step = mean("step")
    phases = {name: mean(name) for name in PHASES if knows_waits or name != COMMUNICATION}
    stalls = {name: mean(name) for name in STALLS}
    if not stalls["profile"]:
        del stalls["profile"]  # absent in most runs
    times = {**phases, "other": max(0.0, step - sum(phases.values())), **stalls}
    total = step + sum(stalls.values())
    line = {f"time/{name}": seconds for name, seconds in times.items()}
    return line | {f"share/{name}": min(1.0, seconds / total) for name, seconds in times.items()}


class DeviceMeter:
    """Reads one CUDA device through NVML, if `nvidia-ml-py` is installed and the driver answers; else returns NaN."""

    def __init__(self, device: torch.device):
        self._handle: Any = None
        self._broken: tuple[type[Exception], ...] = ()
        if device.type != "cuda" or torch.version.hip or importlib.util.find_spec("pynvml") is None:
            return
        pynvml: Any = importlib.import_module("pynvml")
        self._nvml, self._broken = pynvml, (pynvml.NVMLError,)
        try:
            pynvml.nvmlInit()
            # NVML numbers devices by bus, CUDA as CUDA_VISIBLE_DEVICES says: only the UUID is the same.
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except self._broken:
            return  # no driver library, or a slice of a device
        self._start = self._energy()

    def read(self) -> DeviceReading:
        if self._handle is None:
            return DeviceReading()
        return DeviceReading(
            self._query(lambda nvml, device: nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100),
            self._query(lambda nvml, device: nvml.nvmlDeviceGetPowerUsage(device) / 1000),  # milliwatts
            self._energy() - self._start,
        )

    def _energy(self) -> float:
        """Millijoules in NVML; Volta and later."""
        return self._query(lambda nvml, device: nvml.nvmlDeviceGetTotalEnergyConsumption(device) / 1000)

    def _query(self, read: Callable[[Any, Any], float]) -> float:
        try:
            return read(self._nvml, self._handle)
        except self._broken:
            return math.nan
