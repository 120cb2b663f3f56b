"""The cache of features: what the family computes, made once, by any number of processes; damage is made again."""

from __future__ import annotations

import io
import logging
import shutil
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import hearing
import numpy as np
import pytest
import yaml
from conftest import metrics, train_alone
from rich.console import Console

from finetune.data.building import EntryBuild, OpenedSources, build_source
from finetune.data.cache_entries import list_entries, remove
from finetune.data.dataset import build_training, on_disk
from finetune.data.media.feature_cache import FeatureCache, make_features
from finetune.data.samples import Clip
from finetune.data.token_cache import find_or_build
from finetune.errors import UserError
from finetune.models.base_model import Base
from finetune.recipe import load_recipe

soundfile = pytest.importorskip("soundfile")
pytest.importorskip("soxr")


@pytest.fixture(scope="module")
def ears(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("feature-cache")
    for name in hearing.available():
        hearing.save_hearing(folder, name)
    hearing.write_clips(folder, "clips", 10, seed=2, numbers=(1,))
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))


def recipe_file(ears: Path, name: str, out: Path, **audio: Any) -> Path:
    recipe = {
        "run": {"name": "run", "dir": str(out / "runs")},
        "model": {"name": str(ears / f"{name}_hears"), "train": ["language", "projector", "tower"]},
        "mode": "full",
        "data": {
            "train": [{"path": str(ears / "clips.jsonl"), "format": "messages"}],
            "max_length": 128,
            "audio": {"cache": True, **audio},
        },
        "batch": {"rows": 2},
        "optimizer": {"lr": 1e-3},
        "train": {"max_steps": 3, "precision": "fp32"},
    }
    path = out / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def cache_and_clips(path: Path) -> tuple[FeatureCache, list[Clip]]:
    """The clips of a recipe, whose rows are tokenized with this."""
    recipe = load_recipe(path)
    base = Base.of(recipe)
    assert base.media is not None
    clips = list(on_disk(build_training(recipe, base.renderer(recipe.objective))).examples.media())
    return FeatureCache.of(base.media.family), [one for one in clips if isinstance(one, Clip)]


@pytest.mark.parametrize("name", hearing.families("qwen3_asr"))
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_features_are_the_family_s_and_made_once(name: str, workers: int, ears: Path, tmp_path: Path) -> None:
    cache, clips = cache_and_clips(recipe_file(ears, name, tmp_path, verify="header"))
    assert not cache.folder.exists()
    again = [*clips, *clips]
    said = io.StringIO()
    made = make_features(cache, again, Console(file=said), workers)
    assert (made.clips, made.made) == (len(clips), len(clips)) == (10, 10)
    assert made.seconds == pytest.approx(sum(one.samples / one.rate for one in clips))
    for clip in clips:
        wanted, found = cache.family.read(clip), cache.read(clip)
        assert wanted.keys() == found.keys()
        for key, values in wanted.items():
            assert found[key].dtype == values.dtype
            assert np.allclose(found[key], values, rtol=0, atol=1e-6)
    times = {path: path.stat().st_mtime_ns for path in cache.folder.iterdir() if path.suffix != ".json"}
    assert make_features(cache, clips, Console(file=said), workers).made == 0
    assert {path: path.stat().st_mtime_ns for path in times} == times
    (entry,) = [one for one in list_entries() if one.of and one.of["format"] == "audio"]
    assert (entry.examples, entry.is_whole) == (10, True)
    assert remove([entry]) == []
    assert make_features(cache, clips, Console(file=said), workers).made == 10


@pytest.mark.parametrize("name", hearing.families("qwen3_asr"))
def test_features_are_made_of_the_samples_that_are_checked(name: str, ears: Path, tmp_path: Path) -> None:
    """Those of a clip that is checked are there when its row is tokenized, of each length and rate."""
    cache, clips = cache_and_clips(recipe_file(ears, name, tmp_path))
    assert {cache.path(one) for one in clips} == {*cache.folder.iterdir()}
    made = make_features(cache, clips, Console(file=io.StringIO()))
    assert (made.clips, made.made) == (10, 0)
    assert str(made).endswith("; none was missing")
    for clip in clips:
        wanted, found = cache.family.read(clip), cache.read(clip)
        assert wanted.keys() == found.keys()
        for key, values in wanted.items():
            assert found[key].dtype == values.dtype
            assert np.array_equal(found[key], values)


