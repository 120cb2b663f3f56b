"""Ids, masks and pixels of rows with images are those that transformers' own processor makes, for every family."""

from __future__ import annotations

import importlib
import inspect
import json
import random
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from PIL import Image
from transformers import ProcessorMixin
from transformers.image_transforms import convert_to_rgb

from finetune.data.batch import collate
from finetune.data.examples import Examples, media_reader, prepare_examples
from finetune.models.base_model import Base, processor_settings
from finetune.recipe import Recipe

# name of `tiny.SEEING`: (module, class) of the processor
PROCESSORS = {
    "qwen2_5_vl": ("qwen2_5_vl.processing_qwen2_5_vl", "Qwen2_5_VLProcessor"),
    "qwen3_vl": ("qwen3_vl.processing_qwen3_vl", "Qwen3VLProcessor"),
    "gemma3": ("gemma3.processing_gemma3", "Gemma3Processor"),
    "mistral3": ("pixtral.processing_pixtral", "PixtralProcessor"),
    "smolvlm": ("smolvlm.processing_smolvlm", "SmolVLMProcessor"),
    "idefics3": ("idefics3.processing_idefics3", "Idefics3Processor"),
}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models of `tiny.SEEING`, and pictures of many shapes."""
    folder = tmp_path_factory.mktemp("seeing")
    for name in PROCESSORS.keys() - {"idefics3"}:
        tiny.save_seeing(folder, name)
    (folder / "other").mkdir()
    tiny.save_seeing(folder / "other", "smolvlm", **tiny.AS_IDEFICS3).rename(folder / "idefics3_sees")
    (folder / "pictures").mkdir()
    rng = np.random.default_rng(0)
    shapes = [(1, 1), (3, 90), (150, 4), (56, 56), (112, 113), *rng.integers(3, 300, (25, 2)).tolist()]
    for i, shape in enumerate(shapes):
        values = rng.integers(0, 256, (*shape, 3 + (i % 4 == 0)), np.uint8)  # some are transparent
        Image.fromarray(values).save(folder / "pictures" / f"{i}.png")
    return folder


def chats(count: int, seed: int) -> list[dict[str, Any]]:
    """One to three turns, with none to four images between their words."""
    rng = random.Random(seed)
    rows = []
    for row in tiny.conversations(count, seed):
        parts = [{"type": "image", "image": f"pictures/{rng.randrange(30)}.png"} for _ in range(rng.randrange(5))]
        messages = []
        for turn in range(turns := rng.randint(1, 3)):
            mine, parts = (parts, []) if turn == turns - 1 else (parts[:1], parts[1:])
            said: list[dict[str, str]] = [*mine]
            words = row["messages"][0]["content"].split()
            said.insert(rng.randint(0, len(said)), {"type": "text", "text": " ".join(words)})
            if rng.random() < 0.5:
                said.append({"type": "text", "text": "\nand so on"})
            messages += [{"role": "user", "content": said}, row["messages"][1]]
        rows.append({"messages": messages})
    return rows


def recipe_of(folder: Path, name: str, rows: list[dict[str, Any]], **data: Any) -> Recipe:
    tiny.write_rows(folder / "chats.jsonl", rows)
    return Recipe.model_validate(
        {
            "run": {"name": "r"},
            "model": {"name": str(folder / f"{name}_sees")},
            "data": {
                "train": [{"path": str(folder / "chats.jsonl"), "format": "messages"}],
                "max_length": 100_000,
                "image": {},
                **data,
            },
            "mode": "full",
            "train": {"max_steps": 1, "precision": "fp32"},
            "batch": {"rows": 1},
            "optimizer": {"lr": 1e-3},
        }
    )


def processor_of(name: str, tokenizer: Any, image_processor: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' own processor with its own code, but for what needs packages that images do not: the check of its
    video processor's class (torchvision), the words of a number of frames (num2words), and one function of Pixtral's,
    which is imported from the module that needs torchvision, and of which the module for Pillow has a copy."""
    pil = importlib.import_module("transformers.models.pixtral.image_processing_pil_pixtral")
    monkeypatch.setitem(sys.modules, "transformers.models.pixtral.image_processing_pixtral", pil)

    def keep(self: Any, image_processor: Any, tokenizer: Any, *_: Any, **__: Any) -> None:
        self.image_processor, self.tokenizer = image_processor, tokenizer

    monkeypatch.setattr(ProcessorMixin, "__init__", keep)
    module_name, class_name = PROCESSORS[name]
    module = importlib.import_module(f"transformers.models.{module_name}")
    monkeypatch.setattr(module, "num2words", object(), raising=False)
    settings = dict(tiny.SEEING["smolvlm" if name == "idefics3" else name][3])
    if name == "smolvlm":
        settings["video_processor"] = None
    return getattr(module, class_name)(image_processor=image_processor, tokenizer=tokenizer, **settings)


def with_pictures(folder: Path, row: dict[str, Any]) -> tuple[str, list[Any]]:
    """(text by the tokenizer's template, images) of a row, read by nothing of ours."""
    parts = [p for m in row["messages"] if isinstance(m["content"], list) for p in m["content"] if p["type"] == "image"]
    return row["messages"], [on_white(Image.open(folder / part["image"])) for part in parts]


