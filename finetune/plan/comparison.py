"""What a run is predicted to take, next to what it takes: both are in its plan.json, and `plan --report` compares them.

    predicted  {"memory_bytes": {"weights": ...}, "phases_bytes": {"forward": ...}, "step_s": 0.4, "tokens_per_s": 9000,
               "parts_s": {"products": ...}, "speeds": "shipped table ...", "level": {"compute": 1.0, ...}, "notes": []}
    measured   {"steps": 99, "memory_bytes": {"weights": ...}, "step_s": 0.4, "tokens_per_s": 9000,
               "parts_s": {"forward": ...}}

On a CPU the peak that a run measures is that of its process, which is not of tensors: only its state is compared.
"""

from __future__ import annotations

import contextlib
import copy
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PretrainedConfig

from finetune.data.dataset import on_disk
from finetune.data.row_source import RowSource
from finetune.engine.base import Engine
from finetune.engine.costs.common import different_ranks
from finetune.engine.hardware import CPU, GIB, read_hardware
from finetune.engine.launch import Launch
from finetune.errors import UserError
from finetune.models.config import training_config
from finetune.models.trials import FAILURES, quietly
from finetune.plan.finished_runs import device_key, phases_of_time, read_plan, speeds_here
from finetune.plan.lengths import RowFacts, facts_of, widest
from finetune.plan.memory import Place, estimate_memory
from finetune.plan.search import heaviest
from finetune.plan.shapes import costs_at, shapes_of
from finetune.plan.speed import Job, Shape, processor_speeds
from finetune.plan.tables import Machines, this_machine
from finetune.recipe import Recipe, load_recipe
from finetune.tracking.metrics import read_steps
from finetune.training.prepare import Prepared
from finetune.training.run_plan import FEW_STEPS, STATE, measure_run, processor, run_length

_FAILURES = (UserError, *FAILURES, OSError)


