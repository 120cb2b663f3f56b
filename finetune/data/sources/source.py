"""A recipe's source, opened: its rows as often as they are needed, and a digest of its content.

Files, or a dataset that `datasets` reads; and `split` as `datasets` writes it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import pyarrow
import pyarrow.parquet

from finetune.data.samples import BadRow
from finetune.data.sources.arrow_features import Table
from finetune.data.sources.files import (
    DAMAGED,
    File,
    LabelledRows,
    file_digest,
    kind_of,
    package_errors,
    seekable_content,
)
from finetune.data.sources.locations import is_saved_dataset, local_files, remote_files
from finetune.data.sources.readers import ROWS_AT_ONCE, decode_text, is_document, is_text, rows_of, rows_of_batch
from finetune.data.sources.splits import files_of_split
from finetune.errors import UserError
from finetune.recipe.schema import Source
from finetune.recipe.urls import is_url, without_credentials

OnBadRow = Callable[[str, int, str], None]  # label, number, message


def raise_bad_row(label: str, number: int, message: str) -> NoReturn:
    """Raises UserError for a bad row, the default."""
    raise UserError(f"{label}:{number}: {message}. Fix: correct the row")


class SourceReader:
    """A source that exists: its rows, and a digest of its content (not of the recipe's settings)."""

    def __init__(self, source: Source, streaming: bool = False):
        """streaming: remote files and datasets of the hub are read over the network, not fetched beforehand.

        Raises UserError if there is no such file, folder, URL or dataset, or it cannot be reached.
        """
        self.source = source
        self._content = _content(source, streaming)

    @property
    def text_unit(self) -> str | None:
        """Returns the unit of a row of its txt files; None if it has none."""
        files = self._content
        return files.text_unit if isinstance(files, _Files) and files.has_text else None

    @property
    def note(self) -> str | None:
        """Returns a note on the files of its folder that are left out; None if there are none."""
        return self._content.note if isinstance(self._content, _Files) else None

    def digest(self) -> str:
        """Returns text that changes when the content does: files' names and bytes, or the dataset's fingerprint."""
        return self._content.digest()

    def estimated_rows(self) -> int | None:
        """Returns an approximate number of rows; None if only reading all of them would tell."""
        count = self._content.estimated_rows()
        return count if count is None or self.source.limit is None else min(count, self.source.limit)

    def readable_and_bad(self) -> LabelledRows:
        """Yields (label, number, row or BadRow), `limit` of them from the start. Raises UserError and OSError as it
        goes."""
        return islice(self._content.rows(), self.source.limit)

    def rows(self, on_bad_row: OnBadRow = raise_bad_row) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Yields (label, number, row), `limit` of them with the bad ones; these go to `on_bad_row` instead.

        From the start, at every call. Raises UserError if the rest cannot be read.
        """
        for label, number, row in self.readable_and_bad():
            if isinstance(row, BadRow):
                on_bad_row(label, number, str(row))
            else:
                yield label, number, row


def read_rows(source: Source, on_bad_row: OnBadRow = raise_bad_row) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yields rows of a source as (file or dataset, number, object); numbers as the package's docstring says.

    Raises UserError with file and line for rows that cannot be read.
    """
    return SourceReader(source).rows(on_bad_row)


def _content(source: Source, streaming: bool) -> _Files | HubRows | SavedRows:
    path = source.path.removeprefix("file://")
    folder, notes = Path(path).expanduser(), list[str | None]()  # of a folder's split

    def choose(names: list[str]) -> list[str]:
        shown, about = without_credentials(source.path), folder / "README.md"
        readme = about.read_text("utf-8", "replace") if not is_url(path) and about.is_file() else None
        taken, note = files_of_split(shown, names, parse_split(shown, source.split).name, source.config, readme)
        notes.append(note)
        return taken

    try:
        if is_url(path):
            files = remote_files(path, streaming, choose)
        elif is_saved_dataset(folder):
            _check_config(source)
            return SavedRows(source, folder)
        else:
            files = local_files(path, choose)
    except OSError as error:
        place = error.filename or source.path
        raise UserError(f"{place}: cannot be read: {error.strerror}. Fix: check the path and its permissions") from None
    if not files:
        return HubRows(source, streaming)
    if not notes:
        _check_settings(source)
    return _Files(source, files, counted=not (is_url(path) and streaming), note=notes[0] if notes else None)


def _check_settings(source: Source) -> None:
    """Raises UserError for settings that only a dataset of the hub has: without them other rows would be read."""
    _check_config(source)
    shown = without_credentials(source.path)
    name = parse_split(shown, source.split).name
    if name != "train":
        raise UserError(
            f"{shown}: files are one split, called `train`, and have no `{name}`. Fix: give the files that hold it as "
            "`path`, or their folder, or a part of these, such as `split: train[:1000]`"
        )


def _check_config(source: Source) -> None:
    if source.config is not None:
        raise UserError(
            f"{without_credentials(source.path)}: `config: {source.config}` is for datasets of the hub; files have "
            "no configurations. Fix: remove it"
        )


class _Files:
    """Files one after the other, or the part of them that `split` takes."""

    def __init__(self, source: Source, files: list[File], counted: bool, note: str | None = None):
        """counted: the rows may be read once just to count them. note: on files that are left out."""
        self.note = note
        self._path, self._split, self._files = without_credentials(source.path), source.split, files
        self._part = parse_split(self._path, source.split)
        self.text_unit = source.text_unit or ("file" if all(is_document(file.name) for file in files) else "line")
        self.has_text = any(is_text(file.name) for file in files)
        if source.text_unit and not self.has_text:
            raise UserError(f"{self._path}: `text_unit` is for txt files, and there is none. Fix: remove it")
        if not counted:
            self._part.check_streamed(self._path, source.split)

    def digest(self) -> str:
        """One sha256: there may be a hundred thousand files."""
        every = "\n".join(f"{file.label} {file.digest()}" for file in self._files)
        return hashlib.sha256(every.encode("utf-8", "surrogateescape")).hexdigest()

    def estimated_rows(self) -> int | None:
        return estimated_rows(self._files) if self._split == self._part.name else None

    def rows(self) -> LabelledRows:
        begin, end = self._part.bounds(lambda: self._count)
        seen = 0
        for seen, row in enumerate(islice(self._all(), end), start=1):
            if seen > begin:
                yield row
        if seen <= begin:
            raise UserError(
                f"{self._path}: `split: {self._split}` takes no rows, for there are only {seen}. Fix: begin at one of "
                "these"
            )

    def _all(self) -> LabelledRows:
        return (row for file in self._files for row in rows_of(file, self.text_unit))

    @cached_property
    def _count(self) -> int:
        """Rows of all files, the bad ones too; takes one pass."""
        return sum(1 for _ in self._all())


# --- datasets of the hub and those that `save_to_disk` wrote, read by `datasets`, which takes a second to import


class HubRows:
    """A dataset of the hub, loaded, or streamed without loading it whole."""

    def __init__(self, source: Source, streaming: bool):
        """Raises UserError if there is no such dataset, configuration or split, or it cannot be reached."""
        import datasets

        self._label = f"{source.path}[{source.split}]"
        try:
            if streaming:
                import datasets

                # The same as load_dataset(streaming=True); the builder also knows the commit.
                builder: Any = datasets.load_dataset_builder(source.path, source.config)
                if "[" not in source.split:
                    self._rows = builder.as_streaming_dataset(split=source.split)
                else:
                    part = parse_split(source.path, source.split)
                    part.check_streamed(source.path, source.split)
                    begin, end = part.bounds(lambda: 0)
                    rows = builder.as_streaming_dataset(split=part.name).skip(begin)
                    self._rows = rows if end is None else rows.take(end - begin)
                # `hash` is the commit of the repository on the hub, or a digest of the data files' names, sizes and
                # times; a digest of the rows themselves would need reading them all.
                self._digest = (
                    f"streamed {source.path} {source.config} {source.split} {builder.hash} {builder.config_id}"
                )
            else:
                self._rows = datasets.load_dataset(source.path, source.config, split=source.split)
                # Of content and history; `datasets` has it only under this name.
                self._digest = self._rows._fingerprint
        except _hub_errors() as error:
            raise UserError(
                f"{source.path}: no local file or folder of this name in {Path.cwd()}. As a dataset of the hub it "
                f"cannot be loaded: {_first_line(error)}\nFix: check the name, `config` and `split` ({source.split}), "
                f"which may be {FORMS}; a gated or private dataset needs `hf auth login`; without a network, give a "
                "local file"
            ) from None

    def digest(self) -> str:
        return f"hub {self._digest}"

    def estimated_rows(self) -> int | None:
        return len(self._rows) if isinstance(self._rows, Sized) else None

    def rows(self) -> LabelledRows:
        return dataset_rows(self._rows, self._label)


class SavedRows:
    """A folder that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote."""

    def __init__(self, source: Source, folder: Path):
        import datasets

        self._folder = folder
        part = parse_split(source.path, source.split)
        try:
            saved = datasets.load_from_disk(str(folder))
        except (OSError, ValueError, KeyError, TypeError, pyarrow.ArrowException) as error:
            raise UserError(
                f"{folder}: saved with save_to_disk, but it cannot be loaded: {_first_line(error)}. Fix: save it again"
            ) from None
        named: dict[Any, datasets.Dataset] = (
            dict(saved) if isinstance(saved, datasets.DatasetDict) else {"train": saved}
        )
        if part.name not in named:
            splits = ", ".join(f"`{name}`" for name in named)
            raise UserError(f"{folder}: has no split `{part.name}`; it has {splits}. Fix: name one as `split`")
        dataset = named[part.name]
        begin, end = part.bounds(lambda: len(dataset))
        end = len(dataset) if end is None else min(end, len(dataset))
        self._begin = min(begin, end)
        self._rows = dataset if part.is_all else dataset.select(range(self._begin, end))
        self._label = f"{source.path}[{part.name}]"

    def estimated_rows(self) -> int:
        return len(self._rows)

    def digest(self) -> str:
        # Of the bytes: the fingerprint that is saved with them stays when someone changes a file.
        files = sorted(path for path in self._folder.rglob("*") if path.is_file())
        return "saved " + " ".join(f"{path.relative_to(self._folder)} {file_digest(path)}" for path in files)

    def rows(self) -> LabelledRows:
        return dataset_rows(self._rows, self._label, self._begin)


def dataset_rows(dataset: Any, label: str, begin: int = 0) -> LabelledRows:
    """Yields rows from begin + 1, their values as those of a file that `datasets` wrote. Raises UserError if there is
    none, or if the dataset breaks off."""
    number, table = begin, None
    try:
        # Tables: `datasets` would decode each image as soon as its row is read, and keep the indices of classes.
        for part in dataset.with_format("arrow").iter(batch_size=ROWS_AT_ONCE):
            if table is None or part.schema.names != table.names:
                table = Table.of(label, part.schema, decode_text)
            for row in rows_of_batch(table, part):
                number += 1
                yield label, number, row
    except _hub_errors() as error:
        raise UserError(
            f"{label}: cannot be read beyond row {number}: {_first_line(error)}. Fix: check the network and the disk, "
            "and start again"
        ) from None
    if number == begin:
        raise UserError(f"{label}: the dataset has no rows. Fix: check `split`")


def _hub_errors() -> tuple[type[BaseException], ...]:
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    return OSError, ValueError, TypeError, HfHubHTTPError, HFValidationError, DatasetsError, pyarrow.ArrowException


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


# --- `split`: a name, and a part of it


FORMS = "train, train[:1000], train[100:200], train[-100:] or train[10%:20%]"
_NUMBER = r"(?:(-?\d[\d_]*)(%)?)?"
_MOST_ROWS = 10**15
_SLICE = re.compile(rf"([\w.-]+)(?:\[{_NUMBER}:{_NUMBER}\])?")


@dataclass(frozen=True)
class Slice:
    """Rows [begin, end) of a split, counted from 0, or from the end if negative; or bounds in percent of it."""

    name: str
    begin: int | None = None
    end: int | None = None
    percent: bool = False

    @property
    def is_all(self) -> bool:
        return self.begin is None and self.end is None

    @property
    def needs_count(self) -> bool:
        """Returns whether the bounds depend on the number of rows."""
        return self.percent or (self.begin or 0) < 0 or (self.end or 0) < 0

    def check_streamed(self, path: str, split: str) -> None:
        """Raises UserError if a stream, which does not know the number of its rows, cannot have these bounds."""
        if self.needs_count:
            raise UserError(
                f"{path}: `split: {split}` cannot be streamed: the number of rows is not known. Fix: give numbers of "
                "rows from the start, or set `data.streaming: false`"
            )

    def bounds(self, count: Callable[[], int]) -> tuple[int, int | None]:
        """Returns [begin, end) from 0; `count`, the number of all rows, is called only when needed.

        Rounds as datasets does. train[10%:50%] of 25 rows -> (2, 12); train[-3:] of 25 -> (22, None).
        """
        if not self.needs_count:
            return self.begin or 0, self.end
        rows = count()

        def place(bound: int) -> int:
            from_start = round(bound * rows / 100) if self.percent else bound
            return max(from_start + rows, 0) if bound < 0 else from_start

        return place(self.begin or 0), None if self.end is None else place(self.end)


def parse_split(path: str, split: str) -> Slice:
    """Raises UserError for text that is not a split, or takes no rows. path: for messages."""
    match = _SLICE.fullmatch(split.strip())
    if not match:
        raise UserError(f"{path}: `split: {split}` is not understood. Fix: write it in a form such as {FORMS}")
    name, begin, begin_percent, end, end_percent = match.groups()
    units = {bool(percent) for bound, percent in ((begin, begin_percent), (end, end_percent)) if bound}
    if len(units) == 2:
        raise UserError(f"{path}: `split: {split}` mixes rows and percent. Fix: give both bounds in one of them")
    too_long = any(bound and len(bound) > 30 for bound in (begin, end))  # Python refuses to read thousands of digits
    first, last = (0, None) if too_long else (int(begin or 0), int(end) if end else None)
    if too_long or max(abs(first), abs(last or 0)) > _MOST_ROWS:
        raise UserError(
            f"{path}: `split: {split[:80]}` counts more rows than any data has ({_MOST_ROWS:,} at most). Fix: lower "
            "its bounds"
        )
    if True in units and max(abs(first), abs(last or 0)) > 100:
        raise UserError(f"{path}: `split: {split}` goes beyond 100 %. Fix: give bounds of at most 100 %")
    if last is not None and (first < 0) == (last < 0) and first >= last:
        raise UserError(
            f"{path}: `split: {split}` takes no rows: it ends where it begins or before. Fix: give a later end"
        )
    return Slice(name, first if begin else None, last, True in units)


# --- approximate number of rows, for progress only; never for reading


ESTIMATE_BYTES = 1 << 20
LINE_KINDS = (".jsonl", ".ndjson", ".txt", ".csv", ".tsv")


def estimated_rows(files: Sequence[File]) -> int | None:
    """Returns the rows by the footers of parquet files and the first megabyte of files of lines; None for others."""
    total = 0
    for file in files:
        kind, compression = kind_of(file.name)
        try:
            if kind == ".parquet" and not compression:
                with seekable_content(file) as stream:
                    total += pyarrow.parquet.read_metadata(stream).num_rows
                continue
            size = file.size()
            if kind not in LINE_KINDS or compression or size is None:
                return None
            with file.open() as stream:
                head = stream.read(ESTIMATE_BYTES)
        except (OSError, UserError, *DAMAGED, *package_errors()):  # reading it raises the better error
            return None
        if not (lines := head.count(b"\n")):
            return None
        total += round(lines * size / len(head))
    return total
