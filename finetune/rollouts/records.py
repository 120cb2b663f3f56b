"""The record of a step's rollouts, in the run's folder before the step is taken, and that of an evaluation.

    step-00000001.jsonl          one line per sample, in order: row, sample, ids, text, reward, rewards, ...; with an
                                 environment also its turns
    step-00000001.safetensors    ids of the prompts; log-probabilities and margins of each sampled token
    eval-00000001.*              the same of the held-out prompts, sampled after that step

The second file is renamed into place last and holds the digest of the first: a record is complete or does not count.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from finetune.errors import UserError
from finetune.rewards.completion import Reward

FOLDER = "rollouts"  # in the run's folder
STEP, EVALUATION = "step", "eval"  # kinds of records


class Predicted(NamedTuple):
    """A teacher's distributions at the tokens of a sample."""

    ids: NDArray[np.int32]  # (num_sampled, k)
    log_probs: NDArray[np.float32]  # (num_sampled, k)
    of: str  # teacher and settings, see `Teacher.of`


@dataclass(frozen=True)
class Turns:
    """Turns of a sample that an environment answered, as they are recorded."""

    spans: tuple[tuple[int, int], ...]  # [begin, end) of each in the sample's ids; between them is the environment's
    ended: Literal["over", "max_turns", "max_new_tokens", "failed"]  # by what; over: by the environment
    calls: int = 0  # of tools
    malformed_calls: int = 0  # of those that were begun, without the form of one
    failure: str | None = None  # kind, see `Outcome`, if a call of the environment failed


@dataclass(frozen=True)
class Sample:
    """One sampled answer, with its prompt."""

    path: str  # file or dataset of the prompt
    row: int  # its row there, from 1
    source: int  # index in `data.train`, in the record of an evaluation in `data.eval`
    sample: int  # of its prompt, from 0
    prompt: list[int]
    ids: list[int]  # sampled, with the end token; of an environment also what it added between turns
    text: str  # of them, without special tokens; of turns with them
    is_truncated: bool  # ended by max_new_tokens
    log_probs: NDArray[np.float64]  # (num_sampled,) of the sampler, under the temperature
    margins: NDArray[np.float64]  # (num_sampled,) see `Sampler`
    reward: Reward
    # (num_sampled,) log-probabilities of the trainer, under the temperature, if the loss reads them: by the weights
    # that the sample was drawn from, and by the initial weights.
    old: NDArray[np.float64] | None = None
    initial: NDArray[np.float64] | None = None
    teacher: Predicted | None = None  # under `objective.name: distill`
    turns: Turns | None = None  # None: all ids are one turn

    @property
    def sampled(self) -> NDArray[np.bool_]:  # (len(ids),)
        """Returns which ids the model sampled: those of its turns. The others are never trained."""
        mask = np.full(len(self.ids), self.turns is None)
        for begin, end in self.turns.spans if self.turns is not None else ():
            mask[begin:end] = True
        return mask

    @property
    def num_sampled(self) -> int:
        return int(np.count_nonzero(self.sampled))

    def rewarded(self, reward: Reward) -> Sample:
        return replace(self, reward=reward)


def record_file(folder: Path, step: int, kind: str = STEP) -> Path:
    """Returns the file of lines of a step (from 1), the first that trains on them, or of the evaluation after a
    step."""
    return folder / f"{kind}-{step:08d}.jsonl"


def write_record(folder: Path, step: int, samples: Sequence[Sample], identity: str, kind: str = STEP) -> None:
    """Writes the record of a step; it is on the disk when this returns. Raises OSError."""
    folder.mkdir(exist_ok=True)
    lines = record_file(folder, step, kind)
    entries = [
        {
            "row": f"{sample.path}:{sample.row}",
            "sample": sample.sample,
            "ids": sample.ids,
            "text": sample.text,
            "reward": sample.reward.total,
            "rewards": dict(sample.reward.by_name),
            "failures": list(sample.reward.failures),
            "truncated": sample.is_truncated,
            "source": sample.source,
            **({"turns": asdict(sample.turns)} if sample.turns is not None else {}),
        }
        for sample in samples
    ]
    content = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries).encode()
    flat = {
        "prompt_ids": np.concatenate([np.array(sample.prompt, np.int32) for sample in samples]),
        "prompt_ends": np.cumsum([len(sample.prompt) for sample in samples]),
        "log_probs": np.concatenate([sample.log_probs for sample in samples]),
        "margins": np.concatenate([sample.margins for sample in samples]),
    }
    for name in ("old", "initial"):
        if getattr(samples[0], name) is not None:
            flat[f"{name}_log_probs"] = np.concatenate([getattr(sample, name) for sample in samples])
    metadata = {"identity": identity, "lines": hashlib.sha256(content).hexdigest()}
    if predicted := [sample.teacher for sample in samples if sample.teacher is not None]:
        flat["teacher_ids"] = np.concatenate([one.ids for one in predicted])
        flat["teacher_log_probs"] = np.concatenate([one.log_probs for one in predicted])
        metadata["teacher"] = predicted[0].of
    _write_through(lines, content)
    _write_through(lines.with_suffix(".safetensors"), save(flat, metadata))


