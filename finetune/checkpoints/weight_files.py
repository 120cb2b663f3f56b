"""Weights in safetensors files: converted to Hugging Face's layout, written, verified, and read tensor by tensor.

transformers may hold weights under other names and in other shapes than checkpoints do, for example Mixtral's experts
as one tensor per layer:

    model.layers.0.mlp.experts.gate_up_proj (8, 28672, 4096)
    model.layers.0.block_sparse_moe.experts.0.w1.weight (14336, 4096), ...experts.0.w3.weight, ...experts.1.w1.weight

Its own function reverts them, as in `save_pretrained`; here it gets as few tensors at a time as it can work with.

The safetensors library maps a whole file, and the parts that were read stay resident: `TensorFiles` reads each tensor
into memory of its own (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import logging
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from finetune.checkpoints.safetensors_writer import DTYPES, nbytes, save_tensors, write_safetensors
from finetune.errors import RunFailure, UserError
from finetune.models.damage import check_tensors
from finetune.models.mtp import named_as_in_files
from finetune.utils import fsync

log = logging.getLogger(__name__)

State = dict[str, Tensor]

_LAYER = re.compile(r".*?\.\d+(?=\.)")  # model.layers.0 of model.layers.0.mlp.experts.0.weight


def with_own_class(model: Any) -> Any:
    """Returns the model under its original class, sharing all attributes.

    FSDP2 inserts a class of torch; transformers finds architecture, conversions and custom code by class.
    """
    own: Any = next(cls for cls in type(model).__mro__ if not cls.__module__.startswith("torch."))
    if own is type(model):
        return model
    same = own.__new__(own)
    same.__dict__.update(model.__dict__)
    return same


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts weights; counters and masks keep their type."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


class DiskLayout:
    """Converts tensors from their layout in memory to that of the folder.

    Holds at most one group: a single tensor for most architectures, a decoder layer if transformers needs several
    tensors to make one.
    """

    def __init__(self, model: Any, in_memory: State):
        """in_memory: every tensor that will be converted, in order; values are not needed (device `meta`)."""
        self._model = model
        self.expected = _reverted(model, in_memory)  # what the folder must hold
        self._last_of_group = {group[-1] for group in _groups(model, in_memory, self.expected)}
        self._group: State = {}

    def convert(self, name: str, tensor: Tensor) -> State:
        """Returns the folder's tensors that this one completes; none until its group is complete."""
        self._group[name] = tensor
        if name not in self._last_of_group:
            return {}
        group, self._group = self._group, {}
        return _reverted(self._model, group)


def _reverted(model: Any, state: State) -> State:
    ignored = set(model._keys_to_ignore_on_save or ())  # by which transformers' models declare it
    named = revert_weight_conversion(model, {name: t for name, t in state.items() if name not in ignored})
    return named_as_in_files(model, named)


def _groups(model: Any, state: State, expected: State) -> list[list[str]]:
    """Returns the smallest groups of neighbors whose conversion one by one equals the conversion of all at once: single
    tensors, or the tensors of a decoder layer, which modules list together."""
    for key in (str, lambda name: match.group() if (match := _LAYER.match(name)) else name):
        groups = [list(names) for _, names in itertools.groupby(state, key)]
        parts = [_reverted(model, {name: state[name] for name in group}) for group in groups]
        shapes = {name: tensor.shape for part in parts for name, tensor in part.items()}
        each_once = sum(map(len, parts)) == len(expected)
        if each_once and shapes == {name: tensor.shape for name, tensor in expected.items()}:
            return groups
    log.warning("%s: saving needs the full model in the memory of rank 0", type(model).__name__)
    return [list(state)]


# --- writing


SHARD_BYTES = 4 * 10**9
INDEX = "model.safetensors.index.json"


def shard_name(number: int, count: int) -> str:
    """Returns model.safetensors, or model-00001-of-00003.safetensors; number: from 1."""
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def write_index(folder: Path, shards: list[list[str]], total_bytes: int) -> None:
    """Write which file has which tensor; nothing for a single file. shards: the names in each file."""
    if len(shards) > 1:
        places = {name: shard_name(i, len(shards)) for i, names in enumerate(shards, 1) for name in names}
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(places.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


class WeightsWriter:
    """Writes tensors to shards of at most `shard_bytes` (a larger tensor gets its own), holding one shard in memory.

    The number of files is known at the end; until then they have names that no reader looks for.
    """

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES):
        self._folder, self._shard_bytes = folder, shard_bytes
        self._shard: dict[str, Tensor] = {}
        self._names: list[list[str]] = []  # of the files written so far
        self.held_bytes = 0
        self.total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor, on the CPU and in its final type. Raises OSError if a file cannot be written."""
        if self._shard and self.held_bytes + tensor.nbytes > self._shard_bytes:
            self._write()
        tensor = tensor.contiguous()
        if tensor.untyped_storage().nbytes() > tensor.nbytes:
            tensor = tensor.clone()  # a view would keep the larger tensor in memory
        self._shard[name] = tensor
        self.held_bytes += tensor.nbytes
        self.total_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write the last shard, rename the files, and write the index if there are several. Raises as `add`."""
        if self._shard:
            self._write()
        count = len(self._names)
        for number in range(1, count + 1):
            self._partial_path(number).rename(self._folder / shard_name(number, count))
        write_index(self._folder, self._names, self.total_bytes)

    def _write(self) -> None:
        self._names.append(list(self._shard))
        save_tensors(self._partial_path(len(self._names)), self._shard)
        self._shard, self.held_bytes = {}, 0

    def _partial_path(self, number: int) -> Path:
        return self._folder / f"shard-{number:05d}.partial"


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


