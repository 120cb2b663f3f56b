"""A teacher's predictions at the trained tokens of every example, on disk: k ids and their log-probabilities each.

An entry of the cache is a folder that numpy maps (S trained tokens of R examples), named by the key of their origin;
examples in it are looked up by a hash of their tokens:

    ids.bin (S, k) int32      log_probs.bin (S, k) float32      checksums.npy (R,) uint32, of both for each example
    keys.npy (R,) uint64      offsets.npy (R + 1,) int64        report.json, with checksums of all arrays
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from finetune import __version__
from finetune.data.cache_entries import entries_folder, load_or_write, made_now, removed, replacing
from finetune.data.checksums import (
    VERIFIED_AT_ONCE,
    ArrayFile,
    Damaged,
    checksum,
    load_array,
    map_array,
    sealed,
    unsealed,
    verify,
)
from finetune.data.samples import Example, Sequence
from finetune.errors import RunFailure, UserError

CODE_VERSION = 2  # raise it when an entry's layout changes, or the rules for accepting a file
IDS, LOG_PROBS = "teacher_ids", "teacher_log_probs"  # columns of targets: (S, k) int64, float32

_LARGE = {"ids": np.dtype("<i4"), "log_probs": np.dtype("<f4")}

Tokens = NDArray[np.int32]

log = logging.getLogger(__name__)


def vocabulary_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 of every token with its id: equal if ids mean the same."""
    tokens = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


def example_key(input_ids: Tokens, trained: NDArray[np.bool_], images: bytes = b"") -> int:
    """64-bit hash of token ids, loss mask and `media_digest`: images of one size are the same tokens."""
    content = np.ascontiguousarray(input_ids, np.int32).tobytes() + np.ascontiguousarray(trained, np.bool_).tobytes()
    return int.from_bytes(hashlib.blake2b(content + images, digest_size=8).digest(), "little")


def media_digest(sources: Iterable[str | bytes]) -> bytes:
    """Returns bytes that distinguish the images of a sequence, b"" if it has none. sources: see `samples.Image`."""
    contents = (source if isinstance(source, bytes) else os.fsencode(source) for source in sources)
    return b"".join(hashlib.blake2b(content, digest_size=16).digest() for content in contents)


def key_of_sequence(sequence: Sequence) -> int:
    return example_key(sequence.input_ids, sequence.loss_mask, media_digest(one.source for one in sequence.media))


@dataclass(frozen=True)
class Predictions:
    """An entry, mapped into memory: only the examples looked up are read."""

    identity: str  # of the content
    ids: NDArray[np.int32]  # (S, k)
    log_probs: NDArray[np.float32]  # (S, k)
    keys: NDArray[np.uint64]  # (R,) sorted
    begins: NDArray[np.int64]  # (R,) of the targets of each key
    checksums: NDArray[np.uint32]  # (R,)
    largest_id: int
    folder: Path
    is_verified: bool  # if not, what is looked up is

    @property
    def per_target(self) -> int:
        return self.ids.shape[1]

    def of(self, example: Example) -> dict[str, NDArray[Any]] | None:
        """Returns the columns (n, k) of an example's n targets; None if it has none. Raises RunFailure if they differ
        from those written."""
        (sequence,) = example.sequences
        key = np.uint64(key_of_sequence(sequence))
        at = int(np.searchsorted(self.keys, key))
        if at == len(self.keys) or self.keys[at] != key:
            return None
        place = slice(self.begins[at], self.begins[at] + sequence.num_targets)
        if not self.is_verified and checksum(self.ids[place], self.log_probs[place]) != self.checksums[at]:
            raise RunFailure(
                f"{removed(self.folder)}: the cached predictions of {example.path}:{example.row} are not what was "
                "written. Fix: start again; those of a file are read again, and a model's are computed again by "
                "`python -m finetune reference`"
            )
        return {IDS: self.ids[place].astype(np.int64), LOG_PROBS: np.array(self.log_probs[place])}


