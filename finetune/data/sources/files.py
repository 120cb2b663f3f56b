"""A file as the readers see it: its bytes, decompressed, checked to match its name, and their digest."""

from __future__ import annotations

import hashlib
import io
import lzma
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any

import filelock
import pyarrow

from finetune.data.checksums import Damaged, sealed, unsealed
from finetune.data.samples import BadRow
from finetune.errors import UserError
from finetune.recipe.urls import scrubbed
from finetune.utils import sha256_file, write_atomically


class _Xz(io.RawIOBase):
    """The bytes of one or more xz streams, with only padding (zeros) between and after them.

    Not `lzma.LZMAFile`, which takes padding between streams, and any other bytes there, for the end of the file: the
    rows that follow would be lost without an error.
    """

    def __init__(self, stored: io.BufferedReader):
        self._stored, self._decoder = stored, lzma.LZMADecompressor()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Raises EOFError or lzma.LZMAError if the data is cut short, damaged or followed by something else."""
        while True:
            stored = b""
            if self._decoder.eof:
                stored = self._decoder.unused_data.lstrip(b"\0")
                while not stored and (block := self._stored.read1()):
                    stored = block.lstrip(b"\0")
                if not stored:
                    return 0
                self._decoder = lzma.LZMADecompressor()
            elif self._decoder.needs_input and not (stored := self._stored.read1()):
                raise EOFError("the compressed data ends before its end mark")
            if data := self._decoder.decompress(stored, len(buffer)):
                buffer[: len(data)] = data
                return len(data)


# By suffix: (first bytes of such a file, its decompressor). Truncated data, or data followed by something else, is an
# error: Python's own bz2 ignores bytes after the compressed data, and the rows in them.
COMPRESSIONS: dict[str, tuple[bytes, Callable[[io.BufferedReader], Any]]] = {
    ".gz": (b"\x1f\x8b", partial(pyarrow.CompressedInputStream, compression="gzip")),
    ".bz2": (b"BZh", partial(pyarrow.CompressedInputStream, compression="bz2")),
    ".xz": (b"\xfd7zXZ\0", _Xz),
    ".zst": (b"\x28\xb5\x2f\xfd", partial(pyarrow.CompressedInputStream, compression="zstd")),
}


NumberedRows = Iterator[tuple[int, "dict[str, Any] | BadRow"]]  # (number, row) of one file
LabelledRows = Iterator[tuple[str, int, "dict[str, Any] | BadRow"]]  # with the file or dataset before it

HEAD_BYTES = 64  # enough to identify a file's kind
BUFFER_BYTES = 1 << 16  # read at a time
# Raised by the decompressors and pyarrow for bytes that are damaged or of another kind.
DAMAGED = (EOFError, lzma.LZMAError, pyarrow.ArrowException)
BINARY_KINDS = (".parquet", ".arrow", ".xlsx")  # the others are text


@dataclass(frozen=True)
class File:
    """One file of a source."""

    label: str  # its name in messages and rows; without credentials
    name: str  # its suffixes tell the kind
    open: Callable[[], IO[bytes]]  # the stored bytes, from the start
    digest: Callable[[], str]  # changes when the bytes do
    size: Callable[[], int | None] = lambda: None  # of the stored bytes, if known without reading them


# (kind, its first bytes, the problem with a file of another kind that begins so).
_SIGNATURES: tuple[tuple[str, re.Pattern[bytes], str], ...] = (
    ("", re.compile(rb"\xff\xfe|\xfe\xff"), "it is UTF-16, not UTF-8. Fix: save the file as UTF-8"),
    (".parquet", re.compile(rb"PAR1[\x00-\x08\x0e-\x1f]"), "it is a parquet file. Fix: name it .parquet"),
    (".arrow", re.compile(rb"ARROW1\0"), "it is an arrow file. Fix: name it .arrow"),
    ("", re.compile(rb"\x1f\x8b"), "it is compressed with gzip. Fix: add .gz to its name"),
    ("", re.compile(rb"BZh[1-9]1AY&SY"), "it is compressed with bzip2. Fix: add .bz2 to its name"),
    ("", re.compile(rb"\xfd7zXZ\0"), "it is compressed with xz. Fix: add .xz to its name"),
    ("", re.compile(rb"\x28\xb5\x2f\xfd"), "it is compressed with zstd. Fix: add .zst to its name"),
    (".xlsx", re.compile(rb"PK\x03\x04"), "it is a zip archive (or a spreadsheet). Fix: unpack it, or name it .xlsx"),
    ("", re.compile(rb"version https://git-lfs"), "it is a pointer of Git LFS, not the data. Fix: run `git lfs pull`"),
)
_WEB_PAGE = re.compile(rb"\s*<(!doctype html|html)", re.IGNORECASE)


def kind_of(name: str) -> tuple[str, str]:
    """Returns (kind, compression) of a name: `a.jsonl.gz` -> (".jsonl", ".gz"), `a.csv` -> (".csv", "")."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(name).suffixes]
    compression = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSIONS else ""
    return (suffixes[-1] if suffixes else ""), compression


