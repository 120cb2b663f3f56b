"""A resume under the same paths, which hold something else: each change is told by name, on any launch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml
from conftest import launch, train_alone
from safetensors.torch import load_file, save_file

from finetune.checkpoints.inputs import short
from finetune.errors import UserError


class World:
    """A model's folder, rows and a run of four steps by each mode, whose files a test changes and gets back."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.model = tiny.save_model(folder, "mistral")
        self.rows = [_row(i) for i in range(60)]
        tiny.write_rows(folder / "rows.jsonl", self.rows)
        tiny.write_rows(folder / "held_out.jsonl", self.rows[:8])
        self.recipes = {mode: self._recipe(mode) for mode in ("lora", "full")}

    def _recipe(self, mode: str) -> Path:
        values = {
            "run": {"name": mode, "dir": str(self.folder / "runs")},
            "model": {"name": str(self.model)},
            "mode": mode,
            **({"lora": {"rank": 2}} if mode == "lora" else {}),
            "data": {
                "train": [{"path": str(self.folder / "rows.jsonl"), "format": "messages"}],
                "eval": [{"path": str(self.folder / "held_out.jsonl"), "format": "messages"}],
                "max_length": 64,
            },
            "batch": {"rows": 4, "rows_per_device": 2},
            "optimizer": {"lr": 1e-3},
            "train": {"max_steps": 4, "precision": "fp32"},
            "evaluate": {"at_start": False},
            "checkpoint": {"every_steps": 2},
        }
        path = self.folder / f"{mode}.yaml"
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        return path

    def run(self, mode: str) -> Path:
        return self.folder / "runs" / mode

    @contextlib.contextmanager
    def changed(self, *changes: Callable[[World], None]) -> Iterator[None]:
        kept = self.folder.with_name("kept")
        shutil.copytree(self.folder, kept, ignore=shutil.ignore_patterns("runs"))
        try:
            for change in changes:
                change(self)
            yield
        finally:
            shutil.rmtree(self.model)
            shutil.copytree(kept, self.folder, dirs_exist_ok=True)
            shutil.rmtree(kept)

    def write_rows(self, rows: list[Any]) -> None:
        tiny.write_rows(self.folder / "rows.jsonl", rows)

    def edit(self, name: str, edit: Callable[[dict[str, Any]], object]) -> None:
        values = json.loads((self.model / name).read_text(encoding="utf-8"))
        edit(values)
        (self.model / name).write_text(json.dumps(values), encoding="utf-8")


def _row(i: int) -> dict[str, Any]:
    said = [("user", f"{i} and {i + 3}"), ("assistant", f"that is {2 * i + 3}"), ("user", "so"), ("assistant", "yes")]
    return {"messages": [{"role": role, "content": text} for role, text in said]}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = World(tmp_path_factory.mktemp("inputs") / "world")
    for recipe in world.recipes.values():
        train_alone(recipe)
    return world


# --- changes


def digits_in_an_answer(world: World) -> None:
    rows = json.loads(json.dumps(world.rows))
    for row in rows[10:50]:
        text = row["messages"][1]["content"]
        row["messages"][1]["content"] = text[:-1] + str((int(text[-1]) + 1) % 10)
    world.write_rows(rows)


def a_row_for_another_of_its_length(world: World) -> None:
    other = json.loads(json.dumps(world.rows[20]).replace("yes", "yet"))
    world.write_rows([*world.rows[:20], other, *world.rows[21:]])


def the_order_of_rows(world: World) -> None:
    world.write_rows([*world.rows[1:], world.rows[0]])


def a_turn_that_is_not_trained(world: World) -> None:
    rows = json.loads(json.dumps(world.rows))
    rows[5]["messages"][1]["train"] = False
    world.write_rows(rows)


def ids_in_the_tokenizer(world: World) -> None:
    def swap(values: dict[str, Any]) -> None:
        vocabulary = values["model"]["vocab"]
        for one, other in zip("ABCDEFGH", "STUVWXYZ", strict=True):
            vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]

    world.edit("tokenizer.json", swap)


def a_special_token(world: World) -> None:
    world.edit("tokenizer_config.json", lambda values: values.update(pad_token="<|im_start|>"))


def the_chat_template(world: World) -> None:
    path = world.model / "chat_template.jinja"
    path.write_text(path.read_text(encoding="utf-8").replace("\n' }}{% if", "\n\n' }}{% if"), encoding="utf-8")
    path.write_text("{# another #}" + path.read_text(encoding="utf-8"), encoding="utf-8")


def the_mask_of_the_template(world: World) -> None:
    path = world.model / "chat_template.jinja"
    text = path.read_text(encoding="utf-8")
    moved = text.replace("<|im_end|>{% endgeneration %}", "<|im_end|>\n{% endgeneration %}")
    assert moved != text
    path.write_text(moved, encoding="utf-8")


