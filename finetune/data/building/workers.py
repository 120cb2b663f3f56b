"""Chunks of rows over all cores, and back in their order.

Processes come from a fork server: a fresh process that has imported what a worker needs and has no threads, so that
its forks start at once, share those pages, and cannot inherit a lock that some thread of ours (torch, rich) holds. A
spawned process would import everything again, on every core.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial

from finetune.data.building.chunk import Item, Outcome, Work, tokenise_chunk
from finetune.data.chat.tokens import remember_words
from finetune.errors import RunFailure, UserError

WAITING_EACH = 2  # chunks that a worker has or will have next; more would only be memory
MOST_BEHIND = 16  # times as many outcomes may wait for one before them


def num_cores() -> int:
    """Cores that this process may use, which a launcher or `taskset` may have limited."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def tokenised(work: Work, chunks: Iterable[Sequence[Item]], workers: int) -> Generator[Outcome, None, None]:
    """Outcomes in the order of `chunks`, made by `workers` processes; 1: by this one.

    A UserError of `chunks` is raised after the outcomes of what came before it. Raises RunFailure for a worker that
    was killed. Close it (`contextlib.closing`) where it is left early: that ends the processes.
    """
    if workers == 1:
        yield from map(partial(tokenise_chunk, work), chunks)
        return
    pool = _start(work, workers)
    gc.freeze()  # as in the workers, see `_begin`
    try:
        here = partial(tokenise_chunk, work)
        yield from _in_order(partial(pool.submit, _tokenise), here, chunks, workers * WAITING_EACH)
    except BrokenProcessPool:
        raise RunFailure(
            f"one of the {workers} processes that tokenise has died; most often the system ended it for want of memory "
            "(`dmesg` says so). Fewer processes need less: `taskset -c 0-3 python -m finetune prepare ...` starts four"
        ) from None
    finally:
        gc.unfreeze()
        pool.shutdown(cancel_futures=True)


def _in_order(
    submit: Callable[[Sequence[Item]], Future[Outcome]],
    here: Callable[[Sequence[Item]], Outcome],
    chunks: Iterable[Sequence[Item]],
    most: int,
) -> Iterator[Outcome]:
    """`most` chunks are with the processes. Where this one would wait for them, it works, too: they take seconds to
    start."""
    waiting: deque[Future[Outcome]] = deque()
    unread, failure = iter(chunks), None
    while True:
        try:
            chunk = next(unread, None)
        except UserError as error:  # what comes before it in the file may be wrong, too, and is said first
            chunk, failure = None, error
        if chunk is None:
            break
        is_full = sum(not future.done() for future in waiting) >= most
        waiting.append(_finished(here(chunk)) if is_full else submit(chunk))
        while waiting and (waiting[0].done() or len(waiting) > MOST_BEHIND * most):
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
    if failure:
        raise failure


def _finished(outcome: Outcome) -> Future[Outcome]:
    future: Future[Outcome] = Future()
    future.set_result(outcome)
    return future


def _start(work: Work, workers: int) -> ProcessPoolExecutor:
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload([__name__])
    # Pickled once, not once a worker: a large vocabulary takes half a second. It never lies on a disk.
    return ProcessPoolExecutor(workers, context, _begin, (pickle.dumps(work),))


# --- in a worker

_work: Work | None = None


def _begin(pickled: bytes) -> None:
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches us as well; our parent ends us
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # every core has a process already
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _work = work = pickle.loads(pickled)  # noqa: S301 - from our parent, through a pipe
    remember_words(work.made.tokenizer)
    gc.freeze()  # or each collection walks through all that the libraries made: a tenth of the time


def _end_with_parent() -> None:
    """A parent that was killed cannot end us, and the pipes that we share among us never close."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _tokenise(items: Sequence[Item]) -> Outcome:
    assert _work is not None  # _begin was called
    return tokenise_chunk(_work, items)
