"""Bytes that `plan` says each rank keeps between steps, against what real processes keep: equal, or the cell is wrong.

    python scripts/planner/plan_state.py --json benchmarks/results/plan_state.json     # every config; minutes
    python scripts/planner/plan_state.py --only zero3 x4

Every accelerate config x full, LoRA, QLoRA, Muon x 1, 2, 4 CPU processes (three dimensions: 8), wherever `check` allows
it; the modes of a config and size share a launch. Each rank trains a step, and counts the storages of its weights with
buffers and scales, of its gradients before the optimizer, of the optimizer's state with master weights, and of the copy
of what it trains that `objective.kl` would keep. Memory of a device that offload moves to its host is on a CPU the same
memory, so what is counted there is the sum.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cell_launch import launch_cells

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted(path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml"))
SIZES = (1, 2, 4)
LIBAIO = Path("/usr/include/libaio.h")
TOKENS = 32  # of a row
INITIAL = "initial weights"  # that `objective.kl` keeps
# What 2 and 4 do not divide is padded: rows of embedding and head, elements of groups.
_SHAPE = {"hidden_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1031}
MODELS = {
    "llama": {**_SHAPE, "num_hidden_layers": 5, "intermediate_size": 200},
    "mixtral": {**_SHAPE, "num_hidden_layers": 2, "intermediate_size": 72},
}
MODES = {
    "full": [],
    "lora": ["mode=lora", "lora.rank=3"],
    "qlora": ["mode=qlora", "lora.rank=3", "quantization.type=nf4"],
    "muon": ["optimizer.name=muon"],
}
_WHOLE = {"tp": "tp_size", "cp": "cp_size", "ulysses": "sp_size", "pp": "pp_size", "ep": "ep_size"}  # all processes


class Cell(NamedTuple):
    config: str
    processes: int
    mode: str

    @property
    def name(self) -> str:
        return f"{self.config} x{self.processes} {self.mode}"

    @property
    def model(self) -> str:
        return "mixtral" if self.config == "ep" else "llama"

    @property
    def overrides(self) -> list[str]:
        """Experts that are divided take no adapters."""
        attention = self.config == "ep" and self.mode in ("lora", "qlora")
        return [*MODES[self.mode], *(["lora.targets=[q_proj,k_proj,v_proj,o_proj]"] if attention else [])]


def cells() -> Iterator[Cell]:
    for config in CONFIGS:
        for processes in SIZES[:1] if config == "single" else (*SIZES, 8) if config == "pp_fsdp2_tp" else SIZES:
            yield from (Cell(config, processes, mode) for mode in MODES)


# --- in a launch


def ready_trainer(recipe_file: str, out: Path, name: str, overrides: list[str], config_file: str | None) -> Any:
    """Returns the trainer of a case in this process group, before its first step."""
    from trainers import prepared_run, ready_trainer, started_engine

    from finetune.features import all_features

    named = [f"run.name={name.replace(' ', '-')}", f"run.dir={out / 'runs'}"]
    prepared = prepared_run(recipe_file, [*overrides, *named], config_file, all_features())
    return ready_trainer(prepared, started_engine(prepared))


def measure_case(
    recipe_file: str, out: Path, name: str, overrides: list[str], config_file: str | None
) -> dict[str, Any]:
    """Trains a step in this process group; returns the bytes that this rank keeps."""
    from finetune.engine.base import StorageCounter, measure_state_bytes
    from finetune.engine.kept_weights import KeptWeights

    trainer, state = ready_trainer(recipe_file, out, name, overrides, config_file), dict[str, int]()
    engine = trainer.engine

    def measure_gradients() -> None:
        state["gradients"] = StorageCounter(engine.device).add(engine.gradients())

    trainer.meters.measure_gradients = measure_gradients
    trainer.train_step(trainer.loader.step(0))
    state["weights"], state["optimizer state"] = measure_state_bytes(engine)
    state[INITIAL] = sum(weight.nbytes for weight in KeptWeights(engine).weights)
    engine.close()
    return state


# --- outside


def make_recipe(folder: Path, model: str) -> Path:
    import parity
    import tiny
    import yaml

    home = folder / model
    file = home / "recipe.yaml"
    if file.exists():
        return file
    home.mkdir(parents=True)
    tiny.save_model(home, model, **MODELS[model])
    row = {"messages": [{"role": "user", "content": "stone"}, {"role": "assistant", "content": "light paper " * 50}]}
    tiny.write_rows(home / "rows.jsonl", [row] * 8)
    values = parity.base_recipe(home)
    values["model"]["name"] = str(home / model)
    del values["data"]["eval"], values["evaluate"]
    values["data"] |= {"max_length": TOKENS, "overlong": "truncate"}
    values["batch"] = {"rows": 4, "rows_per_device": 1}
    values["train"] |= {"precision": "bf16", "max_steps": 1}
    values["schedule"] = {"warmup_steps": 0}
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    return file


def config_file(folder: Path, cell: Cell) -> Path:
    """Returns the shipped config, with the size of its dimension that takes all processes."""
    import yaml

    shipped = ROOT / "accelerate_configs" / f"{cell.config}.yaml"
    if cell.config not in _WHOLE:
        return shipped
    config = yaml.safe_load(shipped.read_text(encoding="utf-8"))
    config["parallelism_config"][f"parallelism_config_{_WHOLE[cell.config]}"] = cell.processes
    file = folder / f"x{cell.processes}" / shipped.name
    file.parent.mkdir(exist_ok=True)
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return file


def predicted(folder: Path, cell: Cell) -> list[dict[str, int]] | str:
    """Returns the bytes of each rank; or why such a run is refused."""
    from finetune.engine.compatibility import check_launch
    from finetune.engine.costs.common import GRADIENTS, OPTIMIZER, WEIGHTS
    from finetune.engine.launch import read_config_file
    from finetune.errors import UserError
    from finetune.features import load_recipe
    from finetune.models.base_model import Base
    from finetune.plan.shapes import costs_at

    file = make_recipe(folder, cell.model)
    recipe = load_recipe(file, cell.overrides)
    launch, config = read_config_file(str(config_file(folder, cell)), cell.processes), Base.of(recipe).config
    try:
        check_launch(recipe, str(file), launch, config)
    except UserError as refusal:
        return " ".join(str(refusal).split())
    costs = costs_at(recipe, config, launch, "cpu")
    states = [costs.state(rank) for rank in range(cell.processes)]
    kept = [{part: state.persistent[part] for part in (WEIGHTS, GRADIENTS, OPTIMIZER)} for state in states]
    return [{**of_rank, INITIAL: costs.initial_weights(rank)} for rank, of_rank in enumerate(kept)]


def measure(folder: Path, wanted: list[Cell]) -> dict[Cell, list[dict[str, int]]]:
    """Returns the bytes of each rank of cells of one config and size, which are one launch; none if it failed."""
    first = wanted[0]
    config = None if first.config == "single" else config_file(folder, first)
    overrides = {cell.name: cell.overrides for cell in wanted}
    launch_cells(Path(__file__), folder, make_recipe(folder, first.model), config, first.processes, overrides)
    found = {}
    for cell in wanted:
        files = [folder / f"{cell.name}-{rank}.json" for rank in range(cell.processes)]
        if all(file.exists() for file in files):
            found[cell] = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return found


def compare(folder: Path, wanted: list[Cell]) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Yields each cell with what is predicted and measured, by rank, and whether they are equal; or with why it did not
    run."""
    launches = defaultdict[Any, list[Cell]](list)
    expected = {}
    for cell in wanted:
        expected[cell] = predicted(folder, cell)
        if isinstance(expected[cell], str):
            yield cell, {"refused": expected[cell]}
        elif cell.config == "zero3_nvme" and not LIBAIO.exists():
            yield cell, {"not run": f"DeepSpeed's asynchronous I/O needs {LIBAIO}"}
        else:
            launches[cell.config, cell.processes].append(cell)
    for of_launch in launches.values():
        measured = measure(folder, of_launch)
        for cell in of_launch:
            there = measured.get(cell)
            yield cell, {"equal": there == expected[cell], "predicted": expected[cell], "measured": there}


