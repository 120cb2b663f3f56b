"""A recipe's source, opened: its rows as often as they are needed, and a digest of its content."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, Protocol

from finetune.data.samples import BadRow
from finetune.data.sources.files import File, LabelledRows
from finetune.data.sources.hub import HubRows, SavedRows, parse_split
from finetune.data.sources.locations import is_saved_dataset, local_files, remote_files
from finetune.data.sources.readers import estimated_rows, rows_of
from finetune.errors import UserError
from finetune.recipe.schema import Source
from finetune.recipe.urls import is_url, without_credentials

OnBadRow = Callable[[str, int, str], None]  # label, number, message


def raise_bad_row(label: str, number: int, message: str) -> NoReturn:
    """The default for bad rows: an error."""
    raise UserError(f"{label}:{number}: {message}")


class _Rows(Protocol):
    def digest(self) -> str: ...

    def rows(self) -> LabelledRows: ...

    def estimated_rows(self) -> int | None: ...


class SourceReader:
    """A source that exists: its rows, and a digest of its content (not of the recipe's settings)."""

    def __init__(self, source: Source, streaming: bool = False):
        """streaming: remote files and datasets of the hub are read where they are, not fetched beforehand.

        Raises UserError where there is no such file, folder, URL or dataset, or it cannot be reached.
        """
        self.source = source
        self._content = _content(source, streaming)

    def digest(self) -> str:
        """Changes when the content does: of the files' names and bytes, or of the dataset's fingerprint."""
        return self._content.digest()

    def estimated_rows(self) -> int | None:
        """About how many rows there are; None where only reading all of them would tell."""
        count = self._content.estimated_rows()
        return count if count is None or self.source.limit is None else min(count, self.source.limit)

    def rows(self, on_bad_row: OnBadRow = raise_bad_row) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """(label, number, row), `limit` of them with the bad ones; these go to `on_bad_row` instead.

        From the start, at every call. Raises UserError where the rest cannot be read.
        """
        for label, number, row in islice(self._content.rows(), self.source.limit):
            if isinstance(row, BadRow):
                on_bad_row(label, number, str(row))
            else:
                yield label, number, row


def read_rows(source: Source, on_bad_row: OnBadRow = raise_bad_row) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Rows of a source as (file or dataset, number, object); numbers as the package's docstring says.

    Raises UserError with file and line for what cannot be read.
    """
    return SourceReader(source).rows(on_bad_row)


def _content(source: Source, streaming: bool) -> _Rows:
    path = source.path.removeprefix("file://")
    if is_url(path):
        _check_settings(source)
        return _Files(source, remote_files(path, streaming), counted=not streaming)
    folder = Path(path).expanduser()
    try:
        if is_saved_dataset(folder):
            _check_config(source)
            return SavedRows(source, folder)
        files = local_files(path)
    except OSError as error:
        raise UserError(f"{error.filename or source.path}: cannot be read: {error.strerror}") from None
    if not files:
        return HubRows(source, streaming)
    _check_settings(source)
    return _Files(source, files, counted=True)


def _check_settings(source: Source) -> None:
    """Raises UserError for settings that only a dataset of the hub has: without them other rows would be read."""
    _check_config(source)
    shown = without_credentials(source.path)
    name = parse_split(shown, source.split).name
    if name != "train":
        raise UserError(
            f"{shown}: files are one split, called `train`, and have no `{name}`; give the files that hold it as "
            f"`path`, or a part of these, such as `split: train[:1000]`"
        )


def _check_config(source: Source) -> None:
    if source.config is not None:
        raise UserError(
            f"{without_credentials(source.path)}: `config: {source.config}` names a configuration of a dataset of the "
            "hub; files have none, so remove it"
        )


class _Files:
    """Files one after the other, or the part of them that `split` takes."""

    def __init__(self, source: Source, files: list[File], counted: bool):
        """counted: the rows may be read once just to count them."""
        self._path, self._split, self._files = without_credentials(source.path), source.split, files
        self._part = parse_split(self._path, source.split)
        if self._part.needs_count and not counted:
            raise UserError(
                f"{self._path}: `split: {source.split}` cannot be streamed: the number of its rows is not known; "
                "give numbers of rows from the start, or set `data.streaming: false`"
            )

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
            raise UserError(f"{self._path}: `split: {self._split}` takes no rows, for there are only {seen}")

    def _all(self) -> LabelledRows:
        return (row for file in self._files for row in rows_of(file))

    @cached_property
    def _count(self) -> int:
        """Rows of all files, the bad ones too; takes one pass."""
        return sum(1 for _ in self._all())