def test_a_clip_is_decoded_once(ears: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For its features, in all its rows, and when they are tokenized again; without a check features are others'."""
    reads, read = list[int](), soundfile.SoundFile.read

    def counted(file: Any, *arguments: Any, **named: Any) -> Any:
        reads.append(1)
        return read(file, *arguments, **named)

    rows = (ears / "clips.jsonl").read_text()
    (ears / "twice.jsonl").write_text(rows + rows)
    monkeypatch.setattr(soundfile.SoundFile, "read", counted)
    twice = {"path": str(ears / "twice.jsonl"), "format": "messages"}
    path = recipe_file(ears, "voxtral", tmp_path)
    folders = set[Path]()
    for max_length, verify, count in ((128, "samples", 10), (120, "samples", 0), (120, "header", 10)):
        recipe = yaml.safe_load(path.read_text())
        recipe["data"] |= {"train": [twice], "max_length": max_length, "audio": {"cache": True, "verify": verify}}
        path.write_text(yaml.safe_dump(recipe))
        reads.clear()
        cache, clips = cache_and_clips(path)
        make_features(cache, clips, Console(file=io.StringIO()))
        assert (len(clips), len({*clips}), len(reads)) == (20, 10, 2 * count), (max_length, verify)  # and the end
        folders.add(cache.folder)
    assert len(folders) == 2


@pytest.mark.long
def test_any_number_of_processes_check_clips_and_make_features(ears: Path, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file(ears, "qwen3_asr", tmp_path))
    base, (source,) = Base.of(recipe), recipe.data.train
    opened = OpenedSources(recipe).open(source)
    build = EntryBuild(recipe, opened, base.renderer(recipe.objective), workers=2)
    fill = partial(build_source, build=build, digest=opened.reader.digest())
    entry, _ = find_or_build(tmp_path / "entry", {"source": source.path}, fill)
    assert base.media is not None
    cache = FeatureCache.of(base.media.family)
    assert make_features(cache, entry.media(), Console(file=io.StringIO())).made == 0
    assert len({*cache.folder.iterdir()}) == 10 + 1  # and the report


def test_a_clip_that_is_long_or_cannot_be_taken_is_only_checked(ears: Path, tmp_path: Path) -> None:
    """Any number of processes check clips: features of minutes would not fit. The tiny Qwen2-Audio hears one second."""
    voxtral, qwen = (cache_and_clips(recipe_file(ears, one, tmp_path))[0] for one in ("voxtral", "qwen2_audio"))
    rows, before = str(tmp_path / "rows.jsonl"), {*voxtral.folder.iterdir()}
    Path(rows).write_text("")
    hearing.write_wav(tmp_path / "long.wav", hearing.tone(300, 60.1, 4_000), 4_000)
    long = voxtral.find("long.wav", rows)
    assert {*voxtral.folder.iterdir()} == before
    assert make_features(voxtral, [voxtral.family.placed(long, 0, 0)], Console(file=io.StringIO())).made == 1
    of_qwen = {*qwen.folder.iterdir()}
    assert qwen.find("long.wav", rows) == long
    assert {*qwen.folder.iterdir()} == of_qwen


@pytest.mark.parametrize("damage", ["a bit", "cut", "empty", "other bytes"])
def test_damage_is_told_and_made_again(
    damage: str, ears: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache, clips = cache_and_clips(recipe_file(ears, "qwen2_audio", tmp_path))
    wanted, path = cache.read(clips[0]), cache.path(clips[0])
    content = bytearray(path.read_bytes())
    if damage == "a bit":
        content[len(content) // 2] ^= 1
    written = {"a bit": content, "cut": content[:-5], "empty": b"", "other bytes": b"no features at all"}[damage]
    path.write_bytes(bytes(written))
    with caplog.at_level(logging.WARNING):
        found = cache.read(clips[0])
    assert all(np.array_equal(found[key], values) for key, values in wanted.items())
    assert "damaged on the disk" in caplog.text
    assert path.read_bytes() == bytes(content) if damage != "a bit" else path.read_bytes() != bytes(content)


def test_a_file_with_another_content_has_other_features(ears: Path, tmp_path: Path) -> None:
    """Under the same path, of the same length; and one that is gone is told by its path."""
    (tmp_path / "rows").mkdir()
    for place in ("clips", "clips.jsonl", "qwen2_audio_hears"):
        copy = shutil.copytree if (ears / place).is_dir() else shutil.copy
        copy(ears / place, tmp_path / "rows" / place)
    cache, clips = cache_and_clips(recipe_file(tmp_path / "rows", "qwen2_audio", tmp_path))
    before, clip = cache.read(clips[0]), clips[0]
    assert isinstance(clip.source, str)
    samples = hearing.tone(700, clip.samples / clip.rate, clip.rate)[: clip.samples]
    hearing.write_wav(Path(clip.source), samples, clip.rate)
    after = cache.read(clip)
    assert not np.array_equal(before["input_features"], after["input_features"])
    hearing.write_wav(Path(clip.source), 0 * samples, clip.rate)
    with pytest.raises(UserError, match=r"\.wav: cannot be read: silent"):  # or its row would never be checked again
        cache.read(clip)
    Path(clip.source).unlink()
    with pytest.raises(UserError, match=r"\.wav: cannot be read"):
        cache.read(clip)


def test_a_long_clip_is_read_in_the_memory_of_its_features(ears: Path, tmp_path: Path) -> None:
    """So that an hour stops no step: nothing of it is decoded, resampled or transformed again."""
    path = hearing.write_wav(tmp_path / "long.wav", hearing.tone(300, 120, 48_000), 48_000)
    cache, _ = cache_and_clips(recipe_file(ears, "voxtral", tmp_path))
    clip = Clip(str(path), 120 * 48_000, 48_000, 0, 0)
    made = cache.read(clip)
    tracemalloc.start()
    found = cache.read(clip)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.array_equal(found["input_features"], made["input_features"])
    assert peak < 4 << 20 < 120 * 16_000 * 4  # of its samples as they are heard


def test_a_run_has_the_losses_that_it_has_without(ears: Path, tmp_path: Path) -> None:
    losses = {}
    for caches in (False, True):
        path = recipe_file(ears, "voxtral", tmp_path, cache=caches)
        said = train_alone(path, f"run.name={caches}")
        losses[caches] = [line["loss"] for line in metrics(tmp_path / "runs" / str(caches)) if "loss" in line]
        assert ("data.audio.cache: 10 clips" in said) == caches
    assert losses[True] == pytest.approx(losses[False], rel=1e-6)
    assert "; none was missing" in train_alone(path, "run.name=again")
