"""The prompts of a run: each row up to its last answer, which is the reference for rewards, or all of a row that does
not end with an answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from finetune.data.building import OpenedSources, read_items
from finetune.data.dataset import Dataset, question_of
from finetune.data.formats.converters import FORMATS
from finetune.data.formats.detect import parse_row
from finetune.data.packing import RowOrder
from finetune.data.samples import FILE, Conversation, Example, Medium, Message, PromptCompletion, PromptOnly
from finetune.errors import UserError
from finetune.recipe import Recipe
from finetune.recipe.schema import RewardList, Source
from finetune.rl.rewards.completion import Completion
from finetune.rl.rewards.scoring import reads_reference

RowKey = tuple[int, str, int]  # source, path, row


@dataclass(frozen=True)
class RowPrompt:
    """One row's prompt."""

    path: str  # file or dataset
    row: int  # its line or row there, from 1
    source: int  # index in `data.train`, of a held-out row in `data.eval`
    ids: list[int]
    reference: list[int]  # ids of the row's last answer, with its end token, as samples have it; [] without one
    media: tuple[Medium, ...] = ()  # in the order of their tokens

    @property
    def key(self) -> RowKey:
        return self.source, self.path, self.row


@dataclass(frozen=True)
class PromptContent:
    """The parts of a row that rewards may read, besides its answer."""

    messages: tuple[dict[str, Any], ...]  # of the prompt
    columns: Mapping[str, Any]  # that the format does not read
    conversation: Conversation | None = field(default=None, compare=False, repr=False)  # of the prompt, for turns


class RunPrompts:
    """The prompts that leave room for a sample, in the order of a run: a pure function of recipe and rows."""

    def __init__(self, recipe: Recipe, data: Dataset, part: Literal["train", "eval"] = "train"):
        """data: of `data.train`, or of `data.eval`, by `part`. Raises UserError if no prompt leaves room, or, under
        `data.overlong: error`, if one leaves none."""
        assert recipe.rollouts is not None  # a rule of the recipe
        self._recipe, self._part = recipe, part
        self._sources = recipe.data.train if part == "train" else recipe.data.eval_sources
        self.content = data.content()
        self.room = recipe.data.max_length - recipe.rollouts.max_new_tokens  # tokens of the longest prompt
        self.prompts, self.num_long, self.num_without = list[RowPrompt](), 0, 0
        for example in data.examples:
            prompt = prompt_of(example, data.formats[example.source])
            if prompt is None:
                self.num_without += 1
            elif len(prompt.ids) <= self.room:
                self.prompts.append(prompt)
            elif recipe.data.overlong == "error":
                raise UserError(
                    f"{example.path}:{example.row}: its prompt has {len(prompt.ids)} tokens, and there is room for "
                    f"{self.room}. That is data.max_length less rollouts.max_new_tokens. Fix: raise data.max_length, "
                    "or set data.overlong: drop"
                )
            else:
                self.num_long += 1
        if not self.prompts:
            raise UserError(
                f"data.{part}: none of {len(data.examples):,} rows has a prompt of at most {self.room} tokens. That is "
                "data.max_length less rollouts.max_new_tokens. Fix: raise the first, lower the second, or give shorter "
                "prompts"
            )
        check_references(recipe.rewards, self.prompts)
        self._order = RowOrder(len(self.prompts), recipe.run.seed)

    @property
    def notes(self) -> list[str]:
        """Returns notes on rows that give no prompt."""
        of = "held-out " if self._part == "eval" else ""
        long = f"{self.num_long:,} {of}prompts dropped: with {self.room:,} tokens or fewer a sample has room"
        without = f"{self.num_without:,} {of}rows dropped that have no prompt"
        return [note for count, note in ((self.num_long, long), (self.num_without, without)) if count]

    def drawn(self, draw: int) -> RowPrompt:
        """Returns the prompt of a draw (0-based) of the run; each epoch has all prompts in another order."""
        return self.prompts[self._order.row_at(draw)]

    def epochs(self, draws: int) -> float:
        return self._order.epochs(draws)

    def contents(self, prompts: Iterable[RowPrompt]) -> list[PromptContent]:
        """Returns the parts of the prompts' rows that rewards may read."""
        return [self._contents[prompt.key] for prompt in prompts]

    @cached_property
    def by_row(self) -> dict[RowKey, RowPrompt]:
        """The prompt of each row."""
        return {prompt.key: prompt for prompt in self.prompts}

    @cached_property
    def _contents(self) -> dict[RowKey, PromptContent]:
        return read_contents(self._recipe, self._sources, self.prompts)


