"""Records of rollouts: what is read is what was written, by the step that it is read for, or one line says what is
wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from finetune.errors import UserError
from finetune.rl.rewards.completion import Reward
from finetune.rl.rollouts.records import (
    EVALUATION,
    DamagedRecord,
    Predicted,
    Sample,
    Turns,
    check_records,
    read_record,
    record_file,
    write_record,
)

VOCABULARY = 100
Change = Callable[[list[Sample]], list[Sample]]


def sample(number: int) -> Sample:
    reward = Reward(0.5, {"regex": 1.0, "other": None}, ("other: raised",))
    log_probs, margins = np.array([-0.5, -1.5, -2.5]), np.array([0.1, np.nan, 0.3])
    place = ("a.jsonl", number + 1, 0, number)
    teacher = Predicted(np.full((3, 2), 7, np.int32), np.full((3, 2), -1.0, np.float32), "a teacher")
    one = Sample(*place, [1, 2, 3 + number], [4, 5, 6, 7], "text\u2028of it", False, log_probs, margins, reward)
    turns = Turns(((0, 1), (2, 4)), "over", 1)
    return replace(one, old=log_probs - 0.1, initial=log_probs - 0.2, teacher=teacher, turns=turns)


SAMPLES = [sample(0), sample(1), sample(2)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (1, 2):
        changed = [replace(one, text=f"{one.text} {step}") for one in SAMPLES]
        write_record(tmp_path / "rollouts", step, changed, "this run")
        write_record(tmp_path / "rollouts", step, changed, "this run", EVALUATION)
    return tmp_path / "rollouts"


def test_what_is_written_is_read(folder: Path) -> None:
    samples, identity = read_record(folder, 1, vocabulary=VOCABULARY) or ([], "")
    assert (identity, len(samples)) == ("this run", 3)
    for one, written in zip(samples, SAMPLES, strict=True):
        assert str(one).replace(" 1'", "'") == str(replace(written, text=f"{written.text} 1")).replace(" 1'", "'")
        assert np.array_equal(one.margins, written.margins, equal_nan=True)
    check_records(folder, 2, 1, 3, VOCABULARY)
    assert read_record(folder, 3) is None
    record_file(folder, 1).with_suffix(".safetensors").unlink()
    assert read_record(folder, 1) is None  # as a kill leaves it


def flipped(bit: int, suffix: str, start: float) -> Callable[[Path], None]:
    """A change of one bit, at a share of the file's bytes."""

    def change(folder: Path) -> None:
        file = record_file(folder, 1).with_suffix(suffix)
        content = bytearray(file.read_bytes())
        content[int(start * (len(content) - 1))] ^= 1 << bit
        file.write_bytes(content)

    return change


def cut(suffix: str, size: float) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = record_file(folder, 1).with_suffix(suffix)
        file.write_bytes(file.read_bytes()[: int(size * file.stat().st_size)])

    return change


def rewritten(change: Callable[[dict[str, Any], dict[str, str]], Any]) -> Callable[[Path], None]:
    """Other tensors or metadata, without a new checksum."""

    def write(folder: Path) -> None:
        file = record_file(folder, 1).with_suffix(".safetensors")
        with safe_open(file, "np") as opened:
            metadata, flat = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        change(flat, metadata)
        save_file(flat, file, metadata)

    return write


def swapped(*suffixes: str, kind: str = "step", other: int = 2) -> Callable[[Path], None]:
    """Files of another record under this one's names."""

    def change(folder: Path) -> None:
        for suffix in suffixes:
            shutil.copy(
                record_file(folder, other, kind).with_suffix(suffix), record_file(folder, 1).with_suffix(suffix)
            )

    return change


