"""What each process sends in a step and has in memory, next to the formulas that predict it, and how step time scales.

    python benchmarks/communication.py                     # every config, 1 to 4 processes, two small models
    python benchmarks/communication.py --only fsdp2 tp     # some

A launch has a network of its own (a namespace: Linux, root or unprivileged namespaces), in which everything that ranks
say to each other crosses one loopback device that counts. Two launches of different length; what a step sends is their
difference over the steps, so that start and end do not count. Predictions: `finetune/engine/costs`; of
the peak, what one process needs in addition to its state (libraries, activations) and the state predicted.
A process has one thread. `time` is that of a step over the time that one process takes for it: with more processes than
cores it cannot fall. Writes benchmarks/results/communication.json and .png.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

sys.path.append(str(Path(__file__).resolve().parent.parent))

import contenders
from workload import llama, random_documents, save_padded_tokenizer, save_weights, write_rows

from finetune.engine.costs import Costs, ModelSize
from finetune.engine.launch import read_config_file
from finetune.features import load_recipe
from finetune.models.base_model import Base
from finetune.plan.shapes import costs_at, shapes_of
from finetune.plan.speed import Shape
from finetune.training.run_plan import STATE

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "accelerate_configs"
STEPS = (3, 7)  # of the two launches
ROWS, TOKENS = 4, 512  # of a step, of a row
TRAINED = 0.6  # of the tokens, by `random_documents`
DENSE = llama(256, 4, 8, 4, 768, 2048, tied=False)
MOE = {
    **DENSE,
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 384,
    "sliding_window": None,
}
MODELS = {"dense": DENSE, "moe": MOE}
# (model, config, processes)
RUNS = (
    ("dense", "single", 1),
    *(
        ("dense", config, n)
        for config in ("ddp", "zero2", "fsdp2", "zero3", "tp", "cp", "ulysses", "pp")
        for n in (2, 4)
    ),
    *(("dense", config, 4) for config in ("hsdp", "fsdp2_tp", "fsdp2_cp", "pp_dp")),
    ("moe", "single", 1),
    *(("moe", config, n) for config in ("fsdp2", "ep") for n in (2, 4)),
)
_SIZED = {"tp": "tp_size", "cp": "cp_size", "ulysses": "sp_size", "pp": "pp_size", "ep": "ep_size"}
# gloo has no reduce-scatter of its own: it reduces everything on every rank and keeps a part (torch's
# ProcessGroupGloo::_reduce_scatter_base), which sends twice as much.
# DeepSpeed does without it.
GLOO = {"reduce-scatter": 2.0}


@dataclass(frozen=True)
class Cell:
    model: str
    config: str
    processes: int
    divided: str  # over the processes
    sent: float  # bytes, a process and step
    predicted: float  # by the formula, of a library that has every collective
    gloo: float  # by the formula, of gloo
    held: dict[str, float]  # bytes of weights, gradients and optimizer state, of the process that needs most memory
    predicted_held: dict[str, float]  # of the average process
    peak: float  # bytes, libraries included
    step_s: float  # median, but for the first two
    predicted_peak: float = 0.0  # bytes
    time: float = 0.0  # of a step, over that of one process

    @property
    def ratio(self) -> float:
        return self.sent / self.gloo if self.gloo else float("nan")

    def relative_to(self, alone: Cell) -> Cell:
        """With what is known by the same model in one process."""
        base = alone.peak - sum(alone.held.values())
        predicted_peak = base + sum(self.predicted_held.values())
        return replace(self, predicted_peak=predicted_peak, time=self.step_s / alone.step_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="names of configs")
    parser.add_argument("--sizes", nargs="+", type=int, default=[], help="numbers of processes")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "communication.json")
    arguments = parser.parse_args()
    require_namespaces()
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory(prefix="finetune-communication-") as name:
        folder = Path(name)
        os.environ.update(HF_HUB_OFFLINE="1", FINETUNE_CACHE=str(folder / "cache"))
        prepare(folder)
        for model, config, processes in RUNS:
            wanted = not arguments.only or config in arguments.only
            if config == "single" or (wanted and (not arguments.sizes or processes in arguments.sizes)):
                cell = measure(folder, model, config, processes)
                cells.append(cell.relative_to(next((one for one in cells if one.model == model), cell)))
                print(line_of(cells[-1]), flush=True)
    result = {
        "command": "python benchmarks/communication.py" + "".join(f" {word}" for word in sys.argv[1:]),
        "hardware": "CPU processes on one machine, gloo over TCP",
        "versions": contenders.versions(),
        "rows": ROWS,
        "tokens": TOKENS,
        "models": MODELS,
        "cells": [asdict(cell) for cell in cells],
    }
    arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    plot(cells, arguments.json.with_suffix(".png"))


def line_of(cell: Cell) -> str:
    held_mb, predicted_mb = (sum(sizes.values()) / 1e6 for sizes in (cell.held, cell.predicted_held))
    return (
        f"{cell.model:6}{cell.config:10} x{cell.processes}  sent {cell.sent / 1e6:7.2f} MB, predicted "
        f"{cell.predicted / 1e6:7.2f}, for gloo {cell.gloo / 1e6:7.2f} ({cell.ratio:5.3f})   held {held_mb:6.1f} MB, "
        f"predicted {predicted_mb:6.1f}   peak {cell.peak / 1e6:5.0f} MB, predicted {cell.predicted_peak / 1e6:5.0f}   "
        f"time {cell.time:4.2f}   {cell.divided}"
    )


def prepare(folder: Path) -> None:
    write_rows(folder / "rows.jsonl", random_documents(600, DENSE["vocab_size"], TOKENS))
    for name, shape in MODELS.items():
        save_weights(shape, folder / name)
        save_padded_tokenizer(folder / name, DENSE["vocab_size"])
        recipe = recipe_of(name, folder)
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")


def recipe_of(name: str, folder: Path) -> dict[str, Any]:
    return {
        "run": {"name": name, "dir": str(folder / "runs")},
        "model": {"name": str(folder / name)},
        "mode": "full",
        "data": {"train": [{"path": str(folder / "rows.jsonl"), "format": "tokens"}], "max_length": TOKENS},
        "batch": {"rows": ROWS, "rows_per_device": 1},
        "optimizer": {"lr": 1e-4},
        "train": {"max_steps": STEPS[0], "precision": "fp32", "activation_checkpointing": False},
        "checkpoint": {"resume": "never"},
    }


def measure(folder: Path, model: str, config: str, processes: int) -> Cell:
    file = config_of(folder, config, processes)
    sent = [launched(folder, model, file, processes, steps) for steps in STEPS]
    a_step = (sent[1] - sent[0]) / (STEPS[1] - STEPS[0]) / processes
    launch = read_config_file(str(file), processes)
    recipe = load_recipe(folder / f"{model}.yaml", [])
    shapes = Base.of(recipe).config
    costs = costs_at(recipe, shapes, launch, "cpu")
    sent_by_formula, sent_by_gloo = predicted(
        costs, Shape.of(shapes_of(recipe, shapes).weights, recipe, shapes, on_cpu=True, recomputes=False)
    )
    states = [costs.state(rank).persistent for rank in range(processes)]
    logged = [json.loads(line) for line in (folder / "runs" / model / "metrics.jsonl").read_text().splitlines()]
    last = logged[-1]
    return Cell(
        model=model,
        config=config,
        processes=processes,
        divided=launch.parallelism.summary(),
        sent=a_step,
        predicted=sent_by_formula,
        gloo=sent_by_gloo,
        held={name: last[f"memory/{name}_gib"] * 2**30 for name in STATE},
        predicted_held={name: sum(state[part] for state in states) / processes for name, part in STATE.items()},
        peak=last["memory_peak_gib"] * 2**30,
        step_s=statistics.median(line["step_s"] for line in logged[2:]),
    )


def config_of(folder: Path, config: str, processes: int) -> Path:
    """A file of accelerate_configs; those for one way of dividing the work are scaled to all processes."""
    content = yaml.safe_load((CONFIGS / f"{config}.yaml").read_text(encoding="utf-8"))
    if config in _SIZED and config != "ep":
        content["parallelism_config"][f"parallelism_config_{_SIZED[config]}"] = processes
    file = folder / f"{config}.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return file


def predicted(costs: Costs, model: ModelSize) -> tuple[float, float]:
    """Returns the bytes that a process sends in a step: by the formulas, and by gloo."""
    rows = ROWS // costs.sizes.data
    of_rows = costs.transfers_of_rows(model, rows, rows * TOKENS, TRAINED * rows * TOKENS)
    transfers = [*costs.transfers_of_weights(model, rows), *of_rows]
    factors = {} if costs.launch.kind == "zero" else GLOO
    return sum(one.moved for one in transfers), sum(one.moved * factors.get(one.kind, 1.0) for one in transfers)


# --- a launch in a network of its own


def launched(folder: Path, model: str, config: Path, processes: int, steps: int) -> int:
    """Bytes that crossed the loopback device. Raises CalledProcessError with the output shown."""
    train = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    train += ["--num_processes", str(processes), "-m", "finetune", "train", str(folder / f"{model}.yaml")]
    train += [f"train.max_steps={steps}"]
    counted = f'ip link set lo up && "$@" > {folder / "log"} 2>&1 && cat /proc/net/dev'
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ}
    command = [*own_network(), "sh", "-c", counted, "sh", *train]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=folder)
    if done.returncode:
        print((folder / "log").read_text(encoding="utf-8")[-5000:], file=sys.stderr)
        raise subprocess.CalledProcessError(done.returncode, command)
    loopback = next(line for line in done.stdout.splitlines() if line.strip().startswith("lo:"))
    return int(loopback.split(":")[1].split()[8])  # sent


def own_network() -> list[str]:
    return ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--map-root-user"]


def require_namespaces() -> None:
    if subprocess.run([*own_network(), "ip", "link", "set", "lo", "up"], capture_output=True).returncode:
        sys.exit("this machine gives out no network namespaces: run as root on Linux, with `ip` and `unshare`")


def plot(cells: list[Cell], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 0.32 * len(cells) + 1.2), sharey=True)
    names = [f"{cell.model} {cell.config} x{cell.processes}" for cell in cells]
    bars(left, names, [c.sent / 1e6 for c in cells], [c.gloo / 1e6 for c in cells], "MB sent, a process and step")
    held, predicted = (
        [sum(sizes.values()) / 1e6 for sizes in both]
        for both in ([cell.held for cell in cells], [cell.predicted_held for cell in cells])
    )
    bars(right, names, held, predicted, "MB of weights, gradients and optimizer state")
    left.legend(loc="lower right", frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def bars(axes: Any, names: list[str], measured: list[float], predicted: list[float], title: str) -> None:
    places = range(len(names))
    axes.barh(places, measured, color="#4c78a8", label="measured")
    axes.plot(predicted, places, "|", color="#e45756", markersize=13, markeredgewidth=2.5, label="predicted")
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
