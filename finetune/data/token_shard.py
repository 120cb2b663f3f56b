"""A row's tokens over the ranks that share them: which places are whose, and what of a batch is one rank's.

Letters: `T` tokens of the row, `t` of them on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finetune.data.batch import Batch

Stretches = tuple[tuple[int, int], ...]  # (first place, place behind the last) in the row, each


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


WHOLE = TokenShare()  # of a row that one rank has


def token_shard(batch: Batch, share: TokenShare) -> Batch:
    """One rank's tokens of a batch, and the targets that are predicted at them; sums over the ranks are the batch's.

        row of `collate`'s example, context 2, one token of padding      rank 0        rank 1
        input_ids   [[ 1, 11, 12,  2,   1, 21,  2,   0 ]]         [[ 1, 11,  2,  0 ]]   [[ 12,  2,  1, 21 ]]
        positions, targets  [1, 2, 5], [12, 2, 2]                  [1], [12]             [0, 3], [2, 2]

    Labels were shifted when the row was whole: the token that a place predicts may be another rank's.
    `document_lengths` stay the row's: attention is over whole documents. Raises ValueError where T cannot be cut.
    """
    if share.context * share.sequence == 1:
        return batch
    tokens = batch.input_ids.shape[1]
    if share.padded(tokens) != tokens:
        raise ValueError(f"{tokens} tokens cannot be cut for {share}")
    places = share.places(tokens)
    number = np.full(tokens, -1)  # of a place of the row among those of this rank
    number[places] = np.arange(len(places))
    local = torch.from_numpy(number)[batch.positions]
    mine = local >= 0
    documents = len(batch.documents)
    here, all_here = torch.from_numpy(places), slice(0, documents)
    of_place = np.repeat(np.arange(len(batch.document_lengths)), batch.document_lengths)
    of_target = np.repeat(np.arange(documents), batch.trained)[mine.numpy()]
    return replace(
        batch,
        input_ids=_taken(batch.input_ids, here),
        labels=_taken(batch.labels, here),
        position_ids=_taken(batch.position_ids, here),
        positions=local[mine],
        targets=batch.targets[mine],
        target_sources=batch.target_sources[mine],
        tokens=tuple(np.bincount(of_place[places], minlength=documents)[all_here].tolist()),
        trained=tuple(np.bincount(of_target, minlength=documents)[all_here].tolist()),
        num_supervised=int(mine.sum()),
        num_tokens=int((places < batch.num_tokens).sum()),
    )


def _taken(row: Tensor, places: Tensor) -> Tensor:  # (1, T), (t,)
    return row[:, places].contiguous()
