"""A trainer before its first step, without held-out data: for what measures single steps."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from finetune.engine.base import Engine
    from finetune.training.prepare import Features, Prepared
    from finetune.training.trainer import Trainer


def prepared_run(
    recipe_file: str, overrides: Sequence[str], config_file: str | None = None, features: Features | None = None
) -> Prepared:
    """Returns a recipe ready for the launch of this process, as `train` prepares it. features: default: of the trainer
    alone. Raises UserError."""
    from finetune.engine.launch import read_launch
    from finetune.recipe import load_recipe
    from finetune.training.prepare import TRAINER, prepare

    recipe = load_recipe(recipe_file, [*overrides, "data.eval=[]"])
    return prepare(recipe, recipe_file, read_launch(config_file), features or TRAINER)


def started_engine(prepared: Prepared) -> Engine:
    """Returns the engine of a run whose folder is there."""
    from finetune.engine.start import start_engine
    from finetune.training.run_dir import make_run_folder

    engine = start_engine(prepared.recipe, prepared.launch, prepared.base.config)
    make_run_folder(prepared.recipe.run)
    return engine


def ready_trainer(prepared: Prepared, engine: Engine) -> Trainer:
    """Returns the trainer; `train_step` can be called, which asks its saver whether it has failed."""
    from rich.console import Console

    from finetune.training.signals import StopRequest
    from finetune.training.trainer import Trainer

    trainer = Trainer(prepared, engine, StopRequest(), Console(quiet=True))
    trainer.saver = SimpleNamespace(failed=False)  # type: ignore[assignment]  (`run` makes it)
    return trainer
