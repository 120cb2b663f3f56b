"""How long threads of GNU's OpenMP should spin: the quickstart's first steps, alone and with a program that never
sleeps.

    ./scripts/quickstart.sh            # once: makes the rows
    python benchmarks/busy.py          # as the command decides, and with GOMP_SPINCOUNT=300000, libgomp's default
    python benchmarks/busy.py --counts 1000 10000 300000 --rounds 1

Each row of the table is the median tokens/s of one run; runs are alternated. For a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
STEPS, WARM_UP = 25, 2
WITHOUT = ("evaluate.at_start=false", "evaluate.every_steps=1000", "evaluate.exact_match=0", "evaluate.generate=0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", help="values of GOMP_SPINCOUNT, in place of the two above")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    kinds: list[int | None] = arguments.counts or [None, 300_000]
    table = Table("GOMP_SPINCOUNT", "beside it", "tokens/s")
    for _ in range(arguments.rounds):
        for is_busy in (False, True):
            program = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if is_busy else None
            try:
                for count in kinds:
                    name = "as the command decides" if count is None else f"{count:,}"
                    table.add_row(name, "a busy program" if is_busy else "nothing", f"{tokens_per_s(count):,.0f}")
            finally:
                if program is not None:
                    program.kill()
                    program.wait()
    Console().print(table)


def tokens_per_s(count: int | None) -> float:
    """Returns the median of a short run of recipes/quickstart/full.yaml."""
    waits = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")
    environment = {name: value for name, value in os.environ.items() if name not in waits}
    environment |= {} if count is None else {"GOMP_SPINCOUNT": str(count)}
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", "recipes/quickstart/full.yaml", f"train.max_steps={STEPS}", f"run.dir={folder}", *WITHOUT]
        command = [sys.executable, "-m", "finetune", *words, "run.name=busy"]
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        lines = map(json.loads, Path(folder, "busy", "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        return statistics.median([line["tokens_per_s"] for line in lines if "loss" in line][WARM_UP:])


if __name__ == "__main__":
    main()
