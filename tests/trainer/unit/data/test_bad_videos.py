"""Videos that cannot be used: a bad row with its reason, counted, in bounded time and memory."""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import filming
import numpy as np
import pytest
from PIL import Image

from finetune.data.media.video_files import StoredVideo, find_video, frames_at
from finetune.data.samples import BadRow, Video, listed
from finetune.recipe.schema import Videos

FILM = filming.noise(12, 48, 64, 0)


def found(name: str | bytes, folder: Path, **rules: Any) -> StoredVideo:
    return find_video(name, Videos(**rules), str(folder / "rows.jsonl"), 2.0)


def frames_of(stored: StoredVideo, indices: list[int]) -> list[np.ndarray]:
    video = Video(stored.source, stored.frames, stored.rate, stored.height, stored.width, len(indices), 0, 0)
    return list(frames_at(video, indices))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").write_text("")
    return tmp_path / "data"


# --- pictures


def outside(path: Path) -> Path:
    filming.write_frames(path, FILM[:3])
    Image.fromarray(FILM[0]).save(path.parent.parent / "out.png")
    (path / "9.png").symlink_to(path.parent.parent / "out.png")
    return path


def with_one(path: Path, frame: np.ndarray) -> Path:
    filming.write_frames(path, FILM[:3])
    Image.fromarray(frame).save(path / "9.png")
    return path


def with_text(path: Path) -> Path:
    filming.write_frames(path, FILM[:3])
    (path / "notes.txt").write_text("the frames of a video")
    return path


def cut_picture(path: Path) -> Path:
    filming.write_frames(path, FILM[:3])
    (path / "1.png").write_bytes((path / "1.png").read_bytes()[:2000])
    return path


def linked_out(path: Path) -> Path:
    filming.write_frames(path.parent.parent / "elsewhere", FILM[:3])
    path.symlink_to(path.parent.parent / "elsewhere")
    return path


BAD_FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda p: p.mkdir(), "the folder has no files"),
    "sizes": (lambda p: with_one(p, FILM[0, :40]), "frames of different sizes"),
    "notes": (with_text, "not an image of a kind that is read"),
    "cut": (cut_picture, "cut off"),
    "links": (outside, "leads out of"),
    "linked": (linked_out, "leads out of"),
    "nested": (lambda p: (filming.write_frames(p, FILM[:2]), (p / "more").mkdir()), "have to be files of pictures"),
    "long": (lambda p: filming.write_frames(p, np.zeros((1300, 2, 2, 3), np.uint8)), r"650 s; .*max_seconds` is 600"),
}


@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_a_bad_folder_of_frames_is_a_bad_row(name: str, data: Path) -> None:
    make, why = BAD_FOLDERS[name]
    make(data / name)
    with pytest.raises(BadRow, match=why) as refused:
        found(name, data)
    assert "\n" not in str(refused.value)


REFERENCES: list[tuple[str | bytes, str]] = [
    ("https://example.org/a.mp4", "videos are not fetched"),
    ("s3://bucket/a.mp4", "videos are not fetched"),
    ("file:///etc/passwd", "only|not fetched|no such"),
    ("../outside.mp4", "leads out of"),
    ("%2e%2e/outside.mp4", "no such video"),
    ("/etc/passwd", "leads out of"),
    ("missing.mp4", "no such video"),
    ("two\nlines.mp4", "no such video"),
    ("a\0b.mp4", "NUL"),
    ("a" * 5_000, "more than 4,096 characters"),
    ("data:video/mp4;base64,####", "not base64"),
    ("data:video/mp4,abc", "expected data:video/"),
    (b"", "its bytes"),
    (listed(["missing.png"]), "no such video"),
    (listed(["/etc/passwd"]), "leads out of"),
    (listed(["data:image/png;base64,AAAA"]), "have to be files of pictures"),
]


@pytest.mark.parametrize(("reference", "why"), REFERENCES, ids=[str(i) for i in range(len(REFERENCES))])
def test_references_are_not_trusted(reference: str | bytes, why: str, data: Path) -> None:
    with pytest.raises(BadRow, match=why) as refused:
        found(reference, data)
    assert "\n" not in str(refused.value)