def the_epsilon_of_norms(world: World) -> None:
    world.edit("config.json", lambda values: values.update(rms_norm_eps=1e-3))


def the_base_of_rope(world: World) -> None:
    world.edit("config.json", lambda values: values["rope_parameters"].update(rope_theta=500.0))


def the_tied_head(world: World) -> None:
    world.edit("config.json", lambda values: values.update(tie_word_embeddings=True))


def the_sliding_window(world: World) -> None:
    world.edit("config.json", lambda values: values.update(sliding_window=16))


def one_tensor(world: World) -> None:
    file = world.model / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight"] += 0.01
    save_file(tensors, file, metadata={"format": "pt"})


def one_byte_in_the_middle(world: World) -> None:
    file = world.model / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def a_file_of_weights_more(world: World) -> None:
    shutil.copyfile(world.model / "model.safetensors", world.model / "model-00002-of-00002.safetensors")


# What is told, besides what follows from it.
CHANGES: dict[Callable[[World], None], str] = {
    digits_in_an_answer: "data: train[0].tokens: ",
    a_row_for_another_of_its_length: "data: train[0].tokens: ",
    the_order_of_rows: "data: train[0].tokens: ",
    a_turn_that_is_not_trained: "data: train[0].loss masks: ",
    ids_in_the_tokenizer: "tokenizer: ids of tokens: ",
    a_special_token: 'tokenizer: pad_token: "<pad>" -> "<|im_start|>"',
    the_chat_template: "tokenizer: chat template: ",
    the_mask_of_the_template: "data: train[0].loss masks: ",
    the_epsilon_of_norms: "config: rms_norm_eps: 1e-06 -> 0.001",
    the_base_of_rope: "config: rope_parameters.rope_theta: 10000.0 -> 500.0",
    the_tied_head: "config: tie_word_embeddings: false -> true",
    the_sliding_window: "config: sliding_window: 8 -> 16",
    one_tensor: "base: model.safetensors: ",
    one_byte_in_the_middle: "base: model.safetensors: ",
    a_file_of_weights_more: "base: model-00002-of-00002.safetensors: null -> ",
}
OF_THE_BASE = (one_tensor, one_byte_in_the_middle, a_file_of_weights_more)


def resumed(world: World, mode: str) -> str:
    """What a person is told who trains on."""
    steps = 4 if mode == "full" else 6  # of full training, that says it and goes on, nothing is left to do
    try:
        return train_alone(world.recipes[mode], f"train.max_steps={steps}")
    except UserError as error:
        return str(error)


def check(world: World, mode: str, change: Callable[[World], None], told: str) -> None:
    assert CHANGES[change] in told
    goes_on = mode == "full" and change in OF_THE_BASE
    assert ("no effect: the weights are the checkpoint's" in told) == goes_on
    assert ("belongs to another run" in told) != goes_on


BRIEF = [("lora", digits_in_an_answer), ("lora", one_byte_in_the_middle), ("full", one_tensor)]


@pytest.mark.parametrize(("mode", "change"), BRIEF)
def test_other_content_is_told_by_name(world: World, mode: str, change: Callable[[World], None]) -> None:
    before = (world.run(mode) / "metrics.jsonl").read_bytes()
    with world.changed(change):
        check(world, mode, change, resumed(world, mode))
    assert (world.run(mode) / "metrics.jsonl").read_bytes() == before


@pytest.mark.long
@pytest.mark.parametrize("change", [*CHANGES])
@pytest.mark.parametrize("mode", ["lora", "full"])
def test_every_change_is_told_by_name(world: World, mode: str, change: Callable[[World], None]) -> None:
    with world.changed(change):
        check(world, mode, change, resumed(world, mode))


def test_two_processes_are_told_of_every_change_at_once(world: World) -> None:
    changes = (digits_in_an_answer, a_special_token, the_epsilon_of_norms, one_tensor)
    with world.changed(*changes):
        done = launch("ddp", 2, "train", world.recipes["lora"], "train.max_steps=6")
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    for change in changes:
        assert CHANGES[change] in done.stderr
    assert "checkpoint.accept_changes=[data,tokenizer,config,base]" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("change", [*CHANGES])
@pytest.mark.parametrize("mode", ["lora", "full"])
def test_every_change_is_told_on_two_processes(world: World, mode: str, change: Callable[[World], None]) -> None:
    with world.changed(change):
        done = launch("ddp", 2, "train", world.recipes[mode], f"train.max_steps={4 if mode == 'full' else 6}")
    assert "Traceback" not in done.stderr
    assert (done.returncode == 0) == (mode == "full" and change in OF_THE_BASE), done.stderr
    check(world, mode, change, done.stdout + done.stderr)


