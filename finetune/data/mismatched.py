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

from finetune.data.samples import Sequence, shared_prefix
from finetune.data.token_cache import CacheEntry, EntryWriter, load
from finetune.data.tokenizing import ChunkResult, ExampleArrays, image_arrays
from finetune.errors import RunFailure

CHUNK = 1000  # examples written at a time
T = TypeVar("T")


def write_with_mismatched(writer: EntryWriter, write: Callable[[EntryWriter], T], max_length: int, per_row: int) -> T:
    """Calls `write` for single answers, and writes each with a mismatched one; counts those without one.

    per_row: answers of a row.
    """
    folder = writer.folder / "answers"
    with EntryWriter(folder) as answers:
        result = write(answers)
        answers.finish({})
    entry = load(folder)
    if entry is None:
        raise RunFailure(f"{folder}: was written a moment ago and cannot be read; is the disk in order?")
    begins = answer_begins(entry)
    ends = np.diff(entry.sequence_offsets)
    row_ids = (entry.files.astype(np.int64) << 40) + entry.rows
    partner = partners(begins, ends - begins, row_ids, max_length, per_row)
    paired = np.flatnonzero(partner >= 0)
    alone = {"examples": 0, "tokens": 0, "supervised_tokens": 0, "no_other_answer": len(partner) - len(paired)}
    writer.report, writer.columns = replace(answers.report, **alone), answers.columns
    for chunk in np.split(paired, range(CHUNK, len(paired), CHUNK)):
        writer.append(ChunkResult(Counter(), [], _groups(entry, chunk, partner[chunk], begins), None, None))
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


def _groups(
    entry: CacheEntry, indices: NDArray[np.int64], partner: NDArray[np.int64], begins: NDArray[np.int64]
) -> ExampleArrays:
    """Examples of two sequences: the own one, and its prompt with the partner's answer."""
    sequences: list[Sequence] = []
    for i, j in zip(indices.tolist(), partner.tolist(), strict=True):
        (own,), (other,) = (entry.example(n, 0).sequences for n in (i, j))
        sequences += [own, _joined(own, int(begins[i]), other, int(begins[j]))]
    pairs = list(zip(sequences[::2], sequences[1::2], strict=True))
    width = len(entry.columns)
    return ExampleArrays(
        labels=list(entry.names),
        input_ids=np.concatenate([np.empty(0, np.int32), *(one.input_ids for one in sequences)]),
        loss_mask=np.concatenate([np.empty(0, bool), *(one.loss_mask for one in sequences)]),
        lengths=np.array([len(one.input_ids) for one in sequences], np.int64),
        targets=np.array([one.num_targets for one in sequences], np.int64),
        sizes=np.full(len(indices), 2),
        shared=np.array([shared_prefix(pair) for pair in pairs], np.int64),
        hashes=entry.hashes[indices],
        files=entry.files[indices],
        rows=entry.rows[indices],
        numbers=entry.numbers.reshape(-1, width)[indices].reshape(-1),
        images=image_arrays(sequences),
    )


def _joined(own: Sequence, prompt: int, other: Sequence, answer: int) -> Sequence:
    """Returns the first `prompt` tokens of one with those of another from `answer` on, each with its images, which no
    supervised token lies within."""
    moved = prompt - answer
    return Sequence(
        np.concatenate([own.input_ids[:prompt], other.input_ids[answer:]]),
        np.concatenate([own.loss_mask[:prompt], other.loss_mask[answer:]]),
        (
            *(image for image in own.images if image.begin < prompt),
            *(
                replace(image, begin=image.begin + moved, end=image.end + moved)
                for image in other.images
                if image.begin >= answer
            ),
        ),
    )
