"""Rows of documents are dealt to processes, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from finetune.data.batch import Batch, collate, filler
from finetune.data.examples import Example, Examples
from finetune.data.order import RowOrder
from finetune.data.packing import Rows
from finetune.data.token_shard import WHOLE, TokenShare, token_shard
from finetune.errors import UserError
from finetune.recipe import divisibility_message


class RunRows(Protocol):
    """The rows of a run at their positions (0-based), whatever they come from. One thread asks, the one that makes
    batches."""

    def lengths(self, position: int) -> NDArray[np.int64]:
        """Tokens of every document of the row at a position; asked of all rows of a step, by every process."""
        ...

    def num_trained(self, position: int) -> int:
        """Trained tokens of the row; asked of all rows of a step, too."""
        ...

    def documents(self, position: int) -> list[Example]:
        """The documents themselves, in the order of `lengths`; asked where they are trained on."""
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

    def num_trained(self, position: int) -> int:
        return int(self.examples.num_trained[self._members(position)].sum())

    def documents(self, position: int) -> list[Example]:
        return [self.examples[int(member)] for member in self._members(position)]

    def epochs(self, position: int) -> float:
        return position / len(self.rows)

    def _members(self, position: int) -> NDArray[np.int64]:
        return self.rows[position if self.order is None else self.order.row_at(position)]


@dataclass(frozen=True)
class StepBatches:
    """What this rank runs in one optimizer step, and what all ranks together count in it: nobody has to be asked."""

    batches: list[Batch]  # heaviest first
    counts: dict[str, int]  # of the whole step over all ranks, by unit: "tokens", "target_tokens"
    padding: int  # over all ranks; tokens of its forwards that count for nothing: padding and fillers
    epoch: float  # passes over the data that are made after this step


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
    padded_to: int | None = None  # tokens of every forward, where they have to be equally many
    share: TokenShare = WHOLE  # of every row, where several ranks with the same `rank` have its tokens
    alike: bool = False  # forwards are padded to the longest of their step

    def __post_init__(self) -> None:
        if self.tokens_per_device is None and self.rows_per_step % (self.rows_per_device * self.world_size):
            message = divisibility_message(self.rows_per_step, self.rows_per_device, self.world_size)
            raise UserError(f"batch.rows: {message}")

    def step(self, step: int) -> StepBatches:
        """Of optimizer step `step` (0-based)."""
        first = step * self.rows_per_step
        if not 0 <= first < self.total_rows:
            raise IndexError(f"step {step} begins at row {first} of a run of {self.total_rows} rows")
        positions = range(first, min(first + self.rows_per_step, self.total_rows))
        dealing = self._dealing(positions)
        return StepBatches(
            batches=list(self._batches(dealing)),
            counts=self._counts(positions),
            padding=self._padding(dealing),
            epoch=self.rows.epochs(positions.stop),
        )

    def all_batches(self) -> Iterator[Batch]:
        """Every row once, for evaluation; all ranks get the same number of micro-batches."""
        return self._batches(self._dealing(range(self.total_rows)))

    def all_counts(self) -> dict[str, int]:
        """What `all_batches` of all ranks together count, by unit."""
        return self._counts(range(self.total_rows))

    def _counts(self, positions: range) -> dict[str, int]:
        return {
            "tokens": sum(int(self.rows.lengths(position).sum()) for position in positions),
            "target_tokens": sum(self.rows.num_trained(position) for position in positions),
        }

    def _padding(self, dealing: _Dealing) -> int:
        forwards = [*dealing.micro_batch_tokens, *(dealing.shortest,) * dealing.fillers]
        return sum(self._forward_tokens(dealing, tokens) for tokens in forwards) - dealing.tokens

    def _forward_tokens(self, dealing: _Dealing, tokens: int) -> int:
        """Of a forward for so many, over all ranks that share it."""
        return self.share.padded(self.padded_to or (dealing.longest if self.alike else tokens))

    def _dealing(self, positions: range) -> _Dealing:
        lengths = [self.rows.lengths(position) for position in positions]
        tokens = np.array([found.sum() for found in lengths])  # (rows,)
        work = np.array([(found**2).sum() for found in lengths])  # (rows,)
        cut = self._cut(tokens)
        mine = deal([int(work[places].sum()) for places in cut], self.rank, self.world_size)
        return _Dealing(positions, lengths, cut, mine, fillers=-len(cut) % self.world_size)

    def _batches(self, dealing: _Dealing) -> Iterator[Batch]:
        for m in dealing.mine:
            if m < len(dealing.cut):
                places = [dealing.positions[i] for i in dealing.cut[m]]
                examples = [one for position in places for one in self.rows.documents(position)]
                made = collate(examples, m, self._forward_tokens(dealing, dealing.micro_batch_tokens[m]))
                made = replace(made, row_lengths=tuple(int(dealing.lengths[i].sum()) for i in dealing.cut[m]))
            else:
                row = min(range(len(dealing.lengths)), key=lambda i: dealing.lengths[i].min())
                documents = self.rows.documents(dealing.positions[row])
                shortest = documents[int(dealing.lengths[row].argmin())]
                made = filler(shortest, m, self._forward_tokens(dealing, dealing.shortest))
            yield token_shard(made, self.share)

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


@dataclass(frozen=True)
class _Dealing:
    """Rows at `positions` in micro-batches, and whose they are."""

    positions: range
    lengths: list[NDArray[np.int64]]  # of every document of every row
    cut: list[NDArray[np.int64]]  # rows, numbered from the first position, of every micro-batch
    mine: list[int]  # micro-batches of this rank, see `deal`
    fillers: int  # over all ranks

    @property
    def tokens(self) -> int:
        return sum(int(found.sum()) for found in self.lengths)

    @property
    def micro_batch_tokens(self) -> list[int]:
        return [sum(int(self.lengths[i].sum()) for i in places) for places in self.cut]

    @property
    def shortest(self) -> int:
        return min(int(found.min()) for found in self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest micro-batch."""
        return max(sum(int(self.lengths[i].sum()) for i in places) for places in self.cut)


def deal(work: Sequence[int], rank: int, world_size: int) -> list[int]:
    """Numbers of the micro-batches that a rank runs, in its order; beyond the last number where it runs a filler.

    work: of each micro-batch. Its `world_size` heaviest run at the same time, then the next, in turns from the first
    rank to the last and back.
    """
    heaviest_first = np.argsort(-np.asarray(work, np.int64), kind="stable").tolist()
    numbers = heaviest_first + list(range(len(work), -(-len(work) // world_size) * world_size))
    at_once = [numbers[i : i + world_size] for i in range(0, len(numbers), world_size)]
    return [slot[rank if i % 2 == 0 else -1 - rank] for i, slot in enumerate(at_once)]
