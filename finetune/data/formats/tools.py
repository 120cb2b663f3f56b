"""Tools that a conversation offers, and the calls of them, in the one form that chat templates take.

    {"type": "function", "id": "call_1", "function": {"name": "weather", "arguments": {"city": "Rome"}}}

`arguments` are an object, never its JSON: most templates write them with `tojson`, which would quote a text again.
The form is OpenAI's (https://platform.openai.com/docs/guides/function-calling), except for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from finetune.data.formats.values import (
    Row,
    from_json,
    has_value,
    json_list,
    json_object,
    keys_of,
    kind,
    mapping,
    only_keys,
    shown,
    text,
)
from finetune.data.samples import BadRow

Call = Mapping[str, Any]
Tool = Mapping[str, Any]

STREAMED = ("index",)  # of a call: its number in an answer that came in parts


def read_calls(value: Any, where: str) -> tuple[Call, ...]:
    """Reads the calls of one answer: a list, or the JSON of one; () for null and empty.

    A call has OpenAI's form, or is {"name", "arguments"} alone.
    """
    calls: list[Call] = []
    for i, item in enumerate(json_list(value, where, "calls")):
        place = f"{where}[{i}]"
        call = mapping(item, place, "a call with `function`")
        _check_type(call.get("type"), place)
        if has_value(call.get("function")):
            only_keys(call, ("type", "id", "function", *STREAMED), place)
            function = function_of(call["function"], f"{place}.function")
        else:
            only_keys(call, ("type", "id", "name", "arguments", *STREAMED), place)
            function = _name_and_arguments(call, place)
        id_ = {"id": text(call["id"], f"{place}.id")} if has_value(call.get("id")) else {}
        calls.append({"type": "function", **id_, "function": function})
    ids = [call["id"] for call in calls if "id" in call]
    if twice := next((id_ for i, id_ in enumerate(ids) if id_ in ids[:i]), None):
        raise BadRow(f"{where} has two calls of the id {shown(twice)}; their answers could not be told apart")
    return tuple(calls)


def read_turn_calls(value: Any, where: str) -> tuple[Call, ...]:
    """Reads a sharegpt `function_call` turn: one call, a list of calls, or the JSON of either."""
    decoded = from_json(text(value, where), where) if isinstance(value, str) else value
    calls = read_calls(decoded if isinstance(decoded, list) else [decoded], where)
    if not calls:
        raise BadRow(f"{where} has no call; expected the JSON of one, with `name` and `arguments`")
    return calls


def function_of(value: Any, where: str) -> dict[str, Any]:
    """Reads {"name", "arguments"} of a call."""
    function = mapping(value, where, "an object with `name` and `arguments`")
    only_keys(function, ("name", "arguments"), where)
    return _name_and_arguments(function, where)


def _name_and_arguments(function: Row, where: str) -> dict[str, Any]:
    """The arguments are {} for a function without any, null or an empty text."""
    if "name" not in function:
        raise BadRow(f"{where} has no `name`; it has {keys_of(function)}")
    name, value, place = text(function["name"], f"{where}.name"), function.get("arguments"), f"{where}.arguments"
    if not has_value(value):
        return {"name": name, "arguments": {}}
    if isinstance(value, str):
        decoded = from_json(value, place)
        if not isinstance(decoded, dict):
            raise BadRow(f"{place} is the JSON of {kind(decoded)} ({shown(value)}); expected that of an object")
    else:
        decoded = mapping(value, place, "an object, or the JSON of one")
    return {"name": name, "arguments": json_object(decoded, place)}


def read_tools(value: Any) -> tuple[Tool, ...]:
    """Reads JSON schemas of the functions that may be called: a list, or the JSON of one; () for null and empty.

    A bare function is wrapped: {"type": "function", "function": {"name", ...}}.
    """
    tools: list[Tool] = []
    for i, item in enumerate(json_list(value, "tools", "functions")):
        place = f"tools[{i}]"
        decoded = from_json(item, place) if isinstance(item, str) else item
        tool = json_object(mapping(decoded, place, "a function with `name` and `parameters`"), place)
        _check_type(tool.pop("type", None), place)
        is_wrapped = "function" in tool
        inside = f"{place}.function" if is_wrapped else place
        function = mapping(tool["function"] if is_wrapped else tool, inside, "an object with `name`")
        if "name" not in function:
            raise BadRow(f"{inside} has no `name`; it has {keys_of(function)}")
        text(function["name"], f"{inside}.name")
        if has_value(function.get("parameters")):
            mapping(function["parameters"], f"{inside}.parameters", "a JSON schema (an object)")
        tools.append({"type": "function", **(tool if is_wrapped else {"function": tool})})
    return tuple(tools)


def _check_type(value: Any, where: str) -> None:
    if value not in (None, "function"):
        raise BadRow(f"{where}.type is {shown(value)}; expected 'function'")
