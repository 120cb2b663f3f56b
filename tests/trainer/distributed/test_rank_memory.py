"""Memory of frozen weights on each rank of a launch, and the rows that `auto` finds there."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import parity
import pytest
import tiny
import yaml
from forks import accelerate_launch
from test_modes import CONFIGS, became, lines_of

WORKER = Path(__file__).with_name("rank_memory_worker.py")
LAUNCHES = [("single", 1), pytest.param("fsdp2", 2, marks=pytest.mark.long), ("zero3", 2)]
SHARDS_FROZEN = ("fsdp2", "zero3")
WAIT_S = 777
# Matrices above the 1e5 elements that ZeRO-3 leaves whole on every rank.
WIDE = {"hidden_size": 320, "intermediate_size": 640}
ONE_STEP = ("train.max_steps=1", "batch={rows: 2, rows_per_device: 1}")  # bf16 takes seconds a step on some CPUs
CASES: list[dict[str, Any]] = [
    {
        "name": "frozen",
        "model": "llama",
        "overrides": [*parity.LORA, "model.dtype=bfloat16", "train.precision=bf16", *ONE_STEP],
    },
    {"name": "auto", "overrides": ["batch={rows: 16, rows_per_device: auto}"], "fits": 2},
    {"name": "said", "overrides": ["batch={rows: 16, rows_per_device: 2}"]},
]

Launched = Callable[[str, int], Path]


@pytest.fixture(scope="module")
def launched(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """Launch a config with its cases, once."""
    folder = tmp_path_factory.mktemp("held")
    wide = tiny.save_model(folder, "llama", **WIDE)
    recipe = parity.base_recipe(made)
    recipe["data"].pop("eval")
    recipe["train"]["max_steps"] = 3
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")

    @cache
    def start(config: str, processes: int) -> Path:
        out = folder / f"{config}-{processes}"
        out.mkdir()
        cases = [
            {
                "name": case["name"],
                "overrides": [*case["overrides"], *([f"model.name={wide}"] if "model" in case else [])],
                "fits": case.get("fits"),
            }
            for case in CASES
        ]
        plan = {"recipe": str(folder / "recipe.yaml"), "out": str(out), "cases": cases}
        (out / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FINETUNE_TIMEOUT_S", str(WAIT_S))
            done = accelerate_launch(CONFIGS / f"{config}.yaml", processes, WORKER, out / "plan.json")
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        return out

    return start


@pytest.mark.parametrize(("config", "processes"), LAUNCHES)
def test_frozen_weights_are_in_memory_once_in_their_type(launched: Launched, config: str, processes: int) -> None:
    """Under ZeRO-3 they would be made in fp32 where its config does not say otherwise (Zero.loading)."""
    whole = 2 * wide_parameters()
    share = whole // processes if config in SHARDS_FROZEN else whole
    for rank in became(launched(config, processes), "frozen"):
        assert list(rank["frozen"]) == ["torch.bfloat16"]
        norms = 2 * 5 * WIDE["hidden_size"]  # too small for ZeRO-3 to cut, or cut unevenly
        assert rank["frozen"]["torch.bfloat16"] == pytest.approx(share, abs=norms)
        # Besides them: adapters, their gradients and their state, 16 bytes a parameter, DeepSpeed's copies among them.
        assert rank["live"] - share < 32 * rank["trained"] + 2**18


@pytest.mark.parametrize(("config", "processes"), [("zero3", 2)])
def test_deepspeed_makes_room_for_the_gradients_that_there_are(launched: Launched, config: str, processes: int) -> None:
    """Its default is half a billion of them: 2 GB in fp32, for adapters too (Zero._fit_buckets)."""
    for rank in became(launched(config, processes), "frozen"):
        assert rank["bucket"] == rank["trained"]


def test_every_process_group_has_the_requested_timeout(launched: Launched) -> None:
    """DeepSpeed makes one for itself, with half an hour; FSDP2 on one mesh has the launch's own."""
    for rank in became(launched("zero3", 2), "frozen"):
        assert set(rank["waits"]) == {WAIT_S}


def wide_parameters() -> int:
    """Of the Llama without adapters."""
    shape = {**tiny.MODELS["llama"], **WIDE}
    hidden, mlp, words = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    keys = hidden * shape["num_key_value_heads"] // shape["num_attention_heads"]
    layer = 2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * mlp + 2 * hidden
    return shape["num_hidden_layers"] * layer + 2 * words * hidden + hidden


@pytest.mark.parametrize(("config", "processes"), LAUNCHES)
def test_measured_rows_are_as_good_as_given_rows(launched: Launched, config: str, processes: int) -> None:
    """Two rows fit: a step takes several forwards, and the trials leave nothing in its sums."""
    out = launched(config, processes)
    ranks, plan = became(out, "auto"), json.loads((out / "runs" / "auto" / "plan.json").read_text(encoding="utf-8"))
    assert [(rank["rows"], rank["micro_batches"]) for rank in ranks] == [(2, 8 // processes)] * processes
    assert plan["rows_per_device_reason"].endswith("measured")
    found, said = (
        [(line["loss"], line["grad_norm"]) for line in lines_of(out / "runs" / name)] for name in ("auto", "said")
    )
    assert len(found) == 3
    assert found == said  # to the last bit
