"""Sound files that cannot be used: a bad row with its reason, counted, in bounded time and memory."""

from __future__ import annotations

import io
import os
import struct
import tracemalloc
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hearing
import numpy as np
import pytest

from finetune.data.media.audio_files import find_clip, load_clip, playable
from finetune.data.media.families import MediaFamily, media_family
from finetune.data.media.feature_cache import FeatureCache
from finetune.data.samples import BadRow, Clip
from finetune.models.tokenizer import load_tokenizer
from finetune.recipe.schema import Audio, Model

soundfile = pytest.importorskip("soundfile")
pytest.importorskip("soxr")
TONE = hearing.tone(300, 0.5)


def stored(path: Path, samples: Any = TONE, rate: int = 16_000, **settings: Any) -> Path:
    soundfile.write(path, samples, rate, **settings)
    return path


def cut(path: Path, share: float = 0.6) -> Path:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    return path


def with_bytes(path: Path, at: int, value: bytes) -> Path:
    content = bytearray(path.read_bytes())
    content[at : at + len(value)] = value
    path.write_bytes(content)
    return path


def endless(path: Path, seconds: int = 7200, rate: int = 16_000) -> Path:
    """Two hours of nothing, written as a hole."""
    size = seconds * rate * 2
    head = struct.pack(
        "<4sI4s4sIHHIIHH4sI", b"RIFF", size + 36, b"WAVE", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16, b"data", size
    )
    with path.open("wb") as file:
        file.write(head)
        file.truncate(size + 44)
    return path


def linked_out(path: Path) -> Path:
    outside = path.parent.parent / "outside.wav"
    hearing.write_wav(outside, TONE)
    path.symlink_to(outside)
    return path


def without_samples(path: Path) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
    return path


def link_to_folder(path: Path) -> Path:
    """`path` within a folder that is a link to one outside."""
    outside = path.parent.parent.parent / "elsewhere"
    outside.mkdir()
    hearing.write_wav(outside / path.name, TONE)
    path.parent.symlink_to(outside)
    return path


