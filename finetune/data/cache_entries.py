"""Lists and removes cache entries: `finetune cache list` and `cache clean`.

Entries hold tokens, a reference's log-probabilities or a teacher's predictions, each a folder with a report.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import filelock

from finetune.data.token_cache import discard, entries_folder, lock_of, unfinished
from finetune.errors import UserError

_UNIT_S = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@dataclass(frozen=True)
class CachedEntry:
    """One entry, or an unfinished one. Fields read from its report are None if it cannot be read."""

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


def list_entries() -> list[CachedEntry]:
    """Entries, the last used first."""
    root = entries_folder()
    folders = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    entries = [entry for folder in folders for entry in _describe(folder)]
    return sorted(entries, key=lambda entry: (-entry.used, entry.path))


def _describe(folder: Path) -> Iterator[CachedEntry]:
    """Yields the entry, unless the folder was removed or renamed meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        report = folder / "report.json"
        used = (report if report.exists() else folder).stat().st_mtime
        size = sum(file.stat().st_size for file in folder.iterdir())
        key, _, rest = folder.name.partition(".")
        yield CachedEntry(key, str(folder), size, used, not rest and report.exists(), **_read_report(report))


def _read_report(report: Path) -> dict[str, Any]:
    try:
        written = json.loads(report.read_text(encoding="utf-8"))
        counts = {name: written["report"][name] for name in ("examples", "tokens")}
        return {"of": written["of"], "made": written["made"], **counts}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def age_in_seconds(text: str) -> int:
    """
    >>> age_in_seconds("30d")
    2592000

    Raises UserError for text that is not a number and a unit.
    """
    match = re.fullmatch(r"(\d+)([mhdw])", text.strip())
    if match is None:
        raise UserError(f"--older-than {text}: expected a number and a unit (m, h, d, w), such as 12h or 30d")
    return int(match[1]) * _UNIT_S[match[2]]


def not_used_for(entries: list[CachedEntry], seconds: float) -> list[CachedEntry]:
    now = time.time()
    return [entry for entry in entries if now - entry.used >= seconds]


def remove(entries: list[CachedEntry]) -> list[CachedEntry]:
    """Returns the entries that were not removed because some process is building them. Raises UserError."""
    return [entry for entry in entries if not _remove(entry)]


def _remove(entry: CachedEntry) -> bool:
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
