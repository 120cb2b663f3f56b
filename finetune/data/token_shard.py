"""A row's tokens over the ranks that share them: which places each rank has, and its part of a batch.

Letters: `T` tokens of the row, `t` of them on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from finetune.data.batch import Batch, Targets

Stretches = tuple[tuple[int, int], ...]  # (first place, last place + 1) in the row, each


@dataclass(frozen=True)
class TokenShare:
    """One of the ranks that share every row.

    A context rank has two chunks, as far from the row's beginning as from its end: what a token costs in causal
    attention grows with its place, and like this all ranks have as much. Sequence ranks cut what their context rank has
    into pieces end to end.

        8 tokens, context 2                 (0, .): 0 1 6 7               (1, .): 2 3 4 5
        8 tokens, context 2, sequence 2     (0, 0): 0 1   (0, 1): 6 7     (1, 0): 2 3   (1, 1): 4 5
    """

    context: int = 1
    sequence: int = 1
    context_rank: int = 0
    sequence_rank: int = 0

    def padded(self, tokens: int) -> int:
        """The next number of tokens that can be cut: all ranks and all chunks have equally many."""
        unit = self.sequence * (1 if self.context == 1 else 2 * self.context)
        return -(-tokens // unit) * unit

    def stretches(self, tokens: int, context_rank: int) -> Stretches:
        """Of a context rank, all its sequence ranks together, in a row of so many tokens."""
        if self.context == 1:
            return ((0, tokens),)
        chunk, last = tokens // (2 * self.context), 2 * self.context - 1
        return tuple((n * chunk, (n + 1) * chunk) for n in (context_rank, last - context_rank))

    def places(self, tokens: int) -> NDArray[np.int64]:  # (t,), ascending
        """Of this rank."""
        mine = np.concatenate([np.arange(*stretch) for stretch in self.stretches(tokens, self.context_rank)])
        return np.split(mine, self.sequence)[self.sequence_rank]


UNSHARDED = TokenShare()  # one rank has all of a row


def token_shard(batch: Batch, share: TokenShare) -> Batch:
    """One rank's tokens of a batch, and the targets that are predicted at them; sums over the ranks are the batch's.

        row of `collate`'s example, context 2, one token of padding      rank 0        rank 1
        input_ids   [[ 1, 11, 12,  2,   1, 21,  2,   0 ]]         [[ 1, 11,  2,  0 ]]   [[ 12,  2,  1, 21 ]]
        targets.positions, .ids  [1, 2, 5], [12, 2, 2]             [1], [12]             [0, 3], [2, 2]

    Targets were shifted on the full row: the token that a place predicts may be another rank's. `Targets.sequence`,
    `columns`, `example_of_sequence`, `origins` and the counts of sequences and examples stay the row's on every rank,
    so that sums per sequence can be added up over the ranks. `sequence_lengths` stay the row's, too: attention is over
    full sequences. Raises ValueError where T cannot be cut.
    """
    if share.context * share.sequence == 1:
        return batch
    tokens = batch.inputs["input_ids"].shape[1]
    if share.padded(tokens) != tokens:
        raise ValueError(f"{tokens} tokens cannot be cut for {share}")
    places = share.places(tokens)
    local_place = np.full(tokens, -1)  # of a place of the row among those of this rank
    local_place[places] = np.arange(len(places))
    local = torch.from_numpy(local_place)[batch.targets.positions]
    mine, here = local >= 0, torch.from_numpy(places)
    targets = Targets(local[mine], batch.targets.ids[mine], batch.targets.sequence[mine])
    sequence_of_place = np.repeat(np.arange(len(batch.sequence_lengths)), batch.sequence_lengths)
    num_sequences = len(batch.sequence_tokens)  # none in a dummy
    tokens_here = np.bincount(sequence_of_place[places], minlength=num_sequences)[:num_sequences]
    targets_here = np.bincount(targets.sequence.numpy(), minlength=num_sequences)[:num_sequences]
    first = np.isin(np.arange(num_sequences), np.unique(batch.example_of_sequence.numpy(), return_index=True)[1])
    counts = {
        "target_tokens": int(targets_here.sum()),
        "first_target_tokens": int(targets_here[first].sum()),
        "tokens": int(tokens_here.sum()),
    }
    return replace(
        batch,
        inputs={name: values[:, here].contiguous() for name, values in batch.inputs.items()},
        targets=targets,
        counts={**batch.counts, **counts},
        sequence_tokens=tuple(tokens_here.tolist()),
        sequence_targets=tuple(targets_here.tolist()),
    )
