"""Files with checksums: disks and copies change bits, and wrong tokens train without an error.

CRC-32 (zlib's, about 3 GB/s on one core) sees every change within 32 bits in a row, and of others all but one in 2^32.
JSON files have one of their own content. Arrays have one in the JSON file next to them, and arrays too large to be
read at every start one of each example, verified whenever that is read. Copies of files from elsewhere have a file next
to them (`.crc32`).
"""

from __future__ import annotations

import io
import json
import math
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from finetune.utils import write_atomically

VERIFIED_AT_ONCE = 1 << 30  # bytes of an entry's large arrays, a third of a second; more are verified as they are read


class Damaged(Exception):
    """A part of a cache entry differs from what was written: its name, and the difference."""


def checksum(*contents: bytes | NDArray[Any], before: int = 0) -> int:
    """Returns the CRC-32 of contents one after the other, behind those with the checksum `before`."""
    for content in contents:
        before = zlib.crc32(np.ascontiguousarray(content).data if isinstance(content, np.ndarray) else content, before)
    return before


def verify(path: Path, content: bytes | NDArray[Any], expected: int) -> None:
    """Raises Damaged."""
    if checksum(content) != expected:
        raise Damaged(f"{path.name}: its checksum differs")


def write_checksum(path: Path, of: Path) -> None:
    """Writes the checksum of the file `of`, which is going to be `path`, next to it."""
    write_atomically(path.with_name(f"{path.name}.crc32"), f"{_checksum_of_file(of):08x}", shared=True)


def verify_file(path: Path) -> None:
    """Raises OSError, and Damaged if a file has changed since `write_checksum` read it."""
    try:
        expected = path.with_name(f"{path.name}.crc32").read_bytes()
    except FileNotFoundError:  # of an older version
        return
    if expected != f"{_checksum_of_file(path):08x}".encode():
        raise Damaged(f"{path.name}: its checksum differs")


def _checksum_of_file(path: Path) -> int:
    result = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            result = zlib.crc32(block, result)
    return result


# --- JSON


def sealed(content: dict[str, Any]) -> str:
    """Returns JSON text with a checksum; no character of it can be missing."""
    return json.dumps({**content, "checksum": _checksum_of_json(content)}, indent=1, ensure_ascii=False)


def unsealed(path: Path) -> dict[str, Any]:
    """Returns the content `sealed` into a file. Raises OSError, and Damaged if it has changed."""
    try:
        content = json.loads(path.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError):
        raise Damaged(f"{path.name}: is not JSON") from None
    expected = content.pop("checksum", None) if isinstance(content, dict) else None
    if expected != _checksum_of_json(content):
        raise Damaged(f"{path.name}: its checksum differs")
    return content


def _checksum_of_json(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, allow_nan=True).encode())


# --- arrays


class ArrayFile:
    """A file of an array that grows, with its checksum, without a copy in memory. Raises OSError.

    is_npy: a .npy file of one dimension, whose header is written again when its length is known; else items alone.
    """

    def __init__(self, path: Path, dtype: np.dtype, is_npy: bool = True):
        self._file, self._dtype, self._is_npy = path.open("wb"), dtype, is_npy
        self.count = self.checksum = 0  # of items
        if is_npy:
            self._file.write(npy_header(dtype, 0))

    def append(self, array: NDArray[Any]) -> None:
        items = np.ascontiguousarray(array, self._dtype)
        self._file.write(items.data)
        self.count += len(items)
        self.checksum = checksum(items, before=self.checksum)

    def finish(self) -> None:
        """Flushes the complete file to the disk, and closes it."""
        if self._is_npy:
            self._file.seek(0)
            self._file.write(npy_header(self._dtype, self.count))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()

    def close(self) -> None:
        self._file.close()


def npy_header(dtype: np.dtype, count: int) -> bytes:
    """Header of a .npy file of one dimension; as long for any count, since numpy leaves room for it to grow."""
    written = io.BytesIO()
    npy.write_array_header_1_0(written, {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)})
    return written.getvalue()


def map_array(path: Path, dtype: np.dtype, shape: tuple[int, ...], header: bytes = b"") -> NDArray[Any]:
    """Returns the array of a file, mapped into memory. Raises OSError, and Damaged if its header or size differs."""
    with path.open("rb") as file:
        written = file.read(len(header))
    if written != header or path.stat().st_size != len(header) + math.prod(shape) * dtype.itemsize:
        raise Damaged(f"{path.name}: its header or its size differs")
    return np.memmap(path, dtype, "r", len(header), shape)


def load_array(path: Path, expected: int) -> NDArray[Any]:
    """Returns the array of a small .npy file. Raises OSError, and Damaged if its checksum is not `expected`."""
    content = path.read_bytes()
    verify(path, content, expected)
    return np.load(io.BytesIO(content), allow_pickle=False)
