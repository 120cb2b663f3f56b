"""Detects the format of rows by reading them, and the closest format for a row that fits none."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.data.formats.converters import FIELDS, FORMATS, check_columns, read
from finetune.data.formats.values import LISTED, Misfit, Row, has_value, kind, names
from finetune.data.samples import BadRow, Sample
from finetune.errors import UserError

HEAD_ROWS = 100  # looked at

Columns = Mapping[str, str]  # field of a format: column of the rows


@dataclass(frozen=True)
class Detected:
    """The format that `format: auto` resolves to."""

    format: str
    columns: Columns | None  # None if every field has its own name
    reason: str  # one line, such as "column `messages` holds lists of role and content"


@dataclass(frozen=True)
class _Fit:
    """A format, under names of its fields, that reads some of the rows."""

    format: str
    columns: Columns
    samples: dict[int, Sample]  # by row
    is_named: bool  # no other names than the recipe's and the format's own

    def used(self, present: Sequence[str]) -> set[str]:
        """Returns the columns that it reads."""
        own = set(FIELDS[self.format].all) - set(self.columns)
        return {column for column in present if column in own} | set(self.columns.values())


def parse_row(row: Row, format: str, columns: Columns | None = None) -> Sample:
    """The sample in a row of `format`, with `columns` naming the file's column for a field of the format.

    Raises BadRow; for a row that is not of this format at all it names the one that fits, or comes nearest.
    """
    try:
        return read(row, format, columns)
    except Misfit as error:
        raise BadRow(f"format `{format}`: {error}{hint(row, format)}") from None
    except BadRow as error:
        raise BadRow(f"format `{format}`: {error}") from None


def detect_format(
    rows: Sequence[Row], columns: Columns | None = None, formats: Collection[str] = tuple(FORMATS)
) -> Detected:
    """The format of the first rows of a source; `columns` (field: column) are the recipe's and narrow the choice.

    formats: those of the objective. Others are detected, too, to refuse them by name, except those that read
    another format's rows with a label: `prompt`, `completion` and `label` are `unpaired` only if an objective asks.

    A format that reads at least half of the rows is possible (the others are bad rows of it), else the one that reads
    most. Of the possible ones the lowest `rank` is meant; among equals one that reads more columns, then one that
    needs no other names.
    Raises UserError, without a place, if no format fits, or if two do that would train different text.
    """
    check_columns("auto", columns)
    rows = rows[:HEAD_ROWS]
    if not rows:
        raise UserError("there are no rows to tell the format from")
    present = list(dict.fromkeys(str(name) for row in rows for name in row))
    fits = [
        fit
        for fit in _fits(rows, present, columns or {})
        if fit.format in formats or not FIELDS[fit.format].is_labelled
    ]
    most = max((len(fit.samples) for fit in fits), default=0)
    possible = [fit for fit in fits if len(fit.samples) >= min(most, len(rows) / 2)]
    if not possible:
        raise UserError(_nothing_fits(rows[0], columns))
    lowest = min(FIELDS[fit.format].rank for fit in possible)
    rivals = [fit for fit in possible if FIELDS[fit.format].rank == lowest]
    rivals = [fit for fit in rivals if not any(fit.used(present) < other.used(present) for other in rivals)]
    rivals = [fit for fit in rivals if fit.is_named] or rivals
    _check_unambiguous(rivals)
    best = rivals[0]
    return Detected(best.format, dict(best.columns) or None, _reason(best, present, len(rows)))


def nearest_format(row: Row, columns: Columns | None = None) -> tuple[str, str]:
    """(the format that a row comes nearest to, why it is not in it); the reason is empty for a row that fits.

    Nearest is a format that knows the row but refuses a value in it; then one whose fields are there under other
    names; then the one with most of its required fields. Raises UserError for `columns` of no format.
    """
    check_columns("auto", columns)
    tries = [
        (format, mapping, _problem(row, format, mapping))
        for format, mapping in _candidates(list(row), columns or {})
        if not FIELDS[format].is_labelled
    ]
    known = [tried for tried in tries if not isinstance(tried[2], Misfit)]
    if known:  # by rank those that fit, then those that do not
        format, _, problem = min(known, key=lambda tried: (tried[2] is not None, FIELDS[tried[0]].rank))
        return format, str(problem or "")
    # A format of one required field that a single column of any name fits; not text, which many would fit.
    one_field = [
        f for f, fields in FIELDS.items() if len(fields.required) == 1 and f != "text" and not fields.is_labelled
    ]
    if not columns and (fitting := next(filter(None, (_as_single_field(row, format) for format in one_field)), None)):
        return fitting
    best = max(tries, key=lambda tried: _nearness(row, tried[0], tried[1]))
    if not columns and not _nearness(row, *best[:2])[0] and (fitting := _as_single_field(row, "text")):
        return fitting
    return best[0], str(best[2])


def looks_like(row: Row, but_not: str | None = None) -> tuple[str, Columns] | None:
    """The format that a row fits, with the names of its fields there, or None."""
    candidates = [
        (format, columns)
        for format, columns in _candidates(list(row), {})
        if format != but_not and not FIELDS[format].is_labelled
    ]
    candidates.sort(key=lambda candidate: FIELDS[candidate[0]].rank)
    return next((candidate for candidate in candidates if _problem(row, *candidate) is None), None)


def hint(row: Row, format: str) -> str:
    """Returns the end of a message on a row that is not of `format`: the one that it fits, or comes nearest to."""
    if fitting := looks_like(row, but_not=format):
        return f"; the row looks like format `{fitting[0]}`{_describe_mapping(fitting[1])}"
    nearest, why = nearest_format(row)
    return f"; format `{nearest}` comes nearest, but: {why}" if nearest != format else ""


# --- candidates


def _candidates(present: Sequence[str], columns: Columns) -> Iterator[tuple[str, Columns]]:
    """(format, columns) that could be: each format under its own names, and under others that are all there."""
    for format, fields in FIELDS.items():
        if not set(columns) <= set(fields.all):
            continue
        yield format, columns
        for others in fields.other_names:
            is_free = not set(others) & set(columns) and not set(others.values()) & set(columns.values())
            if is_free and set(others.values()) <= set(present):
                yield format, {**others, **columns}


def _fits(rows: Sequence[Row], present: Sequence[str], columns: Columns) -> list[_Fit]:
    fits = []
    for format, mapping in _candidates(present, columns):
        samples = {i: sample for i, row in enumerate(rows) if (sample := _sample(row, format, mapping)) is not None}
        if samples:
            fits.append(_Fit(format, mapping, samples, is_named=mapping == columns))
    return fits


def _sample(row: Row, format: str, columns: Columns) -> Sample | None:
    try:
        return read(row, format, columns)
    except BadRow:
        return None


def _problem(row: Row, format: str, columns: Columns) -> BadRow | None:
    try:
        read(row, format, columns)
    except BadRow as error:
        return error
    return None


# --- nearness


def _as_single_field(row: Row, format: str) -> tuple[str, str] | None:
    (field,) = FIELDS[format].required
    fitting = [column for column in row if _sample(row, format, {field: column}) is not None]
    if len(fitting) != 1:
        return None
    return format, (
        f"no column `{field}`; column {names(fitting)} would fit: set `format: {format}` and "
        f"`columns: {{{field}: {fitting[0]}}}`"
    )


def _nearness(row: Row, format: str, columns: Columns) -> tuple[float, int]:
    """(share of the required fields that are there, a name much like one counting half; number of optional ones)"""
    required = FIELDS[format].required
    present = [str(column) for column in row]
    much_like = {field for field in required if difflib.get_close_matches(field, present, n=1, cutoff=0.75)}
    points = [1.0 if columns.get(field, field) in row else 0.5 * (field in much_like) for field in required]
    optional = sum(columns.get(field, field) in row for field in FIELDS[format].optional)
    return sum(points) / len(required), optional


# --- messages


def _check_unambiguous(rivals: list[_Fit]) -> None:
    """Raises UserError if two formats are equally likely and read the same row differently."""
    first = rivals[0]
    for other in rivals[1:]:
        both = first.samples.keys() & other.samples.keys()
        if any(first.samples[i] != other.samples[i] for i in both):
            fits = " and ".join(
                f"`{fit.format}`{_describe_mapping(fit.columns)} ({_describe_columns(fit)})" for fit in (first, other)
            )
            raise UserError(f"the rows fit two formats that would train different things: {fits}; set `format`")


def _reason(fit: _Fit, present: Sequence[str], count: int) -> str:
    """One line: the detected format, and the columns that are not read."""
    used = fit.used(present)
    required = {fit.columns.get(field, field) for field in FIELDS[fit.format].required}
    also, unused = [name for name in present if name in used - required], [n for n in present if n not in used]
    parts = [
        _describe_columns(fit),
        f"also read: {_some(also)}" if also else "",
        f"not read: {_some(unused)}" if unused else "",
        f"{len(fit.samples)} of the first {count} rows fit" if len(fit.samples) < count else "",
    ]
    return "; ".join(part for part in parts if part)


def _some(columns: list[str]) -> str:
    more = f" and {len(columns) - LISTED} more" if len(columns) > LISTED else ""
    return names(columns[:LISTED]) + more


def _describe_columns(fit: _Fit) -> str:
    fields = FIELDS[fit.format]
    columns = [fit.columns.get(field, field) for field in fields.required]
    return f"column{'s' * (len(columns) > 1)} {names(columns)} hold{'s' * (len(columns) == 1)} {fields.content}"


def _describe_mapping(columns: Columns) -> str:
    pairs = ", ".join(f"{field}: {column}" for field, column in columns.items())
    return f" with `columns: {{{pairs}}}`" if pairs else ""


def question_and_answer(row: Row) -> tuple[str, str] | None:
    """Returns the columns of a table of texts that most likely hold them: the first, and the longest of the others."""
    texts = {
        str(column): value for column, value in row.items() if isinstance(value, str) and re.search("[^\\W\\d]", value)
    }
    if len(texts) < 2:
        return None
    asked, *others = texts
    return asked, max(others, key=lambda column: len(texts[column]))


def _nothing_fits(row: Row, columns: Columns | None) -> str:
    nearest, why = nearest_format(row, columns)
    if not columns and (pair := question_and_answer(row)):
        asked, answer = pair
        why += (
            f"\nIf `{asked}` is asked and `{answer}` the answer: `format: prompt_completion` and "
            f"`columns: {{prompt: {asked}, completion: {answer}}}`"
        )
    return (
        f"no format fits the first row, which has {_describe_row(row)}; format `{nearest}` comes nearest, but: {why}\n"
        f"The formats are {names(FORMATS)}; set `format`, and `columns` where fields have other names."
    )


def _describe_row(row: Row) -> str:
    """The columns and their contents."""
    described = [f"{names([column])} ({_describe_value(value)})" for column, value in list(row.items())[:LISTED]]
    more = f" and {len(row) - LISTED} more" if len(row) > LISTED else ""
    return ", ".join(described) + more if described else "no columns"


def _describe_value(value: Any) -> str:
    if not isinstance(value, list):
        return kind(value)
    if not has_value(value):
        return "an empty list"
    first = value[0]
    inside = f" with {names(list(first)[:LISTED])}" if isinstance(first, Mapping) and first else ""
    return f"a list of {len(value)}, the first {kind(first)}{inside}"
