"""How much longer the slowest process works than the mean of them: `data.balance` against rows dealt at random.

    python benchmarks/balance.py                             # a seeded log-normal set; about a minute, on one core
    python benchmarks/balance.py --lengths lengths.txt       # documents of your own: one number of tokens a line

Nothing is trained: documents are packed, ordered and dealt by the code that a run uses, and the work of every process
is added up. Work is what attention costs, the sum of squared document lengths. `time` is all that an 8B Llama computes
for a row, forward and backward, by its FLOPs: 6 for each weight and token, and for each layer 6 * hidden size * work
(scores and values, half of them masked). Random: `data.balance: 1`, micro-batches dealt in turn as they come.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from finetune.data.loader import assign_micro_batches
from finetune.data.packing import RowOrder, group_rows, pack, row_work

RESULTS = Path(__file__).resolve().parent / "results"
SEED = 42
MEDIAN, SIGMA, SHORTEST = 1000, 1.3, 16  # tokens; of the log-normal set, whose tail is cut at max_length
WEIGHTS, LAYERS, HIDDEN = 8.03e9, 32, 4096  # Llama 3.1 8B (https://arxiv.org/abs/2407.21783, table 3)


@dataclass(frozen=True)
class Spread:
    """(slowest of the ranks / mean of the ranks - 1), mean over the steps of an epoch."""

    step_work: float  # where processes wait for each other once a step (DDP)
    forward_work: float  # where they wait at every forward (FSDP, ZeRO)
    step_time: float
    forward_time: float


@dataclass(frozen=True)
class Cell:
    documents: int
    max_length: int
    ranks: int
    rows_per_rank: int  # forwards of one row, per step
    rows: int
    steps: int  # of an epoch
    full: float  # share of the rows' places that hold a token
    random: Spread
    balanced: Spread  # data.balance: ranks


def log_normal(documents: int, max_length: int) -> NDArray[np.int64]:
    generator = np.random.Generator(np.random.PCG64(SEED))
    lengths = np.empty(0, np.int64)
    while len(lengths) < documents:
        drawn = generator.lognormal(np.log(MEDIAN), SIGMA, documents).astype(np.int64)
        lengths = np.concatenate([lengths, drawn[(drawn >= SHORTEST) & (drawn <= max_length)]])
    return lengths[:documents]


def measure(lengths: NDArray[np.int64], max_length: int, ranks: int, rows_per_rank: int) -> Cell:
    rows = pack(lengths, max_length)
    work = row_work(rows, np.square(lengths, dtype=np.int64))
    tokens = np.add.reduceat(lengths[rows.members], rows.offsets[:-1])
    time = 6.0 * (WEIGHTS * tokens + LAYERS * HIDDEN * work)  # FLOPs
    per_step = ranks * rows_per_rank
    steps = len(rows) // per_step
    if not steps:
        raise SystemExit(f"{len(rows)} rows are no step of {per_step}: give more documents")
    at_random = RowOrder(len(rows), SEED).epoch(0)[: steps * per_step].reshape(steps, rows_per_rank, ranks)
    ordered = RowOrder(len(rows), SEED, work, group_rows(ranks, per_step)).epoch(0)
    dealt = np.stack([dealt_rows(step, work, ranks) for step in ordered[: steps * per_step].reshape(steps, per_step)])
    spreads = [Spread(*spread(work[of]), *spread(time[of])) for of in (at_random, dealt)]
    full = rows.efficiency(lengths, max_length)
    return Cell(len(lengths), max_length, ranks, rows_per_rank, len(rows), steps, full, *spreads)


def dealt_rows(step: NDArray[np.int64], work: NDArray[np.int64], ranks: int) -> NDArray[np.int64]:
    """Rows of a step as its processes run them, (forwards, ranks)."""
    return np.stack([step[assign_micro_batches(work[step].tolist(), rank, ranks)] for rank in range(ranks)], axis=1)


def spread(load: NDArray[np.floating] | NDArray[np.int64]) -> tuple[float, float]:
    """load: (steps, forwards, ranks). By step and by forward, see `Spread`."""
    sums = load.sum(axis=1)
    by_step = sums.max(axis=1) / sums.mean(axis=1)
    by_forward = load.max(axis=2).sum(axis=1) / load.mean(axis=2).sum(axis=1)
    return float(by_step.mean() - 1), float(by_forward.mean() - 1)


# --- what is shown


def table(title: str, cells: list[Cell]) -> Table:
    shown = Table("max_length", "ranks", "rows a rank", "rows", "steps", title=title, title_justify="left")
    for name in ("work: step", "work: forward", "time: step", "time: forward"):
        shown.add_column(name, justify="right")
    for cell in cells:
        pairs = zip(asdict(cell.random).values(), asdict(cell.balanced).values(), strict=True)
        facts = (cell.max_length, cell.ranks, cell.rows_per_rank, cell.rows, cell.steps)
        shown.add_row(*(f"{fact:,}" for fact in facts), *(f"{100 * a:.1f} -> {100 * b:.2f} %" for a, b in pairs))
    return shown


def plot(cells: list[Cell], path: Path) -> None:
    """Where processes wait at every forward and run one a step, which is the worst that there is."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    lengths = sorted({cell.max_length for cell in cells})
    for axis, reading, title in zip(
        axes, ("forward_work", "forward_time"), ("attention work", "all of an 8B Llama's FLOPs"), strict=True
    ):
        for ranks, style in zip(sorted({cell.ranks for cell in cells}), ("-", "--", ":", "-."), strict=False):
            for name, colour in (("random", "tab:red"), ("balanced", "tab:blue")):
                one = [c for c in cells if c.ranks == ranks and c.rows_per_rank == min(c.rows_per_rank for c in cells)]
                values = [100 * getattr(getattr(cell, name), reading) for cell in one]
                label = f"{'at random' if name == 'random' else 'data.balance'}, {ranks} processes"
                axis.plot([cell.max_length for cell in one], values, style, color=colour, marker="o", label=label)
        axis.axhline(2, color="grey", linewidth=0.8)
        axis.annotate("2 %", (lengths[0], 2), xytext=(0, 3), textcoords="offset points", color="grey")
        axis.set(xscale="log", yscale="log", xlabel="max_length (tokens)", title=title)
        axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axis.minorticks_off()
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("slowest process over the mean")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=120)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, help="a file with one number of tokens a line, instead of the set made")
    parser.add_argument("--documents", type=int, nargs="+", default=[1_000_000, 200_000], help="sizes of the set made")
    parser.add_argument("--max-length", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--rows-per-rank", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--json", type=Path, default=RESULTS / "balance.json")
    parser.add_argument("--plot", type=Path, default=RESULTS / "balance.png")
    return parser.parse_args()


def main() -> None:
    arguments = read_arguments()
    sets = arguments.documents
    if arguments.lengths:
        given = np.array(arguments.lengths.read_text(encoding="utf-8").split(), np.int64)
        sets = [len(given)]
    cells: list[Cell] = []
    for documents in sets:
        new_cells = [
            measure(lengths, max_length, ranks, rows_per_rank)
            for max_length in arguments.max_length
            for lengths in [given[given <= max_length] if arguments.lengths else log_normal(documents, max_length)]
            for ranks in arguments.ranks
            for rows_per_rank in arguments.rows_per_rank
        ]
        Console(width=140).print(
            table(f"{documents:,} documents: slowest over mean, at random -> data.balance", new_cells)
        )
        cells += new_cells
    result = {
        "command": shlex.join(["python", "benchmarks/balance.py", *sys.argv[1:]]),
        "set": str(arguments.lengths or f"log-normal, median {MEDIAN}, sigma {SIGMA}, {SHORTEST}..max_length tokens"),
        "cells": [asdict(cell) for cell in cells],
    }
    arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    plot([cell for cell in cells if cell.documents == cells[0].documents], arguments.plot)


if __name__ == "__main__":
    main()
