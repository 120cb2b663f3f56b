"""After a collective that failed: which ranks did not take part, said by one of those that waited for them.

A rank that stands still has no error of its own, and those that wait for it know only that somebody is missing. So each
that waits writes so into the store of the process group; after a while the names that are not there are the answer.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import distributed_c10d

from finetune.engine.launch import TIMEOUT_VARIABLE, collective_timeout

_HOST, _WAITS, _COUNT, _SAID = (f"finetune/{name}" for name in ("host", "waits", "waiting", "said"))  # in the store
_CLOSED_S = 2.0  # from a closed connection to the message
_MOST_S = 60.0  # for the others to run into their own timeouts: they began to wait up to a step later
_NO_ANSWER_S = 10.0  # of the store


def note_host() -> None:
    """Tells the other ranks where this one runs."""
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        distributed_c10d._get_default_store().set(f"{_HOST}/{torch.distributed.get_rank()}", socket.gethostname())


def is_lost_rank(error: BaseException) -> bool:
    """Returns whether an error is of a collective that lacks a rank: gloo's have no class of their own."""
    is_gloo = isinstance(error, RuntimeError) and "gloo" in str(error)
    return is_gloo or isinstance(error, (torch.distributed.DistBackendError, torch.distributed.DistNetworkError))


def lost_ranks(error: BaseException) -> str | None:
    """Returns a message about the ranks that are missing; None if another rank says it. Call it on every rank with an
    error that `is_lost_rank`: the first waits here for the others, and they for its message.

    The first error says what happened: a rank that gives up closes its connections, which others then find closed.
    """
    timed_out, waited_s = "timed out" in str(error).lower(), collective_timeout().total_seconds()
    grace_s = min(_MOST_S, waited_s / 2) if timed_out else _CLOSED_S
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    missing = _answered(lambda: _missing(rank, size, grace_s), grace_s + _NO_ANSWER_S)
    if missing == {rank: ""}:
        return None
    if missing is None:  # the store is in rank 0's process
        speaks = rank == 1 or os.environ.get("LOCAL_RANK") == "0"  # one of each machine, as they cannot agree
        return _message({0: os.environ.get("MASTER_ADDR", "its host")}, timed_out, waited_s) if speaks else None
    return _message(missing, timed_out, waited_s)


def _missing(rank: int, size: int, grace_s: float) -> dict[int, str]:
    """Returns the ranks that do not wait, with their hosts; only itself where another rank has asked before."""
    store = distributed_c10d._get_default_store()
    store.set(f"{_WAITS}/{rank}", "")
    waiting, deadline = store.add(_COUNT, 1), time.monotonic() + grace_s
    if waiting > 1:
        while time.monotonic() < deadline + _MOST_S and not store.check([_SAID]):
            time.sleep(0.2)
        return {rank: ""}
    while waiting < size and time.monotonic() < deadline:
        time.sleep(0.2)
        waiting = store.add(_COUNT, 0)
    absent = [other for other in range(size) if not store.check([f"{_WAITS}/{other}"])]
    return {other: store.get(f"{_HOST}/{other}").decode() for other in absent}


def leave_lost() -> None:
    """Lets the others leave, after the message: the launcher ends all ranks when the first has gone."""
    _answered(lambda: distributed_c10d._get_default_store().set(_SAID, ""), _NO_ANSWER_S)


def _answered(ask: Callable[[], Any], seconds: float) -> Any:
    """Returns the answer of the store; None if there is none in time: its process has ended, or stands still."""
    answers: list[Any] = []

    def run() -> None:
        try:
            answers.append(ask())
        except RuntimeError:  # torch's errors of a store that is gone, some without a class of their own
            return

    thread = threading.Thread(target=run, name="lost ranks", daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def _message(missing: dict[int, str], timed_out: bool, waited_s: float) -> str:
    again = "run the same command again, which resumes from the last checkpoint"
    if not timed_out:  # the launcher of its machine names it
        return (
            "the connection to another rank is lost. That rank has ended, for a reason that it or its launcher says, "
            f"or its machine or link is gone. Fix: that reason; then {again}"
        )
    if not missing:
        return (
            f"all ranks waited {waited_s:,.0f} s for each other. A link between machines is lost, or they wait in "
            f"different collectives. Fix: measure the links by `finetune doctor` on the same launch; then {again}"
        )
    names = ", ".join(f"rank {rank} on {host}" for rank, host in sorted(missing.items()))
    return (
        f"{names} did not arrive: the others waited {waited_s:,.0f} s. It is stopped, hangs in a call (`py-spy dump "
        f"--pid PID` shows which), or its machine or link is gone. Fix: end that process and {again}. If it is only "
        f"slow, raise {TIMEOUT_VARIABLE}"
    )
