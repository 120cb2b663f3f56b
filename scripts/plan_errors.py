"""Predicted memory (`finetune/planning/estimate`) against that of real runs on CPU processes.

    python scripts/plan_errors.py                          all cells: table, benchmarks/results/plan_errors.json
    python scripts/plan_errors.py --only zero3 --processes 2

Measured is what torch's allocator gives: every allocation and release that its profiler records, of every rank, in the
phases of the second step. Weights are copied before they are wrapped, for on a CPU they are mapped files, which no
allocator has given. State is what the engine's own counter finds after the step, to the byte.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "plan_errors.json"
MARK = "plan_errors/"
PHASES = ("forward", "backward", "optimizer")
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

    @property
    def name(self) -> str:
        said = "_".join(part.rpartition(".")[2].replace("=", "-") for part in self.overrides)
        return "_".join(filter(None, (self.model, self.config, str(self.processes), self.mode, said)))

    @property
    def all_overrides(self) -> list[str]:
        return [*MODES[self.mode], *self.overrides]


# --- in a launch


def measure_case(
    recipe_file: str, out: Path, name: str, overrides: list[str], config_file: str | None
) -> dict[str, Any]:
    """Trains two steps in this process group; returns bytes of state and peaks of phases, of this rank."""
    import torch
    from rich.console import Console

    from finetune.data.dataset import build_training
    from finetune.engine.base import StorageCounter, measure_state_bytes
    from finetune.engine.compatibility import check_launch
    from finetune.engine.launch import read_launch
    from finetune.engine.start import start_engine
    from finetune.errors import UserError
    from finetune.models.config import load_tokenizer, training_config
    from finetune.recipe import load_recipe
    from finetune.training import run
    from finetune.training.run_dir import make_run_folder
    from finetune.training.signals import StopRequest

    recipe = load_recipe(recipe_file, [*overrides, f"run.name={name}", f"run.dir={out / 'runs'}"])
    launch, config, tokenizer = read_launch(config_file), training_config(recipe), load_tokenizer(recipe.model)
    try:
        micro_batches = check_launch(recipe, recipe_file, launch, config)
    except UserError as refusal:
        return {"refused": str(refusal)}
    training, engine = build_training(recipe, tokenizer), start_engine(recipe, launch)
    make_run_folder(recipe)
    load, state = run._load, dict[str, int]()

    def load_copied(*arguments: Any) -> Any:
        model, objective = load(*arguments)
        for parameter in model.parameters():
            if not parameter.is_meta and not hasattr(parameter, "ds_tensor") and not hasattr(parameter, "quant_state"):
                parameter.data = parameter.data.clone()
        return model, objective

    run._load = load_copied
    try:
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as profiler:
            trainer = run.build_trainer(
                recipe,
                engine,
                tokenizer,
                config,
                (training, None),
                micro_batches,
                StopRequest(),
                Console(quiet=True),
            )
            trainer.saver = SimpleNamespace(failed=False)  # pyright: ignore[reportAttributeAccessIssue]
            _mark_phases(trainer)

            def gradients() -> None:
                state["gradients"] = StorageCounter(engine.device).add(engine.gradients())

            trainer.meters.measure_gradients = gradients
            for number in range(STEPS):
                gc.collect()  # what the load has left in cycles would be freed at some time
                with torch.profiler.record_function(f"{MARK}step {number}"):
                    pass
                trainer.train_step(trainer.loader.step(number))
            state["weights"], state["optimizer state"] = measure_state_bytes(engine)
    finally:
        run._load = load
    engine.close()
    return {"state": state, "peaks": peaks(profiler), "micro_batches": trainer.plan.micro_batches}


def _mark_phases(trainer: Any) -> None:
    """Let the profiler see where the phases of steps begin."""
    import torch

    engine, phase = trainer.engine, trainer.engine.stopwatch.phase

    def mark(name: str) -> None:
        with torch.profiler.record_function(MARK + name):
            pass

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


def peaks(profiler: Any) -> dict[str, int]:
    """Returns the most bytes that were allocated at once in each phase of the last step."""
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    now, phase, found = 0, "load", defaultdict[str, int](int)
    for event in events:
        if event.name().startswith(MARK):
            phase = event.name().removeprefix(MARK)
            if phase == f"step {STEPS - 1}":
                found.clear()
            found[phase] = max(found[phase], now)
        elif event.name() == "[memory]":
            now += event.nbytes()
            found[phase] = max(found[phase], now)
    return dict(found)


# --- outside


def recipe_file(folder: Path, model: str) -> Path:
    import parity
    import tiny
    import yaml

    name, changes = MODELS[model]
    home = folder / model
    home.mkdir(exist_ok=True)
    tiny.save_model(home, name, **changes)
    rows = [
        {"messages": [{"role": "user", "content": "stone"}, {"role": "assistant", "content": "light paper " * 200}]}
    ] * 64
    tiny.write_rows(home / "rows.jsonl", rows)
    values = parity.base_recipe(home)
    values["model"]["name"] = str(home / name)
    del values["data"]["eval"], values["evaluate"]
    values["data"] |= {"max_length": TOKENS, "overlong": "truncate"}
    values["batch"] = {"rows": 8, "rows_per_device": 1}
    values["train"] |= {"precision": "bf16", "max_steps": STEPS}
    values["schedule"] = {"warmup_steps": 0}
    (home / "recipe.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return home / "recipe.yaml"


def launch(folder: Path, cells: list[Cell]) -> dict[str, list[dict[str, Any]]]:
    """Returns what every rank found, by name of cell. All of one config, size and model."""
    import forks

    first = cells[0]
    config = ROOT / "accelerate_configs" / f"{first.config}.yaml"
    alone = first.config == "single"
    cases = [
        {"name": cell.name, "overrides": cell.all_overrides, "config_file": None if alone else str(config)}
        for cell in cells
    ]
    plan = folder / "plan.json"
    content = {"recipe": str(folder / first.model / "recipe.yaml"), "out": str(folder), "cases": cases}
    plan.write_text(json.dumps(content), encoding="utf-8")
    if alone:
        done = forks.python(Path(__file__), "--measure", plan)
    else:
        os.environ["TORCHELASTIC_RUN_ID"] = "plan_errors"
        done = forks.torchrun(first.processes, Path(__file__), "--measure", plan)
        del os.environ["TORCHELASTIC_RUN_ID"]
    if done.returncode:
        print(f"{first.name}: {done.stderr[-1500:]}", file=sys.stderr)
    found: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        files = [folder / f"{cell.name}-{rank}.json" for rank in range(first.processes)]
        if all(file.exists() for file in files):
            found[cell.name] = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="words that all are in the name of a cell")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--measured", type=Path, help="of an earlier run: only predict")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        from worker import main as run_plan

        run_plan(json.loads(arguments.measure.read_text(encoding="utf-8")), measure_case)


if __name__ == "__main__":
    sys.path[1:1] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "distributed")]
    main()
