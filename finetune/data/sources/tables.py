"""Tables: parquet, and arrow as a file or as a stream. Read a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from finetune.data.samples import BadRow
from finetune.data.sources.file import File, Numbered, seekable_content
from finetune.errors import UserError

ROWS_AT_ONCE = 128  # so that rows of 10 MB fit into memory


def parquet(file: File) -> Numbered:
    """Rows of a parquet file."""
    # pre_buffer, pyarrow's default, would hold all row groups at once.
    with seekable_content(file) as stream, pyarrow.parquet.ParquetFile(stream, pre_buffer=False) as table:
        _check_columns(file.label, table.schema_arrow)
        yield from _rows(table.iter_batches(batch_size=ROWS_AT_ONCE))


def arrow(file: File) -> Numbered:
    """Rows of an arrow file: the random-access kind, or the stream that `datasets` writes."""
    with seekable_content(file) as stream:
        is_file = stream.read(6) == b"ARROW1"
        stream.seek(0)
        with pyarrow.ipc.open_file(stream) if is_file else pyarrow.ipc.open_stream(stream) as reader:
            _check_columns(file.label, reader.schema)
            yield from _rows(_batches(reader))


def _batches(reader: Any) -> Iterator[pyarrow.RecordBatch]:
    if isinstance(reader, pyarrow.ipc.RecordBatchFileReader):
        return (reader.get_batch(i) for i in range(reader.num_record_batches))
    return iter(reader)


def _check_columns(label: str, schema: pyarrow.Schema) -> None:
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise UserError(f"{label}: the table has a column `{twice[0][:100]}` twice; rename one of them")


def _rows(batches: Iterable[pyarrow.RecordBatch]) -> Numbered:
    number = 0
    for batch in batches:
        for begin in range(0, batch.num_rows, ROWS_AT_ONCE):
            for row in _python_rows(batch.slice(begin, ROWS_AT_ONCE)):
                number += 1
                yield number, row


def _python_rows(batch: pyarrow.RecordBatch) -> list[dict[str, Any] | BadRow]:
    try:
        return batch.to_pylist()
    # A date beyond Python's, text that is not UTF-8: of the row, not of the file.
    except (ValueError, OverflowError, pyarrow.ArrowException) as error:
        if batch.num_rows == 1:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            return [BadRow(f"a value that cannot be read: {reason[:200]}")]
    return [row for i in range(batch.num_rows) for row in _python_rows(batch.slice(i, 1))]
