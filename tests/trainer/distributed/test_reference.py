"""The reference's log-probabilities, on every kind of place: the same numbers as one process computes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import parity
import pytest
import tiny
import yaml

LN_2 = float(np.float32(math.log(2)))
PLACES = [pytest.param(config, 2, marks=pytest.mark.long) for config in ("fsdp2", "ddp", "pp", "cp", "tp")]
ADAPTERS = (*parity.LORA, "objective.reference=adapters_off")
JOBS = {  # name: overrides
    "full": (),
    "lora": parity.LORA,
    "adapters": ADAPTERS,
    "head": (*ADAPTERS, "lora.targets=[lm_head, q_proj]", "optimizer.lr=1e-3"),
}
Train = Callable[[str, int], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    tiny.save_model(folder, "llama")
    tiny.write_rows(folder / "pairs.jsonl", tiny.preferences(70))
    tiny.write_rows(folder / "held_out.jsonl", tiny.preferences(13, seed=1))
    recipe = parity.base_recipe(folder)
    recipe["data"]["train"] = [{"path": str(folder / "pairs.jsonl"), "format": "preference"}]
    recipe["data"]["eval"] = [{"path": str(folder / "held_out.jsonl"), "format": "preference"}]
    recipe["data"]["max_length"] = 96
    recipe["objective"] = {"name": "dpo"}
    recipe["train"]["max_steps"], recipe["schedule"] = 3, {}
    recipe["evaluate"]["at_start"] = True
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Train:
    """Runs all of `JOBS` on a place, once, with a cache of its own: each place computes the log-probabilities."""
    done: dict[tuple[str, int], Path] = {}

    def run(config: str, processes: int) -> Path:
        runs = folder / f"{config}-{processes}"
        if (config, processes) not in done:
            jobs = [[*overrides, f"run.name={name}", f"run.dir={runs}"] for name, overrides in JOBS.items()]
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("FINETUNE_CACHE", str(folder / f"cache-{config}-{processes}"))
                parity.launch_jobs(folder, config, processes, jobs)
            done[config, processes] = runs
        return runs

    return run


def log_probs(run: Path, part: str) -> np.ndarray:
    return np.load(run / "reference" / part / "log_probs.npy", allow_pickle=False)


def losses(run: Path) -> list[float]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line["eval_loss"] if "eval_loss" in line else line["loss"] for line in map(json.loads, lines)]


@pytest.mark.parametrize(("config", "processes"), PLACES)
def test_same_everywhere(run: Train, config: str, processes: int) -> None:
    alone, here = run("single", 1), run(config, processes)
    for part, sequences in (("train", 140), ("eval", 26)):
        expected, values = log_probs(alone / "full", part), log_probs(here / "full", part)
        assert values.shape == (sequences,)
        assert np.all(values < -1)  # every one was computed
        np.testing.assert_allclose(values, expected, rtol=1e-6)
    for name in JOBS:
        np.testing.assert_allclose(losses(here / name), losses(alone / name), rtol=5e-6)


@pytest.mark.parametrize(("config", "processes"), [("single", 1), *PLACES])
def test_adapters_off_is_the_initial_model(run: Train, config: str, processes: int) -> None:
    runs = run(config, processes)
    np.testing.assert_allclose(losses(runs / "adapters"), losses(runs / "lora"), rtol=1e-6)


@pytest.mark.parametrize(("config", "processes"), [("single", 1), *PLACES])
def test_begins_at_ln_2(run: Train, config: str, processes: int) -> None:
    at_start, first = losses(run(config, processes) / "full")[:2]
    assert at_start == pytest.approx(math.log(2), abs=1e-6)
    assert first == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize(("config", "processes"), [("single", 1), *PLACES])
@pytest.mark.parametrize("name", ["adapters", "head"])
def test_begins_at_ln_2_to_the_bit_without_adapters(run: Train, config: str, processes: int, name: str) -> None:
    at_start, first, second = losses(run(config, processes) / name)[:3]
    assert (at_start, first) == (LN_2, LN_2)
    assert second != LN_2  # adapters are on again