class PredictionsWriter:
    """An entry's files as they grow, in an empty folder: only keys are kept in memory. Raises OSError."""

    def __init__(self, folder: Path, per_target: int):
        self.folder, self.per_target = folder, per_target
        self.keys, self.counts, self.checksums, self.tokens, self.largest_id = [], [], [], 0, -1
        self._begun = time.monotonic()
        self._files = {name: ArrayFile(folder / f"{name}.bin", dtype, is_npy=False) for name, dtype in _LARGE.items()}

    def append(
        self,
        input_ids: Tokens,
        trained: NDArray[np.bool_],
        ids: NDArray[Any],
        log_probs: NDArray[Any],
        images: bytes = b"",
    ) -> None:
        """ids, log_probs: (targets of the example, k). images: see `media_digest`."""
        assert ids.shape == log_probs.shape == (np.count_nonzero(trained), self.per_target)
        self.keys.append(example_key(input_ids, trained, images))
        self.counts.append(len(ids))
        self.tokens += len(input_ids)
        self.largest_id = max(self.largest_id, int(ids.max(initial=-1)))
        parts = np.ascontiguousarray(ids, np.int32), np.ascontiguousarray(log_probs, np.float32)
        self.checksums.append(checksum(*parts))
        for file, part in zip(self._files.values(), parts, strict=True):
            file.append(part)

    def finish(self, of: dict[str, Any]) -> None:
        """of: for people, see `finetune cache list`."""
        small = {
            "keys.npy": np.array(self.keys, np.uint64),
            "offsets.npy": np.concatenate(([0], np.cumsum(self.counts))).astype(np.int64),
            "checksums.npy": np.array(self.checksums, np.uint32),
        }
        checksums = {}
        for name, file in self._files.items():
            file.finish()
            checksums[f"{name}.bin"] = file.checksum
        for name, array in small.items():
            np.save(self.folder / name, array)
            checksums[name] = checksum((self.folder / name).read_bytes())
        report = {
            "of": {**of, "finetune": __version__, "code_version": CODE_VERSION},
            "made": made_now(time.monotonic() - self._begun),
            "report": {"examples": len(self.keys), "tokens": self.tokens},
            "checksums": checksums,
            "per_target": self.per_target,
            "largest_id": self.largest_id,
        }
        (self.folder / "report.json").write_text(sealed(report), encoding="utf-8")

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def load_predictions(key: str) -> Predictions | None:
    """Returns the entry of this key; None if it is absent, or damaged, which is logged."""
    try:
        return open_predictions(key)
    except Damaged as damage:
        log.warning("%s: damaged on the disk (%s); it is not used", entries_folder() / key, damage)
        return None


def open_predictions(key: str) -> Predictions | None:
    """Returns the entry of this key; None if absent. Raises Damaged if a part is missing, or differs from what was
    written."""
    folder = entries_folder() / key
    if not folder.is_dir():
        return None
    try:
        report = unsealed(folder / "report.json")
        expected = report["checksums"]
        keys, offsets, checksums = (
            load_array(folder / name, expected[name]) for name in ("keys.npy", "offsets.npy", "checksums.npy")
        )
        shape = (int(offsets[-1]), int(report["per_target"]))
        large = {name: map_array(folder / f"{name}.bin", dtype, shape) for name, dtype in _LARGE.items()}
        is_small = sum(array.nbytes for array in large.values()) <= VERIFIED_AT_ONCE
        for name, array in large.items() if is_small else ():
            verify(folder / f"{name}.bin", array, expected[f"{name}.bin"])
    except OSError as error:
        raise Damaged(f"{Path(error.filename or folder).name}: {error.strerror or error}") from None
    order = np.argsort(keys, kind="stable")
    ordered = (keys[order], offsets[:-1][order], checksums[order])
    return Predictions(key, large["ids"], large["log_probs"], *ordered, int(report["largest_id"]), folder, is_small)


def find_or_write(
    key: str, per_target: int, of: dict[str, Any], fill: Callable[[PredictionsWriter], None]
) -> Predictions:
    """Returns the entry, which one process fills while others wait. Raises UserError, also the errors of `fill`."""
    return load_or_write(
        entries_folder() / key,
        lambda: open_predictions(key),
        lambda: write_predictions(key, per_target, of, fill),
        "reads a teacher's file",
    )[0]


def write_predictions(key: str, per_target: int, of: dict[str, Any], fill: Callable[[PredictionsWriter], None]) -> None:
    """Writes an entry, complete or not at all. Raises OSError, and the errors of `fill`."""
    with (
        replacing(entries_folder() / key) as folder,
        contextlib.closing(PredictionsWriter(folder, per_target)) as writer,
    ):
        fill(writer)
        writer.finish(of)


def check_complete(examples: Iterable[Example], predictions: Predictions, origin: str) -> None:
    """Raises UserError naming the first examples that have no predictions. origin: source of the predictions."""
    missing = [f"{example.path}:{example.row}" for example in examples if predictions.of(example) is None]
    if missing:
        raise UserError(
            f"{origin} has no predictions for {len(missing):,} examples, such as {', '.join(missing[:3])}. Each needs "
            "them for the same tokens and the same loss mask (`finetune inspect --json` shows both). Fix: make them "
            "with the recipe's template, max_length and train_on"
        )
