"""Ids, masks, pixels and sound of rows for Gemma 4 are those that transformers' own processor makes, also if mixed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import hearing
import numpy as np
import pytest
import several
import torch
from PIL import Image
from transformers import ProcessorMixin

from finetune.data.batch import collate
from finetune.data.examples import media_reader, prepare_examples
from finetune.data.samples import BadRow, Reference, kind_of
from finetune.errors import UserError
from finetune.models.base_model import Base, processor_settings

# transformers 5.17 imports torchvision there.
processing_gemma4: Any = pytest.importorskip("transformers.models.gemma4.processing_gemma4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model, and rows of one kind, of two, and with pictures of many shapes."""
    folder = tmp_path_factory.mktemp("gemma4")
    several.save_gemma4(folder)
    several.write_rows(folder, "shown", 30, ("image",), seed=1)
    several.write_rows(folder, "both", 30, ("image", "audio"), seed=2)
    rng = np.random.default_rng(0)
    for i, shape in enumerate([(1, 1), (3, 200), (300, 4), (48, 48), (144, 145), (700, 500)]):
        channels = 3 + (i % 2 == 0)  # some are transparent
        Image.fromarray(rng.integers(0, 256, (*shape, channels), np.uint8)).save(folder / f"{i}.png")
    return folder


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))


def processor_of(tokenizer: Any, reader: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' own processor, but for the check of its video processor's class, which needs torchvision."""

    def keep(self: Any, **parts: Any) -> None:
        vars(self).update(parts)

    monkeypatch.setattr(ProcessorMixin, "__init__", keep)
    families = {family.kind: family.processor for family, _ in reader._readers}
    parts = {"image_processor": families.get("image"), "feature_extractor": families.get("audio")}
    return processing_gemma4.Gemma4Processor(tokenizer=tokenizer, video_processor=None, **parts)


def files_in(folder: Path, messages: Any) -> dict[str, list[Any]]:
    parts = [part for m in messages if isinstance(m["content"], list) for part in m["content"]]
    return {
        "images": [Image.open(folder / part["image"]) for part in parts if part["type"] == "image"],
        "audio": [hearing.loaded(folder / part["audio"]) for part in parts if part["type"] == "audio"],
    }


@pytest.mark.parametrize(
    ("name", "kinds"), [pytest.param("shown", ("image",), marks=pytest.mark.long), ("both", ("image", "audio"))]
)
def test_rows_are_the_processors(
    name: str, kinds: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = several.recipe_of(folder, "gemma4", name, kinds)
    base = Base.of(recipe)
    reader: Any = media_reader(base.media)
    examples = prepare_examples(recipe, recipe.data.train, base.renderer(recipe.objective))
    rows = list(map(json.loads, (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()))
    tokenizer = base.tokenizer
    processor, seen = processor_of(tokenizer, reader, monkeypatch), set[str]()
    for row, example in zip(rows, examples, strict=True):
        files = {key: value for key, value in files_in(folder, row["messages"]).items() if value}
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        theirs = processor(text=[text], return_tensors="pt", **files)
        (sequence,) = example.sequences
        assert sequence.input_ids.tolist() == theirs["input_ids"][0].tolist()
        said = tokenizer.decode(sequence.input_ids[sequence.loss_mask])
        assert said == row["messages"][1]["content"] + "<|im_end|>"
        asked = row["messages"][0]["content"]
        assert [kind_of(one) for one in sequence.media] == [
            part["type"] for part in (asked if isinstance(asked, list) else []) if part["type"] != "text"
        ]
        batch = collate([example], media_inputs=reader)
        if files:
            plain = reader.plain_inputs(sequence.media, batch.inputs["input_ids"])
            types = plain.pop("mm_token_type_ids")
            expected = theirs["mm_token_type_ids"]
            assert torch.equal(types, torch.where(expected == 3, 0, expected).int())  # sound has none by our table
            assert set(plain) == set(theirs) - {"input_ids", "attention_mask", "mm_token_type_ids"}
            for key, value in plain.items():
                assert torch.equal(batch.inputs[key], value)
                if key.startswith("input_features"):  # theirs are as long as a multiple of 128 samples
                    assert torch.equal(value, padded_to(torch.as_tensor(theirs[key]), value)), key
                else:
                    assert torch.equal(value, torch.as_tensor(theirs[key])), key
                seen.add(key)
    assert {"pixel_values", *(["input_features"] if "audio" in kinds else [])} <= seen


def padded_to(theirs: torch.Tensor, ours: torch.Tensor) -> torch.Tensor:
    return theirs[:, : ours.shape[1]]


def image_family(recipe: Any) -> Any:
    media = Base.of(recipe).media
    assert media is not None
    return media.families["image"]


def test_a_picture_of_any_shape_has_the_processor_s_tokens(folder: Path) -> None:
    family = image_family(several.recipe_of(folder, "gemma4", "shown", ("image",)))
    counts = []
    for i in range(6):
        stored = family.find(f"{i}.png", str(folder / "shown.jsonl"))
        features = family.read(family.placed(stored, 0, 1))
        counts.append(family.written(stored).count)
        assert [counts[-1]] == list(features["num_soft_tokens_per_image"])
        assert (features["image_position_ids"] >= 0).all(-1).sum() == 9 * counts[-1]
    assert len(set(counts)) > 2


def test_max_pixels_chooses_among_the_sizes_of_the_processor(folder: Path, tmp_path: Path) -> None:
    """The result has it: who loads that sees what was trained on."""
    bounded = several.recipe_of(folder, "gemma4", "shown", ("image",), data={"image": {"max_pixels": 150 * 48 * 48}})
    family = image_family(bounded)
    assert family.processor.max_soft_tokens == 140
    result = tmp_path / "result"
    shutil.copytree(folder / "gemma4", result)
    for name, content in processor_settings(Base.of(bounded)).items():
        (result / name).write_bytes(content)
    shutil.copy(folder / "shown.jsonl", tmp_path)
    assert image_family(several.recipe_of(tmp_path, "result", "shown", ("image",))).settings == family.settings
    few = several.recipe_of(folder, "gemma4", "shown", ("image",), data={"image": {"max_pixels": 1000}})
    with pytest.raises(UserError, match=r"data\.image\.max_pixels: Gemma 4 .* Fix: set it to 161280 or more"):
        image_family(few)


def test_files_of_one_kind_stay_before_those_of_another(folder: Path) -> None:
    """A template that writes all images first is refused: their places would be those of clips."""
    recipe = several.recipe_of(folder, "gemma4", "both", ("image", "audio"))
    media = Base.of(recipe).media
    assert media is not None
    references = [Reference("audio", "a.wav"), Reference("image", "0.png")]
    with pytest.raises(BadRow, match="moves files of different kinds"):
        media.expand("<|image|> and <|audio|>", [], references, str(folder / "both.jsonl"), "its template")
    with pytest.raises(BadRow, match=r"writes 0 times '<\|audio\|>' for 1 clips"):
        media.expand("<|image|>", [], references, str(folder / "both.jsonl"), "its template")
