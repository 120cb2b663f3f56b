"""The result folder: verified by reading it back, and replaced atomically."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from finetune.checkpoints.result import finish_replace, partial_path, start_replace, write_config
from finetune.checkpoints.weight_files import INDEX, Verification, WeightsWriter, weight_files
from finetune.errors import RunFailure

STATE = {"embed.weight": torch.ones(6, 4), "layer.weight": torch.ones(4, 4), "norm.weight": torch.ones(4)}
FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))


def write(folder: Path, shard_bytes: int) -> Path:
    folder.mkdir(exist_ok=True)
    writer = WeightsWriter(folder, shard_bytes)
    for name, tensor in STATE.items():
        writer.add(name, tensor)
    writer.finish()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    return folder


def verify(folder: Path) -> None:
    check = Verification(folder, {name: tensor.to("meta") for name, tensor in STATE.items()})
    for file in weight_files(folder):
        check.read(file)
    check.finish()


def change(file: str, changed: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        save_file(changed(load_file(folder / file)), folder / file)

    return damage


def change_index(changed: Callable[[dict], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        changed(index)
        (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")

    return damage


def with_value(value: float) -> Tensor:
    tensor = torch.ones(4)
    tensor[2] = value
    return tensor


@pytest.mark.parametrize("shard_bytes", [10**6, 160])
def test_a_written_result_verifies(tmp_path: Path, shard_bytes: int) -> None:
    verify(write(tmp_path, shard_bytes))


DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    (
        "missing",
        change(SECOND, lambda s: {"extra": s["norm.weight"]}),
        f"{SECOND}: extra: the model has no such tensor",
    ),
    ("dropped", change(FIRST, lambda s: {"embed.weight": s["embed.weight"]}), f"{FIRST}: layer.weight: is missing"),
    (
        "twice",
        change(SECOND, lambda s: {**s, "layer.weight": torch.ones(4, 4)}),
        f"layer.weight: is in {FIRST} as well",
    ),
    (
        "shape",
        change(SECOND, lambda _: {"norm.weight": torch.ones(2, 2)}),
        f"{SECOND}: norm.weight: has shape [2, 2] instead of [4]",
    ),
    (
        "dtype",
        change(SECOND, lambda _: {"norm.weight": torch.ones(4, dtype=torch.bfloat16)}),
        f"{SECOND}: norm.weight: is bfloat16 instead of float32",
    ),
    (
        "not a number",
        change(SECOND, lambda _: {"norm.weight": with_value(float("nan"))}),
        f"{SECOND}: norm.weight: 1 of 4 values are not finite in float32",
    ),
    (
        "infinite",
        change(SECOND, lambda _: {"norm.weight": with_value(float("-inf"))}),
        f"{SECOND}: norm.weight: 1 of 4 values are not finite in float32",
    ),
    ("truncated", lambda f: os.truncate(f / FIRST, 250), f"{FIRST}: cannot be read back"),
    ("empty", lambda f: os.truncate(f / FIRST, 0), f"{FIRST}: cannot be read back"),
    ("no file", lambda f: (f / FIRST).unlink(), "embed.weight: is missing"),
    (
        "file with another name",
        lambda f: (f / FIRST).rename(f / "a.safetensors"),
        f"{INDEX}: the files are not numbered",
    ),
    ("no index", lambda f: (f / INDEX).unlink(), f"{INDEX}: cannot be read back"),
    (
        "index elsewhere",
        change_index(lambda index: index["weight_map"].update({"norm.weight": FIRST})),
        f"{INDEX}: norm.weight: the index says {FIRST}, not {SECOND}",
    ),
    (
        "index with more",
        change_index(lambda index: index["weight_map"].update({"bias": FIRST})),
        f"{INDEX}: bias: the index says {FIRST}, not None",
    ),
    (
        "index of another size",
        change_index(lambda index: index["metadata"].update(total_size=1)),
        f"{INDEX}: total_size is 1, the tensors have 176 bytes",
    ),
    ("half a config", lambda f: (f / "config.json").write_text("{"), "config.json: cannot be read back"),
]


@pytest.mark.parametrize(("damage", "said"), [case[1:] for case in DAMAGE], ids=[case[0] for case in DAMAGE])
def test_damage_is_detected(tmp_path: Path, damage: Callable[[Path], object], said: str) -> None:
    folder = write(tmp_path, 160)
    assert [file.name for file in weight_files(folder)] == [FIRST, SECOND]
    damage(folder)
    with pytest.raises(RunFailure) as failure:
        verify(folder)
    assert said in str(failure.value)
    assert str(tmp_path) in str(failure.value)


def test_integers_need_not_be_finite(tmp_path: Path) -> None:
    save_file({"count": torch.ones(3, dtype=torch.int64)}, tmp_path / "model.safetensors")
    check = Verification(tmp_path, {"count": torch.ones(3, dtype=torch.int64, device="meta")})
    check.read(tmp_path / "model.safetensors")
    check.finish()


def make(folder: Path, content: str) -> Path:
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "file").write_text(content)
    return folder


def fill(folder: Path, content: str) -> None:
    (partial_path(folder) / "inner").mkdir()
    (partial_path(folder) / "inner" / "file").write_text(content)


def held(folder: Path) -> str:
    return (folder / "inner" / "file").read_text()


@pytest.mark.parametrize("earlier", [False, True])
def test_the_new_result_replaces_the_old_one(tmp_path: Path, earlier: bool) -> None:
    folder = tmp_path / "model"
    if earlier:
        make(folder, "old")
    start_replace(folder)
    assert held(folder) == "old" if earlier else not folder.exists()
    fill(folder, "new")
    finish_replace(folder)
    assert held(folder) == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("left", "stays"),
    [
        (("model", "model.partial"), "model"),  # stopped while writing
        (("model", "model.old"), "model"),  # stopped before the old one was gone
        (("model.old", "model.partial"), "model.old"),  # stopped between the two renames
    ],
)
def test_remains_of_an_interrupted_save_are_removed(tmp_path: Path, left: tuple[str, ...], stays: str) -> None:
    for name in left:
        make(tmp_path / name, name)
    start_replace(tmp_path / "model")
    assert held(tmp_path / "model") == stays
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.partial"]
    assert not list((tmp_path / "model.partial").iterdir())


def test_the_config_of_a_model_that_trains_on_is_not_changed(made: Path, tmp_path: Path) -> None:
    """As a sampler's copy of the weights is written in each step."""
    model = AutoModelForCausalLM.from_pretrained(made / "llama")
    model.config.use_cache = False
    before = model.config.to_dict()
    write_config(model, torch.bfloat16, tmp_path)
    assert model.config.to_dict() == before
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["use_cache"], written["dtype"]) == (True, "bfloat16")
