"""Tokenizes rows: a chunk of rows at a time, over all cores, and back in order.

A chunk's result depends on the chunk alone, so an entry of the cache is the same with any number of processes.
Processes come from a fork server: a fresh process that has imported a worker's modules and has no threads, so that
its forks start at once, share those pages, and cannot inherit a lock that some thread of ours (torch, rich) holds. A
spawned process would import everything again, on every core.
"""

from __future__ import annotations

import gc
import hashlib
import os
import struct
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune.data.chat.encoding import Tokens, remember_words
from finetune.data.chat.renderer import Rendered, Renderer, TokensAndMedia
from finetune.data.formats.detect import parse_row
from finetune.data.objective_rows import PLAIN, ObjectiveRows, examples_of
from finetune.data.samples import BadRow, Clip, Medium, PromptOnly, Sequence, Video, shared_prefix
from finetune.data.workers import worker_pool
from finetune.errors import UserError

Item = tuple[str, int, "Mapping[str, Any] | str"]  # file or dataset, row number, the row or why it cannot be read
RowId = tuple[str, int]  # file or dataset, row number

CHUNKS_PER_WORKER = 2  # that a worker has or will have next; more would only be memory
EQUAL_ANSWERS = "both answers are the same tokens, so there is nothing to prefer; do they differ by blanks alone?"
MOST_WAITING = 16  # times as many results may wait for one before them


@dataclass(frozen=True)
class RowSettings:
    """Settings that turn the rows of one source into examples."""

    renderer: Renderer
    format: str
    columns: Mapping[str, str] | None  # field of the format: column of the rows
    max_length: int  # tokens of an example, all its sequences together
    overlong: str  # drop | truncate | split | error
    skips_bad: bool  # on_bad_row: skip
    objective: ObjectiveRows = PLAIN
    pairs: str = "best_worst"  # of ranked answers: best_worst | all


@dataclass(frozen=True)
class TokenizedExample:
    """One example, before it is written to the cache."""

    row_id: RowId
    sequences: tuple[Sequence, ...]
    numbers: tuple[float, ...] = ()  # in the order of `ObjectiveRows.columns`


@dataclass(frozen=True)
class ExampleArrays:
    """`N` examples of `M` sequences of `T` tokens with `I` images, end to end, ready for the disk."""

    labels: list[str]  # files or datasets
    input_ids: NDArray[np.int32]  # (T,)
    loss_mask: NDArray[np.bool_]  # (T,)
    lengths: NDArray[np.int64]  # (M,) tokens of each sequence
    targets: NDArray[np.int64]  # (M,) trained tokens of each sequence
    sizes: NDArray[np.int64]  # (N,) sequences of each example
    shared: NDArray[np.int64]  # (N,) see `shared_prefix`
    hashes: NDArray[np.uint64]  # (N,)
    files: NDArray[np.int32]  # (N,) index in `labels`
    rows: NDArray[np.int64]  # (N,)
    numbers: NDArray[np.float64]  # (N * columns,) example after example
    # (I, 6): index of its sequence; height, width of an image or a video, samples, rate of a clip; first and
    # last + 1 of its tokens there; bytes of its source
    image_numbers: NDArray[np.int64]
    # (B,) sources end to end: a byte of `SOURCE_IN_ROW`, `SOURCE_OF_CLIP` and `SOURCE_OF_VIDEO`, of a video its
    # `VIDEO_NUMBERS`, and the path or the file itself
    image_sources: NDArray[np.uint8]


@dataclass(frozen=True)
class ChunkResult:
    """A chunk as it travels from one process to another: arrays instead of an object for every example."""

    counts: Counter[str]  # by the names of SourceReport
    bad_rows: list[str]  # with place and reason
    arrays: ExampleArrays
    untrained: TokenizedExample | None  # the first one without a trained token
    failed: str | None  # the first error in the order of the rows that ends the build; the rest is then ignored


@dataclass(frozen=True)
class DrawnRow:
    """A row as strings: for every example of it the texts of its sequences, and its numbers."""

    row_id: RowId
    groups: list[tuple[tuple[Rendered, ...], tuple[float, ...]]]
    is_unrolled: bool  # a conversation became several examples
    is_prompt: bool = False  # it has no answer


