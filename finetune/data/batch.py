"""Rows of documents become micro-batches, and micro-batches are dealt to processes.

Letters: `T` tokens of a micro-batch, `S` supervised tokens of it. The only module of this room that knows torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from finetune.data.examples import UNTRAINED, Example, Examples
from finetune.data.order import RowOrder
from finetune.data.packing import Rows
from finetune.errors import UserError
from finetune.recipe import divisibility_message


@dataclass(frozen=True)
class Batch:
    """One micro-batch: whole documents end to end in one flat row, without padding (see `collate`)."""

    input_ids: Tensor  # (1, T) int64
    labels: Tensor  # (1, T) int64, aligned with input_ids; -100 where not trained, and at each document's first token
    position_ids: Tensor  # (1, T) int64, from 0 in every document
    document_lengths: tuple[int, ...]  # tokens; they sum to T
    documents: tuple[tuple[str, int], ...]  # (path, row) of each document that counts
    num_supervised: int  # targets: labels that are not -100
    num_tokens: int  # tokens of documents that count; fillers (`Loader`) are in T and not in here
    index: int = 0  # number of this micro-batch within its step, over all processes; seeds dropout

    def to(self, device: torch.device | str) -> Batch:
        """The same with its tensors on `device`."""
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            labels=self.labels.to(device),
            position_ids=self.position_ids.to(device),
        )

    @property
    def shifted_targets(self) -> tuple[Tensor, Tensor]:
        """Shorthand for `shifted_targets(self)`."""
        return shifted_targets(self)


def collate(examples: Sequence[Example], index: int = 0) -> Batch:
    """Documents end to end. No padding, no attention mask; `position_ids` start again with every document.

        document         |----- a ------|  |--- b ----|
        input_ids      [[  1, 11, 12,  2,    1, 21,  2 ]]
        labels         [[-100,-100,12,  2, -100,-100, 2 ]]
        position_ids   [[  0,  1,  2,  3,    0,  1,  2 ]]
        document_lengths  (4, 3)       num_supervised  3

    Raises ValueError for a trained first token: nothing within its document predicts it.
    """
    for example in examples:
        if example.labels[0] != UNTRAINED:
            raise ValueError(f"{example.path}:{example.row}: the first token of a document cannot be trained")
    labels = np.concatenate([example.labels for example in examples])
    lengths = tuple(len(example.input_ids) for example in examples)
    return Batch(
        input_ids=_flat_row(np.concatenate([example.input_ids for example in examples])),
        labels=_flat_row(labels),
        position_ids=_flat_row(np.concatenate([np.arange(length) for length in lengths])),
        document_lengths=lengths,
        documents=tuple((example.path, example.row) for example in examples),
        num_supervised=int(np.count_nonzero(labels != UNTRAINED)),
        num_tokens=sum(lengths),
        index=index,
    )


def _flat_row(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))[None]  # (1, T)


def shifted_targets(batch: Batch) -> tuple[Tensor, Tensor]:
    """Where a trained token is predicted, and which: the one place where labels are shifted.

    positions (S,) int64: places t of the flat row whose NEXT token is trained. targets (S,): that token's id.
    For the batch of `collate`'s example: positions [1, 2, 5], targets [12, 2, 2]. Never across documents, because
    the first label of each is -100.
    """
    following = batch.labels[0, 1:]  # (T - 1,)
    positions = torch.nonzero(following != UNTRAINED).squeeze(1)
    return positions, following[positions]


@dataclass(frozen=True)
class Loader:
    """Deals the rows of a run to processes; the same rows in the same micro-batches at any world size.

        step s, rows_per_step 8, rows_per_device 2     row positions 8s+0 .. 8s+7
        micro-batch m                                  0: 8s+0,1   1: 8s+2,3   2: 8s+4,5   3: 8s+6,7
        of world_size 1 / 2                            rank 0 0 0 0 / rank 0 1 0 1

    Where the run ends within a step (position >= total_rows), earlier rows stand in with every label -100: each
    process has a forward to do and nothing is trained twice.
    """

    examples: Examples
    rows: Rows
    order: RowOrder
    rows_per_step: int  # over all processes
    rows_per_device: int  # in one micro-batch
    rank: int
    world_size: int
    total_rows: int  # row positions of the run

    def __post_init__(self) -> None:
        if self.rows_per_step % (self.rows_per_device * self.world_size):
            raise UserError(divisibility_message(self.rows_per_step, self.rows_per_device, self.world_size))

    @property
    def micro_batches_per_step(self) -> int:
        """Over all processes."""
        return self.rows_per_step // self.rows_per_device

    def step(self, step: int) -> list[Batch]:
        """Micro-batches of this rank for optimizer step `step` (0-based), in order."""
        first = step * self.rows_per_step
        if not 0 <= first < self.total_rows:
            raise IndexError(f"step {step} begins at row {first} of a run of {self.total_rows} rows")
        mine = range(self.rank, self.micro_batches_per_step, self.world_size)
        return [self._micro_batch(m, first + m * self.rows_per_device) for m in mine]

    def all_batches(self) -> Iterator[Batch]:
        """Every row once, in order, for evaluation; all ranks get the same number of micro-batches."""
        count = -(-len(self.rows) // self.rows_per_device)
        for first in range(0, count, self.world_size):
            m = first + self.rank
            places = range(m * self.rows_per_device, (m + 1) * self.rows_per_device)
            real = [place for place in places if place < len(self.rows)]
            # A whole micro-batch too many: one masked row keeps the ranks in step.
            yield self._assemble(m, [(place, True) for place in real] or [(0, False)])

    def _micro_batch(self, index: int, first: int) -> Batch:
        positions = range(first, first + self.rows_per_device)
        chosen = [(self.order.row_at(p % self.total_rows), p < self.total_rows) for p in positions]
        return self._assemble(index, chosen)

    def _assemble(self, index: int, rows: Sequence[tuple[int, bool]]) -> Batch:
        """`rows`: (row, whether it counts); one that does not is masked."""
        documents = [(self.examples[int(member)], counts) for row, counts in rows for member in self.rows[row]]
        batch = collate([example if counts else _masked(example) for example, counts in documents], index)
        counted = [example for example, counts in documents if counts]
        return replace(
            batch,
            documents=tuple((example.path, example.row) for example in counted),
            num_tokens=sum(len(example.input_ids) for example in counted),
        )


def _masked(example: Example) -> Example:
    return replace(example, labels=np.full_like(example.labels, UNTRAINED))