def test_frames_of_a_folder_are_in_the_order_of_their_numbers(data: Path) -> None:
    filming.write_frames(data / "film", FILM)
    stored = found("film", data)
    assert (stored.frames, stored.rate, stored.height, stored.width) == (12, Fraction(2), 48, 64)
    assert all(np.array_equal(ours, FILM[i]) for ours, i in zip(frames_of(stored, [0, 2, 11]), (0, 2, 11), strict=True))
    chosen = found(listed(["film/3.png", "film/1.png"]), data)
    assert all(np.array_equal(ours, FILM[i]) for ours, i in zip(frames_of(chosen, [0, 1]), (3, 1), strict=True))
    with pytest.raises(ValueError, match="not the 3 frames"):
        list(frames_at(Video(chosen.source, 3, Fraction(2), 48, 64, 2, 0, 0), [0, 2]))


# --- files


def cut(path: Path, share: float, **settings: Any) -> Path:
    filming.write_video(path, FILM, **settings)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    return path


def with_index_ahead(path: Path) -> Path:
    """An mp4 whose index comes first, and says more than the file has."""
    filming.write_video(path, FILM)
    import av

    ahead = path.with_name("ahead.mp4")
    with av.open(str(path)) as source, av.open(str(ahead), "w", options={"movflags": "faststart"}) as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)
    path.write_bytes(ahead.read_bytes()[: ahead.stat().st_size // 2])
    return path


def with_noise(path: Path) -> Path:
    """Frames that are random bytes under a whole index."""
    filming.write_video(path, FILM)
    content = bytearray(path.read_bytes())
    begin = content.find(b"mdat") + 8
    size = (content.find(b"moov") - begin) // 2  # the first frame stays whole
    content[begin + size : begin + 2 * size - 8] = os.urandom(size - 8)
    path.write_bytes(content)
    return path


def with_bytes(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def only_sound(path: Path) -> Path:
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=16_000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16_000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def with_counts(path: Path) -> Path:
    """An mp4 of a few KB that states a hundred million frames, for which FFmpeg would make a table of 2.4 GB."""
    filming.write_video(path, FILM)
    content, count = bytearray(path.read_bytes()), struct.pack(">I", 100_000_000)
    for name, at in ((b"stsz", 12), (b"stsc", 16), (b"stts", 12)):
        place = content.find(name) + at
        content[place : place + 4] = count
    place = content.find(b"stsz") + 8
    content[place : place + 4] = struct.pack(">I", 1)
    path.write_bytes(content)
    return path


PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"
BAD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty.mp4": (lambda p: with_bytes(p, b""), "not a video of a kind that is read"),
    "text.mp4": (lambda p: with_bytes(p, b"no video at all, " * 99), "not a video of a kind that is read"),
    "list.mp4": (lambda p: with_bytes(p, PLAYLIST), "not a video of a kind that is read"),
    "concat.mp4": (lambda p: with_bytes(p, b"ffconcat version 1.0\nfile /etc/passwd\n"), "not a video of a kind"),
    "page.mp4": (lambda p: with_bytes(p, b"<!doctype html><title>404</title>" * 99), "not a video of a kind"),
    "pointer.webm": (lambda p: with_bytes(p, b"version https://git-lfs.github.com/spec/v1\n"), "not a video of a kind"),
    "archive.mkv": (lambda p: with_bytes(p, b"PK\x03\x04" + bytes(4_000)), "not a video of a kind that is read"),
    "bad\nname.mp4": (lambda p: with_bytes(p, b"no video"), "not a video of a kind that is read"),
    "pipe.mp4": (os.mkfifo, "not a file"),  # would never end
    "circle.mp4": (lambda p: p.symlink_to(p), "cannot be read|no such"),
    "huge.mp4": (lambda p: (p.touch(), os.truncate(p, (1 << 31) + 1)), "bytes; at most"),
    "picture.mp4": (lambda p: Image.fromarray(FILM[0]).save(p, "png"), "not a video of a kind that is read"),
    "cut.mp4": (lambda p: cut(p, 0.6), "cannot be used"),  # its index was at the end
    "ahead.mp4": (with_index_ahead, "cannot be used"),
    "noise.mp4": (with_noise, "cannot be used"),
    "head.mp4": (lambda p: with_bytes(p, b"\0\0\0\x20ftypisom" + bytes(9999)), "cannot be used"),
    "head.webm": (lambda p: with_bytes(p, b"\x1aE\xdf\xa3" + os.urandom(9999)), "cannot be used"),
    "head.gif": (lambda p: with_bytes(p, b"GIF89a" + os.urandom(999)), "cannot be used"),
    "counts.mp4": (with_counts, "its index states 100,000,000 samples"),
    "sound.mp4": (only_sound, "no pictures, only sound or text"),
    "large.avi": (
        lambda p: filming.write_video(p, np.zeros((1, 4200, 4200, 3), np.uint8), codec="mjpeg"),
        "4200 x 4200 pixels; at most 16,777,216",
    ),
    "long.mp4": (lambda p: filming.write_video(p, FILM[:2].repeat(40, 0), 1), r"80 s; .*max_seconds` is 60"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_a_bad_row_with_its_reason(name: str, data: Path) -> None:
    pytest.importorskip("av")
    make, why = BAD_FILES[name]
    make(data / name)
    assert len(BAD_FILES) + len(BAD_FOLDERS) + len(REFERENCES) >= 35
    tracemalloc.start()
    with pytest.raises(BadRow, match=why) as refused:
        found(name, data, max_seconds=60)
    assert tracemalloc.get_traced_memory()[1] < 32 << 20
    tracemalloc.stop()
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500


KINDS = {"a.mp4": "libx264", "a.mov": "mpeg4", "a.mkv": "libx264", "a.webm": "libvpx", "a.avi": "mjpeg", "a.gif": "gif"}


@pytest.mark.parametrize("name", [*KINDS, "a.ts"])
def test_files_are_read_as_transformers_reads_them(name: str, data: Path) -> None:
    """Those frames, of files and of bytes; transformers knows their number by some kinds of header alone."""
    pytest.importorskip("av")
    from transformers.video_utils import read_video_pyav

    filming.write_video(data / name, FILM, 10, KINDS.get(name, "libx264"))
    stored = found(name, data)
    assert (stored.frames, stored.rate, stored.height, stored.width) == (12, Fraction(10), 48, 64)
    theirs, about = read_video_pyav(str(data / name), lambda metadata: np.array([0, 5, 11]))
    assert about.total_num_frames in (0, 12)
    assert all(np.array_equal(one, other) for one, other in zip(frames_of(stored, [0, 5, 11]), theirs, strict=True))
    in_row = found((data / name).read_bytes(), data)
    assert (in_row.frames, in_row.rate) == (stored.frames, stored.rate)
    assert np.array_equal(frames_of(in_row, [7])[0], frames_of(stored, [7])[0])


def test_a_turned_video_is_upright(data: Path) -> None:
    """As a phone stores it: on its side, with a note of the turn."""
    pytest.importorskip("av")
    filming.write_video(data / "a.mp4", FILM)
    content = bytearray((data / "a.mp4").read_bytes())
    at = content.find(b"tkhd") + 4 + 4 + 20 + 8 + 8  # the matrix: version and flags, times, places
    turn = [0, 1 << 16, 0, -(1 << 16), 0, 0, 48 << 16, 0, 1 << 30]
    content[at : at + 36] = struct.pack(">9i", *turn)
    plain = frames_of(found("a.mp4", data), [0])[0]
    (data / "a.mp4").write_bytes(content)
    stored = found("a.mp4", data)
    assert (stored.height, stored.width) == (64, 48)
    assert np.array_equal(frames_of(stored, [0])[0], np.rot90(plain, -1))


def test_headers_alone_are_read_if_the_recipe_says(data: Path) -> None:
    pytest.importorskip("av")
    with_noise(data / "noise.mp4")
    assert found("noise.mp4", data, verify="header").frames == 12
