"""The interface of a run's rows: data on the disk, a stream, or samples of the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune.data.samples import Example, SharedPrompt
from finetune.recipe import Recipe


class RunRows(ABC):
    """Rows at their positions (0-based), as a loader reads them: on one thread, the one that makes batches."""

    ahead = 2  # steps that may be prepared, and their batches made, before the step that runs has ended

    def prepare(self, step: int) -> None:  # noqa: B027  (most sources have all rows from the start)
        """Makes the rows of a step, before one of them is read. Collective; every step once, in order, on the thread
        that trains."""

    def opened(self) -> AbstractContextManager[None]:
        """Context manager around the steps and evaluations of a run, for what making rows needs. Collective."""
        return nullcontext()

    def measured(self, step: int) -> Mapping[str, float]:
        """Returns metrics of the rows of a step, for its line; `time/*` are seconds within the phase `data`."""
        return {}

    def evaluated(self, step: int) -> Mapping[str, float]:
        """Returns metrics of an evaluation after a step that need more than the loss of held-out rows. Collective."""
        return {}

    @abstractmethod
    def row(self, position: int) -> list[Example]:
        """Returns the examples of a row, their sequences in the order of `lengths`; with images, of all rows of a
        step."""

    @abstractmethod
    def lengths(self, position: int) -> NDArray[np.int64]:
        """Returns the tokens of every sequence of a row; every process needs it for all rows of a step."""

    @abstractmethod
    def counts(self, position: int) -> Mapping[str, int]:
        """Returns the counts that a row adds to its step's, see `ExampleSizes.counts`; for all rows of a step, too."""

    def prompt(self, position: int) -> SharedPrompt | None:
        """Returns the beginning that the row, one sequence, shares with others of its step; None if it has none."""
        return None

    @abstractmethod
    def epoch_at(self, position: int) -> float:
        """Returns the passes over the data that are done when the rows before this position are."""


@dataclass(frozen=True)
class EpochSize:
    """Sizes of one pass over the data."""

    examples: int
    rows: int
    tokens: int
    supervised_tokens: int
    packing_efficiency: float  # tokens / (rows * max_length)
    shared_tokens: int  # that pairs have in common, see `ExampleSizes`
    run_rows: int | None  # of the whole run, if its epochs take different examples


class RowSource(RunRows):
    """The training data of a run."""

    @property
    @abstractmethod
    def source_names(self) -> tuple[str, ...]: ...

    @property
    @abstractmethod
    def formats(self) -> tuple[str, ...]:
        """Formats of the sources."""

    @abstractmethod
    def in_order(self, recipe: Recipe) -> RowSource:
        """Returns the rows in the order of a run: a pure function of the recipe and the rows, on any number of
        processes."""

    @abstractmethod
    def unpacked(self) -> RowSource:
        """Returns the same examples, each in a row of its own. Raises UserError if that is not possible."""

    @abstractmethod
    def size(self, max_length: int) -> EpochSize | None:
        """Returns the sizes of an epoch; None if they are not known before the run. Data of known size is on disk."""

    @abstractmethod
    def first_examples(self, source: int, count: int) -> list[Example]:
        """Returns at most `count` examples of a source."""

    @abstractmethod
    def heaviest_row(self, max_length: int, shares_prompts: bool = False) -> tuple[int, int]:
        """Returns (tokens that the longest row computes, most trained tokens of a row), or more if they are not known
        before the run."""

    @abstractmethod
    def facts(self, part: str, max_length: int) -> dict[str, str]:
        """Returns the sizes that `check` reports. part: train or eval."""

    @abstractmethod
    def summary(self) -> dict[str, float | str]:
        """Identifies the rows: a checkpoint keeps it."""

    @abstractmethod
    def content(self) -> dict[str, Any]:
        """Returns the content of the rows, source by source, independent of their files."""

    def extra_state(self, position: int) -> dict[str, Any]:
        """Returns the state of the rows before a position that a checkpoint keeps in addition to `content`."""
        return {}

    def same_state(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Returns `extra_state` of this data for the rows of a checkpoint, to be compared. saved: its state. Raises
        UserError."""
        return {}
