"""Rows of a recipe's source: local files, folders of them, datasets of the hub.

A row is (file or dataset, number, object). Numbers start at 1: lines of the file for jsonl, csv and txt (the line a
csv record begins on, the header is line 1); items for a json array, rows for parquet and the hub.
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pyarrow
import pyarrow.parquet

from finetune.data.samples import BadRow
from finetune.errors import UserError
from finetune.recipe.schema import Source

if TYPE_CHECKING:
    from datasets import Dataset

OnBadRow = Callable[[str, int, str], None]  # label, number, message
_Found = Iterator[tuple[str, int, "dict[str, Any] | BadRow"]]

LARGEST_FIELD = 2**31 - 1  # csv's own limit, 128 KiB, is less than a long document


def raise_bad_row(label: str, number: int, message: str) -> NoReturn:
    """What happens to a bad row unless the caller says otherwise."""
    raise UserError(f"{label}:{number}: {message}")


class Opened:
    """A source that was found: its rows, and a digest of its content (not of the recipe's settings)."""

    def __init__(self, source: Source):
        """Raises UserError where there is no such file, folder or dataset, or it cannot be reached."""
        self.source = source
        try:
            self.files = _local_files(source.path)
        except OSError as error:
            raise UserError(f"{source.path}: cannot be read: {error.strerror}") from None
        self._dataset = None if self.files else _hub_dataset(source)

    def digest(self) -> str:
        """Changes when the content does: sha256 over the files' names and bytes, or the dataset's fingerprint."""
        if self._dataset is not None:
            return f"hub {self._dataset._fingerprint}"
        return " ".join(f"{file.name} {file.stat().st_size} {_sha256(file)}" for file in self.files)

    def rows(self, on_bad_row: OnBadRow = raise_bad_row) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """(label, number, row), `limit` of them with the bad ones; these go to `on_bad_row` instead."""
        for label, number, row in islice(self._found(), self.source.limit):
            if isinstance(row, BadRow):
                on_bad_row(label, number, str(row))
            else:
                yield label, number, row

    def _found(self) -> _Found:
        if self._dataset is not None:
            return _dataset_rows(self._dataset, f"{self.source.path}[{self.source.split}]")
        return (found for file in self.files for found in _file_rows(file))


def read_rows(source: Source, on_bad_row: OnBadRow = raise_bad_row) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Rows of a source as (file or dataset, number, object); see the module for what the number counts.

    Raises UserError with file and line for what cannot be read.
    """
    return Opened(source).rows(on_bad_row)


def _local_files(name: str) -> list[Path]:
    """The files of a local source, sorted; none where the name can only be a dataset of the hub."""
    path = Path(name).expanduser()
    if path.is_dir():
        return _files_of_folder(path)
    if path.is_file():
        if path.suffix.lower() not in READERS:
            raise UserError(f"{path}: `{path.suffix or path.name}` is not a kind of file that is read; {_kinds()}")
        return [path]
    if path.suffix.lower() in READERS or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"{path}: no such file or folder{_close_names(path)}; relative paths start at {Path.cwd()}")
    return []


def _files_of_folder(folder: Path) -> list[Path]:
    names = sorted(child for child in folder.iterdir() if child.is_file() and not child.name.startswith("."))
    files = [child for child in names if child.suffix.lower() in READERS]
    if not files:
        inside = ", ".join(child.name for child in names[:5]) or "no files"
        raise UserError(f"{folder}: no data files in this folder (it has {inside}); {_kinds()}")
    return files


def _kinds() -> str:
    return f"expected {', '.join(kind.lstrip('.') for kind in READERS)}"


def _close_names(path: Path) -> str:
    if not path.parent.is_dir():
        return f" (there is no folder {path.parent} either)"
    close = difflib.get_close_matches(path.name, [child.name for child in path.parent.iterdir()], n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(str(path.parent / name) for name in close)}?" if close else ""


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    return digest.hexdigest()


# --- local files


def _file_rows(path: Path) -> _Found:
    """Rows of one file; an empty one is an error."""
    number = 0
    try:
        for number, row in READERS[path.suffix.lower()](path):
            yield str(path), number, row
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    if not number:
        raise UserError(f"{path}: the file has no rows; put data into it or take it out of the recipe")


def _lines(path: Path) -> Iterator[tuple[int, str | BadRow]]:
    """(line number, text with its line end) of a UTF-8 file, with or without a byte order mark."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                yield number, BadRow(f"byte {error.start + 1} of the line is not UTF-8; save the file as UTF-8")


def _jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    for number, line in _lines(path):
        if isinstance(line, BadRow):
            yield number, line
        elif line.strip():
            yield number, _json_object(line)


def _json_object(line: str) -> dict[str, Any] | BadRow:
    try:
        return _object(json.loads(line.rstrip()))
    except json.JSONDecodeError as error:
        return BadRow(f"not valid JSON: {error.msg} at column {error.colno}; expected one object a line")
    except (RecursionError, ValueError) as error:  # nested without end, a number of thousands of digits
        return BadRow(f"JSON that cannot be read: {error}")


def _object(value: Any) -> dict[str, Any] | BadRow:
    if isinstance(value, dict):
        return value
    return BadRow(f"expected an object with columns, got {json.dumps(value)[:40]}")


def _json(path: Path) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """An array of objects; objects line by line are read too, since many such files are called .json."""
    text = _whole_text(path)
    if not text.lstrip().startswith("["):
        yield from _jsonl(path)
        return
    try:
        items = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not valid JSON: {error.msg} at column {error.colno}") from None
    except (RecursionError, ValueError) as error:
        raise UserError(f"{path}: JSON that cannot be read: {error}") from None
    for number, item in enumerate(items, start=1):
        yield number, _object(item)


def _whole_text(path: Path) -> str:
    raw = path.read_bytes()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise UserError(f"{path}:{line}: not UTF-8 text; save the file as UTF-8") from None


def _csv(path: Path) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    csv.field_size_limit(LARGEST_FIELD)
    # strict: a stray quote is an error, not a silent join of everything that follows.
    reader = csv.reader(_text_lines(path), strict=True)
    begins = 1
    try:
        header = next(reader, [])
        _check_header(path, header)
        begins = reader.line_num + 1
        for cells in reader:
            if cells:
                yield begins, _csv_row(header, cells)
            begins = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}:{begins}: not valid CSV: {error}; quotes in a quoted cell are doubled") from None