def read_record(folder: Path, step: int, kind: str = STEP) -> tuple[list[Sample], str] | None:
    """Returns the samples of a step and the identity of their run; None if there is no complete record."""
    lines = record_file(folder, step, kind)
    try:
        content = lines.read_bytes()
        with safe_open(lines.with_suffix(".safetensors"), "np") as file:
            metadata, flat = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (FileNotFoundError, SafetensorError):
        return None
    if metadata.get("lines") != hashlib.sha256(content).hexdigest():
        return None
    parsed = [json.loads(line) for line in content.decode().splitlines()]
    prompts = [flat["prompt_ids"][a:b].tolist() for a, b in pairwise([0, *flat["prompt_ends"].tolist()])]
    spans = [line["turns"]["spans"] if "turns" in line else [(0, len(line["ids"]))] for line in parsed]
    ends = np.cumsum([sum(end - begin for begin, end in of_sample) for of_sample in spans])[:-1]
    tensors = zip(parsed, prompts, np.split(flat["log_probs"], ends), np.split(flat["margins"], ends), strict=True)
    samples: list[Sample] = []
    for line, prompt, log_probs, margins in tensors:
        path, _, row = line["row"].rpartition(":")
        reward = Reward(line["reward"], line["rewards"], tuple(line["failures"]))
        place, turns = (path, int(row), line["source"], line["sample"]), line.get("turns")
        if turns is not None:
            turns = Turns(**{**turns, "spans": tuple((begin, end) for begin, end in turns["spans"])})
        of_ids = (line["ids"], line["text"], line["truncated"], log_probs, margins)
        samples.append(Sample(*place, prompt, *of_ids, reward, turns=turns))
    for name in ("old", "initial"):
        if f"{name}_log_probs" in flat:
            of_samples = zip(samples, np.split(flat[f"{name}_log_probs"], ends), strict=True)
            samples = [replace(sample, **{name: values}) for sample, values in of_samples]
    if "teacher" in metadata:
        ids, log_probs = (np.split(flat[f"teacher_{name}"], ends) for name in ("ids", "log_probs"))
        predicted = [Predicted(*of_sample, metadata["teacher"]) for of_sample in zip(ids, log_probs, strict=True)]
        samples = [replace(sample, teacher=one) for sample, one in zip(samples, predicted, strict=True)]
    return samples, metadata["identity"]


def check_records(folder: Path, steps: int, reuse: int) -> None:
    """Raises UserError unless a folder has the files of the steps 1 to `steps`, one for each `reuse` steps."""
    for step in range(1, steps + 1, reuse):
        if not record_file(folder, step).is_file():
            raise UserError(
                f"rollouts.replay: {record_file(folder, step)}: no such file, and train.max_steps needs {steps} steps "
                "of rollouts"
            )


def replayed(found: tuple[list[Sample], str] | None, folder: Path, step: int, rows: int) -> list[Sample]:
    """Returns the samples of a record to train on again. Raises UserError if it is damaged or of another size."""
    path = record_file(folder, step)
    if found is None:
        raise UserError(f"rollouts.replay: {path} is damaged, or its .safetensors is missing: record the step again")
    if len(found[0]) != rows:
        raise UserError(
            f"rollouts.replay: {path} has {len(found[0])} samples, and a step of this recipe {rows} "
            "(rollouts.prompts x rollouts.samples): set them as in the run that recorded it"
        )
    return found[0]


def set_record_aside(folder: Path, step: int, kind: str = STEP) -> None:
    """Renames the record of a step to aside-*, if there is one."""
    lines = record_file(folder, step, kind)
    for file in (lines, lines.with_suffix(".safetensors")):
        free = next(name for i in range(10**6) if not (name := file.with_name(f"aside-{i}-{file.name}")).exists())
        with contextlib.suppress(FileNotFoundError):
            file.rename(free)


def _write_through(path: Path, content: bytes) -> None:
    """Writes a file to the disk; after a kill it is complete or absent. Raises OSError."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