def tokenize_chunk(settings: RowSettings, items: Iterable[Item | UserError]) -> ChunkResult:
    """Parses, renders, tokenizes and cuts rows, in their order. Does not raise for bad rows: see `ChunkResult.failed`.

    items: a UserError ends the build after the rows before it.
    """
    counts, bad_rows, failed = Counter[str](), list[str](), None
    examples, untrained = list[TokenizedExample](), None

    def refused(row_id: RowId, error: BadRow) -> str | None:
        """Counts a bad row; returns the error if it ends the build."""
        if not settings.skips_bad:
            return bad_row_message(row_id, error)
        counts["bad"] += 1
        bad_rows.append(f"{row_id[0]}:{row_id[1]}: {error}")
        return None

    drawn: list[DrawnRow] = []
    for item in items:
        if isinstance(item, UserError):
            failed = str(item)
            break
        counts["rows"] += 1
        try:
            drawn.append(draw(settings, item))
        except BadRow as error:
            failed = refused(item[:2], error)
        except UserError as error:
            failed = str(error)
        if failed:
            break
    try:
        rendered = [text for row in drawn for group, _ in row.groups for text in group]
        sequences = iter(settings.renderer.tokenize_each(rendered))
        for row in drawn:
            try:
                groups = _sequences(settings, row, sequences)
            except BadRow as error:
                failed = refused(row.row_id, error) or failed
                if settings.skips_bad:
                    continue
                break
            if row.is_unrolled:
                counts["unrolled"] += 1
            for group, numbers in groups:
                for example in _fit(settings, TokenizedExample(row.row_id, group, numbers), counts):
                    # count_nonzero takes a quarter of the time of `any` for so few
                    is_trained = all(np.count_nonzero(sequence.loss_mask) for sequence in example.sequences)
                    if is_trained or settings.objective.is_text or row.is_prompt:  # a text may be a single token
                        examples.append(example)
                    else:
                        counts["no_supervised_token"] += 1
                        untrained = untrained or example
    except UserError as error:  # of a row before the one that could not be drawn
        failed = str(error)
    return ChunkResult(counts, bad_rows, arrays_of(examples), untrained, failed)


def draw(settings: RowSettings, item: Item) -> DrawnRow:
    """Returns the texts and numbers of a row's examples. Raises BadRow, and UserError for a problem of every row."""
    label, number, row = item
    if isinstance(row, str):
        raise BadRow(row)
    try:
        sample = parse_row(row, settings.format, settings.columns, settings.objective.is_prompt)
        drawn = [
            (settings.renderer.draw(example, label), numbers)
            for example, numbers in examples_of(sample, settings.objective, settings.pairs)
        ]
    except UserError as error:
        raise UserError(f"{label}:{number}: {error}") from None
    groups = [(group, numbers) for groups, numbers in drawn for group in groups]
    return DrawnRow((label, number), groups, len(groups) > len(drawn), isinstance(sample, PromptOnly))


def _sequences(
    settings: RowSettings, row: DrawnRow, tokens: Iterator[Tokens | TokensAndMedia | BadRow]
) -> list[tuple[tuple[Sequence, ...], tuple[float, ...]]]:
    """Returns the sequences of a row's examples, with their numbers. Raises BadRow after all of its tokens are read."""
    of_texts = [[next(tokens) for _ in texts] for texts, _ in row.groups]
    groups: list[tuple[Sequence, ...]] = []
    for group in of_texts:
        sequences = list[Sequence]()
        for one in group:
            if isinstance(one, BadRow):
                raise one
            sequences.append(Sequence(one[0], one[1], one[2] if len(one) == 3 else ()))
        groups.append(tuple(sequences))
    if _has_equal_answers(settings, groups):
        raise BadRow(EQUAL_ANSWERS)
    return [(group, numbers) for group, (_, numbers) in zip(groups, row.groups, strict=True)]


def bad_row_message(row_id: RowId, error: BadRow) -> str:
    """Returns the error that a bad row ends the build with."""
    begin = "Or" if "Fix: " in str(error) else "Fix: correct the row, or"
    skip = "`data.on_bad_row: skip`, which leaves such rows out and counts them"
    return f"{row_id[0]}:{row_id[1]}: {error}\n{begin} set {skip}"


