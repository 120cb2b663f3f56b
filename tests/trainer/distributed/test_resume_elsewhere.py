"""Saved under one backend, resumed under another and at another size: cells of scripts/proofs/resume_matrix.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import parity
import pytest
import resume_matrix
import torch
from resume_matrix import Pair, Place
from safetensors.torch import load_file

SINGLE: Place = ("single", 1)
SAVED: list[Place] = [SINGLE, ("tp", 2)]
RESUMED: list[Place] = [("zero3", 2)]  # for time; the script goes on everywhere
BY_SCRIPT = {
    case.name
    for case in (
        *resume_matrix.OF_STAGES,
        *resume_matrix.OF_IMAGES,
        *resume_matrix.OF_OBJECTIVES,
        *resume_matrix.OF_TOKENS,
        *resume_matrix.OF_MUON,
    )
} - {"full kto"}
BY_SCRIPT |= {
    "lora fp16",
    "full bf16",
    "full fp16",
    "lora dpo adapters off",
    "full qwen3_5",
    "full text part",
    "lora text part",
}
EXPERTS = [Pair(("ep", 4), SINGLE, case) for case in resume_matrix.cases(("ep", 4))]
STOP, STEPS, ROWS = 3, 9, 80  # the matrix: 10, 30, 300; epochs end after the stop in both
ALONE_ONLY = {
    "full",
    "lora dropout rslora",
    "full dpo",
    "full fp16",
}  # saved on one process; on tensor shards by the script


@pytest.fixture(scope="module", autouse=True)
def few_steps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resume_matrix, "STOP", STOP)
        patch.setattr(resume_matrix, "STEPS", STEPS)
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FINETUNE_CACHE", str(folder / "cache"))
        parity.prepare(folder, ROWS)
        pairs = [*EXPERTS, *(pair for place in RESUMED for pair in pairs_on(place))]
        for place in SAVED:  # one process runs every case through: all are compared with it
            names = {pair.case.name for pair in pairs if place in (pair.saved, SINGLE)}
            resume_matrix.save(folder, place, sorted(names))
    return folder


def pairs_on(place: Place) -> list[Pair]:
    """Pairs that the default suite resumes there."""
    every = [Pair(source, place, case) for source in SAVED for case in resume_matrix.cases(source, place)]
    pairs = [pair for pair in every if pair.case.name not in BY_SCRIPT]
    return [pair for pair in pairs if pair.saved == SINGLE or pair.case.name not in ALONE_ONLY]


@pytest.mark.parametrize("place", RESUMED, ids=[f"{config} x{size}" for config, size in RESUMED])
def test_resumes_as_if_never_stopped(saved: Path, monkeypatch: pytest.MonkeyPatch, place: Place) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(saved / "cache"))
    pairs = pairs_on(place)
    resume_matrix.resume(saved, pairs)
    cells = [resume_matrix.compare(saved, pair) for pair in pairs]
    assert {"full", "full dpo", "full kto"} <= {pair.case.name for pair in pairs}
    assert [cell for cell in cells if not cell["passed"]] == []
    assert all(cell["same_rows"] for cell in cells)
    lines = parity.train_lines(saved / "runs" / pairs[0].name)
    assert int(lines[STOP]["epoch"]) < int(lines[-1]["epoch"])


@pytest.mark.long
def test_experts_divided_over_ranks_resume_undivided(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(saved / "cache"))
    resume_matrix.save(saved, EXPERTS[0].saved)
    resume_matrix.resume(saved, EXPERTS)
    cells = [resume_matrix.compare(saved, pair) for pair in EXPERTS]
    assert [cell["case"] for cell in cells] == ["lora mixtral experts", "full mixtral balance"]
    assert [cell for cell in cells if not cell["passed"]] == []


def test_state_in_8_bits_is_stored_as_such(saved: Path) -> None:
    (case,) = (case for case in resume_matrix.ON_FEW if "8bit" in case.name)
    for place in SAVED:
        files = (saved / "runs" / resume_matrix.run_name(place, case)).rglob("rank-*.safetensors")
        types = {key.split("|")[0]: tensor.dtype for file in files for key, tensor in load_file(file).items()}
        assert torch.uint8 in types.values(), place
        assert "state1:scales" in types, place
