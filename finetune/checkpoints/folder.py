"""A checkpoint's folder: complete or absent, and able to prove it.

    checkpoints/step-00000200/
      manifest.json              size and SHA-256 of every other file; written last
      state.json                 step, counts, loss scale, optimizer's scalars, who wrote it
      recipe.yaml                the resolved recipe
      rank-00000-of-00002.safetensors

It is written under another name, flushed to the disk, and renamed: a folder named `step-*` is whole unless a disk lied,
which is what the checksums are for.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

VERSION = 1
_PARTIAL = ".partial-"


def step_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def partial_folder(root: Path, step: int) -> Path:
    return root / f"{_PARTIAL}step-{step:08d}"


def complete(root: Path) -> list[Path]:
    """Checkpoints by name, newest first; not yet verified."""
    return sorted((path for path in root.glob("step-*") if path.is_dir()), reverse=True)


def seal(partial: Path, final: Path) -> None:
    """Checksum, flush and rename: after this returns, `final` survives a power cut."""
    files = sorted(path for path in partial.iterdir() if path.is_file())
    entries = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in files}
    manifest = partial / "manifest.json"
    manifest.write_text(json.dumps({"version": VERSION, "files": entries}, indent=1), encoding="utf-8")
    for path in (*files, manifest, partial):
        _flush(path)
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    _flush(final.parent)


def problem(folder: Path) -> str | None:
    """Why a checkpoint cannot be trusted; None where every byte is as it was written."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "it has no manifest.json"
    except (OSError, ValueError) as error:
        return f"its manifest.json cannot be read: {error}"
    if manifest.get("version") != VERSION:
        return (
            f"it is of format {manifest.get('version')}, this program writes {VERSION}: use the program that wrote it"
        )
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {entry['bytes']}"
        if _sha256(path) != entry["sha256"]:
            return f"{name} is damaged: its checksum differs"
    return None


def prune(root: Path, keep: int) -> None:
    """Remove all but the `keep` newest, and what interrupted saves left behind."""
    for path in (*complete(root)[keep:], *root.glob(f"{_PARTIAL}*")):
        shutil.rmtree(path)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