def _has_equal_answers(settings: RowSettings, groups: list[tuple[Sequence, ...]]) -> bool:
    """Different texts may be the same tokens: a template strips them, a tokenizer normalizes them."""
    if settings.objective.is_unpaired:  # the answers of a pair are examples of their own
        groups = [tuple(sequence for group in groups for sequence in group)]
    return any(len(group) == 2 and np.array_equal(group[0].input_ids, group[1].input_ids) for group in groups)


def _fit(settings: RowSettings, example: TokenizedExample, counts: Counter[str]) -> Iterator[TokenizedExample]:
    """Yields the examples of at most max_length tokens that `overlong` makes of one."""
    most, length = settings.max_length, sum(len(sequence.input_ids) for sequence in example.sequences)
    if length <= most:
        yield example  # rendering has left the first tokens untrained
    elif settings.overlong == "drop":
        counts["dropped_overlong"] += 1
    elif settings.overlong == "error":
        several = len(example.sequences) > 1
        raise UserError(
            f"{example.row_id[0]}:{example.row_id[1]}: {length} tokens{' in both answers' * several}, but "
            f"data.max_length is {most}. Fix: raise it, or set data.overlong to drop"
            f"{'' if several else ', truncate or split'}"
        )
    elif any(sequence.media for sequence in example.sequences):
        pieces = list(_turns(example, most))
        counts["truncated" if settings.overlong == "truncate" else "split"] += bool(pieces)
        counts["dropped_overlong"] += not pieces
        yield from pieces if settings.overlong == "split" else pieces[:1]
    elif settings.overlong == "truncate":
        counts["truncated"] += 1
        yield _cut(example, 0, most)
    else:
        counts["split"] += 1
        yield from (_cut(example, begin, begin + most) for begin in range(0, length, most))


def _cut(example: TokenizedExample, begin: int, end: int) -> TokenizedExample:
    """Returns a piece of an example of one sequence; the recipe allows no others to be cut."""
    (sequence,) = example.sequences
    loss_mask = sequence.loss_mask[begin:end].copy()
    loss_mask[:1] = False  # no token predicts the first token of a piece either
    return replace(example, sequences=(Sequence(sequence.input_ids[begin:end], loss_mask),))


def _turns(example: TokenizedExample, most: int) -> Iterator[TokenizedExample]:
    """Yields pieces of an example with images, each of as many turns as fit in `most` tokens: a piece ends with an
    answer, so that no image is cut. A turn that is longer by itself is left out."""
    (sequence,) = example.sequences
    mask = np.append(sequence.loss_mask, False)
    ends = np.flatnonzero(mask[:-1] & ~mask[1:]) + 1  # of answers, and before an image within one
    for image in sequence.media:
        ends = ends[(ends <= image.begin) | (ends >= image.end)]
    begin = 0
    while begin < len(mask) - 1 and len(later := ends[ends > begin]):
        fitting = later[later <= begin + most]
        end = int(fitting[-1]) if len(fitting) else int(later[0])
        if len(fitting):
            images = tuple(
                replace(image, begin=image.begin - begin, end=image.end - begin)
                for image in sequence.media
                if begin <= image.begin < end
            )
            piece = _cut(example, begin, end)
            yield replace(piece, sequences=(replace(piece.sequences[0], media=images),))
        begin = end


# Of the first byte of a stored source: the rest is the file itself, not its path; it is sound; it is a video.
SOURCE_IN_ROW, SOURCE_OF_CLIP, SOURCE_OF_VIDEO = 1, 2, 4
VIDEO_NUMBERS = struct.Struct("<4q")  # frames, numerator and denominator of their rate, frames seen


def _source_bytes(medium: Medium) -> bytes:
    mark, numbers = SOURCE_OF_CLIP * isinstance(medium, Clip), b""
    if isinstance(medium, Video):
        mark, numbers = SOURCE_OF_VIDEO, VIDEO_NUMBERS.pack(medium.frames, *medium.rate.as_integer_ratio(), medium.seen)
    if isinstance(medium.source, bytes):
        return bytes([mark | SOURCE_IN_ROW]) + numbers + medium.source
    return bytes([mark]) + numbers + os.fsencode(medium.source)


