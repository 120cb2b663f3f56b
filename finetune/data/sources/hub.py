"""Datasets of the hub, and those that `save_to_disk` wrote: what `datasets` reads for us."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow

from finetune.data.sources.digests import file_digest
from finetune.data.sources.file import Labelled
from finetune.data.sources.slices import FORMS, parse_split
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
            self._rows, self._digest = _streamed(source) if streaming else _loaded(source)
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

    def rows(self) -> Labelled:
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
        self._rows = dataset if part.is_whole else dataset.select(range(self._begin, end))
        self._label = f"{source.path}[{part.name}]"

    def estimated_rows(self) -> int:
        return len(self._rows)

    def digest(self) -> str:
        # Of the bytes: the fingerprint that is saved with them stays when someone changes a file.
        files = sorted(path for path in self._folder.rglob("*") if path.is_file())
        return "saved " + " ".join(f"{path.relative_to(self._folder)} {file_digest(path)}" for path in files)

    def rows(self) -> Labelled:
        return dataset_rows(self._rows, self._label, self._begin)


def dataset_rows(dataset: Iterable[Any], label: str, begin: int = 0) -> Labelled:
    """Rows from begin + 1; a UserError where there is none, or where the dataset breaks off."""
    number = begin
    try:
        for number, row in enumerate(dataset, start=begin + 1):
            yield label, number, dict(row)
    except _hub_errors() as error:
        raise UserError(f"{label}: cannot be read beyond row {number}: {_first_line(error)}") from None
    if number == begin:
        raise UserError(f"{label}: the dataset has no rows; check `split`")


def _loaded(source: Source) -> tuple[Iterable[Any], str]:
    # Imported here: it takes a second, and local files do without.
    import datasets

    dataset = datasets.load_dataset(source.path, source.config, split=source.split)
    return dataset, dataset._fingerprint


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
                f"{source.path}: `split: {source.split}` cannot be streamed: nobody knows how many rows a stream has; "
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
        found = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, TypeError, pyarrow.ArrowException) as error:
        raise UserError(
            f"{folder}: saved with save_to_disk, but it cannot be loaded: {_first_line(error)}; save it again"
        ) from None
    named: dict[Any, Dataset] = dict(found) if isinstance(found, datasets.DatasetDict) else {"train": found}
    if split not in named:
        raise UserError(f"{folder}: has no split `{split}`; it has {', '.join(f'`{name}`' for name in named)}")
    return named[split]


def _hub_errors() -> tuple[type[BaseException], ...]:
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    return OSError, ValueError, TypeError, HfHubHTTPError, HFValidationError, DatasetsError, pyarrow.ArrowException


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
