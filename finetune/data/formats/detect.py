"""Detects the format of rows by reading them, and the closest format for a row that fits none."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from finetune.data.formats.converters import FORMATS, READ_BY_MANY, check_columns, read
from finetune.data.formats.values import LISTED, Misfit, Row, closest, first_names, kind, names
from finetune.data.samples import BadRow, Sample
from finetune.errors import UserError

HEAD_ROWS = 100  # looked at
TRAINED = tuple(name for name in FORMATS if name != "prompt")  # formats with something to train on

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
        own = set(FORMATS[self.format].fields) - set(self.columns)
        return {column for column in present if column in own} | set(self.columns.values())

    @property
    def required(self) -> list[str]:
        """Returns the columns of the required fields."""
        return [self.columns.get(field, field) for field in FORMATS[self.format].required]

    @property
    def content(self) -> str:
        """Describes the required columns: column `text` holds text."""
        several = len(self.required) > 1
        verb = "hold" if several else "holds"
        return f"column{'s' * several} {names(self.required)} {verb} {FORMATS[self.format].content}"


def parse_row(row: Row, format: str, columns: Columns | None = None, prompts: bool = False) -> Sample:
    """Returns the sample in a row of `format`, with `columns` naming the file's column for a field of the format.

    prompts: see `read`.
    Raises BadRow; for a row that is not of this format at all it names the one that fits, or comes nearest.
    """
    try:
        return read(row, format, columns, prompts)
    except Misfit as error:
        others = [one for one in _candidates(list(row), {}) if one[0] != format and not FORMATS[one[0]].if_taken]
        for other, others_columns in sorted(others, key=lambda one: FORMATS[one[0]].rank):
            if not isinstance(_read_or_problem(row, other, others_columns), BadRow):
                hint = f"; the row looks like format `{other}`{_with_columns(others_columns)}"
                break
        else:
            nearest, why = nearest_format(row)
            hint = f"; format `{nearest}` comes nearest, but: {why}" if nearest != format else ""
        raise BadRow(f"format `{format}`: {error}{hint}") from None
    except BadRow as error:
        raise BadRow(f"format `{format}`: {error}") from None


def detect_format(rows: Sequence[Row], columns: Columns | None = None, formats: Collection[str] = TRAINED) -> Detected:
    """Returns the format of the first rows of a source; `columns` (field: column) are the recipe's and narrow the
    choice.

    formats: those of the objective. Others are detected, too, to refuse them by name, except those that read
    another format's rows: `prompt`, `completion` and `label` are `unpaired` only if an objective asks.

    A format that reads at least half of the rows is possible (the others are bad rows of it), else the one that reads
    most. Of the possible ones the lowest `rank` is meant; among equals one that reads more columns, then one that
    needs no other names.
    Raises UserError, without a place, if no format fits, or if two do that would train different text.
    """
    check_columns("auto", columns)
    rows = rows[:HEAD_ROWS]
    if not rows:
        raise UserError("there are no rows to tell the format from. Fix: set `format`")
    present = list(dict.fromkeys(str(name) for row in rows for name in row))
    fits = []
    for format, its_columns in _candidates(present, columns or {}):
        if format in formats or not FORMATS[format].if_taken:
            results = {i: _read_or_problem(row, format, its_columns, "prompt" in formats) for i, row in enumerate(rows)}
            if samples := {i: one for i, one in results.items() if not isinstance(one, BadRow)}:
                fits.append(_Fit(format, its_columns, samples, is_named=its_columns == (columns or {})))
    most = max((len(fit.samples) for fit in fits), default=0)
    possible = [fit for fit in fits if len(fit.samples) >= min(most, len(rows) / 2)]
    if not possible:
        raise UserError(_nothing_fits(rows[0], columns))
    lowest = min(FORMATS[fit.format].rank for fit in possible)
    rivals = [fit for fit in possible if FORMATS[fit.format].rank == lowest]
    rivals = [fit for fit in rivals if not any(fit.used(present) < other.used(present) for other in rivals)]
    rivals = [fit for fit in rivals if fit.is_named] or rivals
    best = rivals[0]
    for other in rivals[1:]:
        if any(best.samples[i] != other.samples[i] for i in best.samples.keys() & other.samples.keys()):
            both = " and ".join(f"`{fit.format}`{_with_columns(fit.columns)} ({fit.content})" for fit in (best, other))
            raise UserError(f"the rows fit two formats that would train different things: {both}. Fix: set `format`")
    used = best.used(present)
    also = [name for name in present if name in used and name not in best.required]
    unused = [name for name in present if name not in used]
    reason = [best.content]
    reason += [f"also read: {first_names(also)}"] if also else []
    reason += [f"not read: {first_names(unused)}"] if unused else []
    count = len(best.samples)
    reason += [f"{count} of the first {len(rows)} rows fit"] if count < len(rows) else []
    return Detected(best.format, dict(best.columns) or None, "; ".join(reason))


def nearest_format(row: Row, columns: Columns | None = None) -> tuple[str, str]:
    """Returns (the format that a row comes nearest to, why it is not in it); the reason is empty for a row that fits.

    Nearest is a format that knows the row but refuses a value in it; then one whose fields are there under other
    names; then the one with most of its required fields. Raises UserError for `columns` of no format.
    """
    check_columns("auto", columns)
    tries = [
        (format, its_columns, _read_or_problem(row, format, its_columns))
        for format, its_columns in _candidates(list(row), columns or {})
        if not FORMATS[format].if_taken
    ]
    matching = [attempt for attempt in tries if not isinstance(attempt[2], Misfit)]
    if matching:  # by rank those that fit, then those that do not
        format, _, result = min(matching, key=lambda one: (isinstance(one[2], BadRow), FORMATS[one[0]].rank))
        return format, str(result) if isinstance(result, BadRow) else ""
    # A format of one required field that a single column of any name fits; not text, which many would fit.
    one_field = [name for name, one in FORMATS.items() if len(one.required) == 1 and not one.if_taken]
    for name in one_field if not columns else ():
        if name != "text" and (why := _only_column(row, name)):
            return name, why
    best = max(tries, key=lambda one: _nearness(row, one[0], one[1]))
    if not columns and not _nearness(row, *best[:2])[0] and (why := _only_column(row, "text")):
        return "text", why
    return best[0], str(best[2])


def _candidates(present: Sequence[str], columns: Columns) -> Iterator[tuple[str, Columns]]:
    """Yields (format, columns) that could be: each format under its own names, and under others that are all there."""
    for name, format in FORMATS.items():
        if not set(columns) <= set(format.fields):
            continue
        yield name, columns
        for others in format.other_names:
            is_free = not set(others) & set(columns) and not set(others.values()) & set(columns.values())
            if is_free and set(others.values()) <= set(present):
                yield name, {**others, **columns}


def _read_or_problem(row: Row, format: str, columns: Columns, prompts: bool = False) -> Sample | BadRow:
    try:
        return read(row, format, columns, prompts)
    except BadRow as error:
        return error


def _only_column(row: Row, format: str) -> str:
    """Returns the advice to read the only column that fits a format's required field; "" if not exactly one does."""
    (field,) = FORMATS[format].required
    # Without the columns that no format reads: of thousands, each is tried.
    read_too = {name: row[name] for name in (*FORMATS[format].fields, *READ_BY_MANY) if name in row}
    fitting = [
        column
        for column, value in row.items()
        if not isinstance(_read_or_problem({**read_too, column: value}, format, {field: column}), BadRow)
    ]
    if len(fitting) != 1:
        return ""
    return (
        f"no column `{field}`; column {names(fitting)} would fit: set `format: {format}` and "
        f"`columns: {{{field}: {fitting[0]}}}`"
    )