def test_another_objective_in_the_same_file_is_told(world: World, tmp_path: Path) -> None:
    file, recipe = tmp_path / "loss.py", world.recipes["lora"]
    changes = ("run.name=own", f"objective={{file: {file}, function: f}}")
    text = 'def f(token_losses):\n    return token_losses.sum(), "target_tokens"\n'
    file.write_text(text, encoding="utf-8")
    train_alone(recipe, *changes)
    file.write_text(text.replace("sum()", "sum() * 2"), encoding="utf-8")
    with pytest.raises(UserError, match=r"objective: file: .* -> ") as refused:
        train_alone(recipe, *changes, "train.max_steps=6")
    assert "Fix: restore the objective, or" in str(refused.value)
    accepted = "checkpoint.accept_changes=[objective]"
    assert accepted in str(refused.value)
    assert "objective: file: " in train_alone(recipe, *changes, "train.max_steps=6", accepted)


def test_moved_files_are_the_same_and_accepted_changes_are_said(world: World, tmp_path: Path) -> None:
    """The same rows and weights under other paths differ by the recipe's keys alone."""
    shutil.copytree(world.folder, tmp_path / "moved")
    text = world.recipes["lora"].read_text(encoding="utf-8").replace(str(world.folder), str(tmp_path / "moved"))
    recipe = tmp_path / "moved.yaml"
    recipe.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as refused:
        train_alone(recipe, "train.max_steps=5")
    assert "accept_changes=[model,data.train]" in str(refused.value)
    assert "data:" not in str(refused.value)

    moved = World.__new__(World)
    moved.folder, moved.model, moved.rows = tmp_path / "moved", tmp_path / "moved" / "mistral", world.rows
    digits_in_an_answer(moved)
    said = train_alone(recipe, "train.max_steps=5", "checkpoint.accept_changes=[model,data.train,data]")
    assert "changed since then: data: train[0].tokens: " in said
    state = json.loads((tmp_path / "moved/runs/lora/checkpoints/step-00000005/state.json").read_text(encoding="utf-8"))
    inputs = json.loads((tmp_path / "moved/runs/lora/inputs.json").read_text(encoding="utf-8"))
    assert state["inputs"] == inputs
    card = (tmp_path / "moved/runs/lora/model/README.md").read_text(encoding="utf-8")
    assert f"| What was read | {short(inputs)} |" in card
    assert train_alone(recipe, "train.max_steps=6", "train.result=last").count("data:") == 0


def test_a_checkpoint_of_an_earlier_version_resumes_and_says_so(world: World, tmp_path: Path) -> None:
    shutil.copytree(world.run("lora"), tmp_path / "lora")
    (folder,) = (tmp_path / "lora" / "checkpoints").glob("step-*4")
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    del state["inputs"]
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    content = (folder / "state.json").read_bytes()
    manifest["files"]["state.json"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    said = train_alone(world.recipes["lora"], f"run.dir={tmp_path}", "train.max_steps=5")
    assert "note: the checkpoint is of an earlier version" in said
    assert "step 4 of 5" in said


def test_a_stream_is_compared_as_far_as_it_was_read(world: World, tmp_path: Path) -> None:
    rows, path = [_row(i) for i in range(200)], tmp_path / "rows.jsonl"
    tiny.write_rows(path, rows[:150])
    values = yaml.safe_load(world.recipes["full"].read_text(encoding="utf-8"))
    values["run"] = {"name": "stream", "dir": str(tmp_path / "runs")}
    values["data"] |= {"train": [{"path": str(path), "format": "messages"}], "streaming": True, "window": 8}
    recipe = tmp_path / "stream.yaml"
    recipe.write_text(yaml.safe_dump(values), encoding="utf-8")
    train_alone(recipe)
    state = json.loads(next((tmp_path / "runs").rglob("step-*4/state.json")).read_text(encoding="utf-8"))
    assert state["consumed"]["windows"] > 1
    assert "data:" not in train_alone(recipe, "train.max_steps=5")

    tiny.write_rows(path, rows)  # it has grown: what was trained on is the same
    with pytest.raises(UserError) as refused:
        train_alone(recipe, "train.max_steps=6")
    assert "data: train[0].source: " in str(refused.value)
    assert "consumed" not in str(refused.value)
    assert "changed since then: data: train[0].source: " in train_alone(
        recipe, "train.max_steps=6", "checkpoint.accept_changes=[data]"
    )
    rows[3]["messages"][1]["content"] = "that is 0"
    tiny.write_rows(path, rows)
    with pytest.raises(UserError, match=r"data: consumed\.content: ") as refused:
        train_alone(recipe, "train.max_steps=7")
    assert "checkpoint.accept_changes=[data]" in str(refused.value)
