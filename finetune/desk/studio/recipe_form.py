"""A form for the keys of a recipe that people change most, over its text: comments, order and all else stay.

text ── the value of each key in it ── a form
one field that was changed ── one edit of the text, read again: nothing but this value differs, or it is refused
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from typing import Any

import yaml

from finetune.errors import UserError
from finetune.features import load_recipe
from finetune.recipe import RecipeError, recipe_json_schema
from finetune.recipe.yaml_tree import flow

KEYS = (
    "run.name",
    "run.seed",
    "model.name",
    "mode",
    "lora.rank",
    "lora.alpha",
    "data.max_length",
    "data.overlong",
    "data.packing",
    "batch.rows",
    "batch.rows_per_device",
    "optimizer.name",
    "optimizer.lr",
    "optimizer.weight_decay",
    "optimizer.max_grad_norm",
    "schedule.name",
    "schedule.warmup_steps",
    "train.epochs",
    "train.max_steps",
    "train.precision",
    "train.activation_checkpointing",
    "checkpoint.every_steps",
)
_WORD = re.compile(r"[\w.+-]{1,40}")  # a number or a name of the schema


@dataclass(frozen=True)
class FormField:
    key: str
    choices: tuple[str, ...]  # empty: any value
    is_text: bool  # quoted where YAML needs it


@functools.cache
def form_fields() -> tuple[FormField, ...]:
    """Returns the fields with what the recipe's schema says of them."""
    schema = json.loads(recipe_json_schema())

    def branches(node: dict[str, Any]) -> list[dict[str, Any]]:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
        return [one for part in node["anyOf"] for one in branches(part)] if "anyOf" in node else [node]

    def described(key: str) -> FormField:
        nodes = [schema]
        for part in key.split("."):
            nodes = [
                one
                for node in nodes
                if part in node.get("properties", {})
                for one in branches(node["properties"][part])
            ]
        choices = [word for node in nodes for word in node.get("enum", [node["const"]] if "const" in node else [])]
        types = {node.get("type") for node in nodes}
        choices += ["true", "false"] if "boolean" in types else []
        is_open = bool(types & {"integer", "number"}) or ("string" in types and not choices)
        return FormField(key, () if is_open else tuple(choices), types <= {"string", "null"} and not choices)

    return tuple(map(described, KEYS))


def form_values(path: str, text: str) -> dict[str, dict[str, str]]:
    """Returns of each key its value in the text, "" without one, and the value that holds then, if that is known."""
    root = _root(text)
    try:
        recipe: Any = load_recipe(path, text=text)
    except (UserError, RecipeError):
        recipe = None
    values = {}
    for key in KEYS:
        entry = _entry(root, key)
        written = entry[1].value if entry and isinstance(entry[1], yaml.ScalarNode) else ""
        values[key] = {"written": written, "holds": _resolved(recipe, key)}
    return values


def _resolved(recipe: Any, key: str) -> str:
    for part in key.split("."):
        recipe = getattr(recipe, part, None)
    return "" if recipe is None else json.dumps(recipe) if isinstance(recipe, bool) else str(recipe)


def with_value(text: str, key: str, value: str) -> str:
    """Returns the text with another value of a key; "" removes it. Raises UserError if that is not one small edit."""
    field = next((one for one in form_fields() if one.key == key), None)
    if field is None:
        raise UserError(f"{key}: not a key of the form. Fix: change it in the text")
    if value and not field.is_text and not _WORD.fullmatch(value):
        raise UserError(f"{key}: {value[:40]} is not a number or a name. Fix: give one, such as 8 or 1e-4")
    root = _root(text)
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise UserError("this recipe has no sections. Fix: write `key: value` at the top level")
    written = flow(value) if field.is_text else value
    edited = _removed(text, root, key) if not value else _edited(text, root, key, written)
    _check_only(key, value, root, _root(edited))
    return edited


def _root(text: str) -> yaml.Node | None:
    """Raises UserError if the text is no YAML."""
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise UserError(f"{line}not valid YAML, so the form waits. Fix: correct it in the text") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise UserError("not valid YAML, so the form waits. Fix: correct it in the text") from None


