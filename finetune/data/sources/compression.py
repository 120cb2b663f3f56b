"""Decompression that ends where the data does: what is cut short, or followed by something else, is an error.

Python's own bz2 and lzma files pass over what follows the compressed data without a word, and with it over rows.
"""

from __future__ import annotations

import io
import lzma
from collections.abc import Callable
from functools import partial
from typing import Any

import pyarrow


class _Xz(io.RawIOBase):
    """The bytes of one or more xz streams with nothing but padding (zeros) between and after them."""

    def __init__(self, stored: io.BufferedReader):
        self._stored, self._decoder = stored, lzma.LZMADecompressor()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Raises EOFError or lzma.LZMAError where the data is cut short, damaged or followed by something else."""
        while True:
            stored = b""
            if self._decoder.eof:
                stored = self._next_stream()
                if not stored:
                    return 0
                self._decoder = lzma.LZMADecompressor()
            elif self._decoder.needs_input:
                stored = self._stored.read1()
                if not stored:
                    raise EOFError("the compressed data ends before its end mark")
            found = self._decoder.decompress(stored, len(buffer))
            if found:
                buffer[: len(found)] = found
                return len(found)

    def _next_stream(self) -> bytes:
        found = self._decoder.unused_data.lstrip(b"\0")
        while not found and (block := self._stored.read1()):
            found = block.lstrip(b"\0")
        return found


def _arrow(codec: str, stored: io.BufferedReader) -> Any:
    return pyarrow.CompressedInputStream(stored, codec)


# By the end of a name: (its first bytes, what makes a stream of bytes of one that is compressed).
COMPRESSIONS: dict[str, tuple[bytes, Callable[[io.BufferedReader], Any]]] = {
    ".gz": (b"\x1f\x8b", partial(_arrow, "gzip")),
    ".bz2": (b"BZh", partial(_arrow, "bz2")),
    ".xz": (b"\xfd7zXZ\0", _Xz),
    ".zst": (b"\x28\xb5\x2f\xfd", partial(_arrow, "zstd")),
}
