"""Kinds of a table's columns, by content: ids, numbers, dates, constants and choices are no text to train on."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.data.formats.values import Row

NEARLY_ALL = 0.9  # share of the values that decides a column's kind: tables have some cells of another
FEW_CHOICES = 20  # distinct values of a column of choices, at most
_LONG = 40  # characters: no id or choice has as many on average
_CELLS, _FEWEST_ROWS = 200_000, 20  # whose values are looked at
_LONGEST_VALUE = 1000  # characters; a number or date has fewer, and patterns take the square of a text's length

_NUMBER = re.compile(r"[-+$€£¥(]?\s*\d[\d.,_' ]*\s*[%€$£¥)]?|[-+]?\d*\.?\d+([eE][-+]?\d+)?|n/?a|nan|inf", re.IGNORECASE)
_TIME = r"[T ,]*(\d{1,2}:\d{2}(:\d{2}([.,]\d+)?)?\s*([AaPp]\.?[Mm]\.?|Z|UTC|[-+]\d{2}:?\d{2})?)?"
_DATE = re.compile(
    rf"(\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}|\d{{1,2}}[-/.]\d{{1,2}}[-/.]\d{{2,4}}){_TIME}|\d{{1,2}}:\d{{2}}.*"
)
# One word of a code, an address of mail or the web, or a path: with a digit or a sign that no plain word has.
_ID = re.compile(r"(?=\S*[\d@/:_#\\])[\x21-\x7e]+")
_JSON = re.compile(r"\[\s*[{\[].*|\{\s*\".*", re.DOTALL)
_SENTENCE = re.compile(r"\S+\s+\S+\s+\S.*|.*[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]{4}.*", re.DOTALL)
_TRUTH = frozenset(
    ("true", "false", "yes", "no", "0", "1", "y", "n", "t", "f", "ja", "nein", "oui", "non", "good", "bad")
)


@dataclass(frozen=True)
class Column:
    """A column of a table, by the values of the rows that were read."""

    name: str
    # text | number | date | id | constant | choice | truth | json | empty | messages | list | object
    kind: str
    length: float  # mean characters of its texts
    distinct: tuple[str, ...]  # its values, if they are few; else the first ones
    filled: float  # share of the rows with a value
    sentences: float  # share of its texts with three words, or four characters of a script without spaces

    @property
    def is_text(self) -> bool:
        return self.kind == "text"

    @property
    def about(self) -> str:
        """Describes the content: `T-1001` and others."""
        values = ", ".join(repr(value[:40]) for value in self.distinct[:2])
        kinds = {"number": "numbers", "date": "dates", "id": "ids", "choice": "a few values", "truth": "true or false"}
        if self.kind == "constant":
            return f"nearly always {values.split(', ')[0]}"
        return f"{kinds.get(self.kind, self.kind)}, such as {values}" if values else kinds.get(self.kind, self.kind)


def columns_of_table(rows: Sequence[Row]) -> dict[str, Column]:
    """Returns the columns of rows by name, in their order; of thousands of columns fewer rows are looked at."""
    columns, names = {}, list(dict.fromkeys(str(name) for row in rows for name in row))
    rows = rows[: max(_FEWEST_ROWS, _CELLS // max(len(names), 1))]
    for name in names:
        values = [row[name] for row in rows if row.get(name) is not None]
        texts = [value.strip() for value in values if isinstance(value, str) and value.strip()]
        others = [value for value in values if not isinstance(value, str)]
        if not texts and not others:
            columns[name] = Column(name, "empty", 0.0, (), 0.0, 0.0)
            continue
        counts = Counter(texts or map(str, others))
        first = tuple(list(counts)[:FEW_CHOICES])
        filled = (len(texts) + len(others)) / max(len(rows), 1)
        length = sum(map(len, texts)) / max(len(texts), 1)
        kind = _kind_of_values(others) if len(others) > len(texts) else _kind_of_texts(texts, counts, length)
        if kind not in ("messages", "list", "object") and len(texts or others) > 2:
            most = counts.most_common(1)[0][1] / len(texts or others)
            if len(counts) == 1 or (most >= NEARLY_ALL and len(texts or others) >= 10):
                kind, first = "constant", (counts.most_common(1)[0][0],)
        sentences = sum(_SENTENCE.match(text) is not None for text in texts) / max(len(texts), 1)
        columns[name] = Column(name, kind, length, first, filled, sentences)
    return columns


def _kind_of_values(values: list[Any]) -> str:
    first = values[0]
    if isinstance(first, bool):
        return "truth"
    if isinstance(first, list):
        inside = first[0] if first else None
        is_turn = isinstance(inside, Mapping) and (
            {"role", "content"} <= set(inside) or {"from", "value"} <= set(inside)
        )
        return "messages" if is_turn else "list"
    return "object" if isinstance(first, Mapping | bytes) else "number" if isinstance(first, int | float) else "date"


def _kind_of_texts(texts: list[str], counts: Mapping[str, int], length: float) -> str:
    if len(texts) >= 2 and len(counts) <= 2 and all(text.lower() in _TRUTH for text in counts):
        return "truth"
    for kind, pattern, most in (
        ("number", _NUMBER, _LONGEST_VALUE),
        ("date", _DATE, _LONGEST_VALUE),
        ("json", _JSON, None),
    ):
        if _nearly_all_match(texts, pattern, most):
            return kind
    if length < 4 * _LONG and _nearly_all_match(texts, _ID, _LONGEST_VALUE):
        return "id"
    is_repeated = len(counts) <= min(FEW_CHOICES, len(texts) / 4)
    return "choice" if is_repeated and length < _LONG and len(texts) >= 8 else "text"


def _nearly_all_match(texts: list[str], pattern: re.Pattern[str], most: int | None) -> bool:
    """most: characters; a longer text does not match."""
    matching = len(texts)
    for text in texts:
        if (most is not None and len(text) > most) or pattern.fullmatch(text) is None:
            matching -= 1
            if matching / len(texts) < NEARLY_ALL:
                return False
    return True
