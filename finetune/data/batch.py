"""Documents become a micro-batch.

Letters: `T` tokens of a micro-batch, `S` supervised tokens of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finetune.data.chat.renderer import UNTRAINED
from finetune.data.examples import Example

PADDING_DOCUMENT = 128  # tokens; short, so that attention within padding costs little


@dataclass(frozen=True)
class Batch:
    """One micro-batch: whole documents end to end in one flat row (see `collate`)."""

    input_ids: Tensor  # (1, T) int64
    labels: Tensor  # (1, T) int64, aligned with input_ids; -100 where not trained, and at each document's first token
    position_ids: Tensor  # (1, T) int64, from 0 in every document
    positions: Tensor  # (S,) int64: places whose NEXT token is trained, see `shifted_targets`
    targets: Tensor  # (S,) int64: those tokens
    target_sources: Tensor  # (S,) int64: number of the source that each of them is from
    document_lengths: tuple[int, ...]  # tokens; they sum to T; those of padding come last
    documents: tuple[tuple[str, int], ...]  # (path, row) of each document that counts
    sources: tuple[int, ...]  # number of each such document's source
    tokens: tuple[int, ...]  # in each such document; of a part of the row (`token_shard`), those that are in it
    trained: tuple[int, ...]  # targets in each such document, likewise
    num_supervised: int  # targets: labels that are not -100
    num_tokens: int  # tokens of documents that count; a filler (`Loader`) has T and none of these
    index: int = 0  # number of this micro-batch within its step, over all processes; seeds dropout
    row_lengths: tuple[int, ...] = ()  # tokens of each row of the recipe in it; none in a filler

    @property
    def num_padding(self) -> int:
        """Tokens that are computed and do not count: padding, and the document of a filler."""
        return self.input_ids.shape[1] - self.num_tokens


def collate(examples: Sequence[Example], index: int = 0, padded_to: int | None = None) -> Batch:
    """Documents end to end. No attention mask; `position_ids` start again with every document.

        document         |----- a ------|  |--- b ----|
        input_ids      [[  1, 11, 12,  2,    1, 21,  2 ]]
        labels         [[-100,-100,12,  2, -100,-100, 2 ]]
        position_ids   [[  0,  1,  2,  3,    0,  1,  2 ]]
        document_lengths  (4, 3)       num_supervised  3

    padded_to: T, where every forward has to be of one length (compiled layers). What is missing are documents of their
    own at the end, of token 0, untrained, which no other document sees; otherwise there is no padding.

    Raises ValueError for a trained first token: nothing within its document predicts it; and where T is exceeded.
    """
    for example in examples:
        if example.labels[0] != UNTRAINED:
            raise ValueError(f"{example.path}:{example.row}: the first token of a document cannot be trained")
    labels = np.concatenate([example.labels for example in examples])
    positions, targets = shifted(labels)
    sources = tuple(example.source for example in examples)
    trained = tuple(int(np.count_nonzero(example.labels != UNTRAINED)) for example in examples)
    padding = _padding(len(labels), padded_to)
    lengths = (*(len(example.input_ids) for example in examples), *padding)
    after = np.zeros(sum(padding), np.int64)
    return Batch(
        input_ids=_flat_row(np.concatenate([*(example.input_ids for example in examples), after])),
        labels=_flat_row(np.concatenate([labels, after + UNTRAINED])),
        position_ids=_flat_row(np.concatenate([np.arange(length) for length in lengths])),
        positions=torch.from_numpy(positions),
        targets=torch.from_numpy(targets),
        target_sources=torch.from_numpy(np.repeat(np.array(sources, np.int64), trained)),
        document_lengths=lengths,
        documents=tuple((example.path, example.row) for example in examples),
        sources=sources,
        tokens=lengths[: len(examples)],
        trained=trained,
        num_supervised=len(targets),
        num_tokens=len(labels),
        index=index,
    )


def _padding(num_tokens: int, padded_to: int | None) -> tuple[int, ...]:
    """Lengths of the documents that fill up a forward."""
    missing = 0 if padded_to is None else padded_to - num_tokens
    if missing < 0:
        raise ValueError(f"{num_tokens} tokens do not fit into a forward of {padded_to}")
    whole, rest = divmod(missing, PADDING_DOCUMENT)
    return (*(PADDING_DOCUMENT,) * whole, *((rest,) if rest else ()))


def _flat_row(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))[None]  # (1, T)


def shifted(labels: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where a trained token is predicted, and which: the one place where labels (T,) are shifted.

    positions (S,): places t of the flat row whose NEXT token is trained. targets (S,): that token's id.
    For the labels of `collate`'s example: positions [1, 2, 5], targets [12, 2, 2]. Never across documents, because
    the first label of each is -100.
    """
    positions = np.flatnonzero(labels[1:] != UNTRAINED)
    return positions, labels[positions + 1].astype(np.int64)


def shifted_targets(batch: Batch) -> tuple[Tensor, Tensor]:
    """(positions, targets), as `shifted` has found them when the batch was made: on a GPU, to look for them waits."""
    return batch.positions, batch.targets


def filler(example: Example, index: int, padded_to: int | None) -> Batch:
    """A forward that trains nothing and counts for nothing."""
    masked = replace(example, labels=np.full_like(example.labels, UNTRAINED))
    return replace(collate([masked], index, padded_to), documents=(), sources=(), tokens=(), trained=(), num_tokens=0)
