"""Reads single tensors of safetensors files, and writes files tensor by tensor: never a file, or a model, in memory.

The library maps a whole file, and the parts that were read stay resident; here each tensor is read into memory of its
own.
The format: eight bytes with the length of a JSON header, the header, the tensors' bytes without gaps
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import copy
import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from finetune.checkpoints.safetensors_writer import DTYPES, nbytes, write_safetensors
from finetune.errors import UserError
from finetune.export.weight_files import SHARD_BYTES, shard_name, write_index
from finetune.models.damage import check_tensors
from finetune.utils import fsync


@dataclass(frozen=True)
class _Place:
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file


class TensorFiles:
    """The tensors of some safetensors files, by name. Raises UserError for a file that is none."""

    def __init__(self, files: Iterable[Path]):
        self._places: dict[str, _Place] = {}
        digest = hashlib.sha256()
        for file in files:
            check_tensors(file)
            with file.open("rb") as opened:
                (length,) = struct.unpack("<Q", opened.read(8))
                header, start = json.loads(opened.read(length)), 8 + length
            digest.update(f"{file.name} {file.stat().st_size} ".encode() + json.dumps(header, sort_keys=True).encode())
            for name, entry in header.items():
                if name != "__metadata__":
                    dtype = DTYPES.get(entry["dtype"])
                    if dtype is None:
                        raise UserError(f"{file}: {name} is of type {entry['dtype']}, which is not read here")
                    shape, (low, _) = tuple(entry["shape"]), entry["data_offsets"]
                    self._places[name] = _Place(file, dtype, shape, start + low)
        self.identity = digest.hexdigest()  # of names, shapes, types and sizes

    def renamed(self, names: Mapping[str, str]) -> TensorFiles:
        """Returns some of the tensors under other names; names: new to old."""
        other = copy.copy(self)
        other._places = {new: self._places[old] for new, old in names.items()}
        return other

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def names(self) -> list[str]:
        return list(self._places)

    def paths(self) -> list[Path]:
        return sorted({place.file for place in self._places.values()})

    def meta(self, name: str) -> Tensor:
        """Returns shape and type, without values (device `meta`)."""
        place = self._places[name]
        return torch.empty(place.shape, dtype=place.dtype, device="meta")

    def read(self, name: str) -> Tensor:
        """Returns a tensor in memory of its own. Raises UserError if the file ends before it does."""
        place = self._places[name]
        tensor = torch.empty(place.shape, dtype=place.dtype)
        flat = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
        with place.file.open("rb", buffering=0) as file:
            file.seek(place.offset)
            view, done = flat.numpy().data, 0
            while done < flat.numel():
                count = file.readinto(view[done : done + (1 << 26)])
                if not count:
                    raise UserError(f"{place.file}: ends within {name}: restore the file")
                done += count
        return tensor


@dataclass(frozen=True)
class Stored:
    """A tensor of an export, by the name that a Hugging Face folder has for it.

    read: its values, decoded; dtype: the type of values, or of scales; code: int8, fp8 or q8_0 if they are rounded by
    blocks of `block` values (None: whole rows); slip: a further error of a value.
    """

    read: Callable[[], Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype
    code: str | None = None
    block: int | None = None
    slip: float = 0.0


# --- writing


def write_shards(
    folder: Path,
    shapes: Mapping[str, Tensor],
    make: Callable[[str], Tensor],
    shard_bytes: int = SHARD_BYTES,
    written: Callable[[int, int], object] = lambda done, total: None,
) -> None:
    """Write model*.safetensors and their index; files that are there already, complete, are kept.

    shapes: of all tensors, in order (device `meta`); make: the values of one. Raises OSError.
    """
    shards, held = [[]], 0  # of at most `shard_bytes`, or of one larger tensor
    for name, tensor in shapes.items():
        if shards[-1] and held + nbytes(tensor) > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += nbytes(tensor)
    for number, names in enumerate(shards, 1):
        path = folder / shard_name(number, len(shards))
        if not path.exists():  # under its own name it is complete
            partial = path.with_name(path.name + ".partial")
            write_safetensors(partial, {name: shapes[name] for name in names}, make, {"format": "pt"})
            partial.rename(path)
            fsync(folder)
        written(number, len(shards))
    write_index(folder, shards, sum(map(nbytes, shapes.values())))
