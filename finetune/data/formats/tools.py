"""Tools that a conversation offers, and the calls of them, in the one form that chat templates take.

    {"type": "function", "id": "call_1", "function": {"name": "weather", "arguments": {"city": "Rome"}}}

`arguments` are an object, never its JSON: most templates write them with `tojson`, which would quote a text again.
The form is OpenAI's (https://platform.openai.com/docs/guides/function-calling), but for that.
"""

from __future__ import annotations

import difflib
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
    names,
    shown,
    text,
)
from finetune.data.samples import BadRow

Call = Mapping[str, Any]
Tool = Mapping[str, Any]

STREAMED = ("index",)  # of a call: its number in an answer that came in parts


def only_keys(item: Row, allowed: tuple[str, ...], where: str) -> None:
    """Raises BadRow for a key with a value that is not `allowed`: to leave it out would change what the row says."""
    for key, value in item.items():
        if key not in allowed and has_value(value):
            close = difflib.get_close_matches(str(key), allowed, n=1, cutoff=0.7)
            hint = f"; did you mean `{close[0]}`?" if close else ""
            raise BadRow(
                f"{where} has {names([key])} ({shown(value)}), which is not supported and cannot be left out without "
                f"changing the row{hint}"
            )


def tool_calls(value: Any, where: str, *, is_text: bool = False) -> tuple[Call, ...]:
    """The calls of one answer: a list, or the JSON of one; null and empty are none."""
    is_text = is_text or isinstance(value, str)
    calls = tuple(_call(item, f"{where}[{i}]", is_text) for i, item in enumerate(json_list(value, where, "calls")))
    ids = [call["id"] for call in calls if "id" in call]
    for i in range(1, len(ids)):
        if ids[i] in ids[:i]:
            raise BadRow(f"{where} has two calls of the id {shown(ids[i])}; their answers could not be told apart")
    return calls


def _call(value: Any, where: str, is_text: bool) -> Call:
    """One call: OpenAI's form, or {"name", "arguments"} alone."""
    call = mapping(value, where, "a call with `function`")
    if (type_ := call.get("type")) not in (None, "function"):
        raise BadRow(f"{where}.type is {shown(type_)}; expected 'function'")
    if has_value(call.get("function")):
        only_keys(call, ("type", "id", "function", *STREAMED), where)
        function = called(call["function"], f"{where}.function", is_text=is_text)
    else:
        only_keys(call, ("type", "id", "name", "arguments", *STREAMED), where)
        function = _name_and_arguments(call, where, is_text)
    id_ = {"id": text(call["id"], f"{where}.id")} if has_value(call.get("id")) else {}
    return {"type": "function", **id_, "function": function}


def called(value: Any, where: str, *, is_text: bool = False) -> dict[str, Any]:
    """{"name", "arguments"} of a call."""
    function = mapping(value, where, "an object with `name` and `arguments`")
    only_keys(function, ("name", "arguments"), where)
    return _name_and_arguments(function, where, is_text)


def _name_and_arguments(function: Row, where: str, is_text: bool) -> dict[str, Any]:
    if "name" not in function:
        raise BadRow(f"{where} has no `name`; it has {keys_of(function)}")
    return {
        "name": text(function["name"], f"{where}.name"),
        "arguments": _arguments(function.get("arguments"), f"{where}.arguments", is_text),
    }


def _arguments(value: Any, where: str, is_text: bool) -> dict[str, Any]:
    """The object, whether given as such or as JSON; a function without arguments may have none or an empty text."""
    if not has_value(value):
        return {}
    if not isinstance(value, str):
        return json_object(mapping(value, where, "an object, or the JSON of one"), where, is_text=is_text)
    found = from_json(value, where)
    if not isinstance(found, dict):
        raise BadRow(f"{where} is the JSON of {kind(found)} ({shown(value)}); expected that of an object")
    return json_object(found, where, is_text=True)


def calls_of_turn(value: Any, where: str) -> tuple[Call, ...]:
    """The calls in a sharegpt `function_call` turn: the JSON of one call or of a list of them, or these as they are."""
    is_text = isinstance(value, str)
    found = from_json(text(value, where), where) if is_text else value
    calls = tool_calls(found if isinstance(found, list) else [found], where, is_text=is_text)
    if not calls:
        raise BadRow(f"{where} has no call; expected the JSON of one, with `name` and `arguments`")
    return calls


def tools(value: Any, where: str) -> tuple[Tool, ...]:
    """JSON schemas of the functions that may be called: a list, or the JSON of one; null and empty are none."""
    is_text = isinstance(value, str)
    return tuple(_tool(item, f"{where}[{i}]", is_text) for i, item in enumerate(json_list(value, where, "functions")))


def _tool(value: Any, where: str, is_text: bool) -> Tool:
    """{"type": "function", "function": {"name", ...}}; the bare function is wrapped."""
    if isinstance(value, str):
        value, is_text = from_json(value, where), True
    tool = mapping(value, where, "a function with `name` and `parameters`")
    tool = json_object(tool, where, is_text=is_text)
    if (type_ := tool.pop("type", None)) not in (None, "function"):
        raise BadRow(f"{where}.type is {shown(type_)}; expected 'function'")
    is_wrapped = "function" in tool
    inside = f"{where}.function" if is_wrapped else where
    function = mapping(tool["function"] if is_wrapped else tool, inside, "an object with `name`")
    if "name" not in function:
        raise BadRow(f"{inside} has no `name`; it has {keys_of(function)}")
    text(function["name"], f"{inside}.name")
    if has_value(function.get("parameters")):
        mapping(function["parameters"], f"{inside}.parameters", "a JSON schema (an object)")
    return {"type": "function", **(tool if is_wrapped else {"function": tool})}
