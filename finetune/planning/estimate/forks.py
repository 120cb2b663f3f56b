"""Estimates side by side, on every core: in forks of this process, which have its libraries and its model's shapes.

A new interpreter would import torch and transformers again, which takes as long as all estimates of a plan.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

import torch

from finetune.utils import end_with_parent, num_cores

T = TypeVar("T")
_MOST = 4  # forks: each takes some 60 MB of its own (70B with LoRA)


def side_by_side(work: Callable[[int], T], count: int) -> list[T]:
    """Returns `work(i)` for each i below `count`; results are pickled, `work` is not. Raises what it raises.

    One after another in this process where it has one core, is not on Linux (Apple's libraries do not outlive a fork),
    has used a GPU, or could use one and has run a backward: a fork of it cannot, see `_begin`.
    """
    forks = min(num_cores(), count, _MOST)
    if forks > 1 and sys.platform == "linux" and not torch.cuda.is_initialized():
        try:
            return _in_forks(work, count, forks)
        except BrokenProcessPool:  # no fork could begin, or the system ended one
            pass
    return [work(i) for i in range(count)]


def _in_forks(work: Callable[[int], T], count: int, forks: int) -> list[T]:
    context = multiprocessing.get_context("fork")
    with warnings.catch_warnings():
        # Threads that wait here, such as those of a BLAS, hold nothing that the forks need.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        with ProcessPoolExecutor(forks, context, _begin, (work,)) as pool:
            return list(pool.map(_call, range(count)))


# --- in a fork

_work: Callable[[int], Any] | None = None


def _begin(work: Callable[[int], Any]) -> None:
    global _work
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches us as well, and ends us without a traceback
    end_with_parent()
    torch.set_num_threads(1)  # OpenMP's threads are not forked, and waiting for them would not end
    try:
        torch.zeros(1, requires_grad=True).sum().backward()
    except RuntimeError:  # our parent has run one, and the threads for its GPUs are not here (torch's engine.cpp)
        os._exit(1)
    _work = work


def _call(index: int) -> Any:
    assert _work is not None  # _begin was called
    return _work(index)
