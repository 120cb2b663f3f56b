"""Times that `plan` shows obey physics, over recipes and the devices of the table: keeping weights elsewhere is never
faster, and more devices that are not faster have a reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import ROOT

from finetune.engine.hardware import shipped_hardware
from finetune.errors import UserError
from finetune.features import load_recipe
from finetune.plan.answer import why
from finetune.plan.command import PlanOptions, ask
from finetune.plan.finished_runs import speeds_here
from finetune.plan.search import Choice, PlanRequest, best, evaluate, launches, with_faster
from finetune.plan.tables import Machines, parse_machines

# The same without what is kept in the host's memory; "single" on one device.
WITHOUT = {"fsdp2_offload": "fsdp2", "zero2_offload": "zero2", "zero3_offload": "zero3", "zero3_nvme": "zero3_offload"}
CONFIGS = {*WITHOUT, *WITHOUT.values(), "single", "ddp"}
COUNTS = (1, 2, 8)
TOO_LARGE = ("mistral-large-4", "llama3.1-405b")  # for eight of most devices
SHIPPED = [
    path
    for path in sorted((ROOT / "recipes").rglob("*.yaml"))
    if path.parent.name not in ("base", "tasks", "quickstart")
]
SAMPLE = ("smollm2-135m/full.yaml",)
FEW = ("H100-80", "A100-40", "4090-24", "L4-24", "MI300X-192", "V100-32")  # a device of each kind
NAMED = [(str(path.relative_to(ROOT / "recipes")), path) for path in SHIPPED]
RECIPES = [
    *(pytest.param(path, FEW, id=name) for name, path in NAMED if name in SAMPLE),
    *(
        pytest.param(path, tuple(shipped_hardware().devices), id=f"{name}-all", marks=pytest.mark.long)
        for name, path in NAMED
    ),
]


def places(request: PlanRequest, machines: Machines) -> list[Choice]:
    """Returns the places that `check` allows, as the recipe is."""
    speeds, choices = speeds_here(request.recipe, machines, request.hardware), list[Choice]()
    for launch in launches(machines):
        if launch.where in CONFIGS:
            try:
                choices.append(evaluate(request, launch, machines, speeds, {}))
            except UserError:
                assert machines.count > 1 or launch.where != "single"
    return choices


@pytest.mark.parametrize(("path", "devices"), RECIPES)
def test_times_obey_physics(path: Path, devices: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    hardware = shipped_hardware()
    fewest = [parse_machines(key, 1, hardware) for key in devices]
    request = ask(load_recipe(path), str(path), PlanOptions(()), fewest)
    compared = 0
    for key in devices:
        by_count = {count: places(request, parse_machines(f"{count}x{key}", 1, hardware)) for count in COUNTS}
        assert by_count[1]
        for count, choices in by_count.items():
            compared += check_offload({one.config: one for one in choices}, count)
        answers = [best(choices) for choices in by_count.values() if choices]
        for fewer, one in zip(answers, with_faster(answers, answers)[1:], strict=False):
            if fewer.verdict != "no" and fewer.step and one.step and fewer.step.seconds <= one.step.seconds:
                named = re.search(r"; not faster than \w+ on .* \(.* s a step\): .* s more of (.*)", why(request, one))
                assert named, one.name
                assert named[1] in ("communication", "launches", "optimizer", "host transfers"), one.name
    assert compared > len(devices) or path.parent.name in TOO_LARGE


def check_offload(choices: dict[str, Choice], count: int) -> int:
    """Returns the number of pairs that were compared."""
    pairs = [
        (one, choices[without])
        for name, one in choices.items()
        if (without := "single" if count == 1 else WITHOUT.get(name)) in choices and one.config in WITHOUT
    ]
    pairs = [(one, other) for one, other in pairs if one.step and other.step and other.verdict != "no"]
    for pair in pairs:
        # Memory that offload frees holds a larger cohort of rollouts, and generation may be faster by it.
        with_offload, without = (one.step.seconds - one.step.parts.get("generation", 0) for one in pair if one.step)
        assert with_offload > without, [(one.name, one.step and one.step.parts) for one in pair]
    return len(pairs)
