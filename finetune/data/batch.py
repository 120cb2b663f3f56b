"""Collates examples into micro-batches, and gives ranks that share a row their part of it.

Letters: `T` tokens of a micro-batch, `t` of them on one rank, `D` sequences (documents), `E` examples, `S` targets:
trained tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finetune.data.samples import Example, ExampleSizes, MediaKind, Medium, Sequence, kind_of

PADDING_DOCUMENT = 128  # tokens; short, so that attention within padding costs little


class Targets(NamedTuple):
    """The trained tokens, and the positions that predict them."""

    positions: Tensor  # (S,) int64: places of the flat row whose NEXT token is trained
    ids: Tensor  # (S,) int64: those tokens
    sequence: Tensor  # (S,) int64: index of the sequence that each is from


@dataclass(frozen=True)
class RowTargets:
    """The targets of a full row, of which a rank has some: all that a function of whole sequences may read."""

    ids: Tensor  # (N,) int64
    sequence: Tensor  # (N,) int64
    here: Tensor  # (S,) int64: index of each target of this rank among them
    num_targets: tuple[int, ...]  # (D,)
    num_tokens: tuple[int, ...]  # (D,)

    def map_tensors(self, call: Callable[[Tensor], Tensor]) -> RowTargets:
        """The same with every tensor as `call` returns it."""
        return replace(self, ids=call(self.ids), sequence=call(self.sequence), here=call(self.here))


class DistinctTargets(NamedTuple):
    """The targets without repetitions: of a beginning that two answers share, each token is predicted once for both."""

    positions: Tensor  # (U,) int64
    ids: Tensor  # (U,) int64
    of_target: Tensor  # (S,) int64: index of each target among these


class Ahead(NamedTuple):
    """What a head learns that predicts the token after the next one: from a place's hidden state and the next token."""

    positions: Tensor  # (A,) int64: places of the flat row whose next token but one is trained
    ids: Tensor  # (A,) int64: those tokens
    target: Tensor  # (A,) int64: index of each among the targets of the row
    next_ids: Tensor  # (1, T) int64: the token after each place; at the end of a sequence its last one, again


class Ends(NamedTuple):
    """The last token of each sequence."""

    positions: Tensor  # (D,) int64: places in the flat row; of a part of the row, those that are in it
    sequence: Tensor  # (D,) int64: index of the sequence that each is from


class MediaPlace(NamedTuple):
    """Location of a file in the flat row: its tokens [begin, end), see `samples.Image`."""

    sequence: int  # index of its sequence
    begin: int
    end: int
    source: str | bytes = b""  # path of its file, or the file itself
    kind: MediaKind = "image"


# Tensors that a model's forward takes for these files, in their order; see `media/feature_reader.py`.
MediaInputs = Callable[[ListLike[Medium], Tensor], dict[str, Tensor]]


class Origin(NamedTuple):
    """File and row of an example."""

    path: str  # file or dataset
    row: int
    source: int  # index in the recipe's sources


