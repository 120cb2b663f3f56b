"""The plan compared with what others have published, speed and memory: docs/proofs/published.md.

    python scripts/planner/published_runs.py --write     # the page; without it, it is printed
    python scripts/planner/published_runs.py --fit       # error of each family by its share of the peak of products

The runs are in published.yaml, with sources. Other programs were measured, with other kernels, so an error is theirs
and the formulas' together.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

from finetune.engine.hardware import GIB, shipped_hardware
from finetune.engine.launch import Launch
from finetune.features import load_recipe
from finetune.models.base_model import Base
from finetune.plan.command import shapes_of
from finetune.plan.lengths import widest
from finetune.plan.memory import HeaviestBatch, Place, estimate_memory
from finetune.plan.search import launches
from finetune.plan.speed import Job, table_speeds
from finetune.plan.tables import Machines, parse_machines
from finetune.recipe import Recipe
from finetune.startup import quiet_libraries

ROOT = Path(__file__).resolve().parents[2]
DATA, PAGE = Path(__file__).with_name("published.yaml"), ROOT / "docs" / "proofs" / "published.md"


@dataclass(frozen=True)
class Planned:
    """A published run and the plan of it."""

    run: dict[str, Any]
    job: Job
    gib: float  # tensors at the peak; 0 if none are published

    @property
    def family(self) -> str:
        return shipped_hardware().family(self.job.machines.key)

    def tokens_per_s(self, products: float | None = None) -> float:
        """Returns the rate of one device. products: another share of the device's peak."""
        job, run = self.job, self.run
        if products is not None:
            shipped = job.hardware.shares(job.machines.key).products
            job = replace(job, speeds=replace(job.speeds, products=job.speeds.products / shipped * products))
        tokens = run["rows"] * run["length"] * run["micro_batches"] * job.launch.parallelism.data
        return tokens / job.time().seconds / job.machines.count

    def error(self, products: float | None = None) -> float:
        return self.tokens_per_s(products) / self.run["tokens_per_s"] - 1


@functools.cache
def published() -> dict[str, Any]:
    return yaml.safe_load(DATA.read_text(encoding="utf-8"))


def launch_of(run: dict[str, Any], machines: Machines) -> Launch:
    size = run.get("size")
    found = [one for one in launches(machines) if one.where == run["config"]]
    return next(one for one in found if size is None or size in one.parallelism.sizes)


def recipe_of(run: dict[str, Any], folder: Path, data: int) -> Recipe:
    """data: ranks that have rows of their own."""
    model = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 131072}
    (folder / "config.json").write_text(json.dumps(model | published()["models"][run["model"]]), encoding="utf-8")
    precision = "bf16_true" if run.get("pure") else "bf16"
    values: dict[str, Any] = {
        "run": {"name": "published", "dir": str(folder)},
        "model": {"name": str(folder), "kernels": "auto" if run.get("fused") else "plain"},
        "mode": run["mode"],
        "data": {"train": [{"path": "rows.jsonl", "format": "messages"}], "max_length": run["length"]},
        "batch": {"rows": run["rows"] * run["micro_batches"] * data, "rows_per_device": run["rows"]},
        "optimizer": {"lr": 1e-4, "name": run.get("optimizer", "adamw")},
        "train": {
            "max_steps": 6,
            "precision": precision,
            "activation_checkpointing": run["checkpointing"],
            "compile": run.get("fused", False),
        },
    }
    if run.get("optimizer"):
        values["optimizer"] |= {"in_backward": True, "max_grad_norm": None}
    if run["mode"] != "full":
        values["lora"] = {"rank": run["rank"], "alpha": 16, "targets": "all-linear"}
    if run["mode"] == "qlora":
        values["quantization"] = {"type": "nf4"}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return load_recipe(folder / "recipe.yaml", [])


