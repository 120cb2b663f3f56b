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
import sys
import traceback
import types
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, BinaryIO, Literal

from finetune.rl.rewards.builtin import REWARDS, Unanswerable

# Names of the arguments that a function may declare.
ARGUMENTS = ("completion", "reference", "row", "prompt", "messages", "num_tokens", "is_truncated")
_LISTS_OF_TRL = ("completions", "prompts", "completion_ids")
GRACE_S = 5.0  # the parent kills at the limit; if it is gone, the kernel does this much later
_TRACEBACK_LINES, _CHARACTERS = 20, 4000


class Unusable(Exception):
    """Reason why a function cannot be loaded, with the line of the file."""


def main(requests: int, replies: int) -> None:
    """Answers until the pipe of requests ends."""
    ignore_stop_signals()
    source, sink = os.fdopen(requests, "rb"), os.fdopen(replies, "wb")
    settings = read_frame(source)
    try:
        function, notes = load(settings)
        names = accepted_by_reward(function)
    except Unusable as reason:
        write_frame(sink, {"problem": str(reason), "details": shortened(reason.__cause__), "id": settings["id"]})
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


def run_file(path: str, source: bytes) -> types.ModuleType:
    """Runs the user's file as it was when the run began. Raises Unusable."""
    module = types.ModuleType("finetune_reward_file")
    module.__file__ = path
    sys.modules[module.__name__] = module  # dataclasses look their module up
    sys.path.insert(0, str(Path(path).resolve().parent))  # its own imports, as for a script
    try:
        exec(compile(source, path, "exec"), module.__dict__)
    except BaseException as error:  # code of the user's, which may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == path]
        line = error.lineno if isinstance(error, SyntaxError) and error.filename == path else lines[-1:] and lines[-1]
        raise Unusable(f"{path}{f':{line}' if line else ''}: {one_line(error)}. Fix: correct the file") from error
    return module


def defined(module: types.ModuleType, name: str, kind: Literal["function", "class"]) -> Callable[..., Any]:
    """Returns the function or class of that name in the user's file. Raises Unusable."""
    path, value = module.__file__, getattr(module, name, None)
    if value is None:
        is_kind = inspect.isfunction if kind == "function" else inspect.isclass
        own = [key for key, one in vars(module).items() if is_kind(one) and one.__module__ == module.__name__]
        raise Unusable(
            f"{path} has no {kind} `{name}`; it has {', '.join(own) or 'none'}. Fix: name one that it has, or add it"
        )
    if not callable(value):
        raise Unusable(f"{path}: `{name}` is {type(value).__name__}, not a {kind}. Fix: name a {kind}")
    return value


def accepted(function: Callable[..., Any], arguments: tuple[str, ...] = ARGUMENTS) -> tuple[str, ...]:
    """Returns the arguments that a function declares, of those that it may; all of them with `**kwargs`. Raises
    Unusable for others."""
    name = getattr(function, "__name__", "the function")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise Unusable(f"`{name}` does not say which arguments it takes. Fix: wrap it in a `def`") from None
    names = []
    for one in parameters:
        if one.kind is one.POSITIONAL_ONLY:
            problem = f"`{name}` takes `{one.name}` by position only; arguments are given by name"
            raise Unusable(f"{problem}. Fix: remove the `/`")
        if one.name in arguments:
            names.append(one.name)
        elif one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            column = f"; a column of the row is `row[{one.name!r}]`" if "row" in arguments else ""
            lists = " It is called for one answer, not for lists as TRL does." if one.name in _LISTS_OF_TRL else ""
            fix = f"Fix: ask only for {', '.join(arguments)}{column}"
            raise Unusable(f"`{name}` asks for `{one.name}`, which is not given.{lists} {fix}")
    return arguments if any(one.kind is one.VAR_KEYWORD for one in parameters) else tuple(names)


def accepted_by_reward(function: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the arguments that a reward declares. Raises Unusable if there are none."""
    if names := accepted(function):
        return names
    name = getattr(function, "__name__", "the function")
    fix = f"Fix: let it ask for some of {', '.join(ARGUMENTS)}"
    raise Unusable(f"`{name}` asks for nothing, so it cannot tell answers apart. {fix}")


def call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {value} or {kind, what, details} of a failure."""
    try:
        return as_number(function(**arguments))
    except Unanswerable as reason:
        return {"kind": "unanswerable", "what": _cut(str(reason))}
    except BaseException as error:  # noqa: BLE001 - code of the user's, which may raise anything
        return {"kind": "raised", "what": f"raised {one_line(error)}", "details": shortened(error)}


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


def one_line(error: BaseException) -> str:
    return _cut(" ".join("".join(traceback.format_exception_only(type(error), error)).split()))


def _cut(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:297]}..."


def shortened(error: BaseException | None, file: str = __file__) -> str:
    """Returns the first lines of a traceback, without those of this file and `file`, which called the user's code."""
    if error is None:
        return ""
    begin = error.__traceback__
    while begin is not None and begin.tb_frame.f_code.co_filename in (__file__, file):
        begin = begin.tb_next
    lines = "".join(traceback.format_exception(type(error), error, begin)).splitlines()
    left = [f"... {len(lines) - _TRACEBACK_LINES} lines"] if len(lines) > _TRACEBACK_LINES else []
    # The last line names the error.
    kept = lines if not left else [*lines[: _TRACEBACK_LINES - 1], *left, lines[-1]]
    return "\n".join(kept)[:_CHARACTERS]
