"""Ranges of flattened parameters in safetensors files: written by any number of ranks, read by any other number.

A tensor's name in a file is `field|start|parameter`: elements from `start` on of that field of the flattened parameter,
or `field|start:run:stride|parameter` for runs of `run` elements, `stride` apart. No rank holds more than it
trains, and a reader takes only the ranges it needs from each file. 8-bit state is stored as it is: codes under the
field's name, with `field:scales`, `field:book` and `field:phase` (`finetune/engine/state_shards.py`).

Files are written tensor by tensor, with the checksum computed on the way (`safetensors_writer.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.optim import Optimizer

from finetune.checkpoints.folder import FileEntry
from finetune.checkpoints.safetensors_writer import write_safetensors
from finetune.engine.state_shards import (
    WEIGHT,
    Blocks,
    MakeRoom,
    Range,
    ShardPart,
    StoredPiece,
    by_stepped,
    fields,
    fill_coded,
    is_coded,
    make_room,
    make_state,
    overlaps,
)
from finetune.errors import UserError

_MAPPED_BYTES = 2**28  # of files of weights, before they are reopened


def part_tensors(parts: list[ShardPart], optimizers: list[Optimizer]) -> dict[str, Tensor]:
    """Returns the tensors a rank writes, by name in the file: flat views of weights and optimizer state."""
    tensors = {}
    for part in parts:
        start, run, stride = part.range.start, part.range.run, part.range.stride
        place = f"{start}" if part.range.is_contiguous else f"{start}:{run}:{stride}"
        for field, tensor in fields(part, optimizers):
            tensors[f"{field}|{place}|{part.name}"] = tensor
    return tensors


def shape_metadata(parts: list[ShardPart]) -> dict[str, str]:
    """Returns the full shapes of the parameters, for the file's header."""
    return {f"shape {part.name}": str(list(part.shape)) for part in parts}


@dataclass(frozen=True)
class _StoredRange:
    elements: Range
    file: Path
    key: str


