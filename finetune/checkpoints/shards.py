"""Ranges of flattened parameters in safetensors files: written by any number of ranks, read by any other.

A tensor's name in a file is `field|start|parameter`: elements from `start` on of that field of the parameter,
flattened. No rank ever holds more than what it trains, and a reader takes from each file only the ranges it needs.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.optim import Optimizer

from finetune.engine.parts import WEIGHT, Part, fields, make_state
from finetune.errors import UserError


def part_tensors(parts: list[Part], optimizers: list[Optimizer]) -> dict[str, Tensor]:
    """What a rank writes, by its name in the file: (numel,) views of what the optimizer steps and keeps."""
    return {f"{field}|{part.start}|{part.name}": tensor for part in parts for field, tensor in fields(part, optimizers)}


def shape_metadata(parts: list[Part]) -> dict[str, str]:
    """Of the whole parameters, for the file's header."""
    return {f"shape {part.name}": str(list(part.shape)) for part in parts}


@dataclass(frozen=True)
class _Range:
    start: int
    file: Path
    key: str


class PartReader:
    """Index over all rank files of a checkpoint."""

    def __init__(self, files: list[Path]):
        self._ranges: dict[tuple[str, str], list[_Range]] = defaultdict(list)  # (parameter, field) -> in order
        self.shapes: dict[str, str] = {}
        self._open = {file: safe_open(file, framework="pt") for file in files}
        for file, handle in self._open.items():
            for key in handle.keys():  # noqa: SIM118 (safe_open is no dict)
                field, start, name = key.split("|", 2)
                self._ranges[(name, field)].append(_Range(int(start), file, key))
            metadata = handle.metadata() or {}
            self.shapes.update({k.removeprefix("shape "): v for k, v in metadata.items() if k.startswith("shape ")})
        for ranges in self._ranges.values():
            ranges.sort(key=lambda r: r.start)

    def restore(self, part: Part, optimizers: list[Optimizer], numbers: dict[str, float]) -> None:
        """Fill a part's weight and optimizer state. Raises UserError where the checkpoint is of another model."""
        if self.shapes.get(part.name) != str(list(part.shape)):
            held = self.shapes.get(part.name, "absent")
            raise UserError(f"the checkpoint's {part.name} is {held}, the model's {list(part.shape)}: another model")
        types = {field: self._dtype(name, field) for name, field in self._ranges if name == part.name}
        types.pop(WEIGHT)
        views = {WEIGHT: part.view(part.stepped), **make_state(part, optimizers, types, numbers)}
        for field, view in views.items():
            self._fill(part, field, view)

    def _dtype(self, name: str, field: str) -> torch.dtype:
        first = self._ranges[(name, field)][0]
        return self._open[first.file].get_tensor(first.key).dtype

    @torch.no_grad()
    def _fill(self, part: Part, field: str, view: Tensor) -> None:
        """view (numel,): copy the elements of every stored range that overlaps [start, start + numel)."""
        filled, end = 0, part.start + part.numel
        for stored in self._ranges[(part.name, field)]:
            if stored.start >= end:
                break
            piece = self._open[stored.file].get_slice(stored.key)
            stored_end = stored.start + piece.get_shape()[0]
            low, high = max(stored.start, part.start), min(stored_end, end)
            if low < high:
                values = piece[low - stored.start : high - stored.start]
                view[low - part.start : high - part.start].copy_(values)
                filled += high - low
        if filled != part.numel:
            raise UserError(f"the checkpoint holds {filled} of {part.numel} elements of {field} of {part.name}")
