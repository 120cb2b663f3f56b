"""`yes`, `no`, `on` and `off`, truth values of YAML 1.1: wherever a recipe takes text besides a switch, understood or
refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from finetune.recipe.load import _annotation_at, _dotted_names, _is_text, load_recipe
from finetune.recipe.schema import Mlflow, Wandb
from finetune.recipe.shorthands import PLAIN_WORDS, SHORTHANDS
from finetune.recipe.yaml_tree import RecipeError, dump

GOOD = """
run: {name: a}
model: {name: org/model}
mode: lora
lora: {rank: 16}
data: {train: [{path: a.jsonl, format: messages}], max_length: 128}
batch: {rows: 8}
optimizer: {lr: 1e-4}
train: {epochs: 1}
"""
OFF = ["off", "no", "Off", "NO", "'false'", "'off'", "none", "null", "disabled", "false", "n", "~"]
ON = ["on", "yes", "True", "'true'", "y", "enabled"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD)
    return path


def is_switch(annotation: Any) -> bool:
    """Whether a type has text, and null, a truth value or a section as well."""
    return str in get_args(annotation) and len(get_args(annotation)) > 1


# By construction of the schema: a new key is here by itself.
SWITCHES = [
    key
    for key in _dotted_names()
    if (parts := tuple(key.split("."))) in SHORTHANDS or (_is_text(parts) and is_switch(_annotation_at(parts)))
]


def test_the_switches_of_the_schema() -> None:
    some = {"tracking.wandb", "tracking.trackio", "data.eval", "model.chat_template", "rollouts.replay"}
    assert some <= set(SWITCHES)
    assert len(SWITCHES) > 20


@pytest.mark.parametrize("key", sorted(set(SWITCHES) - {"model.name"}))
@pytest.mark.parametrize("word", ["off", "No", "on", "YES"])
def test_a_word_is_understood_or_refused(key: str, word: str, recipe: Path, tmp_path: Path) -> None:
    section, name = key.split(".")[0], ".".join(key.split(".")[1:])
    in_list = section == "rewards"
    parts = name.split(".")
    yaml = word
    for part in reversed(parts):
        yaml = f"{{{part}: {yaml}}}"
    top = tmp_path / "top.yaml"
    if key.startswith(("data.train.", "data.eval.")):
        item = f"[{{path: a.jsonl, {key.rpartition('.')[2]}: {word}}}]"
        top.write_text(f"extends: recipe.yaml\ndata: {{{parts[0]}: {item}}}\n")
        place = f"data.{parts[0]}[0].{parts[-1]}"
    else:
        top.write_text(f"extends: recipe.yaml\n{section}: {f'[{yaml}]' if in_list else yaml}\n")
        place = f"rewards[0].{name}" if in_list else key
    if key in ("tracking.wandb", "tracking.mlflow", "tracking.trackio"):
        value = getattr(load_recipe(top).tracking, name)
        assert (value is None) == (word.lower() in ("off", "no"))
        return
    if key in ("run.push", "train.graphs") and word.lower() in ("off", "no"):
        loaded = load_recipe(top)
        assert (loaded.run.push, loaded.train.graphs) == (None, "off")
        return
    with pytest.raises(RecipeError) as error:
        load_recipe(top)
    assert any(f"top.yaml:2: {place}: " in line for line in str(error.value).splitlines()), error.value


@pytest.mark.parametrize("as_override", [False, True])
@pytest.mark.parametrize(("words", "is_on"), [(OFF, False), (ON, True)], ids=["off", "on"])
def test_a_tracker_is_switched(words: list[str], is_on: bool, as_override: bool, recipe: Path) -> None:
    for word in words:
        if as_override:
            loaded = load_recipe(
                recipe, [f"tracking.{name}={word}" for name in ("wandb", "mlflow", "trackio")]
            ).tracking
        else:
            recipe.write_text(f"{GOOD}tracking: {{wandb: {word}, mlflow: {word}, trackio: {word}}}\n")
            loaded = load_recipe(recipe).tracking
        expected = (Wandb(), Mlflow(), "finetune") if is_on else (None, None, None)
        assert (loaded.wandb, loaded.mlflow, loaded.trackio) == expected, word
    assert load_recipe(recipe, ["tracking.wandb=mine"]).tracking.wandb == Wandb(project="mine")


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("model: {chat_template_arguments: {enable_thinking: off}}", "model.chat_template_arguments.enable_thinking"),
        ("model: {name: null, config: {model_type: llama, tie_word_embeddings: no}}", "model.config.tie_word_embedd"),
        ("data: {packing: no}", "data.packing"),
        ("train: {activation_checkpointing: off}", "train.activation_checkpointing"),
        ("objective: {name: orpo, share_prompts: on}", "objective.share_prompts"),
    ],
)
def test_a_word_is_never_a_true_text(line: str, key: str, recipe: Path) -> None:
    """In Jinja and Python `"off"` is true."""
    top = recipe.with_name("top.yaml")
    top.write_text(f"extends: recipe.yaml\n{line}\n")
    with pytest.raises(RecipeError, match=rf"top\.yaml:2: {key}\S*: (`(off|no)` may mean false or text|expected )"):
        load_recipe(top)


def test_a_quoted_word_is_text(recipe: Path) -> None:
    recipe.write_text(GOOD.replace("{name: org/model}", '{name: org/model, chat_template_arguments: {x: "off"}}'))
    loaded = load_recipe(recipe, ["data.train.0.config='no'", "model.name=no"])
    assert loaded.model.chat_template_arguments == {"x": "off"}
    assert (loaded.data.train[0].config, loaded.model.name) == ("no", "no")
    recipe.write_text(dump(loaded.model_dump(mode="json")))  # the dump quotes them
    assert load_recipe(recipe) == loaded


@pytest.mark.parametrize("word", PLAIN_WORDS)
def test_labels_may_be_words(word: str, recipe: Path) -> None:
    recipe.write_text(
        GOOD.replace("format: messages", "format: classification")
        + f"objective: {{name: classify, labels: [{word}, b]}}"
    )
    assert load_recipe(recipe).objective.labels == (word, "b")
