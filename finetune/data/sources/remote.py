"""Files behind a URL: https://, s3://, gs://, hf:// and whatever else fsspec knows.

A file is fetched once and then read as a local one, or, for a stream, read where it lies.
"""

from __future__ import annotations

import errno
import hashlib
import json
import time
import uuid
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import filelock

from finetune.data.cache.root import cache_root
from finetune.data.sources.digests import SETTLED_S, file_digest
from finetune.data.sources.file import BINARY_KINDS, File, kind_of, package_errors
from finetune.data.sources.local import check_kinds
from finetune.data.sources.readers import expected_kinds, is_data
from finetune.errors import UserError
from finetune.recipe.urls import is_url, scrubbed, without_credentials

# What pip must add for a protocol.
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
# What file systems say of a file that changes with its content, in lower case.
_VERSION = ("etag", "last-modified", "last_modified", "lastmodified", "content-md5", "digest", "md5hash", "crc32c")
_VERSION += ("generation", "versionid", "checksum", "blob_id", "sha", "mtime", "updated", "created", "modify")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@dataclass(frozen=True)
class _Remote:
    """One file of a file system."""

    system: Any  # fsspec's
    path: str  # there
    label: str
    about: dict[str, Any]  # what the file system says of it

    @property
    def version(self) -> str | None:
        """What changes when the content does; None where the server says nothing of the kind."""
        found = {key.lower(): str(value) for key, value in self.about.items() if key.lower() in _VERSION}
        return json.dumps([self.about.get("size"), found], sort_keys=True) if found else None

    @property
    def may_change_unseen(self) -> bool:
        """Whether the version is a time of whole seconds that has only just been: RFC 9110, section 8.8.2.2."""
        if {key.lower() for key in self.about} & set(_VERSION) != {"last-modified"}:
            return False
        modified = parsedate_to_datetime(self.about["Last-Modified"]).timestamp()
        return time.time() - modified < SETTLED_S


def remote_files(url: str, streaming: bool) -> list[File]:
    """The files of a URL: one, those of a pattern, or all below a folder; fetched now, unless they are streamed.

    Raises UserError where there is none, it cannot be reached, or what reads its protocol is not installed.
    """
    label = without_credentials(url)
    try:
        found = _found(url, label)
        return [_streamed(one) if streaming else _fetched(one) for one in found]
    except ImportError as error:
        protocol = url.partition("://")[0].lower()
        line = INSTALL.get(protocol)
        raise UserError(
            f"{label}: reading {protocol}:// needs a package that is not installed: "
            + (f"pip install {line}" if line else str(error))
        ) from None
    except (OSError, *package_errors()) as error:
        raise UserError(f"{label}: {_reason(error, url)}") from None


def _reason(error: BaseException, url: str) -> str:
    """What went wrong, without what is secret in the URL."""
    if isinstance(error, OSError) and (error.errno in _NO_ROOM or _in_cache(error.filename)):
        return f"cannot be kept in {cache_root()}: {error.strerror}; set FINETUNE_CACHE to a folder with room"
    cause = error.__cause__ or error  # of a FileNotFoundError, where a web server could not be asked
    status = getattr(cause, "status", None)
    if status in (401, 403) or isinstance(error, PermissionError):
        return f"access is refused ({status or 'permission denied'}); check the path and your credentials"
    if isinstance(error, FileNotFoundError) and (status == 404 or cause is error):
        return "no such file or folder there; check the path and, where it is private, your credentials"
    text = " ".join(scrubbed(str(cause), url).split()) or type(cause).__name__
    return f"cannot be reached: {text[:200]}"


def _in_cache(name: Any) -> bool:
    return isinstance(name, str) and name.startswith(str(cache_root()))


def _found(url: str, label: str) -> list[_Remote]:
    # Imported here: it takes its time, and local files do without.
    import fsspec.core

    if "::" in url:
        raise UserError(f"{label}: chained URLs (`::`) are not read; give the file itself")
    try:
        system, path = fsspec.core.url_to_fs(url)
    except ValueError as error:  # a protocol that it does not know
        raise UserError(f"{label}: {scrubbed(str(error), url)}; https://, s3://, gs:// and hf:// are read") from None
    system.invalidate_cache()  # a listing of before may be out of date
    paths = _paths(system, path, label)
    return [_Remote(system, one, without_credentials(system.unstrip_protocol(one)), system.info(one)) for one in paths]


