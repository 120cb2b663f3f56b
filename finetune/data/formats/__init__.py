"""What a row of a dataset says, whatever its columns are called: `table.py` has the formats, `detect.py` tells them."""

from __future__ import annotations

from collections.abc import Mapping

from finetune.data.formats.detect import Detected, detect_format, hint, looks_like, nearest_format
from finetune.data.formats.table import FIELDS, FORMATS, Fields, check_columns, read
from finetune.data.formats.values import Misfit, Row
from finetune.data.samples import BadRow, Sample

__all__ = [
    "FIELDS",
    "FORMATS",
    "Detected",
    "Fields",
    "Row",
    "check_columns",
    "detect_format",
    "looks_like",
    "nearest_format",
    "parse_row",
]


def parse_row(row: Row, format: str, columns: Mapping[str, str] | None = None) -> Sample:
    """The sample in a row of `format`, with `columns` naming the file's column for a field of the format.

    Raises BadRow; for a row that is not of this format at all it names the one that fits, or comes nearest.
    """
    try:
        return read(row, format, columns)
    except Misfit as error:
        raise BadRow(f"format `{format}`: {error}{hint(row, format)}") from None
    except BadRow as error:
        raise BadRow(f"format `{format}`: {error}") from None
