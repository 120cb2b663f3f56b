"""A safetensors file written tensor by tensor: one copy of one tensor in memory, and the checksum on the way.

The library's `save_file` takes the bytes of all tensors at once, twice what is written. The format is eight bytes
with the length of a JSON header, the header, then the tensors' bytes without gaps
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
}


@dataclass(frozen=True)
class FileEntry:
    """What a manifest says of a file."""

    name: str
    bytes: int
    sha256: str


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> FileEntry:
    """Write flat tensors, on any device, and flush them to the disk. Raises OSError."""
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))  # keeps each aligned to its type
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for block in _blocks(ordered, metadata):
            file.write(block)
            digest.update(block)
            size += len(block)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(path.name, size, digest.hexdigest())


def _blocks(tensors: dict[str, Tensor], metadata: dict[str, str]) -> Iterator[bytes | memoryview]:
    header = _header(tensors, metadata)
    yield struct.pack("<Q", len(header))
    yield header
    for tensor in tensors.values():
        yield tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data


def _header(tensors: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)
