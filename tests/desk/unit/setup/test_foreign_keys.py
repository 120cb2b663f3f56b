"""The rows about keys of other tools name what the schema has, are answered, and are read when one is asked for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter
from repository import ROOT

from finetune.desk.setup.foreign_keys import FILES, FOLDER, ForeignRow, foreign_tool, unknown_key_hint
from finetune.features import load_recipe
from finetune.recipe import RecipeError
from finetune.recipe.load import _annotation_at, key_is_known  # pyright: ignore[reportPrivateUsage]
from finetune.recipe.objective_settings import OBJECTIVE_SECTIONS
from finetune.recipe.schema import Source

GOOD = """\
run: {name: a}
model: {name: org/model}
mode: lora
lora: {rank: 16, targets: [q_proj, v_proj]}
data: {train: [{path: a.jsonl, format: messages}], max_length: 64}
batch: {rows: 8}
optimizer: {lr: 1e-4}
train: {epochs: 1}
"""
TEMPLATES = {path.stem for path in (ROOT / "finetune/data/chat/templates").glob("*.jinja")}
SECTIONS = "run|model|lora|quantization|data|objective|rollouts|batch|optimizer|schedule|train|evaluate|checkpoint"
# Files whose keys a tool takes besides its own.
BESIDE = {"unsloth": ("trl", "transformers"), "unsloth_cli": ("unsloth", "transformers"), "transformers": ()}
ALL = sorted(path.stem for path in FOLDER.glob("*.yaml"))


def test_every_file_is_read() -> None:
    assert set(ALL) - set(FILES) == {"unsloth_cli"}  # which has defaults alone


@pytest.mark.parametrize("name", ALL)
def test_keys_that_rows_name_exist(name: str) -> None:
    tool = foreign_tool(name)
    assert [row.ours for row in tool.keys.values() if row.ours and not key_is_known(row.ours)] == []
    assert [row.ours for row in tool.sources.values() if row.ours and row.ours not in Source.model_fields] == []
    assert [one for one in tool.sources if one in Source.model_fields] == []
    assert all((row.ours is None) != (not row.note) for row in (*tool.keys.values(), *tool.sources.values()))
    rows = [*tool.keys.values(), *tool.sources.values(), *(row for _, _, row in values_of(name))]
    named = re.findall(rf"[`{{]((?:{SECTIONS}|tracking)\.[a-z_]+)", " ".join(row.hint + row.doubt for row in rows))
    assert named or not rows
    assert [key for key in named if not key_is_known(key)] == []


def values_of(name: str) -> list[tuple[str, str, ForeignRow]]:
    return [(key, theirs, row) for key, rows in foreign_tool(name).values.items() for theirs, row in rows.items()]


@pytest.mark.parametrize("name", ALL)
def test_values_that_rows_name_exist(name: str) -> None:
    """A value is one of the schema's, and so are the keys that come with it."""
    for key, _, row in values_of(name):
        assert key_is_known(key)
        TypeAdapter(_annotation_at(tuple(key.split(".")))).validate_python(row.ours) if row.ours else None
        assert key != "model.chat_template" or row.ours in (None, *TEMPLATES)
        for other in row.sets:
            assert key_is_known(other) or key_is_known(f"{key.rpartition('.')[0]}.{other}")


@pytest.mark.parametrize("name", ALL)
def test_defaults_and_marks_are_keys_of_the_tool(name: str) -> None:
    tool = foreign_tool(name, *BESIDE.get(name, ("transformers",)))
    rows = [row for _, _, row in values_of(name)]
    given = {*tool.defaults, *(one for row in rows for one in (*row.defaults, *row.marks))}
    assert given - tool.keys.keys() == set()


@pytest.mark.parametrize("name", ALL)
def test_a_key_is_written_once(name: str) -> None:
    content: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    for rows in (content.get("keys", {}), content.get("sources", {}), *content.get("values", {}).values()):
        names = [one for key in rows for one in key.split(", ")]
        assert len(names) == len(set(names))
    nodes = yaml.compose((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    assert isinstance(nodes, yaml.MappingNode)
    for part, section in nodes.value:
        written = [key.value for key, _ in section.value]
        assert (part.value, len(written)) == (part.value, len(set(written)))


WITHOUT_COUNTERPART = {"focal", "classify", "own"}  # no tool has them in its configs


def test_every_objective_has_a_row() -> None:
    reached = {row.ours for name in FILES for key, _, row in values_of(name) if key == "objective.name"}
    assert set(OBJECTIVE_SECTIONS) - reached == WITHOUT_COUNTERPART
    assert foreign_tool("trl").value("objective.name", "grpo").ours == "grpo"


def test_every_key_is_answered_with_its_row(tmp_path: Path) -> None:
    names = sorted(name for name in unknown_key_hint("") if "." not in name)
    for part in range(0, len(names), 40):
        some = names[part : part + 40]
        path = write(tmp_path / "recipe.yaml", GOOD + "".join(f"{name}: 1\n" for name in some))
        with pytest.raises(RecipeError) as caught:
            load_recipe(path)
        answers = {str(problem.key[0]): problem.message for problem in caught.value.problems}
        for name in some:
            text = unknown_key_hint("")[name]
            assert answers[name] == "unknown key; " + (text if " " in text else f"did you mean `{text}`?")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimizer: {_component_: torch.optim.AdamW}", "did you mean `optimizer.name`?"),  # a dotted row
        ("lora: {r: 8, targets: all-linear}", "did you mean `lora.rank`?"),
        ("objective: {name: simpo}", "set `dpo` and `objective.loss: simpo`"),
        ("objective: {name: gkd}", "set `distill`, which learns from a teacher's predictions"),
        ("optimizer: {name: adamw_bnb_8bit, lr: 1e-4}", "set `adamw_8bit`"),
        ("data: {train: [{path: a, format: conversational}], max_length: 8}", "set `messages`"),
        ("data: {train: [{path: a, ds_type: json}], max_length: 8}", "the kind of a file follows from its name"),
        ("rewards: [{name: accuracy_reward}]", "set `boxed`"),
    ],
)
def test_hints_at_every_depth(text: str, message: str, tmp_path: Path) -> None:
    base = {key: value for key, value in yaml.safe_load(GOOD).items() if f"{key}:" not in text}
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(tmp_path / "recipe.yaml", yaml.safe_dump(base) + text + "\n"))
    assert message in str(caught.value)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


OPENED = """
import sys
opened = []
sys.addaudithook(lambda event, words: event == "open" and opened.append(str(words[0])))
from finetune.features import load_recipe
from finetune.recipe import RecipeError
load_recipe(sys.argv[1])
print(sum("/foreign/" in name for name in opened))
try:
    load_recipe(sys.argv[1], ["lora.lora_rank=8"])
except RecipeError:
    print(sum("/foreign/" in name for name in opened))
"""


def test_a_good_recipe_reads_no_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "recipe.yaml", GOOD)
    done = subprocess.run([sys.executable, "-c", OPENED, path], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", str(len(FILES))]
