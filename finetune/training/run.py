"""A run from recipe to result; read this file first.

    recipe, launch -> prepare -> engine -> Trainer -> steps -> result

Every package is entered once, in this order. Errors that the user can fix are raised before the model loads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from finetune.data.dataset import on_disk
from finetune.engine.base import Engine
from finetune.engine.launch import read_launch
from finetune.engine.start import start_engine
from finetune.errors import RunFailure, Stopped, UserError
from finetune.models.base_model import Base, check_same_media, check_same_vocabulary
from finetune.recipe import Recipe
from finetune.training.prepare import TRAINER, Features, Prepared, make_file_features, prepare
from finetune.training.reference import reads_columns, recipe_of_reference
from finetune.training.run_dir import make_run_folder, run_folder
from finetune.training.run_lock import in_use
from finetune.training.signals import StopRequest
from finetune.training.teacher import TeacherPass, recipe_of_teacher
from finetune.training.teacher_pass import compute_predictions
from finetune.training.trainer import Trainer
from finetune.utils import print_line

Predict = Callable[[Prepared, Engine], dict[str, Any]]  # `predicted` of plan.json; called on the main rank


def train(
    recipe: Recipe,
    recipe_file: str,
    stop: StopRequest,
    console: Console | None = None,
    config_file: str | None = None,
    predict: Predict | None = None,
    features: Features = TRAINER,
) -> Path:
    """Runs a recipe on this launch; returns the run directory.

    config_file: an accelerate config, if torchrun launched; predict: calculates the run's expected time and memory, for
    its plan.json; features: that the recipe may use. Raises UserError for errors that the user can fix, RunFailure if
    the run cannot continue, Stopped if a signal requested a stop and everything is saved.
    """
    with started(recipe, recipe_file, stop, console or Console(), config_file, predict, features) as trainer:
        try:
            trainer.run()
        except Stopped:
            trainer.engine.ranks.barrier()  # a launcher ends all processes when the first exits
            raise
    return trainer.folder


def compute_reference(
    recipe: Recipe, recipe_file: str, stop: StopRequest, console: Console, config_file: str | None = None
) -> None:
    """Computes the log-probabilities of `objective.reference_model`, or of the initial model, into the cache, unless
    they exist. Arguments and errors as in `train`; the run itself is unchanged."""
    if "teacher" in recipe.objective.other_models:
        compute_teacher(recipe, recipe_file, stop, console, config_file)
        return
    if not reads_columns(recipe.objective):
        raise UserError(
            f"{recipe_file}: nothing to compute, as no reference is `precomputed`. Fix: train without this step"
        )
    base, name = Base.of(recipe), recipe.objective.other_models.get("reference_model")
    check_same_vocabulary("objective.reference_model", name, base)
    check_same_media("objective.reference_model", name, base)
    of_reference = recipe_of_reference(recipe)
    run = recipe.run.model_copy(update={"name": f"{recipe.run.name}-reference"})
    of_reference = of_reference.model_copy(update={"run": run})
    with started(of_reference, recipe_file, stop, console, config_file) as trainer:
        trainer.say(f"reference of {escape(recipe_file)}: {escape(str(trainer.plan.reference))}")


def compute_teacher(
    recipe: Recipe, recipe_file: str, stop: StopRequest, console: Console, config_file: str | None
) -> None:
    """Computes the predictions of `objective.teacher` for the training data into the cache, unless they
    exist. Arguments and errors as in `train`."""
    if recipe.rollouts is not None:
        raise UserError(
            f"{recipe_file}: nothing to compute. The teacher predicts on the samples of each step, during training. "
            "Fix: train without this step"
        )
    base = Base.of(recipe)
    vocabulary = base.config.get_text_config().vocab_size
    of_teacher = recipe_of_teacher(recipe)
    check_same_media("objective.teacher", recipe.objective.other_models.get("teacher"), base)
    with started(of_teacher, recipe_file, stop, console, config_file) as trainer:
        done = compute_predictions(TeacherPass(recipe, on_disk(trainer.data), vocabulary), trainer)
        trainer.say(f"teacher of {escape(recipe_file)}: {done}")


@contextlib.contextmanager
def started(
    recipe: Recipe,
    recipe_file: str,
    stop: StopRequest,
    console: Console,
    config_file: str | None,
    predict: Predict | None = None,
    features: Features = TRAINER,
) -> Iterator[Trainer]:
    """Yields a trainer for this launch, ready to run. Raises UserError."""
    launch = read_launch(config_file)
    if launch.launched:
        stop.watch_launcher()
    prepared = prepare(recipe, recipe_file, launch, features)
    made = make_file_features(prepared)
    engine = start_engine(recipe, launch, prepared.base.config)
    for line in made if engine.is_main else ():
        print_line(console, line, highlight=False, markup=False)
    make_run_folder(recipe.run)
    with in_use(engine, run_folder(recipe.run)) as run_lock:
        predicted = predict(prepared, engine) if predict is not None and engine.is_main else None
        trainer = Trainer(prepared, engine, stop, console, predicted, run_lock)
        with pushed(trainer, stop):
            try:
                yield trainer
            finally:
                engine.close()


@contextlib.contextmanager
def pushed(trainer: Trainer, stop: StopRequest) -> Iterator[None]:
    """Waits at the end for what `run.push` still sends; no rank waits in a collective meanwhile.

    Raises RunFailure if a run that is complete is not all on the hub.
    """
    make, recipe = trainer.features.make_push, trainer.recipe
    if recipe.run.push is None or make is None or not trainer.engine.is_main:
        yield
        return
    trainer.push = push = make(recipe, stop, trainer.say)
    try:
        yield
    except (Stopped, KeyboardInterrupt):  # a scheduler waits for this process
        push.abandon()
        raise
    except BaseException:
        push.finish()  # it warns; the first error is the run's
        raise
    if (missing := push.finish()) is not None:
        raise RunFailure(missing)
