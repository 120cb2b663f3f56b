"""Which function reads which kind of file."""

from __future__ import annotations

from collections.abc import Callable

from finetune.data.sources.compression import COMPRESSIONS
from finetune.data.sources.file import File, Labelled, Numbered, file_rows, kind_of
from finetune.data.sources.json_array import json_file
from finetune.data.sources.lines import csv_file, jsonl, txt
from finetune.data.sources.tables import arrow, parquet

# By the end of the name, without a compression's.
READERS: dict[str, Callable[[File], Numbered]] = {
    ".json": json_file,
    ".jsonl": jsonl,
    ".ndjson": jsonl,
    ".csv": csv_file,
    ".tsv": csv_file,
    ".txt": txt,
    ".parquet": parquet,
    ".arrow": arrow,
}


def is_data(name: str) -> bool:
    """Whether a file of this name is one that is read."""
    return kind_of(name)[0] in READERS


def expected_kinds() -> str:
    """For messages."""
    kinds = ", ".join(kind.lstrip(".") for kind in READERS)
    return f"expected {kinds}, or one of them compressed ({', '.join(COMPRESSIONS)})"


def rows_of(file: File) -> Labelled:
    """(label, number, row or BadRow) of a file, from the start; a UserError where it cannot be read on."""
    return file_rows(file, READERS[kind_of(file.name)[0]])
