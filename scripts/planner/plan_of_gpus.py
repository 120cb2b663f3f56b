"""The plan beside what an H100 and an H200 measured with `python benchmarks/gpu.py` (docs/proofs/gpu.md); minutes.

    python scripts/planner/plan_of_gpus.py

It plans the benchmark's recipes on its rows, as they are, without weights. liger-kernel was installed on both machines:
without it here (any machine with triton), element-wise operators are planned as separate ones, which take longer.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

sys.path.append(str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import workload
from gpu import CELLS

from finetune.features import load_recipe
from finetune.models.head.chunked import liger_problem
from finetune.plan.command import PlanOptions, plan
from finetune.plan.search import Choice, evaluate, launches
from finetune.plan.speed import table_speeds

STEPS, ROW_TOKENS = 17, 4096


@dataclass(frozen=True)
class Measured:
    cell: str
    device: str
    tokens_per_s: int
    peak_gib: float  # of tensors


MEASURED = (
    Measured("8b-lora", "H100-80", 12_899, 32.9),
    Measured("8b-lora", "H200-141", 15_187, 32.9),
    Measured("8b-lora-rows", "H100-80", 12_201, 50.0),
    Measured("8b-qlora", "H100-80", 10_720, 9.3),
    Measured("1b-full", "H100-80", 65_537, 36.1),
)


def recipe_of(cell: str, folder: Path) -> Path:
    """Writes tokenizer, config, rows and recipe of a cell; returns the recipe."""
    shape, settings = CELLS[cell]
    work = workload.Work(shape=workload.SHAPES[shape], steps=STEPS, row_tokens=ROW_TOKENS, device="cpu", **settings)
    workload.save_padded_tokenizer(folder / "model", work.shape["vocab_size"])
    AutoConfig.for_model(**{"model_type": "llama", **work.shape}).save_pretrained(folder / "model")
    count = 64 + STEPS * work.rows_per_step * ROW_TOKENS // 150
    rows = workload.random_documents(count, work.shape["vocab_size"], ROW_TOKENS, work.documents)
    workload.write_rows(folder / "rows.jsonl", rows)
    return workload.write_recipe(folder, work, "tokens")


def planned(one: Measured, folder: Path) -> Choice:
    """Returns the plan of the recipe as it is: `plan` itself would offer other values of its keys as well."""
    options = PlanOptions((f"1x{one.device}",))
    request, choices, _ = plan(recipe_of(one.cell, folder), [], options, load_recipe)
    machines = choices[0].machines
    single = next(launch for launch in launches(machines) if launch.where == "single")
    return evaluate(request, single, machines, table_speeds(request.recipe, machines, request.hardware), {})


def main() -> None:
    console, table = Console(width=110), Table("cell", "on", "tokens/s", "plan", "", "GiB of tensors", "plan", "")
    if problem := liger_problem("cuda"):
        console.print(f"note: {problem}")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FINETUNE_CACHE"] = f"{folder}/cache"
        for i, one in enumerate(MEASURED):
            choice = planned(one, Path(folder, str(i)))
            assert choice.tokens_per_s is not None
            gib = choice.memory.tensors / 2**30
            table.add_row(
                *(one.cell, one.device, f"{one.tokens_per_s:,}", f"{choice.tokens_per_s:,.0f}"),
                f"{choice.tokens_per_s / one.tokens_per_s - 1:+.1%}",
                *(f"{one.peak_gib:.1f}", f"{gib:.1f}", f"{gib / one.peak_gib - 1:+.1%}"),
            )
    console.print(table)


if __name__ == "__main__":
    main()