@dataclass(frozen=True)
class Batch:
    """One micro-batch: sequences end to end in one flat row (see `collate`)."""

    # Inputs of the model's forward: input_ids, position_ids (1, T) int64. With files, in the order of `media`,
    # also transformers' pixel_values or input_features and, by family, image_grid_thw, image_sizes,
    # pixel_attention_mask, token_type_ids, a mask of features; see `media/feature_reader.py`.
    inputs: dict[str, Tensor]
    # Tokens that each sequence has in the row; they sum to T. The D sequences of examples, then padding.
    sequence_lengths: tuple[int, ...]
    # Shared tokens: a sequence begins with this many of the sequence before it, and its own follow them. Several
    # sequences in a row may share one beginning: those after the first have the same number.
    prefix_lengths: tuple[int, ...]
    targets: Targets
    ends: Ends
    columns: dict[str, Tensor]  # float64, (E,) one number of each example, or (D,) of each sequence
    example_of_sequence: Tensor  # (D,) int64
    counts: dict[str, int]  # of this micro-batch, without padding, by the names of `ExampleSizes.counts`; 0 in a dummy
    origins: tuple[Origin, ...]  # (E,)
    sequence_sources: tuple[int, ...]  # (D,) index of the source of each sequence
    sequence_tokens: tuple[int, ...]  # (D,) tokens; of a part of the row (`token_shard`), those that are in it
    sequence_targets: tuple[int, ...]  # (D,) targets, counted in the same way
    target_columns: dict[str, Tensor] = field(default_factory=dict)  # (S, ...) each, of the targets in their order
    distinct_targets: DistinctTargets | None = None  # None: all targets are
    ahead: Ahead | None = None  # if the loader was asked for it, see `with_ahead`
    row_targets: RowTargets | None = None  # of a part of the row (`token_shard`); None: this rank has all targets
    row_lengths: tuple[int, ...] = ()  # tokens of each row of the recipe in it; empty in a dummy
    index: int = 0  # of this micro-batch within its step, over all processes; seeds dropout
    media: tuple[MediaPlace, ...] = ()  # in the order of their tokens; a sequence's are next to each other

    @property
    def num_padding(self) -> int:
        """Tokens that are computed and do not count: padding, and all of a dummy."""
        return self.inputs["input_ids"].shape[1] + sum(self.prefix_lengths) - self.counts["tokens"]

    def with_columns(self, columns: Mapping[str, Tensor]) -> Batch:
        """The same with more columns, including numbers () that hold for all of it."""
        return replace(self, columns={**self.columns, **columns})

    def map_tensors(self, call: Callable[[Tensor], Tensor]) -> Batch:
        """The same with every tensor as `call` returns it."""
        return replace(
            self,
            inputs={name: call(tensor) for name, tensor in self.inputs.items()},
            targets=Targets(*map(call, self.targets)),
            distinct_targets=self.distinct_targets and DistinctTargets(*map(call, self.distinct_targets)),
            ahead=self.ahead and Ahead(*map(call, self.ahead)),
            ends=Ends(*map(call, self.ends)),
            columns={name: call(tensor) for name, tensor in self.columns.items()},
            target_columns={name: call(tensor) for name, tensor in self.target_columns.items()},
            row_targets=self.row_targets and self.row_targets.map_tensors(call),
            example_of_sequence=call(self.example_of_sequence),
        )

    def tensors(self) -> Iterator[Tensor]:
        yield from self.inputs.values()
        yield from self.targets
        yield from self.distinct_targets or ()
        yield from self.ahead or ()
        yield from self.ends
        yield from self.columns.values()
        yield from self.target_columns.values()
        if self.row_targets is not None:
            yield from (self.row_targets.ids, self.row_targets.sequence, self.row_targets.here)
        yield self.example_of_sequence


def collate(
    examples: ListLike[Example],
    index: int = 0,
    padded_to: int | None = None,
    shares_prompts: bool = False,
    media_inputs: MediaInputs | None = None,
) -> Batch:
    """Concatenates sequences. No attention mask; `position_ids` start again with every sequence.

        sequence         |----- a ------|  |--- b ----|
        input_ids      [[  1, 11, 12,  2,    1, 21,  2 ]]
        loss_mask          -   -  yes yes    -   -  yes
        position_ids   [[  0,  1,  2,  3,    0,  1,  2 ]]
        targets          positions 1, 2, 5   ids 12, 2, 2   sequence 0, 0, 1
        sequence_lengths  (4, 3)             counts["target_tokens"]  3

    This is the one place where targets are shifted against the mask. Never across sequences, as the first token of
    each is not trained.

    shares_prompts: the common beginning of both sequences of a pair is in the row once, before the rest of the first.
    Positions of the second continue from there, as its attention sees both. A position may predict a token of each, or
    the same for both, which is computed once (`distinct_targets`):

        sequence         |---- first ---|  second
        input_ids      [[  1, 11, 12,  2,    13,  2 ]]        of 1 11 12 2  and  1 11 13 2
        position_ids   [[  0,  1,  2,  3,     2,  3 ]]
        targets          positions 1, 2, 1, 4   ids 12, 2, 13, 2   sequence 0, 0, 1, 1
        sequence_lengths  (4, 2)                prefix_lengths  (0, 2)

    So is a prompt that examples next to each other have in common (`Example.prompt`), before the first of them.
    Counts are of the full sequences in both layouts.

    padded_to: T, if every forward must have one length (compiled layers). Missing tokens become sequences of their
    own at the end, of token 0, untrained, which no other sequence sees; otherwise there is no padding.

    media_inputs: called if there are files; None leaves them out.

    Raises ValueError for a trained first token (no token of its sequence predicts it), and if T is exceeded.
    """
    for example in examples:
        if any(sequence.loss_mask[0] for sequence in example.sequences):
            raise ValueError(f"{example.path}:{example.row}: the first token of a sequence cannot be trained")
    sequences = [sequence for example in examples for sequence in example.sequences]
    input_ids = np.concatenate([sequence.input_ids for sequence in sequences])
    sizes = ExampleSizes(
        offsets=np.cumsum([0, *(len(example.sequences) for example in examples)]),
        lengths=np.array([len(sequence.input_ids) for sequence in sequences]),
        targets=np.array([sequence.num_targets for sequence in sequences]),
        shared=np.array([example.shared_tokens for example in examples]),
    )
    shared = shared_beginnings(examples, sizes)
    layout = _layout(sizes, padded_to, shared if shares_prompts else np.zeros_like(shared))
    targets = _targets(input_ids, np.concatenate([sequence.loss_mask for sequence in sequences]), sizes, layout)
    inputs = _ids_and_positions(input_ids, sizes, layout)
    media, media_places = _media(sequences, layout.own_lengths)
    if media and media_inputs:
        inputs |= media_inputs(media, inputs["input_ids"])
    return Batch(
        inputs=inputs,
        sequence_lengths=(*layout.own_lengths, *layout.padding),
        prefix_lengths=(*layout.prefixes, *(0 for _ in layout.padding)),
        targets=targets,
        distinct_targets=_distinct(targets) if any(layout.prefixes) else None,
        ends=Ends(torch.from_numpy(np.cumsum(layout.own_lengths) - 1), torch.arange(len(sequences))),
        columns={
            name: torch.from_numpy(np.hstack([example.columns[name] for example in examples]).astype(np.float64))
            for name in examples[0].columns
        },
        target_columns={
            name: torch.from_numpy(np.concatenate([example.target_columns[name] for example in examples]))
            for name in examples[0].target_columns
        },
        example_of_sequence=torch.from_numpy(np.repeat(np.arange(len(examples)), np.diff(sizes.offsets))),
        counts={**sizes.counts(), "shared_tokens": int(shared.sum())},
        origins=tuple(Origin(example.path, example.row, example.source) for example in examples),
        sequence_sources=tuple(example.source for example in examples for _ in example.sequences),
        sequence_tokens=tuple(sizes.lengths.tolist()),
        sequence_targets=tuple(sizes.targets.tolist()),
        index=index,
        media=media_places,
    )


