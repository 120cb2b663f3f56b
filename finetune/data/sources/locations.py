"""Files of a path or URL: one, those of a pattern, or all below a folder.

Local files are read in place. Files at https://, s3://, gs://, hf:// and other addresses that fsspec supports are
fetched once and then read as local ones, or, for a stream, read over the network.
"""

from __future__ import annotations

import difflib
import errno
import glob
import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import filelock

from finetune.data.checksums import Damaged, verify_file, write_checksum
from finetune.data.sources.files import (
    BINARY_KINDS,
    SETTLED_S,
    File,
    cache_fix,
    cache_root,
    file_digest,
    kind_of,
    package_errors,
)
from finetune.data.sources.readers import expected_kinds, is_data, is_document
from finetune.errors import UserError, without_secrets
from finetune.recipe.urls import is_url, scrubbed, without_credentials

log = logging.getLogger(__name__)


Choose = Callable[[list[str]], list[str]]  # of the names below a folder those that are read


def local_files(name: str, choose: Choose = lambda names: names) -> list[File]:
    """Returns the files of a local source, by path; empty if the name can only be a dataset of the hub.

    choose: called for a folder only.
    Raises UserError for a path that does not exist, and OSError if it may not be read.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        inside = sorted(_walk(path))
        files = [inner for inner in inside if is_data(inner.name)]
        documents = [inner for inner in inside if is_document(inner.name)]
        is_about = {inner.stem.lower() for inner in documents} <= {
            "readme",
            "license",
            "changelog",
        }  # data that is gone
        files = files or ([] if is_about else documents)
        if not files:
            names = ", ".join(str(inner.relative_to(path)) for inner in inside[:5]) or "no files"
            kinds = expected_kinds(inner.name for inner in inside)
            raise UserError(f"{path}: no data files in this folder (it has {names}). {kinds}")
        files = [path / name for name in choose([inner.relative_to(path).as_posix() for inner in files])]
    elif path.is_file():
        if not is_data(path.name) and not is_document(path.name):
            kind = path.suffix or path.name
            raise UserError(f"{path}: `{kind}` is not a kind of file that is read. {expected_kinds([path.name])}")
        files = [path]
    elif path.exists():
        raise UserError(f"{path}: neither a file nor a folder. Rows are read more than once. Fix: save them to a file")
    elif path.is_symlink():
        files = [path]  # a broken link, below
    elif glob.has_magic(name):
        files = [match for match in map(Path, sorted(glob.glob(str(path), recursive=True))) if not match.is_dir()]
        if not files:
            raise UserError(
                f"{path}: no file matches this pattern. Relative paths start at {Path.cwd()}. Fix: correct the pattern"
            )
        _check_kinds(str(path), [match.name for match in files])
    elif is_data(path.name) or name.startswith((".", "/", "~")) or name.count("/") > 1:
        hint, fix = f" (there is no folder {path.parent} either)", "check the path"
        if path.parent.is_dir():
            siblings = [child.name for child in path.parent.iterdir()]
            close = difflib.get_close_matches(path.name, siblings, n=3, cutoff=0.6)
            hint = ""
            if close:
                fix += f"; did you mean {' or '.join(str(path.parent / name) for name in close)}?"
        raise UserError(f"{path}: no such file or folder{hint}. Relative paths start at {Path.cwd()}. Fix: {fix}")
    else:
        return []
    for path in files:
        if path.is_symlink() and not path.exists():
            raise UserError(f"{path}: a link to {os.readlink(path)}, which does not exist. Fix: correct the link")
    return [local_file(path) for path in files]


def local_file(path: Path) -> File:
    """Returns a file of this machine."""
    return File(
        str(path),
        path.name,
        lambda: path.open("rb", buffering=0),
        lambda: file_digest(path),
        lambda: path.stat().st_size,
    )


def is_saved_dataset(folder: Path) -> bool:
    """Returns whether `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote the folder."""
    # os.path: of a folder without permission False is good enough, reading it raises the error.
    return os.path.isfile(folder / "dataset_dict.json") or all(
        os.path.isfile(folder / name) for name in ("state.json", "dataset_info.json")
    )


def _walk(folder: Path) -> Iterator[Path]:
    """Yields the files in a folder at any depth, without hidden files and folders. A link is followed within the
    folder; one that leads out of it is an error: rows of other people's folders would be trained on."""

    def fail(error: OSError) -> None:  # without it, os.walk leaves out folders that it may not read
        raise error

    seen: set[tuple[int, int]] = set()  # folders, since links may lead in circles
    for parent, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        here = Path(parent)
        for name in [*folders, *names]:
            if not name.startswith(".") and (here / name).is_symlink():
                _check_link_inside(here / name, folder)
        identity = (here.stat().st_dev, here.stat().st_ino)
        if identity in seen:
            folders.clear()
            continue
        seen.add(identity)
        if here != folder and is_saved_dataset(here):
            raise UserError(
                f"{here}: a dataset saved with save_to_disk, within {folder}. Fix: give it as a source of its own"
            )
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (here / name for name in names if not name.startswith("."))


def _check_link_inside(link: Path, folder: Path) -> None:
    try:
        target = link.resolve(strict=True)
    except (OSError, RuntimeError):  # broken or circular: an error if it is a file of data
        return
    root = folder.resolve()
    if "snapshots" in root.parts:  # of the hub's cache, whose files are links to its blobs
        root = root.parents[root.parts[::-1].index("snapshots")]
    if not target.is_relative_to(root) and (target.is_dir() or is_data(link.name)):
        raise UserError(
            f"{link}: a link that leads out of {folder}, to {target}. Fix: give its target as a source of its own, or "
            "copy it into the folder"
        )


def _check_kinds(pattern: str, names: list[str]) -> None:
    """Raises UserError for a pattern that matches other kinds of file: to leave them out would lose rows silently."""
    if all(map(is_document, names)):
        return
    if others := [name for name in names if not is_data(name)]:
        raise UserError(
            f"{pattern}: matches {', '.join(others[:3])} too, which is not a kind that is read. "
            + expected_kinds(fix="narrow the pattern, as *.jsonl does")
        )


# --- remote files


# Packages that pip must add for a protocol.
INSTALL = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "http": "aiohttp",
    "https": "aiohttp",
    "az": "adlfs",
    "abfs": "adlfs",
    "sftp": "paramiko",
    "ssh": "paramiko",
}
# Protocols of fsspec that read other file systems, by more than an address.
_NO_FILES = (
    *("reference", "blockcache", "cached", "filecache", "simplecache", "dir", "generic", "zip", "tar", "libarchive"),
    *("data", "asynclocal"),
)
# Metadata of file systems that change with a file's content, in lower case.
_VERSION = ("etag", "last-modified", "last_modified", "lastmodified", "content-md5", "digest", "md5hash", "crc32c")
_VERSION += ("generation", "versionid", "checksum", "blob_id", "sha", "mtime", "updated", "created", "modify")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@dataclass(frozen=True)
class _Remote:
    """One file of a file system of fsspec, with its metadata there."""

    system: Any
    path: str
    label: str
    metadata: dict[str, Any]

    @property
    def version(self) -> str | None:
        """Text that changes when the content does; None if the server has no such metadata."""
        parts = {key.lower(): str(value) for key, value in self.metadata.items() if key.lower() in _VERSION}
        return json.dumps([self.metadata.get("size"), parts], sort_keys=True) if parts else None

    @property
    def may_change_unseen(self) -> bool:
        """Returns whether the version is a time in full seconds, of the last two: RFC 9110, section 8.8.2.2."""
        if {key.lower() for key in self.metadata} & set(_VERSION) != {"last-modified"}:
            return False
        modified = parsedate_to_datetime(self.metadata["Last-Modified"]).timestamp()
        return time.time() - modified < SETTLED_S


def remote_files(url: str, streaming: bool, choose: Choose = lambda names: names) -> list[File]:
    """Returns the files of a URL: one, those of a pattern, or of a folder; fetched now, unless they are streamed.

    choose: called for a folder only.
    Raises UserError if there is none, it cannot be reached, or the package for its protocol is not installed.
    """
    label = without_credentials(url)
    try:
        return [_streamed(remote) if streaming else _fetched(remote) for remote in _remotes(url, label, choose)]
    except ImportError as error:
        protocol = url.partition("://")[0].lower()
        line = INSTALL.get(protocol)
        raise UserError(
            f"{label}: reading {protocol}:// needs a package that is not installed"
            + (f". Fix: pip install {line}" if line else f": {error}. Fix: install it")
        ) from None
    except (OSError, ValueError, *package_errors()) as error:  # ValueError: an address that its library refuses
        raise UserError(f"{label}: {without_secrets(_reason(error, url))}") from None


def _reason(error: BaseException, url: str) -> str:
    """Returns the problem, without the secrets of the URL."""
    filename = getattr(error, "filename", None)
    in_cache = isinstance(filename, str) and filename.startswith(str(cache_root()))
    if isinstance(error, OSError) and (error.errno in _NO_ROOM or in_cache):
        return f"cannot be kept in {cache_root()}: {error.strerror}. Fix: set FINETUNE_CACHE to {cache_fix(error)}"
    cause = error.__cause__ or error  # of a FileNotFoundError, if a web server could not be reached
    status = getattr(cause, "status", None)
    if status in (401, 403) or isinstance(error, PermissionError):
        return f"access is refused ({status or 'permission denied'}). Fix: check the path and your credentials"
    if isinstance(error, FileNotFoundError) and (status == 404 or cause is error):
        return "no such file or folder there. Fix: check the path and, if it is private, your credentials"
    text = " ".join(scrubbed(str(cause), url).split()) or type(cause).__name__
    return f"cannot be reached: {text[:200]}. Fix: check the address and the network, and start again"


def _remotes(url: str, label: str, choose: Choose) -> list[_Remote]:
    # Imported here: local files do not need it.
    import fsspec.core

    if "::" in url:
        raise UserError(f"{label}: chained URLs (`::`) are not read. Fix: give the file itself")
    if (scheme := url.partition("://")[0].lower()) in _NO_FILES:
        raise UserError(f"{label}: {scheme}:// names no files. Fix: give an address of https://, s3://, gs:// or hf://")
    try:
        system, path = fsspec.core.url_to_fs(url)
    except (ValueError, TypeError) as error:  # a protocol that it does not know, or that needs more than an address
        raise UserError(
            f"{label}: not an address that can be read: {scrubbed(str(error), url)}. Fix: give one of https://, s3://, "
            "gs:// or hf://"
        ) from None
    system.invalidate_cache()  # a listing of before may be out of date
    is_web = "http" in system.protocol
    # On the web `?` begins a query, and folders are only pages with links.
    if signs := [path.index(sign) for sign in ("*" if is_web else "*[?") if sign in path]:
        matches = sorted(match for match in system.glob(path) if is_web or not system.isdir(match))
        paths = _without_hidden(matches, len(path[: min(signs)].rpartition("/")[0]))
        if not paths:
            raise UserError(f"{label}: no file matches this pattern. Fix: correct the pattern")
        _check_kinds(label, list(map(_name, paths)))
    elif not is_web and system.isdir(path):
        paths = _without_hidden([name for name in sorted(system.find(path)) if is_data(_name(name))], len(path))
        if not paths:
            raise UserError(f"{label}: no data files in this folder. {expected_kinds()}")
        start = f"{path.rstrip('/')}/"
        paths = [start + name for name in choose([one.removeprefix(start) for one in paths])]
    elif is_data(_name(path)):
        paths = [path]
    else:
        raise UserError(f"{label}: `{_name(path)}` is not a kind of file that is read. {expected_kinds()}")
    return [_Remote(system, one, without_credentials(system.unstrip_protocol(one)), system.info(one)) for one in paths]


def _without_hidden(paths: list[str], start: int) -> list[str]:
    """Returns the paths without a hidden part beyond `start` characters, as for local files."""
    return [path for path in paths if not any(part.startswith(".") for part in PurePosixPath(path[start:]).parts)]


def _name(path: str) -> str:
    return PurePosixPath(urlsplit(path).path if is_url(path) else path).name


def _streamed(remote: _Remote) -> File:
    kind, compression = kind_of(_name(remote.path))

    def open_stream() -> Any:
        if "http" not in remote.system.protocol:
            return remote.system.open(remote.path, "rb")
        if kind not in BINARY_KINDS or compression:
            return remote.system.open(remote.path, "rb", block_size=0)  # one request, from the start to the end
        stream = remote.system.open(remote.path, "rb")
        try:
            stream.seek(max(stream.size - 1, 0))
            stream.read(1)
            stream.seek(0)
        except (ValueError, TypeError):  # fsspec raises these if a server cannot send a part of a file
            raise UserError(
                f"{remote.label}: the server sends no parts of files, which streaming {kind} needs. Fix: set "
                "`data.streaming: false`, or download the file"
            ) from None
        return stream

    # Without a version the size has to do: the rest is unknown before all of the file is read.
    digest = f"{remote.label} {remote.version or remote.metadata.get('size')}"
    return File(remote.label, _name(remote.path), open_stream, lambda: digest)


def _fetched(remote: _Remote) -> File:
    """Returns the file in the cache, by URL and version: complete or absent, fetched by one process while the others
    wait.

    Not fsspec's `filecache`, which writes under the final name, keeps URLs with their credentials on disk, and under
    https:// never notices that a file has changed.
    """
    slot = cache_root() / "remote" / _sha256(remote.path)
    slot.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(slot.with_suffix(".lock"))  # its file stays: see `lock_of` in cache_entries.py
    with lock:
        if remote.version is None or remote.may_change_unseen:
            # Only the content itself is a version: such a file is fetched for every run.
            copy = _fetch(remote, slot, None)
        else:
            copy = slot.with_suffix(f".{_sha256(remote.version)}")
            if not copy.is_file():
                _fetch(remote, slot, copy)

    def open_verified() -> Any:
        try:
            verify_file(copy)  # reads the bytes once more than they are needed
        except Damaged:
            log.warning("%s: its copy in the cache is damaged; it is fetched again", remote.label)
            with lock:
                _fetch(remote, slot, copy)
        return copy.open("rb", buffering=0)

    return File(remote.label, _name(remote.path), open_verified, lambda: file_digest(copy), lambda: copy.stat().st_size)


def _fetch(remote: _Remote, slot: Path, copy: Path | None) -> Path:
    """Fetches a file to `copy`, or to a name by its content."""
    temporary = slot.with_suffix(f".{uuid.uuid4().hex}.tmp")
    try:
        remote.system.get_file(remote.path, str(temporary))
        remote.system.invalidate_cache()
        after = _Remote(remote.system, remote.path, remote.label, remote.system.info(remote.path))
        if after.version != remote.version:
            raise UserError(
                f"{remote.label}: the file changes while it is fetched. Fix: start again when it is complete"
            )
        copy = copy or slot.with_suffix(f".{file_digest(temporary)}")
        write_checksum(copy, temporary)
        temporary.replace(copy)
    finally:
        temporary.unlink(missing_ok=True)
    return copy


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
