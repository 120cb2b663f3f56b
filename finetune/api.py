"""Functions for notebooks and scripts, each as the command of its name; all else is the command line's.

    from finetune.api import evaluate, export, generate, load_recipe, plan, train, verify

    recipe = load_recipe("lora.yaml", "optimizer.lr=1e-4")
    plan(recipe, "8xH100-80")[0]["step_s"]
    run_dir = train(recipe)
    generate(run_dir, ["What are your opening hours?"])
    export(run_dir, to="gguf")

Each raises UserError (finetune/errors.py) for what the user can fix. All but `plan`, whose name is a package's, can be
imported from `finetune` as well.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.errors import UserError
from finetune.features import load_recipe as _load_recipe
from finetune.recipe import Recipe
from finetune.startup import quiet_libraries, sleep_at_barriers

if TYPE_CHECKING:
    from finetune.release.export.verify import Figures
    from finetune.release.inference.evaluate import Score


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
    sleep_at_barriers()
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
    audio: Sequence[str | Path] = (),
    videos: Sequence[str | Path] = (),
    **sampling: Any,
) -> list[str]:
    """Returns the answers of a trained model (a run directory or a model folder). temperature 0: greedy.

    images, audio, videos: files that a model which sees, or hears, is given ahead of each prompt.
    sampling: top_p, top_k, repetition_penalty, seed, stop, as options of the command line.
    """
    quiet_libraries()
    sleep_at_barriers()
    from finetune.release.inference.answering import answers
    from finetune.release.inference.sampling import Sampling

    chosen = Sampling(max_new_tokens, temperature, **sampling)
    files = ([*map(Path, of_kind)] for of_kind in (images, audio, videos))
    return answers(Path(run_dir), prompts, chosen, system, *files)


def plan(recipe: Recipe | str | Path, *on: str, nodes: int = 1, by: str = "time") -> list[dict[str, Any]]:
    """Returns the accelerate configs that can run a recipe on devices such as "8xH100-80" or "2xcpu", the best first,
    with memory, time and price of each, as `plan --json` (docs/reference/plan.md). by: time or price."""
    from finetune.plan.answer import as_dicts
    from finetune.plan.command import PlanOptions
    from finetune.plan.command import plan as choose

    if not on:
        raise UserError("plan: no devices. Fix: name some, such as plan(recipe, '8xH100-80')")
    if by not in ("time", "price"):
        raise UserError(f"plan: by={by!r} is no such order. Fix: use time or price")
    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    name = Path("the recipe") if isinstance(recipe, Recipe) else Path(recipe)
    request, choices, _ = choose(name, (), PlanOptions(on, nodes, by), lambda _path, _overrides: loaded)
    return as_dicts(request, choices)


def export(
    run_dir: str | Path,
    to: str = "hf",
    out: str | Path | None = None,
    *,
    step: str | None = None,
    dtype: str | None = None,
    quantized: str | None = None,
    base: str | None = None,
    llama_cpp: str | Path | None = None,
    imatrix: int | None = None,
) -> Path:
    """Writes the result of a run as `to` (hf, vllm, gguf or ollama), compares it with the run, and returns its place.
    Raises RunFailure if they differ; nothing has its name then.

    step: number of a checkpoint, or best; dtype: such as bfloat16, or q4_k_m; quantized: int8 or fp8; base: folder or
    id of the base, if it has moved; llama_cpp: folder of llama.cpp's tools; imatrix: rows of an importance matrix.
    """
    quiet_libraries()
    sleep_at_barriers()
    from rich.console import Console

    from finetune.release.export.commands import ExportOptions, export_run

    chosen = ExportOptions(
        *(to, step, None if out is None else Path(out), dtype, base),
        quantized=quantized,
        llama_cpp=None if llama_cpp is None else Path(llama_cpp),
        imatrix=imatrix,
    )
    return Path(export_run(Path(run_dir), chosen, Console())["out"])


def verify(
    exported: str | Path, run_dir: str | Path, step: str | None = None, base: str | None = None
) -> Figures | None:
    """Compares an export with its run: tensors, then answers on rows of the run. Returns the figures; None for a
    format that has no answers. Raises RunFailure if they differ."""
    quiet_libraries()
    sleep_at_barriers()
    from rich.console import Console

    from finetune.release.export.commands import verify_run
    from finetune.release.export.verify import ROWS

    return verify_run(Path(exported), Path(run_dir), step, base, ROWS, Console())


def evaluate(
    run_dir: str | Path,
    *tasks: str,
    folder: str | Path | None = None,
    limit: int | None = None,
    fewshot: int | None = None,
    base: bool = True,
    head: bool = False,
    rows: str | Path | None = None,
) -> dict[str, Score]:
    """Returns the scores of a run and of its base on tasks of lm-evaluation-harness, or on a file's rows, by
    "task/metric", and writes them to evaluate.json of the run.

    rows: a file of questions and answers, whose name is the task; folder: YAML files of own tasks; limit: rows of each;
    fewshot: examples in each prompt; base: whether the base is scored as well; head: whether drafts of a head that
    predicts ahead are counted, as "mtp/acceptance".
    """
    quiet_libraries()
    sleep_at_barriers()
    from rich.console import Console

    from finetune.release.inference.evaluate import EvaluateOptions, evaluate_runs

    tasks_in, file = (None if path is None else Path(path) for path in (folder, rows))
    options = EvaluateOptions(tasks, tasks_in, limit, fewshot, base=base, head=head, rows=file)
    (scores,) = evaluate_runs([Path(run_dir)], options, Console())
    return scores
