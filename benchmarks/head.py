"""The LM head and the cross entropy: time and memory of each way, forward and backward, on the CPU.

    python benchmarks/head.py --json benchmarks/results/head.json

Every measurement is a process of its own (forked: imports are made once), contenders in turn, several rounds. Time is
that of the processor; memory is what a forward and backward add to the process at its highest, gradients included.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy, linear

from finetune.models.head import TokenLoss
from finetune.models.head.chunked import HeadDevice, HeadTask, matrix_losses
from finetune.models.head.token_loss import LogitMap

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))
WIDTH = 384
SHAPES = ((64, 32_000), (1_200, 32_000), (8_192, 32_000), (400, 131_072), (200, 262_144))  # supervised tokens, words
# (way, rows at once; 0: its own choice)
CONTENDERS = (
    ("plain", 0),
    ("chunked", 0),
    ("chunked", 64),
    ("torch, reduction none", 256),
    ("torch, reduction sum", 256),
)
MB = 2**20


def measure(way: str, rows: int, tokens: int, vocabulary: int) -> dict[str, float]:
    """One forward and backward, in this process."""

    def losses(hidden: Any, weight: Any, targets: Any) -> Any:
        if way == "plain":
            return cross_entropy(linear(hidden, weight), targets, reduction="none").sum()
        if way == "chunked":
            task = HeadTask(targets, TokenLoss(), LogitMap(), rows or HeadDevice("cpu").rows(len(weight)))
            return matrix_losses(hidden, weight, None, task).total
        fused: Any = torch.nn.functional.linear_cross_entropy
        options = torch.nn.LinearCrossEntropyOptions(**({"batch_chunk_size": rows} if rows else {}))
        return fused(hidden, weight, targets, reduction=way.rpartition(" ")[2], options=options).sum()

    def run(tokens: int, vocabulary: int) -> None:
        hidden = torch.randn(tokens, WIDTH, requires_grad=True)
        weight = torch.randn(vocabulary, WIDTH).mul_(0.02).requires_grad_()
        targets = torch.randint(0, vocabulary, (tokens,))
        before, start = peak(), time.process_time()
        losses(hidden, weight, targets).backward()
        figures.update(cpu_s=time.process_time() - start, memory_bytes=peak() - before)

    figures: dict[str, float] = {}
    torch.manual_seed(0)
    run(8, 16)  # what the first call loads is not the head's
    run(tokens, vocabulary)
    return figures


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def launch(way: str, rows: int, tokens: int, vocabulary: int) -> dict[str, float]:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(measure, (way, rows, tokens, vocabulary))


def compare(tokens: int, vocabulary: int, rounds: int, contenders: tuple[tuple[str, int], ...]) -> list[dict[str, Any]]:
    """One cell a contender, medians over the rounds."""
    runs_of: dict[tuple[str, int], list[dict[str, float]]] = {contender: [] for contender in contenders}
    for turn in range(rounds):
        print(f"{tokens:,} tokens, {vocabulary:,} words: {turn + 1} of {rounds}", file=sys.stderr)
        for contender in contenders:
            runs_of[contender].append(launch(*contender, tokens, vocabulary))
    cells = []
    for (way, rows), runs in runs_of.items():
        medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        each = [round(run["cpu_s"], 4) for run in runs]
        cells.append({"tokens": tokens, "vocabulary": vocabulary, "way": way, "rows": rows, **medians, "each_s": each})
    for cell in cells:
        cell["time_of_plain"] = round(cell["cpu_s"] / cells[0]["cpu_s"], 3)
    return cells


def show(cells: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("tokens", "words", "way", "rows at once", "processor time", "of plain", "memory")
    for c in cells:
        spread = f"{c['cpu_s']:.2f} s ({min(c['each_s']):.2f} - {max(c['each_s']):.2f})"
        rows = str(c["rows"] or "its own")
        numbers = [rows, spread, f"{c['time_of_plain']:.2f}", f"{c['memory_bytes'] / MB:,.0f} MB"]
        table.add_row(f"{c['tokens']:,}", f"{c['vocabulary']:,}", c["way"], *numbers)
    Console(width=120).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shapes", nargs="+", default=[f"{t}x{v}" for t, v in SHAPES], help="TOKENSxWORDS")
    parser.add_argument("--ways", nargs="+", help="plain, chunked, torch; default: all")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    ways = [c for c in CONTENDERS if not options.ways or c[0].partition(",")[0] in options.ways]
    cells = []
    for shape in options.shapes:
        tokens, vocabulary = map(int, shape.split("x"))
        cells += compare(tokens, vocabulary, options.rounds, tuple(ways))
    show(cells)
    if options.json:
        from parity import write_json

        write_json(options.json, f"benchmarks/head.py {shlex.join(sys.argv[1:])}", cells)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
