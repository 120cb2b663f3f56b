"""Samples and examples: the content of a row, and the result of rendering it.

Formats make samples: a conversation, plain text, a prompt with or without its completion, ids, a preference, ranked
answers, or something with a label. Rendering turns them into examples: groups of token sequences.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray


class BadRow(Exception):
    """A row that cannot be used: the value and the expected one. The caller that knows file and row adds them."""


# Stands in a message's content for each of its files (U+FFFC, which is for such things).
FILE = "\N{OBJECT REPLACEMENT CHARACTER}"
MediaKind = Literal["image", "audio", "video"]


class Reference(NamedTuple):
    """A file that a message of a row names."""

    kind: MediaKind
    # A path, a data URL, or the file itself; of a video also `LISTED` and paths of its frames, as `listed` joins them.
    # None: the next in its kind's column.
    source: str | bytes | None


LISTED = "\0"  # before each path of a list, as no path has it


def listed(paths: Iterable[str]) -> str:
    """Returns several paths as one source."""
    return "".join(LISTED + path for path in paths)


def files_of(source: str) -> list[str]:
    """Returns the paths of a source: itself, or those of a list."""
    return source.split(LISTED)[1:] if source.startswith(LISTED) else [source]


@dataclass(frozen=True)
class Message:
    """One turn. Of an assistant, `content` may be empty if `tool_calls` are not."""

    role: str  # system | developer | user | assistant | tool
    content: str
    train: bool = True  # an assistant's: false leaves it as context; without meaning for the other roles
    reasoning: str | None = None  # an assistant's reasoning before its answer
    tool_calls: tuple[
        Mapping[str, Any], ...
    ] = ()  # {"type": "function", "id"?: ..., "function": {"name", "arguments"}}
    name: str | None = None  # of the tool that answers
    tool_call_id: str | None = None  # of the call that a tool answers
    media: tuple[Reference, ...] = ()  # those that `FILE` stands for, in order

    @property
    def texts(self) -> list[str]:
        """Returns the texts before, between and after the files."""
        return self.content.split(FILE) if self.media else [self.content]


@dataclass(frozen=True)
class Conversation:
    """Messages in an order that makes sense; in rows to train on, with at least one of the assistant's."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()  # JSON schemas of the functions that may be called
    template_arguments: Mapping[str, Any] = field(default_factory=dict)  # values of the chat template's variables


@dataclass(frozen=True)
class Text:
    """Plain text, all of it trained."""

    text: str


@dataclass(frozen=True)
class PromptCompletion:
    """Two strings. With a chat template a user and an assistant message; without, one text after the other."""

    prompt: str
    completion: str

    def as_conversation(self) -> Conversation:
        return Conversation((Message("user", self.prompt), Message("assistant", self.completion)))


@dataclass(frozen=True)
class Ids:
    """Tokens as they are, with their trained parts."""

    input_ids: tuple[int, ...]
    trained: tuple[bool, ...]  # as long; the first is never trained


@dataclass(frozen=True)
class PromptOnly:
    """The messages before an answer, for rows whose answers a run samples."""

    conversation: Conversation  # its last message is not an assistant's
    text: str | None = None  # all of the row, if it is one text, which needs no chat template


@dataclass(frozen=True)
class Preference:
    """Two answers to the same prompt, the better one first."""

    chosen: Conversation | PromptCompletion
    rejected: Conversation | PromptCompletion
    margin: float = 0.0  # by how much it is better, if the row says


@dataclass(frozen=True)
class Ranked:
    """Several answers to the same prompt, each with its score."""

    answers: tuple[Conversation | PromptCompletion, ...]
    scores: tuple[float, ...]


@dataclass(frozen=True)
class Labelled:
    """An answer that is marked as good or bad, or a text with the name or index of its class."""

    sample: Conversation | PromptCompletion | Text
    label: bool | int | str


Drawable = Conversation | Text | PromptCompletion | PromptOnly | Ids | Preference  # that a renderer draws
Sample = Drawable | Ranked | Labelled


# --- examples


@dataclass(frozen=True)
class Image:
    """An image as it is stored, and the tokens of a sequence that stand for it; its pixels are read when trained on."""

    source: str | bytes  # path of its file, or the file itself, if the row has it
    height: int  # pixels, as it is seen: turned as its EXIF data says
    width: int
    begin: int  # its tokens [begin, end) of the sequence, marks of lines and crops included; none is ever trained
    end: int


@dataclass(frozen=True)
class Clip:
    """A sound file as it is stored, and the tokens of a sequence that stand for it; read when trained on."""

    source: str | bytes  # path of its file, or the file itself, if the row has it
    samples: int  # of one channel
    rate: int  # samples a second
    begin: int  # its tokens [begin, end) of the sequence; none is ever trained
    end: int


@dataclass(frozen=True)
class Video:
    """A video as it is stored, and the tokens of a sequence that stand for it; decoded when trained on."""

    source: str | bytes  # path of its file, `LISTED` paths of its frames, or the file itself, if the row has it
    frames: int  # that its file has
    rate: Fraction  # of these, frames a second
    height: int  # pixels, as it is seen: turned as its file says
    width: int
    seen: int  # frames that the model sees
    begin: int  # its tokens [begin, end) of the sequence, times and marks of its frames included; none is ever trained
    end: int


Medium = Image | Clip | Video


