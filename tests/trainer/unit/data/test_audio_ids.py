"""Ids, masks and features of rows with clips are those that transformers' own processor makes, for every family."""

from __future__ import annotations

import copy
import inspect
import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hearing
import numpy as np
import pytest
import tiny
import torch
from transformers import PreTrainedTokenizerBase, ProcessorMixin, SequenceFeatureExtractor

from finetune.data.batch import collate
from finetune.data.building import EntryBuild, OpenedSources, build_source
from finetune.data.examples import media_reader, prepare_examples
from finetune.data.media.expansion import RowMedia
from finetune.data.media.family_table import FAMILIES
from finetune.data.samples import BadRow, Reference
from finetune.data.token_cache import ARRAYS, find_or_build
from finetune.errors import UserError
from finetune.models.base_model import Base
from finetune.recipe import Recipe
from finetune.recipe.schema import Audio, Images

pytest.importorskip("soundfile")
pytest.importorskip("soxr")


@pytest.fixture(scope="module")
def ears(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models of `HEARING`, and clips of many lengths, rates and channels."""
    folder = tmp_path_factory.mktemp("ears")
    for name in hearing.available():
        hearing.save_hearing(folder, name)
    (folder / "clips").mkdir()
    rng = np.random.default_rng(0)
    for i in range(16):
        rate, channels = int(rng.choice([8_000, 11_025, 16_000, 44_100])), int(rng.choice([1, 1, 2, 6]))
        one = hearing.tone(rng.uniform(100, 900), rng.uniform(0.1, 0.99), rate, i)
        mixed = np.stack([one * (0.9**c) for c in range(channels)], axis=1) if channels > 1 else one
        hearing.write_wav(folder / "clips" / f"{i}.wav", mixed, rate)
    return folder


def chats(count: int, most: int, seed: int) -> list[dict[str, Any]]:
    """One to three turns, with none to `most` clips between their words: first, last, several or none."""
    rng, rows = random.Random(seed), []
    for row in tiny.conversations(count, seed):
        parts = [{"type": "audio", "audio": f"clips/{rng.randrange(16)}.wav"} for _ in range(rng.randrange(most + 1))]
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


def recipe_of(folder: Path, name: str, rows: list[dict[str, Any]], format: str = "messages", **data: Any) -> Recipe:
    tiny.write_rows(folder / "chats.jsonl", rows)
    return Recipe.model_validate(
        {
            "run": {"name": "r"},
            "model": {"name": str(folder / f"{name}_hears")},
            "data": {
                "train": [{"path": str(folder / "chats.jsonl"), "format": format}],
                "max_length": 100_000,
                "audio": {},
                **data,
            },
            "mode": "full",
            "train": {"max_steps": 1, "precision": "fp32"},
            "batch": {"rows": 1},
            "optimizer": {"lr": 1e-3},
        }
    )


PROCESSORS = {
    "qwen2_audio": "qwen2_audio.processing_qwen2_audio.Qwen2AudioProcessor",
    "voxtral": "voxtral.processing_voxtral.VoxtralProcessor",
    "qwen3_asr": "qwen3_asr.processing_qwen3_asr.Qwen3ASRProcessor",
    "qwen2_5_omni_thinker": "qwen2_5_omni.processing_qwen2_5_omni.Qwen2_5OmniProcessor",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe.processing_qwen3_omni_moe.Qwen3OmniMoeProcessor",
    "gemma4": "gemma4.processing_gemma4.Gemma4Processor",
    "gemma3n": "gemma3n.processing_gemma3n.Gemma3nProcessor",
    "granite_speech": "granite_speech.processing_granite_speech.GraniteSpeechProcessor",
    "phi4_multimodal": "phi4_multimodal.processing_phi4_multimodal.Phi4MultimodalProcessor",
}
_OF_IMAGES = ("image", "video", "boi", "eoi", "vision_bos", "vision_eos")  # tokens that these processors ask for


def processor_of(name: str, tokenizer: Any, extractor: Any, settings: dict[str, Any], patch: pytest.MonkeyPatch) -> Any:
    """transformers' processor of sound and text alone: those of images need torchvision, and are not called."""

    def keep(self: Any, *parts: Any, **named: Any) -> None:
        for part in (*parts, *named.values()):
            if isinstance(part, PreTrainedTokenizerBase):
                self.tokenizer = part
            elif isinstance(part, SequenceFeatureExtractor):
                self.feature_extractor = self.audio_processor = part

    module, _, kind = PROCESSORS[name].rpartition(".")
    patch.setattr(ProcessorMixin, "__init__", keep)
    own: Any = copy.deepcopy(tokenizer)
    for role in _OF_IMAGES:
        if getattr(own, f"{role}_token", None) is None:
            setattr(own, f"{role}_token", "<pad>")
            setattr(own, f"{role}_token_id", 0)
    build = getattr(pytest.importorskip(f"transformers.models.{module}"), kind)  # 5.17 imports torchvision in Gemma 4's
    takes = inspect.signature(build).parameters
    parts = {"tokenizer": own, **settings, **{key: None for key in takes if key.endswith("_processor")}}
    parts |= {key: extractor for key in ("feature_extractor", "audio_processor") if key in takes}
    return build(**parts, **({"chat_template": ""} if "chat_template" in takes else {}))


def by_processor(name: str, processor: Any, text: str, waves: list[Any]) -> dict[str, Any]:
    """The inputs of a text by transformers' own processor; of Voxtral, whose texts another library writes,
    its features and the ids of as many placeholders as they fill."""
    if not waves:
        return dict(processor.tokenizer([text], return_tensors="pt"))
    if name == "voxtral":
        features = processor._retrieve_input_features(
            waves,
            96,
            sampling_rate=16_000,
            padding=True,
            pad_to_multiple_of=96 * 160,
            return_tensors="pt",
            truncation=False,
        )
        pieces = [-(-len(wave) // (96 * 160)) for wave in waves]
        for count in pieces:
            text = text.replace("[AUDIO]", "[A]" * 12 * count, 1)
        text = text.replace("[A]", "[AUDIO]")
        return {"input_features": features, **processor.tokenizer([text], return_tensors="pt")}
    rate = {} if name in ("gemma3n", "gemma4", "granite_speech") else {"sampling_rate": 16_000}
    found = dict(processor(text=[text], audio=waves, return_tensors="pt", **rate))
    if name == "qwen3_omni_moe_thinker":  # beside a longer clip, its extractor does not reflect the end
        alone = [
            processor.feature_extractor(wave, sampling_rate=16_000, padding=True, return_attention_mask=True)
            for wave in waves
        ]
        for key, theirs in (("input_features", "input_features"), ("feature_attention_mask", "attention_mask")):
            found[key] = torch.zeros_like(found[key])
            for row, features in zip(found[key], alone, strict=True):
                own = torch.as_tensor(features[theirs][0])
                row[..., : own.shape[-1]] = own
    if name == "qwen2_5_omni_thinker":  # whose tower reads nothing behind a clip's end
        mask = found["feature_attention_mask"]
        longest = int(mask.sum(1).max())
        found |= {"input_features": (found["input_features"] * mask[:, None])[..., :longest]}
        found |= {"feature_attention_mask": mask[..., :longest]}
    return {key: value for key, value in found.items() if key != "num_audio_tokens"}


def test_every_family_is_compared() -> None:
    assert PROCESSORS.keys() == hearing.HEARING.keys()


@pytest.mark.parametrize("name", hearing.families())
def test_ids_masks_and_features_are_the_processors(
    name: str, ears: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    rows = chats(30, 1 if name in hearing.ALONE else 3, seed=1)
    recipe = recipe_of(ears, name, rows)
    base = Base.of(recipe)
    tokenizer, renderer = base.tokenizer, base.renderer(recipe.objective)
    reader: Any = media_reader(base.media)
    examples = prepare_examples(recipe, recipe.data.train, renderer)
    assert len(examples) == 30
    processor = processor_of(name, tokenizer, reader.family.extractor, hearing.HEARING[name].processor, monkeypatch)
    seen = 0
    for row, example in zip(rows, examples, strict=True):
        parts = [p for m in row["messages"] if isinstance(m["content"], list) for p in m["content"]]
        waves = [hearing.loaded(ears / p["audio"]) for p in parts if p["type"] == "audio"]
        text = str(tokenizer.apply_chat_template(row["messages"], tokenize=False))
        theirs = by_processor(name, processor, text, waves)
        (sequence,) = example.sequences
        assert sequence.input_ids.tolist() == theirs["input_ids"][0].tolist()
        assert not sequence.loss_mask[np.isin(sequence.input_ids, reader.family.mark_ids)].any()
        said = tokenizer.decode(sequence.input_ids[sequence.loss_mask])
        assert said == "".join(m["content"] + "<|im_end|>" for m in row["messages"] if m["role"] == "assistant")
        assert len(sequence.media) == len(waves)
        for clip in sequence.media:
            assert set(sequence.input_ids[clip.begin : clip.end].tolist()) == {reader.family.token_id}
        if waves:
            ours = collate([example], media_inputs=reader).inputs
            keys = ours.keys() - {"input_ids", "position_ids"}
            assert FAMILIES[name].main_input in keys
            for key in keys:
                assert torch.equal(ours[key], torch.as_tensor(theirs[key])), key
            seen += 1
    assert seen > 10


@pytest.mark.long
def test_clips_are_checked_by_any_number_of_processes(ears: Path, tmp_path: Path) -> None:
    rows = [*chats(40, 3, seed=3), {"audio": "clips/none.wav", "text": "red"}]
    recipe = recipe_of(ears, "qwen3_asr", rows, on_bad_row="skip", max_bad_share=0.5)
    renderer = Base.of(recipe).renderer(recipe.objective)
    opened = OpenedSources(recipe).open(recipe.data.train[0])
    reports = []
    for workers in (1, 2):
        build = EntryBuild(recipe, opened, renderer, workers=workers)
        fill = partial(build_source, build=build, digest=opened.reader.digest())
        reports.append(find_or_build(tmp_path / str(workers), {"source": opened.source.path}, fill)[0].report)
    assert reports[0] == reports[1]
    assert (reports[0].rows, reports[0].bad) == (41, 1)
    for name in ARRAYS:
        assert (tmp_path / "1" / f"{name}.npy").read_bytes() == (tmp_path / "2" / f"{name}.npy").read_bytes()


@pytest.mark.parametrize("name", [one for one in hearing.families() if one.values[0] not in ("gemma4",)])
def test_models_that_are_trained_on_sound_alone_say_so(
    name: str, ears: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also those that see, as the thinkers of Qwen's Omni models and Gemma 3n: a row's image, and both settings."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    picture = {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "what"}]}
    recipe = recipe_of(ears, name, [{"messages": [picture, {"role": "assistant", "content": "red"}]}])
    with pytest.raises(UserError, match=r"chats\.jsonl:1: the row has an image, and `data\.image` is not set"):
        prepare_examples(recipe, recipe.data.train, Base.of(recipe).renderer(recipe.objective))
    both = recipe.model_copy(update={"data": recipe.data.model_copy(update={"image": Images()})})
    model_type = str(hearing.HEARING[name].config["model_type"])
    refused = rf"data\.image: '{model_type}' is trained on sound here, not on images\. Fix: use `data\.audio` alone, or"
    with pytest.raises(UserError, match=refused):
        Base.of(both).renderer(recipe.objective)


def test_forms_of_rows(ears: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Parts with a path, LLaMA-Factory's and ms-swift's mark and column, two columns, and the bytes of a file."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    answer = {"role": "assistant", "content": "red"}
    mark = [{"role": "user", "content": "<audio>what"}, answer]
    data = "data:audio/wav;base64," + __import__("base64").b64encode((ears / "clips" / "3.wav").read_bytes()).decode()
    part = {"type": "audio", "path": "clips/3.wav"}
    chat = [{"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "what"}]}, answer]
    turns = [{"from": "human", "value": "<audio>what"}, {"from": "gpt", "value": "red"}]
    forms: list[tuple[str, dict[str, Any]]] = [
        ("messages", {"messages": [{"role": "user", "content": [part, chat[0]["content"][1]]}, answer]}),
        ("messages", {"messages": mark, "audios": ["clips/3.wav"]}),
        ("messages", {"messages": chat, "audios": [data]}),
        ("messages", {"messages": chat, "audio": "clips/3.wav"}),
        ("sharegpt", {"conversations": turns, "audios": ["clips/3.wav"]}),
        ("speech", {"audio": "clips/3.wav", "prompt": "what", "text": "red"}),
        ("auto", {"audio": "clips/3.wav", "prompt": "what", "text": "red"}),
    ]
    found = []
    for format, row in forms:
        recipe = recipe_of(ears, "qwen2_audio", [row] * 4, format=format)
        example, *_ = prepare_examples(recipe, recipe.data.train, Base.of(recipe).renderer(recipe.objective))
        found.append((example.sequences[0].input_ids.tolist(), example.sequences[0].loss_mask.tolist()))
        assert len(example.sequences[0].media) == 1
    assert all(one == found[0] for one in found)


def test_what_is_too_long_is_not_cut_within_a_clip(ears: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    rows = chats(20, 3, seed=4)
    whole = recipe_of(ears, "qwen2_audio", rows)
    renderer = Base.of(whole).renderer(whole.objective)
    clips = {len(one.sequences[0].media) for one in prepare_examples(whole, whole.data.train, renderer)}
    assert clips == {0, 1, 2, 3}
    cut = recipe_of(ears, "qwen2_audio", rows, max_length=60, overlong="truncate")
    examples = prepare_examples(cut, cut.data.train, renderer)
    assert examples.report.totals()["truncated"] > 0
    token = Base.of(cut).tokenizer.convert_tokens_to_ids("<|AUDIO|>")
    for one in examples:
        (sequence,) = one.sequences
        assert len(sequence.input_ids) <= 60
        inside = sum(clip.end - clip.begin for clip in sequence.media)
        assert int((sequence.input_ids == token).sum()) == inside
    long = hearing.write_wav(ears / "clips" / "long.wav", hearing.tone(200, 1.2))
    row = {"audio": str(long), "text": "red"}
    refused = recipe_of(ears, "qwen2_audio", [row], format="speech")
    with pytest.raises(UserError, match=r"a clip of 1\.20 s cannot be used: this model hears 1 s"):
        prepare_examples(refused, refused.data.train, renderer)


def test_a_file_that_changed_is_an_error(ears: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    path = hearing.write_wav(ears / "clips" / "other.wav", hearing.tone(200, 0.5))
    recipe = recipe_of(
        ears,
        "qwen3_asr",
        [
            {
                "messages": [
                    {"role": "user", "content": [{"type": "audio", "audio": "clips/other.wav"}]},
                    {"role": "assistant", "content": "yes"},
                ]
            }
        ],
    )
    base = Base.of(recipe)
    (example,) = prepare_examples(recipe, recipe.data.train, base.renderer(recipe.objective))
    reader: Any = media_reader(base.media)
    hearing.write_wav(path, hearing.tone(200, 0.6))
    with pytest.raises(UserError, match=r"other\.wav: cannot be read: not the 8,000 samples"):
        collate([example], media_inputs=reader)
    hearing.write_wav(path, hearing.tone(200, 0.5), 8_000)
    with pytest.raises(UserError, match=r"8,000 samples a second, but it had 16,000"):
        collate([example], media_inputs=reader)
    path.unlink()
    with pytest.raises(UserError, match=r"other\.wav: cannot be read: .*No such file"):
        collate([example], media_inputs=reader)


def test_a_row_of_several_clips_is_refused_if_its_tower_mixes_them() -> None:
    assert {name for name, family in FAMILIES.items() if family.alone} == {
        "gemma3n",
        "granite_speech",
        "phi4_multimodal",
    }
    expansion = RowMedia(SimpleNamespace(kind="audio", placeholder="<|audio|>", takes_one=True), Audio())  # pyright: ignore[reportArgumentType]
    two = [Reference("audio", "a.wav")] * 2
    with pytest.raises(BadRow, match="2 clips: this model's tower computes one otherwise beside a longer one"):
        expansion.expand("<|audio|><|audio|>", (), two, "rows.jsonl", "the template")
