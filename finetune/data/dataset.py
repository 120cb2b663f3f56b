"""The data of a run: examples and their rows, or a stream. Training, evaluation, `check` and `inspect` start here."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from finetune.data.building import OpenedSources, first_items
from finetune.data.chat.renderer import Renderer
from finetune.data.chat.template_check import check_template, joined_texts_note
from finetune.data.chat.template_choice import set_template, template_of
from finetune.data.epochs import EpochOrder, EpochRows, RunLength, epochs_differ
from finetune.data.examples import Examples, check_caps, draw_examples, prepare_examples
from finetune.data.formats.detect import parse_row
from finetune.data.objective_rows import trained_part
from finetune.data.packing import RowOrder, Rows, group_rows, one_per_row, pack, row_work
from finetune.data.predictions import Predictions
from finetune.data.row_source import EpochSize, RowSource
from finetune.data.samples import BadRow, Example, ExampleSizes, Medium, Sample
from finetune.data.streaming import Stream, open_stream
from finetune.data.transcripts import check_jiwer
from finetune.errors import UserError
from finetune.recipe import Recipe
from finetune.recipe.schema import Data, Evaluate, HeldOut, Source
from finetune.utils import answer


@dataclass(frozen=True)
class Dataset(RowSource):
    """Examples that are all on the disk, in rows."""

    examples: Examples  # of every epoch; with `epochs` all that the run takes, each once
    rows: Rows  # of the first epoch
    epochs: EpochRows | None = None  # if they take different examples
    order: RowOrder | EpochOrder | None = None  # of the run; None: the order of the rows

    @cached_property
    def epoch_sizes(self) -> ExampleSizes:
        """Returns the sizes of the examples of the first epoch."""
        return self.examples.sizes if self.epochs is None else self.examples.sizes.take(self.epochs.members(0))

    @property
    def tokens(self) -> int:
        """Returns the tokens of an epoch."""
        return int(self.epoch_sizes.tokens.sum())

    @property
    def supervised_tokens(self) -> int:
        return int(self.epoch_sizes.target_tokens.sum())

    @property
    def source_names(self) -> tuple[str, ...]:
        return tuple(source.name for source in self.examples.report.sources)

    def size(self, max_length: int) -> EpochSize:
        return EpochSize(
            len(self.epoch_sizes),
            len(self.rows),
            self.tokens,
            self.supervised_tokens,
            self.efficiency(max_length),
            int(self.epoch_sizes.shared.sum()),
            len(self.epochs) if self.epochs else None,
        )

    @property
    def formats(self) -> tuple[str, ...]:
        return tuple(source.format for source in self.examples.report.sources)

    def first_examples(self, source: int, count: int) -> list[Example]:
        return [self.examples[i] for i in self.examples.of_source(source)[:count]]

    def heaviest_row(self, max_length: int, shares_prompts: bool = False) -> tuple[int, int]:
        sizes = self.examples.sizes
        computed = sizes.tokens - sizes.shared if shares_prompts else sizes.tokens
        epochs = map(self.epochs.epoch, range(self.epochs.num_epochs)) if self.epochs else [self.rows]
        packed = [rows for rows in epochs if len(rows)]
        tokens, targets = (
            max(int(np.add.reduceat(counts[rows.members], rows.offsets[:-1]).max()) for rows in packed)
            for counts in (computed, sizes.target_tokens)
        )
        return tokens, targets

    def facts(self, part: str, max_length: int) -> dict[str, str]:
        full = self.efficiency(max_length)
        share, predictions = self.supervised_tokens / self.tokens, self.examples.predictions
        ids = predictions.per_target if isinstance(predictions, Predictions) else None
        return {
            **({"teacher": f"{ids} ids for each supervised token"} if ids is not None else {}),
            f"{part}_data": f"{len(self.epoch_sizes):,} examples, {self.tokens:,} tokens, {share:.0%} supervised",
            f"{part}_rows": f"{len(self.rows):,} sequences of up to {max_length:,} tokens, {full:.1%} full",
        }

    def summary(self) -> dict[str, float | str]:
        """Identifies these rows: a checkpoint keeps it. `lengths`: checksum over the tokens, all and trained, of every
        sequence, which decide how examples are packed and ordered; both of the first epoch."""
        sizes = self.epoch_sizes
        checksum = hashlib.sha256(sizes.lengths.astype("<i8").tobytes())
        checksum.update(sizes.targets.astype("<i8").tobytes())
        if len(sizes.lengths) > len(sizes):
            checksum.update(sizes.offsets.astype("<i8").tobytes())
        predictions = self.examples.predictions
        return {
            "examples": len(sizes),
            "rows": len(self.rows),
            "tokens": self.tokens,
            "lengths": checksum.hexdigest()[:16],
            # The last of 2.5 epochs has other rows than the third of 3.
            **({"epochs": end} if self.epochs and (end := self.epochs.length.epochs or 0) % 1 else {}),
            **({"teacher": predictions.identity[:16]} if predictions is not None else {}),
        }

    def content(self) -> dict[str, Any]:
        return {**self.summary(), **self.examples.content("train")}

    def identity(self) -> dict[str, float | str]:
        """Identifies the tokens themselves and the rows that they are in."""
        places = (self.rows.offsets.astype("<i8").tobytes(), self.rows.members.astype("<i8").tobytes())
        return {
            **self.summary(),
            "content": self.examples.identity(),
            "places": hashlib.sha256(b"".join(places)).hexdigest(),
        }

    def efficiency(self, max_length: int) -> float:
        """Returns tokens over the room in all rows."""
        return self.rows.efficiency(self.epoch_sizes.tokens, max_length)

    def in_order(self, recipe: Recipe) -> Dataset:
        seed, work = recipe.run.seed, self.examples.sizes.attention_work
        group = group_rows(recipe.data.balance, recipe.batch.rows)
        if self.epochs is not None:
            return replace(self, order=EpochOrder(self.epochs, seed, work, group))
        return replace(self, order=RowOrder(len(self.rows), seed, row_work(self.rows, work), group))

    def row(self, position: int) -> list[Example]:
        return [self.examples[int(member)] for member in self.members(position)]

    def lengths(self, position: int) -> NDArray[np.int64]:
        return self.examples.sizes.take(self.members(position)).lengths

    def counts(self, position: int) -> Mapping[str, int]:
        return self.examples.sizes.take(self.members(position)).counts()

    def epoch_at(self, position: int) -> float:
        return position / len(self._run_rows) if self.order is None else self.order.epochs(position)

    def members(self, position: int) -> NDArray[np.int64]:
        """Returns the examples of the row at a position."""
        return self._run_rows[position if self.order is None else self.order.row_at(position)]

    @property
    def _run_rows(self) -> Rows | EpochRows:
        return self.rows if self.epochs is None else self.epochs

    def unpacked(self) -> Dataset:
        if self.epochs is None:
            return Dataset(self.examples, one_per_row(self.examples.lengths))
        epochs = self.epochs.unpacked()
        return Dataset(self.examples, epochs.epoch(0), epochs)

    def once(self) -> Dataset:
        """Returns every example of the run once, for computations before it."""
        if self.epochs is None:
            return self
        lengths, max_length = self.examples.lengths, self.epochs.max_length
        return Dataset(self.examples, one_per_row(lengths) if max_length is None else pack(lengths, max_length))


def on_disk(source: RowSource) -> Dataset:
    """Returns a source whose examples are all on the disk, as it is. Raises UserError for one that is streamed."""
    if not isinstance(source, Dataset):
        raise UserError("data.streaming: every example must be on the disk before the run. Fix: set it to false")
    return source


def build_training(
    recipe: Recipe,
    renderer: Renderer,
    opened: OpenedSources | None = None,
) -> RowSource:
    """Returns the data of `data.train`. opened: see `prepare_examples`.

    Raises UserError, also if the run is longer than `max_epochs` of its sources allows.
    """
    if recipe.data.streaming:
        return open_stream(recipe, renderer, opened)
    draw = draw_examples(recipe, recipe.data.train, renderer, opened=opened)
    examples, steps = draw.first_epoch, recipe.train.max_steps
    packed = _packed(recipe.data, examples)
    length = RunLength(recipe.train.epochs, steps and steps * recipe.batch.rows)
    if length.rows is not None:  # the run's length is known
        by_steps = length.rows / len(packed)
        passes = [source.passes for source in examples.report.sources]
        check_caps(recipe.data.train, passes, min(by_steps, length.epochs or by_steps))
    if not epochs_differ(draw.shares, length, len(packed)):
        return Dataset(examples, packed)
    examples, epochs = draw.run(length, recipe.data.max_length if recipe.data.packing else None)
    if not len(epochs):
        raise UserError("data: the weights of the sources leave no example at all. Fix: raise `weight` or `max_epochs`")
    if length.epochs is None and len(epochs) < (length.rows or 0):
        raise UserError(
            f"data.train: after {len(epochs) // recipe.batch.rows} steps every source was read `max_epochs` times. "
            "Fix: lower train.max_steps, or raise `max_epochs`"
        )
    return Dataset(examples, epochs.epoch(0), epochs)


def build_held_out(
    recipe: Recipe,
    renderer: Renderer,
    opened: OpenedSources | None = None,
) -> Dataset | None:
    """Returns the data of `data.eval`; None if there is none. Parameters as in `build_training`. Raises UserError."""
    if not recipe.data.eval:
        return None
    held_out = isinstance(recipe.data.eval, HeldOut)
    return build_dataset(recipe, recipe.data.eval_sources, renderer, None, opened, held_out)


def build_dataset(
    recipe: Recipe,
    sources: Sequence[Source],
    renderer: Renderer,
    progress: Callable[[int], None] | None = None,
    opened: OpenedSources | None = None,
    held_out: bool = False,
) -> Dataset:
    """Returns rows of tokens, built once and cached; every process may call it at the same time. Raises UserError.

    opened, held_out: see `prepare_examples`.
    """
    examples = prepare_examples(recipe, sources, renderer, progress, opened, held_out)
    return Dataset(examples, _packed(recipe.data, examples))


def _packed(data: Data, examples: Examples) -> Rows:
    return pack(examples.lengths, data.max_length) if data.packing else one_per_row(examples.lengths)


def template_notes(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, opened: OpenedSources | None = None
) -> list[str]:
    """Sets the recipe's chat template on the tokenizer, so that the result carries it; returns notes for the user.

    Raises UserError if its masks cannot be right.
    """
    template = template_of(recipe.model, tokenizer)
    if template is not None:
        set_template(tokenizer, template, replaces_all=recipe.model.chat_template is not None)
    findings = check_template(tokenizer, template, trained_part(recipe.objective))
    problems = [text.removeprefix("problem: ") for text in findings if text.startswith("problem: ")]
    if problems:
        opened = opened or OpenedSources(recipe)
        formats = {opened.open(source).source.format for source in (*recipe.data.train, *recipe.data.eval_sources)}
        if formats - {"text", "tokens"}:  # the others are rendered by the chat template
            listed = "; ".join(problems)  # an error that ended the check has its remedy
            fix = "" if "Fix: " in listed else ". Fix: correct the template, or give another one"
            raise UserError(f"model.chat_template: {listed}{fix}")
    notes = [text.removeprefix("note: ") for text in findings if text.startswith("note: ")]
    if template:
        return notes
    opened = opened or OpenedSources(recipe)
    return joined_texts_note(_first_samples(recipe.data.train, opened, is_prompt=recipe.rollouts is not None))


def _first_samples(sources: Sequence[Source], opened: OpenedSources, is_prompt: bool) -> list[Sample]:
    """Returns the first rows of the training sources that can be read; the build names the others."""
    samples = list[Sample]()
    for given in sources:
        try:
            source = opened.open(given)
            rows = [row for _, _, row in first_items(source) if not isinstance(row, str)]
        except UserError:
            continue
        for row in rows:
            with contextlib.suppress(BadRow, UserError):
                samples.append(parse_row(row, source.source.format, source.source.columns, is_prompt))
    return samples


# Rows that are dropped or changed, by their count in the report.
_CHANGED = {
    "bad": "bad rows skipped",
    "dropped_overlong": "rows dropped because they exceed data.max_length (`data.overlong: split` keeps their pieces)",
    "truncated": "rows truncated",
    "split": "rows split",
    "no_supervised_token": "examples dropped because they have no supervised token",
}


def data_notes(settings: Data, opened: OpenedSources, training: RowSource, held_out: Dataset | None) -> list[str]:
    """Returns notes on rows that were dropped or changed, and on sources that are both trained on and evaluated."""
    parts = {"train": None if settings.streaming else on_disk(training)}
    parts["eval"] = None if isinstance(settings.eval, HeldOut) else held_out
    notes = []
    for name, data in parts.items():
        counts = data.examples.report.totals() if data is not None else {}
        notes += [f"{name}: {counts[key]:,} {change}" for key, change in _CHANGED.items() if counts.get(key)]
    return notes + (_shared_rows(settings, opened, training, held_out) if held_out is not None else [])


def _shared_rows(settings: Data, opened: OpenedSources, training: RowSource, held_out: Dataset) -> list[str]:
    """Returns notes on rows that are trained on and evaluated, by the tokens and images of their examples.

    Of a stream the first `data.window` rows of each source are compared, and whole sources by their content.
    """
    streamed = isinstance(training, Stream)
    trained = np.unique(training.first_hashes() if streamed else on_disk(training).examples.hashes())
    own = settings.own_eval_sources
    evaluated = held_out.examples.hashes()
    parts = [(f"data.eval[{i}] ({opened.open(one).name})", held_out.examples.of_source(i)) for i, one in enumerate(own)]
    notes = []
    for i, (name, indices) in enumerate(parts or [("data.eval.share", range(len(evaluated)))]):
        count = int(np.isin(evaluated[indices.start : indices.stop], trained).sum())
        if streamed and own and any(_has_same_rows(opened, one, own[i]) for one in settings.train):
            count = len(indices)
        if not count:
            continue
        has = "has the rows that are trained on"
        if count < len(indices):
            of = f" in the first {settings.window:,} rows of each source" if streamed else ""
            has = f"has {count:,} of its {len(indices):,} examples among those that are trained on{of}"
        notes.append(
            f"{name} {has}: eval_loss shows what is remembered, not what is learnt. "
            "`data.eval: {share: 0.05}` holds rows out"
        )
    return notes


def _has_same_rows(opened: OpenedSources, trained: Source, evaluated: Source) -> bool:
    """Returns whether both are the same content; parts of one split may be apart."""
    may_share = trained.split == evaluated.split or "[" not in trained.split + evaluated.split
    return may_share and opened.open(trained).reader.digest() == opened.open(evaluated).reader.digest()


# --- held-out examples as questions: a prompt to answer, and the reference for the answer


# The one format whose prompt may be a single token. In others, a trained second token means that there is no prompt:
# plain text, rows of ids that are all trained, the rest of an answer that `overlong: split` cut.
_SHORT_PROMPTS = "prompt_completion"


@dataclass(frozen=True)
class Question:
    """An example cut where its last trained stretch begins.

    ids        1 872 13048 2 77091 9707 2      end_ids {2}
    trained    -   -     - -     -  yes yes
    prompt     1 872 13048 2 77091
    reference                      9707
    """

    prompt: list[int]
    reference: list[int]  # without its end token
    media: tuple[Medium, ...] = ()  # of the prompt


def questions(examples: Examples, end_ids: Collection[int]) -> Iterator[Question]:
    """Yields the question of every example that has a prompt, in order."""
    formats = [source.format for source in examples.report.sources]
    for example in examples:
        question = question_of(example, formats[example.source], end_ids)
        if question is not None:
            yield question


def question_of(example: Example, format: str, end_ids: Collection[int]) -> Question | None:
    """Returns an example of a source of `format` as a question; None if it has no prompt."""
    sequence = example.sequences[0]
    if not sequence.num_targets:  # a prompt whose answers are sampled
        return None
    last = begin = int(np.flatnonzero(sequence.loss_mask)[-1])
    while sequence.loss_mask[begin - 1]:  # the first token is never trained
        begin -= 1
    if begin == 1 and format != _SHORT_PROMPTS:
        return None
    ids = sequence.input_ids.tolist()
    images = tuple(image for image in sequence.media if image.end <= begin)
    return Question(ids[:begin], until_end(ids[begin : last + 1], end_ids), images)


def until_end(ids: list[int], end_ids: Collection[int]) -> list[int]:
    """Returns ids up to the first end token, without it; all if there is none."""
    return next((ids[:i] for i, token in enumerate(ids) if token in end_ids), ids)


def check_questions(recipe: Evaluate, examples: Examples, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Returns notes on references that no answer can match; before the model loads.

    Raises UserError if no row has an answer, or a prompt, if none of the references holds an answer, or if error rates
    cannot be counted.
    """
    if not examples.num_targets.any():
        raise UserError("data.eval: no row has an answer, and eval_loss is that of answers. Fix: give rows with one")
    if not recipe.answered:
        return []
    if recipe.word_error_rate:
        check_jiwer()
    if next(questions(examples, ()), None) is None:
        raise UserError(
            "data.eval: no row has a prompt to answer. Fix: set evaluate.generate and evaluate.exact_match to 0"
        )
    compared = max(recipe.exact_match, recipe.word_error_rate)
    if not compared or recipe.answer is None:
        return []
    references = [one.reference for one in islice(questions(examples, ()), compared)]
    texts = [str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in references]
    without = [text for text in texts if answer(text, recipe.answer) is None]
    if len(without) == len(texts):
        raise UserError(
            f"evaluate.answer: {recipe.answer!r} occurs in none of the {len(texts)} references of data.eval. No answer "
            f"could match; the first reference is {without[0][:80]!r}. Fix: give a regular expression that they match"
        )
    if without:
        return [
            f"evaluate.answer occurs in {len(texts) - len(without)} of {len(texts)} references; the others count as "
            f"not matched, such as {without[0][:80]!r}"
        ]
    return []
