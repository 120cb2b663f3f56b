"""A sample of a table's rows, read once; and the samples in them, under a format and columns."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from finetune.data.building import num_characters, read_items
from finetune.data.formats.detect import parse_row
from finetune.data.formats.values import Row
from finetune.data.samples import BadRow, Conversation, Labelled, MediaKind, Preference, Ranked, Sample
from finetune.data.sources.source import SourceReader
from finetune.data.tokenizing import Item
from finetune.desk.setup.roles import RoleChoice, unused_columns
from finetune.errors import UserError
from finetune.recipe.objective_settings import OBJECTIVE_SECTIONS, objective_of_rows
from finetune.recipe.schema import Source

# Rows and characters read; the rest of a larger source is assumed to be similar.
LOOK_ROWS, LOOK_CHARACTERS = 5_000, 20_000_000


@dataclass(frozen=True)
class TableSample:
    """The first rows of a source."""

    path: str
    items: tuple[Item, ...]
    is_all: bool  # every row was read; else `count` is an estimate
    count: int  # rows, bad ones included
    note: str | None = None  # on files of a folder that are left out

    @cached_property
    def rows(self) -> list[Row]:
        """Returns the rows that can be read, of any format."""
        return [row for _, _, row in self.items if not isinstance(row, str)]

    @property
    def place(self) -> str:
        """Returns the file and number of the first row that can be read."""
        return next(f"{label}:{number}" for label, number, row in self.items if not isinstance(row, str))


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
    unused: tuple[str, ...] = ()  # columns
    given_objective: str | None = None  # by the user

    @property
    def objective(self) -> str:
        return self.given_objective or objective_of_rows(self.format)

    @property
    def can_split(self) -> bool:
        """Returns whether examples that are too long are kept, in pieces."""
        return self.format in ("text", "tokens")

    @property
    def labels(self) -> list[str]:
        """Returns the classes that occur, in order; for indices all up to the highest."""
        labels = {one.label for one in self.samples if isinstance(one, Labelled)}
        if all(isinstance(label, int) for label in labels):
            return [str(i) for i in range(max(map(int, labels), default=0) + 1)]
        return sorted(map(str, labels))

    @property
    def media_kinds(self) -> tuple[MediaKind, ...]:
        """The kinds of the files in the first rows, in their order."""
        conversations = (conversation_of(sample) for sample in self.samples[:100])
        messages = (message for one in conversations if one is not None for message in one.messages)
        return tuple(dict.fromkeys(reference.kind for message in messages for reference in message.media))

    @property
    def media_kind(self) -> MediaKind | None:
        """The kind of the first file in a row; None without files."""
        return next(iter(self.media_kinds), None)

    def check_labels(self) -> None:
        """Raises UserError if a classifier would have a single class."""
        if self.objective == "classify" and len(self.labels) < 2:
            raise UserError(
                f"{self.items[0][0]}: `label` is {self.labels[0]} in every row. A classifier needs at least two "
                "labels. Fix: add rows of another label; to train on the texts themselves, rename or remove that column"
            )


def conversation_of(sample: Sample) -> Conversation | None:
    """Returns the conversation of a sample, the chosen or first of several; None if it has none."""
    if isinstance(sample, Ranked):
        return conversation_of(sample.answers[0])
    if isinstance(sample, Preference):
        return conversation_of(sample.chosen)
    if isinstance(sample, Labelled):
        return conversation_of(sample.sample)
    return sample if isinstance(sample, Conversation) else None


def read_sample(path: str) -> TableSample:
    """Returns the first rows of a source. Raises UserError if none can be read."""
    reader = SourceReader(Source(path=path))
    read, characters = list[Item](), 0
    with closing(read_items(reader)) as items:
        for item in islice(items, LOOK_ROWS):
            read.append(item)
            characters += num_characters(item[2])
            if characters >= LOOK_CHARACTERS:
                break
        is_all = next(items, None) is None
    count = len(read) if is_all else max(len(read), reader.estimated_rows() or 0)
    sample = TableSample(path, tuple(read), is_all, count, reader.note)
    if not sample.rows:
        first = f": {read[0][0]}:{read[0][1]}: {read[0][2]}" if read else ""
        raise UserError(f"{path}: no row can be read{first}. Fix: correct the file, or give another")
    return sample


def parse_sample(sample: TableSample, choice: RoleChoice, objective: str | None = None) -> RowsFound:
    """Reads the rows as a format. objective: given by the user."""
    is_prompt = OBJECTIVE_SECTIONS[objective or objective_of_rows(choice.format)].takes_rewards
    samples, bad = [], []
    for label, number, row in sample.items:
        try:
            if isinstance(row, str):
                raise BadRow(row)
            samples.append(parse_row(row, choice.format, choice.columns, is_prompt))
        except BadRow as error:
            bad.append(f"{label}:{number}: {error}")
    read = (tuple(bad), sample.is_all, tuple(samples), sample.items)
    unused = tuple(unused_columns(sample.rows, choice))
    return RowsFound(choice.format, choice.columns, choice.reason, sample.count, *read, unused, objective)
