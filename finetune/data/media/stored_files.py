"""Files that rows name: located by the row's reference, within bounds.

References in a row are not trusted: a path stays within its folder, only plain files are read, and of no more than
`MAX_BYTES`, or `MAX_STREAMED_BYTES` if they are read in pieces.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import logging
import os
from pathlib import Path
from typing import Any

from finetune.data.checksums import Damaged, verify_file, write_checksum
from finetune.data.samples import BadRow, MediaKind
from finetune.data.sources.files import cache_root, package_errors
from finetune.recipe.schema import Audio, Images, Videos
from finetune.recipe.urls import is_url, scrubbed, without_credentials
from finetune.utils import write_atomically

FileRules = Images | Audio | Videos
MAX_BYTES = 1 << 28  # of a file
MAX_STREAMED_BYTES = 1 << 31  # of sound or a video that is a file of its own, which is read in pieces
NAMES: dict[MediaKind, str] = {"image": "image", "audio": "sound file", "video": "video"}
AS_ONE: dict[MediaKind, str] = {"image": "an image", "audio": "a sound file", "video": "a video"}
_FETCH_S = 60  # for a file of the web

log = logging.getLogger(__name__)


def source_of(reference: str | bytes, kind: MediaKind, rules: FileRules, data_file: str) -> str | bytes:
    """Returns the path that a reference in a row of `data_file` means, or the file itself. Raises BadRow, in one
    line."""
    try:
        source = reference if isinstance(reference, bytes) else _located(reference, kind, rules, data_file)
    except BadRow as problem:
        raise BadRow(printable(str(problem))) from None
    if isinstance(source, bytes) and len(source) > MAX_BYTES:
        raise BadRow(f"{AS_ONE[kind]} of {len(source):,} bytes; at most {MAX_BYTES:,} are read")
    return source


def printable(name: str) -> str:
    """Returns a name in one line: a row may have line ends and control characters in it."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in name)


def _located(reference: str, kind: MediaKind, rules: FileRules, data_file: str) -> str | bytes:
    """Returns the path that a reference means, or the bytes of a data URL."""
    if reference[:5].lower() == "data:":
        head, comma, body = reference.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise BadRow(f"{head[:60]}...: expected data:{kind}/...;base64,...")
        try:
            return base64.b64decode("".join(body.split()), validate=True)
        except (binascii.Error, ValueError) as error:
            raise BadRow(f"{head[:60]},...: not base64: {error}") from None
    if is_url(reference):
        return str(_fetched(reference, kind, rules))
    if "\0" in reference or len(reference) > 4096:
        raise BadRow(f"the path of {AS_ONE[kind]} has a NUL or more than 4,096 characters; is it the file itself?")
    folder = Path(rules.folder).expanduser() if rules.folder else Path(data_file).parent
    if rules.folder is None and not Path(data_file).is_file():
        raise BadRow(f"{reference}: {data_file} is no local file, so it has no folder: set `data.{kind}.folder`")
    try:
        path, root = (folder / Path(reference)).resolve(), folder.resolve()
        if os.path.lexists(path):
            path.stat()
        is_there = path.exists()  # an error for a name that is too long
    except (OSError, RuntimeError) as error:  # links that lead in circles: a RuntimeError before Python 3.13
        raise BadRow(f"{reference}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not rules.outside and not path.is_relative_to(root):
        raise BadRow(
            f"{reference}: leads out of {folder}; `data.{kind}: {{folder: ...}}` names another folder, and `outside: "
            "true` allows any"
        )
    if not is_there:
        raise BadRow(f"no such {NAMES[kind]}: {path}")
    if kind == "video" and path.is_dir():  # of its frames
        return str(path)
    if not path.is_file():
        raise BadRow(f"{path}: not a file")
    if (size := path.stat().st_size) > (most := MAX_BYTES if kind == "image" else MAX_STREAMED_BYTES):
        raise BadRow(f"{path}: {size:,} bytes; at most {most:,} are read")
    return str(path)


def _fetched(url: str, kind: MediaKind, rules: FileRules) -> Path:
    """Returns the cache's copy of a file of the web, fetched if it is missing or damaged."""
    label = without_credentials(url)[:200]
    if not rules.allow_urls:
        raise BadRow(
            f"{label}: {NAMES[kind]}s are not fetched; download them and give paths, or set `data.{kind}.allow_urls: "
            "true`"
        )
    if not url.lower().startswith(("http://", "https://")):
        raise BadRow(f"{label}: of addresses only http:// and https:// are fetched")
    copy = _copies(kind) / hashlib.sha256(url.encode()).hexdigest()
    try:
        verify_file(copy)
        if copy.is_file():
            return copy
    except FileNotFoundError:
        pass
    except Damaged:
        log.warning("%s: damaged on the disk; it is fetched again", copy)
    try:
        content = _download(url)
    except (OSError, ValueError, *package_errors()) as error:
        reason = scrubbed(" ".join(str(error).split()), url)[:200] or type(error).__name__
        raise BadRow(f"{label}: cannot be fetched: {reason}") from None
    if len(content) > MAX_BYTES:
        raise BadRow(f"{label}: more than {MAX_BYTES:,} bytes")
    copy.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(copy, content, shared=True)
    write_checksum(copy, copy)
    return copy


def _copies(kind: MediaKind) -> Path:
    return cache_root() / {"image": "images", "audio": "audio", "video": "videos"}[kind]


def check_copy(source: str | bytes) -> None:
    """Raises ValueError if a file is the cache's copy of one of the web, and damaged."""
    if isinstance(source, str) and Path(source).parent in map(_copies, NAMES):
        try:
            verify_file(Path(source))
        except Damaged:
            raise ValueError("its copy in the cache is damaged; `finetune cache clean`, and start again") from None


def _download(url: str) -> bytes:
    """Returns the content of a URL, little more than `MAX_BYTES` of it. Raises OSError, aiohttp's errors."""
    import fsspec
    from aiohttp import ClientTimeout

    content = bytearray()
    # Blocks of size 0: one request for all of it, for servers that send no parts.
    stream: Any = fsspec.open(url, "rb", block_size=0, client_kwargs={"timeout": ClientTimeout(total=_FETCH_S)})
    with stream as file:
        while len(content) <= MAX_BYTES and (piece := file.read(1 << 20)):
            content += piece
    return bytes(content)


def part_of_file(source: str | bytes, count: int) -> bytes:
    """Returns the first bytes of a file, or the last if `count` is negative."""
    if isinstance(source, bytes):
        return source[:count] if count > 0 else source[count:]
    with Path(source).open("rb") as file:
        file.seek(0 if count > 0 else max(Path(source).stat().st_size + count, 0))
        return file.read(abs(count))
