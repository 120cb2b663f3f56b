"""What lies in the cache of tokenised examples, and its removal."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import filelock

from finetune.data.cache.entries import discard, entries_folder, lock_of, unfinished
from finetune.errors import UserError

_UNIT_S = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@dataclass(frozen=True)
class FoundEntry:
    """One entry, or what a build left behind. Facts are missing where its report cannot be read."""

    key: str
    path: str
    bytes: int
    used: float  # seconds since the epoch
    is_whole: bool  # false: being built, or left by a build that was killed
    of: dict[str, Any] | None = None  # source, format, tokenizer, template, max_length, ...
    made: dict[str, Any] | None = None  # at (UTC), host, seconds
    examples: int | None = None
    tokens: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def found_entries() -> list[FoundEntry]:
    """The last used first."""
    root = entries_folder()
    folders = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    found = [entry for folder in folders for entry in _found(folder)]
    return sorted(found, key=lambda entry: (-entry.used, entry.path))


def _found(folder: Path) -> Iterator[FoundEntry]:
    """Nothing where it was removed or renamed while we looked."""
    with contextlib.suppress(FileNotFoundError):
        report = folder / "report.json"
        used = (report if report.exists() else folder).stat().st_mtime
        size = sum(file.stat().st_size for file in folder.iterdir())
        key, _, rest = folder.name.partition(".")
        yield FoundEntry(key, str(folder), size, used, not rest and report.exists(), **_facts(report))


def _facts(report: Path) -> dict[str, Any]:
    try:
        about = json.loads(report.read_text(encoding="utf-8"))
        counts = {name: about["report"][name] for name in ("examples", "tokens")}
        return {"of": about["of"], "made": about["made"], **counts}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def age_in_seconds(text: str) -> int:
    """
    >>> age_in_seconds("30d")
    2592000

    Raises UserError for what is not a number and a unit.
    """
    match = re.fullmatch(r"(\d+)([mhdw])", text.strip())
    if match is None:
        raise UserError(f"--older-than {text}: expected a number and a unit (m, h, d, w), such as 12h or 30d")
    return int(match[1]) * _UNIT_S[match[2]]


def not_used_for(entries: Sequence[FoundEntry], seconds: float) -> list[FoundEntry]:
    now = time.time()
    return [entry for entry in entries if now - entry.used >= seconds]


def remove(entries: Sequence[FoundEntry]) -> list[FoundEntry]:
    """Remove them; returns those that were left because some process is building them. Raises UserError."""
    return [entry for entry in entries if not _remove(entry)]


def _remove(entry: FoundEntry) -> bool:
    folder = Path(entry.path).with_name(entry.key)
    try:
        with lock_of(folder).acquire(blocking=False):
            for leftover in unfinished(folder):
                shutil.rmtree(leftover)
            if entry.path == str(folder) and folder.is_dir():
                discard(folder)
    except filelock.Timeout:
        return False
    except OSError as error:
        raise UserError(f"{error.filename or folder}: cannot be removed: {error.strerror or error}") from None
    return True
