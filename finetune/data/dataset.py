"""Examples and how they lie in rows: what training, evaluation, `check` and `inspect` all start from. Or a stream."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from finetune.data.building.build import open_source
from finetune.data.chat.check import check_template
from finetune.data.chat.template import resolve_template
from finetune.data.examples import Example, Examples, prepare_examples
from finetune.data.loader import OrderedRows
from finetune.data.mixture import check_caps
from finetune.data.order import RowOrder, group_rows
from finetune.data.packing import Rows, one_per_row, pack, row_work
from finetune.data.streaming import StreamedRows, open_stream
from finetune.errors import UserError
from finetune.recipe import Recipe
from finetune.recipe.schema import Source


@dataclass(frozen=True)
class EpochSize:
    """What one pass over the data has."""

    examples: int
    rows: int
    tokens: int
    supervised_tokens: int
    packing_efficiency: float  # tokens / (rows * max_length)


@dataclass(frozen=True)
class Dataset:
    """Examples that are all on the disk."""

    examples: Examples
    rows: Rows

    @property
    def tokens(self) -> int:
        """Of an epoch."""
        return int(self.examples.lengths.sum())

    @property
    def supervised_tokens(self) -> int:
        return int(self.examples.num_trained.sum())

    @property
    def source_names(self) -> tuple[str, ...]:
        return tuple(source.name for source in self.examples.report.sources)

    def size(self, max_length: int) -> EpochSize:
        return EpochSize(
            len(self.examples), len(self.rows), self.tokens, self.supervised_tokens, self.efficiency(max_length)
        )

    @property
    def formats(self) -> tuple[str, ...]:
        """Of each source."""
        return tuple(source.format for source in self.examples.report.sources)

    def first_example(self) -> Example:
        return self.examples[0]

    def first_examples(self, source: int, count: int) -> list[Example]:
        """At most `count` examples of a source."""
        return [self.examples[i] for i in self.examples.of_source(source)[:count]]

    def heaviest_row(self, max_length: int) -> tuple[int, int]:
        """(tokens of the longest row, trained tokens of the row that has most of them)."""
        return tuple(  # pyright: ignore[reportReturnType]  (two)
            int(np.add.reduceat(counts[self.rows.members], self.rows.offsets[:-1]).max())
            for counts in (self.examples.lengths, self.examples.num_trained)
        )

    def facts(self) -> dict[str, int | str]:
        """What tells these rows from others: a checkpoint keeps them. `lengths`: checksum over every example's tokens,
        all and trained, which decide how examples are packed and ordered."""
        lengths = hashlib.sha256(self.examples.lengths.astype("<i8").tobytes())
        lengths.update(self.examples.num_trained.astype("<i8").tobytes())
        return {
            "examples": len(self.examples),
            "rows": len(self.rows),
            "tokens": self.tokens,
            "lengths": lengths.hexdigest()[:16],
        }

    def efficiency(self, max_length: int) -> float:
        """Tokens over the room in all rows."""
        return self.rows.efficiency(self.examples.lengths, max_length)

    def in_order(self, recipe: Recipe) -> OrderedRows:
        """As a run sees them: a pure function of the recipe and the rows, the same on any number of processes."""
        group = group_rows(recipe.data.balance, recipe.batch.rows)
        work = row_work(self.rows, self.examples.lengths)
        return OrderedRows(self.examples, self.rows, RowOrder(len(self.rows), recipe.run.seed, work, group))

    def unpacked(self) -> Dataset:
        """The same examples, one in a row."""
        return Dataset(self.examples, one_per_row(self.examples.lengths))


@dataclass(frozen=True)
class Stream:
    """Training data that is read as it is needed (`data.streaming`)."""

    rows: StreamedRows
    source_names: tuple[str, ...]
    formats: tuple[str, ...]  # of each source
    identity: str  # changes when the content or what it is made into does

    def size(self, max_length: int) -> None:
        """Nobody knows before its end."""

    def facts(self) -> dict[str, int | str]:
        return {"stream": self.identity}

    def in_order(self, recipe: Recipe) -> StreamedRows:
        return self.rows

    def first_example(self) -> Example:
        return self.rows.documents(0)[0]

    def first_examples(self, source: int, count: int) -> list[Example]:
        """At most `count` examples of a source."""
        return self.rows.first_examples(source, count)

    def heaviest_row(self, max_length: int) -> tuple[int, int]:
        """Nobody knows before its end: a full row of which all is trained that can be."""
        return max_length, max_length - 1

    def unpacked(self) -> Stream:
        raise UserError(
            "data.streaming: set it to false; a stream is packed, and this architecture cannot keep documents apart"
        )


def build_training(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Dataset | Stream:
    """What `data.train` gives to train on. Raises UserError."""
    if recipe.data.streaming:
        stream = open_stream(recipe, tokenizer)
        data = Stream(StreamedRows(recipe, stream.tapes), stream.names, tuple(stream.formats), stream.identity)
    else:
        data = build_dataset(recipe, recipe.data.train, tokenizer)
        _check_caps(recipe, data)
    _check_no_preference("data.train", data.formats)
    return data


def build_held_out(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Dataset | None:
    """What `data.eval` gives to evaluate on; None where there is none. Raises UserError."""
    if not recipe.data.eval:
        return None
    data = build_dataset(recipe, recipe.data.eval, tokenizer)
    _check_no_preference("data.eval", data.formats)
    return data


def _check_no_preference(key: str, formats: Sequence[str]) -> None:
    """Raises UserError for pairs: both answers would count as good ones."""
    if "preference" in formats:
        does = "trains" if key == "data.train" else "is evaluated"
        raise UserError(
            f"{key}[{formats.index('preference')}]: pairs of a preference are read and rendered, and `finetune "
            f"inspect` shows them; no objective {does} on them yet. Use the chosen answers alone with `format: "
            "prompt_completion` and `columns: {completion: chosen}`"
        )


def _check_caps(recipe: Recipe, data: Dataset) -> None:
    """`max_epochs` where the run's length is known by its steps."""
    steps, epochs = recipe.train.max_steps, recipe.train.epochs
    if steps is not None:
        by_steps = steps * recipe.batch.rows / len(data.rows)
        passes = [source.passes for source in data.examples.report.sources]
        check_caps(recipe.data.train, passes, min(by_steps, epochs or by_steps))


def build_dataset(
    recipe: Recipe,
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    progress: Callable[[int], None] | None = None,
) -> Dataset:
    """Rows of tokens, made once and cached; every process may ask at the same time. Raises UserError."""
    examples = prepare_examples(recipe, sources, tokenizer, progress)
    packed = pack(examples.lengths, recipe.data.max_length) if recipe.data.packing else one_per_row(examples.lengths)
    return Dataset(examples, packed)


def template_notes(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What is worth knowing of the chat template; the tokenizer takes the recipe's, so that the result carries it.

    Raises UserError where its masks cannot be right.
    """
    template = resolve_template(recipe.model.chat_template, tokenizer, recipe.model.chat_template_arguments)
    if template is not None:
        tokenizer.chat_template = template.text
    findings = check_template(tokenizer, template, recipe.objective.train_on)
    problems = [text.removeprefix("problem: ") for text in findings if text.startswith("problem: ")]
    if problems and any(_is_rendered(source) for source in (*recipe.data.train, *recipe.data.eval)):
        raise UserError("model.chat_template: " + "; ".join(problems))
    return [text.removeprefix("note: ") for text in findings if text.startswith("note: ")]


def _is_rendered(source: Source) -> bool:
    """Whether its rows go through the chat template."""
    return open_source(source).source.format not in ("text", "tokens")