class _Layout(NamedTuple):
    """Layout of sequences in a row: their own tokens end to end, then padding."""

    own_lengths: tuple[int, ...]  # (D,) tokens of each, without those of its prefix
    prefixes: tuple[int, ...]  # (D,) see `Batch.prefix_lengths`
    padding: tuple[int, ...]  # tokens of each sequence of padding
    places: NDArray[np.int64]  # see `row_places`


def shared_beginnings(examples: ListLike[Example], sizes: ExampleSizes) -> NDArray[np.int64]:
    """Returns `Batch.prefix_lengths` of the sequences of examples."""
    prefixes, firsts = np.zeros_like(sizes.lengths), sizes.offsets[:-1]
    has_two = np.diff(sizes.offsets) == 2
    prefixes[firsts[has_two] + 1] = sizes.shared[has_two]
    for first, before, example in zip(firsts[1:], examples, examples[1:], strict=False):
        if example.prompt is not None and example.prompt == before.prompt:
            prefixes[first] = example.prompt.tokens
    return prefixes


def _layout(sizes: ExampleSizes, padded_to: int | None, prefixes: NDArray[np.int64]) -> _Layout:
    """prefixes: see `Batch.prefix_lengths`."""
    own_lengths = tuple((sizes.lengths - prefixes).tolist())
    missing = 0 if padded_to is None else padded_to - sum(own_lengths)
    if missing < 0:
        raise ValueError(f"{sum(own_lengths)} tokens do not fit into a forward of {padded_to}")
    full, rest = divmod(missing, PADDING_DOCUMENT)
    padding = (*(PADDING_DOCUMENT,) * full, *((rest,) if rest else ()))
    return _Layout(own_lengths, tuple(prefixes.tolist()), padding, row_places(own_lengths, prefixes.tolist()))


def _ids_and_positions(input_ids: NDArray[np.int32], sizes: ExampleSizes, layout: _Layout) -> dict[str, Tensor]:
    """Returns input_ids and position_ids (1, T). input_ids: of the sequences, one after the other."""
    tokens = sum(layout.own_lengths)
    row = np.zeros((2, tokens + sum(layout.padding)), np.int64)
    row[:, layout.places] = input_ids, np.concatenate([np.arange(length) for length in sizes.lengths])
    row[1, tokens:] = np.concatenate([np.arange(length) for length in (*layout.padding, 0)])
    return dict(zip(("input_ids", "position_ids"), torch.from_numpy(row)[:, None], strict=True))


