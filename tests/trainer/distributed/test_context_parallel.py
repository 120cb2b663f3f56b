"""Rows whose tokens several ranks share: attention on real processes, and runs that go on with and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import context_worker
import parity
import pytest
import resume_matrix
from conftest import launch, train_alone
from forks import start_forkserver
from resume_matrix import Pair, Place
from torch import multiprocessing

ALONE: Place = ("single", 1)
SHARING: Place = ("cp", 2)
FULL = next(case for case in resume_matrix.EVERYWHERE if case.name == "full")
CONTEXT = [{"context": 2, "exchange": exchange} for exchange in ("allgather", "alltoall", "ring")]
DIVISIONS: dict[int, list[dict[str, Any]]] = {
    2: [*CONTEXT, {"sequence": 2}],
    4: [
        *({**sizes, "context": 4} for sizes in CONTEXT),
        {"sequence": 4},
        *({**sizes, "sequence": 2} for sizes in CONTEXT),
        {"replicate": 2, "context": 2, "exchange": "ring"},  # two groups, side by side
        {"context": 2, "tensor": 2},  # whose ranks are not neighbours
    ],
}


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.long)])
def test_attention_is_that_of_one_rank(tmp_path: Path, processes: int) -> None:
    """Values, gradients, isolation of documents and generation."""
    arguments = (processes, str(tmp_path / "meeting"), context_worker.everything, DIVISIONS[processes])
    start_forkserver()
    multiprocessing.start_processes(context_worker.run, arguments, processes, start_method="forkserver")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with a checkpoint on the way, on one process and on two that share every row."""
    folder = tmp_path_factory.mktemp("shared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FINETUNE_CACHE", str(folder / "cache"))
        resume_matrix.prepare(folder, [Pair(ALONE, SHARING, FULL), Pair(SHARING, ALONE, FULL)])
    return folder


@pytest.mark.long  # a part of the resume matrix
@pytest.mark.parametrize("pair", [(ALONE, SHARING), (SHARING, ALONE)], ids=["single to cp", "cp to single"])
def test_resumes_as_if_never_stopped(saved: Path, monkeypatch: pytest.MonkeyPatch, pair: tuple[Place, Place]) -> None:
    """Losses and weights are those of one process, so the run under context parallel that was saved is, too."""
    monkeypatch.setenv("FINETUNE_CACHE", str(saved / "cache"))
    cell = Pair(*pair, FULL)
    resume_matrix.resume(saved, [cell])
    found = resume_matrix.compare(saved, cell)
    assert found["passed"], found
    assert found["same_rows"]  # each once, though two ranks train on it


@pytest.mark.long
def test_what_is_counted_is_counted_once(recipe: dict[str, Any], write_recipe: Any, tmp_path: Path) -> None:
    """Tokens and FLOPs of a step; padding is what the cut into four chunks needs."""
    path = write_recipe(recipe)
    train_alone(path, "run.name=alone")
    done = launch("cp", 2, "train", path, "run.name=sharing")
    assert done.returncode == 0, done.stderr
    ours, theirs = (parity.train_lines(tmp_path / "runs" / name) for name in ("alone", "sharing"))
    assert len(ours) == 6
    padding = 0
    for one, two in zip(ours, theirs, strict=True):
        for name in ("tokens", "supervised_tokens", "epoch"):
            assert one[name] == two[name]
        flops = (line["tflops_per_device"] * line["step_s"] * ranks for line, ranks in ((one, 1), (two, 2)))
        assert next(flops) == pytest.approx(next(flops))
        assert 0 <= two["padding_tokens"] - padding <= 3 * recipe["batch"]["rows"] // 2
        padding = two["padding_tokens"]
    assert padding > 0
