"""A checkpoint's folder: complete or absent, and able to prove it.

    checkpoints/step-00000200/
      manifest.json              size and SHA-256 of every other file; written last
      state.json                 step, counts, loss scale, optimizer's scalars, metrics, data, versions, who wrote it
      recipe.yaml                the resolved recipe
      rank-00000-of-00002.safetensors

It is written under another name, flushed to the disk, and renamed: a folder named `step-*` is whole unless a disk lied,
which is what the checksums are for. It loses that name before it is deleted, too.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

from finetune.checkpoints.tensor_file import FileEntry
from finetune.errors import UserError

VERSION = 1
_PARTIAL = ".partial-"  # being written, or left by a save that was interrupted
_REMOVED = ".removed-"  # being deleted
_ASIDE = "aside-"  # a checkpoint that a run did not go on from; never deleted by us


def step_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def partial_folder(root: Path, step: int) -> Path:
    return root / f"{_PARTIAL}step-{step:08d}"


def complete(root: Path) -> list[Path]:
    """Checkpoints by name, newest first; not yet verified."""
    return sorted((path for path in root.glob("step-*") if path.is_dir()), reverse=True)


def aside(root: Path) -> list[Path]:
    """Checkpoints that were set aside, newest first."""
    return sorted((path for path in root.glob(f"{_ASIDE}step-*") if path.is_dir()), reverse=True)


def start_partial(partial: Path) -> None:
    """An empty folder to write to, whatever an interrupted save of this step (perhaps by more ranks) left there."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def seal(partial: Path, final: Path, written: list[FileEntry]) -> None:
    """Checksum what is not in `written`, flush and rename: after this returns, `final` survives a power cut."""
    names = {entry.name for entry in written}
    others = sorted(path for path in partial.iterdir() if path.name not in names)
    entries = [*written, *(FileEntry(path.name, path.stat().st_size, _sha256(path)) for path in others)]
    files = {entry.name: {k: v for k, v in asdict(entry).items() if k != "name"} for entry in entries}
    manifest = partial / "manifest.json"
    manifest.write_text(json.dumps({"version": VERSION, "files": files}, indent=1), encoding="utf-8")
    for path in (*others, manifest, partial):
        flush(path)
    if final.exists():
        remove(final)
    partial.rename(final)
    flush(final.parent)


def problem(folder: Path, read: bool = True) -> str | None:
    """Why a checkpoint cannot be trusted; None where every byte is as it was written.

    read: False looks at names and sizes only.
    """
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
        try:
            if read and _sha256(path) != entry["sha256"]:
                return f"{name} is damaged: its checksum differs"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None


def size(folder: Path) -> int:
    """Bytes of all its files."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def remove(folder: Path) -> None:
    """Delete a checkpoint. One that is killed meanwhile leaves nothing that looks like a checkpoint."""
    doomed = folder.with_name(_REMOVED + folder.name)
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def sweep(root: Path) -> None:
    """Remove what interrupted saves and deletions left behind; while none is under way."""
    for pattern in (_PARTIAL, _REMOVED):
        for path in root.glob(f"{pattern}*"):
            shutil.rmtree(path)


def set_aside(folder: Path) -> Path:
    """Take a checkpoint out of the way of the run that goes on without it; replaces what was set aside before it.

    Raises UserError where the folder above cannot be written to.
    """
    moved = folder.with_name(_ASIDE + folder.name)
    shutil.rmtree(moved, ignore_errors=True)
    try:
        return folder.rename(moved)
    except OSError as error:
        raise UserError(f"{folder} cannot be set aside as {moved.name}: {error.strerror}; move it yourself") from None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def flush(path: Path) -> None:
    """To the disk: a file, or a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
