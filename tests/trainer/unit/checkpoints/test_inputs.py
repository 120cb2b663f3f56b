"""What a checkpoint keeps of rows, images and weights: another digest where the content is another, and only there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from finetune.data.dataset import build_training
from finetune.data.examples import prepare_examples
from finetune.data.streaming import Stream
from finetune.models.base_model import Base
from finetune.models.fingerprint import READ_WHOLE, base_content, base_enters_steps
from finetune.recipe import Recipe
from finetune.recipe.schema import Model


def recipe_of(model: Path, path: Path, format: str, objective: dict[str, Any] | None = None, **data: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "run": {"name": "r"},
            "model": {"name": str(model)},
            "data": {"train": [{"path": str(path), "format": format}], "max_length": 512, **data},
            "objective": objective or {},
            "mode": "full",
            "train": {"max_steps": 1, "precision": "fp32"},
            "batch": {"rows": 1},
            "optimizer": {"lr": 1e-3},
        }
    )


def content_of(recipe: Recipe) -> dict[str, Any]:
    assert recipe.model.name is not None
    examples = prepare_examples(recipe, recipe.data.train, Base.of(recipe).renderer(recipe.objective))
    return examples.content("train")["train[0]"]


def differing(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return {name for name in {*before, *after} if before.get(name) != after.get(name)}


# --- rows


def test_numbers_of_rows(made: Path, tmp_path: Path) -> None:
    rows = [row | {"margin": 0.5} for row in tiny.preferences(8)]
    recipe = recipe_of(made / "llama", tmp_path / "rows.jsonl", "preference", {"name": "reward"})
    tiny.write_rows(tmp_path / "rows.jsonl", rows)
    before = content_of(recipe)
    tiny.write_rows(tmp_path / "rows.jsonl", [*rows[:-1], rows[-1] | {"margin": 0.25}])
    assert differing(before, content_of(recipe)) == {"margin"}


def test_images_by_what_they_show_wherever_they_are(tmp_path: Path) -> None:
    model = tiny.save_seeing(tmp_path, "qwen2_5_vl")
    parts = [{"type": "image", "image": "a.bmp"}, {"type": "text", "text": "which?"}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "red"}]

    def content(folder: Path, colour: str) -> dict[str, Any]:
        folder.mkdir(exist_ok=True)
        Image.new("RGB", (60, 90), colour).save(folder / "a.bmp")
        tiny.write_rows(folder / "rows.jsonl", [{"messages": turns}])
        return content_of(recipe_of(model, folder / "rows.jsonl", "messages", image={}))

    before, moved = content(tmp_path / "one", "red"), content(tmp_path / "two", "red")
    assert differing(before, moved) == set()
    other = content(tmp_path / "one", "blue")
    assert (tmp_path / "one/a.bmp").stat().st_size == (tmp_path / "two/a.bmp").stat().st_size
    assert differing(before, other) == {"images"}
    larger = [*turns[:1], {"role": "assistant", "content": "rod"}]
    tiny.write_rows(tmp_path / "two" / "rows.jsonl", [{"messages": larger}])
    changed = content_of(recipe_of(model, tmp_path / "two" / "rows.jsonl", "messages", image={}))
    assert differing(before, changed) == {"tokens"}


def test_a_stream_by_what_was_consumed(made: Path, tmp_path: Path) -> None:
    rows = tiny.conversations(64)
    path = tmp_path / "rows.jsonl"

    def stream() -> Stream:
        recipe = recipe_of(made / "llama", path, "messages", streaming=True, window=16)
        data = build_training(recipe, Base.of(recipe).renderer(recipe.objective))
        assert isinstance(data, Stream)
        return data

    tiny.write_rows(path, rows[:60])
    first = stream()
    before = [first.consumed(windows) for windows in (0, 1, 2, 3)]
    assert len({*before}) == 4
    ends = [first.window(i).end_row for i in (0, 1)]
    assert [first.num_consumed(row) for row in (0, ends[0] - 1, ends[0], ends[1] - 1, ends[1])] == [0, 0, 1, 1, 2]
    assert stream().consumed(3) == before[3]
    saved = first.extra_state(ends[1])
    assert saved == {"consumed": {"windows": 2, "content": before[2]}}
    assert (stream().same_state(saved), stream().same_state({})) == (saved, {})  # without: of an earlier version

    tiny.write_rows(path, rows)  # it has grown
    assert stream().content() != first.content()
    assert [stream().consumed(windows) for windows in (0, 1, 2, 3)] == before
    rows[20]["messages"][-1]["content"] += "!"
    tiny.write_rows(path, rows)
    changed = [stream().consumed(windows) for windows in (0, 1, 2, 3)]
    assert [a == b for a, b in zip(before, changed, strict=True)] == [True, True, False, False]


# --- the base


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that is not read in full: two large tensors, and a small one between them."""
    folder = tmp_path_factory.mktemp("large")
    count = READ_WHOLE // 4
    tensors = {"a": torch.arange(count, dtype=torch.float32), "b": torch.ones(8), "c": torch.zeros(count)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text("{}")
    assert (folder / "model.safetensors").stat().st_size > READ_WHOLE
    return folder


def written(place: int, content: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(place, 0 if place >= 0 else 2)
            file.write(content)

    return change


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 4)


COUNT = READ_WHOLE // 4
CHANGES = {
    "the header": written(20, b"x"),
    "the small tensor": written(-(4 * COUNT + 4), b"\1"),
    "the middle of a tensor": written(-2 * COUNT, b"\1"),
    "the size": cut,
    "another tensor's values": written(-4 * COUNT, b"\2" * (4 * COUNT)),
}


@pytest.mark.parametrize("change", [*CHANGES])
def test_samples_of_a_large_file(large: Path, tmp_path: Path, change: str) -> None:
    before = base_content(Model(name=str(large)))
    shutil.copyfile(large / "model.safetensors", tmp_path / "model.safetensors")
    assert base_content(Model(name=str(tmp_path))) == before
    CHANGES[change](tmp_path / "model.safetensors")
    assert base_content(Model(name=str(tmp_path))) != before


def test_files_of_a_base_and_a_commit_of_the_hub(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = base_content(Model(name=str(made / "llama")))
    assert [*local] == ["files"]
    assert [*local["files"]] == ["model.safetensors"]
    repository = tmp_path / "models--org--llama"
    for commit in ("a" * 40, "b" * 40):
        shutil.copytree(made / "llama", repository / "snapshots" / commit)
    shutil.copyfile(made / "llama/model.safetensors", repository / "snapshots" / ("b" * 40) / "x.safetensors")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert base_content(Model(name="org/llama")) == {"commit": "a" * 40, **local}
    other = base_content(Model(name="org/llama", revision="b" * 40))
    assert other["commit"] == "b" * 40
    assert [*other["files"]] == ["model.safetensors", "x.safetensors"]


def test_weights_that_a_checkpoint_does_not_have() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert not base_enters_steps(model)
    model.register_buffer("frequencies", torch.ones(2), persistent=False)
    assert not base_enters_steps(model)
    model[0].weight.requires_grad_(False)
    assert base_enters_steps(model)
    model[0].weight.requires_grad_(True)
    model[1].register_buffer("bias of a router", torch.ones(2))
    assert base_enters_steps(model)
