"""A job of a cluster: what the manifest of any target is filled with, taken from the plan of a recipe."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from finetune.desk.cluster.targets import SHARED, Target, device_name
from finetune.engine.hardware import CPU, read_hardware
from finetune.engine.launch import read_config_file
from finetune.errors import UserError
from finetune.features import load_recipe
from finetune.plan.command import PlanOptions, plan
from finetune.plan.search import Choice, PlanRequest, as_lines, cheapest
from finetune.plan.tables import Machines, parse_machines
from finetune.recipe import Recipe

MARGIN = 1.3  # of the time limit over the expected hours
_LEAST_HOURS = 0.5  # of a time limit: it has to leave time to save
_START_HOURS = 0.25  # assumed: images, imports, reading the model
_HOST_GIB, _HOST_MARGIN = 8, 1.25  # asked for beyond what `plan` counts: page cache of rows and weights, an assumption
STOP_BEFORE_S = 300  # the run is told to save this long before the time limit


@dataclass(frozen=True)
class JobOptions:
    """What a person decides about a job; the rest follows from the plan. hours: of the time limit."""

    devices: str
    shared: str | None = None
    image: str | None = None
    secret: str | None = None
    hours: float | None = None
    config_file: Path | None = None


@dataclass(frozen=True)
class ClusterJob:
    """A recipe on machines of a cluster. Paths are relative to the folder that all machines see."""

    name: str  # lower case, digits and dashes: what every target allows
    recipe: str
    overrides: tuple[str, ...]
    config: str  # accelerate config: of the package by name, or where the manifest writes it
    config_text: str | None  # of a config that does not come with the package
    machines: Machines
    gpu: str | None  # the target's name of the devices of a machine
    hours: float  # time limit
    host_gib: int  # memory of a machine to ask for
    expects: tuple[str, ...]  # lines about memory, time and price
    options: JobOptions

    @property
    def ranks(self) -> int:
        return self.machines.per_machine

    @property
    def gpus(self) -> int:
        """GPUs of a machine; 0 on CPUs."""
        return 0 if self.machines.key == CPU else self.machines.per_machine

    @property
    def is_amd(self) -> bool:
        return self.machines.key.startswith("MI")

    @property
    def limit_s(self) -> int:
        return round(self.hours * 3600)

    @property
    def environment(self) -> dict[str, str]:
        """Variables of every process."""
        return {
            # Without it a launcher that misses the others trains alone, without a word.
            "FINETUNE_PROCESSES": str(self.machines.count),
            "FINETUNE_TIMEOUT_S": "600",  # also of DeepSpeed's groups, whose default varies by version
        }

    def command(self, rendezvous: str = "") -> str:
        """Returns the shell command of one machine. rendezvous: options of torchrun, as shell text, if there are
        several machines."""
        recipe = [self.recipe, *self.overrides]
        if rendezvous or self.machines.machines > 1:
            end = ["-m", "finetune", "train", *recipe, "--config-file"]
            start = ["python -m finetune launch torchrun", *([rendezvous] if rendezvous else [])]
            return " ".join([*start, shlex.join(end), shlex.quote(self.config)])
        words = ["--config-file", self.config, "--num-processes", str(self.ranks), *recipe]
        return f"python -m finetune launch {shlex.join(words)}"


def plan_job(path: Path, overrides: Sequence[str], target: Target, options: JobOptions) -> tuple[ClusterJob, Recipe]:
    """Returns the job that `plan` would choose on these devices, and its recipe. Raises UserError if it fits none.

    What needs no plan, which takes seconds, is refused before it.
    """
    given = (options.shared, options.image, options.secret, options.config_file)
    for text in map(str, (path, *overrides, *(one for one in given if one is not None))):
        if not text.isprintable() or '"""' in text:  # it would end a line, or a string, of the manifest
            raise UserError(f"launch: {text!r} has a character that no manifest can hold. Fix: rename it")
    machines = devices_of(options.devices)
    gpu = device_name(target, machines)
    if target.alone and machines.machines > 1:
        raise UserError(f"{target.title}: {target.alone}. Fix: give --devices {machines.per_machine}x{machines.key}")
    if options.hours is not None and not _LEAST_HOURS <= options.hours <= 24 * 30:
        raise UserError(f"--hours {options.hours:g}: out of range. Fix: give half an hour to 720 hours")
    recipe, place = load_recipe(path, overrides), _below_here(path, target)
    is_lost = Path(recipe.run.dir).is_absolute() and not str(recipe.run.dir).startswith(f"{SHARED}/")
    if target.has_containers and is_lost:
        raise UserError(
            f"run.dir: {recipe.run.dir} is lost with the container. Fix: write run.dir=runs, which is {SHARED}/runs"
        )
    on = (f"{machines.per_machine}x{machines.key}",)
    request, choices, results = plan(path, overrides, PlanOptions(on=on, nodes=machines.machines), load_recipe)
    rules = {name: rule for result in results for name, rule in result.illegal.items()}
    choice = _chosen(request, choices, options, machines, rules)
    if options.hours is None and choice.hours is None:
        raise UserError(
            f"{path}: `plan` cannot estimate the hours on {machines.name}. It knows no speed of these devices, or not "
            "how many rows there are. Fix: set the time limit, such as --hours 12"
        )
    limit = options.hours or max(_LEAST_HOURS, math.ceil(((choice.hours or 0) * MARGIN + _START_HOURS) * 4) / 4)
    config, text = _config(choice, target)
    changes = tuple(line.replace(": ", "=") for line in as_lines(choice.changes))
    lines = [f"{choice.name}: {choice.peak / 2**30:.1f} of {choice.machines.device.gib:.1f} GiB a device"]
    if choice.hours is not None:
        lines.append(f"{choice.hours:.3g} hours expected (`plan` in a model of the devices, not measured on them)")
    price = cheapest(request.prices, choice.machines)
    if choice.price is not None and price is not None:
        lines.append(f"{choice.price:.3g} {choice.currency} at {price.provider}'s price of {price.date}")
    job = ClusterJob(
        name=re.sub(r"[^a-z0-9]+", "-", recipe.run.name.lower()).strip("-")[:40].rstrip("-") or "finetune",
        recipe=place,
        overrides=(*overrides, *changes),
        config=config,
        config_text=text,
        machines=machines,
        gpu=gpu,
        hours=limit,
        host_gib=math.ceil(choice.host_need * _HOST_MARGIN) + _HOST_GIB,
        expects=tuple(lines),
        options=options,
    )
    return job, recipe


