"""The record of a step's rollouts, in the run's folder before the step is taken, and that of an evaluation.

    step-00000001.jsonl          one line per sample, in order: row, sample, ids, text, reward, rewards, ...; with an
                                 environment also its turns
    step-00000001.safetensors    ids of the prompts; log-probabilities and margins of each sampled token
    eval-00000001.*              the same of the held-out prompts, sampled after that step

The second file is renamed into place last: a record is complete or does not count. It holds digests of the first and of
itself, and the record's name, so that each bit is as it was written, for the step that it is read for. Values are
checked as well, so that no other program's record brings a run what it cannot train on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, get_args

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from finetune.errors import UserError
from finetune.rl.rewards.completion import Reward

FOLDER = "rollouts"  # in the run's folder
STEP, EVALUATION = "step", "eval"  # kinds of records
ROUNDING = 1e-4  # of a log-probability, above 0: fp32's of logits in the hundreds
_DTYPES = {
    "prompt_ids": np.int32,
    "prompt_ends": np.int64,
    "log_probs": np.float64,
    "margins": np.float64,
    "old_log_probs": np.float64,
    "initial_log_probs": np.float64,
    "teacher_ids": np.int32,
    "teacher_log_probs": np.float32,
}
_REQUIRED = frozenset(("prompt_ids", "prompt_ends", "log_probs", "margins"))


class DamagedRecord(UserError):
    """A record that is not what was written, or not what can be trained on, in one line."""


class Predicted(NamedTuple):
    """A teacher's distributions at the tokens of a sample."""

    ids: NDArray[np.int32]  # (num_sampled, k)
    log_probs: NDArray[np.float32]  # (num_sampled, k)
    of: str  # teacher and settings, see `Teacher.of`


Ended = Literal["over", "max_turns", "max_new_tokens", "failed"]  # what ended the turns; over: the environment


@dataclass(frozen=True)
class Turns:
    """Turns of a sample that an environment answered, as they are recorded."""

    spans: tuple[tuple[int, int], ...]  # [begin, end) of each in the sample's ids; between them is the environment's
    ended: Ended
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
    metadata = {"identity": identity, "record": lines.stem, "lines": hashlib.sha256(content).hexdigest()}
    if predicted := [sample.teacher for sample in samples if sample.teacher is not None]:
        flat["teacher_ids"] = np.concatenate([one.ids for one in predicted])
        flat["teacher_log_probs"] = np.concatenate([one.log_probs for one in predicted])
        metadata["teacher"] = predicted[0].of
    metadata["tensors"] = _tensors_digest(flat, metadata)
    _write_through(lines, content)
    _write_through(lines.with_suffix(".safetensors"), save(flat, metadata))


