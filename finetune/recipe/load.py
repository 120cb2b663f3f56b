"""Loads a recipe file and overrides into a frozen `Recipe`, or raises one error that lists every problem."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Union

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from finetune.recipe.rules import RULES, Finding, Rule, broken_rules
from finetune.recipe.schema import CHECKPOINT_NAME, RUN_NAME_WITH_VALUES, Recipe
from finetune.recipe.section import RUN_NAME, Variant
from finetune.recipe.shorthands import SHORTHANDS, PlainWord
from finetune.recipe.yaml_tree import Key, Problem, RecipeError, Tree, dotted, dump, override, read

LoadRecipe = Callable[[Path, Sequence[str]], Recipe]  # `load_recipe`, or that of all features
MAX_PROBLEMS = 50  # that are described


# Names of other tools at a place of the recipe ("", "data.train", or a key whose values they name otherwise), with what
# to write instead: a key or value, or a sentence.
UnknownKeyHint = Callable[[str], Mapping[str, str]]


class UnreadKey(Problem):
    """A key, or a value of it, that only another variant of its section has."""


def no_hint(_place: str) -> Mapping[str, str]:
    return {}


def load_recipe(
    path: Path | str,
    overrides: Sequence[str] = (),
    text: str | None = None,
    rules: Sequence[Rule] = RULES,
    unknown_key_hint: UnknownKeyHint = no_hint,
) -> Recipe:
    """Reads, extends, overrides and validates a recipe. text: of the file, if it is not saved yet.

    `finetune.features.load_recipe` is this with the rules of all features, and hints for names of other tools; the
    defaults are enough for the recipe of a run, which has passed. Raises RecipeError with every problem of overrides
    and schema, or, if there is none, of the rules.
    """
    path = Path(path)
    tree = read(path, text)
    problems: list[Problem] = []
    for text in overrides:
        try:
            override(tree, text, _is_text)
        except RecipeError as error:
            problems += error.problems
    # Keys that cannot stay next to a nearer one, or that have no effect without evaluation data, are removed.

    def distance(key: Key) -> int:  # of its source: 0 the command line, 1 the recipe's own file, 2 one it extends
        place = tree.place(key)
        return 0 if place.line is None else 1 if place.file == str(path) else 2

    def given(key: Key) -> Any:
        try:
            return _value_at(tree.values, key)
        except (KeyError, TypeError, IndexError):
            return None

    pairs = list(_GIVES_WAY)
    if not given(("data", "eval")):
        pairs += [(key, "data.eval") for key in _ONLY_WITH_EVALUATION]
    for dropped, kept in pairs:
        key, nearer = tuple(dropped.split(".")), tuple(kept.split("."))
        is_met = kept == "data.eval" or given(nearer) is not None
        if is_met and given(key) is not None and distance(nearer) < distance(key):
            del tree.values[key[0]][key[1]]
    words = _unclear_words(tree)
    recipe = None
    try:
        recipe = Recipe.model_validate(tree.values)
    except ValidationError as error:
        found = _problems(error, tree, unknown_key_hint)
        if not problems and all(isinstance(problem, UnreadKey) for problem in found):  # the rest is read all the same
            for problem in found:
                del _value_at(tree.values, problem.key[:-1])[problem.key[-1]]
            recipe = Recipe.model_validate(tree.values)
        problems += found
    named = {problem.key for problem in problems}
    problems += [problem for problem in words if problem.key not in named]
    if recipe is not None and all(isinstance(problem, UnreadKey) for problem in problems):
        recipe, findings = _with_name(recipe)
        findings = findings or broken_rules(recipe, rules)
        parts = [(re.findall(r"[^.\[\]]+", key), message) for key, message in findings]
        keys = [(tuple(int(part) if part.isdecimal() else part for part in key), text) for key, text in parts]
        problems += [Problem(tree.place(key), key, message) for key, message in keys]
    if recipe is None or problems:
        # the recipe's own file by line, then the files it extends, then the command line
        problems.sort(key=lambda p: (p.place.line is None, p.place.file != str(path), p.place.line or 0))
        raise RecipeError(path, problems)
    return recipe


def _unclear_words(tree: Tree) -> list[Problem]:
    """Returns problems with unquoted `yes`, `no`, `on` and `off` where the schema takes a truth value, null or anything
    instead of text; elsewhere they become plain text."""
    problems: list[Problem] = []

    def settled(value: Any, key: Key) -> Any:
        if isinstance(value, dict):
            return {name: settled(inner, (*key, name)) for name, inner in value.items()}
        if isinstance(value, list):
            return [settled(inner, (*key, i)) for i, inner in enumerate(value)]
        if not isinstance(value, PlainWord):
            return value
        if _may_mean_a_truth(key):
            truth = str(value.lower() in ("yes", "on")).lower()
            problems.append(
                Problem(
                    tree.place(key),
                    key,
                    f"`{value}` may mean {truth} or text. Fix: write {truth} (or null), or quote it: '{value}'",
                )
            )
        return str(value)

    tree.values = settled(tree.values, ())
    return problems


def _may_mean_a_truth(key: Key) -> bool:
    """Returns whether the schema takes more than text at `key`."""
    if key == ("model", "name"):  # null is no switch there: a model has a name or a config
        return False
    return key in SHORTHANDS or _annotation_at(key) is not str


# Keys of an extended recipe give way to those of the recipe, and both to the command line: (key, to another key).
_GIVES_WAY = (
    ("schedule.warmup_steps", "schedule.warmup_ratio"),
    ("schedule.warmup_ratio", "schedule.warmup_steps"),
)
_ONLY_WITH_EVALUATION = tuple(
    f"evaluate.{name}" for name in ("every_steps", "generate", "exact_match", "word_error_rate", "answer")
)


def _with_name(recipe: Recipe) -> tuple[Recipe, list[Finding]]:
    """Returns the recipe with the values that `run.name` requests, and problems with them.

    `lr-{optimizer.lr}` -> `lr-0.001`, with four significant digits; characters that no name may have become `-`.
    """
    problems: list[Finding] = []

    def value(match: re.Match[str]) -> str:
        key = match[1]
        try:
            given = _value_at(recipe.model_dump(mode="json"), tuple(key.split(".")))
            text = str(float(f"{given:.4g}") if isinstance(given, float) else given)
        except (KeyError, TypeError):
            problems.append(("run.name", f"`{{{key}}}` is no key of the recipe; such as `{{optimizer.lr}}` would be"))
            return ""
        return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-")

    name = re.sub(r"\{([^{}]*)\}", value, recipe.run.name)
    if not problems and not re.match(RUN_NAME, name):
        problems.append(("run.name", f"expected {_NAME}, got {_shown(name)}"))
    return recipe.model_copy(update={"run": recipe.run.model_copy(update={"name": name})}), problems


def dump_recipe(recipe: Recipe) -> str:
    """Returns the resolved recipe as YAML that loads to an equal recipe."""
    return dump(recipe.model_dump(mode="json"))


def _problems(error: ValidationError, tree: Tree, unknown_key_hint: UnknownKeyHint) -> list[Problem]:
    """Translates pydantic's errors to problems, one per key."""
    # A union reports the failure of every branch: one problem per key, the expectations of the branches joined by "or".
    by_key: dict[Key, list[dict[str, Any]]] = {}
    for detail in map(_as_of_one_section, error.errors()):
        # The part of pydantic's location that exists in the recipe; it also names branches of unions.
        location, values, key = detail["loc"], tree.values, Key()
        for i, part in enumerate(location):
            keys = range(len(values)) if isinstance(values, list) else values if isinstance(values, dict) else ()
            if part in keys:
                key = (*key, part)
                values = _value_at(values, (part,))
            elif detail["type"] == "missing" and i == len(location) - 1 and isinstance(part, str):
                key = (*key, part)
        by_key.setdefault(key, []).append(detail)
    first, problems = dict(islice(by_key.items(), MAX_PROBLEMS)), []
    for key, group in first.items():
        # Another branch of the union may have got further: `targets: [q_proj, 3]` is a list, not `all-linear`.
        is_inside = any(len(other) > len(key) and other[: len(key)] == key for other in first)
        if not is_inside or any(one["type"] not in ("literal_error", "tuple_type", "model_type") for one in group):
            if (unread := _unread_key(key, group[0], tree.values)) is not None:
                problems.append(UnreadKey(tree.place(key), key, unread))
                continue
            problems.append(Problem(tree.place(key), key, _message(key, group, tree.values, unknown_key_hint)))
    if (more := len(by_key) - len(first)) > 0:
        problems.append(Problem(tree.place(()), (), f"and {more:,} more problems"))
    return problems