def _size_of(medium: Medium) -> tuple[int, int]:
    return (medium.samples, medium.rate) if isinstance(medium, Clip) else (medium.height, medium.width)


def arrays_of(examples: list[TokenizedExample]) -> ExampleArrays:
    labels = list(dict.fromkeys(example.row_id[0] for example in examples))
    sequences = [sequence for example in examples for sequence in example.sequences]
    media = [(i, one) for i, sequence in enumerate(sequences) for one in sequence.media]
    sources = [_source_bytes(one) for _, one in media]
    image_numbers = [
        (i, *_size_of(one), one.begin, one.end, len(source)) for (i, one), source in zip(media, sources, strict=True)
    ]
    return ExampleArrays(
        labels=labels,
        input_ids=np.concatenate([np.empty(0, np.int32), *(sequence.input_ids for sequence in sequences)]),
        loss_mask=np.concatenate([np.empty(0, bool), *(sequence.loss_mask for sequence in sequences)]),
        lengths=np.array([len(sequence.input_ids) for sequence in sequences], np.int64),
        targets=np.array([sequence.num_targets for sequence in sequences], np.int64),
        sizes=np.array([len(example.sequences) for example in examples], np.int64),
        shared=np.array([shared_prefix(example.sequences) for example in examples], np.int64),
        hashes=np.array([_hash(example) for example in examples], np.uint64),
        files=np.array([labels.index(example.row_id[0]) for example in examples], np.int32),
        rows=np.array([example.row_id[1] for example in examples], np.int64),
        numbers=np.array([number for example in examples for number in example.numbers], np.float64),
        image_numbers=np.array(image_numbers, np.int64).reshape(-1, 6),
        image_sources=np.frombuffer(b"".join(sources), np.uint8),
    )


def _hash(example: TokenizedExample) -> int:
    """64-bit hash of tokens and images: among ten million examples no two differ by a name alone (1 in 10^5)."""
    contents = []
    for sequence in example.sequences:
        sources = (one.source if isinstance(one.source, bytes) else os.fsencode(one.source) for one in sequence.media)
        contents.append(sequence.input_ids.tobytes() + b"".join(hashlib.blake2b(source).digest() for source in sources))
    separator = np.int32(-1).tobytes()
    return int.from_bytes(hashlib.blake2b(separator.join(contents), digest_size=8).digest(), "little")


# --- over all cores


def tokenize_chunks(
    settings: RowSettings, chunks: Iterable[list[Item | UserError]], workers: int
) -> Generator[ChunkResult, None, None]:
    """Yields results in the order of `chunks`, computed by `workers` processes; 1: by this one.

    Raises RunFailure for a worker that was killed. Close it (`contextlib.closing`) if it is left early: that ends the
    processes.
    """
    if workers == 1:
        yield from (tokenize_chunk(settings, chunk) for chunk in chunks)
        return
    with worker_pool(workers, _begin, settings, "tokenize") as pool:
        gc.freeze()  # as in the workers, see `_begin`
        try:
            most = workers * CHUNKS_PER_WORKER
            # When this process would wait for the others, it works, too: they take seconds to start.
            waiting: deque[Future[ChunkResult]] = deque()
            for chunk in chunks:
                if sum(not future.done() for future in waiting) >= most:
                    finished: Future[ChunkResult] = Future()
                    finished.set_result(tokenize_chunk(settings, chunk))
                    waiting.append(finished)
                else:
                    waiting.append(pool.submit(_tokenize_in_worker, chunk))
                while waiting and (waiting[0].done() or len(waiting) > MOST_WAITING * most):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            gc.unfreeze()


# --- in a worker

_settings: RowSettings | None = None


def _begin(settings: RowSettings) -> None:
    global _settings
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # every core has a process already
    _settings = settings
    if settings.renderer.media is not None:
        import torch  # by which features of files are made

        torch.set_num_threads(1)
    remember_words(settings.renderer.tokenizer)
    gc.freeze()  # or each collection walks through all objects of the libraries: a tenth of the time


def _tokenize_in_worker(items: list[Item | UserError]) -> ChunkResult:
    assert _settings is not None  # _begin was called
    return tokenize_chunk(_settings, items)