def _nearness(row: Row, format: str, columns: Columns) -> tuple[float, int]:
    """Returns (share of the required fields that are there, a name much like one counting half; number of optional
    ones)."""
    required, optional = FORMATS[format].required, FORMATS[format].optional
    points = [1.0 if columns.get(field, field) in row else 0.5 * bool(closest(field, row, 0.75)) for field in required]
    return sum(points) / len(required), sum(columns.get(field, field) in row for field in optional)


# --- messages


def _with_columns(columns: Columns) -> str:
    pairs = ", ".join(f"{field}: {column}" for field, column in columns.items())
    return f" with `columns: {{{pairs}}}`" if pairs else ""


def question_and_answer(row: Row) -> tuple[str, str] | None:
    """Returns the columns of a table of texts that most likely hold them: the first, and the longest of the others."""
    texts = {str(column): value for column, value in row.items() if isinstance(value, str)}
    texts = {
        column: value for column, value in texts.items() if _has_words(value) and not value.startswith(("[{", '{"'))
    }
    if len(texts) < 2:
        return None
    question, *others = texts
    return question, max(others, key=lambda column: len(texts[column]))


_LETTER, _SPACE, _NOT_ASCII = re.compile(r"[^\W\d]"), re.compile(r"\s"), re.compile(r"[^\x00-\x7f]{2}")


def _has_words(text: str) -> bool:
    """Returns whether a text has several words, or a script without spaces; in one pass, for it may have 10 MB."""
    first = _LETTER.search(text)
    space = _SPACE.search(text, first.end()) if first else None
    return bool(space and _LETTER.search(text, space.end())) or _NOT_ASCII.search(text) is not None


def _nothing_fits(row: Row, columns: Columns | None) -> str:
    nearest, why = nearest_format(row, columns)
    if not columns and (pair := question_and_answer(row)):
        question, answer = pair
        why += (
            f"\nIf `{question}` is asked and `{answer}` the answer: `format: prompt_completion` and "
            f"`columns: {{prompt: {question}, completion: {answer}}}`"
        )
    described = []
    for column, value in list(row.items())[:LISTED]:
        content = kind(value)
        if isinstance(value, list) and not value:
            content = "an empty list"
        elif isinstance(value, list):
            first = value[0]
            inside = f" with {names(list(first)[:LISTED])}" if isinstance(first, Mapping) and first else ""
            content = f"a list of {len(value)}, the first {kind(first)}{inside}"
        described.append(f"{names([column])} ({content})")
    more = f" and {len(row) - LISTED} more" if len(row) > LISTED else ""
    return (
        f"no format fits the first row, which has {', '.join(described) + more if row else 'no columns'}. Format "
        f"`{nearest}` comes nearest, but: {why}\n"
        f"The formats are {names(FORMATS)}. Fix: set `format`, and `columns` if fields have other names"
    )
