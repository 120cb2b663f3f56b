"""What headers of recipes say of memory and devices is what `plan` calculates."""

from __future__ import annotations

from pathlib import Path

import pytest
import recipe_headers

from finetune.plan.tables import config_and_source
from finetune.recipe import load_recipe

PLANNED = recipe_headers.planned_recipes()
QUICK = ("llama3.1-8b/qlora.yaml", "mistral-7b-v0.3/full.yaml", "qwen3-0.6b/full.yaml", "qwen3-vl-4b/lora.yaml")


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[] if i % 3 == 0 else pytest.mark.long) for i, path in enumerate(PLANNED)],
    ids=name_of,
)
def test_a_header_says_what_a_rank_keeps(path: Path) -> None:
    text, recipe = path.read_text(encoding="utf-8"), load_recipe(path, [])
    kept = recipe_headers.kept(recipe, config_and_source(recipe)[0], recipe_headers.launch_of(text))
    words = recipe_headers.kept_words(kept)
    assert words in " ".join(text.replace("\n#", " ").split()), "python scripts/docs/recipe_headers.py"


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[] if name_of(path) in QUICK else pytest.mark.long) for path in PLANNED],
    ids=name_of,
)
def test_a_header_is_made_by_plan(path: Path) -> None:
    assert recipe_headers.made(path) == path.read_text(encoding="utf-8"), "python scripts/docs/recipe_headers.py"
