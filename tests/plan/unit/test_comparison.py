"""What is predicted of a run and what it measures are in its plan.json; finished runs correct later predictions."""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest
from conftest import train_here

from finetune.engine.launch import Launch
from finetune.errors import UserError
from finetune.features import load_recipe
from finetune.models.base_model import Base
from finetune.plan.command import PlanOptions, ask, machines_of
from finetune.plan.comparison import Launched, as_json, compare_run, compare_runs, table
from finetune.plan.finished_runs import speeds_here
from finetune.plan.lengths import widest
from finetune.plan.search import evaluate
from finetune.training.run_plan import FEW_STEPS, processor

ALONE = Launch("replicated", 1)
COMPUTE = ("products", "attention", "element-wise", "launches")


@pytest.fixture(scope="module")
def runs(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of just enough steps to be predicted in full, and beside it its recipe."""
    folder = tmp_path_factory.mktemp("predicted")
    values = {
        "run": {"name": "first", "dir": str(folder / "runs")},
        "model": {"name": str(made / "llama")},
        "mode": "full",
        "data": {"train": [{"path": str(made / "rows.jsonl"), "format": "messages"}], "max_length": 64},
        "batch": {"rows": 2, "rows_per_device": 1},
        "optimizer": {"lr": 1e-3},
        "train": {"max_steps": FEW_STEPS, "precision": "fp32"},
    }
    (folder / "recipe.yaml").write_text(json.dumps(values), encoding="utf-8")
    train_here(folder / "recipe.yaml")
    return folder / "runs"


def plan_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "plan.json").read_text(encoding="utf-8"))


def rewrite(run: Path, **changes: Any) -> Path:
    (run / "plan.json").write_text(json.dumps({**plan_of(run), **changes}), encoding="utf-8")
    return run


def test_a_run_has_what_was_predicted_and_what_it_measured(runs: Path) -> None:
    plan, lines = plan_of(runs / "first"), (runs / "first" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    predicted, measured = plan["predicted"], plan["measured"]
    state = {name: size for name, size in measured["memory_bytes"].items() if name != "peak"}
    assert predicted["memory_bytes"] == state
    assert predicted["notes"] == []
    steps = [json.loads(line) for line in lines][1:]
    assert measured["steps"] == len(steps) == FEW_STEPS - 1
    assert measured["step_s"] == statistics.median(line["step_s"] for line in steps)
    assert measured["parts_s"]["backward"] == statistics.median(line["time/backward"] for line in steps)
    assert predicted["step_s"] == pytest.approx(sum(predicted["parts_s"].values()))
    assert "not of this machine" in predicted["speeds"]


def test_the_report_compares_memory_and_times(runs: Path, tmp_path: Path) -> None:
    found = {one["what"]: one for one in json.loads(as_json(compare_run(runs / "first")))}
    assert {"weights", "optimizer state", "step", "speed", "compute", "optimizer"} <= set(found)
    step, compute = found["step"], found["compute"]
    assert step["error"] == pytest.approx(step["predicted"] / step["measured"] - 1)
    assert compute["error"] == pytest.approx((compute["predicted"] - compute["measured"]) / step["measured"])
    assert "of the step" in table(compare_runs([tmp_path, runs / "first"]))  # `runs/*` finds folders of data, too
    with pytest.raises(UserError, match="not the folder of a run"):
        compare_runs([tmp_path])


def test_a_run_of_an_older_version_is_predicted_from_its_files(runs: Path, tmp_path: Path) -> None:
    run = rewrite(Path(shutil.copytree(runs / "first", tmp_path / "old")), predicted=None, measured=None)
    old, now = ({one.what: one for one in compare_run(folder)} for folder in (run, runs / "first"))
    assert old["weights"].error == old["optimizer state"].error == 0
    assert old["step"].measured == now["step"].measured
    assert old["step"].predicted > 0


def test_finished_runs_on_this_device_correct_the_speeds(runs: Path, tmp_path: Path) -> None:
    first, folder = plan_of(runs / "first"), tmp_path / "runs"
    copied = [Path(shutil.copytree(runs / "first", folder / str(i))) for i in range(6)]
    for run, slower in zip(copied, (1, 2, 40), strict=False):  # the median: twice as slow
        parts = {name: slower * seconds for name, seconds in first["measured"]["parts_s"].items()}
        rewrite(run, measured={**first["measured"], "parts_s": parts})
    rewrite(copied[3], processor="another")
    rewrite(copied[4], precision="bf16")
    (copied[5] / "status.json").write_text('{"status": "stopped", "step": 9, "steps": 50}', encoding="utf-8")
    recipe, options = load_recipe(runs.parent / "recipe.yaml", [f"run.dir={folder}"]), PlanOptions(("1xcpu",))
    (machines,) = machines_of(options)
    request = ask(recipe, "recipe.yaml", options, [machines])
    step = evaluate(request, ALONE, machines, speeds_here(request.recipe, machines, request.hardware), {}).step
    assert step is not None
    assert step.source.startswith(f"3 finished runs in {folder}")
    took = first["measured"]["parts_s"]
    compute = sum(took[name] for name in ("forward", "backward", "other"))
    assert sum(step.parts[name] for name in COMPUTE) == pytest.approx(2 * compute, rel=1e-3)
    assert step.parts["optimizer"] == pytest.approx(2 * took["optimizer"], rel=1e-3)
    per_token = 2 * took["data"] / (first["measured"]["tokens_per_s"] * first["measured"]["step_s"])
    assert step.parts["data"] == pytest.approx(per_token * request.rows.tokens_per_row * recipe.batch.rows)
    empty = load_recipe(runs.parent / "recipe.yaml", [f"run.dir={tmp_path / 'none'}"])
    assert speeds_here(empty, machines, request.hardware) is None


def test_on_a_gpu_memory_and_time_are_predicted_or_a_note_says_why_not(
    recipe: dict[str, Any], write_recipe: Any
) -> None:
    loaded = load_recipe(write_recipe(recipe), ["train.precision=bf16"])
    config = Base.of(loaded).config
    run = Launched(loaded, config, ALONE, 2, widest(loaded, "a test", config), "NVIDIA H100 80GB HBM3", 1)
    found = run.predict(with_time=True)
    assert found["notes"] == []
    assert found["memory_bytes"]["peak"] == max(found["phases_bytes"].values())
    assert found["speeds"].startswith("shipped table")
    elsewhere = Launched(run.recipe, run.config, ALONE, 2, run.rows, "A card of tomorrow", 1).predict(with_time=True)
    assert elsewhere["memory_bytes"] == found["memory_bytes"]
    assert "no device A card of tomorrow" in elsewhere["notes"][0]
    dora = ["mode=qlora", "lora={rank: 4, alpha: 8, dora: true}", "quantization={type: nf4}"]
    unknown = Launched(load_recipe(write_recipe(recipe), dora), run.config, ALONE, 2, run.rows, run.device, 1)
    notes = unknown.predict(with_time=True)["notes"]
    assert [note.split(":")[0] for note in notes] == ["memory", "time"]
    assert "`lora.dora` on packed weights" in notes[0]


def test_the_processor_has_a_name() -> None:
    assert processor()
