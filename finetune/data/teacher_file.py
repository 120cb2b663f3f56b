"""A teacher's predictions in a parquet file (`objective.teacher`), a row for each example, in any order:

    input_ids   list of ints             its tokens
    labels      list of ints             as long: -100 if a token is not trained, else the token, not shifted
    ids         list of lists of ints    for every trained token, in order, k ids: the likeliest, or drawn ones
    log_probs   list of lists of floats  their natural log-probabilities at the temperature

input_ids and labels are those of `finetune inspect --json`: examples are found by them, so neither order nor weights of
sources matter. The schema's metadata has under `finetune` a JSON object; vocabulary is `vocabulary_digest`:

    {"vocabulary": "9f2c...", "temperature": 1.0, "sampled": false}

A file is checked and converted once, see finetune/data/predictions.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from finetune.data.predictions import (
    CODE_VERSION,
    Predictions,
    PredictionsWriter,
    Tokens,
    find_or_write,
    vocabulary_digest,
)
from finetune.data.sources.files import file_digest
from finetune.errors import UserError
from finetune.recipe.objective_settings import Distill

UNTRAINED = -100
ROUNDING = 1e-2  # by which probabilities that were stored in 16 bits may add up to more than 1


@dataclass(frozen=True)
class TeacherFile:
    """A parquet file of predictions whose columns and metadata were checked."""

    path: Path
    vocabulary: str
    temperature: float
    sampled: bool
    per_target: int  # k

    def predictions(self) -> Predictions:
        """Returns its predictions, checked row by row and converted the first time. Raises UserError."""
        code = f"teacher {CODE_VERSION} {file_digest(self.path)}"
        of = {"source": str(self.path), "format": "teacher", "temperature": self.temperature, "sampled": self.sampled}
        return find_or_write(hashlib.sha256(code.encode()).hexdigest(), self.per_target, of, self._fill)

    def _fill(self, writer: PredictionsWriter) -> None:
        number = 0
        with _opened(self.path) as table:
            for batch in table.iter_batches(batch_size=_ROWS_AT_ONCE, columns=list(_COLUMNS)):
                for i in range(batch.num_rows):
                    number += 1
                    try:
                        cells = {name: _values(batch.slice(i, 1), name, kind) for name, kind in _COLUMNS.items()}
                        writer.append(*_row(cells, self.per_target, self.sampled))
                    except (_Bad, pyarrow.ArrowException) as bad:
                        problem = str(bad).splitlines()[0][:300]
                        raise UserError(f"{self.path}: row {number}: {problem}. Fix: correct the row") from None


_ROWS_AT_ONCE = 128
_COLUMNS = {
    "input_ids": pyarrow.large_list(pyarrow.int32()),
    "labels": pyarrow.large_list(pyarrow.int32()),
    "ids": pyarrow.large_list(pyarrow.large_list(pyarrow.int32())),
    "log_probs": pyarrow.large_list(pyarrow.large_list(pyarrow.float32())),
}
_METADATA = {"vocabulary": str, "temperature": (int, float), "sampled": bool}


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[pyarrow.parquet.ParquetFile]:
    try:
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False, page_checksum_verification=True) as table:
            yield table
    except pyarrow.ArrowException as error:
        reason = str(error).splitlines()[0][:200]
        raise UserError(f"{path}: cannot be read as parquet: {reason}. Fix: write the file again") from None
    except OSError as error:
        raise UserError(
            f"objective.teacher: {path}: cannot be read: {error.strerror or error}. Fix: check the path and its "
            "permissions"
        ) from None


def read_teacher_file(path: Path) -> TeacherFile:
    """Reads the columns' names and the metadata. Raises UserError for missing or unknown parts."""
    with _opened(path) as table:
        schema = table.schema_arrow
        missing = [name for name in _COLUMNS if name not in schema.names]
        if missing:
            raise UserError(
                f"{path}: no column {', '.join(f'`{name}`' for name in missing)}. A teacher's file has "
                f"{', '.join(_COLUMNS)}, and this one {', '.join(schema.names)[:200]}. Fix: write all of these columns"
            )
        if not table.metadata.num_rows:
            raise UserError(f"{path}: the file has no rows. Fix: write the teacher's predictions into it")
        first = next(table.iter_batches(batch_size=1, columns=["ids"])).column(0).to_pylist()[0]
    example = '{"vocabulary": "...", "temperature": 1.0, "sampled": false}'
    metadata = None
    with contextlib.suppress(ValueError):
        metadata = json.loads((schema.metadata or {}).get(b"finetune", b"null"))
    if not isinstance(metadata, dict) or metadata.keys() != _METADATA.keys():
        has = f"has {json.dumps(metadata)[:200]}" if metadata is not None else "has none"
        raise UserError(
            f"{path}: the schema's metadata needs a JSON object under `finetune`, and {has}. Fix: write one like "
            f"{example}"
        )
    for name, kind in _METADATA.items():
        value = metadata[name]
        if not isinstance(value, kind) or (name == "temperature" and not 0 < value < float("inf")):
            raise UserError(f"{path}: metadata: `{name}` is {json.dumps(value)[:100]}. Fix: write it as in {example}")
    per_target = len(first[0]) if isinstance(first, list) and first and isinstance(first[0], list) else 0
    if not per_target:
        raise UserError(f"{path}: row 1: `ids`: expected lists of ids. Fix: write one for every trained token")
    return TeacherFile(path, metadata["vocabulary"], float(metadata["temperature"]), metadata["sampled"], per_target)


