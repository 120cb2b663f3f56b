"""Verifies a written result by reading it back: every tensor present, of the right shape and type, and finite."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from finetune.errors import RunFailure
from finetune.export.weights import INDEX, shard_name


class Verification:
    """Verifies one folder: `read` every file of `weight_files`, then `finish`. Holds one tensor in memory.

    expected: shape and dtype of every tensor in the files, by name. A failure is a RunFailure that names file, tensor
    and reason.
    """

    def __init__(self, folder: Path, expected: dict[str, Tensor]):
        self._folder, self._expected = folder, expected
        self._places: dict[str, str] = {}  # tensor -> file
        self._bytes = 0

    def read(self, file: Path) -> None:
        """Check every tensor of a file. Raises RunFailure."""
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (safe_open is no dict)
                    self._check(file.name, name, tensors.get_tensor(name))
        except (OSError, SafetensorError) as error:
            raise self._failure(file.name, f"cannot be read back: {error}") from error

    def _check(self, file: str, name: str, tensor: Tensor) -> None:
        expected = self._expected.get(name)
        if expected is None:
            raise self._failure(file, f"{name}: the model has no such tensor")
        if name in self._places:
            raise self._failure(file, f"{name}: is in {self._places[name]} as well")
        if (problem := _difference(tensor, expected)) is not None:
            raise self._failure(file, f"{name}: {problem}")
        self._places[name] = file
        self._bytes += tensor.nbytes

    def finish(self) -> None:
        """Check that nothing is missing and that the index is right. Raises RunFailure."""
        files = weight_files(self._folder)
        index = self._json(INDEX) if len(files) > 1 else {}
        for name in self._expected:
            if name not in self._places:
                place = index.get("weight_map", {}).get(name, "*.safetensors")
                raise self._failure(place, f"{name}: is missing")
        if len(files) > 1:
            self._check_index([file.name for file in files], index)
        for file in sorted(self._folder.glob("*.json")):
            self._json(file.name)

    def _check_index(self, files: list[str], index: dict[str, Any]) -> None:
        if files != [shard_name(number, len(files)) for number in range(1, len(files) + 1)]:
            raise self._failure(INDEX, f"the files are not numbered through: {', '.join(files)}")
        places = index.get("weight_map", {})
        for name in sorted({*places, *self._places}):
            if places.get(name) != self._places.get(name):
                raise self._failure(INDEX, f"{name}: the index says {places.get(name)}, not {self._places.get(name)}")
        if (size := index.get("metadata", {}).get("total_size")) != self._bytes:
            raise self._failure(INDEX, f"total_size is {size}, the tensors have {self._bytes} bytes")

    def _json(self, file: str) -> dict[str, Any]:
        try:
            return json.loads((self._folder / file).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise self._failure(file, f"cannot be read back: {error}") from error

    def _failure(self, file: str, reason: str) -> RunFailure:
        return RunFailure(
            f"the saved result is invalid: {self._folder / file}: {reason}. It is kept for inspection; an earlier "
            "result is untouched, and the same command resumes from the last checkpoint"
        )


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _difference(tensor: Tensor, expected: Tensor) -> str | None:
    if tensor.shape != expected.shape:
        return f"has shape {list(tensor.shape)} instead of {list(expected.shape)}"
    if tensor.dtype != expected.dtype:
        return f"is {_name(tensor.dtype)} instead of {_name(expected.dtype)}"
    if tensor.is_floating_point() and (broken := int((~torch.isfinite(tensor)).sum())):
        return f"{broken} of {tensor.numel()} values are not finite in {_name(tensor.dtype)}"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
