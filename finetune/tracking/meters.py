"""What a train line says beside the loss: speed, use of the device, memory, where the time went, who was waited for.

Every rank measures itself; once a step the numbers of all meet in one small collective. Keys are absent where nobody
knows: no MFU without a known peak, no communication where a backend hides its waits, no power without NVML.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from finetune.data.batch import Batch
from finetune.engine.base import Engine
from finetune.engine.held import held_gradients, held_state
from finetune.engine.stopwatch import COMMUNICATION
from finetune.tracking.clock import PHASES, STALLS, Lap, StepClock
from finetune.tracking.device import DeviceMeter, DeviceReading
from finetune.tracking.memory import peak_bytes
from finetune.tracking.totals import Line

GIB = 2**30

_HELD = ("weights", "gradients", "optimizer_state")
_MEASURED = {"step_s", "tokens_per_s", "supervised_tokens_per_s", "tokens_per_s_per_device", "mfu", "hfu", "straggler"}
_MEASURED |= {"supervised_tokens_per_s_per_device", "tflops_per_device", "rank_spread", "memory_peak_gib"}
_MEASURED |= {"device_utilization", "power_w", "energy_j", "tokens_per_j"}


def is_measured(key: str) -> bool:
    """Whether a key of a train line is read from a meter, so that the same run made again has another value there."""
    return key in _MEASURED or key.startswith(("time/", "share/", "memory/"))


class FlopsOf(Protocol):
    """FLOPs of a model's micro-batches; see `planning.flops`."""

    def of(self, counted: Sequence[int], executed: Sequence[int], supervised: int) -> tuple[float, float]:
        """(model, hardware)."""
        ...


# What one rank says of a step, in this order; not a number: unknown.
_WORK = ("model_flops", "hardware_flops", "peak")
_SAID = ("step", *PHASES, *STALLS, *_WORK, *_HELD, *DeviceReading._fields)
_Rank = dict[str, float]


@dataclass(frozen=True)
class Measured:
    """A step, over all ranks."""

    seconds: float
    line: Line


class Meters:
    """Of a run. `clock` is the loop's; `step` once a step, on every rank."""

    def __init__(self, engine: Engine, flops: FlopsOf | None = None, peak_tflops: float | None = None):
        """peak_tflops: of one device, for the type that products run in; None where it is not known."""
        self.clock = StepClock(engine.stopwatch)
        self._engine, self._flops, self._peak = engine, flops, peak_tflops
        self._device = DeviceMeter(engine.device)
        self._gradients: int | None = None
        self._state: tuple[int, int] | None = None
        self._tokens = 0.0

    def weigh_gradients(self) -> None:
        """Once, at a moment when they are all there."""
        if self._gradients is None:
            self._gradients = held_gradients(self._engine)

    def step(self, batches: Sequence[Batch], tokens: float, supervised: float) -> Measured:
        """tokens, supervised: of the step, over all ranks. Collective."""
        mine = self._rank(batches)
        everyone = self._engine.gather_numbers([mine[name] for name in _SAID])
        ranks: list[_Rank] = [dict(zip(_SAID, numbers, strict=True)) for numbers in everyone]
        seconds = _mean(ranks, "step")
        self._tokens += tokens
        line = _speed(tokens, supervised, seconds, len(ranks))
        line |= self._use(ranks, seconds) | _memory(ranks) | _times(ranks, self._engine.stopwatch.knows_waits)
        if len(ranks) > 1 and self._engine.stopwatch.knows_waits:
            line |= _straggler(ranks)
        line |= _device(ranks, self._tokens)
        known = {key: value for key, value in line.items() if math.isfinite(value)}
        return Measured(seconds, known)

    def _rank(self, batches: Sequence[Batch]) -> _Rank:
        lap: Lap = self.clock.lap()
        if self._state is None:
            self._state = held_state(self._engine)
        model, hardware = self._work(batches)
        weights, optimizer_state = self._state
        return {
            "step": lap.step,
            **{name: lap.phases.get(name, 0.0) for name in PHASES},
            **lap.stalls,
            "model_flops": model,
            "hardware_flops": hardware,
            "peak": peak_bytes(self._engine.device),
            "weights": weights,
            "gradients": self._gradients or 0,
            "optimizer_state": optimizer_state,
            **self._device.read()._asdict(),
        }

    def _work(self, batches: Sequence[Batch]) -> tuple[float, float]:
        if self._flops is None:
            return math.nan, math.nan
        # As if all of a row that several ranks work on were this rank's, divided: all have as much of it.
        parallelism = self._engine.parallelism
        shared_by = parallelism.tokens
        work = [
            self._flops.of(_counted(batch), batch.sequence_lengths, batch.counts["target_tokens"] * shared_by)
            for batch in batches
        ]
        ranks = parallelism.processes / parallelism.data
        return sum(model for model, _ in work) / ranks, sum(hardware for _, hardware in work) / ranks

    def _use(self, ranks: list[_Rank], seconds: float) -> Line:
        """Of a device, on average."""
        model = _mean(ranks, "model_flops") / seconds / 1e12
        hardware = _mean(ranks, "hardware_flops") / seconds / 1e12
        use = {"tflops_per_device": model}
        return use if self._peak is None else {**use, "mfu": model / self._peak, "hfu": hardware / self._peak}


