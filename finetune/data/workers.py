"""Worker processes that prepare data: over all cores, with what each of them needs sent once."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from finetune.errors import RunFailure
from finetune.utils import end_with_parent


@contextlib.contextmanager
def worker_pool(workers: int, begin: Callable[[Any], None], given: Any, doing: str) -> Iterator[ProcessPoolExecutor]:
    """Context manager of processes that each have called `begin(given)`; at its end they end.

    begin: of the module that they are to have imported; doing: what they do, for the RunFailure of one that was killed.
    """
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload([begin.__module__])
    # Pickled once, not once a worker: a large vocabulary takes half a second. It never lies on a disk.
    pool = ProcessPoolExecutor(workers, context, _begin, (begin, pickle.dumps(given)))
    try:
        yield pool
    except BrokenProcessPool:
        raise RunFailure(
            f"one of the {workers} processes that {doing} has died. Most often the system ended it for want of memory "
            "(`dmesg` says so). Fix: start fewer processes, which need less; `taskset -c 0-3 python -m finetune "
            "prepare ...` starts four"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(begin: Callable[[Any], None], pickled: bytes) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches us as well; our parent ends us
    end_with_parent()
    begin(pickle.loads(pickled))  # noqa: S301 - from our parent, through a pipe
