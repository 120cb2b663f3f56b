"""The process that calls a reward function: it loads the function once and answers one completion at a time.

`pool.py` starts it, fresh and not by a fork, with a pipe for requests and one for replies. A frame is its length in 8
bytes and then the content: pickles from the parent, which are never stored, and JSON to it. Imports nothing heavy.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import pickle
import random
import reprlib
import signal
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Real
from typing import Any, BinaryIO

from finetune.rl.rewards.builtin import REWARDS, Unanswerable
from finetune.user_code import Unusable, accepted, cut, defined, one_line, run_file, shortened

# Names of the arguments that a function may declare.
ARGUMENTS = ("completion", "reference", "row", "prompt", "messages", "num_tokens", "is_truncated")
_HINTS: dict[str, str] = dict.fromkeys(
    ("completions", "prompts", "completion_ids"), "It is called for one answer, not for lists as TRL does."
)
GRACE_S = 5.0  # the parent kills at the limit; if it is gone, the kernel does this much later


def main(requests: int, replies: int) -> None:
    """Answers until the pipe of requests ends."""
    ignore_stop_signals()
    source, sink = os.fdopen(requests, "rb"), os.fdopen(replies, "wb")
    settings = read_frame(source)
    try:
        function, notes = load(settings)
        names = accepted_by_reward(function)
    except Unusable as reason:
        details = shortened(reason.__cause__, __file__)
        write_frame(sink, {"problem": str(reason), "details": details, "id": settings["id"]})
        os._exit(0)
    write_frame(sink, {"notes": notes, "id": settings["id"]})
    while (task := read_frame(source)) is not None:
        # Without a handler the signal ends the process, whatever holds Python's lock.
        signal.setitimer(signal.ITIMER_REAL, settings["seconds"] + GRACE_S)
        random.seed(zlib.crc32(task["completion"].encode("utf-8", "replace")))  # not the order of calls
        reply = call(function, {name: task[name] for name in names})
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_frame(sink, {**reply, "id": task["id"]})
    os._exit(0)  # without waiting for threads of the function


def ignore_stop_signals() -> None:
    """Leaves them to the run, which ends this process itself."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which programs that the function starts would inherit


def read_frame(source: BinaryIO) -> Any:
    """Returns the next request; None at the end of the pipe."""
    size = source.read(8)
    return pickle.loads(source.read(int.from_bytes(size, "big"))) if len(size) == 8 else None  # noqa: S301 - see above


def write_frame(sink: BinaryIO, reply: Mapping[str, Any]) -> None:
    content = json.dumps(reply).encode()
    sink.write(len(content).to_bytes(8, "big") + content)
    sink.flush()


def load(settings: Mapping[str, Any]) -> tuple[Callable[..., Any], list[str]]:
    """Returns the function, and notes for the user. Raises Unusable."""
    if settings["file"] is None:
        reward = REWARDS[settings["name"]]
        parameters = settings["parameters"]
        try:
            prepared, notes = reward.prepare(parameters) if reward.prepare else (parameters, [])
        except Unanswerable as reason:
            raise Unusable(str(reason)) from None
        return partial(reward.function, **prepared), notes
    path, name = settings["file"], settings["function"]
    module = run_file(path, settings["source"])
    function = defined(module, name, "function")
    if inspect.iscoroutinefunction(function):
        raise Unusable(f"{path}: `{name}` is an `async def`, and nothing awaits it. Fix: write it with `def`")
    return function, []


def accepted_by_reward(function: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the arguments that a reward declares. Raises Unusable if there are none."""
    if names := accepted(function, ARGUMENTS, _HINTS):
        return names
    name = getattr(function, "__name__", "the function")
    fix = f"Fix: let it ask for some of {', '.join(ARGUMENTS)}"
    raise Unusable(f"`{name}` asks for nothing, so it cannot tell answers apart. {fix}")


def call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {value} or {kind, what, details} of a failure."""
    try:
        return as_number(function(**arguments))
    except Unanswerable as reason:
        return {"kind": "unanswerable", "what": cut(str(reason))}
    except BaseException as error:  # noqa: BLE001 - code of the user's, which may raise anything
        return {"kind": "raised", "what": f"raised {one_line(error)}", "details": shortened(error, __file__)}


def as_number(value: Any) -> dict[str, Any]:
    """Returns {value} of a number, of true or false, or of an array or tensor of one number; else {kind, what} of the
    failure."""
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        value = value.item()
    if not isinstance(value, Real):
        hint = "; is a `return` missing?" if value is None else ""
        plain = isinstance(value, str | bytes | list | tuple | dict | set)
        shown = f" ({reprlib.repr(value)})" if plain else ""
        return {"kind": "not_a_number", "what": f"returned {type(value).__name__}{shown}, not a number{hint}"}
    try:
        number = float(value)
    except OverflowError:
        return {"kind": "not_a_number", "what": "returned an integer that is too large for a float"}
    if not math.isfinite(number):
        return {"kind": "not_a_number", "what": f"returned {number}"}
    return {"value": number}