def _child(node: yaml.Node | None, name: str) -> tuple[yaml.Node, yaml.Node] | None:
    """Returns the nodes of a key and its value in a section."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    return next((pair for pair in pairs if isinstance(pair[0], yaml.ScalarNode) and pair[0].value == name), None)


def _entry(root: yaml.Node | None, key: str) -> tuple[yaml.Node, yaml.Node] | None:
    section, _, name = key.rpartition(".")
    if not section:
        return _child(root, name)
    return _child(found[1], name) if (found := _child(root, section)) else None


def _is_empty(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.value == "" and node.style is None


def _edited(text: str, root: yaml.Node | None, key: str, value: str) -> str:
    section, _, name = key.rpartition(".")
    entry = _entry(root, key)
    if entry is not None:
        old = entry[1]
        if not isinstance(old, yaml.ScalarNode):
            raise UserError(f"{key}: is a section or a list in the text. Fix: change it there")
        at, end = (entry[0].end_mark.index + 1,) * 2 if _is_empty(old) else (old.start_mark.index, old.end_mark.index)
        return f"{text[:at]}{' ' if at == end else ''}{value}{text[end:]}"
    parent = _child(root, section)
    if not section or parent is None:
        line = f"{section}:\n  {name}: {value}\n" if section else f"{name}: {value}\n"
        return f"{text}{'' if text.endswith(chr(10)) or not text else chr(10)}{line}"
    node = parent[1]
    if _is_empty(node):
        at = parent[0].end_mark.index + 1
        return f"{text[:at]}\n  {name}: {value}{text[at:]}"
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{section}: is written in short. Fix: write it as a section in the text")
    if node.flow_style:
        inside = text[: node.end_mark.index - 1].rstrip()
        comma = "" if inside.endswith((",", "{")) else ","
        space = "" if inside.endswith("{") else " "
        return f"{inside}{comma}{space}{name}: {value}{text[node.end_mark.index - 1 :]}"
    last = node.value[-1][1]
    if (
        isinstance(last, yaml.ScalarNode)
        and last.style not in ("|", ">")
        and last.start_mark.line == last.end_mark.line
    ):
        at = _line_end(text, last.end_mark.index)
        return f"{text[:at]}\n{' ' * node.start_mark.column}{name}: {value}{text[at:]}"
    at = node.start_mark.index
    return f"{text[:at]}{name}: {value}\n{' ' * node.start_mark.column}{text[at:]}"


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _removed(text: str, root: yaml.Node | None, key: str) -> str:
    entry = _entry(root, key)
    if entry is None:
        return text
    section = key.rpartition(".")[0]
    found = _child(root, section) if section else None
    parent = found[1] if found else root
    if not isinstance(parent, yaml.MappingNode):
        return text
    name, value = entry
    at = next(index for index, pair in enumerate(parent.value) if pair[0] is name)
    if parent.flow_style:
        if at:
            return text[: parent.value[at - 1][1].end_mark.index] + text[value.end_mark.index :]
        end = parent.value[1][0].start_mark.index if len(parent.value) > 1 else value.end_mark.index
        return text[: name.start_mark.index] + text[end:]
    first = name
    if len(parent.value) == 1 and found is not None:  # a section without keys would be null
        first = found[0]
    start, end = text.rfind("\n", 0, first.start_mark.index) + 1, _line_end(text, value.end_mark.index)
    return text[:start] + text[end + 1 :]


def _check_only(key: str, value: str, before: yaml.Node | None, after: yaml.Node | None) -> None:
    """Raises UserError if more than this value differs, such as in texts with anchors or several keys on a line."""
    old, new = _plain(before), _plain(after)
    section, _, name = key.rpartition(".")
    inner = (old.get(section) if section else old) or {}
    if not isinstance(inner, dict):
        inner = {}
    inner = {**inner, name: value} if value else {other: one for other, one in inner.items() if other != name}
    expected = {**old, section: inner} if section else inner
    if section and not inner:
        expected = {other: one for other, one in expected.items() if other != section or one}
        new = {other: one for other, one in new.items() if other != section or one}
    if new != expected:
        raise UserError(f"{key}: cannot be changed here without changing more. Fix: change it in the text")


def _plain(node: yaml.Node | None) -> Any:
    """Returns nested dicts, lists and the texts of scalars."""
    if isinstance(node, yaml.MappingNode):
        return {_hashable(name): _plain(value) for name, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_plain(value) for value in node.value]
    return {} if node is None else node.value


def _hashable(node: yaml.Node) -> str:
    return node.value if isinstance(node, yaml.ScalarNode) else repr(node)
