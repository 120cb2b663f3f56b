"""Roles of a table's columns: which one is the prompt, which the answer, by names and content, and how sure that is."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from finetune.data.formats.converters import FORMATS, WINNERS, check_columns
from finetune.data.formats.detect import detect_format, parse_row
from finetune.data.formats.values import Row, names
from finetune.data.samples import BadRow
from finetune.desk.setup.column_names import (
    are_speakers,
    best_role,
    is_instruction,
    is_options,
    may_be_people,
    score,
    side,
    words,
)
from finetune.desk.setup.columns import NEARLY_ALL, Column, columns_of_table
from finetune.errors import UserError

SHOWN_COLUMNS = 12  # in a question or message


@dataclass(frozen=True)
class RoleChoice:
    """A format and the columns of its fields."""

    format: str
    columns: dict[str, str] | None  # field: column, if it has another name
    reason: str
    doubts: tuple[str, ...] = ()  # why this is a guess; empty if it is none

    @property
    def fields(self) -> dict[str, str]:
        """Returns the column of each required field, and of those that `columns` names."""
        return {**{name: name for name in FORMATS[self.format].required}, **(self.columns or {})}

    def option(self) -> str:
        """Returns the options of `new` that state this choice: --columns prompt=a,completion=b."""
        pairs = shlex.quote(",".join(f"{field}={column}" for field, column in self.fields.items()))
        return f"--columns {pairs} --format {self.format}"


def choose_columns(
    rows: Sequence[Row], format: str | None = None, columns: Mapping[str, str] | None = None
) -> RoleChoice:
    """Returns the format and columns of rows; of those that are given, all is certain.

    Raises UserError, without a place, if no choice can even be guessed.
    """
    if format and columns:
        return _as_told(rows, format, columns)
    table = columns_of_table(rows)
    try:
        if format is not None:
            return _as_told(rows, format, {})
        detected = detect_format(rows, columns)
    except UserError:
        guess = _by_roles(rows, table, format) if not columns else None
        if guess is None and (json := [one.name for one in table.values() if one.kind == "json"]):
            raise UserError(
                f"{names(json)} holds JSON as text. A format expects its lists. Fix: save the rows as JSON lines, with "
                "the lists in them (pandas: `df[column].map(json.loads)`, then `df.to_json(path, orient='records', "
                "lines=True)`)"
            ) from None
        if guess is None:
            raise
        return guess
    chosen = RoleChoice(detected.format, dict(detected.columns) if detected.columns else None, detected.reason)
    if columns:
        return chosen
    doubts = tuple(_doubts(rows, table, chosen))
    better = _by_roles(rows, table, None) if doubts else None
    if better is not None and (not better.doubts or not all(table[name].is_text for name in chosen.fields.values())):
        return better
    return RoleChoice(chosen.format, chosen.columns, chosen.reason, doubts)


def as_prompts(choice: RoleChoice) -> RoleChoice:
    """Returns the choice for an objective that samples its answers: the only text of rows is the prompt."""
    if choice.format != "text":
        return choice
    column = (choice.columns or {}).get("text", "text")
    columns = None if column == "prompt" else {"prompt": column}
    doubts = () if score(column, "prompt") >= 2 else choice.doubts
    return RoleChoice("prompt", columns, f"`{column}` is the prompt, and answers are sampled", doubts)


def _as_told(rows: Sequence[Row], format: str, columns: Mapping[str, str]) -> RoleChoice:
    """Raises UserError if no row is of the format under these columns."""
    if format not in FORMATS:
        raise UserError(f"--format {format}: no such format. Fix: use one of {', '.join(FORMATS)}")
    check_columns(format, columns)
    problem = ""
    for row in rows:
        try:
            parse_row(row, format, columns)
        except BadRow as error:
            problem = problem or str(error)
        else:
            return RoleChoice(format, dict(columns) or None, "as the command line says")
    fix = "" if "Fix: " in problem else ". Fix: give the format and columns that the rows have, or correct the rows"
    raise UserError(f"{problem}{fix}")


def unused_columns(rows: Sequence[Row], chosen: RoleChoice) -> list[str]:
    """Returns the columns that a format does not read."""
    renamed = chosen.columns or {}
    used = set(renamed.values()) | (set(FORMATS[chosen.format].fields) - set(renamed)) | {"image"}
    return [name for name in dict.fromkeys(str(name) for row in rows for name in row) if name not in used]


# --- doubts about a format that the names of columns fit


_TRAINED = {  # fields that hold what is asked, and what is answered
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": (None, "text"),
    "preference": ("prompt", None),
    "comparison": ("prompt", None),
}


def _doubts(rows: Sequence[Row], table: Mapping[str, Column], chosen: RoleChoice) -> Iterable[str]:
    """Yields what speaks against a choice by names: content that is no text, columns that should not be left out."""
    if chosen.format not in _TRAINED:
        return
    fields = [(chosen.columns or {}).get(field or "", field) for field in _TRAINED[chosen.format]]
    asked, answered = (table.get(field) if field else None for field in fields)
    left = [table[name] for name in unused_columns(rows, chosen)]
    if asked is not None and asked.kind in ("id", "number", "date", "truth") and any(one.is_text for one in left):
        yield f"`{asked.name}` holds {asked.about}"
    if asked is not None and asked.kind == "empty":
        yield f"`{asked.name}` is empty"
    if asked is not None and asked.kind == "constant" and chosen.format != "alpaca":
        yield f"`{asked.name}` is {asked.about}"
    if answered is not None and answered.kind in ("id", "constant", "empty"):
        yield f"`{answered.name}` holds {answered.about}"
    if asked and answered and sum(row.get(asked.name) == row.get(answered.name) for row in rows) > len(rows) / 2:
        yield f"`{asked.name}` and `{answered.name}` are the same"
    if speakers := [one.name for one in left if one.kind == "choice" and are_speakers(one.distinct)]:
        yield f"{names(speakers)} says who speaks, so each row is a message: a row has to hold a whole conversation"
        return
    options = [one for one in left if one.is_text and (len(one.name) == 1 or side(one.name))]
    options += [one for one in left if one.kind == "list" and is_options(one.name)]
    if len(options) > 1 or any(one.kind == "list" for one in options):
        yield f"{names(one.name for one in options)} would be left out, and may be the answers to choose from"
        return
    for one in left:
        role = _role_of(one)
        is_lost = one.is_text and role in ("completion", "chosen", "rejected", "context", "prompt")
        if chosen.format == "text":
            is_answer = role == "completion" and one.kind not in ("id", "constant", "empty")
            is_lost = is_lost or is_answer or (one.is_text and one.sentences > 0.5)
        if is_lost:
            yield f"`{one.name}` would be left out ({one.about})"
        elif role == "label" and one.kind in (("truth", "choice") if chosen.format == "text" else ("truth",)):
            yield f"`{one.name}` would be left out ({one.about}), and may be what is to be learned, or mark bad answers"


# --- formats by the roles of columns


def _by_roles(rows: Sequence[Row], table: Mapping[str, Column], format: str | None) -> RoleChoice | None:
    """Returns the choice by names in several languages and by content; None if nothing looks like text.

    format: the only one to consider.
    """
    finders = (_comparison, _preference, _chat, _classes, _answers, _documents)
    for find in finders:
        choice = find(rows, table)
        if choice is not None and (format is None or choice.format == format):
            said = dict.fromkeys((*choice.doubts, *_doubts(rows, table, choice)))
            longest = [one for one in said if not any(one != other and one in other for other in said)]  # says it too
            return replace(choice, doubts=tuple(longest))
    return None


def _comparison(rows: Sequence[Row], table: Mapping[str, Column]) -> RoleChoice | None:
    """Finds two answers that differ in a last letter or number, and the column that says which is better."""
    sides: dict[str, dict[str, str]] = {}
    for column in table.values():
        if (end := side(column.name)) and column.kind in ("text", "messages", "choice"):
            sides.setdefault(" ".join(words(column.name)[:-1]), {}).setdefault(end, column.name)
    pairs = [(base, pair) for base, pair in sides.items() if len(pair) == 2 and base]
    judges = [one for one in table.values() if score(one.name, "winner") >= 2 and side(one.name) is None]
    judges = [one for one in judges if one.kind not in ("messages", "list", "object", "empty")]
    if len(pairs) != 1 or not judges:
        return None
    winner = max(judges, key=lambda one: score(one.name, "winner"))
    columns = {"answer_a": pairs[0][1]["a"], "answer_b": pairs[0][1]["b"], "winner": winner.name}
    prompt, doubts = _best(table, "prompt", set(columns.values()))
    if prompt is not None:
        columns = {"prompt": prompt.name, **columns}
    known = [
        value
        for value in winner.distinct
        if value.lower().replace(" ", "_") in WINNERS or value.lower().startswith("tie")
    ]
    if len(known) < NEARLY_ALL * len(winner.distinct):
        doubts = [f"`{winner.name}` holds {winner.about}, and `winner` is a or b: write it so"]
    if table[columns["answer_a"]].kind == "messages":
        doubts = [doubt for doubt in doubts if prompt is not None]
    return RoleChoice("comparison", columns, _described(columns), tuple(doubts))


def _preference(rows: Sequence[Row], table: Mapping[str, Column]) -> RoleChoice | None:
    kinds = ("text", "messages", "choice")
    found = {role: _best(table, role, set(), kinds)[0] for role in ("chosen", "rejected")}
    chosen, rejected = found["chosen"], found["rejected"]
    if chosen is None or rejected is None or chosen.name == rejected.name or chosen.kind != rejected.kind:
        return None
    columns = {"chosen": chosen.name, "rejected": rejected.name}
    prompt, doubts = _best(table, "prompt", set(columns.values()))
    if prompt is not None:
        columns = {"prompt": prompt.name, **columns}
    elif chosen.kind == "messages":
        doubts = []
    return RoleChoice("preference", columns, _described(columns), tuple(doubts))


def _chat(rows: Sequence[Row], table: Mapping[str, Column]) -> RoleChoice | None:
    chats = [one for one in table.values() if one.kind == "messages"]
    if not chats:
        return None
    first = next(row[chats[0].name] for row in rows if row.get(chats[0].name))
    format, field = ("sharegpt", "conversations") if "from" in first[0] else ("messages", "messages")
    columns = {field: chats[0].name}
    doubts = [f"several columns hold messages: {names(one.name for one in chats)}"] if len(chats) > 1 else []
    doubts += [
        f"`{one.name}` would be left out" for one in table.values() if _role_of(one) == "completion" and one.is_text
    ]
    return RoleChoice(format, columns, _described(columns), tuple(doubts))


def _classes(rows: Sequence[Row], table: Mapping[str, Column]) -> RoleChoice | None:
    """Finds one text and its label; no name but `label` itself is certain to be meant."""
    texts = [one for one in table.values() if one.is_text]
    labels = [one for one in table.values() if one.kind in ("choice", "truth") and score(one.name, "label") >= 3]
    if len(texts) != 1 or len(labels) != 1 or _role_of(texts[0]) in ("completion",):
        return None
    columns = {"text": texts[0].name, "label": labels[0].name}
    doubt = f"`{labels[0].name}` may be what is to be learned, or only describe `{texts[0].name}`"
    return RoleChoice("classification", columns, _described(columns), (doubt,))


def _answers(rows: Sequence[Row], table: Mapping[str, Column]) -> RoleChoice | None:
    """Finds prompt and completion, or an instruction with its input: by names, else the first text and the longest of
    the others, which is a guess."""
    completion, doubts = _best(table, "completion", set(), ("text", "number", "date", "choice", "json"))
    if completion is not None and completion.kind != "text" and score(completion.name, "completion") < 3:
        completion = None
    doubts = doubts if completion is not None else []  # the guesses below say it
    taken = {completion.name} if completion else set()
    prompt, more = _best(table, "prompt", taken)
    texts = [one for one in table.values() if one.is_text and one.name not in taken]
    if completion is None and len(table) == 2 and len(texts) == 1 and score(texts[0].name, "text") < 3:
        first, second = table.values()  # any content may answer the only text
        if first is texts[0] and second.kind not in ("empty", "constant", "list", "object"):
            completion, doubts = second, [f"no name tells the answer, and `{second.name}` holds {second.about}"]
    if len(texts) < (2 if completion is None else 1 if prompt is None else 0):
        return None
    guesses = []
    if prompt is None:
        prompt = max(texts, key=lambda one: (score(one.name, "prompt"), one.sentences > 0.5))
        guesses.append(f"no name tells the prompt, and `{prompt.name}` is the first text")
    if completion is None:
        others = [one for one in texts if one.name != prompt.name]
        completion = max(others, key=lambda one: (score(one.name, "completion"), one.length))
        guesses.append(f"no name tells the answer, and `{completion.name}` is the longest other text")
    columns = {"prompt": prompt.name, "completion": completion.name}
    context, _ = _best(table, "context", set(columns.values()))
    format = "prompt_completion"
    if context is not None and is_instruction(prompt.name):
        format, columns = "alpaca", {"instruction": prompt.name, "input": context.name, "output": completion.name}
        more = []
    elif any("system" in words(one.name) and one.kind in ("text", "constant", "choice") for one in table.values()):
        system = [one.name for one in table.values() if "system" in words(one.name) and one.kind != "id"]
        columns = {"system": system[0], **columns}
    doubts = [*guesses, *doubts] if guesses else [*doubts, *more]
    return RoleChoice(format, columns, _described(columns), tuple(doubts))


def _documents(rows: Sequence[Row], table: Mapping[str, Column]) -> RoleChoice | None:
    texts = [one for one in table.values() if one.is_text]
    if not texts:
        return None
    best = max(texts, key=lambda one: (score(one.name, "text"), one.length))
    columns = {"text": best.name}
    doubts = (
        []
        if score(best.name, "text") >= 3
        else [f"`{best.name}` is the only text, and its name does not say what it is"]
    )
    return RoleChoice("text", columns, _described(columns), tuple(doubts))


# --- names


def _best(
    table: Mapping[str, Column], role: str, taken: set[str], kinds: Sequence[str] = ("text",)
) -> tuple[Column | None, list[str]]:
    """Returns the column whose name tells a role, and doubts if another one's does as well."""
    scored = {one.name: score(one.name, role) for one in table.values() if one.kind in kinds and one.name not in taken}
    named = {name: score for name, score in scored.items() if score >= 2 and not _is_a_person(table[name])}
    if not named:
        return None, [f"no name tells the {role}"]
    best = max(named, key=lambda name: named[name])
    rivals = [name for name, score in named.items() if name != best and score == named[best]]
    return table[best], [f"{names([best, *rivals])} may all be the {role}"] if rivals else []