def _tensors_digest(flat: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> str:
    """Returns the digest of tensors and of all metadata but itself."""
    digest = hashlib.sha256(json.dumps({key: metadata[key] for key in sorted(metadata) if key != "tensors"}).encode())
    for name, array in sorted(flat.items()):
        digest.update(json.dumps([name, array.dtype.str, array.shape]).encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def read_record(
    folder: Path, step: int, kind: str = STEP, vocabulary: int | None = None
) -> tuple[list[Sample], str] | None:
    """Returns the samples of a step and the identity of their run; None if there is no record, or only its lines.

    vocabulary: number of ids that the model has. Raises DamagedRecord.
    """
    lines = record_file(folder, step, kind)
    try:
        content = lines.read_bytes()
        with safe_open(lines.with_suffix(".safetensors"), "np") as file:
            metadata, flat = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError) as error:
        problem = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise DamagedRecord(f"{lines.with_suffix('')}.*: cannot be read: {problem}") from None
    damage = _Damage(lines)
    damage.check_digests(content, flat, metadata)
    try:
        parsed = [json.loads(line) for line in content.decode().split("\n") if line]  # a text may have U+2028
    except (ValueError, RecursionError):
        damage.tell("a line of it is not JSON")
    for number, line in enumerate(parsed, 1):
        damage.check_line(number, line, vocabulary)
    spans = [line["turns"]["spans"] if "turns" in line else [(0, len(line["ids"]))] for line in parsed]
    lengths = [sum(end - begin for begin, end in of_sample) for of_sample in spans]
    damage.check_tensors(flat, len(parsed), sum(lengths), vocabulary)
    return _samples(parsed, flat, metadata, np.cumsum(lengths)[:-1]), metadata["identity"]


def _samples(
    parsed: Sequence[dict[str, Any]],
    flat: Mapping[str, NDArray[Any]],
    metadata: Mapping[str, str],
    ends: NDArray[np.int64],
) -> list[Sample]:
    """Returns the samples of a record that is sound. ends: of each one's sampled tokens, but for the last."""
    prompts = [flat["prompt_ids"][a:b].tolist() for a, b in pairwise([0, *flat["prompt_ends"].tolist()])]
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
    return samples


class _Damage:
    """Checks of one record. Each raises DamagedRecord."""

    def __init__(self, lines: Path):
        self._lines = lines

    def tell(self, problem: str) -> NoReturn:
        raise DamagedRecord(f"{self._lines} is damaged: {problem}")

    def check_digests(self, content: bytes, flat: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> None:
        if metadata.keys() in ({"identity", "lines"}, {"identity", "lines", "teacher"}):
            raise DamagedRecord(f"{self._lines} has no checksum of its tensors, as an older version wrote it")
        if metadata.get("tensors") != _tensors_digest(flat, metadata) or "identity" not in metadata:
            self.tell("the checksum of its .safetensors differs")
        if metadata.get("record") != self._lines.stem:
            self.tell(f"its .safetensors is that of {metadata.get('record')}")
        if metadata.get("lines") != hashlib.sha256(content).hexdigest():
            self.tell("the checksum of its lines differs")

    def check_line(self, number: int, line: Any, vocabulary: int | None) -> None:
        """Compares the entry of a sample with what `write_record` writes."""
        if not isinstance(line, dict) or not _LINE.keys() <= line.keys() <= {*_LINE, "turns"}:
            self.tell(f"line {number} lacks a key, or has an unknown one")
        for key, is_valid in _LINE.items():
            if not is_valid(line[key]):
                self.tell(f"line {number}: `{key}` is not what a record has there")
        if vocabulary is not None and max(line["ids"]) >= vocabulary:
            self.tell(f"line {number}: id {max(line['ids'])} is beyond the model's {vocabulary} ids")
        if "turns" in line and not _are_turns(line["turns"], len(line["ids"])):
            self.tell(f"line {number}: `turns` are not turns of its ids")

    def check_tensors(
        self, flat: Mapping[str, NDArray[Any]], num_samples: int, num_sampled: int, vocabulary: int | None
    ) -> None:
        """Compares names, types, sizes and values with those of the lines."""
        if not flat.keys() >= _REQUIRED or not flat.keys() <= _DTYPES.keys():
            self.tell(f"its tensors are {', '.join(sorted(flat))}")
        if ("teacher_ids" in flat) != ("teacher_log_probs" in flat):
            self.tell("a teacher's ids and log-probabilities come together")
        for name, array in flat.items():
            is_teacher = name.startswith("teacher_")
            if array.dtype != _DTYPES[name] or array.ndim != (2 if is_teacher else 1):
                self.tell(f"`{name}` is {array.dtype} of {array.ndim} dimensions")
            if name not in ("prompt_ids", "prompt_ends") and len(array) != num_sampled:
                self.tell(f"`{name}` has {len(array)} values for {num_sampled} sampled tokens")
            if name.endswith("log_probs") and not (array <= ROUNDING).all():  # no NaN is
                self.tell(f"`{name}` has a value that is no log-probability")
            if name.endswith("log_probs") and not is_teacher and not np.isfinite(array).all():
                self.tell(f"`{name}` has a value that is not finite")
            if name.endswith("_ids") and array.size and (array.min() < 0 or array.max() >= (vocabulary or math.inf)):
                self.tell(f"`{name}` has an id that the model does not have")
        ends = flat["prompt_ends"]
        if len(ends) != num_samples or (np.diff(ends, prepend=0) < 1).any() or ends[-1:] != len(flat["prompt_ids"]):
            self.tell("`prompt_ends` are not the ends of its prompts")


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _are_turns(turns: Any, num_ids: int) -> bool:
    """Returns whether recorded turns lie one after the other in so many ids."""
    if not isinstance(turns, dict) or turns.keys() != Turns.__dataclass_fields__.keys():
        return False
    spans, place = turns["spans"], 0
    for span in spans if isinstance(spans, list) and spans else [None]:
        if not isinstance(span, list) or len(span) != 2 or not all(map(_is_count, span)):
            return False
        if not place <= span[0] < span[1] <= num_ids:
            return False
        place = span[1]
    counts = all(_is_count(turns[name]) for name in ("calls", "malformed_calls"))
    return counts and turns["ended"] in get_args(Ended) and isinstance(turns["failure"], str | None)


# Checks of the values of a line, by key.
_LINE: dict[str, Callable[[Any], bool]] = {
    "row": lambda value: isinstance(value, str) and re.fullmatch(r"(?s).*:[0-9]+", value) is not None,
    "sample": _is_count,
    "ids": lambda value: isinstance(value, list) and bool(value) and all(map(_is_count, value)),
    "text": lambda value: isinstance(value, str),
    "reward": _is_number,
    "rewards": lambda value: isinstance(value, dict) and all(v is None or _is_number(v) for v in value.values()),
    "failures": lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
    "truncated": lambda value: isinstance(value, bool),
    "source": _is_count,
}


def check_records(folder: Path, steps: int, reuse: int, rows: int, vocabulary: int) -> None:
    """Reads the records of the steps 1 to `steps`, one for each `reuse` steps. Raises UserError unless all can be
    trained on."""
    for step in range(1, steps + 1, reuse):
        if not record_file(folder, step).is_file():
            raise UserError(
                f"rollouts.replay: {record_file(folder, step)}: no such file. train.max_steps needs {steps} steps of "
                "rollouts. Fix: restore it, or lower train.max_steps"
            )
    for step in range(1, steps + 1, reuse):
        replayed(folder, step, rows, vocabulary)


def replayed(folder: Path, step: int, rows: int, vocabulary: int) -> list[Sample]:
    """Returns the samples of a record to train on again. Raises UserError if it is damaged or of another size."""
    try:
        found = read_record(folder, step, vocabulary=vocabulary)
    except DamagedRecord as damage:
        raise UserError(f"rollouts.replay: {damage}. Fix: restore it, or record the step again") from None
    path = record_file(folder, step)
    if found is None:
        raise UserError(f"rollouts.replay: {path}: its .safetensors is missing. Fix: restore it, or record it again")
    if len(found[0]) != rows:
        raise UserError(
            f"rollouts.replay: {path} has {len(found[0])} samples, and a step of this recipe {rows}. Fix: set "
            "rollouts.prompts and rollouts.samples as in the run that recorded it"
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
