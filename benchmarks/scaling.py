"""Cost against work: how time and memory grow, as slopes on logarithmic axes (1: in proportion; 0: not at all).

    python benchmarks/scaling.py                       # all four parts
    python benchmarks/scaling.py --only tokens rows    # some

    tokens       a step of 1k to 32k tokens, packed rows of up to 4k, all in one forward
    vocabulary   8k to 256k entries, 2k tokens a step
    processes    1, 2 and 4 under `ddp`, a thread each, the same global batch of 4 rows
    rows         1e3 to 1e6 rows of data that are prepared already: from the recipe to the first batch

Every point is a process of its own. Time and memory are those of `stopwatch.py`; memory is what is in use above the
loaded model, and for `rows` above the imports. Writes benchmarks/results/scaling.json and .png.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))
sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

import contenders
import workload
from workload import Work, llama

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
Point = dict[str, float]
ROW_TOKENS = 4096  # of a packed row, at most
SIZES = {
    "tokens": [2**n for n in range(10, 16)],
    "vocabulary": [2**n for n in range(13, 19)],
    "processes": [1, 2, 4],
    "rows": [10**3, 10**4, 10**5, 10**6],
}
QUICK = {"tokens": [256, 512], "vocabulary": [512, 1024], "processes": [1], "rows": [100, 1000]}


def main() -> None:
    arguments = parse_arguments()
    if arguments.start_up:
        print(json.dumps(start_up(arguments.start_up)))
        return
    os.environ["HF_HUB_OFFLINE"] = "1"
    parts = {}
    for name in arguments.only:
        with tempfile.TemporaryDirectory(prefix="finetune-scaling-") as folder:
            points = list(PARTS[name](Path(folder), arguments))
        parts[name] = {"points": points, "slopes": slopes(points)}
        print(f"{name}: " + ", ".join(f"{key} {value:.2f}" for key, value in parts[name]["slopes"].items()), flush=True)
    result = {
        "command": shlex.join(["python", "benchmarks/scaling.py", *sys.argv[1:]]),
        "cores": os.cpu_count(),
        "versions": contenders.versions(),
        "threads": arguments.threads,
        "parts": {**earlier(arguments.json), **parts},
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    plot(result["parts"], arguments.json.with_suffix(".png"))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="these parts")
    parser.add_argument("--steps", type=int, default=4, help="measured steps of each point, after one that is not")
    parser.add_argument("--threads", type=int, default=2, help="of each process, but in `processes`, where it is one")
    parser.add_argument("--quick", action="store_true", help="two small points of each part")
    parser.add_argument("--json", type=Path, default=RESULTS / "scaling.json", help="where the figures go")
    parser.add_argument("--start-up", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.sizes = QUICK if arguments.quick else SIZES
    return arguments


def earlier(path: Path) -> dict[str, Any]:
    """Parts that an earlier run measured; this one's come in their place."""
    return json.loads(path.read_text(encoding="utf-8"))["parts"] if path.exists() else {}


# --- the parts


