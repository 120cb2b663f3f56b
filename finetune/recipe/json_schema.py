"""The recipe's JSON Schema, for editors that complete and check YAML."""

from __future__ import annotations

import json

from finetune.recipe.schema import Recipe


def recipe_json_schema() -> str:
    """`recipes/recipe.schema.json`, generated; a recipe that extends another may leave out what the other has."""
    schema = Recipe.model_json_schema(mode="validation")
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "finetune recipe"}
    schema["properties"] = {
        "extends": {"type": "string", "description": "another recipe, relative to this file; this one's keys win"},
        **schema["properties"],
    }
    # With `extends` any required key may come from the base, which one file's schema cannot see.
    _drop_required(schema)
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def _drop_required(schema: object) -> None:
    if isinstance(schema, dict):
        if isinstance(schema.get("required"), list):
            del schema["required"]
        for value in schema.values():
            _drop_required(value)
    elif isinstance(schema, list):
        for value in schema:
            _drop_required(value)
