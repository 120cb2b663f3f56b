"""Weights into safetensors files by Hugging Face's naming, one shard in memory at a time."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from finetune.utils import fsync

SHARD_BYTES = 4 * 10**9
INDEX = "model.safetensors.index.json"


def shard_name(number: int, count: int) -> str:
    """model.safetensors, or model-00001-of-00003.safetensors; number: from 1."""
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


class WeightsWriter:
    """Takes tensors one by one and writes a file whenever the next would make it larger than `shard_bytes`.

    Holds `shard_bytes` at most, or one tensor that is larger by itself: that is a file of its own. How many files there
    will be is known at the end; until then they have names that no reader looks for.
    """

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES):
        self._folder, self._shard_bytes = folder, shard_bytes
        self._shard: dict[str, Tensor] = {}
        self._names: list[list[str]] = []  # of the files written so far
        self.held_bytes = 0
        self.total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """tensor: on the CPU, in its final type. Raises OSError or SafetensorError where a file cannot be written."""
        if self._shard and self.held_bytes + tensor.nbytes > self._shard_bytes:
            self._write()
        self._shard[name] = _alone(tensor)
        self.held_bytes += tensor.nbytes
        self.total_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write what is left, name the files, and write the index if there are several. Raises as `add`."""
        if self._shard:
            self._write()
        count = len(self._names)
        for number in range(1, count + 1):
            self._unnamed(number).rename(self._folder / shard_name(number, count))
        if count > 1:
            self._write_index()

    def _write(self) -> None:
        self._names.append(list(self._shard))
        path = self._unnamed(len(self._names))
        save_file(self._shard, path, metadata={"format": "pt"})
        fsync(path)
        self._shard, self.held_bytes = {}, 0

    def _unnamed(self, number: int) -> Path:
        return self._folder / f"shard-{number:05d}.partial"

    def _write_index(self) -> None:
        count = len(self._names)
        places = {name: shard_name(i, count) for i, names in enumerate(self._names, 1) for name in names}
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(places.items()))}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _alone(tensor: Tensor) -> Tensor:
    """Contiguous, and not a view that would keep a larger tensor in memory."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
