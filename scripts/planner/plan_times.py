"""Predicted time of steps against what CPU processes take; about forty minutes on two cores.

    python scripts/planner/plan_times.py --out benchmarks/results/plan_times.json
    python scripts/planner/plan_times.py --only fsdp2 lora --folder measured
    python scripts/planner/plan_times.py --others          # bf16 and QLoRA, which nothing was fitted to

A step's time is the processor time of its process, all threads, user and system: what other programs do on the machine
moves it little, and ranks that wait for each other do not count as busy. Of several ranks the busiest one counts, so a
pipeline's bubble, which is waiting, is left out of both numbers. Every launch runs its cells in turn, several rounds;
the median of all steps but the first of each round counts.

One cell of each precision corrects the speeds of the table, as a finished run does in `plan`, and they predict all
others. The shares of the host's work in engines (`speed.py`) were fitted to some of the cells, after a measurement of
single operators; those that are named blind were drawn before and run after that.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import plan_errors
from cell_launch import launch_cells

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "plan_times.json"
STEPS, ROUNDS = 4, 2  # the first step of a round is not counted
_COMMON = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024}
MODELS: dict[str, dict[str, Any]] = {
    "small": {**_COMMON, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 1536},
    "wide": {**_COMMON, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 2048},
    "deep": {**_COMMON, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 10, "vocab_size": 1024},
}
MODES: dict[str, list[str]] = {"full": [], "lora": ["mode=lora", "lora.rank=16"]}
QLORA = {"qlora": ["mode=qlora", "lora.rank=16", "quantization.type=nf4"]}
CONFIGS = {"single": 1, "ddp": 2, "fsdp2": 2, "zero2": 2, "zero3": 2, "pp": 2, "tp": 2}
LENGTHS = (64, 128, 320)  # of a row, which is one document
ROWS = 4  # of a step


@dataclass(frozen=True)
class Cell:
    model: str
    config: str
    mode: str
    recomputes: bool
    length: int
    precision: str = "fp32"

    @property
    def processes(self) -> int:
        return CONFIGS[self.config]

    @property
    def name(self) -> str:
        precision = "" if self.precision == "fp32" else f"_{self.precision}"
        again = "_recomputed" if self.recomputes else ""
        return f"{self.config}_{self.model}_{self.mode}_{self.length}{again}{precision}"

    @property
    def overrides(self) -> list[str]:
        checkpointing = f"train.activation_checkpointing={str(self.recomputes).lower()}"
        of_mode = {**MODES, **QLORA}[self.mode]
        return [*of_mode, checkpointing, f"data.max_length={self.length}", f"train.precision={self.precision}"]


REFERENCE = Cell("small", "single", "full", False, 128)


def _chosen(seed: int, each: int, modes: Iterable[str] = MODES, precision: str = "fp32") -> list[Cell]:
    """Returns as many cells of each config, drawn from all."""
    draw, found = random.Random(seed), []
    for config in CONFIGS:
        kinds = product(MODELS, modes, (False, True), LENGTHS)
        legal = [Cell(kind[0], config, *kind[1:], precision) for kind in kinds if (config, kind[1]) != ("tp", "qlora")]
        found += draw.sample(legal, min(each, len(legal)))
    return found


FITTED = list(dict.fromkeys([REFERENCE, *_chosen(21, 6)]))  # constants of the host's work in `speed.py` are from these
BLIND = [cell for cell in dict.fromkeys(_chosen(22, 6)) if cell not in FITTED]  # drawn before, run after
CELLS = [*FITTED, *BLIND]
OTHERS = [*_chosen(23, 3, [*MODES, *QLORA], "bf16"), *_chosen(24, 2, QLORA)]


# --- in a launch


def measure_case(
    recipe_file: str, out: Path, name: str, overrides: list[str], config_file: str | None
) -> dict[str, Any]:
    """Returns the processor seconds of steps in this process group, of this rank."""
    from trainers import prepared_run, ready_trainer, started_engine

    from finetune.features import all_features

    prepared = prepared_run(
        recipe_file, [*overrides, f"run.name={name}", f"run.dir={out / 'runs'}"], config_file, all_features()
    )
    engine = started_engine(prepared)
    trainer = ready_trainer(prepared, engine)
    seconds: list[float] = []
    for number in range(STEPS):
        began = time.process_time()
        trainer.train_step(trainer.loader.step(number))
        seconds.append(time.process_time() - began)
    engine.close()
    return {"seconds": seconds}


# --- outside


def recipe_file(folder: Path, model: str) -> Path:
    import parity
    import tiny
    import yaml

    home = folder / model
    home.mkdir(exist_ok=True)
    tiny.save_model(home, "llama", **MODELS[model])
    rows = [
        {"messages": [{"role": "user", "content": "stone"}, {"role": "assistant", "content": "light paper " * 400}]}
    ] * 64
    tiny.write_rows(home / "rows.jsonl", rows)
    values = parity.base_recipe(home)
    values["model"]["name"] = str(home / "llama")
    del values["data"]["eval"], values["evaluate"]
    values["data"] |= {"overlong": "truncate"}
    values["batch"] = {"rows": ROWS, "rows_per_device": 1}
    values["train"] |= {"precision": "fp32", "max_steps": STEPS}
    values["schedule"] = {"warmup_steps": 0}
    (home / "recipe.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return home / "recipe.yaml"


def run_round(folder: Path, cells: list[Cell], number: int) -> None:
    """Runs cells of one model and config in one launch, each rank writing its file."""
    first = cells[0]
    config = None if first.config == "single" else ROOT / "accelerate_configs" / f"{first.config}.yaml"
    overrides = {f"{cell.name}-round-{number}": cell.overrides for cell in cells}
    recipe = folder / first.model / "recipe.yaml"
    launch_cells(Path(__file__), folder, recipe, config, first.processes, overrides)


def run_all(folder: Path, cells: list[Cell]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for model in dict.fromkeys(cell.model for cell in cells):
        if not (folder / model / "recipe.yaml").exists():
            recipe_file(folder, model)
    for number in range(ROUNDS):
        launches = defaultdict[Any, list[Cell]](list)
        for cell in cells:
            if not (folder / f"{cell.name}-round-{number}-0.json").exists():
                launches[cell.model, cell.config].append(cell)
        for of_launch in launches.values():
            run_round(folder, of_launch, number)


def measured(folder: Path, cell: Cell) -> float | None:
    """Returns the seconds of the busiest rank; None if it did not run."""
    ranks: list[float] = []
    for rank in range(cell.processes):
        files = [folder / f"{cell.name}-round-{number}-{rank}.json" for number in range(ROUNDS)]
        rounds = [json.loads(file.read_text(encoding="utf-8"))["seconds"][1:] for file in files if file.exists()]
        if not rounds:
            return None
        ranks.append(statistics.median([step for steps in rounds for step in steps]))
    return max(ranks)


def speeds_by(folder: Path, reference: Cell) -> Any:
    """Returns the speeds of the table, corrected by one cell that was measured."""
    from finetune.engine.hardware import shipped_hardware
    from finetune.plan.speed import Level, processor_speeds

    speeds, took = processor_speeds(shipped_hardware()), measured(folder, reference)
    if took is None:
        raise SystemExit(f"{reference.name} was not measured: all predictions rest on it")
    times = predicted(folder, reference, speeds).busy / took
    return replace(speeds, level=Level(1, times, times), source=f"{reference.name} over {speeds.source}")


def loaded(folder: Path, cell: Cell) -> tuple[Any, Any]:
    from finetune.features import load_recipe
    from finetune.models.base_model import Base

    if not (path := folder / cell.model / "recipe.yaml").exists():
        folder.mkdir(parents=True, exist_ok=True)
        path = recipe_file(folder, cell.model)
    recipe = load_recipe(path, cell.overrides)
    return recipe, Base.of(recipe).config


def predicted(folder: Path, cell: Cell, speeds: Any) -> Any:
    """Returns the time of a step by formula, with its parts."""
    from finetune.engine.compatibility import check_launch
    from finetune.engine.hardware import shipped_hardware
    from finetune.engine.launch import read_config_file
    from finetune.plan.lengths import widest
    from finetune.plan.search import heaviest
    from finetune.plan.shapes import shapes_of
    from finetune.plan.speed import Job, Shape
    from finetune.plan.tables import parse_machines

    recipe, config = loaded(folder, cell)
    launch = read_config_file(str(ROOT / "accelerate_configs" / f"{cell.config}.yaml"), cell.processes)
    micro_batches = check_launch(recipe, "recipe.yaml", launch, config)
    hardware, rows = shipped_hardware(), widest(recipe, "all rows are alike", config)
    shape = Shape.of(shapes_of(recipe, config).weights, recipe, config, True, cell.recomputes)
    machines = parse_machines(f"{cell.processes}xcpu", 1, hardware)
    place = (launch, machines, hardware, rows, heaviest(recipe.batch, rows))
    return Job(recipe, config, shape, *place, speeds, micro_batches).time()


def errors(compared: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns median and worst error, and the share of pairs more than 20 % apart whose order is right."""
    times = {name: {"predicted": one["predicted_s"], "measured": one["measured_s"]} for name, one in compared.items()}
    return plan_errors.errors(times, apart=1.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="words that all are in the name of a cell")
    parser.add_argument("--others", action="store_true", help="cells in bf16 and of QLoRA instead")
    parser.add_argument("--folder", type=Path, help="keeps what was measured; what is there already is not run again")
    parser.add_argument("--no-runs", action="store_true", help="compare only what was measured in --folder")
    parser.add_argument("--out", type=Path, help=f"JSON, such as {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        from worker import main as run_plan

        run_plan(json.loads(arguments.measure.read_text(encoding="utf-8")), measure_case)
        return
    cells = [
        cell for cell in (OTHERS if arguments.others else CELLS) if all(word in cell.name for word in arguments.only)
    ]
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        references = {cell.precision: replace(REFERENCE, precision=cell.precision) for cell in cells}
        if not arguments.no_runs:
            run_all(folder, list(dict.fromkeys([*references.values(), *cells])))
        speeds = {precision: speeds_by(folder, reference) for precision, reference in references.items()}
        compared: dict[str, dict[str, Any]] = {}
        for cell in cells:
            if (took := measured(folder, cell)) is not None:
                time_of = predicted(folder, cell, speeds[cell.precision])
                compared[cell.name] = {
                    "measured_s": took,
                    "predicted_s": time_of.busy,
                    "parts_s": {
                        name: seconds for name, seconds in time_of.parts.items() if name not in ("bubble", "data")
                    },
                    "group": "fitted" if cell in FITTED else "blind" if cell in BLIND else "others",
                }
    report(compared, speeds, arguments.out)


def report(compared: dict[str, dict[str, Any]], speeds: dict[str, Any], out: Path | None) -> None:
    for name, one in compared.items():
        error = one["predicted_s"] / one["measured_s"] - 1
        print(f"{error:+7.1%}  {one['measured_s'] * 1e3:8.1f} ms  {one['group']:6}  {name}")
    groups = {
        group: errors(chosen)
        for group in ("fitted", "blind", "others")
        if (chosen := {name: one for name, one in compared.items() if one["group"] == group and name != REFERENCE.name})
    }
    of_config = {
        config: errors(chosen)
        for config in CONFIGS
        if (chosen := {name: one for name, one in compared.items() if name.startswith(f"{config}_")})
    }
    for name, one in {**groups, **of_config}.items():
        print(name, json.dumps(one))
    if out:
        content = {
            "of": __doc__,
            "speeds": {name: asdict(one) for name, one in speeds.items()},
            **groups,
            "configs": of_config,
            "cells": compared,
        }
        out.write_text(json.dumps(content, indent=1, default=lambda one: one.model_dump()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.path[1:1] = [str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "tests" / "trainer" / "distributed")]
    main()
