"""What a row of a dataset says, whatever its columns are called.

A format is one plain function from a row (a dict) to a sample, one row in `FIELDS` and one in `FORMATS`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from finetune.data.samples import BadRow, Conversation, Message, PromptCompletion, Sample, Text
from finetune.errors import UserError

Row = Mapping[str, Any]


ROLES = ("system", "user", "assistant")
SHAREGPT_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
# Keys that would change what is trained or rendered: to ignore them would train on something else than the file says.
UNSUPPORTED = ("tool_calls", "train", "weight")  # of a message
UNSUPPORTED_COLUMNS = ("tools",)  # of a row


def messages(row: Row) -> Sample:
    """messages: [{role: system | user | assistant, content: ...}, ...]"""
    _refuse(row, UNSUPPORTED_COLUMNS, "the row")
    return _conversation(_messages(_field(row, "messages"), "messages"))


def sharegpt(row: Row) -> Sample:
    """conversations: [{from: system | human | gpt, value: ...}, ...]"""
    turns = _list(_field(row, "conversations"), "conversations")
    return _conversation([_sharegpt_message(turn, f"conversations[{i}]") for i, turn in enumerate(turns)])


def alpaca(row: Row) -> Sample:
    """instruction, output; optional input (below the instruction, after an empty line) and system"""
    system, extra = _optional_text(row, "system"), _optional_text(row, "input")
    instruction, output = _text_field(row, "instruction"), _text_field(row, "output")
    question = f"{instruction}\n\n{extra}" if extra else instruction
    start = (Message("system", system),) if system else ()
    return _conversation([*start, Message("user", question), Message("assistant", output)])


def prompt_completion(row: Row) -> Sample:
    """prompt and completion, both text or both lists of messages; only the completion is trained"""
    prompt, completion = _field(row, "prompt"), _field(row, "completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        return PromptCompletion(_text_field(row, "prompt"), _text_field(row, "completion"))
    if not isinstance(prompt, list) or not isinstance(completion, list):
        raise BadRow(
            f"`prompt` is {_kind(prompt)} and `completion` {_kind(completion)}; expected text for both, "
            "or a list of messages for both"
        )
    before, after = _messages(prompt, "prompt"), _messages(completion, "completion")
    if not any(message.role == "assistant" for message in after):
        raise BadRow("`completion` has no assistant message, so there is nothing to train on")
    return _conversation([*(replace(message, train=False) for message in before), *after])


def text(row: Row) -> Sample:
    """text"""
    return Text(_text_field(row, "text"))


FORMATS: dict[str, Callable[[Row], Sample]] = {
    "messages": messages,
    "sharegpt": sharegpt,
    "alpaca": alpaca,
    "prompt_completion": prompt_completion,
    "text": text,
}

# Every field of a format: the valid keys of `columns`.
FIELDS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "input", "output", "system"),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}


def check_columns(format: str, columns: Mapping[str, str] | None) -> None:
    """Raises UserError for a key of `columns` that the format has no field for."""
    for name in columns or {}:
        if name not in FIELDS[format]:
            close = difflib.get_close_matches(name, FIELDS[format], n=1, cutoff=0.5)
            hint = f"did you mean `{close[0]}`?" if close else f"its fields are {_names(FIELDS[format])}"
            raise UserError(
                f"columns: format `{format}` has no field `{name}`; {hint} (`columns` is written as field: column)"
            )


def parse_row(row: Row, format: str, columns: Mapping[str, str] | None = None) -> Sample:
    """The sample in a row of `format`, with `columns` naming the file's column for a field of the format.

    Raises BadRow, which also names another format that the row would fit.
    """
    try:
        return FORMATS[format](_renamed(row, columns or {}))
    except BadRow as error:
        other = looks_like(row, but_not=format)
        hint = f"; the row looks like format `{other}`" if other else ""
        raise BadRow(f"format `{format}`: {error}{hint}") from None


def looks_like(row: Row, but_not: str | None = None) -> str | None:
    """The first format that the row fits as it is, or None."""
    for name, read in FORMATS.items():
        if name != but_not:
            try:
                read(row)
            except BadRow:
                continue
            return name
    return None


def _renamed(row: Row, columns: Mapping[str, str]) -> Row:
    missing = [column for column in columns.values() if column not in row]
    if missing:
        raise BadRow(f"`columns` names {_names(missing)}, but the row has {_columns(row)}")
    return {**row, **{field: row[column] for field, column in columns.items()}}


def _field(row: Row, name: str) -> Any:
    if name not in row:
        close = difflib.get_close_matches(name, list(row), n=1)
        hint = f"set `columns: {{{name}: {close[0] if close else '<your column>'}}}` if it has another name"
        raise BadRow(f"no column `{name}`; the row has {_columns(row)}; {hint}")
    return row[name]


def _text_field(row: Row, name: str) -> str:
    return _text(_field(row, name), f"`{name}`")


def _optional_text(row: Row, name: str) -> str:
    """An absent, null or empty field is an empty text; anything else that is not text is an error."""
    value = row.get(name)
    return "" if value is None or value == "" else _text(value, f"`{name}`")


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise BadRow(f"{where} is {_kind(value)}; expected text")
    if not value.strip():
        raise BadRow(f"{where} is empty; expected text")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, UTF-8 cannot
        raise BadRow(
            f"{where} has half a character ({value[error.start]!a}) at {error.start}; write it whole"
        ) from None
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise BadRow(f"`{where}` is {_kind(value)}; expected a list of messages")
    if not value:
        raise BadRow(f"`{where}` is an empty list; expected at least a user and an assistant message")
    return value


def _messages(value: Any, where: str) -> list[Message]:
    return [_message(item, f"{where}[{i}]") for i, item in enumerate(_list(value, where))]


def _message(item: Any, where: str) -> Message:
    role, content = _pair(item, "role", "content", where)
    if role not in ROLES:
        raise BadRow(f"{where}.role is {role!r}; expected system, user or assistant")
    return Message(role, _text(content, f"{where}.content"))


def _sharegpt_message(item: Any, where: str) -> Message:
    speaker, value = _pair(item, "from", "value", where)
    role = SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise BadRow(f"{where}.from is {speaker!r}; expected system, human or gpt")
    return Message(role, _text(value, f"{where}.value"))


def _pair(item: Any, first: str, second: str, where: str) -> tuple[Any, Any]:
    """The two values that make a message."""
    if not isinstance(item, Mapping):
        raise BadRow(f"{where} is {_kind(item)}; expected an object with `{first}` and `{second}`")
    _refuse(item, UNSUPPORTED, where)
    missing = [key for key in (first, second) if key not in item]
    if missing:
        raise BadRow(f"{where} has no {_names(missing)}; it has {_columns(item)}")
    return item[first], item[second]


def _refuse(item: Row, keys: tuple[str, ...], where: str) -> None:
    for key in keys:
        if item.get(key) not in (None, [], ""):
            raise BadRow(f"{where} has `{key}`, which is not supported and cannot be left out without changing the row")


def _conversation(turns: list[Message]) -> Conversation:
    """Checks the order of roles: system only first, then user and assistant in turn."""
    start = 1 if turns[0].role == "system" else 0
    for i, message in enumerate(turns[start:]):
        expected = ("user", "assistant")[i % 2]
        if message.role != expected:
            after = f"after {turns[start + i - 1].role}" if start + i else "first"
            raise BadRow(f"message {start + i} ({after}) is from {message.role}; expected {expected}")
    if not any(message.role == "assistant" for message in turns):
        raise BadRow("no assistant message, so there is nothing to train on")
    return Conversation(tuple(turns))


_KINDS = {dict: "an object", list: "a list", bool: "true or false", int: "a number", float: "a number", str: "text"}


def _kind(value: Any) -> str:
    return "null" if value is None else _KINDS.get(type(value), type(value).__name__)


def _columns(row: Row) -> str:
    return f"the columns {_names(list(row)[:12])}" if row else "no columns"


def _names(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)
