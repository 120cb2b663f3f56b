"""The one writer of safetensors files, of checkpoints, results and exports: one tensor in memory at a time.

The format is eight bytes with the length of a JSON header, the header, then the tensors' bytes without gaps
(https://github.com/huggingface/safetensors#format). The library's `save_file` wants all tensors at once.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {  # in the order by which the library sorts tensors, the last one first
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def nbytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor on any device, `meta` too."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def write_safetensors(
    path: Path,
    shapes: Mapping[str, Tensor],
    make: Callable[[str], Tensor],
    metadata: Mapping[str, str],
    each_block: Callable[[bytes | memoryview], object] = lambda block: None,
) -> int:
    """Writes a file in the order of `shapes`, flushes it to the disk, and returns its bytes. Raises OSError.

    shapes: of all tensors (device `meta` will do); make: the values of one, on any device; each_block: called with each
    block of bytes written, for a checksum.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in shapes.items():
        start, end = end, end + nbytes(tensor)
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        for block in (struct.pack("<Q", len(text)), text):
            file.write(block)
            each_block(block)
        for name, expected in shapes.items():
            tensor = make(name)
            assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype), name
            if tensor.numel():
                values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
                file.write(values)
                each_block(values)
                del values
            del tensor  # before the next one is made
        file.flush()
        os.fsync(file.fileno())
    return 8 + len(text) + end


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes the bytes that safetensors' own `save_file` writes for PyTorch. Under another name first: tensors may be
    mapped from the file that they replace."""
    order, partial = list(DTYPES), path.with_name(f"{path.name}.partial")
    names = sorted(tensors, key=lambda name: (-order.index(_NAMES[tensors[name].dtype]), name))
    write_safetensors(partial, {name: tensors[name] for name in names}, tensors.__getitem__, {"format": "pt"})
    partial.replace(path)
