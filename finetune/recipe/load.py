"""From a recipe file and overrides to a frozen, checked `Recipe`, or one error that lists every problem."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from finetune.recipe.problems import Key, Problem, RecipeError
from finetune.recipe.rules import broken_rules
from finetune.recipe.schema import Recipe
from finetune.recipe.yaml_tree import Tree, override, read


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Read, extend, override and check a recipe.

    Raises RecipeError with every problem of the schema, or, where the schema is content, of the rules.
    """
    path = Path(path)
    tree = read(path)
    for text in overrides:
        override(tree, text)
    try:
        recipe = Recipe.model_validate(tree.values)
    except ValidationError as error:
        raise RecipeError(path, _problems(error, tree)) from None
    findings = [(tuple(key.split(".")), message) for key, message in broken_rules(recipe)]
    if findings:
        raise RecipeError(path, [Problem(tree.place(key), key, message) for key, message in findings])
    return recipe


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML that loads to an equal recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def _problems(error: ValidationError, tree: Tree) -> list[Problem]:
    """pydantic's findings in our words, in the order of the file, each once."""
    found: dict[tuple[Key, str], Problem] = {}
    details = error.errors()
    # A union reports the failure of every branch: one problem per key, what each branch expected joined by "or".
    by_key: dict[Key, list[dict[str, Any]]] = {}
    for detail in details:
        by_key.setdefault(_key(detail["loc"], detail["type"], tree.values), []).append(dict(detail))
    for key, group in by_key.items():
        message = _message(key, group, tree.values)
        place = tree.place(key)
        found[(key, message)] = Problem(place, key, message)
    return sorted(found.values(), key=lambda problem: problem.place.line or 0)


def _key(loc: tuple[str | int, ...], kind: str, values: Any) -> Key:
    """The part of pydantic's location that exists in the recipe (it also names the branches of unions)."""
    key: list[str | int] = []
    for i, part in enumerate(loc):
        inside = (isinstance(values, dict) and part in values) or (
            isinstance(values, list) and isinstance(part, int) and part < len(values)
        )
        if inside:
            key.append(part)
            values = values[part]
        elif kind == "missing" and i == len(loc) - 1:
            key.append(part)
    return tuple(key)


def _message(key: Key, group: list[dict[str, Any]], values: dict[str, Any]) -> str:
    first = group[0]
    if first["type"] == "extra_forbidden":
        return "unknown key" + _did_you_mean(str(key[-1]), _fields_at(key[:-1]))
    if first["type"] == "missing":
        present = _value_at(values, key[:-1])
        strays = [name for name in present if name not in _fields_at(key[:-1])] if isinstance(present, dict) else []
        close = difflib.get_close_matches(str(key[-1]), strays, n=1)
        return "is missing" + (f"; is `{close[0]}` meant for it?" if close else "")
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    expected = list(dict.fromkeys(_expected(detail) for detail in group))
    given = _value_at(values, key)
    message = f"expected {' or '.join(expected)}, got {_shown(given)}"
    if first["type"] == "literal_error" and isinstance(given, str):
        choices = [choice.strip("'") for choice in first["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        message += _did_you_mean(given, choices)
    return message


_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "finite_number": "a finite number",
    "tuple_type": "a list",
    "dict_type": "a section",
    "model_type": "a section",
    "none_required": "null",
}


def _expected(detail: dict[str, Any]) -> str:
    """What would have been right, in words."""
    kind, context = detail["type"], detail.get("ctx", {})
    if kind in _EXPECTED:
        return _EXPECTED[kind]
    if kind == "literal_error":
        return context["expected"]
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        return (
            kind.replace("_", " ")
            .replace("than equal", "than or equal to")
            .replace("greater", "a number greater")
            .replace("less", "a number less")
            + " "
            + str(next(iter(context.values())))
        )
    if kind == "too_short":
        return f"at least {context['min_length']} item{'s' if context['min_length'] > 1 else ''}"
    if kind == "too_long":
        return f"at most {context['max_length']} items"
    if kind == "string_pattern_mismatch":
        return f"text of the form {context['pattern']}"
    if kind == "string_too_short":
        return "text that is not empty"
    return detail["msg"]


def _shown(value: Any) -> str:
    """A value as it would stand in YAML, shortened; a quoted number shows its quotes."""
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list):
        return f"a list of {len(value)}" if len(value) != 2 else f"{value}"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = f'"{value}" (text)' if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _did_you_mean(name: str, choices: Sequence[str]) -> str:
    close = difflib.get_close_matches(name.lower(), choices, n=1, cutoff=0.5)
    if close:
        return f"; did you mean `{close[0]}`?"
    return f"; valid here: {', '.join(choices)}" if choices else ""


def _value_at(values: Any, key: Key) -> Any:
    for part in key:
        if isinstance(values, dict):
            values = values.get(part)
        elif isinstance(values, list) and isinstance(part, int) and part < len(values):
            values = values[part]
        else:
            return None
    return values


def _fields_at(key: Key) -> list[str]:
    """Names of the fields of the section at `key`."""
    section: Any = Recipe
    for part in key:
        if isinstance(part, str):
            field = section.model_fields.get(part)
            if field is None:
                return []
            section = _section_in(field.annotation)
            if section is None:
                return []
    return list(section.model_fields) + (["extends"] if not key else [])


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The model inside an annotation such as `Lora | None` or `tuple[Source, ...]`."""
    if (
        isinstance(annotation, type)
        and not isinstance(annotation, types.GenericAlias)
        and issubclass(annotation, BaseModel)
    ):
        return annotation
    for inner in typing.get_args(annotation):
        if (section := _section_in(inner)) is not None:
            return section
    return None


def key_is_known(key: str) -> bool:
    """Whether a dotted key names a field of the recipe; used by tests that keep the documentation honest."""
    *above, name = key.split(".")
    return name in _fields_at(tuple(above))