def planned(run: dict[str, Any]) -> Planned:
    hardware = shipped_hardware()
    machines = parse_machines(run["devices"], run.get("nodes", 1), hardware)
    launch = launch_of(run, machines)
    with tempfile.TemporaryDirectory() as folder:
        recipe = recipe_of(run, Path(folder), launch.parallelism.data)
        config = Base.of(recipe).config
        rows, batch = widest(recipe, "published", config), HeaviestBatch.of_rows(run["rows"], run["length"])
        speeds = table_speeds(recipe, machines, hardware)
        assert speeds is not None
        shape = shapes_of(recipe, config, on_cpu=False)[recipe.train.activation_checkpointing is True]
        times = run["micro_batches"]
        job = Job(recipe, config, shape, launch, machines, hardware, rows, batch, speeds, times)
        gib = 0.0
        if "memory_gib" in run:
            per_host, card = min(launch.processes, machines.per_machine), machines.device
            place = Place(launch, per_host, "cuda", card.kernels, card.gib)
            gib = estimate_memory(recipe, config, place, batch, times).tensors / GIB
        job.time()  # while the config is there; its parts are kept
    return Planned(run, job, gib)


@functools.cache
def all_planned() -> tuple[Planned, ...]:
    return tuple(map(planned, published()["runs"]))


def page(rows: tuple[Planned, ...]) -> str:
    compared = [one for one in rows if one.run["use"] != "excluded"]
    errors = [abs(one.error()) for one in compared]
    held = [abs(one.error()) for one in compared if one.run["use"] == "held out"]
    lines = [
        "# The plan compared with published runs",
        "",
        "Made by `python scripts/planner/published_runs.py --write` from the runs in `scripts/planner/published.yaml`.",
        "Other programs were measured, with other kernels; none is a run of this project.",
        "",
        f"Tokens/s of {len(compared)} runs: {statistics.median(errors):.0%} off in the median,"
        f" {max(errors):.0%} at worst; the {len(held)} held out {statistics.median(held):.0%} and {max(held):.0%}.",
        "A share of the peak of products for each family of cards was set by the rows marked `fit`, one number each.",
        "Errors of all rows were seen before those marked `fit` were chosen, so `held out` is no blind test.",
        "",
        "| run | devices, config | a device: rows x tokens | recomputation | published tokens/s | plan | error | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    sources = published()["sources"]
    for one in rows:
        run = one.run
        on = f"{run['nodes']} x {run['devices']}" if run.get("nodes") else run["devices"]
        kinds = {True: "full", False: "none"}
        times = f"{run['micro_batches']} x " if run["micro_batches"] > 1 else ""
        cells = [
            f"[{run['name']}]({sources[run['source']]})",
            f"{on}, {run['config']}",
            f"{times}{run['rows']} x {run['length']:,}",
            kinds.get(run["checkpointing"], run["checkpointing"]),
            f"{run['tokens_per_s']:,}",
            f"{one.tokens_per_s():,.0f}",
            f"{one.error():+.0%}",
            run["use"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "Why a run is excluded, or further off than 30 %:", ""]
    lines += [
        f"- {one.run['name']}, {one.run['devices']}: {one.run['reason']}." for one in rows if one.run.get("reason")
    ]
    lines += ["", "## Memory", "", "GiB of tensors at the peak.", ""]
    lines += ["| run | device | published | plan | error |", "| --- | --- | --- | --- | --- |"]
    for one in rows:
        if (gib := one.run.get("memory_gib")) is not None:
            lines.append(
                f"| {one.run['name']} | {one.run['devices']} | {gib} | {one.gib:.1f} | {one.gib / gib - 1:+.0%} |"
            )
    return "\n".join(lines) + "\n"


def fits(rows: tuple[Planned, ...]) -> str:
    """Returns the error of the rows that fit, for each family and share of products."""
    lines = []
    for family in dict.fromkeys(one.family for one in rows):
        mine = [one for one in rows if one.family == family and one.run["use"] != "excluded"]
        for share in (n / 100 for n in range(34, 92, 2)):
            errors = [f"{one.error(share):+.0%}{'*' if one.run['use'] == 'fit' else ''}" for one in mine]
            lines.append(f"{family} {share:.2f}: {' '.join(errors)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--fit", action="store_true")
    quiet_libraries()
    arguments, rows = parser.parse_args(), all_planned()
    if arguments.fit:
        print(fits(rows))
    elif arguments.write:
        PAGE.write_text(page(rows), encoding="utf-8")
    else:
        print(page(rows))


if __name__ == "__main__":
    main()
