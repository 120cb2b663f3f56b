"""A folder takes another's place: under its name there is the old one or the new one, whole.

In the run's folder:

    model.partial    being written
    model            the result
    model.old        the one before it, for the moment of the exchange
"""

from __future__ import annotations

import shutil
from pathlib import Path

from finetune.utils import fsync


def partial_of(folder: Path) -> Path:
    return folder.with_name(folder.name + ".partial")


def _old_of(folder: Path) -> Path:
    return folder.with_name(folder.name + ".old")


def begin(folder: Path) -> None:
    """An empty partial folder; what an interrupted save left is swept up, or put back. Raises OSError."""
    old, partial = _old_of(folder), partial_of(folder)
    if old.exists() and not folder.exists():
        old.rename(folder)
    for left in (old, partial):
        if left.exists():
            shutil.rmtree(left)
    partial.mkdir(parents=True)


def exchange(folder: Path) -> None:
    """The partial folder becomes `folder`. After this returns it survives a power cut. Raises OSError."""
    old, partial = _old_of(folder), partial_of(folder)
    for path in (*partial.rglob("*"), partial):
        fsync(path)
    if folder.exists():
        folder.rename(old)
    try:
        partial.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    fsync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)  # else the next save sweeps it up
