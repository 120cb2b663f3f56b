"""Writes what the documentation takes from the code: docs/reference/recipe-keys.md and the tables of recipes.

    python scripts/docs/make_docs.py            # after a change of a key or of a recipe

docs/reference/recipe-keys.md has every key of a recipe: type, limits and default from the JSON Schema, its meaning from
the comments of the recipe's classes, finetune/recipe/*.py. docs/reference/recipes.md has a table of recipes between two
marks, README.md a short one; who needs what is from the recipes' headers. A test holds all to what the code says.
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import re
import textwrap
import tokenize
from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from finetune.recipe.schema import Recipe, recipe_json_schema
from finetune.recipe.section import Section, Variant

ROOT = Path(__file__).resolve().parents[2]
MARKS = ("<!-- recipes: made by scripts/docs/make_docs.py -->", "<!-- /recipes -->")
NAMES = {  # of the folders of recipes
    "smollm2-135m": "SmolLM2 135M",
    "llama3.2-1b": "Llama 3.2 1B",
    "llama3.2-3b": "Llama 3.2 3B",
    "llama3.1-8b": "Llama 3.1 8B",
    "llama3.3-70b": "Llama 3.3 70B",
    "llama3.1-405b": "Llama 3.1 405B",
    "mistral-7b-v0.3": "Mistral 7B v0.3",
    "mistral-nemo-12b": "Mistral Nemo 12B",
    "mistral-small-24b": "Mistral Small 24B",
    "mixtral-8x7b": "Mixtral 8x7B",
    "mistral-small-3.2-24b": "Mistral Small 3.2 24B",
    "mistral-large-4": "Mistral Large 4",
    "mistral-small-3.1-24b": "Mistral Small 3.1 24B, images",
    "ministral3-8b": "Ministral 3 8B",
    "llama4-scout": "Llama 4 Scout",
    "gemma3-4b": "Gemma 3 4B",
    "gemma4-e2b": "Gemma 4 E2B, sound",
    "gemma4-12b": "Gemma 4 12B",
    "gemma4-31b": "Gemma 4 31B",
    "qwen3-0.6b": "Qwen3 0.6B",
    "qwen3-1.7b": "Qwen3 1.7B",
    "qwen3-4b": "Qwen3 4B",
    "qwen3-8b": "Qwen3 8B",
    "qwen3-14b": "Qwen3 14B",
    "qwen3-32b": "Qwen3 32B",
    "qwen3-30b-a3b": "Qwen3 30B A3B",
    "qwen3.5-9b": "Qwen3.5 9B",
    "qwen3.6-27b": "Qwen3.6 27B",
    "qwen3.8-27b": "Qwen3.8 27B",
    "lfm2.5-1.2b": "LFM2.5 1.2B",
    "gpt-oss-20b": "gpt-oss 20B",
    "gpt-oss-120b": "gpt-oss 120B",
    "deepseek-v3": "DeepSeek-V3",
    "granite4-h-micro": "Granite 4.0-H-Micro",
    "nemotron-nano-9b-v2": "Nemotron Nano-9B-v2",
    "nemotron3.5-lightning-30b": "Nemotron 3.5 Lightning 30B A3B",
    "smolvlm-256m": "SmolVLM 256M",
    "qwen3-vl-4b": "Qwen3-VL 4B",
    "qwen3-vl-8b": "Qwen3-VL 8B",
    "qwen2-audio-7b": "Qwen2-Audio 7B",
    "qwen3-omni-30b-a3b": "Qwen3-Omni 30B A3B, sound",
    "voxtral-mini-3b": "Voxtral Mini 3B",
    "gsm8k": "GSM8K, any model",
    "quickstart": "quickstart, no download",
}


def comments_of(section: type[BaseModel]) -> dict[str, str]:
    """Returns the comment of each key, inherited ones too: the lines above it and the one at its end."""
    texts = {}
    for one in reversed([base for base in section.__mro__ if issubclass(base, Section)]):
        texts |= _own_comments(one)
    return texts


def _own_comments(section: type[BaseModel]) -> dict[str, str]:
    source = textwrap.dedent(inspect.getsource(section))
    lines = source.splitlines()
    found = {  # line: comment
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    texts = {}
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]  (it is a class)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above = node.lineno - 1
            while lines[above - 1].lstrip().startswith("#"):
                above -= 1
            behind = range(above + 1, (node.end_lineno or node.lineno) + 1)
            texts[node.target.id] = " ".join(found[line] for line in behind if line in found)
    return texts


def type_of(described: dict[str, Any]) -> str:
    """Returns the type of a key of the JSON Schema in words."""
    if "anyOf" in described:
        return " or ".join(type_of(choice) for choice in described["anyOf"])
    if "$ref" in described:
        return "keys, see below"
    if "enum" in described or "const" in described:
        return ", ".join(f"`{value}`" for value in described.get("enum", [described.get("const")]))
    kind = {"array": "list", "object": "mapping", "string": "text", "boolean": "`true`, `false`", "null": "`null`"}
    return kind.get(described["type"]) or str(described["type"])


def limits_of(annotation: object, metadata: Sequence[object]) -> list[str]:
    """Returns the limits of a number in words. Those beyond a million only keep out slips of the hand."""
    found = []
    for item in metadata:
        if isinstance(item, FieldInfo):
            found += limits_of(None, item.metadata)
        for name, says in (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below")):
            bound = getattr(item, name, None)
            if isinstance(bound, (int, float)) and bound < 10**6:
                found.append(f"{says} {bound:g}")
    inner = get_args(annotation)
    is_annotated = hasattr(annotation, "__metadata__")
    for kind in inner[:1] if is_annotated else inner if get_origin(annotation) in (Union, UnionType) else ():
        found += limits_of(kind, ())
    return [*(limits_of(None, inner[1:]) if is_annotated else []), *found]


def nested(section: type[BaseModel], key: str) -> list[type[BaseModel]]:
    """Returns the section that a key holds, alone, as a choice, or in a list; all of them if it is one of several."""
    waiting: list[Any] = [section.model_fields[key].annotation]
    found: list[type[BaseModel]] = []
    while waiting:
        kind = waiting.pop(0)
        if isinstance(kind, type) and issubclass(kind, Section):
            found.append(kind)
        waiting = [*get_args(kind), *waiting]
    return found if found and issubclass(found[0], Variant) else found[:1]


def keys_page() -> str:
    """Returns docs/reference/recipe-keys.md."""
    schema = json.loads(recipe_json_schema())
    full = Recipe.model_json_schema(mode="validation")  # knows what is required
    top = comments_of(Recipe)
    parts = [
        "# Recipe keys\n",
        "Every key of a recipe, from `finetune/recipe/` (this page is made by\n"
        "`python scripts/docs/make_docs.py`). A key that is not here is refused. `a.b` is key `b` of section `a`,\n"
        "in YAML and on the command line (`a.b=value`).\n",
        f"## extends\n\n{schema['properties']['extends']['description'].capitalize()}.\n",
    ]
    for name in Recipe.model_fields:
        sections = nested(Recipe, name)
        if not sections:
            described = type_of(schema["properties"][name])
            parts.append(f"## {name}\n\n*{described}. Required.* {top.get(name, '')}".rstrip() + "\n")
        else:
            parts += variants_part(name, sections, full) if len(sections) > 1 else section_part(name, sections[0], full)
    return "\n".join(parts)


def section_part(prefix: str, section: type[BaseModel], full: dict[str, Any]) -> list[str]:
    """Returns heading, purpose and keys of a section, and of those within it."""
    purpose = inspect.cleandoc(section.__doc__) if section.__doc__ and section.__doc__ != Section.__doc__ else ""
    parts = [f"## {'Keys of ' if '.' in prefix else ''}{prefix}\n"] + ([purpose + "\n"] if purpose else [])
    described = full["$defs"][section.__name__]
    for key in described["properties"]:
        parts.append("\n\n".join([f"### {prefix}.{key}", *key_texts(section, key, full)]) + "\n")
    for key in described["properties"]:
        for held in nested(section, key):
            parts += section_part(f"{prefix}.{key}", held, full)
    return parts


def key_texts(section: type[BaseModel], key: str, full: dict[str, Any]) -> list[str]:
    """Returns type, limits and default of a key, and its meaning."""
    described, field = full["$defs"][section.__name__], section.model_fields[key]
    about, comment = described["properties"][key], comments_of(section).get(key)
    limits = dict.fromkeys(limits_of(field.annotation, field.metadata))
    limited = " ".join(["", *([" and ".join(limits)] if limits else [])])
    words = [re.sub(r"^(number|integer)( or )?", rf"\1{limited}\2", type_of(about))]
    default = about.get("default")
    shown = default if isinstance(default, str) else json.dumps(default)
    words.append("Required" if key in described.get("required", []) else f"Default: `{shown}`")
    texts = [f"*{'. '.join(words)}.*"]
    if comment:
        meaning = re.sub(r"<(\w+)>(?=[^`]*(?:`[^`]*`[^`]*)*$)", r"&lt;\1&gt;", comment.rstrip(".") + ".")
        starts_with_value = re.match(r"\w+:", meaning)
        texts.append(textwrap.fill(meaning if starts_with_value else meaning[0].upper() + meaning[1:], 100))
    return texts


def variants_part(prefix: str, variants: Sequence[type[BaseModel]], full: dict[str, Any]) -> list[str]:
    """Returns heading, purposes and keys of a section that is one of several; a key that several have appears once for
    each meaning."""
    base = next(one for one in variants[0].__mro__ if one.__base__ is Variant)
    sections = {one.kind(): one for one in variants if issubclass(one, Variant)}
    rows = []
    for name, one in sections.items():
        own = [f"`{key}`" for key in one.model_fields if key not in (*base.model_fields, "name")]
        rows.append(f"| `{name}` | {str(one.__doc__).rstrip('.')} | {', '.join(own) or 'none'} |")
    table = "\n".join(["| | | keys besides those of all |", "| --- | --- | --- |", *rows])
    parts = [f"## {prefix}\n", inspect.cleandoc(base.__doc__ or "") + "\n", table + "\n"]
    for key in dict.fromkeys(key for one in sections.values() for key in one.model_fields):
        meanings: dict[str, list[str]] = {}  # text: names
        for name, one in sections.items():
            if key in one.model_fields and key != "name":
                meanings.setdefault("\n\n".join(key_texts(one, key, full)), []).append(name)
        if key == "name":
            names = [name for name, one in sections.items() if "name" in one.model_fields]
            default = ". Default: `sft`" if prefix == "objective" else ""
            meanings = {f"*{', '.join(f'`{name}`' for name in names)}{default}.*": list(sections)}
        texts = [
            text if key in base.model_fields else f"{', '.join(f'`{name}`' for name in names)}: {text}"
            for text, names in meanings.items()
        ]
        parts.append("\n\n".join([f"### {prefix}.{key}", *texts]) + "\n")
    return parts


def recipes_table() -> str:
    """Returns the table of recipes: a row for each model."""
    rows = ["| model | recipes |", "| --- | --- |"]
    for folder, name in NAMES.items():
        paths = sorted((ROOT / "recipes" / folder).glob("*.yaml"))
        links = ", ".join(f"[{path.stem}](../../recipes/{folder}/{path.name})" for path in paths)
        rows.append(f"| {name} | {links} |")
    return "\n".join(rows) + "\n"


def families_table() -> str:
    """Returns the short table: a row for each family of models, with links to their folders and what they are for."""
    families: dict[str, list[str]] = {}
    for folder, name in NAMES.items():
        families.setdefault(re.split(r" |,", name)[0].replace("Ministral", "Mistral"), []).append(folder)
    rows = ["| family | models | recipes |", "| --- | --- | --- |"]
    for family, folders in families.items():
        links = [
            f"[{NAMES[folder].removeprefix(family).strip(' ,') or family}](recipes/{folder})" for folder in folders
        ]
        kinds = sorted({path.stem for folder in folders for path in (ROOT / "recipes" / folder).glob("*.yaml")})
        rows.append(f"| {family} | {', '.join(links)} | {', '.join(kinds)} |")
    return "\n".join(rows) + "\n"


def with_table(path: Path, table: str) -> str:
    """Returns a page with the table between its marks."""
    before, _, rest = path.read_text(encoding="utf-8").partition(MARKS[0])
    return f"{before}{MARKS[0]}\n\n{table}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}"


def pages() -> dict[Path, str]:
    """Returns every file that is made, or has a made part, and its content."""
    readme, recipes = ROOT / "README.md", ROOT / "docs" / "reference" / "recipes.md"
    return {
        ROOT / "docs" / "reference" / "recipe-keys.md": keys_page(),
        recipes: with_table(recipes, recipes_table()),
        readme: with_table(readme, families_table()),
    }


def main() -> None:
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
