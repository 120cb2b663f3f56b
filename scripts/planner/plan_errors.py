"""Predicted memory (`finetune/plan`) against what runs take; an hour on two cores.

    python scripts/planner/plan_errors.py --out benchmarks/results/plan_errors.json
    python scripts/planner/plan_errors.py --only zero3 --folder measured

processes   one real process, every storage weighed that an operation gives, as on devices. Weights are copied before
            they are wrapped, for on a CPU they are mapped files, which no operation has given. State is what the
            engine's own counter finds after the step, to the byte. Not by torch's profiler, which sees nothing that
            another thread allocates or frees, and counts gloo's copies, which NCCL does not make.
several     real launches of several processes, weighed likewise.
devices     the run's own set-up and two steps as one rank of N on fake CUDA devices, every storage weighed. For configs
            of several processes.

What every config keeps, to the byte: scripts/planner/plan_state.py.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

from cell_launch import launch_cells

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "plan_errors.json"
PHASES = ("forward", "backward", "optimizer")
LEVELS = ("processes", "several", "devices")
STEPS = 2  # the second begins with an optimizer that has its state
TOKENS = 192  # of a row, which is one document
_COMMON = {
    "intermediate_size": 512,
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "vocab_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**_COMMON}),
    "tied": ("llama_tied", {**_COMMON, "vocab_size": 3072}),
    "odd": ("llama", {**_COMMON, "vocab_size": 1031, "intermediate_size": 501, "num_hidden_layers": 5}),
    "qwen3": ("qwen3", {**_COMMON, "head_dim": 24}),
    "mistral": ("mistral", {**_COMMON, "sliding_window": 4096}),
    "mixtral": ("mixtral", {**_COMMON, "intermediate_size": 256, "num_local_experts": 8}),
    "mistral3": ("mistral3", {**_COMMON, "head_dim": 24}),  # of its language model; rows have a picture
}
MODES: dict[str, list[str]] = {
    "full": [],
    "lora": ["mode=lora", "lora.rank=16"],
    "qlora": ["mode=qlora", "lora.rank=16", "quantization.type=nf4"],
}


@dataclass(frozen=True)
class Cell:
    model: str
    config: str
    processes: int
    mode: str
    overrides: tuple[str, ...] = ()
    level: str = "processes"  # real ones: one, or several; devices: fake ones, one rank
    rank: int = 0

    @property
    def name(self) -> str:
        said = "_".join(re.sub(r"\W+", "-", part.rpartition(".")[2]).rstrip("-") for part in self.overrides)
        rank = f"rank-{self.rank}" if self.level == "devices" else ""
        return "_".join(filter(None, (self.model, self.config, str(self.processes), self.mode, said, rank)))

    @property
    def all_overrides(self) -> list[str]:
        return [*MODES[self.mode], *self.overrides]


# --- in a launch


def measure_case(
    recipe_file: str, out: Path, name: str, overrides: list[str], config_file: str | None
) -> dict[str, Any]:
    """Trains two steps in this process group; returns bytes of state and peaks of phases, of this rank."""
    from trainers import prepared_run, ready_trainer, started_engine

    from finetune.engine.base import StorageCounter, measure_state_bytes
    from finetune.errors import UserError
    from finetune.features import all_features
    from finetune.training import parts

    named = [f"run.name={name}", f"run.dir={out / 'runs'}"]
    try:
        prepared = prepared_run(recipe_file, [*overrides, *named], config_file, all_features())
    except UserError as refusal:
        return {"refused": str(refusal)}
    engine = started_engine(prepared)
    load, state = parts.load, dict[str, int]()

    def load_copied(*arguments: Any) -> Any:
        model, objective = load(*arguments)
        for parameter in model.parameters():
            if not parameter.is_meta and not hasattr(parameter, "ds_tensor") and not hasattr(parameter, "quant_state"):
                parameter.data = parameter.data.clone()
        return model, objective

    parts.load = load_copied
    try:
        with Weighed() as meter:
            trainer = ready_trainer(prepared, engine)
            _mark_phases(trainer, meter.mark)

            def gradients() -> None:
                state["gradients"] = StorageCounter(engine.device).add(engine.gradients())

            trainer.meters.measure_gradients = gradients
            for number in range(STEPS):
                gc.collect()  # what the load has left in cycles would be freed at some time
                meter.mark(f"step {number}")
                trainer.train_step(trainer.loader.step(number))
            state["weights"], state["optimizer state"] = measure_state_bytes(engine)
    finally:
        parts.load = load
    engine.close()
    return {"state": state, "peaks": meter.peaks(), "micro_batches": trainer.plan.micro_batches}


def _mark_phases(trainer: Any, mark: Callable[[str], None]) -> None:
    """Let a meter see where the phases of steps begin."""
    engine, phase = trainer.engine, trainer.engine.stopwatch.phase

    @contextlib.contextmanager
    def named(name: str) -> Iterator[None]:
        mark(name)
        with phase(name):
            yield
        mark("forward" if name == "backward" else "rest")

    def accumulate(*arguments: Any) -> None:
        mark("forward")
        type(engine).accumulate(engine, *arguments)
        mark("rest")

    engine.stopwatch.phase, engine.accumulate = named, accumulate


class Weighed:
    """Every storage that an operation of this thread gives, until it is freed in whatever thread."""

    def __enter__(self) -> Weighed:
        from finetune.plan.meter import Meter

        self._meter = Meter("cpu")
        self._meter.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._meter.__exit__(*error)

    def mark(self, name: str) -> None:
        if name == f"step {STEPS - 1}":
            self._meter.peaks.clear()
        self._meter.begin(name)

    def peaks(self) -> dict[str, int]:
        return dict(self._meter.peaks)


# --- outside


def recipe_file(folder: Path, model: str) -> Path:
    import parity
    import tiny
    import yaml

    name, changes = MODELS[model]
    home = folder / model
    home.mkdir(exist_ok=True)
    question: Any = "stone"
    answer = "light paper " * 200
    if name in tiny.SEEING:
        from PIL import Image

        text = {**tiny.MULTIMODAL[name]["text_config"], **changes}
        path = tiny.save_seeing(home, name, text_config=text)
        Image.new("RGB", (112, 84), "red").save(home / "red.png")
        question = [{"type": "image", "image": "red.png"}, {"type": "text", "text": question}]
        answer = "light paper " * 12  # rows with images are not cut
    else:
        path = tiny.save_model(home, name, **changes)
    rows = [{"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}] * 64
    tiny.write_rows(home / "rows.jsonl", rows)
    values = parity.base_recipe(home)
    values["model"]["name"] = str(path)
    if name in tiny.SEEING:
        values["model"]["train"] = ["language", "projector", "tower"]
        values["data"]["image"] = {}
    del values["data"]["eval"], values["evaluate"]
    values["data"] |= {"max_length": TOKENS, "overlong": "truncate"}
    values["batch"] = {"rows": 8, "rows_per_device": 1}
    values["train"] |= {"precision": "bf16", "max_steps": STEPS}
    values["schedule"] = {"warmup_steps": 0}
    (home / "recipe.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return home / "recipe.yaml"


def run_processes(folder: Path, cells: list[Cell]) -> None:
    """Runs cells of one model, config and size in one launch, each rank writing its file."""
    first = cells[0]
    config = None if first.config == "single" else ROOT / "accelerate_configs" / f"{first.config}.yaml"
    overrides = {cell.name: cell.all_overrides for cell in cells}
    recipe = folder / first.model / "recipe.yaml"
    launch_cells(Path(__file__), folder, recipe, config, first.processes, overrides)


def run_devices(folder: Path, cells: list[Cell]) -> None:
    """Runs one rank of each cell on devices that are not there; writes its file."""
    wanted = {
        cell.name: [cell.config, cell.processes, cell.rank, *cell.all_overrides]
        for cell in cells
        if not (folder / f"{cell.name}.json").exists()
    }
    if not wanted:
        return
    program = [sys.executable, str(ROOT / "tests" / "fake_cuda" / "fake_cells.py")]
    program += [str(folder / "llama" / "recipe.yaml"), str(folder)]
    paths = [str(ROOT), str(Path(__file__).parent), str(ROOT / "tests" / "support"), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run(program, input=json.dumps(wanted), text=True, env=environment, check=True)


def compare(folder: Path, cell: Cell) -> dict[str, Any] | None:
    """Returns what is predicted and measured of a cell, in bytes; None if it was refused or did not run."""
    from finetune.engine.launch import read_config_file
    from finetune.features import load_recipe
    from finetune.models.base_model import Base
    from finetune.plan.lengths import Lengths, read_lengths
    from finetune.plan.memory import phases_of
    from finetune.plan.micro_batch import HeaviestBatch
    from finetune.plan.search import heaviest
    from finetune.plan.shapes import costs_at

    files = [folder / f"{cell.name}-{rank}.json" for rank in range(cell.processes)]
    files = files if cell.level != "devices" else [folder / f"{cell.name}.json"]
    if not all(file.exists() for file in files):
        return None
    ranks = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    if "refused" in ranks[0]:
        return None
    recipe = load_recipe(folder / cell.model / "recipe.yaml", cell.all_overrides)
    launch = read_config_file(str(ROOT / "accelerate_configs" / f"{cell.config}.yaml"), cell.processes)
    rows = recipe.batch.rows_per_device
    assert isinstance(rows, int)
    config = Base.of(recipe).config
    batch = HeaviestBatch.of_rows(rows, recipe.data.max_length)
    if recipe.data.image is not None:  # with the images of its rows, as `plan` reads them
        lengths = read_lengths(recipe)
        assert isinstance(lengths, Lengths), lengths
        batch = heaviest(recipe.batch, lengths.rows(recipe, config))
    micro_batches = recipe.batch.rows // rows // launch.parallelism.data
    device = "cuda" if cell.level == "devices" else "cpu"
    numbers = range(cell.processes) if cell.level != "devices" else [cell.rank]
    costs = costs_at(recipe, config, launch, device)
    found: list[dict[str, Any]] = []
    for rank, measured in zip(numbers, ranks, strict=True):
        phases, state = phases_of(costs, config, rank, (9, 0), batch, micro_batches)
        if device == "cpu":
            peaks = {name: measured["peaks"][name] for name in PHASES if name in measured["peaks"]}
            kept = {name: (state.persistent[name], measured["state"][name]) for name in measured["state"]}
        else:
            peaks = {name: measured["phases"][name]["peak_bytes"] for name in PHASES}
            kept = {}
        predicted = max(phases[name] for name in (*PHASES, "reduction"))
        found.append({"predicted": predicted, "measured": max(peaks.values()), "state": kept})
    fullest = max(found, key=lambda one: one["measured"])
    differing = [kept for one in found for kept in one["state"].values() if kept[0] != kept[1]]
    return {**fullest, "differing": differing}


def errors(compared: dict[str, dict[str, Any]], apart: float = 1.1) -> dict[str, Any]:
    """Returns median and worst error, and the share of pairs more than `apart` times apart whose order is right."""
    off = {name: one["predicted"] / one["measured"] - 1 for name, one in compared.items()}
    sizes = [(one["predicted"], one["measured"]) for one in compared.values()]
    pairs = [(a, b) for a, b in combinations(sizes, 2) if max(a[1], b[1]) > apart * min(a[1], b[1])]
    right = sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs)
    worst = max(off, key=lambda name: abs(off[name]))
    median = statistics.median(map(abs, off.values()))
    order = {"pairs": len(pairs), "right": right / len(pairs) if pairs else 1.0}
    return {"cells": len(off), "median": median, "worst": [worst, off[worst]], "order": order}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="words that all are in the name of a cell")
    parser.add_argument("--level", choices=LEVELS, nargs="*", default=LEVELS, help="where cells are measured")
    parser.add_argument("--folder", type=Path, help="keeps what was measured; what is there already is not run again")
    parser.add_argument("--no-runs", action="store_true", help="compare only what was measured in --folder")
    parser.add_argument("--out", type=Path, help=f"JSON, such as {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        from worker import main as run_plan

        run_plan(json.loads(arguments.measure.read_text(encoding="utf-8")), measure_case)
        return
    cells = [cell for cell in CELLS if cell.level in arguments.level]
    cells = [cell for cell in cells if all(word in cell.name for word in arguments.only)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        if not arguments.no_runs:
            run_all(folder, cells)
        compared = {cell.name: one for cell in cells if (one := compare(folder, cell)) is not None}
    for level in LEVELS:
        of_level = {cell.name: compared[cell.name] for cell in cells if cell.level == level and cell.name in compared}
        for name, one in of_level.items():
            error = one["predicted"] / one["measured"] - 1
            print(f"{error:+7.1%}  {one['measured'] / 2**20:8.2f} MiB  {one['differing'] or ''}  {name}")
        if of_level:
            print(level, json.dumps(errors(of_level)))
    if compared:
        print("all", json.dumps(errors(compared)))
    if arguments.out:
        content = {"of": __doc__, "peaks": errors(compared), "cells": compared}
        arguments.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def run_all(folder: Path, cells: list[Cell]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for model in dict.fromkeys(["llama", *(cell.model for cell in cells)]):
        if not (folder / model / "recipe.yaml").exists():
            recipe_file(folder, model)
    run_devices(folder, [cell for cell in cells if cell.level == "devices"])
    launches = defaultdict[Any, list[Cell]](list)
    for cell in cells:
        if cell.level != "devices" and not (folder / f"{cell.name}-0.json").exists():
            launches[cell.model, cell.config, cell.processes].append(cell)
    for of_launch in launches.values():
        run_processes(folder, of_launch)


RECOMPUTED, KEPT, SELECTIVE = (f"train.activation_checkpointing={how}" for how in ("true", "false", "selective"))
_FP32 = "train.precision=fp32"
_PROCESSES = [
    Cell(model, "single", 1, mode, overrides)
    for model in ("llama", "tied", "odd", "qwen3", "mistral")
    for mode, overrides in (
        ("full", (RECOMPUTED, "batch.rows=2")),
        ("lora", (RECOMPUTED, "batch.rows=2")),
        ("full", (KEPT, "batch.rows=2")),
        ("qlora", (KEPT, "batch.rows=2")),
        ("full", (SELECTIVE, "batch.rows=1")),
        ("lora", (KEPT, _FP32, "batch.rows=4", "batch.rows_per_device=2")),
        ("full", (RECOMPUTED, _FP32, "batch.rows=1")),
        ("qlora", (RECOMPUTED, "batch.rows=2", "batch.rows_per_device=2")),
    )
]
_DEVICES = [
    Cell("llama", config, processes, mode, (how, f"batch.rows={rows}"), "devices", rank)
    for config, processes, mode, how, rank, rows in (
        ("ddp", 2, "full", RECOMPUTED, 0, 4),
        ("cp", 2, "full", RECOMPUTED, 0, 4),
        ("ulysses", 2, "full", RECOMPUTED, 0, 4),
        ("hsdp", 4, "full", RECOMPUTED, 0, 8),
        ("fsdp2_tp", 4, "full", RECOMPUTED, 0, 8),
        ("zero3_offload", 2, "full", RECOMPUTED, 0, 4),
        ("fsdp2", 2, "qlora", KEPT, 0, 4),
        ("zero3", 4, "full", RECOMPUTED, 0, 8),
        ("fsdp2", 4, "full", SELECTIVE, 3, 8),
        ("tp", 2, "full", RECOMPUTED, 0, 4),
        ("zero2", 2, "full", RECOMPUTED, 0, 4),
        ("fsdp2_cp", 4, "lora", RECOMPUTED, 0, 8),
        ("zero3", 2, "qlora", RECOMPUTED, 0, 4),
        ("fsdp2", 2, "full", RECOMPUTED, 0, 2),
        ("zero2", 4, "full", KEPT, 0, 8),
        ("tp", 2, "lora", KEPT, 0, 4),
        ("hsdp", 4, "lora", KEPT, 0, 8),
        ("fsdp2_offload", 2, "lora", RECOMPUTED, 0, 4),
        ("fsdp2", 2, "full", RECOMPUTED, 0, 4),
        ("fsdp2", 2, "full", KEPT, 0, 4),
        ("zero3", 2, "full", RECOMPUTED, 0, 4),
        ("fsdp2_offload", 2, "full", RECOMPUTED, 0, 4),
        ("zero3", 2, "lora", KEPT, 0, 4),
        ("fsdp2", 2, "lora", RECOMPUTED, 0, 4),
        ("ddp", 4, "lora", RECOMPUTED, 0, 8),
        ("zero2", 2, "qlora", RECOMPUTED, 0, 4),
        ("fsdp2", 8, "full", RECOMPUTED, 7, 8),
        ("zero3", 8, "lora", RECOMPUTED, 0, 8),
        ("ddp", 2, "full", KEPT, 0, 4),
    )
]
_SHARED = ("ddp", "fsdp2", "zero2", "zero3", "tp", "cp", "ulysses", "fsdp2_offload", "hsdp", "fsdp2_tp")


def _drawn(seed: int = 2026, of_each: int = 6) -> Iterator[Cell]:
    """Yields cells that were drawn before any of them was run: a config's are one launch."""
    drawn = random.Random(seed)
    every = list(product(MODES, (RECOMPUTED, KEPT, SELECTIVE), ("bf16", "fp32"), (1, 2, 4)))
    for config in _SHARED:
        processes = 4 if config in ("hsdp", "fsdp2_tp") else 2
        share = 1 if config in ("tp", "cp", "ulysses") else 2  # processes with rows of their own
        legal = [cell for cell in every if not (config in ("tp", "fsdp2_tp") and cell[0] == "qlora")]
        for mode, how, precision, micro_batches in drawn.sample(legal, of_each):
            overrides = (how, f"train.precision={precision}", f"batch.rows={share * micro_batches}")
            yield Cell("llama", config, processes, mode, overrides, "several")


_EXPERTS = [
    Cell("mixtral", config, processes, mode, (how, f"batch.rows={rows}"), "several")
    for config, processes in (("fsdp2", 2), ("ep", 2), ("ep", 4))
    for mode, how, rows in (("full", RECOMPUTED, 4), ("full", KEPT, 8), ("lora", RECOMPUTED, 8), ("lora", KEPT, 4))
]
_IMAGES = [
    Cell("mistral3", config, 2, mode, (how, "batch.rows=4", *parts), "several")
    for config in ("ddp", "fsdp2", "zero2", "zero3")
    for mode, how, parts in (
        ("full", RECOMPUTED, ()),
        ("full", KEPT, ()),
        ("full", KEPT, ("model.train=[projector]",)),
        ("lora", RECOMPUTED, ("model.train=[language]",)),
    )
]
CELLS = _PROCESSES + _DEVICES + list(_drawn()) + _EXPERTS + _IMAGES


if __name__ == "__main__":
    sys.path[1:1] = [str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "tests" / "trainer" / "distributed")]
    main()