Row = tuple[Tokens, NDArray[np.bool_], NDArray[np.int32], NDArray[np.float32]]


class _Bad(Exception):
    """The problem with a row."""


def _values(row: pyarrow.RecordBatch, name: str, kind: pyarrow.DataType) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Returns a cell's numbers, and the lengths of its inner lists (() for a flat list)."""
    try:
        cell = row.column(name).cast(kind)
    except pyarrow.ArrowException:
        raise _Bad(f"`{name}`: expected {kind}, got {row.column(name).type}") from None
    lengths = np.zeros(0, np.int64)
    while isinstance(cell, pyarrow.LargeListArray):
        if cell.null_count:
            raise _Bad(f"`{name}`: a list is missing (null)")
        lengths = cell.value_lengths().to_numpy()
        cell = cell.flatten()
    if cell.null_count:
        raise _Bad(f"`{name}`: a number is missing (null)")
    return cell.to_numpy(), lengths


def _row(cells: dict[str, tuple[NDArray[Any], NDArray[np.int64]]], k: int, sampled: bool) -> Row:
    """Returns (tokens, loss mask, ids (n, k), log-probabilities (n, k)). Raises _Bad."""
    input_ids, labels = cells["input_ids"][0], cells["labels"][0]
    if len(labels) != len(input_ids):
        raise _Bad(f"{len(labels)} `labels` for {len(input_ids)} `input_ids`")
    trained = labels != UNTRAINED
    if (labels[trained] != input_ids[trained]).any():
        raise _Bad("`labels` are not the tokens themselves: expected each at its own place, not shifted")
    if trained[:1].any():
        raise _Bad("the first token is trained, which nothing predicts")
    targets = int(np.count_nonzero(trained))
    for name in ("ids", "log_probs"):
        lengths = cells[name][1]
        if len(lengths) != targets:
            raise _Bad(f"{len(lengths)} lists of `{name}` for {targets} trained tokens")
        if (lengths != k).any():
            at = int(np.argmax(lengths != k))
            raise _Bad(f"`{name}` of trained token {at + 1} has {lengths[at]} numbers; in row 1 there are {k}")
    ids, log_probs = (cells[name][0].reshape(targets, k) for name in ("ids", "log_probs"))
    if (ids < 0).any():
        raise _Bad(f"`ids`: {int(ids.min())} is not an id")
    if not np.isfinite(log_probs).all() or (log_probs > ROUNDING).any():
        raise _Bad("`log_probs`: expected finite numbers that are not above 0 (natural logarithms)")
    if sampled:
        return input_ids, trained, ids, log_probs
    ordered = np.sort(ids, 1)
    repeated = (ordered[:, 1:] == ordered[:, :-1]).any(1)
    if repeated.any():
        at = int(np.argmax(repeated))
        raise _Bad(f"`ids` of trained token {at + 1}: an id occurs twice, as only `sampled` ones may")
    sums = np.exp(log_probs.astype(np.float64)).sum(1)
    if (sums > 1 + ROUNDING).any():
        at = int(np.argmax(sums > 1 + ROUNDING))
        raise _Bad(f"`log_probs` of trained token {at + 1}: the probabilities add up to {sums[at]:.4f}")
    return input_ids, trained, ids, log_probs


# --- a file under a recipe


def is_teacher_file(teacher: str) -> bool:
    return teacher.endswith(".parquet")


def file_predictions(settings: Distill, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> Predictions:
    """Returns the predictions of the file in `objective.teacher`. vocabulary: of the student.

    Raises UserError if the file is not one for this recipe.
    """
    assert settings.teacher is not None  # a rule of the recipe
    file = read_teacher_file(Path(settings.teacher).expanduser())
    if (expected := vocabulary_digest(tokenizer)) != file.vocabulary:
        raise UserError(
            f"{file.path}: metadata: `vocabulary` is {file.vocabulary[:80]!r}, but the recipe's tokenizer has "
            f"{expected!r}. Their token ids differ. Fix: use a teacher that has the model's own vocabulary"
        )
    if file.temperature != settings.temperature:
        raise UserError(
            f"objective.temperature: {settings.temperature:g}, but the log-probabilities of {file.path} are "
            f"at {file.temperature:g}. The tail of stored ones cannot be brought to another temperature. Fix: set "
            f"{file.temperature:g}"
        )
    if file.sampled != (settings.samples is not None):
        instead = f"set `samples: {file.per_target}`" if file.sampled else "remove `samples`"
        kind = "drawn from the teacher (`sampled`)" if file.sampled else "the likeliest, not draws (`sampled`)"
        raise UserError(f"objective.samples: the ids of {file.path} are {kind}. Fix: {instead}")
    key = "samples" if file.sampled else "top_k"
    if getattr(settings, key) not in (None, file.per_target):
        raise UserError(
            f"objective.{key}: {getattr(settings, key)}, but {file.path} has {file.per_target} ids for each token. "
            f"Fix: set {file.per_target}, or remove it"
        )
    if not file.sampled and file.per_target >= vocabulary:
        raise UserError(
            f"{file.path}: {file.per_target} ids for each token of a vocabulary of {vocabulary}. Fix: keep fewer"
        )
    predictions = file.predictions()
    if predictions.largest_id >= vocabulary:
        raise UserError(
            f"{file.path}: has id {predictions.largest_id}, but the model's vocabulary has {vocabulary} tokens. Fix: "
            "use a teacher that has the model's own vocabulary"
        )
    return predictions
