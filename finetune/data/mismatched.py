"""KTO's mismatched answers: next to each example its prompt with the answer of another row of the same source.

    own examples   q1 a1,  q2 a2,  q3 a3            (of a pair: two examples, one after the other)
    groups         q1 a1 | q1 a2    q2 a2 | q2 a3    q3 a3 | q3 a1

The log-ratio of policy and reference on such answers estimates the KL divergence of the two
(Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306, section 4.1). The partner is the next example, after a
rotation by one row, whose answer fits next to both within `data.max_length`: a function of the data, not of the launch.
A stream pairs within the rows that are tokenized together (`data.window`).
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from finetune.data.samples import Sequence
from finetune.data.token_cache import CacheEntry, EntryWriter, load
from finetune.data.tokenizing import ChunkResult, TokenizedExample, arrays_of
from finetune.errors import RunFailure

CHUNK = 1000  # examples written at a time
T = TypeVar("T")


def write_with_mismatched(writer: EntryWriter, write: Callable[[EntryWriter], T], max_length: int, per_row: int) -> T:
    """Calls `write` for single answers, and writes each with a mismatched one; counts those without one.

    per_row: answers of a row.
    """
    folder = writer.folder / "answers"
    folder.mkdir()
    with EntryWriter(folder) as answers:
        result = write(answers)
        answers.finish({})
    entry = load(folder)
    if entry is None:
        raise RunFailure(f"{folder}: was written a moment ago and cannot be read. Fix: check the disk, and start again")
    begins = answer_begins(entry)
    ends = np.diff(entry.sequence_offsets)
    row_ids = (entry.files.astype(np.int64) << 40) + entry.rows
    partner = partners(begins, ends - begins, row_ids, max_length, per_row)
    paired = np.flatnonzero(partner >= 0)
    alone = {"examples": 0, "tokens": 0, "supervised_tokens": 0, "no_other_answer": len(partner) - len(paired)}
    writer.report, writer.columns = replace(answers.report, **alone), answers.columns
    width = len(entry.columns)
    for chunk in np.split(paired, range(CHUNK, len(paired), CHUNK)):
        examples = []
        for i in chunk.tolist():
            j, example = int(partner[i]), entry.example(i, 0)
            (own,), (other,) = example.sequences, entry.example(j, 0).sequences
            pair = (own, _joined(own, int(begins[i]), other, int(begins[j])))
            numbers = tuple(entry.numbers[i * width : (i + 1) * width].tolist())
            examples.append(TokenizedExample((example.path, example.row), pair, numbers))
        arrays = replace(arrays_of(examples), hashes=entry.hashes[chunk])  # of the own answer
        writer.append(ChunkResult(Counter(), [], arrays, None, None))
    shutil.rmtree(folder)
    return result


def answer_begins(entry: CacheEntry) -> NDArray[np.int64]:  # (N,)
    """Returns the index of the first supervised token of each sequence; each has one."""
    supervised = np.flatnonzero(entry.loss_mask)  # (S,) places in all tokens
    return supervised[np.searchsorted(supervised, entry.sequence_offsets[:-1])] - entry.sequence_offsets[:-1]


def partners(
    prompts: NDArray[np.int64], answers: NDArray[np.int64], rows: NDArray[np.int64], max_length: int, per_row: int
) -> NDArray[np.int64]:  # (N,)
    """Returns the index of the example whose answer each gets; -1 if no answer of another row fits.

    prompts, answers: (N,) tokens; rows: (N,) equal for the answers of a row.
    """
    count = len(prompts)
    partner = np.full(count, -1)
    room = max_length - 2 * prompts - answers
    left = np.flatnonzero(room >= answers.min()) if count else np.zeros(0, np.int64)
    for distance in (*range(per_row, count), *range(1, per_row)):
        if not len(left):
            break
        other = (left + distance) % count
        fits = (answers[other] <= room[left]) & (rows[other] != rows[left])
        partner[left[fits]] = other[fits]
        left = left[~fits]
    return partner


def _joined(own: Sequence, prompt: int, other: Sequence, answer: int) -> Sequence:
    """Returns the first `prompt` tokens of one with those of another from `answer` on, each with its images, which no
    supervised token lies within."""
    moved = prompt - answer
    return Sequence(
        np.concatenate([own.input_ids[:prompt], other.input_ids[answer:]]),
        np.concatenate([own.loss_mask[:prompt], other.loss_mask[answer:]]),
        (
            *(image for image in own.media if image.begin < prompt),
            *(
                replace(image, begin=image.begin + moved, end=image.end + moved)
                for image in other.media
                if image.begin >= answer
            ),
        ),
    )
