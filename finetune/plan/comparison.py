"""Predicted and measured memory and time of a run: both are in its plan.json, and `plan --report` compares them.

    predicted  {"memory_bytes": {"weights": ...}, "phases_bytes": {"forward": ...}, "step_s": 0.4, "tokens_per_s": 9000,
               "parts_s": {"products": ...}, "speeds": "shipped table ...", "level": {"compute": 1.0, ...}, "notes": []}
    measured   {"steps": 99, "memory_bytes": {"weights": ...}, "step_s": 0.4, "tokens_per_s": 9000,
               "parts_s": {"forward": ...}}

On a CPU a run measures the peak of its process, which holds more than tensors: only its state is compared.
"""

from __future__ import annotations

import contextlib
import copy
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from finetune.data.dataset import on_disk
from finetune.data.media.family_table import file_tokens
from finetune.engine.base import Engine
from finetune.engine.costs.common import different_ranks
from finetune.engine.hardware import CPU, GIB, read_hardware
from finetune.engine.launch import Launch
from finetune.errors import UserError
from finetune.models.attention import Kernels
from finetune.models.base_model import Base
from finetune.models.trials import FAILURES, quietly
from finetune.plan.finished_runs import device_key, phases_of_time, read_plan, speeds_here
from finetune.plan.lengths import Lengths, RowFacts, facts_of, widest
from finetune.plan.memory import Place, estimate_memory
from finetune.plan.search import heaviest
from finetune.plan.shapes import costs_at, shapes_of
from finetune.plan.speed import Job, Shape, processor_speeds
from finetune.plan.tables import Machines, this_machine
from finetune.recipe import Recipe, load_recipe
from finetune.tracking.metrics import read_metrics
from finetune.training.prepare import Prepared
from finetune.training.run_plan import FEW_STEPS, STATE, measure_run, processor, run_length

_FAILURES = (UserError, *FAILURES, OSError)


