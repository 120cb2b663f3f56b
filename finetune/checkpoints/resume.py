"""Go on from a checkpoint: the same files for every backend, at any number of processes."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.checkpoints.folder import complete, problem, set_aside
from finetune.checkpoints.same_run import changes
from finetune.checkpoints.shards import PartReader
from finetune.engine.base import Engine
from finetune.errors import UserError
from finetune.recipe import Recipe

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumed:
    """What a checkpoint says beside the tensors."""

    progress: dict[str, Any]  # step, tokens, supervised_tokens, padding_tokens, tokens_by_source
    changes: list[str]  # of the recipe since
    trackers: dict[str, str]  # run ids by tracker


def newest_good(engine: Engine, root: Path) -> Path | None:
    """The newest checkpoint that verifies; newer ones are set aside, with the reason. Collective: rank 0 looks.

    Raises UserError where there are checkpoints and none of them verifies: starting anew is for the user to say.
    """
    found, skipped = _look(root) if engine.is_main else (None, [])
    found, skipped = engine.ranks.gather((found, skipped))[0]
    if found is None and skipped:
        reasons = "\n  ".join(f"{folder}: {reason}" for folder, reason in skipped)
        raise UserError(
            f"no checkpoint can be trusted:\n  {reasons}\n"
            "put a good one back, or start anew with `checkpoint.resume=never`"
        )
    for folder, reason in skipped if engine.is_main else []:
        log.warning("skipping checkpoint %s: %s; kept as %s", folder, reason, set_aside(folder).name)
    return found


def _look(root: Path) -> tuple[Path | None, list[tuple[Path, str]]]:
    skipped: list[tuple[Path, str]] = []
    for folder in complete(root):
        reason = problem(folder)
        if reason is None:
            return folder, skipped
        skipped.append((folder, reason))
    return None, skipped


def start_anew(root: Path) -> list[Path]:
    """Set the checkpoints of an earlier run aside, so that neither counts as the other's; their new places."""
    return [set_aside(folder) for folder in complete(root)]


def resume(engine: Engine, recipe: Recipe, folder: Path, data: dict[str, Any]) -> Resumed:
    """Restore weights, optimizer state and loss scale. Collective; every rank reads just what it trains.

    data: facts on the training rows, compared with the checkpoint's. Raises UserError where this is another run.
    """
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    changed = changes(recipe, folder, data, state["data"])
    reader = PartReader(sorted(folder.glob("rank-*.safetensors")))
    reader.restore(engine.parts(reading=True), engine.optimizers, state["scalars"], engine.make_room)
    engine.restored()
    engine.loss_scale.value = state["loss_scale"]["value"]
    engine.loss_scale.good_steps = state["loss_scale"]["good_steps"]
    progress = {name: state[name] for name in ("step", "tokens", "supervised_tokens", "tokens_by_source")}
    progress["padding_tokens"] = state.get("padding_tokens", 0)  # older checkpoints count none
    return Resumed(progress, changed, state["trackers"])
