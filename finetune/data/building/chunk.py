"""Rows to tokens, a chunk at a time: parse, render, tokenise, length policy. What every core does by itself.

A chunk's outcome depends on nothing but the chunk, so an entry of the cache is the same with any number of processes.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune.data.chat.renderer import Rendered, Renderer, Tokens
from finetune.data.formats import parse_row
from finetune.data.samples import BadRow
from finetune.errors import UserError

Item = tuple[str, int, "Mapping[str, Any] | str"]  # file or dataset, row number, the row or why it cannot be read
Place = tuple[str, int]  # file or dataset, row number

PARTS = ("", "chosen", "rejected")  # of a preference; an example's part is kept as its index here


@dataclass(frozen=True)
class Work:
    """What is done to every row of a source."""

    made: Renderer
    format: str
    columns: dict[str, str] | None
    max_length: int  # tokens
    overlong: str  # drop | truncate | split | error
    skips_bad: bool  # on_bad_row: skip


@dataclass(frozen=True)
class Piece:
    """One example as it was tokenised."""

    place: Place
    part: int  # in PARTS
    input_ids: NDArray[np.int32]  # (T,)
    trained: NDArray[np.bool_]  # (T,)


@dataclass
class Done:
    """What became of a chunk. Under `failed` nothing else counts."""

    counts: Counter[str] = field(default_factory=Counter)  # by the names of SourceReport
    bad_rows: list[str] = field(default_factory=list)  # with place and reason
    pieces: list[Piece] = field(default_factory=list)
    untrained: Piece | None = None  # the first one without a trained token
    failed: str | None = None  # the first error in the order of the rows that ends the build

    def arrays(self) -> Flat:
        """The kept examples laid end to end."""
        pieces = self.pieces
        labels = list(dict.fromkeys(piece.place[0] for piece in pieces))
        return Flat(
            labels=labels,
            input_ids=np.concatenate([np.empty(0, np.int32), *(piece.input_ids for piece in pieces)]),
            trained=np.concatenate([np.empty(0, bool), *(piece.trained for piece in pieces)]),
            lengths=np.array([len(piece.input_ids) for piece in pieces], np.int64),
            num_trained=np.array([np.count_nonzero(piece.trained) for piece in pieces], np.int64),
            hashes=np.array([_hash(piece.input_ids) for piece in pieces], np.uint64),
            files=np.array([labels.index(piece.place[0]) for piece in pieces], np.int32),
            rows=np.array([piece.place[1] for piece in pieces], np.int64),
            parts=np.array([piece.part for piece in pieces], np.int8),
        )


@dataclass(frozen=True)
class Flat:
    """`N` examples of `T` tokens together, ready for the disk; `files` are numbers in `labels`."""

    labels: list[str]
    input_ids: NDArray[np.int32]  # (T,)
    trained: NDArray[np.bool_]  # (T,)
    lengths: NDArray[np.int64]  # (N,)
    num_trained: NDArray[np.int64]  # (N,)
    hashes: NDArray[np.uint64]  # (N,)
    files: NDArray[np.int32]  # (N,)
    rows: NDArray[np.int64]  # (N,)
    parts: NDArray[np.int8]  # (N,)


@dataclass(frozen=True)
class Outcome:
    """`Done` as it travels from one process to another: arrays instead of an object for every example."""

    counts: Counter[str]
    bad_rows: list[str]
    flat: Flat
    untrained: Piece | None
    failed: str | None


def tokenise_chunk(work: Work, items: Sequence[Item]) -> Outcome:
    """What becomes of these rows, in their order. Raises nothing for bad rows: see `Done.failed`."""
    done = Done()
    drawn = _draw_rows(work, items, done)
    try:
        tokens = iter(work.made.tokenise([one for _, several in drawn for one in several]))
        for place, several in drawn:
            _keep_row(work, place, [(one, next(tokens)) for one in several], done)
    except UserError as error:  # a row before the one that could not be drawn
        done.failed = str(error)
    return Outcome(done.counts, done.bad_rows, done.arrays(), done.untrained, done.failed)


def draw(work: Work, row: Mapping[str, Any] | str) -> list[Rendered]:
    """The strings of a row. Raises BadRow, and UserError for what no row could mend."""
    if isinstance(row, str):
        raise BadRow(row)
    return work.made.draw(parse_row(row, work.format, work.columns))


def bad_row_message(place: Place, error: BadRow) -> str:
    """What a bad row is called where it ends the build."""
    return f"{place[0]}:{place[1]}: {error}\n(`data.on_bad_row: skip` leaves such rows out and counts them)"


def _draw_rows(work: Work, items: Sequence[Item], done: Done) -> list[tuple[Place, list[Rendered]]]:
    """Rows as strings, up to the first that ends the build."""
    drawn: list[tuple[Place, list[Rendered]]] = []
    for label, number, row in items:
        try:
            several = draw(work, row)
        except BadRow as error:
            if not work.skips_bad:
                done.failed = bad_row_message((label, number), error)
                break
            done.counts.update(rows=1, bad=1)
            done.bad_rows.append(f"{label}:{number}: {error}")
        except UserError as error:
            done.failed = f"{label}:{number}: {error}"
            break
        else:
            done.counts["rows"] += 1
            drawn.append(((label, number), several))
    return drawn


def _keep_row(work: Work, place: Place, several: list[tuple[Rendered, Tokens]], done: Done) -> None:
    """The examples of one row; of a preference both or none."""
    pieces = [Piece(place, PARTS.index(one.part), *tokens) for one, tokens in several]
    is_preference = any(piece.part for piece in pieces)
    if is_preference:
        _keep_preference(work, pieces, done)
        return
    if len(pieces) > 1:
        done.counts["unrolled"] += 1
    for piece in pieces:
        for fitted in _fit(work, piece, done.counts):
            if np.count_nonzero(fitted.trained):  # a quarter of what `any` takes for so few
                done.pieces.append(fitted)
            else:
                _count_untrained(fitted, done)


def _keep_preference(work: Work, pieces: list[Piece], done: Done) -> None:
    overlong = [piece for piece in pieces if len(piece.input_ids) > work.max_length]
    if overlong and work.overlong == "split":
        raise UserError(f"{_where(pieces[0])}: the answers of a preference cannot be split; set data.overlong to drop")
    if overlong and work.overlong == "drop":
        done.counts["dropped_overlong"] += 1
        return
    several = Counter[str]()  # a row counts once, whichever of its answers was cut
    fitted = [kept for piece in pieces for kept in _fit(work, piece, several)]
    done.counts.update(dict.fromkeys(several, 1))
    without = [piece for piece in fitted if not piece.trained.any()]
    if without:
        _count_untrained(without[0], done)
    else:
        done.pieces.extend(fitted)


def _count_untrained(piece: Piece, done: Done) -> None:
    done.counts["no_supervised_token"] += 1
    done.untrained = done.untrained or piece


def _fit(work: Work, piece: Piece, counts: Counter[str]) -> Iterator[Piece]:
    """The pieces of at most max_length tokens that `overlong` makes of an example."""
    most, length = work.max_length, len(piece.input_ids)
    if length <= most:
        yield piece  # rendering has left its first token untrained
    elif work.overlong == "drop":
        counts["dropped_overlong"] += 1
    elif work.overlong == "truncate":
        counts["truncated"] += 1
        yield _cut(piece, 0, most)
    elif work.overlong == "split":
        counts["split"] += 1
        for begin in range(0, length, most):
            yield _cut(piece, begin, begin + most)
    else:
        raise UserError(
            f"{_where(piece)}: {length} tokens, but data.max_length is {most}; raise it, or set data.overlong to drop, "
            "truncate or split"
        )


def _cut(piece: Piece, begin: int, end: int) -> Piece:
    trained = piece.trained[begin:end].copy()
    trained[:1] = False  # the first token of a piece is predicted by nothing, too
    return Piece(piece.place, piece.part, piece.input_ids[begin:end], trained)


def _where(piece: Piece) -> str:
    return f"{piece.place[0]}:{piece.place[1]}"


def _hash(ids: NDArray[np.int32]) -> int:
    """64 bits of the tokens: enough that among ten million examples no two differ by a name alone (1 in 10^5)."""
    return int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest(), "little")