@contextmanager
def content(file: File) -> Iterator[io.BufferedReader]:
    """Yields a file's bytes, decompressed, from the start, in the memory of a buffer.

    Raises UserError if they are of another kind than the name says.
    """
    kind, compression = kind_of(file.name)
    raw: Any = file.open()
    with io.BufferedReader(raw, BUFFER_BYTES) as stored:
        head = stored.peek(HEAD_BYTES)[:HEAD_BYTES]
        if not compression or not head:
            _check_head(file.label, kind, head)
            yield stored
            return
        first, decompress = COMPRESSIONS[compression]
        if not head.startswith(first):
            other = _other_kind(head, kind)
            problem = (
                f"{other}; its name ends in {compression}" if other else f"not a {compression} file. Fix: rename it"
            )
            raise UserError(f"{file.label}: {problem}")
        with io.BufferedReader(decompress(stored), BUFFER_BYTES) as stream:
            _check_head(file.label, kind, stream.peek(HEAD_BYTES)[:HEAD_BYTES])
            yield stream


@contextmanager
def seekable_content(file: File) -> Iterator[IO[bytes]]:
    """Yields the same for kinds that are read from their end; a stream that cannot seek is first copied to a file."""
    with content(file) as stream:
        if not kind_of(file.name)[1] and stream.seekable():
            yield stream
            return
        with tempfile.TemporaryFile() as unpacked:
            shutil.copyfileobj(stream, unpacked, 1 << 20)
            unpacked.seek(0)
            yield unpacked


def _check_head(label: str, kind: str, head: bytes) -> None:
    problem = _other_kind(head, kind)
    if not problem and kind not in (".txt", *BINARY_KINDS) and _WEB_PAGE.match(head):
        problem = "it is a web page, not data. Fix: download the file itself"
    if problem:
        raise UserError(f"{label}: {problem}")


def _other_kind(head: bytes, kind: str) -> str | None:
    """Returns the problem with a file of `kind` that begins so; None if the first bytes show none."""
    return next((problem for own, first, problem in _SIGNATURES if own != kind and first.match(head)), None)


