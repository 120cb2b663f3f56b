"""About how many rows files have, for the person who waits; never for what is read."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow.parquet

from finetune.data.sources.file import DAMAGED, File, kind_of, package_errors, seekable_content
from finetune.errors import UserError

HEAD_BYTES = 1 << 20
LINES = (".jsonl", ".ndjson", ".txt", ".csv", ".tsv")


def estimated_rows(files: Sequence[File]) -> int | None:
    """None where it would have to be read to know."""
    counts = [_rows(file) for file in files]
    return None if None in counts else sum(count for count in counts if count is not None)


def _rows(file: File) -> int | None:
    """By the footer of a parquet file, by the first megabyte of a file of lines."""
    kind, compression = kind_of(file.name)
    try:
        if kind == ".parquet" and not compression:
            with seekable_content(file) as stream:
                return pyarrow.parquet.read_metadata(stream).num_rows
        size = file.size()
        if kind not in LINES or compression or size is None:
            return None
        with file.open() as stream:
            head = stream.read(HEAD_BYTES)
    except (OSError, UserError, *DAMAGED, *package_errors()):  # which reading it will say better
        return None
    lines = head.count(b"\n")
    return round(lines * size / len(head)) if lines else None
