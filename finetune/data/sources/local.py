"""The files that a local path means: one, those that a pattern matches, or all below a folder."""

from __future__ import annotations

import difflib
import glob
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from finetune.data.sources.digests import file_digest
from finetune.data.sources.file import File
from finetune.data.sources.readers import expected_kinds, is_data
from finetune.errors import UserError


def local_files(name: str) -> list[File]:
    """The files of a local source, in the order of their paths; none where the name can only be a dataset of the hub.

    Raises UserError for a path that is none, and OSError where it may not be looked at.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return [local_file(found) for found in _below(path)]
    if path.is_file():
        if not is_data(path.name):
            raise UserError(
                f"{path}: `{path.suffix or path.name}` is not a kind of file that is read; {expected_kinds()}"
            )
        return [local_file(path)]
    _check_link(path)
    if path.exists():
        raise UserError(f"{path}: neither a file nor a folder; rows are read more than once, so save them to a file")
    if glob.has_magic(name):
        return [local_file(found) for found in _matching(path)]
    if is_data(path.name) or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"{path}: no such file or folder{_close_names(path)}; relative paths start at {Path.cwd()}")
    return []


def local_file(path: Path) -> File:
    """A file of this machine."""
    return File(
        str(path),
        path.name,
        lambda: path.open("rb", buffering=0),
        lambda: file_digest(path),
        lambda: path.stat().st_size,
    )


def is_saved_dataset(folder: Path) -> bool:
    """Whether `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote the folder."""
    # os.path: a folder that may not be looked into is for whoever reads it to complain of.
    return os.path.isfile(folder / "dataset_dict.json") or all(
        os.path.isfile(folder / name) for name in ("state.json", "dataset_info.json")
    )


def _below(folder: Path) -> list[Path]:
    """Data files at any depth; hidden files and folders are left out, and so are other kinds of file."""
    inside = sorted(_walk(folder))
    files = [path for path in inside if is_data(path.name)]
    if not files:
        names = ", ".join(str(path.relative_to(folder)) for path in inside[:5]) or "no files"
        raise UserError(f"{folder}: no data files in this folder (it has {names}); {expected_kinds()}")
    for path in files:
        _check_link(path)
    return files


def _walk(folder: Path) -> Iterator[Path]:
    seen: set[tuple[int, int]] = set()  # folders, since links may lead in circles
    # os.walk passes over folders that it may not read, unless told otherwise.
    for parent, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
        place = Path(parent)
        identity = (place.stat().st_dev, place.stat().st_ino)
        if identity in seen:
            folders.clear()
            continue
        seen.add(identity)
        if place != folder and is_saved_dataset(place):
            raise UserError(
                f"{place}: a dataset saved with save_to_disk, within {folder}; give it as a source of its own"
            )
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (place / name for name in names if not name.startswith("."))


def _raise(error: OSError) -> None:
    raise error


def _matching(pattern: Path) -> list[Path]:
    found = sorted(Path(name) for name in glob.glob(str(pattern), recursive=True))
    files = [path for path in found if not path.is_dir()]
    if not files:
        raise UserError(f"{pattern}: no file matches this pattern; relative paths start at {Path.cwd()}")
    check_kinds(str(pattern), (path.name for path in files))
    for path in files:
        _check_link(path)
    return files


def check_kinds(pattern: str, names: Iterable[str]) -> None:
    """A pattern says which files are meant; to leave out some of them would lose rows without a word."""
    if others := [name for name in names if not is_data(name)]:
        raise UserError(
            f"{pattern}: matches {', '.join(others[:3])} too, which is not a kind of file that is read; narrow the "
            f"pattern, as *.jsonl does; {expected_kinds()}"
        )


def _check_link(path: Path) -> None:
    if path.is_symlink() and not path.exists():
        raise UserError(f"{path}: a link to {os.readlink(path)}, which does not exist")


def _close_names(path: Path) -> str:
    if not path.parent.is_dir():
        return f" (there is no folder {path.parent} either)"
    close = difflib.get_close_matches(path.name, [child.name for child in path.parent.iterdir()], n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(str(path.parent / name) for name in close)}?" if close else ""
