"""`profile: {steps: [10, 12]}`: what a few steps are made of, in <run>/profile/.

    rank-00000.json.gz    PyTorch's trace of this rank, for https://ui.perfetto.dev or chrome://tracing
    memory-00000.pickle   CUDA: the allocator's history, for https://pytorch.org/memory_viz; nothing here reads it
    summary.json, .md     of the main process: top operators, shares, one sentence of advice

Nothing of the maths changes; steps take longer while they are traced.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from finetune.engine.base import Engine
from finetune.errors import UserError
from finetune.recipe.schema import Profile
from finetune.training.profile_summary import Summary, as_markdown, summarise

_MEMORY_EVENTS = 100_000  # of the allocator, the newest


class Profiler:
    """`after` is asked between all steps, on every rank, and traces those that the recipe names."""

    def __init__(self, settings: Profile, engine: Engine, run_dir: Path, steps: int):
        """Raises UserError where the run ends before the profile does."""
        self._first, self._last = settings.steps
        if self._last > steps:
            raise UserError(f"profile.steps: {list(settings.steps)}, but the run has {steps:,} steps")
        self._engine, self._folder = engine, run_dir / "profile"
        self._on_device = engine.device.type == "cuda"
        self._memory = settings.memory
        self._tracer: Any = None
        self._lines: list[dict[str, float]] = []

    def misses(self, step: int) -> bool:
        """Whether a launch that begins with `step` steps done comes too late."""
        return step >= self._first

    def turns(self, step: int) -> bool:
        """Whether it begins or ends something when `step` steps are done, which takes its time."""
        return step in (self._first - 1, self._last)

    def after(self, step: int, line: dict[str, float]) -> Summary | None:
        """step: optimizer steps done; line: the last one's of metrics.jsonl. What was found, after the last step."""
        found = None
        if self._tracer is not None:
            self._lines.append(line)
            if step == self._last:
                found = self._end()
        if step == self._first - 1:
            self._begin()
        return found

    def _begin(self) -> None:
        self._folder.mkdir(exist_ok=True)
        if self._on_device and self._memory:
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_device else [])]
        self._tracer = profile(activities=activities, profile_memory=self._memory, acc_events=True)
        self._tracer.start()

    def _end(self) -> Summary | None:
        """The traces of all ranks; what they say is the main process's work."""
        tracer, self._tracer = self._tracer, None
        tracer.stop()
        rank = f"{self._engine.rank:05d}"
        tracer.export_chrome_trace(str(self._folder / f"rank-{rank}.json.gz"))
        if self._on_device and self._memory:
            torch.cuda.memory._dump_snapshot(str(self._folder / f"memory-{rank}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        if not self._engine.is_main:
            return None
        found = summarise((self._first, self._last), self._lines, tracer, self._on_device)
        (self._folder / "summary.json").write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")
        (self._folder / "summary.md").write_text(as_markdown(found), encoding="utf-8")
        return found
