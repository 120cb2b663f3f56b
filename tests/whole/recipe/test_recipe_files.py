"""Every recipe that ships: it loads, its header is honest, editors can check it, common numbers of processes fit."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from repository import ROOT

from finetune.features import load_recipe
from finetune.recipe import recipe_json_schema
from finetune.recipe.load import key_is_known

RECIPES = ROOT / "recipes"
FILES = sorted(path for path in RECIPES.rglob("*.yaml") if path.parent.name != "tasks")  # those are lm_eval's
COMPLETE = [path for path in FILES if path.parent.name != "base"]
SHARED = [path for path in FILES if path.parent.name == "base"]
SCHEMA = RECIPES / "recipe.schema.json"


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def header(path: Path) -> str:
    """The comment that opens a file, without its `#`."""
    lines = path.read_text().splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(line[1:] for line in lines[:end])


every_file = pytest.mark.parametrize("path", FILES, ids=name_of)
every_recipe = pytest.mark.parametrize("path", COMPLETE, ids=name_of)


def test_recipes_are_found():
    assert COMPLETE
    assert SHARED


@every_recipe
def test_loads_and_is_named_after_its_file(path: Path):
    recipe = load_recipe(path)
    assert recipe.run.name == f"{path.parent.name}-{path.stem}"
    assert recipe.mode == path.stem.rpartition("-")[2]  # dpo-lora


@every_file
def test_editors_find_the_schema(path: Path):
    first = path.read_text().splitlines()[0]
    assert first.startswith("# yaml-language-server: $schema=")
    assert (path.parent / first.partition("=")[2]).resolve() == SCHEMA.resolve()


def test_schema_file_is_current():
    assert SCHEMA.read_text() == recipe_json_schema(), (
        "recipes/recipe.schema.json is not what the code says; make it anew: "
        "python -m finetune schema > recipes/recipe.schema.json"
    )


@functools.cache
def validator() -> Any:
    schema = json.loads(SCHEMA.read_text())
    kind = jsonschema.validators.validator_for(schema)
    kind.check_schema(schema)
    return kind(schema)


@every_file
def test_valid_by_the_json_schema_and_for_any_yaml_reader(path: Path):
    """PyYAML's own loader reads YAML 1.1: a recipe that ships avoids what the versions read differently."""
    validator().validate(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize(
    ("key", "value"),
    [("bacth", {}), ("batch", {"rows": 0}), ("mode", "lorra"), ("run", {"sed": 1}), ("optimizer", {"betas": [0.9]})],
)
def test_the_json_schema_refuses(key: str, value: object):
    with pytest.raises(jsonschema.ValidationError):
        validator().validate({key: value})


@every_recipe
def test_header(path: Path):
    text = header(path)
    relative = path.relative_to(RECIPES.parent).as_posix()
    if "--num_machines" in text:  # several machines: accelerate's own launcher on each
        assert re.search(r"Launch:(.|\n)*accelerate launch --config_file accelerate_configs/\w+\.yaml", text)
        assert f"-m finetune train {relative}" in text
    else:
        assert re.search(r"Launch:(.|\n)*--config-file accelerate_configs/\w+\.yaml", text)
        assert f"python -m finetune launch {relative}" in text
    assert "Sources:" in text
    assert "https://" in text.partition("Sources:")[2]
    assert "verified on hardware" not in text  # README.md says it once


@every_file
def test_header_names_files_that_exist(path: Path):
    named = re.findall(r"(?<![\w/])(\.\./[\w./-]+\.yaml)", header(path))
    assert [name for name in named if not (path.parent / name).is_file()] == []


@every_file
def test_comments_name_keys_that_exist(path: Path):
    comments = "\n".join(re.findall(r"#.*", path.read_text()))
    sections = "run|model|lora|quantization|data|objective|batch|optimizer|schedule|train|evaluate|checkpoint|tracking"
    named = re.findall(rf"(?<![\w/.])((?:{sections})\.[a-z_.]+)(?![\w/])", comments)
    assert [key for key in named if not key_is_known(key) and not key.endswith((".yaml", ".jsonl"))] == []


@every_file
def test_nothing_is_sent_to_a_tracker_unless_the_user_asks(path: Path):
    assert "tracking" not in yaml.safe_load(path.read_text())


@every_recipe
def test_rows_fit_common_numbers_of_processes(path: Path):
    batch = load_recipe(path).batch
    processes = (1, 2) if path.parent.name == "quickstart" else (1, 2, 4, 8)
    assert [n for n in processes if batch.rows % (batch.rows_per_device * n)] == []


@every_recipe
def test_a_base_model_is_given_a_chat_template(path: Path):
    model = load_recipe(path).model
    if model.name is not None and "/model" not in model.name:
        brings_one = r"Instruct|-it$|gpt-oss|granite-4.0|Nemotron-(Nano|3.5)|Qwen3\.[68]-|Mistral-Large-4|DeepSeek-V3"
        source = model.tokenizer or model.name
        instruct = re.search(brings_one, source) and "Mistral-Small-3.2" not in source  # it brings none
        assert bool(instruct) == (model.chat_template is None)
        template = RECIPES.parent / f"finetune/data/chat/templates/{model.chat_template}.jinja"
        assert model.chat_template is None or template.is_file()
