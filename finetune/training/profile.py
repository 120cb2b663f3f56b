"""`profile: {steps: [10, 12]}`: traces a few steps into <run>/profile/.

    rank-00000.json.gz    PyTorch's trace of this rank, for https://ui.perfetto.dev or chrome://tracing
    memory-00000.pickle   CUDA: the allocator's history, for https://pytorch.org/memory_viz; never read back
    summary.json, .md     of the main process: shares, one sentence of advice; .md also PyTorch's table of operators

The maths stays the same; steps take longer while they are traced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from finetune.engine.base import Engine
from finetune.errors import UserError
from finetune.recipe.schema import Profile
from finetune.utils import print_line

TOP = 20  # operators in the table
FEW_PRODUCTS = 0.5  # share of the operators' time
_MEMORY_EVENTS = 100_000  # latest ones of the allocator
_ADVICE = (  # (share of the time, its limit, sentence): beyond it, reducing the share gains more than faster compute
    (
        "data",
        0.1,
        "input-bound: {share:.0%} of the time is spent waiting for data (over {limit:.0%}); check the disk of the data "
        "cache, and what else runs on these processors",
    ),
    (
        "communication",
        0.2,
        "communication-bound: {share:.0%} of the time is communication that compute does not hide (over {limit:.0%}); "
        "more tokens per micro-batch, fewer processes or a config that shards less",
    ),
    (
        "idle",
        0.2,
        "launch-bound: no operator runs for {share:.0%} of the time (over {limit:.0%}; tracing adds to it); more "
        "tokens per micro-batch, or train.compile",
    ),
)
_COMMUNICATION = re.compile(r"nccl|gloo|c10d|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all", re.IGNORECASE)
_PRODUCT = re.compile(r"::(addmm_?|mm|bmm|baddbmm_?|_grouped_mm|linear|.*attention.*|.*flash.*|.*gemm.*|.*4bit.*)$")
_NO_OPERATOR = ("finetune/", "FSDP::", "autograd::", "ProfilerStep", "DistributedDataParallel", "Optimizer.")

Interval = tuple[float, float]  # microseconds


@dataclass(frozen=True)
class Summary:
    steps: tuple[int, int]
    seconds: float  # duration of these steps, while traced
    shares: dict[str, float]  # fractions of these seconds
    products: float  # share of matrix products and attention in the operators' self time
    advice: str


def summarize(
    steps: tuple[int, int], lines: Sequence[dict[str, float]], tracer: Any, operators: Any, on_device: bool
) -> Summary:
    """Returns shares of the time and advice.

    operators: `tracer.key_averages()`.

    lines: metrics.jsonl for these steps. Shares are `compute`, `communication` not hidden by compute, `data`
    wait, `optimizer`, and `idle`: no running operator, on the device if there is one.
    """
    times = [
        (event.key, event.self_device_time_total if on_device else event.self_cpu_time_total)
        for event in operators
        if event.device_type == DeviceType.CPU and not event.key.startswith((*_NO_OPERATOR, "[memory]"))
    ]
    total = sum(time for _, time in times) or 1.0
    products = sum(time for name, time in times if _PRODUCT.search(name)) / total
    seconds = sum(line["step_s"] for line in lines)
    # Intervals of kernels, or of operators on the CPU.
    device_type = DeviceType.CUDA if on_device else DeviceType.CPU
    work, communication = [], []
    for event in tracer.events():
        if event.device_type != device_type or (on_device and event.is_user_annotation):
            continue
        interval = (event.time_range.start, event.time_range.end)
        if _COMMUNICATION.search(event.name):
            communication.append(interval)
        elif on_device or event.name.startswith("aten::"):
            work.append(interval)
    busy = _length([*work, *communication])
    shares = {
        "communication": (busy - _length(work)) / seconds,
        "data": sum(line["time/data"] for line in lines) / seconds,
        "optimizer": sum(line["time/optimizer"] for line in lines) / seconds,
    }
    shares["idle"] = max(0.0, 1 - busy / seconds - shares["data"])
    shares = {"compute": max(0.0, 1 - sum(shares.values())), **shares}
    return Summary(steps, seconds, shares, products, advice(shares, products))


def advice(shares: dict[str, float], products: float) -> str:
    """Returns one sentence on what limits the speed. products: see `Summary`."""
    for name, limit, sentence in _ADVICE:
        if shares[name] > limit:
            return sentence.format(share=shares[name], limit=limit)
    if products < FEW_PRODUCTS:
        return (
            f"memory-bound: matrix products and attention are {products:.0%} of the operators' time (under "
            f"{FEW_PRODUCTS:.0%}), the rest moves memory; train.compile fuses it"
        )
    return (
        f"compute-bound: matrix products and attention are {products:.0%} of the operators' time; only a lower "
        "precision, a faster device or fewer FLOPs (no activation checkpointing, fewer trained weights) help"
    )


def _length(intervals: Iterable[Interval]) -> float:
    """Returns the seconds covered by at least one interval."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total / 1e6


