"""Rows with videos: their forms, the cache, cuts, what the result's settings say, and what is refused."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import filming
import numpy as np
import pytest
import tiny
from filming import recipe_of
from usual import usual

from finetune.data.batch import collate
from finetune.data.dataset import build_training, on_disk
from finetune.data.examples import Examples, media_reader, prepare_examples
from finetune.data.samples import Video
from finetune.errors import UserError
from finetune.models.base_model import Base, processor_settings
from finetune.recipe import Recipe

ANSWER = {"role": "assistant", "content": "red"}
FILM = filming.noise(9, 56, 56, 0)


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("films")
    for name in filming.FILMING:
        filming.save_filming(folder, name)
    filming.write_frames(folder / "film", FILM)
    return folder


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))


def examples_of(recipe: Recipe) -> Examples:
    return prepare_examples(recipe, recipe.data.train, Base.of(recipe).renderer(recipe.objective))


def asked(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "what"}]}, ANSWER]}


def test_forms_of_rows(films: Path) -> None:
    """Parts with a path, LLaMA-Factory's and ms-swift's mark and column, a list of frames, and sharegpt."""
    mark = [{"role": "user", "content": "<video>what"}, ANSWER]
    turns = [{"from": "human", "value": "<video>what"}, {"from": "gpt", "value": "red"}]
    frames = [f"film/{i}.png" for i in range(9)]
    forms: list[tuple[str, dict[str, Any]]] = [
        ("messages", asked({"type": "video", "path": "film"})),
        ("messages", asked({"type": "video_url", "video_url": {"url": "film"}})),
        ("messages", asked({"type": "video", "video": frames})),
        ("messages", asked({"type": "video"}) | {"videos": ["film"]}),
        ("messages", {"messages": mark, "videos": ["film"]}),
        ("messages", {"messages": mark, "videos": [frames]}),
        ("messages", {"messages": mark, "video": "film"}),
        ("sharegpt", {"conversations": turns, "videos": ["film"]}),
    ]
    found = set()
    for format, row in forms:
        (example,) = examples_of(recipe_of(films, "qwen3_vl", [row], format))
        (video,) = example.sequences[0].media
        assert isinstance(video, Video)
        assert (video.frames, video.height, video.width) == (9, 56, 56)
        found.add((example.sequences[0].input_ids.tobytes(), video.source))
    assert len(found) == 1


def test_files_and_bytes_are_kept_in_the_cache(films: Path) -> None:
    """With their frames and rate, of files, data URLs and lists alike."""
    pytest.importorskip("av")
    content = filming.write_video(films / "a.mp4", FILM, 10).read_bytes()
    data = "data:video/mp4;base64," + base64.b64encode(content).decode()
    rows = [asked({"type": "video", "video": source}) for source in ("a.mp4", data, "film")]
    recipe = recipe_of(films, "qwen2_5_vl", rows)
    base = Base.of(recipe)
    reader: Any = media_reader(base.media)
    renderer = base.renderer(recipe.objective)
    first, again = (on_disk(build_training(recipe, renderer)).examples for _ in range(2))
    media = [one.sequences[0].media[0] for one in first]
    assert media == [one.sequences[0].media[0] for one in again]
    assert [(one.frames, float(one.rate), one.seen) for one in media] == [(9, 10.0, 4), (9, 10.0, 4), (9, 7.5, 4)]
    assert isinstance(media[1].source, bytes)
    file, in_row = (collate([one], media_inputs=reader).inputs for one in (first[0], first[1]))
    assert all(np.array_equal(file[key], in_row[key]) for key in file)
    assert first.media_files() == sorted([str(films / "a.mp4"), *(str(films / "film" / f"{i}.png") for i in range(9))])


def test_a_changed_video_is_an_error(films: Path) -> None:
    shutil.copytree(films / "film", films / "changed", dirs_exist_ok=True)
    recipe = recipe_of(films, "qwen3_vl", [asked({"type": "video", "video": "changed"})])
    renderer = Base.of(recipe).renderer(recipe.objective)
    reader: Any = media_reader(renderer.media)
    data = on_disk(build_training(recipe, renderer))
    before = data.examples.content("train")
    filming.write_frames(films / "changed", FILM[:, :40])
    with pytest.raises(UserError, match="56 x 40 pixels, but it had 56 x 56"):
        collate([data.examples[0]], media_inputs=reader)
    assert data.examples.content("train") != before
    (films / "changed" / "0.png").unlink()
    with pytest.raises(UserError, match=r"0\.png: cannot be decoded: .*No such file"):
        collate([data.examples[0]], media_inputs=reader)


@pytest.mark.parametrize("overlong", usual(["truncate", "split", "drop"], "split"))
def test_no_video_is_cut(overlong: str, films: Path) -> None:
    """Turns that fit stay whole; one that is too long by itself is dropped and counted."""
    turn = [{"role": "user", "content": [{"type": "video", "video": "film"}, {"type": "text", "text": "what"}]}, ANSWER]
    rows = [{"messages": turn * 3}, {"messages": turn}]
    length = len(examples_of(recipe_of(films, "qwen3_vl", rows))[1].sequences[0].input_ids)
    recipe = recipe_of(films, "qwen3_vl", rows, max_length=length + 20, overlong=overlong)
    examples = examples_of(recipe)
    assert len(examples) == {"truncate": 2, "split": 4, "drop": 1}[overlong]
    for example in examples:
        (sequence,) = example.sequences
        (video,) = sequence.media
        assert 0 < video.begin < video.end < len(sequence.input_ids)
        assert not sequence.loss_mask[video.begin : video.end].any()
    short = recipe_of(films, "qwen3_vl", rows, max_length=length - 1, overlong=overlong)
    with pytest.raises(UserError, match="none of its 2 rows can be trained on: 0 bad, 2 longer than"):
        examples_of(short)


@pytest.mark.parametrize("name", usual(filming.FILMING, "qwen3_vl"))
def test_times_are_not_trained_under_any_objective(name: str, films: Path) -> None:
    recipe = recipe_of(films, name, [asked({"type": "video", "video": "film"})])
    objective = recipe.objective.model_copy(update={"train_on": "all"})
    recipe = recipe.model_copy(update={"objective": objective})
    base = Base.of(recipe)
    (example,) = prepare_examples(recipe, recipe.data.train, base.renderer(objective))
    (sequence,) = example.sequences
    said = base.tokenizer.decode(sequence.input_ids[sequence.loss_mask])
    before, _, rest = base.tokenizer.decode(sequence.input_ids[1:]).partition("<|vision_start|>")
    assert ("seconds" in rest) == (name == "qwen3_vl")
    assert said == before + rest.rpartition("<|vision_end|>")[2]


@pytest.mark.parametrize("name", usual(filming.FILMING, "qwen2_5_vl"))
@pytest.mark.parametrize("nested", [False, True], ids=["own file", "one file"])
def test_the_result_sees_what_the_run_saw(name: str, nested: bool, films: Path, tmp_path: Path) -> None:
    rows = [asked({"type": "video", "video": "film"})]
    model = tmp_path / f"{name}_films"
    shutil.copytree(films / f"{name}_films", model)
    if nested:
        older = json.loads((model / "video_preprocessor_config.json").read_text(encoding="utf-8"))
        (model / "video_preprocessor_config.json").unlink()
        (model / "processor_config.json").write_text(json.dumps({"video_processor": older}), encoding="utf-8")
    shutil.copytree(films / "film", tmp_path / "film")
    bounds = {"fps": 4.0, "max_frames": 4, "max_pixels": 4 * 28 * 28, "frame_rate": 8}
    base = Base.of(recipe_of(tmp_path, name, rows, video=bounds))
    for file, content in processor_settings(base).items():
        (model / file).write_bytes(content)
    of_result = Base.of(recipe_of(tmp_path, name, rows, video={}))
    assert base.media is not None
    assert of_result.media is not None
    assert of_result.media.family.settings == base.media.family.settings


def test_what_is_refused(films: Path) -> None:
    recipe = recipe_of(films, "qwen3_vl", [asked({"type": "image", "image": "film/0.png"})])
    with pytest.raises(UserError, match=r"the row has an image, and `data\.image` is not set"):
        examples_of(recipe)
    (films / "chats.jsonl").write_text(json.dumps(asked({"type": "video", "video": "film"})) + "\n", encoding="utf-8")
    without = recipe.model_copy(update={"data": recipe.data.model_copy(update={"video": None})})
    with pytest.raises(UserError, match=r"the row has videos. Fix: set `data\.video: {}` to train on it, with a model"):
        examples_of(without)
    gemma = tiny.save_seeing(films, "gemma3")
    other = recipe.model_copy(update={"model": recipe.model.model_copy(update={"name": str(gemma)})})
    with pytest.raises(UserError, match=r"data\.video: 'gemma3' is trained on images here, not on videos"):
        examples_of(other)
    one = recipe_of(films, "qwen2_5_vl", [asked({"type": "video", "video": ["film/0.png"]})])
    with pytest.raises(UserError, match=r"1 frames of 56 x 56 pixels cannot be used: at least 2 frames are needed"):
        examples_of(one)
