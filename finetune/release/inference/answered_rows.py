"""`evaluate --rows FILE`: a model answers a file's questions, and its answers are compared with those in the file.

    {"audio": "a.wav", "text": "Good morning."}      asked: the clip      heard: "Good mourning."
                                                     exact_match 0, word_error_rate 0.5

Rows are read and rendered as in training, and answered as the run's evaluations do it: greedily, of as many tokens as
`evaluate.max_new_tokens`, compared by `evaluate.answer`. A model that hears has error rates of transcripts as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

from finetune.checkpoints.trained import Trained
from finetune.data.formats.detect import detect_format, parse_row
from finetune.data.samples import BadRow, Conversation, PromptCompletion
from finetune.data.sources.source import SourceReader
from finetune.data.transcripts import error_rates
from finetune.errors import UserError
from finetune.recipe.schema import Evaluate, Source
from finetune.release.inference.answering import Answerer, Prompt, answerer_of, chat_template, file_rules
from finetune.release.inference.sampling import Sampling
from finetune.utils import answer

_FORMAT_ROWS = 100  # rows from which the format is detected


@dataclass(frozen=True)
class TaskMetric:
    """A metric of a task by one model."""

    rows: int
    value: float
    stderr: float | None  # None if it is not known
    of_rows: dict[int, float]  # by the row's number; empty if the metric is not a mean over rows


class RowOptions(Protocol):
    """What of `EvaluateOptions` is read here."""

    @property
    def rows(self) -> Path | None: ...
    @property
    def limit(self) -> int | None: ...
    @property
    def batch_size(self) -> int: ...


def measure_rows(model: Any, tokenizer: Any, trained: Trained, options: RowOptions) -> dict[str, TaskMetric]:
    """Returns a model's metrics by "file/metric". model: the run's or its base. Raises UserError."""
    assert options.rows is not None
    recipe = trained.recipe
    if trained.is_checkpoint and recipe is not None:
        answerer = Answerer(model, tokenizer, chat_template(tokenizer), recipe.model, file_rules(recipe.data))
    else:
        answerer = answerer_of(trained.run_dir, model, tokenizer)
    how = recipe.evaluate if recipe is not None else Evaluate()
    asked = [_asked(answerer, *row) for row in _rows(options.rows, options.limit)]
    said: list[str] = []
    for start in range(0, len(asked), options.batch_size):
        batch = [prompt for prompt, _ in asked[start : start + options.batch_size]]
        said += [one.text for one in answerer.answer(batch, Sampling(how.max_new_tokens))]
    name = options.rows.stem.replace("@", "_")  # a checkpoint's step follows an @
    return _metrics(name, [reference for _, reference in asked], said, how.answer, _hears(model))


def _metrics(
    name: str, references: list[str], said: list[str], pattern: str | None, hears: bool
) -> dict[str, TaskMetric]:
    wanted, found = ([answer(text, pattern) for text in texts] for texts in (references, said))
    same = {i: float(one is not None and one == two) for i, (one, two) in enumerate(zip(wanted, found, strict=True))}
    mean, count = sum(same.values()) / len(same), len(same)
    # Of shares: the standard error of a mean of zeros and ones, as lm_eval has it.
    stderr = (mean * (1 - mean) / (count - 1)) ** 0.5 if count > 1 else None
    metrics = {f"{name}/exact_match": TaskMetric(count, mean, stderr, same)}
    if hears:
        rates = error_rates([one or "" for one in wanted], [one or "" for one in found])
        metrics |= {f"{name}/{rate}": TaskMetric(count, value, None, {}) for rate, value in rates.items()}
    return metrics


def _hears(model: Any) -> bool:
    from finetune.data.media.family_table import FAMILIES

    family = FAMILIES.get(model.config.model_type)
    return family is not None and family.kind == "audio"


def _rows(path: Path, limit: int | None) -> Iterator[tuple[str, Any]]:
    """Yields (place, sample) of each row. Raises UserError for a row that cannot be used, or without rows."""
    rows = SourceReader(Source.model_validate({"path": str(path), "limit": limit})).rows()
    head = list(islice(rows, _FORMAT_ROWS))
    if not head:
        raise UserError(f"--rows {path}: has no rows. Fix: give a file with rows")
    try:
        detected = detect_format([row for _, _, row in head])
    except UserError as error:
        raise UserError(f"--rows {path}: {error}") from None
    for file, number, row in chain(head, rows):
        try:
            yield f"{file}:{number}", parse_row(row, detected.format, detected.columns)
        except BadRow as error:
            raise UserError(f"{file}:{number}: {error}. Fix: correct the row, or take it out") from None


def _asked(answerer: Answerer, place: str, sample: Any) -> tuple[Prompt, str]:
    """Returns a row's question as tokens, and its last answer. Raises UserError for a row without either."""
    sample = sample.as_conversation() if isinstance(sample, PromptCompletion) else sample
    last = sample.messages[-1] if isinstance(sample, Conversation) else None
    if last is None or last.role != "assistant" or last.tool_calls:
        raise UserError(f"{place}: the row ends without an answer to compare. Fix: give rows of questions and answers")
    try:
        return answerer.tokens(replace(sample, messages=sample.messages[:-1]), place.rpartition(":")[0]), last.content
    except UserError as error:
        raise UserError(f"{place}: {error}") from None