@dataclass(frozen=True)
class Launched:
    """A run whose place is known: all that a prediction takes."""

    recipe: Recipe
    config: PretrainedConfig
    launch: Launch
    micro_batches: int
    rows: RowFacts
    device: str  # as plan.json has it: torch's name, or cpu
    per_machine: int  # processes

    def predict(self, with_time: bool) -> dict[str, Any]:
        """Returns `predicted` of plan.json. What cannot be calculated is a line of its `notes`."""
        found: dict[str, Any] = {"notes": [], "rows": self.rows.source}
        steps: list[tuple[str, Callable[[], dict[str, Any]]]] = [("memory", self._memory)]
        if with_time:
            steps.append(("time", self._time))
        else:
            found["notes"].append("time: not calculated for a few steps on processors; `plan --report` does")
        for name, step in steps:
            try:
                with quietly():  # what there is to say of the model comes when it is loaded
                    found |= step()
            except _FAILURES as error:
                found["notes"].append(f"{name}: {_said(error)}")
        return found

    def _memory(self) -> dict[str, Any]:
        """Of the fullest rank."""
        if self.device == CPU:
            ranks = different_ranks(self.launch.parallelism)
            costs = costs_at(self.recipe, self.config, self.launch, CPU)
            states = [costs.state(rank) for rank in ranks]
            kept = max(states, key=lambda state: state.device_bytes).persistent
            return {"memory_bytes": {name: kept[of] for name, of in STATE.items()}}
        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
        place = Place(self.launch, self.per_machine, "cuda", capability)
        batch = heaviest(self.recipe, self.rows)
        memory = estimate_memory(self.recipe, self.config, place, batch, self.micro_batches)
        of_state = {name: memory.persistent[of] for name, of in STATE.items()}
        return {"memory_bytes": {**of_state, "peak": memory.tensors}, "phases_bytes": memory.phases}

    def rows_that_fit(self, free_bytes: int) -> int:
        """Returns how many rows of a micro-batch are expected to fit, by a line through the peaks of one and two."""
        place = Place(self.launch, self.per_machine, "cuda", torch.cuda.get_device_capability())
        peaks = []
        for count in (1, 2):
            batch = self.recipe.batch.model_copy(update={"rows_per_device": count})
            recipe = self.recipe.model_copy(update={"batch": batch})
            heavy = heaviest(recipe, self.rows)
            peaks.append(estimate_memory(recipe, self.config, place, heavy, self.micro_batches).tensors)
        one, two = peaks
        room = free_bytes * (1 - read_hardware().reserve.margin) - one
        return 1 + max(0, int(room // max(1, two - one)))

    def _time(self) -> dict[str, Any]:
        recipe, hardware = self.recipe, read_hardware()
        plan = {"device": self.device, "processor": processor()}
        if (key := device_key(plan, hardware)) is None:
            raise UserError(f"no device {self.device} in hardware.yaml (docs/reference/plan.md)")
        device = this_machine() if key == CPU else hardware.devices[key]
        machines = Machines(device, key, self.per_machine, self.launch.processes // self.per_machine)
        folder = Path(recipe.run.dir, recipe.run.name)
        speeds = speeds_here(recipe, machines, hardware, folder)
        if speeds is None and key == CPU:
            speeds = processor_speeds(hardware)
        if speeds is None:
            precision = recipe.train.precision
            raise UserError(f"{self.device} has no peak in {precision} in hardware.yaml (docs/reference/plan.md)")
        shapes, recomputes = shapes_of(recipe, self.config), recipe.train.activation_checkpointing is True
        shape = Shape.of(shapes.weights, recipe, self.config, key == CPU, recomputes)
        where = (self.launch, machines, hardware, self.rows, heaviest(recipe, self.rows))
        step = Job(recipe, self.config, shape, *where, speeds, self.micro_batches).time()
        return {
            "step_s": step.seconds,
            "tokens_per_s": self.rows.tokens_per_row * recipe.batch.rows / step.seconds,
            "parts_s": step.parts,
            "speeds": step.source,
            "level": {"compute": speeds.level.compute, "optimizer": speeds.level.optimizer},
        }


def predict_run(prepared: Prepared, engine: Engine) -> dict[str, Any]:
    """Returns what a run is predicted to take. Raises nothing: the other ranks would not know."""
    try:
        return _predicted(prepared.recipe, prepared.config, engine, prepared.micro_batches, prepared.training)
    except _FAILURES as error:
        return {"notes": [f"nothing is predicted: {_said(error)}"]}


def _said(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] if isinstance(error, UserError) else f"{error!r:.200}"


def _predicted(
    recipe: Recipe, config: PretrainedConfig, engine: Engine, micro_batches: int, training: RowSource
) -> dict[str, Any]:
    rows = widest(recipe, "a stream", config)
    if training.size(recipe.data.max_length):
        data = on_disk(training)
        token = None if recipe.data.image is None else cast(Any, config).image_token_id
        rows = facts_of(data.examples, data.rows, "the data of the run", len(data.rows), token)
    on_gpu = engine.device.type == "cuda"
    device = torch.cuda.get_device_name(engine.device) if on_gpu else engine.device.type
    place = (engine.launch, micro_batches, rows, device, engine.local_processes)
    run = Launched(recipe, copy.deepcopy(config), *place)
    found = run.predict(on_gpu or run_length(recipe, rows.rows)[0] >= FEW_STEPS)
    if recipe.batch.rows_per_device == "auto" and found.get("memory_bytes", {}).pop("peak", None):
        del found["phases_bytes"]
        found["notes"].append("peak: batch.rows_per_device is auto, measured later; `plan --report` calculates it")
        with contextlib.suppress(*_FAILURES), quietly():
            found["rows_per_device"] = run.rows_that_fit(torch.cuda.mem_get_info(engine.device)[0])
    return found


# --- plan --report


@dataclass(frozen=True)
class Comparison:
    run: str
    where: str
    what: str
    predicted: float
    measured: float
    unit: str  # GiB, s, tokens/s
    whole: float  # what an error is a share of: the measured, for a part of a step the step

    @property
    def error(self) -> float:
        """Returns the share by which the prediction is too high."""
        return (self.predicted - self.measured) / self.whole if self.whole else float(self.predicted > 0)


def compare_runs(folders: Iterable[Path]) -> list[Comparison]:
    """Returns what is known of each run; among several, what has no plan.json is passed over (`runs/*`). Raises
    UserError where a folder is none of a run with steps."""
    wanted = list(folders)
    runs = [folder for folder in wanted if (folder / "plan.json").exists()] or wanted
    return [comparison for folder in runs for comparison in compare_run(folder)]


def compare_run(folder: Path) -> list[Comparison]:
    plan = read_plan(folder / "plan.json")
    try:
        measured = plan.get("measured") or measure_run(read_steps(folder / "metrics.jsonl"))
    except OSError as error:
        raise UserError(f"{folder}: not the folder of a run: {error}") from None
    if "launch" not in plan or measured is None:
        raise UserError(f"{folder}: not the folder of a run that made a step, or an older version made it")
    predicted = plan.get("predicted") or {}
    whole = "step_s" in predicted and ("peak" in predicted.get("memory_bytes", {}) or plan["device"] == CPU)
    if not whole:
        again = _launched(folder, plan).predict(with_time=True)
        sizes = {**again.get("memory_bytes", {}), **predicted.get("memory_bytes", {})}
        predicted = {**again, **predicted, "memory_bytes": sizes}
    found: list[Comparison] = []

    def add(what: str, formula: float, took: float, unit: str, of: float | None = None) -> None:
        found.append(Comparison(folder.name, plan["where"], what, formula, took, unit, took if of is None else of))

    sizes: dict[str, int] = predicted.get("memory_bytes", {})
    of_run: dict[str, int] = measured["memory_bytes"]
    for name in (name for name in sizes if name in of_run):
        add(STATE.get(name, name), sizes[name] / GIB, of_run[name] / GIB, "GiB")
    if "step_s" in predicted:
        add("step", predicted["step_s"], measured["step_s"], "s")
        add("speed", predicted["tokens_per_s"], measured["tokens_per_s"], "tokens/s")
        for name, (formula, took) in phases_of_time(predicted["parts_s"], measured["parts_s"]).items():
            add(f"  {name}", formula, took, "s", measured["step_s"])
    return found


def _launched(folder: Path, plan: dict[str, Any]) -> Launched:
    """Returns a run as its plan.json has it, which knows the mean of its lengths alone."""
    recipe, of_launch = load_recipe(folder / "recipe.yaml", []), plan["launch"]
    if plan["rows_per_device"]:
        batch = recipe.batch.model_copy(update={"rows_per_device": plan["rows_per_device"]})
        recipe = recipe.model_copy(update={"batch": batch})
    launch = Launch(of_launch["kind"], plan["world_size"], None, of_launch["config"])
    config = training_config(recipe)
    counts = plan["rows_per_epoch"], plan["examples"], plan["tokens_per_epoch"], plan["supervised_tokens_per_epoch"]
    if not all(counts):
        rows = widest(recipe, "a stream", config)
    else:
        in_epoch, examples, tokens, targets = counts
        full, share = recipe.data.max_length, targets / tokens
        documents = (round(tokens / examples),) * max(1, round(examples / in_epoch))
        of_row = tokens / in_epoch, targets / in_epoch
        rows = RowFacts("plan.json", (documents,), *of_row, (full,), max(1, int((full - 1) * share)), in_epoch)
    return Launched(recipe, config, launch, plan["micro_batches"], rows, plan["device"], of_launch["per_host"])


def table(comparisons: Sequence[Comparison]) -> str:
    """Returns lines of text: of each run memory, then times; and the errors of all runs."""
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
    """Returns a list of objects, numbers in the unit that is named."""
    names = ("run", "where", "predicted", "measured", "unit", "error")
    objects = [{"what": one.what.strip(), **{name: getattr(one, name) for name in names}} for one in comparisons]
    return json.dumps(objects, indent=1)
