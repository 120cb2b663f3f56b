"""The resume matrix, thinned so that it still covers (`resume_matrix.covering`):

- every config and size as the one that saves, as the one that resumes, and as both;
- every kind of config with every kind;
- every word of a case's name (its mode, model, objective, precision, ...) saved twice and resumed twice elsewhere.

That is one of thirty pairs, drawn each time. scripts/proofs/resume_matrix.py runs all of them (3,999), some hours on
two cores; with `--covering SEED` what a seed draws here.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import SystemRandom

import forks
import parity
import pytest
import resume_matrix
from resume_matrix import PLACES, Pair, Place

pytestmark = pytest.mark.timeout(4 * 3600)


@pytest.fixture(scope="module")
def drawn() -> list[Pair]:
    """Pairs by a seed that the output shows."""
    seed = SystemRandom().randrange(2**31)
    print(f"pairs of seed {seed}")
    return resume_matrix.covering(seed)


@pytest.fixture(scope="module")
def saved(drawn: list[Pair], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of scripts/proofs/resume_matrix.py with the checkpoints of these pairs."""
    folder = tmp_path_factory.mktemp("resume")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FINETUNE_CACHE", str(folder / "cache"))
        patch.setattr(parity, "start_ranks", forks.launch_in_matrices)
        resume_matrix.prepare(folder, drawn)
    return folder


@pytest.mark.parametrize("place", PLACES, ids=[f"on {config} x{size}" for config, size in PLACES])
def test_resumes_as_if_never_stopped(
    saved: Path, drawn: list[Pair], monkeypatch: pytest.MonkeyPatch, place: Place
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(saved / "cache"))
    monkeypatch.setattr(parity, "start_ranks", forks.launch_in_matrices)
    pairs = [pair for pair in drawn if pair.resumed == place]
    resume_matrix.resume(saved, pairs)
    cells = [resume_matrix.compare(saved, pair) for pair in pairs]
    assert len(cells) > 0
    assert [cell for cell in cells if not cell["passed"]] == []


def test_the_pairs_that_are_drawn_cover_the_matrix(drawn: list[Pair]) -> None:
    every = [Pair(saved, on, case) for saved in PLACES for on in PLACES for case in resume_matrix.cases(saved, on)]
    assert len({*drawn}) == len(drawn) < 0.05 * len(every)
    assert {*drawn} <= {*every}
    moved = [pair for pair in drawn if pair.saved != pair.resumed]
    assert {pair.saved for pair in drawn if pair.saved == pair.resumed} == {*PLACES}
    assert {pair.saved for pair in drawn} == {pair.resumed for pair in drawn} == {*PLACES}
    assert kinds(moved) == kinds([pair for pair in every if pair.saved != pair.resumed])
    words = Counter(word for pair in moved for word in pair.case.name.split())
    assert {*words} == {word for pair in every for word in pair.case.name.split()}
    assert min(words.values()) >= 2


def kinds(pairs: list[Pair]) -> set[tuple[str, str]]:
    return {(resume_matrix.kind_of(pair.saved), resume_matrix.kind_of(pair.resumed)) for pair in pairs}