def on_white(image: Any) -> Any:
    """transformers 5.17 drops what is transparent, later versions and ours put it on white."""
    if "return_numpy" in inspect.signature(convert_to_rgb).parameters or "A" not in image.getbands():
        return image
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.long)])
def test_ids_masks_and_pixels_are_the_processors(
    name: str, count: int, seeing: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    rows = chats(count, seed=1)
    recipe = recipe_of(seeing, name, rows)
    base = Base.of(recipe)
    tokenizer, renderer = base.tokenizer, base.renderer(recipe.objective)
    reader: Any = media_reader(base.media)
    examples = prepare_examples(recipe, recipe.data.train, renderer)
    assert len(examples) == count
    processor = processor_of(name, tokenizer, reader.family.processor, monkeypatch)
    seen = 0
    for row, example in zip(rows, examples, strict=True):
        messages, pictures = with_pictures(seeing, row)
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        theirs = processor(text=[text], images=[pictures] if pictures else None, return_tensors="pt")
        (sequence,) = example.sequences
        assert sequence.input_ids.tolist() == theirs["input_ids"][0].tolist()
        assert not sequence.loss_mask[np.isin(sequence.input_ids, reader.family.mark_ids)].any()
        said = tokenizer.decode(sequence.input_ids[sequence.loss_mask])
        assert said == "".join(m["content"] + "<|im_end|>" for m in row["messages"] if m["role"] == "assistant")
        assert len(sequence.media) == len(pictures)
        for image in sequence.media:
            inside = sequence.input_ids[image.begin : image.end]
            assert {int(inside[0]), int(inside[-1])} == {reader.family.token_id}
        if pictures:
            ours = collate([example], media_inputs=reader).inputs
            for key in ours.keys() - {"input_ids", "position_ids"}:
                assert torch.equal(ours[key], torch.as_tensor(theirs[key])), key
            assert {"pixel_values"} <= ours.keys()
            seen += 1
    assert seen > count / 2


@pytest.mark.parametrize("name", PROCESSORS)
def test_images_of_a_row_are_those_of_its_documents(
    name: str, seeing: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two documents in one row: the places are those of their tokens, the pixels one document's after the other's."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    recipe = recipe_of(seeing, name, [row for row in chats(20, seed=2) if "image" in json.dumps(row)])
    renderer = Base.of(recipe).renderer(recipe.objective)
    reader: Any = media_reader(renderer.media)
    several = [one for one in prepare_examples(recipe, recipe.data.train, renderer) if len(one.sequences[0].media)]
    both = collate(several[:2], media_inputs=reader)
    alone = [collate([one], media_inputs=reader) for one in several[:2]]
    assert len(both.media) == sum(len(one.media) for one in alone)
    ids = both.inputs["input_ids"][0]
    for place in both.media:
        assert ids[place.begin] == ids[place.end - 1] == reader.family.token_id
        assert place.sequence == int(place.begin >= both.sequence_lengths[0])
    if "image_grid_thw" in both.inputs:
        grids = [one.inputs["image_grid_thw"] for one in alone]
        assert torch.equal(both.inputs["image_grid_thw"], torch.cat(grids))
        pixels = [one.inputs["pixel_values"] for one in alone]
        assert torch.equal(both.inputs["pixel_values"], torch.cat(pixels))


@pytest.mark.parametrize("name", ["qwen3_vl", "mistral3", "smolvlm"])
def test_max_pixels_bounds_what_is_seen(
    name: str, seeing: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    rows = [row for row in chats(20, seed=3) if "image" in json.dumps(row)]
    tokens: list[int] = []
    for most in (None, 3136):
        recipe = recipe_of(seeing, name, rows, image={"max_pixels": most})
        renderer = Base.of(recipe).renderer(recipe.objective)
        reader: Any = media_reader(renderer.media)
        examples: Examples = prepare_examples(recipe, recipe.data.train, renderer)
        tokens.append(sum(image.end - image.begin for one in examples for image in one.sequences[0].media))
        batch = collate(list(examples), media_inputs=reader)  # as many pixels as tokens
        if most and "image_sizes" in batch.inputs:
            assert int(batch.inputs["image_sizes"].prod(1).max()) <= most
        if most and "image_grid_thw" in batch.inputs:
            patch = reader.family.processor.patch_size
            assert int(batch.inputs["image_grid_thw"].prod(1).median()) * patch**2 <= most  # thin ones have a row
    assert tokens[1] < tokens[0]
    result = tmp_path / "result"
    shutil.copytree(seeing / f"{name}_sees", result)
    for file, content in processor_settings(Base.of(recipe)).items():
        (result / file).write_bytes(content)
    of_result = recipe_of(seeing, name, rows)
    of_result = of_result.model_copy(update={"model": of_result.model.model_copy(update={"name": str(result)})})
    of_result_reader: Any = media_reader(Base.of(of_result).media)
    assert of_result_reader.family.settings == reader.family.settings  # who loads it sees what was trained on


def test_a_changed_image_is_an_error(seeing: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from finetune.errors import UserError

    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    Image.new("RGB", (60, 70)).save(seeing / "pictures" / "other.png")
    part = {"type": "image", "image": "pictures/other.png"}
    rows = [{"messages": [{"role": "user", "content": [part]}, {"role": "assistant", "content": "yes"}]}]
    recipe = recipe_of(seeing, "qwen3_vl", rows)
    renderer = Base.of(recipe).renderer(recipe.objective)
    (example,) = prepare_examples(recipe, recipe.data.train, renderer)
    reader: Any = media_reader(renderer.media)
    Image.new("RGB", (61, 70)).save(seeing / "pictures" / "other.png")
    with pytest.raises(UserError, match="61 x 70 pixels, but it had 60 x 70"):
        collate([example], media_inputs=reader)
    (image,) = example.sequences[0].media
    sized = replace(image, width=61)
    assert reader.family.read(sized)["pixel_values"].shape[1] > 0
    (seeing / "pictures" / "other.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"other\.png: cannot be decoded: not an image.*`data.image: {verify: pixels}`"):
        reader.family.read(image)
    (seeing / "pictures" / "other.png").unlink()
    with pytest.raises(UserError, match=r"other\.png: cannot be decoded: .*No such file"):
        reader.family.read(image)
