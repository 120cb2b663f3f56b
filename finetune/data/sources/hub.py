"""Datasets of the hub and those that `save_to_disk` wrote, read by `datasets`; and `split` as `datasets` writes it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow

from finetune.data.sources.files import LabelledRows, file_digest
from finetune.errors import UserError
from finetune.recipe.schema import Source

if TYPE_CHECKING:
    from datasets import Dataset


class HubRows:
    """A dataset of the hub, loaded, or streamed without loading it whole."""

    def __init__(self, source: Source, streaming: bool):
        """Raises UserError where there is no such dataset, configuration or split, or it cannot be reached."""
        self._label = f"{source.path}[{source.split}]"
        try:
            if streaming:
                self._rows, self._digest = _streamed(source)
            else:
                # Imported here: it takes a second, and local files do not need it.
                import datasets

                self._rows = datasets.load_dataset(source.path, source.config, split=source.split)
                self._digest = self._rows._fingerprint
        except _hub_errors() as error:
            raise UserError(
                f"{source.path}: no local file or folder of this name in {Path.cwd()}, and as a dataset of the hub it "
                f"cannot be loaded: {_first_line(error)}\nCheck the name, `config` and `split` ({source.split}), which "
                f"may be {FORMS}; a gated or private dataset needs `hf auth login`; without a network, give a "
                "local file."
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
        self._folder = folder
        part = parse_split(source.path, source.split)
        dataset = _saved(folder, part.name)
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


def dataset_rows(dataset: Iterable[Any], label: str, begin: int = 0) -> LabelledRows:
    """Rows from begin + 1. Raises UserError where there is none, or where the dataset breaks off."""
    number = begin
    try:
        for number, row in enumerate(dataset, start=begin + 1):
            yield label, number, dict(row)
    except _hub_errors() as error:
        raise UserError(f"{label}: cannot be read beyond row {number}: {_first_line(error)}") from None
    if number == begin:
        raise UserError(f"{label}: the dataset has no rows; check `split`")


def _streamed(source: Source) -> tuple[Iterable[Any], str]:
    import datasets

    # What load_dataset(streaming=True) does as well; the builder also knows the commit.
    builder = datasets.load_dataset_builder(source.path, source.config)
    dataset: Any
    if "[" not in source.split:
        dataset = builder.as_streaming_dataset(split=source.split)
    else:
        part = parse_split(source.path, source.split)
        if part.needs_count:
            raise UserError(
                f"{source.path}: `split: {source.split}` cannot be streamed: the number of its rows is not known; "
                "give numbers of rows from the start, or set `data.streaming: false`"
            )
        dataset = builder.as_streaming_dataset(split=part.name)
        begin, end = part.bounds(lambda: 0)
        dataset = dataset.skip(begin)
        dataset = dataset if end is None else dataset.take(end - begin)
    # `hash` is the commit of the repository on the hub, or a digest of the data files' names, sizes and times; of the
    # rows themselves there is no digest without reading them all.
    return dataset, f"streamed {source.path} {source.config} {source.split} {builder.hash} {builder.config_id}"


def _saved(folder: Path, split: str) -> Dataset:
    import datasets

    try:
        saved = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, TypeError, pyarrow.ArrowException) as error:
        raise UserError(
            f"{folder}: saved with save_to_disk, but it cannot be loaded: {_first_line(error)}; save it again"
        ) from None
    named: dict[Any, Dataset] = dict(saved) if isinstance(saved, datasets.DatasetDict) else {"train": saved}
    if split not in named:
        raise UserError(f"{folder}: has no split `{split}`; it has {', '.join(f'`{name}`' for name in named)}")
    return named[split]


def _hub_errors() -> tuple[type[BaseException], ...]:
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    return OSError, ValueError, TypeError, HfHubHTTPError, HFValidationError, DatasetsError, pyarrow.ArrowException


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


# --- `split`: a name, and a part of it


FORMS = "train, train[:1000], train[100:200], train[-100:] or train[10%:20%]"
_NUMBER = r"(?:(-?\d[\d_]*)(%)?)?"
_SLICE = re.compile(rf"([\w.-]+)(?:\[{_NUMBER}:{_NUMBER}\])?")


@dataclass(frozen=True)
class Slice:
    """Rows [begin, end) of a split, counted from 0, or from the end where negative; or bounds in percent of it."""

    name: str
    begin: int | None = None
    end: int | None = None
    percent: bool = False

    @property
    def is_all(self) -> bool:
        return self.begin is None and self.end is None

    @property
    def needs_count(self) -> bool:
        """Whether the bounds depend on the number of rows."""
        return self.percent or (self.begin or 0) < 0 or (self.end or 0) < 0

    def bounds(self, count: Callable[[], int]) -> tuple[int, int | None]:
        """[begin, end) from 0; `count`, the number of all rows, is called only where it is needed.

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
        raise UserError(f"{path}: `split: {split}` is not understood; valid are forms such as {FORMS}")
    name, begin, begin_percent, end, end_percent = match.groups()
    units = {bool(percent) for bound, percent in ((begin, begin_percent), (end, end_percent)) if bound}
    if len(units) == 2:
        raise UserError(f"{path}: `split: {split}` mixes rows and percent; give both bounds in one of them")
    part = Slice(name, int(begin) if begin else None, int(end) if end else None, True in units)
    first, last = part.begin or 0, part.end
    if part.percent and max(abs(first), abs(last or 0)) > 100:
        raise UserError(f"{path}: `split: {split}` goes beyond 100 %")
    if last is not None and (first < 0) == (last < 0) and first >= last:
        raise UserError(f"{path}: `split: {split}` takes no rows, for it ends where it begins or before")
    return part
