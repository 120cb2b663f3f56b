"""The prompts of a run: each row of `data.train` up to its last answer, which is the reference for rewards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from finetune.data.building import OpenedSources
from finetune.data.dataset import Dataset, question_of
from finetune.data.formats.converters import FORMATS
from finetune.data.formats.detect import parse_row
from finetune.data.packing import RowOrder
from finetune.data.samples import Conversation, PromptCompletion
from finetune.errors import UserError
from finetune.recipe import Recipe
from finetune.recipe.schema import Source


@dataclass(frozen=True)
class RowPrompt:
    """One row's prompt."""

    path: str  # file or dataset
    row: int  # its line or row there, from 1
    source: int  # index in `data.train`
    ids: list[int]
    reference: list[int]  # ids of the row's last answer, without its end token


@dataclass(frozen=True)
class PromptContent:
    """The parts of a row that rewards may read, besides its answer."""

    messages: tuple[dict[str, Any], ...]  # of the prompt
    columns: Mapping[str, Any]  # that the format does not read


class RunPrompts:
    """The prompts that leave room for a sample, in the order of a run: a pure function of recipe and rows."""

    def __init__(self, recipe: Recipe, data: Dataset):
        """Raises UserError if no prompt leaves room, or, under `data.overlong: error`, if one leaves none."""
        assert recipe.rollouts is not None  # a rule of the recipe
        self._recipe = recipe
        self.room = recipe.data.max_length - recipe.rollouts.max_new_tokens  # tokens of the longest prompt
        self.prompts, self.num_long, self.num_without = list[RowPrompt](), 0, 0
        for example in data.examples:
            question = question_of(example, data.formats[example.source], ())
            if question is None:
                self.num_without += 1
            elif len(question.prompt) <= self.room:
                reference = question.reference
                self.prompts.append(RowPrompt(example.path, example.row, example.source, question.prompt, reference))
            elif recipe.data.overlong == "error":
                raise UserError(
                    f"{example.path}:{example.row}: its prompt has {len(question.prompt)} tokens, and rollouts."
                    f"max_new_tokens leaves {self.room} of data.max_length: raise that, or set data.overlong: drop"
                )
            else:
                self.num_long += 1
        if not self.prompts:
            raise UserError(
                f"data.train: none of {len(data.examples):,} rows has a prompt of at most {self.room} tokens, "
                "data.max_length less rollouts.max_new_tokens"
            )
        self._order = RowOrder(len(self.prompts), recipe.run.seed)

    @property
    def notes(self) -> list[str]:
        """Returns notes on rows that give no prompt."""
        long = f"{self.num_long:,} prompts dropped: with {self.room:,} tokens or fewer a sample has room"
        without = f"{self.num_without:,} rows dropped that have no prompt"
        return [note for count, note in ((self.num_long, long), (self.num_without, without)) if count]

    def drawn(self, draw: int) -> RowPrompt:
        """Returns the prompt of a draw (0-based) of the run; each epoch has all prompts in another order."""
        return self.prompts[self._order.row_at(draw)]

    def epochs(self, draws: int) -> float:
        return self._order.epochs(draws)

    def contents(self, prompts: Iterable[RowPrompt]) -> list[PromptContent]:
        """Returns the parts of the prompts' rows that rewards may read."""
        return [self._contents[prompt.source, prompt.path, prompt.row] for prompt in prompts]

    @cached_property
    def _contents(self) -> dict[tuple[int, str, int], PromptContent]:
        """Content of every prompt's row; reads the sources once more."""
        wanted = {(prompt.source, prompt.path, prompt.row) for prompt in self.prompts}
        contents, opened = {}, OpenedSources(self._recipe)
        for i, given in enumerate(self._recipe.data.train):
            source = opened.open(given)
            for label, number, row in source.reader.rows(lambda *_: None):  # bad rows are no prompts
                if (i, label, number) in wanted:
                    contents[i, label, number] = content_of(row, source.source)
        return contents


def content_of(row: Mapping[str, Any], source: Source) -> PromptContent:
    """Returns the parts of a row that rewards may read. source: its format is resolved, never `auto`."""
    sample = parse_row(row, source.format, source.columns)
    if isinstance(sample, PromptCompletion):
        sample = sample.as_conversation()
    assert isinstance(sample, Conversation)  # by `ROW_KINDS`
    last = max(i for i, message in enumerate(sample.messages) if message.role == "assistant")
    messages = tuple({"role": message.role, "content": message.content} for message in sample.messages[:last])
    renamed = source.columns or {}
    read = {*renamed.values(), *(field for field in FORMATS[source.format].fields if field not in renamed)}
    return PromptContent(messages, {name: value for name, value in row.items() if name not in read})