def by_tokens(folder: Path, arguments: argparse.Namespace) -> Iterator[Point]:
    shape = llama(256, 4, 4, 2, 704, 8192, tied=True)
    save_model(folder, shape)
    for tokens in arguments.sizes["tokens"]:
        row = min(tokens, ROW_TOKENS)
        work = Work(shape, row_tokens=row, rows_per_step=tokens // row, threads=arguments.threads)
        yield {"size": tokens, **measured(folder, replace(work, steps=1 + arguments.steps))}


def by_vocabulary(folder: Path, arguments: argparse.Namespace) -> Iterator[Point]:
    for vocabulary in arguments.sizes["vocabulary"]:
        shape = llama(128, 2, 2, 1, 352, vocabulary, tied=True)
        point = folder / str(vocabulary)
        save_model(point, shape)
        work = Work(shape, row_tokens=2048, threads=arguments.threads, steps=1 + arguments.steps)
        yield {"size": vocabulary, **measured(point, work)}


def by_processes(folder: Path, arguments: argparse.Namespace) -> Iterator[Point]:
    """efficiency: of the cores that are in use, for there are no more of them than the machine has."""
    shape = llama(256, 4, 4, 2, 704, 8192, tied=True)
    save_model(folder, shape)
    alone = 0.0
    for processes in arguments.sizes["processes"]:
        overrides = ("batch.rows=4", "batch.rows_per_device=1")
        work = Work(shape, row_tokens=1024, rows_per_step=4, threads=1, steps=1 + arguments.steps, overrides=overrides)
        command = [str(Path(sys.executable).with_name("accelerate")), "launch", "--num_processes", str(processes)]
        command += ["--config_file", str(ROOT / "accelerate_configs" / "ddp.yaml")]
        point = measured(folder, work, command)
        alone = alone or point["step_s"] * processes
        cores = min(processes, os.cpu_count() or 1)
        yield {"size": processes, **point, "cores_used": cores, "efficiency": alone / (point["step_s"] * cores)}


def by_rows(folder: Path, arguments: argparse.Namespace) -> Iterator[Point]:
    shape = workload.SHAPES["tiny"]
    save_model(folder, shape)
    for rows in arguments.sizes["rows"]:
        point = folder / str(rows)
        point.mkdir()
        (point / "model").symlink_to(folder / "model")
        work = Work(shape, row_tokens=512, steps=1, threads=arguments.threads)
        workload.write_rows(point / "rows.jsonl", short_documents(rows))
        workload.write_recipe(point, work, "tokens")
        os.environ["FINETUNE_CACHE"] = str(point / "cache")
        began = time.perf_counter()
        workload.write_steps(point, work)  # fills the cache
        prepared = time.perf_counter() - began
        done = contenders.python([str(Path(__file__).resolve()), "--start-up", str(point)], point, work, "start-up")
        yield {"size": rows, **json.loads(done.splitlines()[-1]), "prepare_s": prepared}
        (point / "rows.jsonl").unlink()


def short_documents(count: int) -> Iterator[dict[str, Any]]:
    """About 20 tokens each: a million rows of them are made and prepared in a minute or two."""
    rng = np.random.default_rng(workload.SEED)
    for length in rng.integers(8, 33, count).tolist():
        yield {"input_ids": rng.integers(3, 512, length).tolist()}


def start_up(folder: Path) -> Point:
    """In a process of its own: what a run does before its first forward, but for the model."""
    from stopwatch import peak_resident, resident

    from finetune.data.dataset import build_dataset
    from finetune.features import load_recipe
    from finetune.models.base_model import Base

    recipe = load_recipe(folder / "recipe.yaml", [])
    renderer = Base.of(recipe).renderer(recipe.objective)
    imported, began = resident(), time.perf_counter()
    dataset = build_dataset(recipe, recipe.data.train, renderer)
    packed = time.perf_counter()
    ordered = dataset.in_order(recipe)
    ordered.row(0)
    return {
        "step_s": time.perf_counter() - began,
        "order_s": time.perf_counter() - packed,
        "memory_bytes": peak_resident(os.getpid()) - imported,
        "packed_rows": len(dataset.rows),
    }


PARTS = {"tokens": by_tokens, "vocabulary": by_vocabulary, "processes": by_processes, "rows": by_rows}


def save_model(folder: Path, shape: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    workload.save_padded_tokenizer(folder / "model", 512)
    workload.save_weights(shape, folder / "model")


def measured(folder: Path, work: Work, command: list[str] | None = None) -> Point:
    """Ours. Documents of up to 1,024 tokens at every size, so that attention has the same to do for a token."""
    count = 32 + work.steps * work.rows_per_step * work.row_tokens // 120
    longest = min(1024, work.row_tokens)
    workload.write_rows(folder / "rows.jsonl", workload.random_documents(count, 512, longest, median=longest // 4))
    workload.write_recipe(folder, work, "tokens")
    os.environ["FINETUNE_CACHE"] = str(folder / "cache")
    workload.write_steps(folder, work)
    measured = contenders.run("ours", folder, work, command)
    return {
        "step_s": statistics.median(measured["step_s"]),
        "step_cpu_s": statistics.median(measured["step_cpu_s"]),
        "memory_bytes": measured["peak_rss"] - measured["loaded_rss"],
    }


# --- slopes and the plot


def slopes(points: list[Point]) -> dict[str, float]:
    """Least squares of log(cost) over log(size): of all points, and of the larger half, where constants weigh less.

    Processor time in addition, where it was taken: other work on the machine moves it less.
    """
    slopes = {}
    for cost, name in (("step_s", "time"), ("step_cpu_s", "processor time"), ("memory_bytes", "memory")):
        if cost not in points[0]:
            continue
        for part, label in ((points, name), (points[len(points) // 2 :], f"{name}, larger half")):
            if len(part) > 1:
                x, y = (np.log([max(point[key], 1e-9) for point in part]) for key in ("size", cost))
                slopes[label] = float(np.polyfit(x, y, 1)[0])
    return slopes


TITLES = {
    "tokens": "tokens in a step",
    "vocabulary": "entries of the vocabulary",
    "processes": "processes (ddp, fixed global batch)",
    "rows": "rows of prepared data (start-up)",
}


def plot(parts: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(parts), figsize=(4 * len(parts), 6.4), squeeze=False, sharex="col")
    for column, (name, part) in enumerate(parts.items()):
        sizes = [point["size"] for point in part["points"]]
        for row, (cost, label, unit) in enumerate((("step_s", "time", 1.0), ("memory_bytes", "memory", 1e9))):
            axis = axes[row][column]
            axis.loglog(sizes, [point[cost] / unit for point in part["points"]], "o-")
            axis.set_ylim(at_least_a_decade(*axis.get_ylim()))
            slope = part["slopes"].get(label)
            if slope is not None:
                axis.set_title(f"{label}: slope {slope:.2f}", fontsize=10)
            axis.grid(alpha=0.3, which="both")
        axes[1][column].set_xlabel(TITLES[name])
        if name == "processes":
            axes[1][column].set_xticks(sizes, [str(size) for size in sizes])
            axes[1][column].minorticks_off()
    axes[0][0].set_ylabel("seconds")
    axes[1][0].set_ylabel("GB above the start")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def at_least_a_decade(low: float, high: float) -> tuple[float, float]:
    """Or what hardly changes looks as steep as the rest."""
    middle, half = (low * high) ** 0.5, max(high / low, 10.0) ** 0.5
    return middle / half, middle * half


if __name__ == "__main__":
    main()