def prompt_of(example: Example, format: str) -> RowPrompt | None:
    """Returns the prompt of an example of a source of `format`; None if its first token is trained."""
    place = (example.path, example.row, example.source)
    if not example.num_targets:
        (whole,) = example.sequences
        return RowPrompt(*place, whole.input_ids.tolist(), [], whole.media)
    question = question_of(example, format, ())
    return None if question is None else RowPrompt(*place, question.prompt, question.reference, question.media)


def check_references(rewards: RewardList, prompts: Iterable[RowPrompt]) -> None:
    """Raises UserError if a prompt has no reference and a reward needs it."""
    needing = [i for i, one in enumerate(rewards) if one.on_failure is None and reads_reference(one)]
    without = next((prompt for prompt in prompts if not prompt.reference), None)
    if needing and without is not None:
        i, label = needing[0], rewards[needing[0]].label
        raise UserError(
            f"{without.path}:{without.row}: the row has no answer, which rewards[{i}] ({label}) needs. Fix: give the "
            "row its answer, use a reward that reads other columns, or set `on_failure`"
        )


def read_contents(
    recipe: Recipe, sources: Sequence[Source], prompts: Iterable[RowPrompt]
) -> dict[RowKey, PromptContent]:
    """Returns the content of each prompt's row; reads their sources once more, up to the last of these rows."""
    wanted, opened = {prompt.key for prompt in prompts}, OpenedSources(recipe)
    contents: dict[RowKey, PromptContent] = {}
    for i, given in enumerate(sources):
        source, left = opened.open(given), sum(key[0] == i for key in wanted)
        with closing(read_items(source.reader)) as items:
            for label, number, row in items:
                if not left:
                    break
                if (i, label, number) in wanted and not isinstance(row, str):  # a text says why a row cannot be read
                    contents[i, label, number] = content_of(row, source.source)
                    left -= 1
    return contents


def content_of(row: Mapping[str, Any], source: Source) -> PromptContent:
    """Returns the parts of a row that rewards may read. source: its format is resolved, never `auto`."""
    sample = parse_row(row, source.format, source.columns, prompts=True)
    if isinstance(sample, PromptOnly):
        conversation, messages = sample.conversation, sample.conversation.messages
    else:
        assert isinstance(sample, Conversation | PromptCompletion)  # by `Recipe.row_kind`
        conversation = sample.as_conversation() if isinstance(sample, PromptCompletion) else sample
        answers = [i for i, message in enumerate(conversation.messages) if message.role == "assistant"]
        messages = conversation.messages[: answers[-1]]
    renamed = source.columns or {}
    read = {*renamed.values(), *(field for field in FORMATS[source.format].fields if field not in renamed)}
    columns = {name: value for name, value in row.items() if name not in read}
    return PromptContent(tuple(map(message_dict, messages)), columns, replace(conversation, messages=tuple(messages)))


def message_dict(message: Message) -> dict[str, Any]:
    """Returns a message with the keys that its row has; a file is `<image>`, `<video>` or `<audio>` in its text."""
    optional = {
        "reasoning_content": message.reasoning,
        "tool_calls": [dict(call) for call in message.tool_calls],
        "name": message.name,
        "tool_call_id": message.tool_call_id,
    }
    present = {key: value for key, value in optional.items() if value}
    content = message.content
    for file in message.media:
        content = content.replace(FILE, f"<{file.kind}>", 1)
    return {"role": message.role, "content": content, **present}


def completion_of(
    prompt: RowPrompt,
    content: PromptContent,
    ids: list[int],
    tokenizer: PreTrainedTokenizerBase,
    is_truncated: bool,
    sample: int | None = None,
) -> Completion:
    """Returns sampled tokens as rewards see them. sample: its number; None for a reference in place of a sample."""

    def text(of: list[int]) -> str:
        return str(tokenizer.decode(of, skip_special_tokens=True))

    return Completion(
        prompt=str(tokenizer.decode(prompt.ids)),
        messages=content.messages,
        text=text(ids),
        reference=text(prompt.reference) if prompt.reference else None,
        columns=content.columns,
        num_tokens=len(ids),
        is_truncated=is_truncated,
        place=f"{prompt.path}:{prompt.row}" + (f", sample {sample}" if sample is not None else ""),
    )
