"""Three functions for notebooks and scripts; all else is the command line's.

    from finetune import generate, load_recipe, train

    recipe = load_recipe("lora.yaml", "optimizer.lr=1e-4")
    run_dir = train(recipe)
    generate(run_dir, ["What are your opening hours?"])

Each raises UserError (finetune/errors.py) for what the user can fix.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.features import load_recipe as _load_recipe
from finetune.recipe import Recipe
from finetune.startup import quiet_libraries, short_spins


def load_recipe(path: str | Path, *overrides: str) -> Recipe:
    """Returns a recipe, frozen and checked; overrides: as on the command line, `optimizer.lr=1e-4`.

    `recipe.model_copy(update=...)` makes others of it.
    """
    return _load_recipe(path, overrides)


def train(recipe: Recipe | str | Path, *overrides: str) -> Path:
    """Trains a recipe, or a file with overrides, in this process; returns the run directory. An interrupt (SIGINT)
    saves and raises `Stopped`; the same call resumes.

    Several processes are started by `finetune launch` or `accelerate launch`, of a script that calls this as well.
    """
    quiet_libraries()
    short_spins()
    from finetune.data.sources.hub import check_hub

    name = "the recipe" if isinstance(recipe, Recipe) else str(recipe)
    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, *overrides)
    check_hub(loaded)
    from finetune.engine.start import leave_group
    from finetune.features import all_features
    from finetune.plan.comparison import predict_run
    from finetune.training.run import train as run
    from finetune.training.signals import StopRequest, listening

    on_main = threading.current_thread() is threading.main_thread()  # the only one that may handle signals
    with listening() if on_main else contextlib.nullcontext(StopRequest()) as stop:
        folder = run(loaded, name, stop, predict=predict_run, features=all_features())
        leave_group()
    return folder


def generate(
    run_dir: str | Path,
    prompts: Sequence[str],
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    system: str | None = None,
    images: Sequence[str | Path] = (),
    **sampling: Any,
) -> list[str]:
    """Returns the answers of a trained model (a run directory or a model folder). temperature 0: greedy.

    images: files of pictures that a model of a run on images sees ahead of each prompt.
    sampling: top_p, top_k, repetition_penalty, seed, stop, as options of the command line.
    """
    quiet_libraries()
    short_spins()
    from finetune.release.inference.answering import answers
    from finetune.release.inference.sampling import Sampling

    chosen = Sampling(max_new_tokens, temperature, **sampling)
    return answers(Path(run_dir), prompts, chosen, system, [Path(image) for image in images])