def _paths(system: Any, path: str, label: str) -> list[str]:
    web = _is_web(system)
    # On the web `?` begins a query, and folders are no more than pages with links.
    if signs := [path.index(sign) for sign in ("*" if web else "*[?") if sign in path]:
        found = sorted(one for one in system.glob(path) if web or not system.isdir(one))
        found = _not_hidden(found, len(path[: min(signs)].rpartition("/")[0]))
        if not found:
            raise UserError(f"{label}: no file matches this pattern")
        check_kinds(label, map(_name, found))
        return found
    if not web and system.isdir(path):
        return _below(system, path, label)
    if not is_data(_name(path)):
        raise UserError(f"{label}: `{_name(path)}` is not a kind of file that is read; {expected_kinds()}")
    return [path]


def _below(system: Any, folder: str, label: str) -> list[str]:
    """Data files at any depth, without the hidden ones."""
    found = _not_hidden([one for one in sorted(system.find(folder)) if is_data(_name(one))], len(folder))
    if not found:
        raise UserError(f"{label}: no data files in this folder; {expected_kinds()}")
    return found


def _not_hidden(paths: list[str], start: int) -> list[str]:
    """Paths without those that have a hidden part beyond `start` characters: the same as of local files."""
    return [path for path in paths if not any(part.startswith(".") for part in PurePosixPath(path[start:]).parts)]


def _name(path: str) -> str:
    return PurePosixPath(urlsplit(path).path if is_url(path) else path).name


def _streamed(remote: _Remote) -> File:
    # A server that gives no version is trusted by size: there is nothing else to go by without reading it all.
    digest = f"{remote.label} {remote.version or remote.about.get('size')}"
    return File(remote.label, _name(remote.path), lambda: _opened(remote), lambda: digest)


def _opened(remote: _Remote) -> Any:
    kind, compression = kind_of(_name(remote.path))
    if not _is_web(remote.system):
        return remote.system.open(remote.path, "rb")
    if kind not in BINARY_KINDS or compression:
        return remote.system.open(remote.path, "rb", block_size=0)  # one request, from the start to the end
    found = remote.system.open(remote.path, "rb")
    try:
        found.seek(max(found.size - 1, 0))
        found.read(1)
        found.seek(0)
    except (ValueError, TypeError):  # fsspec's words for a server that sends whole files only
        raise UserError(
            f"{remote.label}: the server sends no parts of files, which streaming {kind} takes; set "
            "`data.streaming: false`, or download the file"
        ) from None
    return found


def _is_web(system: Any) -> bool:
    return "http" in system.protocol


def _fetched(remote: _Remote) -> File:
    """The file in the cache, by URL and version: complete or absent, fetched by one of the processes that want it."""
    place = cache_root() / "remote" / _sha256(remote.path)
    place.parent.mkdir(parents=True, exist_ok=True)
    # The lock stays: see `_entry` in examples.py.
    with filelock.FileLock(place.with_suffix(".lock")):
        kept = _kept(remote, place)
    return File(
        remote.label,
        _name(remote.path),
        lambda: kept.open("rb", buffering=0),
        lambda: file_digest(kept),
        lambda: kept.stat().st_size,
    )


def _kept(remote: _Remote, place: Path) -> Path:
    if remote.version is None or remote.may_change_unseen:
        # The content itself is the version, known only now: such a file is fetched for every run.
        return _fetch(remote, place, None)
    kept = place.with_suffix(f".{_sha256(remote.version)}")
    return kept if kept.is_file() else _fetch(remote, place, kept)


def _fetch(remote: _Remote, place: Path, kept: Path | None) -> Path:
    temporary = place.with_suffix(f".{uuid.uuid4().hex}.tmp")
    try:
        remote.system.get_file(remote.path, str(temporary))
        remote.system.invalidate_cache()
        after = _Remote(remote.system, remote.path, remote.label, remote.system.info(remote.path))
        if after.version != remote.version:
            raise UserError(f"{remote.label}: the file changes while it is fetched; start again when it is complete")
        kept = kept or place.with_suffix(f".{file_digest(temporary)}")
        temporary.replace(kept)
    finally:
        temporary.unlink(missing_ok=True)
    return kept


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
