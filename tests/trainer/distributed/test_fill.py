"""FSDP2 starts every architecture from the one rank that has read it, with buffers that are in no checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import forks
import pytest

WORKER = Path(__file__).with_name("fill_worker.py")
TYPES = ("gemma3_text", "gpt_neo", "deepseek_v3", "nemotron_h", "minimax_m2")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("fill")
    done = forks.torchrun(2, WORKER, out, *TYPES)
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads((out / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


@pytest.mark.parametrize("name", TYPES)
def test_a_filled_model_computes_what_the_unsharded_one_does(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        assert rank[name] == {"difference": pytest.approx(0, abs=1e-6), "saved": True}


def test_ranks_with_another_model_are_refused_before_anything_is_sent(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["other model"].startswith(
            "FSDP2: rank 1 created another model from the config than was loaded. It has `"
        )
        assert (
            "mlp.gate_proj.weight` [136, 64], not `model.layers.0.mlp.gate_proj.weight` [128, 64]"
            in rank["other model"]
        )