def kind_of(medium: Medium) -> MediaKind:
    """Returns the kind of a file."""
    return "image" if isinstance(medium, Image) else "audio" if isinstance(medium, Clip) else "video"


@dataclass(frozen=True)
class Sequence:
    """Tokens that attention keeps apart from all others: a document, or one answer of a preference."""

    input_ids: NDArray[np.int32]  # (T,)
    loss_mask: NDArray[np.bool_]  # (T,) whether a token is trained; never the first, as no token predicts it
    media: tuple[Medium, ...] = ()  # in the order of their tokens

    @property
    def num_targets(self) -> int:
        return int(np.count_nonzero(self.loss_mask))


class SharedPrompt(NamedTuple):
    """The beginning of one example that others have as well: answers to one prompt."""

    key: Hashable  # of the prompt, within a step
    tokens: int  # that they begin with; each has at least one more


@dataclass(frozen=True)
class Example:
    """Sequences that are counted, weighted, packed, ordered and distributed as one: SFT 1, a preference 2 (chosen,
    rejected)."""

    path: str  # file or dataset
    row: int  # its line or row there, from 1
    source: int  # index in the recipe's sources
    sequences: tuple[Sequence, ...]
    columns: Mapping[str, float | tuple[float, ...]] = field(default_factory=dict)  # one number, or one per sequence
    target_columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)  # (num_targets, ...) each, in their order
    prompt: SharedPrompt | None = None  # of an example of one sequence, see `collate`

    @property
    def num_tokens(self) -> int:
        return sum(len(sequence.input_ids) for sequence in self.sequences)

    @property
    def num_targets(self) -> int:
        return sum(sequence.num_targets for sequence in self.sequences)

    @property
    def shared_tokens(self) -> int:
        """Tokens at the beginning of both sequences of a pair that need to be computed once only."""
        return shared_prefix(self.sequences)


def shared_prefix(sequences: Collection[Sequence]) -> int:
    """Returns the tokens of the longest beginning that two sequences share, and leaves each at least one of its own.

    By ids, not by texts: causal models compute the same there, even if it reaches into the answers. 0 if there
    are not two sequences, and with files, of which each sequence computes its own.

    1 5 6 7 8 2 and 1 5 6 9 2 -> 3      1 5 6 and 1 5 6 2 -> 2
    """
    if len(sequences) != 2 or any(sequence.media for sequence in sequences):
        return 0
    first, second = sequences
    most = min(len(first.input_ids), len(second.input_ids)) - 1
    differ = np.flatnonzero(first.input_ids[:most] != second.input_ids[:most])
    return int(differ[0]) if len(differ) else most


@dataclass(frozen=True)
class ExampleSizes:
    """Sizes of `N` examples of `M` sequences: all that packing, order and the counts of a step depend on.

    two pairs and a single sequence:  offsets [0, 2, 4, 5]   lengths [7, 9, 4, 4, 6]  ->  tokens [16, 8, 6]
    """

    offsets: NDArray[np.int64]  # (N + 1,) the sequences of example i are [offsets[i], offsets[i + 1]), at least one
    lengths: NDArray[np.int64]  # (M,) tokens
    targets: NDArray[np.int64]  # (M,) trained tokens
    shared: NDArray[np.int64]  # (N,) see `Example.shared_tokens`

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def tokens(self) -> NDArray[np.int64]:
        """(N,) tokens of each example."""
        return self._per_example(self.lengths)

    @cached_property
    def target_tokens(self) -> NDArray[np.int64]:
        """(N,) trained tokens of each example."""
        return self._per_example(self.targets)

    @cached_property
    def attention_work(self) -> NDArray[np.int64]:
        """(N,) token pairs that attention computes for each example: the squared lengths of its sequences."""
        return self._per_example(np.asarray(self.lengths, np.int64) ** 2)

    def take(self, indices: NDArray[np.int64]) -> ExampleSizes:
        """The sizes of some examples, in this order."""
        count = self.offsets[indices + 1] - self.offsets[indices]
        offsets = np.concatenate(([0], np.cumsum(count)))
        members = np.repeat(self.offsets[indices] - offsets[:-1], count) + np.arange(offsets[-1])
        return ExampleSizes(offsets, self.lengths[members], self.targets[members], self.shared[indices])

    def counts(self) -> dict[str, int]:
        """Sums over the examples, by the names that objectives divide by."""
        return {
            "target_tokens": int(self.targets.sum()),
            "first_target_tokens": int(self.targets[self.offsets[:-1]].sum()),  # of a preference: the chosen answer's
            "tokens": int(self.lengths.sum()),
            "sequences": len(self.lengths),
            "examples": len(self),
            "shared_tokens": int(self.shared.sum()),  # of `tokens`; computed or not
        }

    def _per_example(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        return values if len(values) == len(self) else np.add.reduceat(values, self.offsets[:-1])


def concatenate_sizes(parts: Iterable[ExampleSizes]) -> ExampleSizes:
    """The examples of all parts, one part after the other."""
    parts = list(parts)
    if len(parts) == 1:
        return parts[0]
    sizes = np.concatenate([np.diff(part.offsets) for part in parts])
    names = ("lengths", "targets", "shared")
    lengths, targets, shared = (np.concatenate([getattr(part, name) for part in parts]) for name in names)
    return ExampleSizes(np.concatenate(([0], np.cumsum(sizes))), lengths, targets, shared)
