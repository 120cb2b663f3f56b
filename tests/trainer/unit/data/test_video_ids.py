"""Ids, masks, pixels and positions of rows with videos are those that transformers' own processor makes."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import filming
import numpy as np
import pytest
import tiny
from repository import ROOT

from finetune.data.batch import collate
from finetune.data.examples import media_reader, prepare_examples
from finetune.models.base_model import Base
from finetune.models.towers import row_positions

# What transformers' processors made of `chats`, by `video_processor.py` with torchvision 0.28 and transformers 5.23.
RECORDED = Path(__file__).parent / "video_processor.json"
SIZES = [(4, 56, 56), (2, 30, 64), (5, 57, 83), (17, 90, 33), (40, 28, 28), (11, 120, 200), (23, 61, 60), (8, 29, 140)]


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models of `FILMING`, and videos of many lengths and shapes, as folders of pictures."""
    folder = tmp_path_factory.mktemp("films")
    for name in filming.FILMING:
        filming.save_filming(folder, name)
    for i, (frames, height, width) in enumerate(SIZES):
        filming.write_frames(folder / "videos" / str(i), filming.noise(frames, height, width, i))
    return folder


def chats(count: int, seed: int, names: list[str]) -> list[dict[str, Any]]:
    """One to three turns, with none to three videos between their words: first, last, several or none."""
    rng, rows = random.Random(seed), []
    for row in tiny.conversations(count, seed):
        parts = [{"type": "video", "video": f"videos/{rng.choice(names)}"} for _ in range(rng.choice((0, 1, 1, 2, 3)))]
        messages = []
        for turn in range(turns := rng.randint(1, 3)):
            mine, parts = (parts, []) if turn == turns - 1 else (parts[:1], parts[1:])
            said: list[dict[str, str]] = [*mine]
            said.insert(rng.randint(0, len(said)), {"type": "text", "text": row["messages"][0]["content"]})
            if rng.random() < 0.5:
                said.append({"type": "text", "text": "\nand so on"})
            messages += [{"role": "user", "content": said}, row["messages"][1]]
        rows.append({"messages": messages})
    return rows


def parts_of(row: dict[str, Any]) -> list[str]:
    contents = [message["content"] for message in row["messages"] if isinstance(message["content"], list)]
    return [part["video"] for content in contents for part in content if part["type"] == "video"]


def ours(folder: Path, name: str, rows: list[dict[str, Any]], **data: Any) -> list[dict[str, np.ndarray]]:
    """The inputs of each row's forward by us, and checks of its mask."""
    recipe = filming.recipe_of(folder, name, rows, **data)
    base = Base.of(recipe)
    tokenizer, renderer = base.tokenizer, base.renderer(recipe.objective)
    reader: Any = media_reader(base.media)
    positions: Any = row_positions(base.config)
    inputs = []
    for row, example in zip(rows, prepare_examples(recipe, recipe.data.train, renderer), strict=True):
        (sequence,) = example.sequences
        said = tokenizer.decode(sequence.input_ids[sequence.loss_mask])
        assert said == "".join(m["content"] + "<|im_end|>" for m in row["messages"] if m["role"] == "assistant")
        assert len(sequence.media) == len(parts_of(row))
        batch = collate([example], media_inputs=reader)
        batch = positions(batch) if positions else batch
        of_row = {key: value.numpy() for key, value in batch.inputs.items()}
        if sequence.media:
            of_row["position_ids"] = of_row["position_ids"][1:]  # none of Gemma 4: they are places
        inputs.append(of_row)
    return inputs


def calls(folder: Path, name: str, rows: list[dict[str, Any]], rates: dict[str, float], **settings: Any) -> Any:
    """What `video_processor.py` is asked for the rows with videos."""
    from transformers import PreTrainedTokenizerFast

    model = folder / f"{name}_films"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    return [
        {
            "model": str(model),
            "text": tokenizer.apply_chat_template(row["messages"], tokenize=False),
            "videos": [{"file": str(folder / f"{video}.npy"), "fps": rates[video]} for video in parts_of(row)],
            "settings": settings,
        }
        for row in rows
        if parts_of(row)
    ]


