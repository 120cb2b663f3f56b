"""The recipe: schema, YAML, overrides, problems with file and line."""

from finetune.recipe.load import dump_recipe, load_recipe
from finetune.recipe.rules import divisibility_message, format_problem
from finetune.recipe.schema import Recipe, recipe_json_schema
from finetune.recipe.yaml_tree import RecipeError

__all__ = [
    "Recipe",
    "RecipeError",
    "divisibility_message",
    "dump_recipe",
    "format_problem",
    "load_recipe",
    "recipe_json_schema",
]
