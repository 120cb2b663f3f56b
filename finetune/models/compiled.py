"""torch.compile, one decoder layer at a time, and the count of its compilations."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

# torch counts graphs, and keeps why they are compiled again, nowhere else.
from torch._dynamo.utils import counters, guard_failures

from finetune.errors import RunFailure


def compile_layers(model: Any) -> None:
    """Compile each decoder layer by itself: one small graph, reused by all of them. Micro-batches are padded to one
    length (`Loader.padded_to`), so shapes are constants."""
    for module in model.modules():
        # transformers' models declare in it what their decoder layers are.
        if type(module).__name__ in (model._no_split_modules or ()):
            module.compile(dynamic=False)


def uncompiled() -> AbstractContextManager[None]:
    """Returns a context that runs as if nothing were compiled: in generation every token has another shape."""
    return torch.compiler.set_stance("force_eager")


def compilations() -> int:
    """Returns the number of graphs that this process has compiled so far."""
    return counters["stats"]["unique_graphs"]


def _why_nothing() -> str:
    if torch._dynamo.config.disable:
        return "It is disabled (TORCHDYNAMO_DISABLE or TORCH_COMPILE_DISABLE is set)."
    breaks = counters["graph_break"].most_common(1)
    return f"It left the layers: {breaks[0][0].splitlines()[0]}." if breaks else "It gives no reason."


class CompilationWatch:
    """Compilations of this launch's training steps. None are expected after the second: the first is reported.

    Evaluation compiles its own forward, the first time; that is not counted against the steps.
    """

    def __init__(self) -> None:
        self._steps, self._before, self._warned = 0, compilations(), False

    def step_done(self) -> str | None:
        """Returns a warning with torch's reason after a step, or None. Raises RunFailure after the first one if nothing
        was compiled: the run has given up fused kernels for the compiler, and would be slower than without it."""
        self._steps += 1
        if compilations() == 0 and self._steps == 1:
            raise RunFailure(
                f"train.compile: torch has compiled nothing. {_why_nothing()} Fix: set train.compile: false, which "
                "takes fused kernels as well, and run the same command again"
            )
        count = compilations() - self._before
        self._before += count
        if not count or self._steps <= 2 or self._warned:
            return None
        self._warned = True
        reasons = [reason for failures in guard_failures.values() for reason in failures[-1:]]
        why = reasons[-1].splitlines()[0] if reasons else "torch gives no reason"
        return f"train.compile compiled {count} graphs again in step {self._steps} of this launch: {why}"

    def evaluated(self) -> None:
        self._before = compilations()
