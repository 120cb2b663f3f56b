"""The process that runs episodes of the user's environment, one call at a time.

`environment.py` starts it, as `rewards/pool.py` starts those of rewards, with the same pipes and frames. A request has
all that has happened in its episode, so a process that replaces another one repeats the calls that it has not seen:

    {"episode": 3, "begin": {row, messages, ...}, "seeds": ["7:12", "7:12:0:0"], "turns": [{text, calls}], "ends": no}

A reply has the messages that the last call returned, or the kind of a failure. Imports nothing heavy.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import reprlib
import signal
from collections.abc import Callable, Mapping
from typing import Any

from finetune.rl.rewards.child import GRACE_S, as_number, ignore_stop_signals, read_frame, write_frame
from finetune.user_code import Unusable, accepted, defined, one_line, run_file, shortened

# Names of the arguments that the methods may declare.
OF_RESET = ("row", "messages", "reference", "tools", "seed")
OF_STEP = ("text", "calls")
_MOST_BYTES = 1 << 19  # of what a call returns: a reply has room for it

Live = dict[int, tuple[Any, int]]  # by episode: the environment, and the turns that it has seen


class Invalid(Exception):
    """Reason why what a method returned cannot be used."""


def main(requests: int, replies: int) -> None:
    """Answers until the pipe of requests ends."""
    ignore_stop_signals()
    source, sink = os.fdopen(requests, "rb"), os.fdopen(replies, "wb")
    settings = read_frame(source)
    try:
        make = load(settings)
    except Unusable as reason:
        details = shortened(reason.__cause__, __file__)
        write_frame(sink, {"problem": str(reason), "details": details, "id": settings["id"]})
        os._exit(0)
    write_frame(sink, {"id": settings["id"]})
    live: Live = {}
    while (task := read_frame(source)) is not None:
        # Without a handler the signal ends the process, whatever holds Python's lock.
        signal.setitimer(signal.ITIMER_REAL, task["seconds"] + GRACE_S)
        reply = answer(make, live, task)
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_frame(sink, {**reply, "id": task["id"]})
    os._exit(0)  # without waiting for threads of the environment


def load(settings: Mapping[str, Any]) -> Callable[[], Any]:
    """Returns the class, or the function that returns an environment, after a trial. Raises Unusable."""
    path, name = settings["file"], settings["name"]
    module = run_file(path, settings["source"])
    make = defined(module, name, "class")
    try:
        environment = make()
    except BaseException as error:  # code of the user's, which may raise anything
        raise Unusable(
            f"{path}: `{name}()` raised {one_line(error)}. It is called without arguments. Fix: correct it"
        ) from error
    needed = {"reset": OF_RESET, "step": OF_STEP} | ({"reward": ()} if settings["is_rewarded"] else {})
    for method, arguments in needed.items():
        function = getattr(environment, method, None)
        if not callable(function):
            why = ", which `rewards: [{name: environment}]` asks for" if method == "reward" else ""
            raise Unusable(f"{path}: `{name}` has no method `{method}`{why}. Fix: add it")
        if inspect.iscoroutinefunction(function):
            raise Unusable(
                f"{path}: `{name}.{method}` is an `async def`, and nothing awaits it. Fix: write it with `def`"
            )
        accepted(function, arguments)
    return make


def answer(make: Callable[[], Any], live: Live, task: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the reply to a request: {messages, tools} of a reset, {messages} of a step, {value} of a reward, or
    {kind, what, details} of a failure, after which the episode is over."""
    turns, seeds, result = task["turns"], task["seeds"], dict[str, Any]()
    try:
        environment, seen = live.pop(task["episode"], (None, 0))
        if environment is None:
            random.seed(seeds[0])  # not the order of calls
            environment = make()
            names = accepted(environment.reset, OF_RESET)
            result = opening(environment.reset(**{name: task["begin"][name] for name in names}))
        for i in range(seen, len(turns)):
            random.seed(seeds[i + 1])
            names = accepted(environment.step, OF_STEP)
            result = following(environment.step(**{name: turns[i][name] for name in names}), turns[i]["calls"])
        if task["ends"]:
            return as_number(environment.reward()) if task["is_rewarded"] else {}
        if len(json.dumps(result)) > _MOST_BYTES:
            raise Invalid(f"returned more than {_MOST_BYTES:,} bytes")
    except Invalid as reason:
        return {"kind": "invalid", "what": str(reason)}
    except BaseException as error:  # noqa: BLE001 - code of the user's, which may raise anything
        return {"kind": "raised", "what": f"raised {one_line(error)}", "details": shortened(error, __file__)}
    live[task["episode"]] = environment, len(turns)
    return result


def opening(result: Any) -> dict[str, Any]:
    """Returns what `reset` returned: messages, or None for those of the row; with tools, if there are two values."""
    messages, tools = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    are_messages = isinstance(messages, list) and messages and all(isinstance(one, dict) for one in messages)
    if messages is not None and not are_messages:
        expected = "a list of messages, (messages, tools), or None for the row's own"
        raise Invalid(f"reset returned {_shown(result)}; expected {expected}")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(one, dict) for one in tools)):
        raise Invalid(f"reset returned {_shown(tools)} as tools; expected a list of JSON schemas")
    return {"messages": _as_json(messages), "tools": _as_json(tools)}


def following(result: Any, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what `step` returned as messages; None if the episode is over. A text is the answer to a call of the
    turn, the first to the first, and without calls a message of the user."""
    if result is None:
        return {"messages": None}
    items = [result] if isinstance(result, str | dict) else result
    if not isinstance(items, list) or not items or not all(isinstance(one, str | dict) for one in items):
        raise Invalid(f"step returned {_shown(result)}; expected a text, messages, or None at the end")
    texts = sum(isinstance(one, str) for one in items)
    if calls and texts > len(calls):
        raise Invalid(f"step returned {texts} texts for {len(calls)} tool calls; give one for each")
    names, messages = iter(calls), []
    for one in items:
        if isinstance(one, str):
            to_call = {"role": "tool", "name": next(names)["name"]} if calls else {"role": "user"}
            one = {**to_call, "content": one}
        messages.append(one)
    return {"messages": _as_json(messages)}


def _as_json(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise Invalid(f"returned what JSON cannot hold: {one_line(error)}") from None


def _shown(value: Any) -> str:
    plain = isinstance(value, str | int | float | list | tuple | dict | set)
    return f"{type(value).__name__} ({reprlib.repr(value)})" if plain else type(value).__name__