def devices_of(text: str) -> Machines:
    """Reads `2x8xH100-80` (machines, devices of each), `8xH100-80` or `2xcpu`. Raises UserError."""
    match = re.fullmatch(r"(\d+) ?[x×*] ?(\d+ ?[x×*] ?\S+)", text.strip())
    machines, rest = (int(match[1]), match[2]) if match else (1, text)
    try:
        return parse_machines(rest, machines, read_hardware())
    except UserError as error:
        raise UserError(str(error).replace(f"--on {rest}", f"--devices {text}")) from None


def _chosen(
    request: PlanRequest,
    choices: Sequence[Choice],
    options: JobOptions,
    machines: Machines,
    rules: Mapping[str, str],
) -> Choice:
    """Returns the best choice, or the best of the config that was asked for. Raises UserError if it does not fit.

    rules: that forbid configs, by name and sizes.
    """
    if options.config_file is not None:
        name = read_config_file(str(options.config_file)).where
        choices = [one for one in choices if one.config == name]
        if not choices:
            why = [rule for place, rule in rules.items() if place.partition(" ")[0] == name]
            reason = why[0] if why else "`plan` does not know this config"
            fix = "" if "Fix: " in reason else ". Fix: leave it out, or edit the job"
            raise UserError(f"--config-file {options.config_file}: cannot be used on {machines.name}: {reason}{fix}")
    one = choices[0]
    if one.verdict == "no":
        raise UserError(
            f"{request.path}: does not fit {one.machines.name}. {one.config} comes nearest and needs {-one.free:.1f} "
            f"GiB more a device. Fix: choose others; "
            f"`python -m finetune plan {request.path} --on DEVICES` shows what fits"
        )
    return one


def _below_here(path: Path, target: Target) -> str:
    """Returns a recipe's path relative to the current folder, which the shared one stands for. Raises UserError."""
    if not path.exists():
        return str(path)  # comes with the package
    relative = os.path.relpath(path)
    if target.has_containers and relative.startswith(".."):
        raise UserError(
            f"{path}: is outside of this folder, and containers see no other. They have it as {SHARED}. Fix: start in "
            "a folder above the recipe"
        )
    return relative


def _config(choice: Choice, target: Target) -> tuple[str, str | None]:
    """Returns the accelerate config's path for the job, and its text if sizes differ from the file's."""
    launch = choice.launch
    assert launch.config_file is not None
    if launch.config == read_config_file(launch.config_file).config:
        return f"accelerate_configs/{launch.where}.yaml", None
    sizes = {"num_processes": launch.processes, "num_machines": choice.machines.machines}
    text = yaml.safe_dump({**launch.config, **sizes}, sort_keys=False)
    folder = "/tmp" if target.has_containers else "runs"
    return f"{folder}/accelerate-{launch.where}-{launch.processes}.yaml", text