def _role_of(column: Column) -> str | None:
    return None if _is_a_person(column) else best_role(column.name)


def _is_a_person(column: Column) -> bool:
    """Returns whether a column names users or agents, by a name that stands for what they say as well."""
    return may_be_people(column.name) and column.sentences < 0.5


def _described(columns: Mapping[str, str]) -> str:
    return ", ".join(f"`{column}` is the {field}" for field, column in columns.items()) + ", by names and content"


# --- what a person is told


def columns_shown(rows: Sequence[Row]) -> list[str]:
    """Returns a line for each of the first columns, with its content."""
    all_names = list(dict.fromkeys(str(name) for row in rows for name in row))
    first = all_names[:SHOWN_COLUMNS]
    table = columns_of_table([{name: row[name] for name in first if name in row} for row in rows])
    more = [f"  and {len(all_names) - SHOWN_COLUMNS} more"] if len(all_names) > SHOWN_COLUMNS else []
    return [f"  `{one.name}`: {one.about}" for one in table.values()] + more


def refusal(rows: Sequence[Row], choice: RoleChoice) -> str:
    """Returns the message for a guess that nobody can be asked about."""
    lines = [
        f"which columns to train on is a guess: {'; '.join(choice.doubts)}. The columns:",
        *columns_shown(rows),
        f"Fix: if this is meant, add: {choice.option()}",
        "Else name the columns that are, such as --columns prompt=COLUMN,completion=COLUMN or --columns text=COLUMN",
    ]
    return "\n".join(lines)