def words(one: dict[str, Any]) -> str:
    for why in ("refused", "not run"):
        if why in one:
            return f"{why}: {one[why]}"
    if one["measured"] is None:
        return "DID NOT RUN"
    differing = [
        f"rank {rank} {part} {a[part]:,} is {b[part]:,}"
        for rank, (a, b) in enumerate(zip(one["predicted"], one["measured"], strict=True))
        for part in b
        if a[part] != b[part]
    ]
    return f"DIFFERS: {'; '.join(differing)}" if differing else "equal"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="words of names of cells, such as zero3, x4, lora")
    parser.add_argument("--json", type=Path, help="write what was found there")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        from worker import main as run_plan

        run_plan(json.loads(arguments.measure.read_text(encoding="utf-8")), measure_case)
        return 0
    wanted = [cell for cell in cells() if all(word in cell.name.split() for word in arguments.only)]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for cell, one in compare(Path(folder), wanted):
            found[cell.name] = one
            print(f"{cell.name:28} {words(one)}", flush=True)
    ran = [one for one in found.values() if "equal" in one]
    equal = sum(one["equal"] for one in ran)
    print(f"{equal} of {len(ran)} cells equal on every rank, {len(found) - len(ran)} refused or not run")
    if arguments.json:
        content = {"of": __doc__, "cells": found}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0 if all(one["equal"] for one in ran) else 1


if __name__ == "__main__":
    sys.path[1:1] = [str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "tests" / "trainer" / "distributed")]
    sys.exit(main())
