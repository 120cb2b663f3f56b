"""JSON as rows need it: what Python's json lets pass and would change a row's meaning is refused.

NaN and infinite numbers are no JSON (RFC 8259, section 6); of a name that an object has twice Python keeps the later.
"""

from __future__ import annotations

import json
import math
from typing import Any

from finetune.data.samples import BadRow


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRow(f"an object has `{twice[:100]}` twice; only one of the two can be meant")
    return found


class _NotFinite(Exception):
    """Raised where there is no place to name yet."""


def _not_finite(text: str) -> float:
    raise _NotFinite(text)


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _not_finite(text)


STRICT = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_not_finite, parse_float=_finite)
LENIENT = json.JSONDecoder()


def decode_at(text: str, at: int) -> tuple[Any, int]:
    """(value, where it ends) of the JSON that begins at `at`; the value is a BadRow where it is JSON but no row.

    Raises json.JSONDecodeError, and ValueError or RecursionError for what Python's decoder gives up on.
    """
    try:
        value, end = STRICT.raw_decode(text, at)
        return as_row(value), end
    except BadRow as error:
        return error, LENIENT.raw_decode(text, at)[1]
    except _NotFinite as error:
        value, end = LENIENT.raw_decode(text, at)
        place = _place_of_not_finite(value) or "the value"
        return BadRow(f"`{place[:100]}` is {str(error)[:40]}, which is no JSON number; write a number or null"), end


def json_object(line: str, first: bool = False) -> dict[str, Any] | BadRow:
    """The object that a line holds."""
    text = line.rstrip(" \t\r\n")
    start = len(text) - len(text.lstrip(" \t\r\n"))
    try:
        value, end = decode_at(text, start)
        if end < len(text):
            raise json.JSONDecodeError("Extra data", text, end)
    except json.JSONDecodeError as error:
        return BadRow(f"{not_json(error, text)}; {_advice(text, first)}")
    except (RecursionError, ValueError) as error:  # nested without end, a number of thousands of digits
        return BadRow(f"JSON that cannot be read: {str(error)[:200]}")
    if isinstance(value, BadRow) and first and text[start] == "[":
        return BadRow(f"{value}; {_advice(text, first)}")
    return value


def not_json(error: json.JSONDecodeError, text: str) -> str:
    """What is wrong, with a little of the text around it."""
    near = text[max(error.pos - 10, 0) : error.pos + 20]
    return f"not valid JSON: {error.msg} at column {error.colno}" + (f", near {near!a}" if near else "")


def _advice(line: str, first: bool) -> str:
    if "\r" in line:
        return "the file's lines end in carriage returns alone; save it with \\n as line ends"
    if first and line.lstrip().startswith("["):
        return "the file looks like a JSON array: name it .json"
    if line.strip() == "{":
        return "expected one object a line, whole; an array of objects goes into a .json file"
    return "expected one object a line"


def as_row(value: Any) -> dict[str, Any]:
    """Raises BadRow for what is no object."""
    if isinstance(value, dict):
        return value
    # No more than a glimpse: the value may have 10 MB.
    shown = json.dumps(value[:40] if isinstance(value, (str, list)) else value)
    raise BadRow(f"expected an object with columns, got {shown[:40]}")


def _place_of_not_finite(value: Any, place: str = "") -> str | None:
    """`messages[2].score`: where the first number is that is none."""
    if isinstance(value, float) and not math.isfinite(value):
        return place
    if isinstance(value, dict):
        parts = [(f"{place}.{name}" if place else name, item) for name, item in value.items()]
    elif isinstance(value, list):
        parts = [(f"{place}[{i}]", item) for i, item in enumerate(value)]
    else:
        return None
    return next((found for name, item in parts if (found := _place_of_not_finite(item, name)) is not None), None)
