"""Rows of documents become micro-batches, and micro-batches are dealt to processes.

Letters: `T` tokens of a micro-batch, `S` supervised tokens of it. The only module of this room that knows torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finetune.data.chat.renderer import UNTRAINED
from finetune.data.examples import Example, Examples
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
    sources: tuple[int, ...]  # number of each such document's source
    num_supervised: int  # targets: labels that are not -100
    num_tokens: int  # tokens of documents that count; a filler (`Loader`) has T and none of these
    index: int = 0  # number of this micro-batch within its step, over all processes; seeds dropout


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
        sources=tuple(example.source for example in examples),
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


def target_sources(batch: Batch) -> Tensor:
    """(S,) int64: the source that each target of `shifted_targets` is from."""
    positions, targets = shifted_targets(batch)
    if not len(targets):
        return targets
    of_document, lengths = torch.tensor(batch.sources), torch.tensor(batch.document_lengths)
    return torch.repeat_interleave(of_document, lengths)[positions]


class RunRows(Protocol):
    """The rows of a run at their positions (0-based), whatever they come from."""

    def lengths(self, position: int) -> NDArray[np.int64]:
        """Tokens of every document of the row at a position; asked of all rows of a step, by every process."""
        ...

    def documents(self, position: int) -> list[Example]:
        """The documents themselves, in the same order; asked where they are trained on."""
        ...

    def epochs(self, position: int) -> float:
        """Passes over the data that are made when the rows before this position are."""
        ...


@dataclass(frozen=True)
class OrderedRows:
    """Rows of examples on disk, in an order; as they lie where there is none (evaluation)."""

    examples: Examples
    rows: Rows
    order: RowOrder | None = None

    def lengths(self, position: int) -> NDArray[np.int64]:
        return self.examples.lengths[self._members(position)]

    def documents(self, position: int) -> list[Example]:
        return [self.examples[int(member)] for member in self._members(position)]

    def epochs(self, position: int) -> float:
        return position / len(self.rows)

    def _members(self, position: int) -> NDArray[np.int64]:
        return self.rows[position if self.order is None else self.order.row_at(position)]


@dataclass(frozen=True)
class Loader:
    """Deals the rows of a run to processes; the same rows in the same micro-batches at any world size.

        step s, rows_per_step 8, rows_per_device 2     row positions 8s+0 .. 8s+7
        micro-batch m (`Batch.index`)                  0: 8s+0,1   1: 8s+2,3   2: 8s+4,5   3: 8s+6,7

    With `tokens_per_device` the rows of a step are sorted by length instead, longest first, and cut into micro-batches
    of at most so many tokens; there may be more of them in one step than in another.

    Which process runs a micro-batch follows from its work, the sum of squared document lengths: the heaviest run first,
    at the same time, one on each process; then the next heaviest, dealt the other way round, so that sums even out too.
    What does not fit into memory shows at once.

        work of 0..3 is 5, 9, 8, 4; world_size 2       rank 0: micro-batches 1, 3    rank 1: micro-batches 2, 0

    Every process gets equally many: where they do not divide, as at the end of a run, the shortest document of the step
    stands in with every label -100. There is a forward to do, and nothing is trained twice.
    """

    rows: RunRows
    rows_per_step: int  # over all processes
    rows_per_device: int  # in one micro-batch, unless `tokens_per_device` says it
    rank: int
    world_size: int
    total_rows: int  # row positions of the run
    tokens_per_device: int | None = None  # no less than the longest row has

    def __post_init__(self) -> None:
        if self.tokens_per_device is None and self.rows_per_step % (self.rows_per_device * self.world_size):
            raise UserError(divisibility_message(self.rows_per_step, self.rows_per_device, self.world_size))

    def step(self, step: int) -> list[Batch]:
        """Micro-batches of this rank for optimizer step `step` (0-based), heaviest first."""
        first = step * self.rows_per_step
        if not 0 <= first < self.total_rows:
            raise IndexError(f"step {step} begins at row {first} of a run of {self.total_rows} rows")
        return list(self._dealt(range(first, min(first + self.rows_per_step, self.total_rows))))

    def all_batches(self) -> Iterator[Batch]:
        """Every row once, for evaluation; all ranks get the same number of micro-batches."""
        return self._dealt(range(self.total_rows))

    def _dealt(self, positions: range) -> Iterator[Batch]:
        lengths = [self.rows.lengths(position) for position in positions]
        tokens = np.array([found.sum() for found in lengths])  # (rows,)
        work = np.array([(found**2).sum() for found in lengths])  # (rows,)
        cut = self._cut(tokens)
        for m in deal([int(work[places].sum()) for places in cut], self.rank, self.world_size):
            if m < len(cut):
                yield collate([one for i in cut[m] for one in self.rows.documents(positions[i])], m)
            else:
                shortest = min(range(len(lengths)), key=lambda i: lengths[i].min())
                yield _filler(self.rows.documents(positions[shortest])[int(lengths[shortest].argmin())], m)

    def _cut(self, tokens: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Rows, of as many `tokens` each, in micro-batches."""
        if self.tokens_per_device is None:
            ends = range(self.rows_per_device, len(tokens), self.rows_per_device)
            return np.split(np.arange(len(tokens)), ends)
        order = np.argsort(-tokens, kind="stable")
        ends, held = [], 0
        for i, found in enumerate(tokens[order].tolist()):
            held += found
            if held > self.tokens_per_device and i:
                ends.append(i)
                held = found
        return np.split(order, ends)


def deal(work: Sequence[int], rank: int, world_size: int) -> list[int]:
    """Numbers of the micro-batches that a rank runs, in its order; beyond the last number where it runs a filler.

    work: of each micro-batch. Its `world_size` heaviest run at the same time, then the next, in turns from the first
    rank to the last and back.
    """
    heaviest_first = np.argsort(-np.asarray(work, np.int64), kind="stable").tolist()
    numbers = heaviest_first + list(range(len(work), -(-len(work) // world_size) * world_size))
    at_once = [numbers[i : i + world_size] for i in range(0, len(numbers), world_size)]
    return [slot[rank if i % 2 == 0 else -1 - rank] for i, slot in enumerate(at_once)]


def _filler(example: Example, index: int) -> Batch:
    """A forward that trains nothing and counts for nothing."""
    masked = replace(example, labels=np.full_like(example.labels, UNTRAINED))
    return replace(collate([masked], index), documents=(), sources=(), num_tokens=0)