def _as_of_one_section(error: ErrorDetails) -> dict[str, Any]:
    """Returns an error of a section that is one of several as that of a single one: of its `name`, or of its type."""
    detail: dict[str, Any] = dict(error)
    if detail["type"] == "union_tag_invalid":
        expected = " or ".join(detail["ctx"]["expected_tags"].rsplit(", ", 1))
        detail |= {"type": "literal_error", "loc": (*detail["loc"], "name"), "ctx": {"expected": expected}}
    elif detail["type"] in ("union_tag_not_found", "model_attributes_type"):
        detail["type"] = "model_type"
    return detail


def _message(key: Key, group: list[dict[str, Any]], values: dict[str, Any], unknown_key_hint: UnknownKeyHint) -> str:
    first = group[0]
    if first["type"] == "extra_forbidden":
        return "unknown key" + _suggest_key(key, _value_at(values, key), unknown_key_hint)
    if first["type"] == "missing" and isinstance(first["loc"][-1], int):  # in a list of fixed length
        return f"expected {group[-1]['loc'][-1] + 1} items, got {_shown(_value_at(values, key))}"
    if first["type"] == "missing":
        siblings, fields = _value_at(values, key[:-1]), _fields_at(key[:-1])
        unknown = [name for name in siblings if name not in fields] if isinstance(siblings, dict) else []
        close = difflib.get_close_matches(str(key[-1]), unknown, n=1, cutoff=_ALIKE)
        return "is missing" + (f"; `{close[0]}` looks like a misspelling of it" if close else "")
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    expected = list(dict.fromkeys(_expected(detail) for detail in group))
    if key in SHORTHANDS and not first["type"].startswith("too_"):
        expected.append(SHORTHANDS[key].expected)  # pyright: ignore[reportArgumentType]
    given = _value_at(values, key)
    message = f"expected {' or '.join(expected)}, got {_shown(given)}"
    if first["type"] == "literal_error" and isinstance(given, str):
        is_format = key[:1] == ("data",) and key[-1] == "format"
        place = ("data", "train", "format") if is_format else tuple(part for part in key if isinstance(part, str))
        if given in (instead := unknown_key_hint(dotted(place))):
            return f"{message}; {instead[given]}"
        choices = [choice.strip("'") for choice in first["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        nearest = difflib.get_close_matches(given.lower(), choices, n=1, cutoff=0.6)
        if nearest:
            hint = f"; did you mean `{nearest[0]}`?"
        else:
            hint = f"; valid here: {', '.join(choices)}" if choices else ""
        message += hint
    if first["type"] == "model_type" and isinstance(given, str) and "name" in _fields_at(key):
        message += f"; did you mean `{dotted((*key, 'name'))}`?"
    if key == ("rewards",) and given is None:
        return f"{message}; `rewards=[]` on the command line removes them"
    if given is None and key in {(name,) for name, field in Recipe.model_fields.items() if not field.is_required()}:
        message += f"; `{key[0]}={{}}` on the command line sets all of it to the defaults"
    if first["type"] == "string_type" and isinstance(given, int | float) and not isinstance(given, bool):
        message += "; quote it"
    return message


def _unread_key(key: Key, detail: dict[str, Any], values: dict[str, Any]) -> str | None:
    """Returns the message for a key, or a value of it, that only other variants of a section have; None if none has."""
    if detail["type"] not in ("extra_forbidden", "literal_error") or len(detail["loc"]) < 2:
        return None
    variants = [one for one in _sections_in(_annotation_at(key[:-1])) if issubclass(one, Variant)] if key else []
    own = next((one for one in variants if one.kind() == str(detail["loc"][-2]).strip("`")), None)
    readers = [one for one in variants if one is not own and key[-1] in one.model_fields]
    if own is None or not readers:
        return None
    if detail["type"] == "extra_forbidden":
        return own.unread([one.kind() for one in readers])
    given, taken = _value_at(values, key), typing.get_args(own.model_fields[str(key[-1])].annotation)
    others = {value for one in readers for value in typing.get_args(one.model_fields[str(key[-1])].annotation)}
    if isinstance(given, str) and given in others:
        return f"`{given}` is not a {key[-1]} of `name: {own.kind()}`: use {', '.join(taken)}"
    return None


def _suggest_key(key: Key, value: Any, unknown_key_hint: UnknownKeyHint) -> str:
    """Suggests a key for an unknown one: by a name in other tools, in its section, elsewhere in the recipe."""
    name, siblings = str(key[-1]), _fields_at(key[:-1])
    if name == "extends":
        return "; it belongs at the top level of a recipe"
    prefix = f"{dotted(key[:-1])}." if len(key) > 1 else ""
    is_source = len(key) == 4 and key[:1] == ("data",)
    hints = unknown_key_hint("data.train" if is_source else "")
    foreign = hints.get(dotted(key)) or hints.get(name)
    if foreign and " " in foreign:
        return f"; {foreign}"
    if foreign and (is_source or _may_replace(value, foreign)):
        return f"; did you mean `{foreign}`?"
    alike = [sibling for sibling in siblings if is_source or _may_replace(value, prefix + sibling)]
    if close := difflib.get_close_matches(name.lower(), alike, n=1, cutoff=_ALIKE):
        return f"; did you mean `{close[0]}`?"
    keys = [known for known in _dotted_names() if _may_replace(value, known)]
    if same_name := [known for known in keys if known.rpartition(".")[2] == name]:
        return f"; did you mean `{'` or `'.join(same_name)}`?"
    places = {known.rpartition(".")[2]: known for known in keys if "." in known}
    places |= {other: place for other, place in unknown_key_hint("").items() if " " not in place}
    if close := difflib.get_close_matches(name.lower(), places, n=1, cutoff=_NEARLY_EQUAL):
        return f"; did you mean `{places[close[0]]}`?"
    return f"; valid here: {', '.join(siblings)}" if siblings else ""


# Similarity (`difflib`, 0 to 1) of a name to one that is suggested for it: beside it, and anywhere in the recipe.
_ALIKE, _NEARLY_EQUAL = 0.7, 0.85


def _may_replace(value: Any, known: str) -> bool:
    """Returns whether a key of the recipe takes a value of this kind: a section is never suggested for a leaf."""
    annotation = _annotation_at(tuple(known.split(".")))
    is_list = typing.get_origin(annotation) is tuple or _item_of(annotation) is not None
    is_section = bool(_sections_in(annotation)) and not is_list
    return is_section or "dict[" in str(annotation) if isinstance(value, dict) else not is_section


_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "finite_number": "a finite number",
    "tuple_type": "a list",
    "dict_type": "a section",
    "model_type": "a section",
    "string_too_short": "non-empty text",
}
_NAME = "letters, digits, `.`, `_` and `-`, starting with a letter or digit"
_BOUNDS = {
    "greater_than": ">",
    "greater_than_equal": ">=",
    "less_than": "<",
    "less_than_equal": "<=",
}


def _expected(detail: dict[str, Any]) -> str:
    """Describes the expected value."""
    kind, context = detail["type"], detail.get("ctx", {})
    if kind in _EXPECTED:
        return _EXPECTED[kind]
    if kind == "literal_error":
        return context["expected"]
    if kind in _BOUNDS:
        return f"a number {_BOUNDS[kind]} {next(iter(context.values()))}"
    if kind == "too_short":
        return f"at least {context['min_length']} item{'s' if context['min_length'] > 1 else ''}"
    if kind == "too_long":  # a list of fixed length
        return f"{context['max_length']} items"
    if kind == "string_pattern_mismatch" and context["pattern"] == CHECKPOINT_NAME:
        return "the name of a checkpoint, such as step-00000200"
    if kind == "string_pattern_mismatch":
        return _NAME + (", and values such as `{optimizer.lr}`" if context["pattern"] == RUN_NAME_WITH_VALUES else "")
    return detail["msg"]


def _shown(value: Any) -> str:
    """Formats a value as in YAML, shortened; a quoted number shows its quotes."""
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = f'"{value}" (text)' if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _value_at(values: Any, key: Key) -> Any:
    for part in key:
        values = values[part]
    return values


def _fields_at(key: Key) -> list[str]:
    """Returns the names of the fields of the section at `key`; of all sections that may be there."""
    sections = _sections_in(_annotation_at(key)) if key else [Recipe]
    names = dict.fromkeys(name for section in sections for name in section.model_fields)
    return list(names) + ([] if key else ["extends"])


def _annotation_at(key: Key) -> Any:
    """Returns the type of the value at `key`; None if the schema has no such key."""
    annotation: Any = Recipe
    for part in key:
        if isinstance(part, int):
            annotation = _item_of(annotation)
            continue
        fields = [section.model_fields[part] for section in _sections_in(annotation) if part in section.model_fields]
        if not fields:
            return None
        annotation = Union[tuple(field.annotation for field in fields)]  # noqa: UP007 (of any number)
    return annotation


def _item_of(annotation: Any) -> Any:
    """Returns the type of a list's items, of an annotation such as `tuple[Source, ...] | None`."""
    if typing.get_origin(annotation) is tuple:
        return typing.get_args(annotation)[0]
    return next(filter(None, map(_item_of, typing.get_args(annotation))), None)


def _is_text(key: Key) -> bool:
    """Returns whether the schema expects text, or text or null, at `key`."""
    annotation = _annotation_at(key)
    is_list = typing.get_origin(annotation) is tuple
    return annotation is str or (str in typing.get_args(annotation) and not is_list)


def _sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Returns the models inside an annotation such as `Lora | None`, `tuple[Source, ...]` or `Sft | Dpo`."""
    if (
        isinstance(annotation, type)
        and not isinstance(annotation, types.GenericAlias)
        and issubclass(annotation, BaseModel)
    ):
        return [annotation]
    return [section for inner in typing.get_args(annotation) for section in _sections_in(inner)]


def _dotted_names(sections: Sequence[type[BaseModel]] = (Recipe,), prefix: str = "") -> Iterator[str]:
    """Yields every field of the recipe, such as `optimizer.lr`."""
    for name in dict.fromkeys(name for section in sections for name in section.model_fields):
        yield prefix + name
        fields = [section.model_fields[name] for section in sections if name in section.model_fields]
        inner = [one for field in fields for one in _sections_in(field.annotation)]
        if inner:
            yield from _dotted_names(inner, f"{prefix}{name}.")


def key_is_known(key: str) -> bool:
    """Returns whether a dotted key names a field of the recipe; used by tests that keep the documentation honest."""
    *section, name = key.split(".")
    return name in _fields_at(tuple(section))
