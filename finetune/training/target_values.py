"""Values of every target by a pass without gradient: log-probabilities of samples by the model as it is, or by one that
they are compared with; a teacher's distributions.

The pass is the run's own: its engine, its micro-batches, the token loss of a `ForwardPass`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from finetune.data.batch import Batch, TokenShare
from finetune.data.loader import Loader
from finetune.data.prefetch import fed_steps
from finetune.data.row_source import RunRows
from finetune.data.samples import Example, SharedPrompt
from finetune.engine.ranks import Ranks
from finetune.models.wrapped import Outputs
from finetune.objectives.forward import ForwardPass
from finetune.objectives.objective import KEPT, KEPT_TOKENS

Values = tuple[NDArray[Any], ...]  # of one sequence, (targets, ...) each: its token losses, then `Outputs.details`
MakeLoader = Callable[[RunRows, int], Loader]  # of rows, and their number


class Computes(Protocol):
    """The parts of an `Engine` that a pass uses."""

    @property
    def ranks(self) -> Ranks: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def context_shard(self) -> TokenShare: ...
    def evaluating(self) -> AbstractContextManager[None]: ...
    def forwards(self, batches: list[Batch], forward: ForwardPass) -> Iterator[tuple[Batch, Outputs]]: ...


def values_of_targets(engine: Computes, forward: ForwardPass, batches: list[Batch]) -> dict[int, list[Values]]:
    """Returns the values of each sequence of every micro-batch of all ranks, by `Batch.index`, on every rank, in
    the order of the targets. Collective. batches: of this rank, on its device."""
    local, share = list[_RankPart](), engine.context_shard
    with engine.evaluating():
        for batch, outputs in engine.forwards(batches, forward):
            if batch.origins:
                places = share.places(batch.inputs["input_ids"].shape[1] * share.context * share.sequence)
                keys = np.stack([batch.targets.sequence.cpu().numpy(), places[batch.targets.positions.cpu().numpy()]])
                values = tuple(tensor.cpu().numpy() for tensor in (outputs.token_losses, *outputs.details))
                local.append(_RankPart(batch.index, len(batch.sequence_tokens), keys, values))
    parts = defaultdict[int, list[_RankPart]](list)
    for of_rank in engine.ranks.gather(local):
        for part in of_rank:
            parts[part.index].append(part)
    values_of = dict[int, list[Values]]()
    for index, shared in sorted(parts.items()):  # by several ranks; those that share layers have equal parts
        keys, first = np.unique(np.concatenate([part.keys for part in shared], 1), axis=1, return_index=True)
        values = [np.concatenate(of_ranks)[first] for of_ranks in zip(*(part.values for part in shared), strict=True)]
        ends = np.searchsorted(keys[0], np.arange(1, shared[0].num_sequences))
        values_of[index] = list(zip(*(np.split(one, ends) for one in values), strict=True))
    return values_of


class _RankPart(NamedTuple):
    """One rank's values of a micro-batch of S targets: of all of them, or of those among its s."""

    index: int  # position of the micro-batch in the step
    num_sequences: int
    keys: NDArray[np.int64]  # (2, s) sequence of each target, and the place in the row that predicts it
    values: Values  # (s, ...) each


# --- of any examples


class ExampleRows(RunRows):
    """Examples as rows of one each."""

    ahead = 0

    def __init__(self, examples: Sequence[Example], counts: Mapping[str, int] | None = None):
        """counts: units that each row adds to those of its tokens."""
        self.examples, self._counts = examples, counts or {}

    def row(self, position: int) -> list[Example]:
        return [self.examples[position]]

    def lengths(self, position: int) -> NDArray[np.int64]:
        return np.array([len(sequence.input_ids) for sequence in self.examples[position].sequences])

    def counts(self, position: int) -> Mapping[str, int]:
        example = self.examples[position]
        return {
            "target_tokens": example.num_targets,
            KEPT_TOKENS: example.num_targets if example.columns.get(KEPT, 1.0) else 0,
            "first_target_tokens": example.sequences[0].num_targets,
            "tokens": example.num_tokens,
            "sequences": len(example.sequences),
            "examples": 1,
            "shared_tokens": example.shared_tokens,
            **self._counts,
        }

    def prompt(self, position: int) -> SharedPrompt | None:
        return self.examples[position].prompt

    def epoch_at(self, position: int) -> float:
        return position / len(self.examples)


@dataclass(frozen=True)
class TargetPass:
    """Computes `Values` of any examples, in the micro-batches that training lays them out in."""

    engine: Computes
    forward: ForwardPass  # the token loss of its objective says which values
    loader: MakeLoader
    changed: Callable[[], AbstractContextManager[None]] = nullcontext  # the model while it runs, such as `adapters_off`

    def __call__(self, examples: Sequence[Example]) -> list[list[Values]]:
        """Returns the values of each sequence of each example, on every rank. Collective."""
        loader, values = self.loader(ExampleRows(examples), len(examples)), dict[int, list[Values]]()
        steps = range(-(-len(examples) // loader.rows_per_step))
        with fed_steps(loader, steps, self.engine.device) as feed, self.changed():
            for step in steps:
                of_step = values_of_targets(self.engine, self.forward, next(feed).batches)
                for index, positions in enumerate(loader.row_positions(step)):
                    sequences = iter(of_step[index])
                    values |= {i: [next(sequences) for _ in examples[i].sequences] for i in positions}
        return [values[i] for i in range(len(examples))]
