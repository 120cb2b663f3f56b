"""Ranges of flattened parameters in safetensors files: written by any number of ranks, read by any other.

A tensor's name in a file is `field|start|parameter`: elements from `start` on of that field of the parameter,
flattened; `field|start:run:stride|parameter` where they are runs of so many elements, so far apart. No rank ever holds
more than what it trains, and a reader takes from each file only the ranges it needs. State in 8 bits is stored as it
is: codes under the field's name, and beside them `field:scales`, `field:book` and `field:phase`
(`finetune/engine/blockwise.py`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.optim import Optimizer

from finetune.engine.blockwise import Blocks, Piece, fill_coded, is_coded
from finetune.engine.parts import WEIGHT, MakeRoom, Part, by_stepped, fields, make_room, make_state
from finetune.engine.ranges import Range, overlaps
from finetune.errors import UserError


def part_tensors(parts: list[Part], optimizers: list[Optimizer]) -> dict[str, Tensor]:
    """What a rank writes, by its name in the file: flat views of what the optimizer steps and keeps."""
    return {
        f"{field}|{_place(part.range)}|{part.name}": tensor
        for part in parts
        for field, tensor in fields(part, optimizers)
    }


def _place(elements: Range) -> str:
    if elements.is_contiguous:
        return str(elements.start)
    return f"{elements.start}:{elements.run}:{elements.stride}"


def _range(place: str, numel: int) -> Range:
    start, *runs = map(int, place.split(":"))
    if not runs:
        return Range(start, numel)
    run, stride = runs
    return Range(start, run, stride, numel // run)


def shape_metadata(parts: list[Part]) -> dict[str, str]:
    """Of the whole parameters, for the file's header."""
    return {f"shape {part.name}": str(list(part.shape)) for part in parts}


@dataclass(frozen=True)
class _Stored:
    elements: Range
    file: Path
    key: str


class PartReader:
    """Index over all rank files of a checkpoint."""

    def __init__(self, files: list[Path]):
        # parameter -> field -> in order; what only explains a field (`state1:scales`) is found beside it
        self._ranges: dict[str, dict[str, list[_Stored]]] = defaultdict(lambda: defaultdict(list))
        self.shapes: dict[str, str] = {}
        self._open = {file: safe_open(file, framework="pt") for file in files}
        for file, handle in self._open.items():
            for key in handle.keys():  # noqa: SIM118 (safe_open is no dict)
                field, place, name = key.split("|", 2)
                if ":" not in field:
                    elements = _range(place, handle.get_slice(key).get_shape()[0])
                    self._ranges[name][field].append(_Stored(elements, file, key))
            metadata = handle.metadata() or {}
            self.shapes.update({k.removeprefix("shape "): v for k, v in metadata.items() if k.startswith("shape ")})
        for fields_of in self._ranges.values():
            for ranges in fields_of.values():
                ranges.sort(key=lambda r: r.elements.start)

    def restore(
        self,
        parts: list[Part],
        optimizers: list[Optimizer],
        numbers: dict[str, dict[str, float]],
        room: MakeRoom = make_room,
    ) -> None:
        """Fill weights and optimizer state; numbers: `scalars` by parameter.

        Raises UserError where the checkpoint is of another model.
        """
        for part in parts:
            self._check_shape(part)
        for together in by_stepped(parts):
            merged = {field: number for part in together for field, number in numbers[part.name].items()}
            self._restore_stepped(together, optimizers, merged, room)

    def _check_shape(self, part: Part) -> None:
        if self.shapes.get(part.name) != str(list(part.shape)):
            held = self.shapes.get(part.name, "absent")
            raise UserError(f"the checkpoint's {part.name} is {held}, the model's {list(part.shape)}: another model")

    @torch.no_grad()
    def _restore_stepped(
        self, parts: list[Part], optimizers: list[Optimizer], numbers: dict[str, float], room: MakeRoom
    ) -> None:
        """All parts of one stepped tensor at a time: 8-bit blocks may be shared by several."""
        stepped = parts[0].stepped
        _fill(stepped, [piece for part in parts for piece in self._pieces(part, WEIGHT)])
        types = {field: dtype for part in parts for field, dtype in self._types(part.name).items()}
        state = make_state(stepped, optimizers, types, numbers, room)
        for field in types:
            held = [part for part in parts if field in self._ranges[part.name]]
            pieces = [piece for part in held for piece in self._pieces(part, field)]
            if is_coded(state[field]):
                fill_coded(state, field, pieces)
            else:
                _fill(state[field], pieces)

    def _types(self, name: str) -> dict[str, torch.dtype]:
        """Of the optimizer's fields of a parameter."""
        firsts = {field: ranges[0] for field, ranges in self._ranges[name].items() if field != WEIGHT}
        return {field: self._open[r.file].get_slice(r.key)[:1].dtype for field, r in firsts.items()}

    def _pieces(self, part: Part, field: str) -> list[Piece]:
        """What overlaps a part, to be read when it is asked for. Raises UserError where elements are missing."""
        pieces = []
        for stored in self._ranges[part.name][field]:
            values = self._open[stored.file].get_slice(stored.key)
            for overlap in overlaps(stored.elements, part.range):
                placed = replace(overlap, at=overlap.at + part.offset)
                pieces.append(Piece(self._source(stored, field, values), placed))
        filled = sum(piece.overlap.numel for piece in pieces)
        if filled != part.numel:
            raise UserError(f"the checkpoint holds {filled} of {part.numel} elements of {field} of {part.name}")
        return pieces

    def _source(self, stored: _Stored, field: str, values: Any) -> Any:
        """A stored range, with its scales and book where it is in 8 bits."""
        if values.get_dtype() != "U8":
            return values
        file, place = self._open[stored.file], stored.key.removeprefix(field)
        scales, book, phase = (file.get_tensor(f"{field}:{what}{place}") for what in ("scales", "book", "phase"))
        return Blocks(values, scales, book, int(phase))


def _fill(tensor: Tensor, pieces: list[Piece]) -> None:
    for piece in pieces:
        piece.place(tensor.detach().view(-1)).copy_(piece.values())
