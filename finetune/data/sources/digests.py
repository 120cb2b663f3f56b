"""sha256 of local files, remembered: a run that starts again does not read 100 GB to find that nothing changed.

What is remembered is trusted only while device, inode, size and both times of a file are what they were, and only if
the file had been left alone for two seconds before it was read. Otherwise a change within the clock tick of the last
one could go unseen ("racily clean", git's Documentation/technical/racy-git.txt).
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import filelock

from finetune.data.cache.root import cache_root
from finetune.errors import UserError
from finetune.utils import sha256_file, write_atomically

SETTLED_S = 2.0  # the coarsest tick of file times in use, that of FAT


def file_digest(path: Path) -> str:
    """sha256 of a file's bytes, in hex. Raises UserError where it cannot be read, or changes meanwhile."""
    try:
        key = _key(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    place = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()
    memo = cache_root() / "digests" / f"{place}.json"
    try:
        if found := _remembered(memo, key):
            return found
        memo.parent.mkdir(parents=True, exist_ok=True)
        # One process of a launch reads the file, the others wait. The lock stays: see `_entry` in examples.py.
        with filelock.FileLock(memo.with_suffix(".lock")):
            return _remembered(memo, key) or _hashed(path, memo, key)
    except OSError as error:
        raise UserError(
            f"{error.filename or memo}: the data cache cannot be written: {error.strerror or error}; "
            "set FINETUNE_CACHE to a folder with room"
        ) from None


def _key(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _remembered(memo: Path, key: list[int]) -> str | None:
    try:
        found = json.loads(memo.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # never written, or not whole
        return None
    return found["sha256"] if isinstance(found, dict) and found.get("key") == key else None


def _hashed(path: Path, memo: Path, key: list[int]) -> str:
    begun = time.time()
    digest = _sha256(path, key)
    if begun - max(key[3:]) / 1e9 >= SETTLED_S:
        write_atomically(memo, json.dumps({"key": key, "sha256": digest}))
    return digest


def _sha256(path: Path, key: list[int]) -> str:
    try:
        digest = sha256_file(path)
        changed = _key(path) != key
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if changed:
        raise UserError(f"{path}: the file changes while it is read; start again when it is complete")
    return digest
