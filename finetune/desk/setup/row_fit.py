"""Properties of a source's rows, and the settings that fit them: format, lengths, batch, steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from finetune.data.building import num_characters
from finetune.data.chat.renderer import Renderer, build_renderer
from finetune.data.chat.template_choice import resolve_template
from finetune.data.examples import row_media
from finetune.data.formats.converters import FORMATS
from finetune.data.objective_rows import objective_rows, trained_part
from finetune.data.packing import pack
from finetune.data.tokenizing import RowSettings, tokenize_chunk
from finetune.desk.setup.rows import RowsFound
from finetune.errors import UserError
from finetune.recipe.objective_settings import OBJECTIVE_SECTIONS, Classify, ObjectiveSection
from finetune.recipe.schema import Audio, Images, Model, Videos

CHARACTERS_PER_TOKEN = 4  # about, for English with current vocabularies, if there is no tokenizer
SLACK = 2  # times the longest estimate: other languages and vocabularies need twice the tokens, or more
TEMPLATE_TOKENS = 16  # about, for a chat template around an answer
LONGEST = 4096  # tokens of a packed sequence, as in recipes/base; or the model's context, if that is shorter
GOAL_STEPS = 100  # twice the number below which `check` warns


@dataclass(frozen=True)
class ExampleLengths:
    """Tokens of the examples that were read."""

    examples: NDArray[np.int64]  # (N,) of those read
    answers: NDArray[np.int64]  # (N,) supervised tokens; for an estimate all tokens
    is_estimate: bool
    scale: float  # examples of the source per example read
    bad: tuple[str, ...] = ()  # rows that cannot be used, of those read
    can_split: bool = False  # text and tokens: a long one is kept, in pieces

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


def row_renderer(rows: RowsFound, tokenizer: PreTrainedTokenizerBase, template: str | None, model: Model) -> Renderer:
    """Returns the renderer of a run on these rows. Raises UserError, also for images and a model that sees none."""
    is_text, images = rows.objective == "classify", None
    if rows.media_kind:
        defaults = {"image": Images, "audio": Audio, "video": Videos}
        images = row_media(model, [defaults[kind]() for kind in rows.media_kinds], tokenizer)
    part = trained_part(_objective(rows))
    return build_renderer(tokenizer, resolve_template(template, tokenizer), part, is_text, images)


def _objective(rows: RowsFound) -> ObjectiveSection:
    section = OBJECTIVE_SECTIONS[rows.objective]
    return Classify(labels=tuple(rows.labels)) if section is Classify else section.model_validate({})


def token_lengths(rows: RowsFound, renderer: Renderer) -> ExampleLengths:
    """Tokenizes the rows as a run would. Raises UserError."""
    objective = _objective(rows)
    reads = objective_rows(objective, objective.takes_rewards)
    settings = RowSettings(renderer, rows.format, rows.columns, 10**9, "drop", skips_bad=True, objective=reads)
    result = tokenize_chunk(settings, rows.items)
    if result.failed:
        raise UserError(result.failed)
    if not len(result.arrays.sizes):
        reason = result.bad_rows[0] if result.bad_rows else "no supervised token"
        fix = "" if "Fix: " in reason else ". Fix: give the format and columns that the rows have, or correct the rows"
        raise UserError(f"no row can be trained on: {reason}{fix}")
    begins = np.concatenate([[0], np.cumsum(result.arrays.sizes)[:-1]])
    examples = np.add.reduceat(result.arrays.lengths, begins)
    answers = np.maximum.reduceat(result.arrays.targets, begins)
    several = 2 if objective.row_kind.is_unpaired else 1  # with an answer of another row
    scale = rows.count / len(rows.items)
    return ExampleLengths(several * examples, answers, False, scale, tuple(result.bad_rows), rows.can_split)


def estimated_lengths(rows: RowsFound) -> ExampleLengths:
    """Counts characters of the fields that the format reads."""
    fields = [(rows.columns or {}).get(field, field) for field in FORMATS[rows.format].fields]
    readable = [row for _, _, row in rows.items if not isinstance(row, str)]
    texts = [sum(num_characters(row[name]) for name in fields if row.get(name) is not None) for row in readable]
    tokens = np.array([text // CHARACTERS_PER_TOKEN + TEMPLATE_TOKENS for text in texts], np.int64)
    return ExampleLengths(tokens, tokens, True, rows.count / len(rows.items), rows.bad, rows.can_split)


def pieces(lengths: NDArray[np.int64], max_length: int) -> NDArray[np.int64]:
    """Returns the lengths of what `overlong: split` keeps: [435] in 128 -> [128, 128, 128, 51]; a last token alone has
    nothing to train."""
    whole, last = np.divmod(lengths, max_length)
    return np.concatenate([np.full(int(whole.sum()), max_length), last[last > np.where(whole > 0, 1, 0)]])


def fit_rows(lengths: ExampleLengths, longest: int, packing: bool = True) -> Fit:
    """Returns settings that make about `GOAL_STEPS`: first shorter sequences, then fewer of them per step,
    then more epochs. longest: maximum tokens of a sequence."""
    count = len(lengths.examples) * lengths.scale
    # Enough rows that their mean distinguishes two checkpoints, few enough to be quick; zero for a handful of rows.
    held_out = 0.0 if count < 20 else 0.1 if count < 1000 else 0.05 if count < 10_000 else 0.01
    room = lengths.longest * (SLACK if lengths.is_estimate else 1)
    needed = min(longest, 1 << max(5, (room - 1).bit_length()))  # a power of two at least as large as the longest

    def fit(max_length: int, in_step: int, epochs: int) -> Fit:
        fitting = lengths.examples[lengths.examples <= max_length]
        kept = pieces(lengths.examples, max_length) if lengths.can_split else fitting
        packed = len(pack(kept, max_length)) if packing and len(kept) else len(kept)
        sequences = packed * lengths.scale * (1 - held_out)
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
