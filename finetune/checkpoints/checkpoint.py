"""Save and resume a run: the same files from every backend, for every backend, at any number of processes."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from finetune.checkpoints.folder import complete, partial_folder, problem, prune, seal, step_folder
from finetune.checkpoints.shards import PartReader, write_parts
from finetune.engine import Engine
from finetune.engine.parts import scalars
from finetune.errors import RunFailure, UserError
from finetune.recipe import Recipe, dump_recipe

log = logging.getLogger(__name__)

Progress = dict[str, int]  # step, tokens, supervised_tokens

# What the weights and the order of samples depend on: a change would make another run of it.
FIXED = (
    "run.seed",
    "model",
    "mode",
    "lora",
    "quantization",
    "data.train",
    "data.max_length",
    "data.overlong",
    "data.packing",
    "objective",
    "batch.rows",
    "optimizer.name",
)


def save_checkpoint(engine: Engine, recipe: Recipe, progress: Progress, root: Path) -> None:
    """Write `root`/step-N and drop the oldest beyond `checkpoint.keep`. Collective.

    Raises RunFailure on every rank where one could not write (a full disk); earlier checkpoints are untouched.
    """
    partial, final = partial_folder(root, progress["step"]), step_folder(root, progress["step"])
    parts = engine.parts(reading=False)
    numbers: dict[str, dict[str, float]] = {}
    for share in engine.gather(scalars(parts, engine.optimizers)):
        numbers.update(share)

    def start() -> None:
        shutil.rmtree(partial, ignore_errors=True)  # an interrupted save of this step, perhaps by more ranks
        partial.mkdir(parents=True)

    def finish() -> None:
        _write_state(engine, recipe, progress, numbers, partial)
        seal(partial, final)
        prune(root, recipe.checkpoint.keep)

    shard = partial / f"rank-{engine.rank:05d}-of-{engine.world_size:05d}.safetensors"

    def write() -> None:
        write_parts(shard, parts, engine.optimizers)

    for work, on_all in ((start, False), (write, True), (finish, False)):
        failures = _tried(engine, work if on_all or engine.is_main else None)
        if failures:
            raise RunFailure(f"{final} could not be written, earlier checkpoints are untouched: {'; '.join(failures)}")


def _tried(engine: Engine, work: Callable[[], None] | None) -> list[str]:
    """Do this rank's work; the failures of all ranks, on all ranks, so that none waits for one that gave up."""
    failure = None
    try:
        if work is not None:
            work()
    except (OSError, SafetensorError) as error:
        failure = f"rank {engine.rank}: {error}"
    return [found for found in engine.gather(failure) if found]


def _write_state(engine: Engine, recipe: Recipe, progress: Progress, numbers: dict[str, Any], folder: Path) -> None:
    state = {
        **progress,
        "loss_scale": {"value": engine.loss_scale.value, "good_steps": engine.loss_scale.good_steps},
        "scalars": numbers,
        "written_by": {"where": engine.launch.where, "world_size": engine.world_size},
    }
    (folder / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
    (folder / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")


def newest_good(engine: Engine, root: Path) -> Path | None:
    """The newest checkpoint that verifies; what is skipped is said, with the reason. Collective: rank 0 looks."""
    chosen: Path | None = None
    for folder in complete(root) if engine.is_main else []:
        reason = problem(folder)
        if reason is None:
            chosen = folder
            break
        log.warning("skipping checkpoint %s: %s", folder, reason)
    return engine.gather(chosen)[0]


def resume(engine: Engine, recipe: Recipe, folder: Path) -> Progress:
    """Restore weights, optimizer state and loss scale. Collective; every rank reads just what it trains.

    Raises UserError where the recipe is of another run, naming each difference.
    """
    check_same_run(recipe, folder)
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    reader = PartReader(sorted(folder.glob("rank-*.safetensors")))
    for part in engine.parts(reading=True):
        reader.restore(part, engine.optimizers, state["scalars"][part.name])
    engine.restored()
    engine.loss_scale.value = state["loss_scale"]["value"]
    engine.loss_scale.good_steps = state["loss_scale"]["good_steps"]
    return {name: state[name] for name in ("step", "tokens", "supervised_tokens")}


def check_same_run(recipe: Recipe, folder: Path) -> None:
    """Raises UserError listing every fixed key in which the recipe differs from the checkpoint's."""
    import yaml

    saved = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
    now = yaml.safe_load(dump_recipe(recipe))
    changed = [line for key in FIXED for line in _differences(key, _at(saved, key), _at(now, key))]
    if changed:
        raise UserError(
            f"{folder} is of another run; what may not change on resume did:\n  "
            + "\n  ".join(changed)
            + "\nuse another `run.name`, or `checkpoint.resume=never` to start this one anew"
        )


def _at(values: Any, key: str) -> Any:
    for name in key.split("."):
        values = (values or {}).get(name)
    return values


def _differences(key: str, saved: Any, now: Any) -> Iterator[str]:
    if isinstance(saved, dict) and isinstance(now, dict):
        for name in sorted({*saved, *now}):
            yield from _differences(f"{key}.{name}", saved.get(name), now.get(name))
    elif saved != now:
        yield f"{key}: {json.dumps(saved)} -> {json.dumps(now)}"
