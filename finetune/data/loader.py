"""Distributes the rows of a run over processes, micro-batch by micro-batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from finetune.data.batch import UNSHARDED, Batch, MediaInputs, TokenShare, collate, dummy_batch, token_shard, with_ahead
from finetune.data.row_source import RunRows
from finetune.data.samples import MediaKind, SharedPrompt, kind_of
from finetune.errors import UserError
from finetune.recipe import divisibility_message


@dataclass(frozen=True)
class StepBatches:
    """Micro-batches of this rank in one optimizer step, and the counts of all ranks, computed without a reduction."""

    batches: list[Batch]  # heaviest first
    counts: dict[str, int]  # of the whole step over all ranks, by the names of `ExampleSizes.counts`
    padding: int  # uncounted tokens of its forwards: padding and dummies
    epoch: float  # passes over the data that are done after this step
    kinds: frozenset[MediaKind] = frozenset()  # of files, in any row of any rank
    measured: Mapping[str, float] = field(default_factory=dict)  # metrics of its rows, see `RunRows.measured`

    def map_tensors(self, call: Callable[[Tensor], Tensor]) -> StepBatches:
        """Returns the same with every tensor as `call` returns it."""
        return replace(self, batches=[batch.map_tensors(call) for batch in self.batches])

    def tensors(self) -> Iterator[Tensor]:
        return chain.from_iterable(batch.tensors() for batch in self.batches)


@dataclass(frozen=True)
class Loader:
    """Distributes the rows of a run over processes; the same rows in the same micro-batches at any world size.

        step s, rows_per_step 8, rows_per_device 2     row positions 8s+0 .. 8s+7
        micro-batch m (`Batch.index`)                  0: 8s+0,1   1: 8s+2,3   2: 8s+4,5   3: 8s+6,7

    With `tokens_per_device` the rows of a step are sorted by length instead, longest first, and cut into micro-batches
    of at most that many tokens; their number may differ from step to step. Rows that share a prompt stay together.

    Which process runs a micro-batch follows from its work, the sum of squared sequence lengths: the heaviest run first,
    at the same time, one on each process; then the next heaviest, from the last process to the first, so that sums even
    out too. A micro-batch that does not fit into memory shows at once.

        work of 0..3 is 5, 9, 8, 4; world_size 2       rank 0: micro-batches 1, 3    rank 1: micro-batches 2, 0

    Every process gets equally many: if they do not divide, as at the end of a run, the shortest sequence of the step
    stands in without a target. The forward is needed, and no example is trained twice.
    """

    rows: RunRows
    rows_per_step: int  # over all processes
    rows_per_device: int  # in one micro-batch, unless `tokens_per_device` is given
    rank: int
    world_size: int
    total_rows: int  # row positions of the run
    tokens_per_device: int | None = None  # no less than the longest row has
    padded_to: int | None = None  # tokens of every forward, if they must be equally many
    share: TokenShare = UNSHARDED  # of every row, if several ranks with the same `rank` have its tokens
    shares_prompts: bool = False  # the beginning that two sequences share is computed once, see `collate`
    media_inputs: MediaInputs | None = None  # see `collate`
    positions: Callable[[Batch], Batch] | None = None  # gives a batch those of a model that has others than places
    ahead: bool = False  # see `with_ahead`
    kinds: tuple[MediaKind, ...] = ()  # of the files that rows may have

    def __post_init__(self) -> None:
        if self.tokens_per_device is None and self.rows_per_step % (self.rows_per_device * self.world_size):
            message = divisibility_message(self.rows_per_step, self.rows_per_device, self.world_size)
            raise UserError(f"batch.rows: {message}. Fix: set one of these")

    def step(self, step: int) -> StepBatches:
        """Returns the batches of optimizer step `step` (0-based)."""
        positions = self._positions(step)
        assignment = self._assign(positions)
        forwards = [*assignment.micro_batch_tokens, *(assignment.shortest,) * assignment.num_dummies]
        computed = sum(self._forward_tokens(tokens) for tokens in forwards)
        return StepBatches(
            batches=list(self._batches(assignment)),
            counts=self._counts(positions),
            padding=computed - sum(assignment.micro_batch_tokens),
            epoch=self.rows.epoch_at(positions.stop),
            kinds=self._kinds(positions),
            measured=self.rows.measured(step),
        )

    def _kinds(self, positions: Sequence[int]) -> frozenset[MediaKind]:
        """Returns the kinds of files in some rows; reads no more of them than it has to."""
        found = set[MediaKind]()
        for position in positions if self.kinds else ():
            found |= {kind_of(one) for example in self.rows.row(position) for s in example.sequences for one in s.media}
            if len(found) == len(self.kinds):
                break
        return frozenset(found)

    def row_positions(self, step: int) -> list[list[int]]:
        """Returns the positions of the rows in each micro-batch of a step, over all ranks, by `Batch.index`."""
        assignment = self._assign(self._positions(step))
        return [[assignment.positions[row] for row in rows] for rows in assignment.micro_batches]

    def _positions(self, step: int) -> range:
        first = step * self.rows_per_step
        if not 0 <= first < self.total_rows:
            raise IndexError(f"step {step} begins at row {first} of a run of {self.total_rows} rows")
        return range(first, min(first + self.rows_per_step, self.total_rows))

    def all_batches(self) -> Iterator[Batch]:
        """Yields every row once, for evaluation; all ranks get the same number of micro-batches."""
        return self._batches(self._assign(range(self.total_rows)))

    def all_counts(self) -> dict[str, int]:
        """Returns the counts of `all_batches` over all ranks."""
        return self._counts(range(self.total_rows))

    def _counts(self, positions: range) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for position in positions:
            counts.update(self.rows.counts(position))
        prompts = [self.rows.prompt(position) for position in positions]
        if any(prompts):  # rows share tokens within a micro-batch
            lengths = np.array([self.rows.lengths(position).sum() for position in positions])
            counts["shared_tokens"] = sum(_shared(prompts, rows) for rows in self._micro_batches(lengths, prompts))
        return dict(counts)

    def _forward_tokens(self, tokens: int) -> int:
        """Returns the tokens of a forward of `tokens` tokens, padding included, over all ranks that share it."""
        return self.share.padded(self.padded_to or tokens)

    def _assign(self, positions: range) -> StepAssignment:
        lengths = [self.rows.lengths(position) for position in positions]
        work = np.array([(of_row**2).sum() for of_row in lengths])  # (rows,)
        # By the sequences alone, computed once or twice: micro-batches do not depend on the attention's capabilities.
        prompts = [self.rows.prompt(position) for position in positions]
        micro_batches = self._micro_batches(np.array([of_row.sum() for of_row in lengths]), prompts)
        mine = assign_micro_batches([int(work[rows].sum()) for rows in micro_batches], self.rank, self.world_size)
        shared = [0] * len(micro_batches)
        if self.shares_prompts:
            pairs = [self.rows.counts(position)["shared_tokens"] for position in positions]
            shared = [sum(pairs[row] for row in rows) + _shared(prompts, rows) for rows in micro_batches]
        return StepAssignment(positions, lengths, shared, micro_batches, mine, -len(micro_batches) % self.world_size)

    def _micro_batches(
        self, tokens: NDArray[np.int64], prompts: Sequence[SharedPrompt | None]
    ) -> list[NDArray[np.int64]]:
        """Returns the rows of each micro-batch. tokens: of each row; prompts: that rows share."""
        if self.tokens_per_device is None:
            ends = range(self.rows_per_device, len(tokens), self.rows_per_device)
            return np.split(np.arange(len(tokens)), ends)
        keys: list[Hashable] = [row if prompt is None else prompt.key for row, prompt in enumerate(prompts)]
        heads: dict[Hashable, tuple[int, int]] = {}  # of the rows of a prompt: tokens of the longest, and the first row
        for row, (key, of_row) in enumerate(zip(keys, tokens.tolist(), strict=True)):
            longest, first = heads.get(key, (0, row))
            heads[key] = max(longest, of_row), first
        places = [(-heads[key][0], heads[key][1], -int(of_row)) for key, of_row in zip(keys, tokens, strict=True)]
        order = np.array(sorted(range(len(tokens)), key=places.__getitem__))
        ends, total = [], 0
        for i, of_row in enumerate(tokens[order].tolist()):
            total += of_row
            if total > self.tokens_per_device and i:
                ends.append(i)
                total = of_row
        return np.split(order, ends)

    def _batches(self, assignment: StepAssignment) -> Iterator[Batch]:
        for index in assignment.mine:
            if index < len(assignment.micro_batches):
                rows = assignment.micro_batches[index]
                examples = [one for row in rows for one in self.rows.row(assignment.positions[row])]
                padded_to = self._forward_tokens(assignment.micro_batch_tokens[index])
                row_lengths = tuple(int(assignment.lengths[row].sum()) for row in rows)
                batch = collate(examples, index, padded_to, self.shares_prompts, self.media_inputs)
                batch = replace(batch, row_lengths=row_lengths)
            else:
                row = min(range(len(assignment.lengths)), key=lambda i: assignment.lengths[i].min())
                examples = self.rows.row(assignment.positions[row])
                # The one with the shortest sequence of the step.
                example = min(examples, key=lambda one: min(len(sequence.input_ids) for sequence in one.sequences))
                padded_to = self._forward_tokens(assignment.shortest)
                batch = dummy_batch(example, index, padded_to, self.media_inputs)
            batch = with_ahead(batch) if self.ahead else batch
            yield token_shard(self.positions(batch) if self.positions else batch, self.share)


@dataclass(frozen=True)
class StepAssignment:
    """Rows at `positions` in micro-batches, and which of them this rank runs."""

    positions: range
    lengths: list[NDArray[np.int64]]  # of every sequence of every row
    shared: list[int]  # tokens of every micro-batch that are not computed again
    micro_batches: list[NDArray[np.int64]]  # indices of their rows, from the first position on
    mine: list[int]  # indices of micro-batches, see `assign_micro_batches`
    num_dummies: int  # over all ranks

    @property
    def micro_batch_tokens(self) -> list[int]:
        """Computed tokens of each."""
        whole = (sum(int(self.lengths[row].sum()) for row in rows) for rows in self.micro_batches)
        return [tokens - shared for tokens, shared in zip(whole, self.shared, strict=True)]

    @property
    def shortest(self) -> int:
        """Tokens of the shortest sequence."""
        return min(int(of_row.min()) for of_row in self.lengths)


def _shared(prompts: Sequence[SharedPrompt | None], rows: NDArray[np.int64]) -> int:
    """Returns the tokens of prompts that rows next to each other in a micro-batch share."""
    of_rows = [prompts[row] for row in rows]
    return sum(one.tokens for before, one in pairwise(of_rows) if one is not None and one == before)


def assign_micro_batches(work: Sequence[int], rank: int, world_size: int) -> list[int]:
    """Returns the indices of the micro-batches that a rank runs, in its order; beyond the last one if it runs a dummy.

    work: of each micro-batch. Its `world_size` heaviest run at the same time, then the next, in turns from the first
    rank to the last and back.
    """
    heaviest_first = np.argsort(-np.asarray(work, np.int64), kind="stable").tolist()
    indices = heaviest_first + list(range(len(work), -(-len(work) // world_size) * world_size))
    at_once = [indices[i : i + world_size] for i in range(0, len(indices), world_size)]
    return [slot[rank if i % 2 == 0 else -1 - rank] for i, slot in enumerate(at_once)]
