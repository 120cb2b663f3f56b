"""Python files of the user's: run once, and the function or class that a recipe names. Imports nothing heavy."""

from __future__ import annotations

import inspect
import sys
import traceback
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

_TRACEBACK_LINES, _CHARACTERS = 20, 4000


class Unusable(Exception):
    """Reason why a function cannot be loaded, with the line of the file."""


def run_file(path: str, source: bytes, *, alone: bool = True) -> types.ModuleType:
    """Returns the user's file as a module, with `source` as its content. Raises Unusable.

    alone: this process runs nothing else, so modules of the file's folder precede those of the same names that are
    installed, as for a script; otherwise they follow them.
    """
    module = types.ModuleType("finetune_user_file")
    module.__file__ = path
    sys.modules[module.__name__] = module  # dataclasses look their module up
    folder = str(Path(path).resolve().parent)  # of its own imports
    if alone:
        sys.path.insert(0, folder)
    elif folder not in sys.path:
        sys.path.append(folder)
    try:
        exec(compile(source, path, "exec"), module.__dict__)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # code of the user's, which may raise anything
        raise Unusable(f"{place_of(error, path)}: {one_line(error)}. Fix: correct the file") from error
    return module


def place_of(error: BaseException, path: str) -> str:
    """Returns path:line of the last line of the user's file that an error passed through; the path if there is none."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    line = error.lineno if isinstance(error, SyntaxError) and error.filename == path else lines[-1] if lines else None
    return f"{path}:{line}" if line else path


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


def accepted(
    function: Callable[..., Any], arguments: tuple[str, ...], hints: Mapping[str, str] = MappingProxyType({})
) -> tuple[str, ...]:
    """Returns the arguments that a function declares, of those that it may; all of them with `**kwargs`. Raises
    Unusable for others. hints: a sentence on some of these, by name."""
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
            hint = f" {hints[one.name]}" if one.name in hints else ""
            fix = f"Fix: ask only for {', '.join(arguments)}{column}"
            raise Unusable(f"`{name}` asks for `{one.name}`, which is not given.{hint} {fix}")
    return arguments if any(one.kind is one.VAR_KEYWORD for one in parameters) else tuple(names)


def one_line(error: BaseException) -> str:
    return cut(" ".join("".join(traceback.format_exception_only(type(error), error)).split()))


def cut(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:297]}..."


def shortened(error: BaseException | None, *callers: str) -> str:
    """Returns the first lines of a traceback, without those of this file and of `callers`, which called the user's
    code."""
    if error is None:
        return ""
    begin = error.__traceback__
    while begin is not None and begin.tb_frame.f_code.co_filename in (__file__, *callers):
        begin = begin.tb_next
    lines = "".join(traceback.format_exception(type(error), error, begin)).splitlines()
    left = [f"... {len(lines) - _TRACEBACK_LINES} lines"] if len(lines) > _TRACEBACK_LINES else []
    # The last line names the error.
    kept = lines if not left else [*lines[: _TRACEBACK_LINES - 1], *left, lines[-1]]
    return "\n".join(kept)[:_CHARACTERS]
