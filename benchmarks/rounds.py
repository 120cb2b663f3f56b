"""Contenders in turns on the same rows, for benchmarks/images.py and benchmarks/preference.py.

Each measurement is a process of its own: the script again, with `--work NAME FOLDER`, which writes FOLDER/result.json.
Ratios are taken within a round; median over rounds, with the lowest and highest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent))

import contenders
from workload import Work

Cell = dict[str, Any]
WARM_UP = 2  # steps that are not measured
GB = 1e9


@dataclass(frozen=True)
class Rounds:
    """What is measured, of whom."""

    script: Path
    labels: dict[str, str]  # of contenders, by name
    unit: str  # of what is counted: tokens, pairs
    over: str  # the contender that ratios are of
    over_key: str  # of the ratios in the result
    digits: int  # of rates

    @property
    def figures(self) -> tuple[str, ...]:
        return f"{self.unit}_per_s", f"{self.unit}_per_cpu_s", "peak_gb", "above_loaded_gb"

    def parser(self, description: str | None, steps: int, row_tokens: int, threads: int) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--only", nargs="+", choices=list(self.labels), default=list(self.labels))
        parser.add_argument("--rounds", type=int, default=3)
        parser.add_argument("--steps", type=int, default=steps, help="that are measured")
        parser.add_argument("--row-tokens", type=int, default=row_tokens, help="of a packed row; a step is one")
        parser.add_argument("--threads", type=int, default=threads)
        parser.add_argument("--keep-freed-memory", action="store_true", help="all contenders: contenders.KEPT")
        parser.add_argument("--json", type=Path, help="where the figures go")
        parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)  # contender, folder
        return parser

    def run(
        self,
        arguments: argparse.Namespace,
        shape: dict[str, Any],
        prepare: Callable[[Path, Work], Cell],
        work_as: Callable[[str, Path, Work], Cell],
        lines: Callable[[Cell], list[str]],
        more: Callable[[Cell], Cell],
    ) -> list[Cell]:
        """Measures, or is a contender's process; prints and writes the result, and returns its cells.

        prepare: fills a folder, returns what the steps hold; work_as: trains as a contender; more: of the result.
        """
        if arguments.work:
            name, folder = arguments.work[0], Path(arguments.work[1])
            result = work_as(name, folder, Work.read(folder))
            (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
            raise SystemExit
        steps = WARM_UP + arguments.steps
        work = Work(
            shape,
            row_tokens=arguments.row_tokens,
            steps=steps,
            threads=arguments.threads,
            keeps_freed_memory=arguments.keep_freed_memory,
        )
        with tempfile.TemporaryDirectory(prefix="finetune-bench-") as name:
            result = self._measure(arguments, Path(name), work, prepare)
        result = {**result, **more(result)}
        for line in lines(result):
            print(line)
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        return result["cells"]

    def _measure(
        self, arguments: argparse.Namespace, folder: Path, work: Work, prepare: Callable[[Path, Work], Cell]
    ) -> Cell:
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ["FINETUNE_CACHE"] = str(folder / "cache")  # as in the contenders' processes
        steps = prepare(folder, work)
        (folder / "steps.json").write_text(json.dumps(steps), encoding="utf-8")
        names = [name for name in arguments.only if "trl" not in name or contenders.missing("trl", "cpu") is None]
        cells: list[Cell] = []
        for number in range(arguments.rounds):
            for name in names if number % 2 == 0 else reversed(names):
                work.write(folder)
                contenders.python([str(self.script), "--work", name, str(folder)], folder, work, name)
                cell = json.loads((folder / "result.json").read_text(encoding="utf-8"))
                cell = {self.unit: steps[self.unit], **cell, "round": number, "contender": name}
                cells.append({**cell, **self._figures(cell)})
                rate = f"{cells[-1][self.figures[0]]:.{self.digits}f} {self.unit}/s"
                print(f"round {number + 1}, {self.labels[name]}: {rate}", file=sys.stderr)
        return {
            "command": f"python benchmarks/{self.script.name} " + " ".join(sys.argv[1:]),
            "device": f"CPU, {os.cpu_count()} cores",
            "python": platform.python_version(),
            "versions": contenders.versions(),
            "work": asdict(replace(work, overrides=())),
            "steps": steps,
            "contenders": {name: self._summary(name, cells) for name in names},
            "cells": cells,
        }

    def _figures(self, cell: Cell) -> Cell:
        """Over the measured steps; `step_s[i]` is the period of step i + 2, counted from 1."""
        measured = range(WARM_UP - 1, len(cell["step_s"]))
        count = sum(cell[self.unit][i + 1] for i in measured)
        values = (
            count / sum(cell["step_s"][i] for i in measured),
            count / sum(cell["step_cpu_s"][i] for i in measured),
            cell["peak_rss"] / GB,
            (cell["peak_rss"] - cell["loaded_rss"]) / GB,
        )
        return dict(zip(self.figures, values, strict=True))

    def _summary(self, name: str, cells: list[Cell]) -> Cell:
        mine, over = ({c["round"]: c for c in cells if c["contender"] == who} for who in (name, self.over))
        rounds = sorted(mine.keys() & over.keys())
        ratios = {key: spread([over[i][key] / mine[i][key] for i in rounds]) for key in self.figures if rounds}
        return {
            **{key: statistics.median(cell[key] for cell in mine.values()) for key in self.figures},
            self.over_key: ratios,
        }

    def table(self, result: Cell) -> list[str]:
        """Returns a markdown table."""
        over, cost = self.over_key.partition("_")[0], "processor time | peak"
        shown = [
            f"| | {self.unit}/s | by {cost} GB | above loaded | {over}/it: speed | {cost} | above |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for name, one in result["contenders"].items():
            rates = [f"{one[key]:.{self.digits}f}" for key in self.figures[:2]]
            sizes = [f"{one[key]:.2f}" for key in self.figures[2:]]
            ratios = [ratio(one[self.over_key].get(key)) for key in self.figures]
            shown.append(f"| {' | '.join([self.labels[name], *rates, *sizes, *ratios])} |")
        return shown


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def ratio(one: dict[str, float] | None) -> str:
    return "-" if one is None else f"{one['median']:.2f} ({one['lowest']:.2f} to {one['highest']:.2f})"