# --- verification, by reading back: every tensor is present, finite and of the right shape and type


class Verification:
    """Verifies one folder: `read` every file of `weight_files`, then `finish`. Holds one tensor in memory.

    expected: shape and dtype of every tensor in the files, by name; copied: the files that others are from, bit for
    bit. A failure is a RunFailure that names file, tensor and reason.
    """

    def __init__(self, folder: Path, expected: dict[str, Tensor], copied: Mapping[str, Path] | None = None):
        self._folder, self._expected, self._copied = folder, expected, copied or {}
        self._places: dict[str, str] = {}  # tensor -> file
        self._bytes = 0

    def read(self, file: Path) -> None:
        """Check every tensor of a file. Raises RunFailure."""
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (safe_open is no dict)
                    tensor = tensors.get_tensor(name)
                    if name in self._places:
                        raise self._failure(file.name, f"{name}: is in {self._places[name]} as well")
                    if (problem := self._difference(name, tensor)) is not None:
                        raise self._failure(file.name, f"{name}: {problem}")
                    self._places[name] = file.name
                    self._bytes += tensor.nbytes
        except (OSError, SafetensorError) as error:
            raise self._failure(file.name, f"cannot be read back: {error}") from error

    def _difference(self, name: str, tensor: Tensor) -> str | None:
        if (expected := self._expected.get(name)) is None:
            if (source := self._copied.get(name)) is None:
                return "the model has no such tensor"
            with safe_open(source, framework="pt") as tensors:
                original = tensors.get_tensor(name)
            same = tensor.dtype == original.dtype and tensor.shape == original.shape
            same = same and torch.equal(tensor.flatten().view(torch.uint8), original.flatten().view(torch.uint8))
            return None if same else f"is not the one of {source}"
        if tensor.shape != expected.shape:
            return f"has shape {list(tensor.shape)} instead of {list(expected.shape)}"
        type_name, expected_type = (str(one.dtype).removeprefix("torch.") for one in (tensor, expected))
        if type_name != expected_type:
            return f"is {type_name} instead of {expected_type}"
        # An infinite bound is one that clips nothing (Gemma 4's towers).
        is_bound = not tensor.dim() and name.endswith(("_min", "_max"))
        whole = ~tensor.isnan() if is_bound else torch.isfinite(tensor)
        if tensor.is_floating_point() and (broken := int((~whole).sum())):
            return f"{broken} of {tensor.numel()} values are not finite in {type_name}"
        return None

    def finish(self) -> None:
        """Check that nothing is missing and that the index is right. Raises RunFailure."""
        files = [file.name for file in weight_files(self._folder)]
        index = self._json(INDEX) if len(files) > 1 else {}
        places = index.get("weight_map", {})
        for name in (*self._expected, *self._copied):
            if name not in self._places:
                raise self._failure(places.get(name, "*.safetensors"), f"{name}: is missing")
        if len(files) > 1:
            if files != [shard_name(number, len(files)) for number in range(1, len(files) + 1)]:
                raise self._failure(INDEX, f"the files are not numbered through: {', '.join(files)}")
            for name in sorted({*places, *self._places}):
                if (stated := places.get(name)) != (file := self._places.get(name)):
                    raise self._failure(INDEX, f"{name}: the index says {stated}, not {file}")
            if (size := index.get("metadata", {}).get("total_size")) != self._bytes:
                raise self._failure(INDEX, f"total_size is {size}, the tensors have {self._bytes} bytes")
        for file in sorted(self._folder.glob("*.json")):
            self._json(file.name)

    def _json(self, file: str) -> dict[str, Any]:
        try:
            return json.loads((self._folder / file).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise self._failure(file, f"cannot be read back: {error}") from error

    def _failure(self, file: str, reason: str) -> RunFailure:
        return RunFailure(
            f"the saved result is invalid: {self._folder / file}: {reason}. It is kept for inspection, and an earlier "
            "result is untouched. Fix: run the same command again, which resumes from the last checkpoint"
        )


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


# --- reading


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
                        raise UserError(
                            f"{file}: {name} is of type {entry['dtype']}, which is not read here. Fix: convert it to "
                            "one that is, such as BF16"
                        )
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

    def file_of(self, name: str) -> Path:
        return self._places[name].file

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
                    raise UserError(f"{place.file}: ends within {name}. Fix: restore the file")
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
