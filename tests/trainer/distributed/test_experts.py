"""Divided experts compute what the whole layer does: outputs, and gradients of inputs, routing, weights, adapters."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import expert_ranks
import pytest
from forks import start_forkserver


@pytest.mark.parametrize(
    ("size", "kind", "implementation", "choices", "adapted"),
    [
        (2, "mixtral", "grouped_mm", "uneven", ""),
        pytest.param(2, "mixtral", "eager", "uneven", "", marks=pytest.mark.long),
        (2, "qwen3_moe", "grouped_mm", "one rank", ""),
        (4, "qwen3_moe", "grouped_mm", "uneven", "grouped"),
        pytest.param(4, "mixtral", "eager", "one rank", "peft", marks=pytest.mark.long),
        pytest.param(2, "gpt_oss", "grouped_mm", "one rank", "grouped", marks=pytest.mark.long),
        pytest.param(2, "gpt_oss", "grouped_mm", "uneven", "", marks=pytest.mark.long),
    ],
)
def test_same_as_the_full_layer(
    tmp_path: Path, size: int, kind: str, implementation: str, choices: str, adapted: str
) -> None:
    start_forkserver()
    context = multiprocessing.get_context("forkserver")  # one import for all ranks, and no threads that are forked
    ranks = partial(
        expert_ranks.differences,
        size=size,
        store=tmp_path / "store",
        kind=kind,
        implementation=implementation,
        choices=choices,
        adapted=adapted,
    )
    with ProcessPoolExecutor(size, mp_context=context) as pool:
        found = list(pool.map(ranks, range(size)))
    for of_rank in found:
        names = {name.rpartition(".")[2] for name in of_rank}
        trained = {"weight"} if adapted else {"gate_up_proj", "down_proj"}  # of A and B
        assert names >= {"output", "hidden", "weights"} | trained
        assert any("lora_B" in name for name in of_rank) == bool(adapted)
        assert max(of_rank.values()) < (1e-13 if implementation == "eager" else 1e-6), of_rank