def as_text(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def hole(path: Path, size: int) -> Path:
    with path.open("wb") as file:
        file.truncate(size)
    return path


def scrambled(path: Path) -> Path:
    """Other bytes from the middle on, of the same number."""
    half = path.stat().st_size // 2
    return with_bytes(path, half, bytes(np.random.default_rng(0).integers(0, 256, half, dtype=np.uint8)))


BAD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "silent.wav": (lambda p: hearing.write_wav(p, np.zeros(8_000, np.float32)), "silent: every sample is zero"),
    "empty.wav": (without_samples, "empty: it has no samples"),
    "nothing.wav": (lambda p: (p.write_bytes(b""), p)[1], "cannot be used"),
    "cut.wav": (lambda p: cut(hearing.write_wav(p, TONE)), "cut off: .* of .* bytes"),
    "cut.flac": (lambda p: cut(stored(p)), "cut off, or damaged|cannot be used"),
    "half.mp3": (lambda p: cut(stored(p), 0.01), "cannot be used"),
    "slow.wav": (lambda p: with_bytes(hearing.write_wav(p, TONE), 24, struct.pack("<I", 7)), "7 samples a second"),
    "fast.wav": (lambda p: with_bytes(hearing.write_wav(p, TONE), 24, struct.pack("<I", 2**31 - 1)), "cannot be used"),
    "zero.wav": (lambda p: with_bytes(hearing.write_wav(p, TONE), 24, bytes(4)), "cannot be used"),
    "array.wav": (lambda p: hearing.write_wav(p, np.stack([TONE] * 9, 1)), "9 channels; at most 8"),
    "hours.wav": (endless, r"7,200 s; `data\.audio\.max_seconds` is 1800"),
    "loud.wav": (lambda p: stored(p, TONE * 40_000, subtype="FLOAT"), "floats up to .*, and full scale is 1"),
    "nan.wav": (lambda p: stored(p, TONE * np.nan, subtype="FLOAT"), "samples that are no numbers"),
    "infinite.wav": (lambda p: stored(p, TONE / 0.0, subtype="FLOAT"), "samples that are no numbers"),
    "text.wav": (lambda p: (p.write_text("not sound at all, " * 99), p)[1], "cannot be used"),
    "picture.wav": (lambda p: (p.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(999)), p)[1], "cannot be used"),
    "bare.raw": (lambda p: (p.write_bytes(os.urandom(9_999)), p)[1], "cannot be used"),
    "other.aiff": (lambda p: stored(p), "AIFF is not a kind that is read"),
    "folder.wav": (lambda p: (p.mkdir(), p)[1], "not a file"),
    "linked.wav": (linked_out, "leads out of"),
    "circle.wav": (lambda p: (p.symlink_to(p), p)[1], "cannot be read|no such"),
    "dangling.wav": (lambda p: (p.symlink_to(p.parent / "nowhere.wav"), p)[1], "no such sound file"),
    "way/out.wav": (link_to_folder, "leads out of"),
    "pipe.wav": (lambda p: (os.mkfifo(p), p)[1], "not a file"),  # would never end
    "huge.wav": (lambda p: hole(p, (1 << 31) + 1), "bytes; at most"),
    "stated.flac": (lambda p: with_bytes(stored(p), 22, b"\xff" * 4), r"268,435 s; `data\.audio\.max_seconds`"),
    "tag.mp3": (lambda p: (p.write_bytes(b"ID3\x04\0\0\x7f\x7f\x7f\x7f" + bytes(1 << 20)), p)[1], "cannot be used"),
    "pages.ogg": (lambda p: (p.write_bytes(b"OggS" * 9_999), p)[1], "cannot be used"),
    "chunk.wav": (lambda p: with_bytes(hearing.write_wav(p, TONE), 16, b"\xff" * 4), "cannot be used"),
    "hole.wav": (lambda p: hole(p, 1 << 20), "cannot be used"),
    "page.mp3": (lambda p: as_text(p, "<!doctype html><title>404</title>" * 99), "cannot be used"),
    "pointer.flac": (lambda p: as_text(p, "version https://git-lfs.github.com/spec/v1\n"), "cannot be used"),
    "archive.ogg": (lambda p: (p.write_bytes(b"PK\x03\x04" + bytes(4_000)), p)[1], "cannot be used"),
    "scrambled.flac": (lambda p: scrambled(stored(p)), "cannot be used|cut off, or damaged"),
    "cut.ogg": (lambda p: cut(stored(p), 0.2), "cannot be used|cut off, or damaged"),
    "head.flac": (lambda p: cut(stored(p), 0.01), "cannot be used"),
    "silent.flac": (lambda p: stored(p, np.zeros(8_000, np.float32)), "silent: every sample is zero"),
    "channels.wav": (lambda p: with_bytes(hearing.write_wav(p, TONE), 22, b"\xff\xff"), "cannot be used|channels"),
    "codec.wav": (lambda p: with_bytes(hearing.write_wav(p, TONE), 20, b"\x77\x77"), "cannot be used"),
    "bad\nname.wav": (lambda p: as_text(p, "no sound"), "cannot be used"),
    "double.wav": (lambda p: stored(p, TONE * 9.0, subtype="DOUBLE"), "floats up to .*, and full scale is 1"),
    "two\nlines.wav": (lambda p: p, "no such sound file"),
}


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_a_bad_row_with_its_reason(name: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").write_text("")
    make, why = BAD[name]
    with np.errstate(all="ignore"):
        make(tmp_path / "data" / name)
    assert len(BAD) + len(REFERENCES) >= 40
    tracemalloc.start()
    with pytest.raises(BadRow, match=why) as refused:
        find_clip(name, Audio(), str(tmp_path / "data" / "rows.jsonl"))
    assert tracemalloc.get_traced_memory()[1] < 32 << 20
    tracemalloc.stop()
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500


@pytest.fixture(scope="module")
def voxtral(tmp_path_factory: pytest.TempPathFactory) -> MediaFamily:
    model = Model(name=str(hearing.save_hearing(tmp_path_factory.mktemp("ears"), "voxtral")))
    return media_family(model, Audio(cache=True), load_tokenizer(model))


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("name", BAD)
def test_where_features_are_kept_a_bad_file_is_told_in_the_same_words(
    name: str, voxtral: MediaFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is decoded once, for the check and the features, which are not written then."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").write_text("")
    with np.errstate(all="ignore"):
        BAD[name][0](tmp_path / "data" / name)
    cache, rows = FeatureCache.of(voxtral), str(tmp_path / "data" / "rows.jsonl")
    with pytest.raises(BadRow) as by_itself:
        find_clip(name, Audio(), rows)
    tracemalloc.start()
    with pytest.raises(BadRow) as refused:
        cache.find(name, rows)
    assert tracemalloc.get_traced_memory()[1] < 32 << 20
    tracemalloc.stop()
    assert str(refused.value) == str(by_itself.value)
    assert not cache.folder.exists()


REFERENCES: list[tuple[str | bytes, str]] = [
    ("https://example.org/a.wav", "sound files are not fetched"),
    ("http://169.254.169.254/latest/meta-data", "sound files are not fetched"),
    ("s3://bucket/a.wav", "sound files are not fetched"),
    ("file:///etc/passwd", "only|not fetched|no such"),
    ("../outside.wav", "leads out of"),
    ("/etc/passwd", "leads out of"),
    ("~/.ssh/id_rsa", "no such sound file"),
    ("%2e%2e/outside.wav", "no such sound file"),
    ("missing.wav", "no such sound file"),
    ("a" * 5_000, "more than 4,096 characters"),
    ("a" * 300, "cannot be read|no such"),
    ("data:audio/wav;base64,####", "not base64"),
    ("data:audio/wav,abc", "expected data:audio/"),
    ("data:text/html;base64,PGI+aGk8L2I+", "its bytes"),
    (b"RIFF", "its bytes"),
    (b"", "its bytes"),
    ("a\0b.wav", "NUL"),
    ("", "not a file"),
]


@pytest.mark.parametrize(("reference", "why"), REFERENCES, ids=[str(i) for i in range(len(REFERENCES))])
def test_references_are_not_trusted(reference: str | bytes, why: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("")
    with pytest.raises(BadRow, match=why) as refused:
        find_clip(reference, Audio(), str(rows))
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("name", ["one.wav", "two.flac", "three.ogg", "four.mp3", "five.wav", "long.flac"])
def test_sound_is_read_as_transformers_reads_it(name: str, tmp_path: Path) -> None:
    """Any rate and channels, of files and of bytes; 32-bit floats within full scale, and a stream without a length."""
    (tmp_path / "rows.jsonl").write_text("")
    rate = {"three.ogg": 44_100, "four.mp3": 22_050, "two.flac": 48_000, "long.flac": 44_100}.get(name, 11_025)
    seconds = 7.0 if name == "long.flac" else 0.5  # more than one block
    samples = np.stack([hearing.tone(300, seconds, rate), hearing.tone(500, seconds, rate, 1)], axis=1)
    path = stored(tmp_path / name, samples, rate, **({"subtype": "FLOAT"} if name == "five.wav" else {}))
    if name == "one.wav":
        with_bytes(path, 4, b"\xff" * 4)
    clip = find_clip(name, Audio(), str(tmp_path / "rows.jsonl"))
    assert clip.rate == rate
    ours = load_clip(clip.source, clip.samples, clip.rate, 16_000)
    assert np.array_equal(ours, load_clip(clip.source, clip.samples, clip.rate, 16_000, checks=True))
    assert np.array_equal(ours, hearing.loaded(path))
    in_row = find_clip(path.read_bytes(), Audio(), "rows.jsonl")
    assert np.array_equal(ours, load_clip(in_row.source, in_row.samples, in_row.rate, 16_000))


@pytest.mark.parametrize("channels", [1, 2, 3, 7, 8])
def test_channels_are_mixed_down_as_transformers_mixes_them(channels: int, tmp_path: Path) -> None:
    samples = np.random.default_rng(0).uniform(-1, 1, (4_000, channels)).astype(np.float32)
    path = stored(tmp_path / "a.wav", samples, subtype="FLOAT")
    assert np.array_equal(load_clip(str(path), 4_000, 16_000, 16_000), hearing.loaded(path))


def test_headers_alone_are_read_if_the_recipe_says(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    hearing.write_wav(tmp_path / "a.wav", np.zeros(8_000, np.float32))
    assert find_clip("a.wav", Audio(verify="header"), str(tmp_path / "rows.jsonl")).samples == 8_000


@pytest.mark.parametrize("rate", [4_000, pytest.param(44_100, marks=pytest.mark.long)])
def test_two_hours_are_checked_in_little_memory(rate: int, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    assert endless(tmp_path / "long.wav", rate=rate).stat().st_size > 14_000 * rate
    tracemalloc.start()
    with pytest.raises(BadRow, match="silent"):
        find_clip("long.wav", Audio(max_seconds=7200), str(tmp_path / "rows.jsonl"))
    assert tracemalloc.get_traced_memory()[1] < 32 << 20
    tracemalloc.stop()


def test_a_long_clip_takes_the_memory_of_what_it_becomes(tmp_path: Path) -> None:
    """It is resampled by blocks: here 115 MB of samples become 19 MB."""
    path, samples = endless(tmp_path / "long.wav", 300, 96_000), 300 * 96_000
    tracemalloc.start()
    wave = load_clip(str(path), samples, 96_000, 16_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(wave) == 300 * 16_000
    assert peak < 2 * wave.nbytes


def test_of_a_long_clip_that_is_played_the_beginning_is_read(tmp_path: Path) -> None:
    path, samples = endless(tmp_path / "long.wav", rate=8_000), 7_200 * 8_000
    tracemalloc.start()
    content = playable(Clip(str(path), samples, 8_000, 0, 0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert soundfile.info(io.BytesIO(content)).duration == 60
    assert peak < 32 << 20
