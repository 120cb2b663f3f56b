"""Host time and operators of a training step: ours beside a bare loop of plain transformers and plain peft.

    python benchmarks/host_time.py                    # full and LoRA, a table; one thread, no GPU
    python benchmarks/host_time.py --operators lora   # which operators, and how many of each, in a step of either

A model of 32 layers that are 64 wide spends its time in Python and in torch's dispatcher, as the host of a GPU does:
what a step takes here is what a GPU would wait for. Both loops train the same row in one process, a step of one after a
step of the other. Times are those of the one thread on its core, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests" / "support")]

LAYERS, TOKENS = 32, 16
Step = Callable[[], object]


def main() -> None:
    arguments = read_arguments()
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    results = []
    for mode in [arguments.operators] if arguments.operators else arguments.modes:
        with tempfile.TemporaryDirectory() as folder:
            ours, bare = contenders(Path(folder), mode)
            if arguments.operators:
                show_operators(operators(ours), operators(bare))
                return
            results.append({"mode": mode, **alternated(ours, bare, arguments.steps)})
    show(results)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def contenders(folder: Path, mode: str) -> tuple[Step, Step]:
    """Returns a step of ours and one of the bare loop, on the same weights and rows."""
    import torch
    from workload import (
        Work,
        llama,
        random_documents,
        save_padded_tokenizer,
        save_weights,
        write_recipe,
        write_rows,
        write_steps,
    )

    torch.set_num_threads(1)
    shape = llama(64, LAYERS, 4, 2, 128, 512, tied=True)
    # The weights of one packed row, frozen ones in bf16, as on a GPU.
    work = Work(shape, mode=mode, precision="bf16", row_tokens=TOKENS, steps=1, threads=1)  # pyright: ignore[reportArgumentType]
    save_weights(shape, folder / "model")
    save_padded_tokenizer(folder / "model", 512)
    write_rows(folder / "rows.jsonl", random_documents(64, 512, TOKENS))
    write_recipe(folder, work, "tokens")
    work.write(folder)
    write_steps(folder, work)
    return our_step(folder), bare_step(folder, work)


def our_step(folder: Path) -> Step:
    import trainers

    prepared = trainers.prepared_run(str(folder / "recipe.yaml"), ["train.max_steps=1000"])
    trainer = trainers.ready_trainer(prepared, trainers.started_engine(prepared))
    step = trainer.loader.step(0)
    return lambda: trainer.train_step(step)


def bare_step(folder: Path, work: Any) -> Step:
    import torch
    from contenders import CLIP, bare_model, bare_optimizer, flat_batch
    from torch.nn.functional import cross_entropy
    from workload import read_steps

    model, attention = bare_model(folder, work, torch.device("cpu"))
    inner = model.get_base_model() if work.mode != "full" else model
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = bare_optimizer(trained, work)
    (rows,) = read_steps(folder)
    input_ids, position_ids, selected, targets = flat_batch(rows, torch.device("cpu"))
    extra = attention.forward_arguments(tuple(map(len, rows.ids)))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = inner.model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **extra)[0]
            logits = inner.lm_head(hidden[0, selected])
        (cross_entropy(logits.float(), targets, reduction="sum") / len(targets)).backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


def alternated(ours: Step, bare: Step, steps: int) -> dict[str, Any]:
    """Returns medians of seconds of both, and the number of operators that torch starts in a step."""
    for step in (ours, bare) * 3:
        step()
    seconds: dict[str, list[float]] = {"ours": [], "bare": []}
    for _ in range(steps):
        for name, step in (("ours", ours), ("bare", bare)):
            began = time.process_time()
            step()
            seconds[name].append(time.process_time() - began)
    return {
        name: {
            "ms_per_layer": 1e3 * statistics.median(seconds[name]) / LAYERS,
            "operators": operators(step).total(),
        }
        for name, step in (("ours", ours), ("bare", bare))
    }


def operators(step: Step) -> Counter[str]:
    """Counts what torch's profiler sees of a step: every operator, those that another calls included."""
    import torch

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        step()
    return Counter(
        {event.key: event.count for event in profile.key_averages() if event.key.startswith(("aten::", "finetune::"))}
    )


def show(results: list[dict[str, Any]]) -> None:
    table = Table(title=f"A step of {LAYERS} layers, one thread")
    for column in ("mode", "ours, ms a layer", "bare loop", "ours / bare", "operators of ours", "bare loop"):
        table.add_column(column, justify="right")
    for result in results:
        ours, bare = result["ours"], result["bare"]
        table.add_row(
            result["mode"],
            *(f"{one['ms_per_layer']:.2f}" for one in (ours, bare)),
            f"{ours['ms_per_layer'] / bare['ms_per_layer']:.2f}",
            *(f"{one['operators']:,}" for one in (ours, bare)),
        )
    Console(width=120).print(table)


def show_operators(ours: Counter[str], bare: Counter[str]) -> None:
    table = Table(title=f"Operators of a step of {LAYERS} layers: {ours.total():,} and {bare.total():,}")
    for column in ("operator", "ours", "bare loop"):
        table.add_column(column, justify="left" if column == "operator" else "right")
    for name in sorted({*ours, *bare}, key=lambda name: -max(ours[name], bare[name])):
        table.add_row(name, f"{ours[name]:,}", f"{bare[name]:,}")
    Console(width=120).print(table)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=["full", "lora"], choices=["full", "lora"])
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each, after three that are not")
    parser.add_argument("--operators", choices=["full", "lora"], help="list the operators of a step in this mode")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