class PartReader:
    """Index over all rank files of a checkpoint."""

    def __init__(self, files: list[Path]):
        # parameter -> field -> ranges in order; `state1:scales` and the like are read with their field
        self._ranges: dict[str, dict[str, list[_StoredRange]]] = defaultdict(lambda: defaultdict(list))
        self.shapes: dict[str, str] = {}
        self._open = {file: safe_open(file, framework="pt") for file in files}
        for file, handle in self._open.items():
            for key in handle.keys():  # noqa: SIM118 (safe_open is not a dict)
                field, position, name = key.split("|", 2)
                if ":" not in field:
                    numel = handle.get_slice(key).get_shape()[0]
                    start, *runs = map(int, position.split(":"))
                    if not runs:
                        elements = Range(start, numel)
                    else:
                        run, stride = runs
                        elements = Range(start, run, stride, numel // run)
                    self._ranges[name][field].append(_StoredRange(elements, file, key))
            metadata = handle.metadata() or {}
            self.shapes.update({k.removeprefix("shape "): v for k, v in metadata.items() if k.startswith("shape ")})
        for fields_of in self._ranges.values():
            for ranges in fields_of.values():
                ranges.sort(key=lambda r: r.elements.start)

    def restore(
        self,
        parts: list[ShardPart],
        optimizers: list[Optimizer],
        scalars: dict[str, dict[str, float]],
        room: MakeRoom = make_room,
    ) -> None:
        """Fills weights and optimizer state. scalars: the optimizer's, by parameter.

        Raises UserError if the checkpoint belongs to another model.
        """
        for part in parts:
            if self.shapes.get(part.name) != str(list(part.shape)):
                stored = self.shapes.get(part.name, "absent")
                raise UserError(
                    f"the checkpoint's {part.name} is {stored}, the model's {list(part.shape)}. It is of another "
                    "model. Fix: resume with that model, or use another `run.name`"
                )
        for group in by_stepped(parts):
            merged = {field: number for part in group for field, number in scalars[part.name].items()}
            self._restore_stepped(group, optimizers, merged, room)

    @torch.no_grad()
    def _restore_stepped(
        self, parts: list[ShardPart], optimizers: list[Optimizer], scalars: dict[str, float], room: MakeRoom
    ) -> None:
        """Fills all parts of one stepped tensor together, because they may share 8-bit blocks."""
        stepped = parts[0].stepped
        _fill(stepped, [piece for part in parts for piece in self._pieces(part, WEIGHT)])
        types = {
            field: self._open[ranges[0].file].get_slice(ranges[0].key)[:1].dtype
            for part in parts
            for field, ranges in self._ranges[part.name].items()
            if field != WEIGHT
        }
        state = make_state(stepped, optimizers, types, scalars, room)
        for field in types:
            having = [part for part in parts if field in self._ranges[part.name]]
            pieces = [piece for part in having for piece in self._pieces(part, field)]
            if is_coded(state[field]):
                fill_coded(state, field, pieces)
            else:
                _fill(state[field], pieces)

    def stored_dtype(self, name: str) -> torch.dtype:
        """Returns the type of a stored weight."""
        first = self._ranges[name][WEIGHT][0]
        return self._open[first.file].get_slice(first.key)[:1].dtype

    def fill_weight(self, name: str, weight: Tensor) -> None:
        """Fills a contiguous tensor with a stored weight. Raises UserError if elements are missing."""
        part = ShardPart(name, tuple(weight.shape), 0, weight.numel(), weight, 0)
        _fill(weight, self._pieces(part, WEIGHT))

    def _pieces(self, part: ShardPart, field: str) -> list[StoredPiece]:
        """Returns the stored ranges that overlap a part, read lazily. Raises UserError if elements are missing."""
        pieces = []
        for stored in self._ranges[part.name][field]:
            placed = [
                replace(overlap, at=overlap.at + part.offset) for overlap in overlaps(stored.elements, part.range)
            ]
            if not placed:
                continue
            file = self._open[stored.file]
            source: Any = file.get_slice(stored.key)
            if source.get_dtype() == "U8":
                suffix = stored.key.removeprefix(field)
                scales, book, phase = (file.get_tensor(f"{field}:{of}{suffix}") for of in ("scales", "book", "phase"))
                source = Blocks(source, scales, book, int(phase))
            pieces += [StoredPiece(source, overlap) for overlap in placed]
        filled = sum(piece.overlap.numel for piece in pieces)
        if filled != part.numel:
            raise UserError(
                f"the checkpoint holds {filled} of {part.numel} elements of {field} of {part.name}. Fix: restore its "
                "files, or resume from another checkpoint"
            )
        return pieces


class WeightReader:
    """The weights of a checkpoint's files, one at a time, on any machine, without optimizer state or an engine.

    Files are mapped, and pages read stay resident until they are closed, so they are reopened every few tensors.
    """

    def __init__(self, files: list[Path]):
        self._files, self._read = files, 0
        self._parts = PartReader(files)
        stored = {name: self._parts.stored_dtype(name) for name in self._parts.shapes}
        self.shapes = {  # (device meta)
            name: torch.empty(json.loads(self._parts.shapes[name]), dtype=dtype, device="meta")
            for name, dtype in stored.items()
        }

    def read(self, name: str) -> Tensor:
        """Returns a parameter in full. Raises UserError if elements are missing."""
        if self._read > _MAPPED_BYTES:
            try:
                self._parts, self._read = PartReader(self._files), 0
            except FileNotFoundError:
                raise UserError(
                    f"{self._files[0].parent}: was deleted while it was read, by the run that trains here. Its file "
                    "system has no locks. Fix: raise `checkpoint.keep`, or export when the run has ended"
                ) from None
        weight = torch.empty_like(self.shapes[name], device="cpu")
        self._parts.fill_weight(name, weight)
        self._read += weight.nbytes
        return weight


def _fill(tensor: Tensor, pieces: list[StoredPiece]) -> None:
    for piece in pieces:
        piece.place(tensor.detach().view(-1)).copy_(piece.values())


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> FileEntry:
    """Writes flat tensors, on any device, and flushes them to the disk. Raises OSError."""
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))  # keeps each aligned to its type
    digest = hashlib.sha256()
    size = write_safetensors(path, ordered, ordered.__getitem__, metadata, digest.update)
    return FileEntry(path.name, size, digest.hexdigest())
