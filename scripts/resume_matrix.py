"""Stop on one backend, go on on any other: every pair (saved under, resumed under), against the run never stopped.

    python scripts/resume_matrix.py                    # 7 configs on 7 and three sizes, full and LoRA
    python scripts/resume_matrix.py --only ddp zero3   # these configs only

Each config is launched twice: once to save at step 10 of 20, once to go on from everybody's checkpoint. The losses of
the steps after the stop and the final weights must be those of one process that ran through. Exit status 1 where they
are not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import parity

CONFIGS = (
    ("single", 1),
    ("ddp", 2),
    ("fsdp2", 2),
    ("fsdp2_offload", 2),
    ("zero2", 2),
    ("zero3", 2),
    ("zero3_offload", 2),
)
# Sizes that differ from the one saved under; resumed under only.
OTHER_SIZES = (("ddp", 4), ("fsdp2", 4), ("zero3", 4))
CASES = tuple(case for case in parity.CASES if case.name in ("full", "lora dropout rslora"))
STOP = parity.STEPS // 2


def saved_name(config: str, processes: int, case: parity.Case) -> str:
    return parity.run_name(config, processes, case.name)


def resumed_name(saved: tuple[str, int], resumed: tuple[str, int], case: parity.Case) -> str:
    return f"{saved_name(*saved, case)}-on-{resumed[0]}-{resumed[1]}"


def save(folder: Path, config: str, processes: int) -> None:
    """Run through, with a checkpoint in the middle."""
    extra = [f"checkpoint.every_steps={STOP}", "checkpoint.keep=2"]
    parity.launch_jobs(
        folder, config, processes, [[*parity.job(folder, config, processes, case), *extra] for case in CASES]
    )


def resume(folder: Path, saved: list[tuple[str, int]], config: str, processes: int) -> None:
    """Go on from the middle of each saved run: a copy of it whose later checkpoint is gone."""
    jobs = []
    for source in saved:
        for case in CASES:
            name = resumed_name(source, (config, processes), case)
            original, copy = (folder / "runs" / n for n in (saved_name(*source, case), name))
            shutil.copytree(original, copy)
            shutil.rmtree(copy / "checkpoints" / f"step-{parity.STEPS:08d}")
            shutil.rmtree(copy / "model")
            jobs.append([*parity.job(folder, config, processes, case), f"run.name={name}"])
    parity.launch_jobs(folder, config, processes, jobs)


def compare(folder: Path, saved: tuple[str, int], resumed: tuple[str, int], case: parity.Case) -> dict[str, Any]:
    """Largest relative difference of a loss after the stop, and of a weight at the end."""
    reference, other = (
        folder / "runs" / n for n in (saved_name("single", 1, case), resumed_name(saved, resumed, case))
    )
    ours, theirs = parity.train_lines(reference), parity.train_lines(other)
    steps = [line["step"] for line in theirs]
    after = list(zip(ours, theirs, strict=True))[STOP:] if len(ours) == len(theirs) else []
    loss = max((abs(b["loss"] - a["loss"]) / a["loss"] for a, b in after), default=float("inf"))
    parameter = parity.parameter_difference(reference / "model", other / "model")
    counted = bool(after) and all(a["tokens"] == b["tokens"] for a, b in after) and steps == [*range(1, len(ours) + 1)]
    return {
        "saved_under": f"{saved[0]} x{saved[1]}",
        "resumed_under": f"{resumed[0]} x{resumed[1]}",
        "case": case.name,
        "loss": loss,
        "parameter": parameter,
        "passed": loss <= case.loss and parameter <= case.parameter and counted,
    }


def show(cells: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = list(dict.fromkeys(str(cell["resumed_under"]) for cell in cells))
    for case in CASES:
        table = Table(
            "saved under", *columns, title=f"{case.name}: largest relative difference of a loss after resuming"
        )
        for saved in dict.fromkeys(str(cell["saved_under"]) for cell in cells):
            row = {str(c["resumed_under"]): c for c in cells if c["saved_under"] == saved and c["case"] == case.name}
            marks = [f"{row[c]['loss']:.0e}" + ("" if row[c]["passed"] else " [red]FAILED[/red]") for c in columns]
            table.add_row(saved, *marks)
        Console(width=150).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="names of configs; single is always saved under")
    parser.add_argument("--json", type=Path, help="write the matrix there")
    parser.add_argument("--folder", type=Path, help="work there and keep everything")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="finetune-resume-"))
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.update(FINETUNE_CACHE=str(folder / "cache"), HF_HUB_OFFLINE="1")
    parity.prepare(folder)
    wanted = [pair for pair in CONFIGS if not arguments.only or pair[0] in (*arguments.only, "single")]
    for config, processes in wanted:
        save(folder, config, processes)
    cells = []
    for config, processes in (*wanted, *(p for p in OTHER_SIZES if not arguments.only or p[0] in arguments.only)):
        resume(folder, wanted, config, processes)
        cells += [compare(folder, saved, (config, processes), case) for saved in wanted for case in CASES]
    show(cells)
    if arguments.json:
        parity.write_json(arguments.json, "scripts/resume_matrix.py", cells)
    if not arguments.folder:
        shutil.rmtree(folder)
    return 0 if all(cell["passed"] for cell in cells) else 1


if __name__ == "__main__":
    raise SystemExit(main())