def _title(summary: Summary) -> str:
    return f"profile of steps {summary.steps[0]} to {summary.steps[1]}: {summary.seconds:.3f} s, traced"


def _shares(summary: Summary) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in summary.shares.items())


def _as_markdown(summary: Summary, table: str) -> str:
    return f"# {_title(summary)}\n\n{_shares(summary)}\n\n{summary.advice}\n\n```text\n{table}\n```\n"


def show_profile(console: Console, summary: Summary, folder: Path) -> None:
    for line in (_title(summary), _shares(summary), summary.advice, f"operators: {folder / 'summary.md'}"):
        print_line(console, line, highlight=False)


class Profiler:
    """Traces the steps named in the recipe. Call `after` between all steps, on every rank."""

    def __init__(self, settings: Profile, engine: Engine, run_dir: Path, steps: int):
        """steps: length of the run. Raises UserError if it ends before the profile does."""
        self.first, self.last = settings.steps
        if self.last > steps:
            raise UserError(
                f"profile.steps: {list(settings.steps)}, but the run has {steps:,} steps. Fix: choose earlier ones"
            )
        self._engine, self.folder = engine, run_dir / "profile"
        self._on_device, self._memory = engine.device.type == "cuda", settings.memory
        self._tracer: Any = None
        self._lines: list[dict[str, float]] = []

    def after(self, step: int, line: dict[str, float]) -> Summary | None:
        """Begins or ends the trace after a step if it is due; returns the summary on the main process at the end.

        step: optimizer steps done; line: the last one's of metrics.jsonl.
        """
        if step == self.first - 1:
            self.folder.mkdir(exist_ok=True)
            if self._on_device and self._memory:
                # torch documents snapshots of memory under these names alone.
                torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_device else [])]
            self._tracer = profile(activities=activities, profile_memory=self._memory, acc_events=True)
            self._tracer.start()
            return None
        if self._tracer is None:
            return None
        self._lines.append(line)
        if step < self.last:
            return None
        tracer, self._tracer, rank = self._tracer, None, f"{self._engine.rank:05d}"
        tracer.stop()
        tracer.export_chrome_trace(str(self.folder / f"rank-{rank}.json.gz"))
        if self._on_device and self._memory:
            # Documented under this name, too.
            torch.cuda.memory._dump_snapshot(str(self.folder / f"memory-{rank}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        if not self._engine.is_main:
            return None
        operators = tracer.key_averages()
        summary = summarize((self.first, self.last), self._lines, tracer, operators, self._on_device)
        device = "cuda" if self._on_device else "cpu"
        table = operators.table(sort_by=f"self_{device}_time_total", row_limit=TOP)
        (self.folder / "summary.json").write_text(json.dumps(asdict(summary), indent=1) + "\n", encoding="utf-8")
        (self.folder / "summary.md").write_text(_as_markdown(summary, table), encoding="utf-8")
        return summary
