"""The form of a recipe's keys: an edit changes one value of the text, and keeps its comments and order."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from finetune.desk.studio.recipe_form import KEYS, form_fields, form_values, with_value
from finetune.errors import UserError
from finetune.recipe.yaml_tree import read
from finetune.shipped import SHIPPED

BLOCK = """\
# a header
run:
  name: first  # of the folder
model: {name: org/small}
mode: full

data:
  # rows
  train: rows.jsonl
  max_length: 64
batch: {rows: 4, rows_per_device: 2}
optimizer:
  lr: 1.0e-3
train:
"""

EDITS = [  # key, value, the line that is there before, what is there then
    ("run.name", "second", "  name: first  # of the folder", "  name: second  # of the folder"),
    ("run.name", "yes", "  name: first  # of the folder", "  name: 'yes'  # of the folder"),
    ("run.seed", "7", "  name: first  # of the folder", "  name: first  # of the folder\n  seed: 7"),
    ("mode", "lora", "mode: full", "mode: lora"),
    ("model.name", "a: b", "model: {name: org/small}", "model: {name: 'a: b'}"),
    ("data.max_length", "128", "  max_length: 64", "  max_length: 128"),
    ("data.max_length", "", "  max_length: 64\n", ""),
    ("data.packing", "false", "  max_length: 64", "  max_length: 64\n  packing: false"),
    ("batch.rows", "8", "{rows: 4, rows_per_device: 2}", "{rows: 8, rows_per_device: 2}"),
    ("batch.rows", "", "{rows: 4, rows_per_device: 2}", "{rows_per_device: 2}"),
    ("batch.rows_per_device", "", "{rows: 4, rows_per_device: 2}", "{rows: 4}"),
    ("batch.rows_per_device", "auto", "rows_per_device: 2", "rows_per_device: auto"),
    ("optimizer.lr", "1e-4", "  lr: 1.0e-3", "  lr: 1e-4"),
    ("optimizer.lr", "", "optimizer:\n  lr: 1.0e-3\n", ""),
    ("train.max_steps", "6", "train:\n", "train:\n  max_steps: 6\n"),
    ("lora.rank", "8", "train:\n", "train:\nlora:\n  rank: 8\n"),
    ("lora.rank", "", "train:\n", "train:\n"),
]


@pytest.mark.parametrize(("key", "value", "before", "after"), EDITS)
def test_a_field_changes_its_value_alone(key: str, value: str, before: str, after: str) -> None:
    assert BLOCK.count(before) == 1
    edited = with_value(BLOCK, key, value)
    assert edited == BLOCK.replace(before, after)
    assert form_values("x.yaml", edited)[key]["written"] == value


@pytest.mark.parametrize(
    ("text", "key", "value", "said"),
    [
        ("a: [", "mode", "lora", "line 1: not valid YAML, so the form waits"),
        ("[1]", "mode", "lora", "this recipe has no sections"),
        ("model: org/small\n", "model.name", "x", "model: is written in short"),
        ("run: {name: [a]}\n", "run.name", "x", "run.name: is a section or a list"),
        ("a: &x {rows: 1}\nbatch: *x\n", "batch.rows", "2", "batch.rows: cannot be changed here without changing more"),
        (BLOCK, "batch.rows", "2}\nmode: lora", "is not a number or a name"),
        (BLOCK, "data.train", "x", "not a key of the form"),
    ],
)
def test_what_is_no_small_edit_is_refused(text: str, key: str, value: str, said: str) -> None:
    with pytest.raises(UserError, match="Fix: ") as error:
        with_value(text, key, value)
    assert said in str(error.value)


def test_every_field_is_a_key_of_the_recipe_and_knows_its_choices() -> None:
    fields = {field.key: field for field in form_fields()}
    assert tuple(fields) == KEYS
    assert fields["mode"].choices == ("full", "lora", "qlora")
    assert fields["train.precision"].choices == ("fp32", "bf16", "fp16", "bf16_true", "fp8")
    assert fields["train.activation_checkpointing"].choices == ("selective", "true", "false")
    assert fields["data.packing"].choices == ("true", "false")
    assert [key for key, field in fields.items() if field.is_text] == ["run.name", "model.name"]
    assert not [key for key, field in fields.items() if field.choices and key.endswith(("lr", "rows", "steps"))]


SHIPPED_RECIPES = sorted(
    str(path.relative_to(SHIPPED)) for path in (SHIPPED / "recipes").rglob("*.yaml") if path.parent.name != "tasks"
)[::10]


@pytest.mark.parametrize("name", SHIPPED_RECIPES)
def test_the_form_edits_shipped_recipes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any field of any of them: the text has the value then, and nothing else differs."""
    monkeypatch.chdir(SHIPPED)
    text = Path(name).read_text(encoding="utf-8")
    for field in form_fields():
        value = field.choices[0] if field.choices else "word" if field.is_text else "3"
        section, _, key = field.key.rpartition(".")
        if section and not isinstance(yaml.safe_load(text).get(section, {}), dict):  # `model: ID`
            continue
        edited = with_value(text, field.key, value)
        values = yaml.safe_load(edited)
        assert str((values[section] if section else values)[key]).lower() == value
        assert [line for line in text.splitlines() if line.startswith("#")] == [
            line for line in edited.splitlines() if line.startswith("#")
        ]


def test_values_that_hold_come_from_bases_and_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = BLOCK.replace("train:\n", "train: {max_steps: 3}\n")
    (tmp_path / "base.yaml").write_text(text)
    (tmp_path / "own.yaml").write_text("extends: base.yaml\nmode: full\n")
    assert read(tmp_path / "own.yaml").values["mode"] == "full"
    values = form_values("own.yaml", "extends: base.yaml\nmode: full\n")
    assert values["mode"] == {"written": "full", "holds": "full"}
    assert values["data.max_length"] == {"written": "", "holds": "64"}  # of the base
    assert values["data.packing"] == {"written": "", "holds": "true"}  # by default
    assert values["optimizer.lr"] == {"written": "", "holds": "0.001"}
    edited = with_value("extends: base.yaml\nmode: full\n", "optimizer.lr", "1e-4")
    assert form_values("own.yaml", edited)["optimizer.lr"] == {"written": "1e-4", "holds": "0.0001"}