def edited(old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        lines = record_file(folder, 1)
        text = lines.read_text()
        assert old in text
        lines.write_text(text.replace(old, new, 1))

    return change


def set_value(name: str, place: Any, value: float) -> Callable[[Path], None]:
    return rewritten(lambda flat, _: flat[name].__setitem__(place, value))


def with_checksum(change: Change) -> Callable[[Path], None]:
    """A record of another program, whose checksums are right."""
    return lambda folder: write_record(folder, 1, change(list(SAMPLES)), "this run")


def first(**fields: Any) -> Callable[[Path], None]:
    return with_checksum(lambda samples: [replace(samples[0], **fields), *samples[1:]])


TENSORS, LINES = ".safetensors", ".jsonl"
REWARD = SAMPLES[0].reward
TURNS = SAMPLES[0].turns
assert TURNS is not None
TAMPERED: dict[str, Callable[[Path], None]] = {
    **{f"bit {bit} at {at}": flipped(bit, TENSORS, at) for bit, at in ((0, 0.0), (3, 0.2), (1, 0.5), (7, 0.9), (0, 1))},
    **{f"bit {bit} of the lines at {at}": flipped(bit, LINES, at) for bit, at in ((0, 0), (5, 0.3), (7, 0.6), (2, 1))},
    **{f"{size} of the tensors": cut(TENSORS, size) for size in (0, 0.01, 0.5, 0.99)},
    **{f"{size} of the lines": cut(LINES, size) for size in (0, 0.5, 0.99)},
    "a moved end": set_value("prompt_ends", 0, 2),
    "another id": set_value("prompt_ids", 0, 9),
    "a NaN": set_value("log_probs", 0, np.nan),
    "a positive log-probability": set_value("old_log_probs", 1, 3.0),
    "a margin": set_value("margins", 0, 9.0),
    "a teacher's id": set_value("teacher_ids", (0, 0), 8),
    "no log_probs": rewritten(lambda flat, _: flat.pop("log_probs")),
    "one more tensor": rewritten(lambda flat, _: flat.update(other=np.zeros(3))),
    "another type": rewritten(lambda flat, _: flat.update(log_probs=flat["log_probs"].astype(np.float32))),
    "another identity": rewritten(lambda _, metadata: metadata.update(identity="other")),
    "no identity": rewritten(lambda _, metadata: metadata.pop("identity")),
    "another teacher": rewritten(lambda _, metadata: metadata.update(teacher="other")),
    "no checksum": rewritten(lambda _, metadata: (metadata.pop("tensors"), metadata.pop("record"))),
    "no metadata": rewritten(lambda _, metadata: metadata.clear()),
    "tensors of step 2": swapped(TENSORS),
    "lines of step 2": swapped(LINES),
    "both of step 2": swapped(TENSORS, LINES),
    "both of an evaluation": swapped(TENSORS, LINES, kind=EVALUATION, other=1),
    "another reward": edited('"reward": 0.5', '"reward": 9.5'),
    "another sampled id": edited("[4, 5, 6, 7]", "[4, 5, 6, 8]"),
    "no truncated": edited('"truncated": false, ', ""),
    "checksums are right: NaN": first(log_probs=np.array([-0.5, np.nan, -1])),
    "checksums are right: -inf": first(log_probs=np.array([-0.5, -np.inf, -1])),
    "checksums are right: +3": first(initial=np.array([-0.5, 3.0, -1])),
    "checksums are right: a foreign prompt": first(prompt=[1, VOCABULARY, 3]),
    "checksums are right: a negative prompt": first(prompt=[1, -1, 3]),
    "checksums are right: no prompt": first(prompt=[]),
    "checksums are right: a foreign id": first(ids=[4, 5, 6, VOCABULARY]),
    "checksums are right: an id of 31 digits": first(ids=[4, 5, 6, 10**30]),
    "checksums are right: an id that is text": first(ids=[4, 5, 6, "7"]),
    "checksums are right: no ids": first(ids=[], turns=None),
    "checksums are right: too few values": first(log_probs=np.array([-0.5])),
    "checksums are right: a foreign id of a teacher": with_checksum(
        lambda samples: [replace(one, teacher=Predicted(np.full((3, 2), 200, np.int32), *one.teacher[1:]))  # type: ignore[index]
                         for one in samples]
    ),
    "checksums are right: reward NaN": first(reward=replace(REWARD, total=float("nan"))),
    "checksums are right: reward of 401 digits": first(reward=replace(REWARD, total=10**400)),
    "checksums are right: reward text": first(reward=replace(REWARD, by_name={"regex": "1"})),
    "checksums are right: turns beyond": first(turns=replace(TURNS, spans=((0, 1), (2, 9)))),
    "checksums are right: turns that overlap": first(turns=replace(TURNS, spans=((0, 2), (1, 2)))),
    "checksums are right: ended by magic": first(turns=replace(TURNS, ended="magic")),
    "checksums are right: a row without a number": first(row="x"),
    "checksums are right: a sample of true": first(sample=True),
}  # fmt: skip


@pytest.mark.parametrize("name", TAMPERED)
def test_a_tampered_record_is_told_in_one_line(name: str, folder: Path) -> None:
    TAMPERED[name](folder)
    with pytest.raises(
        DamagedRecord, match=r"step-00000001\.\S+ ?(is damaged: |has no checksum|cannot be read: )"
    ) as error:
        read_record(folder, 1, vocabulary=VOCABULARY)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"^rollouts\.replay: .*step-00000001.*Fix: "):
        check_records(folder, 1, 1, 3, VOCABULARY)
    assert read_record(folder, 2, vocabulary=VOCABULARY) is not None


def test_forty_ways_and_more() -> None:
    assert len(TAMPERED) >= 40


def test_every_single_bit_is_seen(folder: Path) -> None:
    """Of the smallest record: no bit of either file can change without a word."""
    small = [replace(SAMPLES[0], text="x")]
    write_record(folder, 1, small, "i")
    seen = json.dumps(str(read_record(folder, 1)))
    for suffix in (LINES, TENSORS):
        file = record_file(folder, 1).with_suffix(suffix)
        whole = file.read_bytes()
        for place in range(0, len(whole), 3):
            content = bytearray(whole)
            content[place] ^= 1 << (place % 8)
            file.write_bytes(content)
            with pytest.raises(DamagedRecord):
                read_record(folder, 1)
        file.write_bytes(whole)
    assert json.dumps(str(read_record(folder, 1))) == seen