def check_unique(place: str, names: list[str]) -> None:
    """Raises UserError for a name that two columns have."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"{place} `{twice[0][:100]}` twice. Fix: rename one of the columns")


def package_errors() -> tuple[type[BaseException], ...]:
    """Returns the exceptions other than OSError of the file systems of fsspec, of the packages that were imported."""
    names = {
        "aiohttp": ("ClientError",),
        "asyncio": ("TimeoutError",),  # no OSError before Python 3.11
        "botocore.exceptions": ("BotoCoreError", "ClientError"),
        "gcsfs.retry": ("HttpError",),
        "google.auth.exceptions": ("GoogleAuthError",),
        "huggingface_hub.errors": ("HfHubHTTPError", "HFValidationError"),
    }
    loaded = ((sys.modules.get(module), name) for module, classes in names.items() for name in classes)
    return tuple(getattr(module, name) for module, name in loaded if module)


def file_rows(file: File, read: Callable[[File], NumberedRows]) -> LabelledRows:
    """Yields the rows of one file. Raises UserError with its name for an empty, damaged or unreadable one."""
    number = 0
    try:
        for number, row in read(file):
            yield file.label, number, row
    except (OSError, *DAMAGED, *package_errors()) as error:
        beyond = f" beyond row {number}" if number else ""
        reason = " ".join(scrubbed(str(error) or type(error).__name__).split())[:200]
        if isinstance(error, OSError) and error.errno:
            problem = f"cannot be read{beyond}: {error.strerror}. Fix: check the path and its permissions"
        elif isinstance(error, package_errors()):
            problem = f"cannot be read{beyond}: {reason}. Fix: start again when its server answers"
        else:
            kind, compression = kind_of(file.name)
            problem = (
                f"not a readable {(compression or kind).lstrip('.')} file{beyond}: it is damaged or incomplete "
                f"({reason}). Fix: write, copy or download it again"
            )
        raise UserError(f"{file.label}: {problem}") from None
    if not number:
        raise UserError(f"{file.label}: the file has no rows. Fix: put data into it or take it out of the recipe")


# --- digests and the cache's folder


def cache_root() -> Path:
    """Folder of everything that is computed from data and kept between runs: $FINETUNE_CACHE, or ~/.cache/finetune."""
    return Path(os.environ.get("FINETUNE_CACHE") or "~/.cache/finetune").expanduser()


def cache_fix(error: OSError) -> str:
    """Returns the folder that helps where the cache cannot be written: one of another user's has room as well."""
    return "a folder of your own" if isinstance(error, PermissionError) else "a folder with room"


# sha256 of local files is remembered: a run that starts again does not read 100 GB to see that nothing changed. It is
# trusted only while device, inode, size and both times of a file are what they were, and only if the file had been left
# alone for two seconds before it was read. Otherwise a change within the clock tick of the last one could go unseen
# ("racily clean", git's Documentation/technical/racy-git.txt).
SETTLED_S = 2.0  # the coarsest tick of file times in use, that of FAT


def file_digest(path: Path) -> str:
    """Returns the sha256 of a file's bytes, in hex. Raises UserError if it cannot be read, or changes meanwhile."""
    try:
        key = _key(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}. Fix: check the path and its permissions") from None
    memo = cache_root() / "digests" / f"{hashlib.sha256(os.fsencode(path.absolute())).hexdigest()}.json"
    try:
        if digest := _remembered(memo, key):
            return digest
        memo.parent.mkdir(parents=True, exist_ok=True)
        # One process of a launch reads the file, the others wait. Its lock file stays: see `lock_of`, cache_entries.py.
        with filelock.FileLock(memo.with_suffix(".lock")):
            return _remembered(memo, key) or _computed(path, key, memo)
    except OSError as error:
        raise UserError(
            f"{error.filename or memo}: the data cache cannot be written: {error.strerror or error}. Fix: set "
            f"FINETUNE_CACHE to {cache_fix(error)}"
        ) from None


def _key(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _remembered(memo: Path, key: list[int]) -> str | None:
    try:
        memory = unsealed(memo)
    except (FileNotFoundError, Damaged):  # never written, cut off, or of an older version
        return None
    return memory["sha256"] if memory["key"] == key else None


def _computed(path: Path, key: list[int], memo: Path) -> str:
    started_at = time.time()
    try:
        digest, after = sha256_file(path), _key(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}. Fix: check the path and its permissions") from None
    if after != key:
        raise UserError(f"{path}: the file changes while it is read. Fix: start again when it is complete")
    if started_at - max(key[3:]) / 1e9 >= SETTLED_S:
        write_atomically(memo, sealed({"key": key, "sha256": digest}), shared=True)
    return digest