@dataclass(frozen=True)
class Launched:
    """A run on its launch: all that a prediction takes."""

    recipe: Recipe
    config: PretrainedConfig
    launch: Launch
    micro_batches: int
    rows: RowFacts
    device: str  # as in plan.json: torch's name, or cpu
    per_machine: int  # processes

    def predict(self, with_time: bool) -> dict[str, Any]:
        """Returns `predicted` of plan.json. Its `notes` name the parts that cannot be calculated."""
        predicted: dict[str, Any] = {"notes": [], "rows": self.rows.source}
        parts: list[tuple[str, Callable[[], dict[str, Any]]]] = [("memory", self.memory)]
        if with_time:
            parts.append(("time", self.time))
        else:
            predicted["notes"].append("time: not calculated for a few steps on processors; `plan --report` does")
        for name, part in parts:
            try:
                with quietly():  # messages about the model come when it is loaded
                    predicted |= part()
            except _FAILURES as error:
                predicted["notes"].append(f"{name}: {_reason(error)}")
        return predicted

    def memory(self) -> dict[str, Any]:
        """Returns the bytes of the fullest rank."""
        if self.device == CPU:
            costs = costs_at(self.recipe, self.config, self.launch, CPU)
            states = [costs.state(rank) for rank in different_ranks(self.launch.parallelism)]
            kept = max(states, key=lambda state: state.device_bytes).persistent
            return {"memory_bytes": {name: kept[part] for name, part in STATE.items()}}
        place = Place(self.launch, self.per_machine, "cuda", _capability(), _gib())
        batch = heaviest(self.recipe.batch, self.rows)
        memory = estimate_memory(self.recipe, self.config, place, batch, self.micro_batches)
        of_state = {name: memory.persistent[part] for name, part in STATE.items()}
        return {"memory_bytes": {**of_state, "peak": memory.tensors}, "phases_bytes": memory.phases}

    def rows_that_fit(self, free_bytes: int) -> int:
        """Returns how many rows of a micro-batch are expected to fit, by a line through the peaks of one and two."""
        place = Place(self.launch, self.per_machine, "cuda", _capability(), _gib())
        peaks = []
        for count in (1, 2):
            batch = self.recipe.batch.model_copy(update={"rows_per_device": count})
            recipe = self.recipe.model_copy(update={"batch": batch})
            heavy = heaviest(recipe.batch, self.rows)
            peaks.append(estimate_memory(recipe, self.config, place, heavy, self.micro_batches).tensors)
        one, two = peaks
        room = free_bytes * (1 - read_hardware().reserve.margin) - one
        return 1 + max(0, int(room // max(1, two - one)))

    def time(self) -> dict[str, Any]:
        """Returns the seconds of a step. Raises UserError for a device without speeds."""
        recipe, hardware = self.recipe, read_hardware()
        plan = {"device": self.device, "processor": processor()}
        if (key := device_key(plan, hardware)) is None:
            raise UserError(f"no device {self.device} in hardware.yaml. Fix: add it there (docs/reference/plan.md)")
        device = this_machine() if key == CPU else hardware.devices[key]
        machines = Machines(device, key, self.per_machine, self.launch.processes // self.per_machine)
        speeds = speeds_here(recipe, machines, hardware, Path(recipe.run.dir, recipe.run.name))
        if speeds is None and key == CPU:
            speeds = processor_speeds(hardware)
        if speeds is None:
            precision = recipe.train.precision
            raise UserError(
                f"{self.device} has no peak in {precision} in hardware.yaml. Fix: add it there (docs/reference/plan.md)"
            )
        shapes, recomputes = shapes_of(recipe, self.config), recipe.train.activation_checkpointing is True
        shape = Shape.of(shapes.weights, recipe, self.config, key == CPU, recomputes)
        place = (self.launch, machines, hardware, self.rows, heaviest(recipe.batch, self.rows))
        step = Job(recipe, self.config, shape, *place, speeds, self.micro_batches).time()
        return {
            "step_s": step.seconds,
            "tokens_per_s": self.rows.tokens_per_row * recipe.batch.rows / step.seconds,
            "parts_s": step.parts,
            "speeds": step.source,
            "level": {"compute": speeds.level.compute, "optimizer": speeds.level.optimizer},
        }


def _capability() -> tuple[int, int] | None:
    """Returns the capability of this machine's device, None on AMD; Hopper's without a device."""
    return Kernels.here().capability if torch.cuda.is_available() else (9, 0)


def _gib() -> float | None:
    """Returns the memory of this machine's device; None without one."""
    return torch.cuda.get_device_properties(0).total_memory / 2**30 if torch.cuda.is_available() else None


def predict_run(prepared: Prepared, engine: Engine) -> dict[str, Any]:
    """Returns `predicted` of a run's plan.json. Raises nothing: the other ranks would not know."""
    recipe, config, training = prepared.recipe, prepared.base.config, prepared.training
    try:
        rows = widest(recipe, "a stream", config)
        if training.size(recipe.data.max_length):
            data = on_disk(training)
            tokens = file_tokens(config, recipe.data.media_kinds)
            rows = facts_of(data.examples, data.rows, "the data of the run", len(data.rows), tokens)
        if recipe.rollouts is not None:
            rows = Lengths("the data of the run", on_disk(training).examples, 1.0).rows(recipe, config)
        on_gpu = engine.device.type == "cuda"
        device = torch.cuda.get_device_name(engine.device) if on_gpu else engine.device.type
        place = (engine.launch, prepared.micro_batches, rows, device, engine.local_processes)
        run = Launched(recipe, copy.deepcopy(config), *place)
        predicted = run.predict(on_gpu or run_length(recipe.train, recipe.batch.rows, rows.rows)[0] >= FEW_STEPS)
    except _FAILURES as error:
        return {"notes": [f"nothing is predicted: {_reason(error)}"]}
    if recipe.batch.rows_per_device == "auto" and predicted.get("memory_bytes", {}).pop("peak", None):
        del predicted["phases_bytes"]
        predicted["notes"].append("peak: batch.rows_per_device is auto, measured later; `plan --report` calculates it")
        with contextlib.suppress(*_FAILURES), quietly():
            predicted["rows_per_device"] = run.rows_that_fit(torch.cuda.mem_get_info(engine.device)[0])
    return predicted


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] if isinstance(error, UserError) else f"{error!r:.200}"


# --- plan --report


@dataclass(frozen=True)
class Comparison:
    run: str
    where: str
    what: str
    predicted: float
    measured: float
    unit: str  # GiB, s, tokens/s
    whole: float  # the error is a share of it: the measured number, or the measured step for its parts

    @property
    def error(self) -> float:
        """Returns the share by which the prediction is too high."""
        return (self.predicted - self.measured) / self.whole if self.whole else float(self.predicted > 0)


def compare_runs(folders: Iterable[Path]) -> list[Comparison]:
    """Returns the comparisons of each run; among several folders, those without plan.json are left out (`runs/*`).
    Raises UserError for a folder that is not a run with steps."""
    folders = list(folders)
    runs = [folder for folder in folders if (folder / "plan.json").exists()] or folders
    return [comparison for folder in runs for comparison in compare_run(folder)]


def compare_run(folder: Path) -> list[Comparison]:
    plan = read_plan(folder / "plan.json")
    try:
        measured = plan.get("measured") or measure_run(read_metrics(folder / "metrics.jsonl").lines)
    except OSError as error:
        raise UserError(
            f"{folder}: not the folder of a run: {error}. Fix: give a run directory, such as runs/quickstart-full"
        ) from None
    if "launch" not in plan or measured is None:
        raise UserError(f"{folder}: not the folder of a run with steps, or an older version's. Fix: give another run")
    predicted = plan.get("predicted") or {}
    whole = "step_s" in predicted and ("peak" in predicted.get("memory_bytes", {}) or plan["device"] == CPU)
    if not whole:
        # plan.json has only the mean of the run's lengths.
        recipe, of_launch = load_recipe(folder / "recipe.yaml", []), plan["launch"]
        if plan["rows_per_device"]:
            batch = recipe.batch.model_copy(update={"rows_per_device": plan["rows_per_device"]})
            recipe = recipe.model_copy(update={"batch": batch})
        launch = Launch(of_launch["kind"], plan["world_size"], None, of_launch["config"])
        config = Base.of(recipe).config
        counts = plan["rows_per_epoch"], plan["examples"], plan["tokens_per_epoch"], plan["supervised_tokens_per_epoch"]
        if not all(counts) or recipe.rollouts is not None:
            rows = widest(
                recipe, "plan.json has the lengths of rows, not of prompts" if all(counts) else "a stream", config
            )
        else:
            in_epoch, examples, tokens, targets = counts
            full, share = recipe.data.max_length, targets / tokens
            documents = (round(tokens / examples),) * max(1, round(examples / in_epoch))
            of_row = tokens / in_epoch, targets / in_epoch
            rows = RowFacts("plan.json", (documents,), *of_row, (full,), max(1, int((full - 1) * share)), in_epoch)
        again = Launched(
            recipe, config, launch, plan["micro_batches"], rows, plan["device"], of_launch["per_host"]
        ).predict(with_time=True)
        sizes = {**again.get("memory_bytes", {}), **predicted.get("memory_bytes", {})}
        predicted = {**again, **predicted, "memory_bytes": sizes}
    comparisons: list[Comparison] = []

    def add(what: str, formula: float, took: float, unit: str, whole: float | None = None) -> None:
        whole = took if whole is None else whole
        comparisons.append(Comparison(folder.name, plan["where"], what, formula, took, unit, whole))

    sizes: dict[str, int] = predicted.get("memory_bytes", {})
    of_run: dict[str, int] = measured["memory_bytes"]
    for name in (name for name in sizes if name in of_run):
        add(STATE.get(name, name), sizes[name] / GIB, of_run[name] / GIB, "GiB")
    if "step_s" in predicted:
        add("step", predicted["step_s"], measured["step_s"], "s")
        add("speed", predicted["tokens_per_s"], measured["tokens_per_s"], "tokens/s")
        for name, (formula, took) in phases_of_time(predicted["parts_s"], measured["parts_s"]).items():
            add(f"  {name}", formula, took, "s", measured["step_s"])
    return comparisons


def table(comparisons: Sequence[Comparison]) -> str:
    """Returns lines of text: memory and times of each run, then the errors of all runs."""
    width = max((len(one.run) for one in comparisons), default=3)
    lines = [f"{'run':{width}}  {'config':15} {'what':16} {'predicted':>12} {'measured':>12}          {'error':>8}"]
    lines += [
        f"{one.run:{width}}  {one.where:15} {one.what:16} {one.predicted:>12,.3f} {one.measured:>12,.3f} {one.unit:8} "
        f"{one.error:>+8.1%}{' of the step' if one.whole != one.measured else ''}"
        for one in comparisons
    ]
    for what in dict.fromkeys(one.what for one in comparisons):
        errors = [abs(one.error) for one in comparisons if one.what == what]
        summary = f"median error {statistics.median(errors):.1%}, worst {max(errors):.1%}, {len(errors)} runs"
        lines += [f"{what.strip()}: {summary}"] if len(errors) > 1 else []
    return "\n".join(lines)


def as_json(comparisons: Sequence[Comparison]) -> str:
    """Returns a list of objects, with numbers in their `unit`."""
    names = ("run", "where", "predicted", "measured", "unit", "error")
    objects = [{"what": one.what.strip(), **{name: getattr(one, name) for name in names}} for one in comparisons]
    return json.dumps(objects, indent=1)