def by_processor(folder: Path, asked: Any) -> list[dict[str, np.ndarray]]:
    """The inputs by transformers' own processor. Skips where torchvision is not installed; TORCHVISION: its folder."""
    place = os.environ.get("TORCHVISION") or ("-" if importlib.util.find_spec("torchvision") else None)
    if place is None:
        pytest.skip("torchvision is not installed; TORCHVISION names a folder that has it")
    (folder / "chats.json").write_text(json.dumps(asked), encoding="utf-8")
    script = ROOT / "tests" / "support" / "video_processor.py"
    subprocess.run([sys.executable, str(script), str(folder), place], check=True)
    with np.load(folder / "processed.npz") as found:
        keys = [key.split(".", 1) for key in found]
        return [{key: found[f"{i}.{key}"] for n, key in keys if int(n) == i} for i in range(len(asked))]


def summary(inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    """What is recorded of a row: ids, grids and positions, and digests of pixels."""
    kept = ("input_ids", "video_grid_thw", "second_per_grid_ts")
    digests = {
        key: hashlib.sha256(inputs[key].tobytes()).hexdigest()[:16] for key in ("pixel_values_videos", "position_ids")
    }
    return {**{key: inputs[key].tolist() for key in kept if key in inputs}, **digests}


@pytest.mark.parametrize("name", filming.FILMING)
def test_rows_are_as_the_processor_was_recorded(
    name: str, films: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    rows = chats(30, 1, [str(i) for i in range(len(SIZES))])
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))[name]
    found = [summary(inputs) for inputs in ours(films, name, rows) if "video_grid_thw" in inputs]
    assert len(found) > 15
    assert found == recorded


@pytest.mark.long
@pytest.mark.parametrize("name", filming.FILMING)
@pytest.mark.parametrize(
    "settings", [{}, {"fps": 5.0, "max_frames": 6, "max_pixels": 14 * 28 * 28}], ids=["own", "bounds"]
)
def test_rows_are_the_processor_s(
    name: str, settings: dict[str, Any], films: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Files of several kinds and rates, as transformers' reader of PyAV reads them, and folders."""
    pytest.importorskip("av")
    from transformers.video_utils import read_video_pyav

    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    rates = {}
    for i, (frames, height, width) in enumerate(SIZES):
        path = films / "videos" / f"{i}.mp4"
        filming.write_video(path, filming.noise(frames, height // 2 * 2, width // 2 * 2, i), (5, 8, 30)[i % 3])
        video, about = read_video_pyav(str(path), lambda metadata: np.arange(metadata.total_num_frames))
        np.save(f"{path}.npy", video)
        np.save(films / "videos" / f"{i}.npy", filming.noise(frames, height, width, i))
        rates |= {f"videos/{i}.mp4": about.fps, f"videos/{i}": filming.RATE}
    rows = chats(30, 2, [f"{i}{end}" for i in range(len(SIZES)) for end in ("", ".mp4")])
    size = dict(filming.FILMING[name]["size"])
    if settings:
        size["longest_edge"] = settings["max_pixels"]
        size["shortest_edge"] = min(size.values())
    theirs = by_processor(
        films,
        calls(
            films,
            name,
            rows,
            rates,
            size=size,
            **{key: settings[key] for key in ("fps", "max_frames") if key in settings}
            | ({} if settings else {"fps": 2}),
        ),
    )
    mine = [
        inputs
        for inputs in ours(films, name, rows, video={"frame_rate": filming.RATE, **settings})
        if "video_grid_thw" in inputs
    ]
    assert len(mine) == len(theirs) > 15
    for found, expected in zip(mine, theirs, strict=True):
        for key in found:
            assert found[key].dtype == expected[key].dtype, key
            assert np.array_equal(found[key], expected[key]), key
    if not settings and os.environ.get("RECORD"):
        record(films, name)


def record(films: Path, name: str) -> None:
    """Writes what the processor makes of the rows of the first test."""
    rows = chats(30, 1, [str(i) for i in range(len(SIZES))])
    asked = calls(films, name, rows, {f"videos/{i}": filming.RATE for i in range(len(SIZES))}, fps=2)
    recorded = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.is_file() else {}
    recorded[name] = [summary(inputs) for inputs in by_processor(films, asked)]
    RECORDED.write_text(json.dumps(recorded) + "\n", encoding="utf-8")
