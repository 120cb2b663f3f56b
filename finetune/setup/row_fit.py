"""Properties of a source's rows, and the settings that fit them: format, lengths, batch, steps."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from finetune.data.building import num_characters, read_items
from finetune.data.chat.renderer import build_renderer
from finetune.data.chat.template_choice import resolve_template
from finetune.data.formats.converters import FORMATS
from finetune.data.formats.detect import Detected, detect_format, parse_row, question_and_answer
from finetune.data.objective_rows import objective_rows, trained_part
from finetune.data.packing import pack
from finetune.data.samples import BadRow, Conversation, Labelled, Preference, Ranked, Sample
from finetune.data.sources.source import SourceReader
from finetune.data.tokenizing import Item, RowSettings, tokenize_chunk
from finetune.errors import UserError
from finetune.recipe.schema import ObjectiveSettings, Source

LOOK_ROWS = 5_000  # rows read; the rest of a larger source is assumed to be similar
CHARACTERS_PER_TOKEN = 4  # about, for English with current vocabularies, if there is no tokenizer
SLACK = 2  # times the longest estimate: other languages and vocabularies need twice the tokens, or more
TEMPLATE_TOKENS = 16  # about, for a chat template around an answer
LONGEST = 4096  # tokens of a packed sequence, as in recipes/base; or the model's context, if that is shorter
GOAL_STEPS = 100  # twice the number below which `check` warns
OBJECTIVES = {"preference": "dpo", "comparison": "dpo", "ranked": "dpo", "unpaired": "kto"}
OBJECTIVES["classification"] = "classify"


@dataclass(frozen=True)
class RowsFound:
    """Rows of the data, with their format."""

    format: str
    columns: dict[str, str] | None
    reason: str  # how the format was detected
    count: int  # rows, bad ones included
    bad: tuple[str, ...]
    is_all: bool  # every row was read; else `count` is an estimate
    samples: tuple[Sample, ...]
    items: tuple[Item, ...]

    @property
    def objective(self) -> str:
        return OBJECTIVES.get(self.format, "sft")

    @property
    def labels(self) -> list[str]:
        """Returns the classes that occur, in order; for indices all up to the highest."""
        labels = {one.label for one in self.samples if isinstance(one, Labelled)}
        if all(isinstance(label, int) for label in labels):
            return [str(i) for i in range(max(map(int, labels), default=0) + 1)]
        return sorted(map(str, labels))

    def check_labels(self) -> None:
        """Raises UserError if a classifier would have a single class."""
        if self.objective == "classify" and len(self.labels) < 2:
            raise UserError(
                f"{self.items[0][0]}: `label` is {self.labels[0]} in every row, and a classifier needs two labels at "
                "least; to train on the texts themselves, rename or remove that column"
            )


@dataclass(frozen=True)
class ExampleLengths:
    """Tokens of the examples that were read."""

    examples: NDArray[np.int64]  # (N,) of those read
    answers: NDArray[np.int64]  # (N,) supervised tokens; for an estimate all tokens
    is_estimate: bool
    scale: float  # examples of the source per example read

    @property
    def longest(self) -> int:
        return int(self.examples.max())

    @property
    def total(self) -> int:
        """Number of tokens in the source."""
        return round(self.examples.sum() * self.scale)


@dataclass(frozen=True)
class Fit:
    """Settings that fit the rows."""

    max_length: int
    sequences: int  # packed sequences per epoch
    rows: int  # packed sequences per step
    epochs: int
    held_out: float  # share of the rows
    overlong: int  # examples above max_length, among those read

    @property
    def steps(self) -> int:
        return math.ceil(self.epochs * self.sequences / self.rows)

    @property
    def interval(self) -> int:
        """Number of steps between evaluations, and checkpoints: about five in a run."""
        return max(5, math.ceil(self.steps / 25) * 5)


def read_source(path: str) -> RowsFound:
    """Returns the first rows of a source, with their format. Raises UserError if no format fits."""
    reader = SourceReader(Source(path=path))
    with closing(read_items(reader)) as items:
        read = tuple(islice(items, LOOK_ROWS))
        is_all = next(items, None) is None
    readable = [(label, number, row) for label, number, row in read if not isinstance(row, str)]
    if not readable:
        raise UserError(f"{path}: no row can be read" + (f": {read[0][0]}:{read[0][1]}: {read[0][2]}" if read else ""))
    first = readable[0][2]
    try:
        detected = detect_format([row for _, _, row in readable])
    except UserError as error:
        pair = question_and_answer(first)
        if pair is None:
            raise UserError(f"{readable[0][0]}:{readable[0][1]}: {error}") from None
        question, answer = pair
        reason = f"no format has these columns: `{question}` is taken for the question, `{answer}` for the answer"
        detected = Detected("prompt_completion", {"prompt": question, "completion": answer}, reason)
    samples, bad = [], []
    for label, number, row in read:
        try:
            if isinstance(row, str):
                raise BadRow(row)
            samples.append(parse_row(row, detected.format, detected.columns))
        except BadRow as error:
            bad.append(f"{label}:{number}: {error}")
    count = len(read) if is_all else max(len(read), reader.estimated_rows() or 0)
    columns = dict(detected.columns) if detected.columns else None
    return RowsFound(detected.format, columns, detected.reason, count, tuple(bad), is_all, tuple(samples), read)


def chat_template(rows: RowsFound, tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    """Returns the built-in template that a tokenizer without its own needs for these rows; None if it needs none."""
    if tokenizer is None or tokenizer.chat_template:
        return None
    renames = rows.columns is not None and rows.format == "prompt_completion"
    if not renames and not any(_is_chat(sample) for sample in rows.samples[:100]):
        return None
    return "chatml" if {"<|im_start|>", "<|im_end|>"} <= tokenizer.get_vocab().keys() else "plain"


def _is_chat(sample: Sample) -> bool:
    if isinstance(sample, Ranked):
        return _is_chat(sample.answers[0])
    if isinstance(sample, Preference):
        return _is_chat(sample.chosen)
    return _is_chat(sample.sample) if isinstance(sample, Labelled) else isinstance(sample, Conversation)


def token_lengths(rows: RowsFound, tokenizer: PreTrainedTokenizerBase, template: str | None) -> ExampleLengths:
    """Tokenizes the rows as a run would. Raises UserError."""
    labels = tuple(rows.labels) if rows.objective == "classify" else None
    objective = ObjectiveSettings(name=rows.objective, labels=labels)  # pyright: ignore[reportArgumentType]
    is_text = objective.name == "classify"
    renderer = build_renderer(tokenizer, resolve_template(template, tokenizer), trained_part(objective), is_text)
    settings = RowSettings(
        renderer, rows.format, rows.columns, 10**9, "drop", skips_bad=True, objective=objective_rows(objective)
    )
    result = tokenize_chunk(settings, rows.items)
    if result.failed:
        raise UserError(result.failed)
    if not len(result.arrays.sizes):
        raise UserError(f"no row can be trained on: {result.bad_rows[0] if result.bad_rows else 'no supervised token'}")
    begins = np.concatenate([[0], np.cumsum(result.arrays.sizes)[:-1]])
    examples = np.add.reduceat(result.arrays.lengths, begins)
    answers = np.maximum.reduceat(result.arrays.targets, begins)
    several = 2 if objective.name == "kto" else 1  # with an answer of another row
    return ExampleLengths(several * examples, answers, False, rows.count / len(rows.items))


def estimated_lengths(rows: RowsFound) -> ExampleLengths:
    """Counts characters of the fields that the format reads."""
    fields = [(rows.columns or {}).get(field, field) for field in FORMATS[rows.format].fields]
    readable = [row for _, _, row in rows.items if not isinstance(row, str)]
    texts = [sum(num_characters(row[name]) for name in fields if row.get(name) is not None) for row in readable]
    tokens = np.array([text // CHARACTERS_PER_TOKEN + TEMPLATE_TOKENS for text in texts], np.int64)
    return ExampleLengths(tokens, tokens, True, rows.count / len(rows.items))


def fit_rows(lengths: ExampleLengths, rows: RowsFound, longest: int) -> Fit:
    """Returns settings that make about `GOAL_STEPS`: first shorter sequences, then fewer of them per step,
    then more epochs. longest: maximum tokens of a sequence."""
    count = len(lengths.examples) * lengths.scale
    # Enough rows that their mean distinguishes two checkpoints, few enough to be quick; zero for a handful of rows.
    held_out = 0.0 if count < 20 else 0.1 if count < 1000 else 0.05 if count < 10_000 else 0.01
    room = lengths.longest * (SLACK if lengths.is_estimate else 1)
    needed = min(longest, 1 << max(5, (room - 1).bit_length()))  # a power of two at least as large as the longest
    kept = lengths.examples[lengths.examples <= longest]
    if not len(kept):
        kept = np.full(1, longest)

    def fit(max_length: int, in_step: int, epochs: int) -> Fit:
        sequences = len(pack(kept, max_length)) * lengths.scale * (1 - held_out)
        overlong = int((lengths.examples > max_length).sum())
        return Fit(max_length, max(1, round(sequences)), in_step, epochs, held_out, overlong)

    lengths_to_try = [min(longest, max(2048, needed))]
    while lengths_to_try[-1] > needed:
        lengths_to_try.append(max(lengths_to_try[-1] // 2, needed))
    choices = [(max_length, 8, 2) for max_length in lengths_to_try]
    choices += [(needed, in_step, epochs) for in_step, epochs in ((4, 2), (4, 3), (4, 4), (4, 5), (2, 5), (1, 5))]
    for choice in choices:
        best = fit(*choice)
        if best.steps >= GOAL_STEPS:
            break
    return best