def _targets(
    input_ids: NDArray[np.int32], loss_mask: NDArray[np.bool_], sizes: ExampleSizes, layout: _Layout
) -> Targets:
    """input_ids, loss_mask: of the sequences, one after the other."""
    trained = np.flatnonzero(loss_mask)  # never the first token of a sequence
    return Targets(
        torch.from_numpy(layout.places[trained - 1]),
        torch.from_numpy(input_ids[trained].astype(np.int64)),
        torch.from_numpy(np.repeat(np.arange(len(sizes.lengths)), sizes.targets)),
    )


def _media(sequences: ListLike[Sequence], own_lengths: tuple[int, ...]) -> tuple[list[Medium], tuple[MediaPlace, ...]]:
    """Returns the files of sequences end to end; those with files share no beginning (`shared_prefix`)."""
    begins = np.cumsum((0, *own_lengths)).tolist()
    placed = [
        (image, MediaPlace(i, begins[i] + image.begin, begins[i] + image.end, image.source, kind_of(image)))
        for i, sequence in enumerate(sequences)
        for image in sequence.media
    ]
    return [image for image, _ in placed], tuple(place for _, place in placed)


def row_places(sequence_lengths: ListLike[int], prefix_lengths: ListLike[int]) -> NDArray[np.int64]:
    """Returns the place in the row of each token of each sequence, one sequence after the other.

    Arguments as in `Batch`: row_places((4, 2, 1), (0, 2, 2)) -> 0 1 2 3  0 1 4 5  0 1 6
    """
    begins, before = np.concatenate(([0], np.cumsum(sequence_lengths))), np.arange(0)
    places = [before]
    for i, prefix in enumerate(prefix_lengths):
        own = np.arange(begins[i], begins[i + 1])
        before = np.concatenate((before[:prefix], own)) if prefix else own
        places.append(before)
    return np.concatenate(places)


def _distinct(targets: Targets) -> DistinctTargets | None:
    both, of_target = np.unique(np.stack([targets.positions, targets.ids]), axis=1, return_inverse=True)
    if both.shape[1] == len(targets.ids):
        return None
    positions, ids = torch.from_numpy(both)
    return DistinctTargets(positions, ids, torch.from_numpy(of_target.reshape(-1)))


def dummy_batch(example: Example, index: int, padded_to: int | None, media_inputs: MediaInputs | None = None) -> Batch:
    """A forward over the shortest sequence of an example, without targets or counts: D and E are 0."""
    shortest = min(example.sequences, key=lambda sequence: len(sequence.input_ids))
    masked = replace(shortest, loss_mask=np.zeros_like(shortest.loss_mask))
    untrained = {name: values[:0] for name, values in example.target_columns.items()}
    alone = replace(example, sequences=(masked,), columns={}, target_columns=untrained)
    batch = collate([alone], index, padded_to, media_inputs=media_inputs)
    return replace(
        batch,
        ends=Ends(*(torch.zeros(0, dtype=torch.int64) for _ in Ends._fields)),
        columns={name: torch.zeros(0, dtype=torch.float64) for name in example.columns},
        example_of_sequence=torch.zeros(0, dtype=torch.int64),
        counts=dict.fromkeys(batch.counts, 0),
        origins=(),
        sequence_sources=(),
        sequence_tokens=(),
        sequence_targets=(),
    )


def with_ahead(batch: Batch) -> Batch:
    """Returns a batch of full rows with what a head learns that predicts the token after the next one:

        input_ids      [[  1, 11, 12,  2,    1, 21,  2 ]]        targets: 12, 2 of the first sequence, 2 of the second
        next_ids       [[ 11, 12,  2,  2,   21,  2,  2 ]]        ahead.positions 0, 1, 4   ids 12, 2, 2   target 0, 1, 2

    A sequence's second token is none of its targets: no place of the sequence is two before it. Raises ValueError if
    sequences share a beginning.
    """
    if any(batch.prefix_lengths):
        raise ValueError("the next token of a beginning that sequences share is not one")
    lengths = torch.tensor(batch.sequence_lengths)
    ends = lengths.cumsum(0)
    begins = (ends - lengths)[batch.targets.sequence]  # (S,)
    has_place = batch.targets.positions > begins
    target = has_place.nonzero()[:, 0]
    next_ids = batch.inputs["input_ids"].roll(-1, 1)
    next_ids[:, ends - 1] = batch.inputs["input_ids"][:, ends - 1]
    return replace(batch, ahead=Ahead(batch.targets.positions[target] - 1, batch.targets.ids[target], target, next_ids))


# --- one rank's tokens of a batch


Stretches = tuple[tuple[int, int], ...]  # (first place, last place + 1) in the row, each


