"""Digests of the examples of a source: independent of the location of its files, and changed if a token, a mask, a
number or an image changes. A checkpoint keeps the digest, and a resume compares it.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

import numpy as np

from finetune.data.samples import files_of
from finetune.data.token_cache import CacheEntry
from finetune.errors import UserError

DIGITS = 16  # of a digest, in hex: 64 bits
_READ_WHOLE = 1 << 16  # bytes; of a larger image its middle is read
_BLOCK = 1 << 12
_IMAGES_READ = 10_000  # of a source; of all others the size


def source_content(entry: CacheEntry) -> dict[str, Any]:
    """Returns the number of examples, and digests of their tokens, masks, columns and images.

    Tokens by the hash in the cache for each example; it includes the paths of images, so with these the ids are read.
    Raises UserError if an image is gone.
    """
    has_media = len(entry.image_numbers) > 0
    tokens = (entry.input_ids, entry.sequence_offsets, entry.example_offsets) if has_media else (entry.hashes,)
    count = len(entry.columns)
    return {
        "examples": len(entry),
        "tokens": digest(*tokens),
        "loss masks": digest(entry.loss_mask),
        **{name: digest(entry.numbers[i::count]) for i, name in enumerate(entry.columns)},
        **({"images": _images_content(entry)} if has_media else {}),
    }


def digest(*parts: np.ndarray | bytes | str) -> str:
    """Returns the first 64 bits of the sha256 of all parts, one after the other."""
    whole = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            whole.update(np.ascontiguousarray(part).data)
        else:
            whole.update(part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part)
    return whole.hexdigest()[:DIGITS]


def _images_content(entry: CacheEntry) -> str:
    """Digest of places and sizes in tokens and pixels, and of the images: in full if rows contain them; of files the
    sizes, and the beginning or the middle of at most `_IMAGES_READ`."""
    places = entry.image_numbers.reshape(-1, 6)[:, :5]
    sources = [
        one for source in entry.image_list() for one in ([source] if isinstance(source, bytes) else files_of(source))
    ]
    every = -(-len(sources) // _IMAGES_READ)
    whole = hashlib.sha256(np.ascontiguousarray(places).data)
    for i, source in enumerate(sources):
        if isinstance(source, bytes):
            whole.update(hashlib.sha256(source).digest())
            continue
        try:
            size, content = os.stat(source).st_size, b""
            if i % every == 0:
                with open(source, "rb", buffering=0) as file:
                    file.seek(0 if size <= _READ_WHOLE else (size - _BLOCK) // 2)
                    content = file.read(_READ_WHOLE if size <= _READ_WHOLE else _BLOCK)
        except OSError as error:
            raise UserError(
                f"{source}: an image of the data cannot be read: {error.strerror}. Fix: restore it, or check its "
                "permissions"
            ) from None
        whole.update(size.to_bytes(8, "little") + hashlib.sha256(content).digest())
    return whole.hexdigest()[:DIGITS]
