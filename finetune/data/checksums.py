"""Checksums of the cache: disks and copies change bits, and wrong tokens train without an error.

CRC-32 (zlib's, about 3 GB/s on one core) sees every change within 32 bits in a row, and of others all but one in 2^32.
JSON files have one of their own content. Arrays have one in the JSON file next to them, and arrays too large to be
read at every start one of each example, verified whenever that is read. Copies of files from elsewhere have a file next
to them (`.crc32`).
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
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
    write_atomically(_checksum_file(path), f"{_of_file(of):08x}", shared=True)


def verify_file(path: Path) -> None:
    """Raises OSError, and Damaged if a file has changed since `write_checksum` read it."""
    try:
        expected = _checksum_file(path).read_bytes()
    except FileNotFoundError:  # of an older version
        return
    if expected != f"{_of_file(path):08x}".encode():
        raise Damaged(f"{path.name}: its checksum differs")


def _checksum_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.crc32")


def _of_file(path: Path) -> int:
    result = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            result = zlib.crc32(block, result)
    return result


def sealed(content: dict[str, Any]) -> str:
    """Returns JSON text with a checksum; no character of it can be missing."""
    return json.dumps({**content, "checksum": _of_json(content)}, indent=1, ensure_ascii=False)


def unsealed(path: Path) -> dict[str, Any]:
    """Returns the content `sealed` into a file. Raises OSError, and Damaged if it has changed."""
    try:
        content = json.loads(path.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError):
        raise Damaged(f"{path.name}: is no JSON") from None
    expected = content.pop("checksum", None) if isinstance(content, dict) else None
    if expected != _of_json(content):
        raise Damaged(f"{path.name}: its checksum differs")
    return content


def _of_json(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, allow_nan=True).encode())
