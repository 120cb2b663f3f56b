"""Progress of a run, which a launch starts at step 0 or resumes from the newest valid checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from rich.markup import escape

from finetune.checkpoints.inputs import Inputs
from finetune.checkpoints.resume import check_finished, chosen, newest_good, resume, set_newer_aside
from finetune.data.row_source import RowSource
from finetune.engine.base import Engine
from finetune.recipe import Recipe
from finetune.recipe.schema import Schedule
from finetune.training.optim import lr_factor
from finetune.training.run_dir import run_folder


@dataclass
class TrainingState:
    """Progress of a run: all of its state but weights, optimizer and loss scale."""

    step: int = 0  # optimizer steps done
    tokens: int = 0  # over all ranks, without padding
    supervised_tokens: int = 0
    padding_tokens: int = 0  # computed in addition, on as many processes as there were
    tokens_by_source: dict[str, int] = field(default_factory=dict)  # if there are several
    best: float | None = None  # value of `train.stop_when.metric` in all evaluations so far
    evaluations_since_best: int = 0


def resumed_state(
    recipe: Recipe,
    engine: Engine,
    training: RowSource,
    inputs: Inputs,
    steps: int,
    say: Callable[[str], None],
) -> tuple[TrainingState, dict[str, float], dict[str, str]]:
    """Returns the state to continue from, the evaluation at its step, and the ids of the trackers' runs.

    inputs: all that this run reads; steps: length of the whole run. Collective. Raises UserError.
    """
    checkpoints, setting = run_folder(recipe.run) / "checkpoints", recipe.checkpoint.resume
    if setting == "never":
        for folder in set_newer_aside(checkpoints) if engine.is_main else []:
            say(f"note: the checkpoint of an earlier run is now {folder}")
        return TrainingState(), {}, {}
    checkpoint = newest_good(engine, checkpoints) if setting == "auto" else chosen(engine, checkpoints, setting)
    if checkpoint is None:
        return TrainingState(), {}, {}
    resumed = resume(engine, recipe, checkpoint, inputs, training)
    state = TrainingState(**resumed.progress)
    check_finished(checkpoint, resumed.changes, state.step, steps)
    for folder in set_newer_aside(checkpoints, state.step) if engine.is_main else []:
        say(f"note: a checkpoint after the chosen one is now {folder}")
    say(f"resuming from {checkpoint}: step {state.step} of {steps}")
    if change := _change_of_rate(recipe.schedule, recipe.optimizer.lr, checkpoint, state.step, resumed.steps, steps):
        say(change)
    for change in resumed.changes:
        say(f"changed since then: {escape(change)}")
    for note in resumed.notes:
        say(f"note: {escape(note)}")
    return state, resumed.metrics, resumed.trackers


def _change_of_rate(schedule: Schedule, lr: float, checkpoint: Path, step: int, before: int, steps: int) -> str | None:
    """Returns what another length of the run does to the learning rate from here on; None if it does nothing.

    step: steps done; before, steps: length of the run that wrote the checkpoint, and of this one.
    """
    if before == steps or step >= steps:
        return None
    saved = yaml.safe_load((checkpoint / "recipe.yaml").read_text(encoding="utf-8"))
    past = Schedule.model_validate(saved["schedule"])
    now = lr_factor(schedule, step, steps)
    if math.isclose(now, lr_factor(past, min(step, before - 1), before)):
        return None
    last = saved["optimizer"]["lr"] * lr_factor(past, step - 1, before)
    return (
        f"the schedule `{schedule.name}` is now that of a run of {steps} steps, not of {before}: "
        f"step {step + 1} has a learning rate of {lr * now:.3g}, step {step} had {last:.3g}"
    )