def _text_lines(path: Path) -> Iterator[str]:
    """Lines of a file in which one line cannot be left out, because a record may go over several."""
    for number, line in _lines(path):
        if isinstance(line, BadRow):
            raise UserError(f"{path}:{number}: {line}")
        yield line


def _check_header(path: Path, header: list[str]) -> None:
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise UserError(f"{path}:1: the header has `{twice[0]}` twice; rename one of the columns")


def _csv_row(header: list[str], cells: list[str]) -> dict[str, Any] | BadRow:
    if len(cells) != len(header):
        return BadRow(f"{len(cells)} cells in a table of {len(header)} columns; quote cells that hold a comma")
    return dict(zip(header, cells, strict=True))


def _parquet(path: Path) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: not a readable parquet file: {str(error).splitlines()[0]}") from None


def _txt(path: Path) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    for number, line in _lines(path):
        if isinstance(line, BadRow):
            yield number, line
        elif line.strip():
            yield number, {"text": line.rstrip("\r\n")}


READERS: dict[str, Callable[[Path], Iterator[tuple[int, dict[str, Any] | BadRow]]]] = {
    ".json": _json,
    ".jsonl": _jsonl,
    ".csv": _csv,
    ".parquet": _parquet,
    ".txt": _txt,
}


# --- the hub


def _hub_dataset(source: Source) -> Dataset:
    # Imported here: it takes a second, and local files do without.
    import datasets
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return datasets.load_dataset(source.path, source.config, split=source.split)
    except (OSError, ValueError, HfHubHTTPError, HFValidationError, DatasetsError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{source.path}: no local file or folder of this name in {Path.cwd()}, and as a dataset of the hub it "
            f"cannot be loaded: {reason}\nCheck the name, `config` and `split` ({source.split}); a gated or private "
            "dataset needs `hf auth login`; without a network, give a local file."
        ) from None


def _dataset_rows(dataset: Dataset, label: str) -> _Found:
    number = 0
    for number, row in enumerate(dataset, start=1):
        yield label, number, dict(row)
    if not number:
        raise UserError(f"{label}: the dataset has no rows; check `split`")