@dataclass(frozen=True)
class TokenShare:
    """One of the ranks that share every row.

    A context rank has two chunks, as far from the row's beginning as from its end: the cost of a token in causal
    attention grows with its place, and like this all ranks have the same. Sequence ranks cut their context rank's part
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
        """Returns the stretches of a context rank, all its sequence ranks together, in a row of `tokens` tokens."""
        if self.context == 1:
            return ((0, tokens),)
        chunk, last = tokens // (2 * self.context), 2 * self.context - 1
        return tuple((n * chunk, (n + 1) * chunk) for n in (context_rank, last - context_rank))

    def places(self, tokens: int) -> NDArray[np.int64]:  # (t,), ascending
        """Returns the places of this rank."""
        mine = np.concatenate([np.arange(*stretch) for stretch in self.stretches(tokens, self.context_rank)])
        return np.split(mine, self.sequence)[self.sequence_rank]


UNSHARDED = TokenShare()  # one rank has all of a row


def token_shard(batch: Batch, share: TokenShare) -> Batch:
    """One rank's tokens of a batch, and the targets that are predicted at them; sums over the ranks are the batch's.

        row of `collate`'s example, context 2, one token of padding      rank 0        rank 1
        input_ids   [[ 1, 11, 12,  2,   1, 21,  2,   0 ]]         [[ 1, 11,  2,  0 ]]   [[ 12,  2,  1, 21 ]]
        targets.positions, .ids  [1, 2, 5], [12, 2, 2]             [1], [12]             [0, 3], [2, 2]

    Targets were shifted on the full row: the token that a place predicts may be another rank's. `target_columns` go
    with their targets; `row_targets` has those of all ranks. `Targets.sequence`, `columns`, `example_of_sequence`,
    `origins` and the counts of sequences and examples stay the row's on every rank, so that sums per sequence can be
    added up over the ranks. `sequence_lengths` stay the row's, too: attention is over full sequences. Raises ValueError
    if T cannot be cut, and for shared beginnings.
    """
    if share.context * share.sequence == 1:
        return batch
    tokens = batch.inputs["input_ids"].shape[1]
    if any(batch.prefix_lengths) or batch.media:
        raise ValueError("sequences with files, or that share a beginning, cannot be cut")
    if share.padded(tokens) != tokens:
        raise ValueError(f"{tokens} tokens cannot be cut for {share}")
    places = share.places(tokens)
    local_place = np.full(tokens, -1)  # of a place of the row among those of this rank
    local_place[places] = np.arange(len(places))
    local = torch.from_numpy(local_place)[batch.targets.positions]
    mine, here = local >= 0, torch.from_numpy(places)
    local_ends = torch.from_numpy(local_place)[batch.ends.positions]
    ends = Ends(local_ends[local_ends >= 0], batch.ends.sequence[local_ends >= 0])
    targets = Targets(local[mine], batch.targets.ids[mine], batch.targets.sequence[mine])
    sequence_of_place = np.repeat(np.arange(len(batch.sequence_lengths)), batch.sequence_lengths)
    num_sequences = len(batch.sequence_tokens)  # 0 in a dummy
    tokens_here = np.bincount(sequence_of_place[places], minlength=num_sequences)[:num_sequences]
    targets_here = np.bincount(targets.sequence.numpy(), minlength=num_sequences)[:num_sequences]
    first = np.isin(np.arange(num_sequences), np.unique(batch.example_of_sequence.numpy(), return_index=True)[1])
    counts = {
        "target_tokens": int(targets_here.sum()),
        "first_target_tokens": int(targets_here[first].sum()),
        "tokens": int(tokens_here.sum()),
    }
    ahead = batch.ahead
    if ahead is not None:
        place = torch.from_numpy(local_place)[ahead.positions]
        there = place >= 0
        ahead = Ahead(place[there], ahead.ids[there], ahead.target[there], ahead.next_ids[:, here].contiguous())
    return replace(
        batch,
        inputs={name: values[:, here].contiguous() for name, values in batch.inputs.items()},
        targets=targets,
        ahead=ahead,
        ends=ends,
        target_columns={name: values[mine] for name, values in batch.target_columns.items()},
        row_targets=RowTargets(
            batch.targets.ids,
            batch.targets.sequence,
            torch.nonzero(mine)[:, 0],
            batch.sequence_targets,
            batch.sequence_tokens,
        ),
        counts={**batch.counts, **counts},
        sequence_tokens=tuple(tokens_here.tolist()),
        sequence_targets=tuple(targets_here.tolist()),
    )
