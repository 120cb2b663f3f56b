"""What a teacher predicts at the trained tokens of every example, on disk: k ids and their log-probabilities each.

An entry of the cache is a folder that numpy maps (S trained tokens of R examples), found by the key of where they are
from; examples in it are found by a hash of their tokens:

    ids.bin (S, k) int32      log_probs.bin (S, k) float32
    keys.npy (R,) uint64      offsets.npy (R + 1,) int64      report.json
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from finetune import __version__
from finetune.data.samples import Example, Sequence
from finetune.data.token_cache import entries_folder, load_or_write, temporary_folder
from finetune.errors import UserError

CODE_VERSION = 1  # raise it where an entry's layout changes, or what is accepted in a file
IDS, LOG_PROBS = "teacher_ids", "teacher_log_probs"  # columns of targets: (S, k) int64, float32

_MAPPED = {"ids": "<i4", "log_probs": "<f4"}

Tokens = NDArray[np.int32]


def vocabulary_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 of every token with its id: equal where ids mean the same."""
    tokens = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


def example_key(input_ids: Tokens, trained: NDArray[np.bool_], images: bytes = b"") -> int:
    """64 bits of the tokens, of which of them are trained, and of `images_digest`: images of one size are the same
    tokens."""
    content = np.ascontiguousarray(input_ids, np.int32).tobytes() + np.ascontiguousarray(trained, np.bool_).tobytes()
    return int.from_bytes(hashlib.blake2b(content + images, digest_size=8).digest(), "little")


def images_digest(sources: Iterable[str | bytes]) -> bytes:
    """Returns what tells the images of a sequence from others, b"" where it has none. sources: see `samples.Image`."""
    contents = (source if isinstance(source, bytes) else os.fsencode(source) for source in sources)
    return b"".join(hashlib.blake2b(content, digest_size=16).digest() for content in contents)


def key_of_sequence(sequence: Sequence) -> int:
    return example_key(sequence.input_ids, sequence.loss_mask, images_digest(one.source for one in sequence.images))


@dataclass(frozen=True)
class Predictions:
    """An entry, mapped into memory: what is not looked up is not read."""

    identity: str  # of the content
    ids: NDArray[np.int32]  # (S, k)
    log_probs: NDArray[np.float32]  # (S, k)
    keys: NDArray[np.uint64]  # (R,) sorted
    begins: NDArray[np.int64]  # (R,) of the targets of each key
    largest_id: int

    @property
    def per_target(self) -> int:
        return self.ids.shape[1]

    def of(self, example: Example) -> dict[str, NDArray[Any]] | None:
        """Returns the columns (n, k) of an example's n targets; None where it has none."""
        (sequence,) = example.sequences
        key = np.uint64(key_of_sequence(sequence))
        at = int(np.searchsorted(self.keys, key))
        if at == len(self.keys) or self.keys[at] != key:
            return None
        place = slice(self.begins[at], self.begins[at] + sequence.num_targets)
        return {IDS: self.ids[place].astype(np.int64), LOG_PROBS: np.array(self.log_probs[place])}


class PredictionsWriter:
    """An entry's files as they grow, example by example: nothing but keys is kept in memory. Raises OSError."""

    def __init__(self, folder: Path, per_target: int):
        folder.mkdir(parents=True)
        self.folder, self.per_target = folder, per_target
        self.keys, self.counts, self.tokens, self.largest_id = [], [], 0, -1
        self._ids, self._log_probs = (folder / "ids.bin").open("wb"), (folder / "log_probs.bin").open("wb")

    def append(
        self,
        input_ids: Tokens,
        trained: NDArray[np.bool_],
        ids: NDArray[Any],
        log_probs: NDArray[Any],
        images: bytes = b"",
    ) -> None:
        """ids, log_probs: (targets of the example, k). images: see `images_digest`."""
        assert ids.shape == log_probs.shape == (np.count_nonzero(trained), self.per_target)
        self.keys.append(example_key(input_ids, trained, images))
        self.counts.append(len(ids))
        self.tokens += len(input_ids)
        self.largest_id = max(self.largest_id, int(ids.max(initial=-1)))
        self._ids.write(np.ascontiguousarray(ids, np.int32).data)
        self._log_probs.write(np.ascontiguousarray(log_probs, np.float32).data)

    def finish(self, of: dict[str, Any]) -> None:
        """of: for people, see `finetune cache list`."""
        self.close()
        np.save(self.folder / "keys.npy", np.array(self.keys, np.uint64))
        np.save(self.folder / "offsets.npy", np.concatenate(([0], np.cumsum(self.counts))).astype(np.int64))
        report = {
            "of": {**of, "finetune": __version__, "code_version": CODE_VERSION},
            "made": {"at": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())},
            "report": {"examples": len(self.keys), "tokens": self.tokens},
            "per_target": self.per_target,
            "largest_id": self.largest_id,
        }
        (self.folder / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    def close(self) -> None:
        self._ids.close()
        self._log_probs.close()


def load_predictions(key: str) -> Predictions | None:
    """Returns the entry of this key; None where there is none, or its files are incomplete."""
    folder = entries_folder() / key
    try:
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        keys, offsets = (np.load(folder / f"{name}.npy", allow_pickle=False) for name in ("keys", "offsets"))
        shape = (int(offsets[-1]), int(report["per_target"]))
        ids, log_probs = (_map(folder / f"{name}.bin", kind, shape) for name, kind in _MAPPED.items())
        largest_id = int(report["largest_id"])
    except (OSError, ValueError, KeyError, IndexError, EOFError):
        return None
    order = np.argsort(keys, kind="stable")
    return Predictions(key, ids, log_probs, keys[order], offsets[:-1][order], largest_id)


def _map(path: Path, dtype: str, shape: tuple[int, int]) -> np.ndarray:
    """Raises ValueError where the file is of another size."""
    if path.stat().st_size != shape[0] * shape[1] * 4:
        raise ValueError(f"{path}: not what was written")
    return np.memmap(path, dtype, "r", shape=shape)


def find_or_write(
    key: str, per_target: int, of: dict[str, Any], fill: Callable[[PredictionsWriter], None]
) -> Predictions:
    """Returns the entry, which one process fills while others wait. Raises UserError, also what `fill` raises."""
    folder = entries_folder() / key
    write = functools.partial(write_entry, folder, per_target, of, fill)
    return load_or_write(folder, lambda: load_predictions(key), write, "reads a teacher's file")[0]


def write_entry(folder: Path, per_target: int, of: dict[str, Any], fill: Callable[[PredictionsWriter], None]) -> None:
    """Writes a folder that is complete or absent. Raises OSError."""
    temporary = temporary_folder(folder)
    try:
        writer = PredictionsWriter(temporary, per_target)
        with contextlib.closing(writer):
            fill(writer)
            writer.finish(of)
        shutil.rmtree(folder, ignore_errors=True)  # an incomplete one
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_complete(examples: Iterable[Example], predictions: Predictions, origin: str) -> None:
    """Raises UserError naming the first examples that have no predictions. origin: where these are from."""
    missing = [f"{example.path}:{example.row}" for example in examples if predictions.of(example) is None]
    if missing:
        raise UserError(
            f"{origin} has no predictions for {len(missing):,} examples, such as {', '.join(missing[:3])}: each needs "
            "them for the same tokens, of which the same are trained (`finetune inspect --json` shows both); were they "
            "made with another template, max_length or train_on?"
        )
