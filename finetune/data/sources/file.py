"""A file as the readers see it, wherever it lies: its bytes, decompressed, and checked to be what its name says."""

from __future__ import annotations

import io
import lzma
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, Any

import pyarrow

from finetune.data.samples import BadRow
from finetune.data.sources.compression import COMPRESSIONS
from finetune.errors import UserError
from finetune.recipe.urls import scrubbed

Numbered = Iterator[tuple[int, "dict[str, Any] | BadRow"]]  # (number, row) of one file
Labelled = Iterator[tuple[str, int, "dict[str, Any] | BadRow"]]  # with the file or dataset before it

HEAD_BYTES = 64  # what tells a file's kind
BUFFER_BYTES = 1 << 16  # read at a time
# What the decompressors and pyarrow raise over bytes that are not what they should be.
DAMAGED = (EOFError, lzma.LZMAError, pyarrow.ArrowException)
BINARY_KINDS = (".parquet", ".arrow")  # the others are text


@dataclass(frozen=True)
class File:
    """One file of a source."""

    label: str  # what messages and rows call it; without credentials
    name: str  # whose end tells the kind
    open: Callable[[], IO[bytes]]  # its bytes as they are stored, from the start
    digest: Callable[[], str]  # changes when they do
    size: Callable[[], int | None] = lambda: None  # of them, where it takes no reading to know


# (the kind that it is, first bytes, what is wrong with a file of another kind that begins so).
_TELLING: tuple[tuple[str, re.Pattern[bytes], str], ...] = (
    ("", re.compile(rb"\xff\xfe|\xfe\xff"), "it is UTF-16, not UTF-8; save the file as UTF-8"),
    (".parquet", re.compile(rb"PAR1[\x00-\x08\x0e-\x1f]"), "it is a parquet file; name it .parquet"),
    (".arrow", re.compile(rb"ARROW1\0"), "it is an arrow file; name it .arrow"),
    ("", re.compile(rb"\x1f\x8b"), "it is compressed with gzip; add .gz to its name"),
    ("", re.compile(rb"BZh[1-9]1AY&SY"), "it is compressed with bzip2; add .bz2 to its name"),
    ("", re.compile(rb"\xfd7zXZ\0"), "it is compressed with xz; add .xz to its name"),
    ("", re.compile(rb"\x28\xb5\x2f\xfd"), "it is compressed with zstd; add .zst to its name"),
    ("", re.compile(rb"PK\x03\x04"), "it is a zip archive (or a spreadsheet); unpack it, or save it as csv"),
    ("", re.compile(rb"version https://git-lfs"), "it is a pointer of Git LFS, not the data; run `git lfs pull`"),
)
_WEB_PAGE = re.compile(rb"\s*<(!doctype html|html)", re.IGNORECASE)


def kind_of(name: str) -> tuple[str, str]:
    """(kind, compression) by the end of a name: `a.jsonl.gz` -> (".jsonl", ".gz"), `a.csv` -> (".csv", "")."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(name).suffixes]
    compression = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSIONS else ""
    return (suffixes[-1] if suffixes else ""), compression


@contextmanager
def content(file: File) -> Iterator[io.BufferedReader]:
    """A file's bytes, decompressed, from the start.

    Raises UserError where they are of another kind than the name says. Memory is a buffer's.
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
            raise UserError(f"{file.label}: {_other_kind(head, kind) or f'not a {compression} file'}; check its name")
        with io.BufferedReader(decompress(stored), BUFFER_BYTES) as stream:
            _check_head(file.label, kind, stream.peek(HEAD_BYTES)[:HEAD_BYTES])
            yield stream


@contextmanager
def seekable_content(file: File) -> Iterator[IO[bytes]]:
    """The same for kinds that are read from their end; what cannot be read so is first unpacked to a temporary file."""
    with content(file) as stream:
        if not kind_of(file.name)[1] and stream.seekable():
            yield stream
            return
        with tempfile.TemporaryFile() as unpacked:
            shutil.copyfileobj(stream, unpacked, 1 << 20)
            unpacked.seek(0)
            yield unpacked


def _check_head(label: str, kind: str, head: bytes) -> None:
    found = _other_kind(head, kind)
    if not found and kind not in (".txt", *BINARY_KINDS) and _WEB_PAGE.match(head):
        found = "it is a web page, not data; download the file itself"
    if found:
        raise UserError(f"{label}: {found}")


def _other_kind(head: bytes, kind: str) -> str | None:
    """What is wrong with a file of `kind` that begins so; None: nothing that the first bytes tell."""
    return next((what for own, pattern, what in _TELLING if own != kind and pattern.match(head)), None)


def package_errors() -> tuple[type[BaseException], ...]:
    """What the file systems of fsspec raise besides OSError. A package that was never imported has raised nothing."""
    names = {
        "aiohttp": ("ClientError",),
        "asyncio": ("TimeoutError",),  # no OSError before Python 3.11
        "botocore.exceptions": ("BotoCoreError", "ClientError"),
        "gcsfs.retry": ("HttpError",),
        "google.auth.exceptions": ("GoogleAuthError",),
        "huggingface_hub.errors": ("HfHubHTTPError", "HFValidationError"),
    }
    found = ((sys.modules.get(module), name) for module, classes in names.items() for name in classes)
    return tuple(getattr(module, name) for module, name in found if module)


def file_rows(file: File, read: Callable[[File], Numbered]) -> Labelled:
    """Rows of one file; an empty, damaged or unreadable one is a UserError with its name."""
    number = 0
    try:
        for number, row in read(file):
            yield file.label, number, row
    except (OSError, *DAMAGED, *package_errors()) as error:
        raise UserError(f"{file.label}: {_trouble(file, number, error)}") from None
    if not number:
        raise UserError(f"{file.label}: the file has no rows; put data into it or take it out of the recipe")


def _trouble(file: File, number: int, error: BaseException) -> str:
    """Why a file could not be read beyond row `number`."""
    reason = " ".join(scrubbed(str(error) or type(error).__name__).split())[:200]
    beyond = f" beyond row {number}" if number else ""
    if isinstance(error, OSError) and error.errno:
        return f"cannot be read{beyond}: {error.strerror}"
    if isinstance(error, package_errors()):
        return f"cannot be read{beyond}: {reason}"
    kind, compression = kind_of(file.name)
    return (
        f"not a readable {(compression or kind).lstrip('.')} file{beyond}: it is damaged or incomplete ({reason}); "
        "write, copy or download it again"
    )