def _counted(batch: Batch) -> tuple[int, ...]:
    """Lengths of the sequences that count; padding comes after them."""
    return batch.sequence_lengths[: len(batch.sequence_tokens)]


def _speed(tokens: float, supervised: float, seconds: float, devices: int) -> Line:
    return {
        "supervised_tokens_per_s": supervised / seconds,
        "tokens_per_s_per_device": tokens / seconds / devices,
        "supervised_tokens_per_s_per_device": supervised / seconds / devices,
    }


def _mean(ranks: list[_Rank], name: str) -> float:
    return statistics.fmean(rank[name] for rank in ranks)


def _memory(ranks: list[_Rank]) -> Line:
    """Of the rank that needed most."""
    fullest = max(ranks, key=lambda rank: rank["peak"])
    line = {"memory_peak_gib": fullest["peak"] / GIB}
    line |= {f"memory/{name}_gib": fullest[name] / GIB for name in _HELD}
    return {**line, "memory/other_gib": max(0.0, fullest["peak"] - sum(fullest[name] for name in _HELD)) / GIB}


def _times(ranks: list[_Rank], knows_waits: bool) -> Line:
    """Means over the ranks. `other` is what the phases leave of the step; stalls come on top of it."""
    step = _mean(ranks, "step")
    phases = {name: _mean(ranks, name) for name in PHASES if knows_waits or name != COMMUNICATION}
    stalls = {name: _mean(ranks, name) for name in STALLS}
    if not stalls["profile"]:
        del stalls["profile"]  # most runs have none
    times = {**phases, "other": max(0.0, step - sum(phases.values())), **stalls}
    total = step + sum(stalls.values())
    line = {f"time/{name}": seconds for name, seconds in times.items()}
    return line | {f"share/{name}": min(1.0, seconds / total) for name, seconds in times.items()}


def _straggler(ranks: list[_Rank]) -> Line:
    """Who waited least for others: they waited for it."""
    busy = [rank["step"] - rank[COMMUNICATION] for rank in ranks]
    return {"straggler": busy.index(max(busy)), "rank_spread": max(busy) / statistics.median(busy)}


def _device(ranks: list[_Rank], tokens: float) -> Line:
    """Of all devices; unknown where one does not say."""
    energy = sum(rank["energy_j"] for rank in ranks)
    return {
        "device_utilization": _mean(ranks, "utilization"),
        "power_w": sum(rank["power_w"] for rank in ranks),
        "energy_j": energy,
        "tokens_per_j": tokens / energy if energy > 0 else math.nan,
    }
