"""Flipped bits in every file of every cache: each is seen, told in one line, and made again; never other content."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_helpers import recipe, renderer_of, write_jsonl

from finetune.data import predictions as predictions_module
from finetune.data import token_cache
from finetune.data.checksums import Damaged, sealed, unsealed
from finetune.data.dataset import build_training
from finetune.data.media import stored_files
from finetune.data.media.image_files import decode
from finetune.data.predictions import PredictionsWriter, find_or_write, load_predictions, open_predictions
from finetune.data.samples import Example, Image, Sequence
from finetune.data.sources import files
from finetune.data.token_cache import ARRAYS, EntryWriter, find_or_build, open_entry
from finetune.data.tokenizing import ChunkResult, TokenizedExample, arrays_of
from finetune.errors import RunFailure
from finetune.recipe.schema import Images
from finetune.training import reference_files

BITS = 30  # of each file
EXAMPLES = 40


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def pairs() -> list[tuple[Sequence, ...]]:
    """Pairs of sequences, some with an image of a path or of its bytes."""
    random = np.random.Generator(np.random.PCG64(5))
    made = []
    for i in range(EXAMPLES):
        pair = []
        for length in random.integers(6, 30, 2).tolist():
            mask = random.random(length) < 0.6
            mask[:5], mask[-1] = False, True
            source = f"/pictures/{i}.png" if i % 4 else random.bytes(50)
            images = (Image(source, 60, 90, 1, 4),) if i % 2 == 0 else ()
            pair.append(Sequence(random.integers(0, 2**17, length).astype(np.int32), mask, images))
        made.append(tuple(pair))
    return made


def fill(writer: EntryWriter) -> None:
    writer.columns = ("margin",)
    for chunk in (pairs()[:25], pairs()[25:]):
        first = 1 if len(chunk) == 25 else 26
        examples = [TokenizedExample(("rows.jsonl", row), pair, (0.7 * row,)) for row, pair in enumerate(chunk, first)]
        writer.append(ChunkResult(Counter(), [], arrays_of(examples), None, None))


def plain(example: Example) -> Any:
    sequences = [(one.input_ids.tolist(), one.loss_mask.tolist(), one.media) for one in example.sequences]
    return example.path, example.row, sequences, dict(example.columns)


class Tokens:
    """Tokens, masks, numbers, tables of images."""

    files = (*(f"{name}.npy" for name in ARRAYS), "report.json")

    def __init__(self, folder: Path):
        self.folder = folder / "cache" / "data" / "0123"

    def open(self) -> None:
        open_entry(self.folder)

    def content(self) -> Any:
        entry = find_or_build(self.folder, {"source": "rows.jsonl"}, fill)[0]
        sizes = entry.sizes()
        arrays = (sizes.offsets, sizes.lengths, sizes.targets, sizes.shared, entry.hashes, entry.files)
        return (
            [plain(entry.example(i, 0)) for i in range(len(entry))],
            [array.tolist() for array in arrays],
            entry.report,
        )


class TeacherPredictions:
    files = ("ids.bin", "log_probs.bin", "keys.npy", "offsets.npy", "checksums.npy", "report.json")

    def __init__(self, folder: Path):
        self.folder = folder / "cache" / "data" / "4567"

    def open(self) -> None:
        open_predictions("4567")

    def fill(self, writer: PredictionsWriter) -> None:
        for i, pair in enumerate(pairs()):
            count = pair[0].num_targets
            ids = np.arange(count * 3).reshape(count, 3) + i
            writer.append(pair[0].input_ids, pair[0].loss_mask, ids, -ids / 100)

    def content(self) -> Any:
        entry = find_or_write("4567", 3, {"source": "teacher"}, self.fill)
        of_examples = [entry.of(Example("rows.jsonl", 1, 0, (replace_images(pair[0]),))) for pair in pairs()]
        arrays = [{name: array.tolist() for name, array in (found or {}).items()} for found in of_examples]
        return arrays, entry.largest_id, entry.per_target


def replace_images(sequence: Sequence) -> Sequence:
    return Sequence(sequence.input_ids, sequence.loss_mask)


class ReferenceLogProbs:
    files = ("log_probs.npy", "report.json")

    def __init__(self, folder: Path):
        self.folder = folder / "cache" / "data" / "89ab"

    def open(self) -> None:
        if reference_files.load(self.folder, "key", 2 * EXAMPLES) is None:
            raise Damaged("told by a line of the log")

    def content(self) -> Any:
        values = reference_files.load(self.folder, "key", 2 * EXAMPLES)
        if values is None:  # as `ReferenceColumns` does
            values = -np.arange(2.0 * EXAMPLES) / 7
            reference_files.save(self.folder, values, {"key": "key", "dependencies": {"model": "é"}})
        return values.tolist(), reference_files.read_report(self.folder)


class FileDigests:
    """sha256 of files that are remembered. Damage is no loss, so nothing is told."""

    files = ("memo.json",)

    def __init__(self, folder: Path):
        self.path = write_jsonl(folder / "rows.jsonl", [{"text": "hello"}] * 9)
        self.folder = folder / "cache" / "digests"

    def open(self) -> None:
        unsealed(part_of(self, "memo.json"))

    def content(self) -> Any:
        return files.file_digest(self.path)


def part_of(entry: Any, name: str) -> Path:
    return entry.folder / name if name != "memo.json" else next(entry.folder.glob("*.json"))


KINDS = [Tokens, TeacherPredictions, ReferenceLogProbs, FileDigests]
PARTS = [pytest.param(kind, name, id=f"{kind.__name__}-{name}") for kind in KINDS for name in kind.files]


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.mark.parametrize(("kind", "name"), PARTS)
def test_every_flipped_bit_of_every_part_is_seen(tmp_path, monkeypatch, caplog, kind, name):
    monkeypatch.setattr(files, "SETTLED_S", 0.0)
    entry = kind(tmp_path)
    before = entry.content()
    part = part_of(entry, name)
    whole, random = part.read_bytes(), np.random.Generator(np.random.PCG64(1))
    entry.open()
    for bit in random.choice(8 * len(whole), BITS, replace=False).tolist():
        flip(part, bit)
        with pytest.raises(Damaged):
            entry.open()
        part.write_bytes(whole)
    caplog.clear()
    for bit in random.choice(8 * len(whole), 2, replace=False).tolist():
        flip(part, bit)
        assert entry.content() == before  # made again
        entry.open()
    told = [record.getMessage() for record in caplog.records]
    if kind in (Tokens, TeacherPredictions, ReferenceLogProbs):
        assert len(told) == 2
        assert all(
            re.fullmatch(rf"\S+: damaged on the disk \({name}: .*\); it is (made again|not used)", t) for t in told
        )


LARGE = [
    *((Tokens, f"{name}.npy", "tokens") for name in ("input_ids", "loss_mask", "image_sources")),
    *((TeacherPredictions, name, "predictions") for name in ("ids.bin", "log_probs.bin")),
]


@pytest.mark.parametrize(("kind", "name", "what"), LARGE)
def test_a_large_part_is_verified_as_it_is_read(tmp_path, monkeypatch, kind, name, what):
    """No tokens but the right ones; a run that meets damage ends, and the next start makes the entry again."""
    for module in (token_cache, predictions_module):
        monkeypatch.setattr(module, "VERIFIED_AT_ONCE", 0)
    entry = kind(tmp_path)
    before, whole = entry.content(), (entry.folder / name).read_bytes()
    shutil.copytree(entry.folder, tmp_path / "copy")
    header = 128 if name.endswith(".npy") else 0  # which is compared when an entry is opened
    for bit in np.random.Generator(np.random.PCG64(2)).integers(8 * header, 8 * len(whole), BITS).tolist():
        flip(entry.folder / name, bit)
        with pytest.raises(
            RunFailure, match=rf"damaged on the disk, and removed: the cached {what} of rows.jsonl:\d+ "
        ):
            entry.content()
        assert not entry.folder.exists()
        shutil.copytree(tmp_path / "copy", entry.folder)
    shutil.rmtree(entry.folder)
    assert entry.content() == before


def test_damaged_predictions_of_a_model_are_told_and_missing(tmp_path, caplog):
    entry = TeacherPredictions(tmp_path)
    entry.content()
    flip(entry.folder / "ids.bin", 7)
    assert load_predictions("4567") is None
    assert "4567: damaged on the disk (ids.bin: its checksum differs)" in caplog.text


def test_what_is_sealed_is_what_was_written(tmp_path):
    content = {"é": [1, 2.5, float("inf"), None], "nested": {"a": "\u2028"}, "checksums": {"x": 2**31}}
    (tmp_path / "a.json").write_text(sealed(content), encoding="utf-8")
    assert unsealed(tmp_path / "a.json") == content
    for text in ("", "{}", "[]", '{"a": 1}', "[" * 100_000, sealed(content)[:-1], "\udcff"):
        (tmp_path / "a.json").write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(Damaged):
            unsealed(tmp_path / "a.json")


def test_a_run_starts_on_a_damaged_cache(tmp_path, caplog):
    """By the way that a run takes, with one line and the same tokens."""
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": f"hello world {i}"} for i in range(30)])
    made = recipe(path)
    before = [plain(example) for example in build_training(made, renderer_of(made)).examples]
    (report,) = (tmp_path / "cache" / "data").rglob("report.json")
    for name in ("input_ids.npy", "loss_mask.npy"):
        flip(report.with_name(name), 8 * 140 + 3)
        caplog.clear()
        assert [plain(example) for example in build_training(made, renderer_of(made)).examples] == before
        assert [record.getMessage() for record in caplog.records if "damaged" in record.getMessage()] == [
            f"{report.parent}: damaged on the disk ({name}: its checksum differs); it is made again"
        ]


def test_a_copy_of_a_web_image_is_verified(tmp_path, cache, monkeypatch, caplog):
    from PIL import Image as Picture

    Picture.new("RGB", (6, 9), "red").save(tmp_path / "a.bmp")
    content = (tmp_path / "a.bmp").read_bytes()
    monkeypatch.setattr(stored_files, "_download", lambda url: content)
    rules = Images(allow_urls=True)
    copy = stored_files._fetched("https://example.com/a.bmp", "image", rules)
    random = np.random.Generator(np.random.PCG64(4))
    for bit in random.choice(8 * len(content), BITS, replace=False).tolist():
        flip(copy, bit)
        with pytest.raises(ValueError, match="its copy in the cache is damaged"):
            decode(str(copy))
        assert stored_files._fetched("https://example.com/a.bmp", "image", rules) == copy
        assert copy.read_bytes() == content
    assert decode(str(copy)).size == (6, 9)
    assert "it is fetched again" in caplog.text
