"""Values of a row: how messages show them, and checks of texts, numbers, lists and JSON."""

from __future__ import annotations

import difflib
import json
import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from finetune.data.samples import BadRow
from finetune.utils import no_constant

Row = Mapping[str, Any]

SHOWN = 60  # characters of a value in a message
LISTED = 12  # columns in a message


class Misfit(BadRow):
    """The row is not of this format at all; any other BadRow has the format, but cannot be used."""


class Struct(dict[str, Any]):
    """A struct of a table (parquet, arrow) with nulls: its file gives it every key that any of its rows has, so a null
    may stand for a key that this row never had."""


# --- values in messages


_KINDS = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "text",
    list: "a list",
    tuple: "a list",
}
_SHORT = reprlib.Repr()  # looks only at the beginning of large values, and not into deeply nested ones
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict, _SHORT.maxstring, _SHORT.maxother = 3, 3, 3, SHOWN, SHOWN


def kind(value: Any) -> str:
    """Returns the kind of a value: text, a number, a list, an object, null."""
    return "an object" if isinstance(value, Mapping) else _KINDS.get(type(value), type(value).__name__)


def shown(value: Any) -> str:
    """Returns a short representation of a value."""
    representation = _SHORT.repr(value)
    return representation if len(representation) <= SHOWN else f"{representation[: SHOWN - 3]}..."


def names(items: Iterable[Any]) -> str:
    """Returns `a`, `b`."""
    return ", ".join(f"`{name if len(str(name)) <= SHOWN else str(name)[: SHOWN - 3] + '...'}`" for name in items)


def first_names(items: Sequence[Any]) -> str:
    """Returns the first dozen names, and the number of the others."""
    return names(items[:LISTED]) + (f" and {len(items) - LISTED} more" if len(items) > LISTED else "")


def columns_of(row: Row) -> str:
    return f"the columns {first_names(list(row))}" if row else "no columns"


def keys_of(item: Row) -> str:
    """Returns the first dozen keys of an object in a row."""
    return names(list(item)[:LISTED]) or "nothing"


def closest(name: object, choices: Iterable[object], cutoff: float = 0.6) -> str | None:
    """Returns the choice that is spelled most like `name`, if any is."""
    return _closest(str(name), tuple(map(str, choices)), cutoff)


@lru_cache(256)  # the rows of a table have the same columns, of which there may be thousands
def _closest(name: str, choices: tuple[str, ...], cutoff: float) -> str | None:
    return next(iter(difflib.get_close_matches(name, choices, n=1, cutoff=cutoff)), None)


# --- checks


def has_value(value: Any) -> bool:
    """Returns whether a key has a value. Parquet gives every struct all keys, null if a row has no value."""
    if value is None:
        return False
    return not isinstance(value, (str, list, tuple, Mapping)) or len(value) > 0  # `|` would build a type in each call


def text(value: Any, where: str, *, may_be_blank: bool = False) -> str:
    """Returns a text that UTF-8 can encode; JSON can have half of a surrogate pair."""
    if not isinstance(value, str):
        raise BadRow(f"{where} is {kind(value)}; expected text")
    if not may_be_blank and not value.strip():
        raise BadRow(f"{where} is empty; expected text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _unpaired_surrogate(error, where) from None
    return value


def optional_text(value: Any, where: str) -> str:
    """Returns "" if the value is absent, null or empty."""
    return text(value, where) if has_value(value) else ""


def _unpaired_surrogate(error: UnicodeEncodeError, where: str) -> BadRow:
    character = error.object[error.start]
    return BadRow(f"{where} contains an unpaired surrogate {character!a} at character {error.start}; write it whole")


def number(value: Any, where: str) -> float:
    """Returns a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadRow(f"{where} is {shown(value)}; expected a number")
    return float(value)


def mapping(value: Any, where: str, expected: str) -> Row:
    """Returns an object; `expected` describes it."""
    if not isinstance(value, Mapping):
        raise BadRow(f"{where} is {kind(value)} ({shown(value)}); expected {expected}")
    return value


def only_keys(item: Row, allowed: tuple[str, ...], where: str) -> None:
    """Raises BadRow for a key with a value that is not `allowed`: leaving it out would change the row's meaning."""
    for key, value in item.items():
        if key not in allowed and has_value(value):
            close = closest(key, allowed, cutoff=0.7)
            raise BadRow(
                f"{where} has {names([key])} ({shown(value)}), which is not supported and cannot be left out without "
                f"changing the row{f'; did you mean `{close}`?' if close else ''}"
            )


# --- JSON inside of rows


def from_json(value: str, where: str) -> Any:
    """Returns the value of a JSON text."""
    try:
        return json.loads(value, parse_constant=no_constant)
    except json.JSONDecodeError as error:
        near = shown(value[max(0, error.pos - 20) : error.pos + 20])
        raise BadRow(
            f"{where} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}, near {near}"
        ) from None
    except (ValueError, RecursionError) as error:  # a number of too many digits, NaN, nested too deeply
        raise BadRow(f"{where} is JSON that cannot be read: {error}") from None


def json_object(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns an object that a template can write as JSON, without the nulls of a table's structs: the model would be
    trained to write arguments that no row has. Any other null was meant, and stays."""
    try:
        plain = _without_padding(value)
        json.dumps(plain, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise _unpaired_surrogate(error, where) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRow(f"{where} cannot be written as JSON: {error}") from None
    return plain


def _without_padding(value: Any) -> Any:
    if isinstance(value, Mapping):
        is_padded = isinstance(value, Struct)
        return {key: _without_padding(item) for key, item in value.items() if item is not None or not is_padded}
    return [_without_padding(item) for item in value] if isinstance(value, list) else value


def json_list(value: Any, where: str, items: str) -> Sequence[Any]:
    """Returns a list, or the list in a JSON text; [] for null and an empty text."""
    if not has_value(value):
        return []
    decoded = from_json(value, where) if isinstance(value, str) else value
    if not isinstance(decoded, list):
        raise BadRow(f"{where} is {kind(decoded)} ({shown(decoded)}); expected a list of {items}")
    return decoded
