"""Resumes from a checkpoint: the same files for every backend, at any number of processes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml

from finetune.checkpoints.folder import find_problem, list_checkpoints, list_set_aside, set_aside, step_folder
from finetune.checkpoints.inputs import (
    PARTS,
    InputChange,
    Inputs,
    differences,
    input_changes,
    on_main,
    saved_inputs,
)
from finetune.checkpoints.shards import PartReader
from finetune.data.row_source import RowSource
from finetune.engine.base import Engine
from finetune.errors import UserError
from finetune.recipe import Recipe, dump_recipe, load_recipe
from finetune.recipe.schema import ENGINE_KEYS, Acceptable

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumed:
    """Restored state other than tensors."""

    progress: dict[str, Any]  # the fields of `training.state.TrainingState`
    metrics: dict[str, float]  # from the evaluation at its step; empty without one
    changes: list[str]  # changes of the recipe and its inputs since
    notes: list[str]  # differences without effect on later steps, and settings that cannot be compared
    trackers: dict[str, str]  # run ids by tracker
    steps: int  # length of the run that saved it


def newest_good(engine: Engine, root: Path) -> Path | None:
    """Returns the newest checkpoint that verifies; sets newer ones aside with a warning. Collective: rank 0 reads.

    Raises UserError if there are checkpoints but none verifies: starting over is the user's decision.
    """
    newest, skipped = None, list[tuple[Path, str]]()
    for folder in list_checkpoints(root) if engine.is_main else []:
        if (reason := find_problem(folder)) is None:
            newest = folder
            break
        skipped.append((folder, reason))
    newest, skipped = engine.ranks.gather((newest, skipped))[0]
    if newest is None and skipped:
        reasons = "\n  ".join(f"{folder}: {reason}" for folder, reason in skipped)
        raise UserError(
            f"no checkpoint can be trusted:\n  {reasons}\nFix: restore a valid one, or start over with "
            "`checkpoint.resume=never`"
        )
    for folder, reason in skipped if engine.is_main else []:
        log.warning("skipping checkpoint %s: %s; kept as %s", folder, reason, set_aside(folder).name)
    return newest


def chosen(engine: Engine, root: Path, name: str) -> Path:
    """Returns the checkpoint that `checkpoint.resume` names. Collective: rank 0 reads.

    Raises UserError if it does not exist or does not verify.
    """
    folder, problem = root / name, None
    if engine.is_main and not folder.is_dir():
        present = ", ".join(path.name for path in (*list_checkpoints(root), *list_set_aside(root))) or "none"
        problem = f"checkpoint.resume: {root} has no {name}; there are: {present}. Fix: name one of these, or use auto"
    elif engine.is_main and (reason := find_problem(folder)):
        problem = f"checkpoint.resume: {folder} cannot be trusted: {reason}. Fix: restore its files, or name another"
    if problem := engine.ranks.gather(problem)[0]:
        raise UserError(problem)
    return folder


def set_newer_aside(root: Path, step: int = -1) -> list[Path]:
    """Sets the checkpoints after a step aside, so that they do not mix with this run's; returns their new paths.

    step: -1 for all of them.
    """
    return [set_aside(folder) for folder in list_checkpoints(root) if folder.name > step_folder(root, step).name]


def resume(engine: Engine, recipe: Recipe, folder: Path, inputs: Inputs, data: RowSource) -> Resumed:
    """Restores weights, optimizer state and loss scale. Collective; each rank reads the parameters it trains.

    inputs: this run's, compared with the checkpoint's; data: training data. Raises UserError if this is
    another run.
    """
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    saved = saved_inputs(state)
    extra = on_main(engine, lambda: data.same_state(state))
    inputs = {**inputs, "data": inputs["data"] | extra}
    saved = {**saved, "data": saved["data"] | {name: state[name] for name in extra}}
    of_inputs = input_changes(saved, inputs)
    changes = changes_since(recipe, folder, of_inputs)
    return _restore(engine, folder, state, changes, [change.text for change in of_inputs if change.part is None])


def resume_own(engine: Engine, folder: Path) -> Resumed:
    """Restores a checkpoint that this run saved or resumed from, without comparison. Collective."""
    return _restore(engine, folder, json.loads((folder / "state.json").read_text(encoding="utf-8")), [], [])


def _restore(engine: Engine, folder: Path, state: dict[str, Any], changes: list[str], notes: list[str]) -> Resumed:
    reader = PartReader(sorted(folder.glob("rank-*.safetensors")))
    reader.restore(engine.parts(reading=True), engine.optimizers, state["scalars"], engine.make_room)
    engine.restored()
    engine.loss_scale.value = state["loss_scale"]["value"]
    engine.loss_scale.good_steps = state["loss_scale"]["good_steps"]
    progress = {name: state[name] for name in ("step", "tokens", "supervised_tokens", "tokens_by_source")}
    # Older checkpoints lack these.
    absent = {"padding_tokens": 0, "best": None, "evaluations_since_best": 0}
    progress |= {name: state.get(name, value) for name, value in absent.items()}
    return Resumed(progress, state["metrics"], changes, notes, state["trackers"], state["steps"])


# Location, retention and copies of checkpoints: these may differ from those of a finished run.
_NOT_TRAINED = ("checkpoint.", "run.dir:", "run.push")


def check_finished(folder: Path, changes: list[str], step: int, steps: int) -> None:
    """Raises UserError if a finished run is launched with a changed recipe: no step would be trained.

    folder: its last checkpoint; changes: of the recipe since; steps: of the current recipe.
    """
    different = [change for change in changes if not change.startswith(_NOT_TRAINED)]
    if step >= steps and different:
        raise UserError(
            f"{folder.parent.parent} is finished after {step} steps, with another recipe than this one:\n  "
            + "\n  ".join(different)
            + "\nNothing would be trained, and nothing was changed. Fix: use another `run.name` (it may hold values: "
            "`run.name=lr-{optimizer.lr}`), or `checkpoint.resume=never` to train this one again"
        )


# Stored weights and counts cannot be used if these change.
_FIXED = ("mode", "lora", "optimizer.name", "batch.rows")
# Weights or the order of samples depend on these; `checkpoint.accept_changes` allows another value.
_ACCEPTABLE: tuple[str, ...] = tuple(key for key in get_args(Acceptable) if key not in PARTS)
# Of these, free to change: the same numbers, computed in another way.
_SAME_MATHS = ("objective.share_prompts:", "rollouts.cohort:", *(f"rollouts.{key}:" for key in ENGINE_KEYS["vllm"]))


def changes_since(recipe: Recipe, folder: Path, of_inputs: list[InputChange]) -> list[str]:
    """Returns `key: before -> now` of every allowed difference to the checkpoint's recipe and inputs.

    Raises UserError listing the differences that are not allowed, all of them.
    """
    file, now = folder / "recipe.yaml", yaml.safe_load(dump_recipe(recipe))
    try:  # with today's defaults for keys that its version did not have
        saved = yaml.safe_load(dump_recipe(load_recipe(file, ())))
    except UserError:  # as it was written: it has keys that no longer exist
        saved = yaml.safe_load(file.read_text(encoding="utf-8"))
    accepted = recipe.checkpoint.accept_changes
    fixed = [line for key in _FIXED for line in _differences_at(key, saved, now)]
    refused = {}  # by the key of `checkpoint.accept_changes` that allows them
    for key in _ACCEPTABLE:
        refused[key] = [line for line in _differences_at(key, saved, now) if not line.startswith(_SAME_MATHS)]
    for part in PARTS:
        refused[part] = []
    for change in of_inputs:
        if change.part is not None:
            refused[change.part].append(change.text)
    refused = {key: lines for key, lines in refused.items() if lines and key not in accepted}
    if fixed or refused:
        inputs = [name for part, name in _INPUTS.items() if part in refused]
        restore = f"restore {', '.join(inputs)}, or " if inputs else ""
        accept = f", or `checkpoint.accept_changes=[{','.join(refused)}]` to resume anyway" if not fixed else ""
        raise UserError(
            f"{folder} belongs to another run; these must not change on resume:\n  "
            + "\n  ".join([*fixed, *(line for lines in refused.values() for line in lines)])
            + f"\nFix: {restore}use another `run.name`, or `checkpoint.resume=never` to start over{accept}"
        )
    return [*differences(saved, now), *(change.text for change in of_inputs if change.part is not None)]


_INPUTS = {
    "data": "the rows",
    "tokenizer": "the tokenizer",
    "config": "the config",
    "base": "the weights",
    "rewards": "the rewards",
    "objective": "the objective",
}


def _differences_at(key: str, saved: Any, now: Any) -> Iterator[str]:
    for name in key.split("."):
        saved, now = ((values or {}).get(name) for values in (saved, now))
    return differences(saved, now, key)
