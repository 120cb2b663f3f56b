"""`evaluate RUN ...`: tasks of lm_eval, or a file's rows, answered by trained models and their base, side by side;
`--head`: the drafts of a head that predicts ahead, in the same way.

Both use the run's chat template and end tokens, so the difference is the effect of training: gains in one task,
forgetting in others. All answer the same rows, so differences have the standard error of paired samples. Figures go
into evaluate.json, into the line of metrics.jsonl of the step evaluated (`eval_tasks/...`), and to the run's trackers.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig

from finetune.checkpoints.card_metadata import with_metadata
from finetune.checkpoints.folder import best_checkpoint, step_of
from finetune.checkpoints.trained import Trained, find_trained
from finetune.errors import RunFailure, UserError
from finetune.models.added_tokens import grow_to
from finetune.models.base_config import first_line
from finetune.models.remote_code import load_auto
from finetune.models.tokenizer import read_tokenizer
from finetune.recipe import Recipe
from finetune.release.export.loading import auto_class, default_device, load_result
from finetune.release.export.verify_answers import load_reference
from finetune.release.inference.answered_rows import TaskMetric, measure_rows
from finetune.release.inference.head_acceptance import measure_head
from finetune.startup import is_verbose
from finetune.tracking.metrics import add_to_step, read_metrics
from finetune.tracking.trackers import Trackers
from finetune.utils import write_atomically

EVALUATED = "evaluate.json"
ACCEPTANCE = "mtp/acceptance"
_FIELDS = ("trained", "trained_stderr", "base", "base_stderr", "difference", "difference_stderr")


@dataclass(frozen=True)
class EvaluateOptions:
    tasks: tuple[str, ...] = ()
    folder: Path | None = None  # YAML files of tasks
    limit: int | None = None
    fewshot: int | None = None  # None: the task's own
    batch_size: int = 8
    base: bool = True  # whether to evaluate the base, too
    step: str | None = None  # a checkpoint's number or `best`; None: the result
    head: bool = False  # whether to measure the head that predicts ahead
    rows: Path | None = None  # a file whose answers are compared, see `answered_rows.py`


@dataclass
class Score:
    """A metric of a task. difference: trained - base; over_first: for several runs, trained - trained of the first."""

    rows: int
    trained: float
    trained_stderr: float | None
    base: float | None = None
    base_stderr: float | None = None
    difference: float | None = None
    difference_stderr: float | None = None
    over_first: float | None = None
    over_first_stderr: float | None = None
    of_rows: dict[int, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Returns the figures, without values of rows."""
        return {name: value for name, value in asdict(self).items() if name != "of_rows"}


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> tuple[float, float] | tuple[None, None]:
    """Returns the mean of the differences of n rows, d_i = ours_i - theirs_i, and its standard error:

        sqrt(sum_i (d_i - mean)^2 / (n (n - 1)))

    Rows that are hard, or easy, for both do not add to it: it is that of independent samples less twice their
    covariance (https://arxiv.org/abs/2411.00640). None with fewer than two rows in common.
    """
    if len(ours) < 2 or ours.keys() != theirs.keys():
        return None, None
    differences = [ours[row] - theirs[row] for row in ours]
    count, mean = len(differences), math.fsum(differences) / len(differences)
    return mean, math.sqrt(math.fsum((one - mean) ** 2 for one in differences) / (count * (count - 1)))


def evaluate_runs(run_dirs: Sequence[Path], options: EvaluateOptions, console: Console) -> list[dict[str, Score]]:
    """Returns scores by "task/metric" of each run, and writes them. A base shared by runs is evaluated once. Raises
    UserError for an invalid run or task."""
    if not (options.tasks or options.rows or options.head):
        fix = "give --tasks, --rows FILE of questions and answers, or --head for the drafts of a model's head"
        raise UserError(f"evaluate: nothing to measure. Fix: {fix}")
    runs = [find_trained(run_dir, options.step) for run_dir in run_dirs]
    manager = _task_manager(options) if options.tasks else None
    bases = dict[str, dict[str, TaskMetric]]()
    scores_of_runs = [_evaluate(trained, options, manager, bases, console) for trained in runs]
    for scores in scores_of_runs[1:]:
        for name, score in scores.items():
            score.over_first, score.over_first_stderr = paired(score.of_rows, scores_of_runs[0][name].of_rows)
    if len(runs) > 1:
        show_scores(console, run_dirs, scores_of_runs)
    return scores_of_runs


def _evaluate(
    trained: Trained,
    options: EvaluateOptions,
    manager: Any,
    bases: dict[str, dict[str, TaskMetric]],
    console: Console,
) -> dict[str, Score]:
    """Returns the scores of one run, and writes them. bases: results of bases, extended in place."""
    run_dir, recipe = trained.run_dir, trained.recipe
    with _locked(run_dir):
        scores = _of_head(trained, options) if options.head else {}
        if options.tasks or options.rows:
            scores |= _of_tasks(trained, options, manager, bases)
        show_scores(console, [run_dir], [scores])  # before writing: a full disk must not lose them
        how = {"limit": options.limit, "fewshot": options.fewshot}
        how |= {"lm_eval": metadata.version("lm_eval")} if options.tasks else {}
        write_scores(run_dir, recipe, scores, how, trained.step)
    return scores


def _of_head(trained: Trained, options: EvaluateOptions) -> dict[str, Score]:
    """Returns the share of a head's drafts that its model accepts."""
    ours, before = measure_head(trained, options.limit, options.base)
    score = Score(len(ours.of_rows), ours.acceptance, ours.stderr(), of_rows=ours.values())
    if before is not None:
        _compare(score, TaskMetric(score.rows, before.acceptance, before.stderr(), before.values()))
    return {ACCEPTANCE: score}


def _of_tasks(
    trained: Trained, options: EvaluateOptions, manager: Any, bases: dict[str, dict[str, TaskMetric]]
) -> dict[str, Score]:
    """Returns the scores of tasks. bases: results of bases, extended in place."""
    run_dir, recipe = trained.run_dir, trained.recipe
    if not trained.is_checkpoint:
        model, tokenizer = load_result(run_dir)
    elif recipe is not None and recipe.objective.scores_sequences:
        raise UserError(f"{run_dir}: reward models and classifiers do not generate text. Fix: use `finetune score`")
    else:  # in fp32
        model, tokenizer = load_reference(trained).to(default_device()), read_tokenizer(trained.settings)
    ends = GenerationConfig.from_pretrained(trained.settings)

    def measure(measured: Any) -> dict[str, TaskMetric]:
        measured.generation_config = ends
        found = _measure(measured, tokenizer, manager, options) if options.tasks else {}
        return found | (measure_rows(measured, tokenizer, trained, options) if options.rows else {})

    is_adapter = hasattr(model, "disable_adapter")
    results = measure(model.get_base_model() if is_adapter else model)
    scores = {name: Score(one.rows, one.value, one.stderr, of_rows=one.of_rows) for name, one in results.items()}
    name = recipe.model.name if recipe is not None else None
    # Templates, ends and added tokens are the run's; a result runs in its own precision.
    parts = (name, recipe and (recipe.model.revision, recipe.tokens), tokenizer.chat_template, ends.eos_token_id)
    if options.rows is not None and recipe is not None:  # and how rows are answered
        parts = (*parts, recipe.evaluate.max_new_tokens, recipe.evaluate.answer, recipe.data.media)
    key = repr((*parts, trained.is_checkpoint, is_adapter))
    of_base = bases.get(key, {}) if name is not None and options.base else {}
    if options.base and not of_base and is_adapter:
        with model.disable_adapter():
            of_base = bases[key] = measure(model.get_base_model())
    elif options.base and not of_base and recipe is not None and name is not None:
        device, dtype, size = model.device, model.dtype, len(tokenizer)
        del model  # before its base is loaded
        code, revision = recipe.model.trust_remote_code, recipe.model.revision or "main"
        try:
            base = load_auto(auto_class(name, code), name, code, revision=revision, dtype="auto")
        except (OSError, ValueError) as error:
            reason = f"the base model {name!r} cannot be loaded: {first_line(error)}"
            raise UserError(f"{reason}. Fix: put it where the run found it, or give --no-base") from None
        base = grow_to(base, size)
        of_base = bases[key] = measure((base.to(dtype) if trained.is_checkpoint else base).to(device).eval())
    for task, one in of_base.items():
        _compare(scores[task], one)
    return scores


def _compare(score: Score, base: TaskMetric) -> None:
    """Add the base's value, and the difference to it."""
    score.base, score.base_stderr = base.value, base.stderr
    score.difference, score.difference_stderr = paired(score.of_rows, base.of_rows)


def _task_manager(options: EvaluateOptions) -> Any:
    """Task index: only `folder` if it defines every task, else lm_eval's. Raises UserError for other names."""
    try:
        from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError("`evaluate` needs the package lm_eval. Fix: pip install 'lm_eval>=0.4.13'") from None
    if not is_verbose():
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if options.folder is not None and not options.folder.is_dir():
        raise UserError(f"--task-folder {options.folder}: no such folder. Fix: check the path")
    include = str(options.folder) if options.folder else None
    manager = TaskManager(include_path=include, include_defaults=False) if include else TaskManager()
    own = manager.all_tasks if include else []
    if include and {*options.tasks} - {*own}:
        manager = TaskManager(include_path=include)
    if unknown := [name for name in options.tasks if name not in manager.all_tasks]:
        has = f"{options.folder} has {', '.join(own) or 'none'}" if include else "--task-folder reads tasks in YAML"
        fix = "Fix: give a task that `lm-eval ls tasks` lists" + (", or one of the folder" if include else "")
        raise UserError(f"--tasks {unknown[0]}: lm_eval has no such task; {has}. {fix}")
    try:
        manager.load(list(options.tasks))
    except (OSError, ValueError) as error:
        raise UserError(
            f"--tasks {','.join(options.tasks)}: data cannot be read: {first_line(error)}. Fix: download it while "
            "online, or correct the task's `dataset_path`"
        ) from None
    return manager


def _measure(model: Any, tokenizer: Any, manager: Any, options: EvaluateOptions) -> dict[str, TaskMetric]:
    """Returns a model's results by "task/metric"."""
    from lm_eval.evaluator import simple_evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

    has_template = bool(tokenizer.chat_template)
    bos = False if has_template else None  # a template itself writes the token at the beginning
    results = simple_evaluate(
        HFLM(model, tokenizer=tokenizer, batch_size=options.batch_size, add_bos_token=bos),
        tasks=list(options.tasks),
        task_manager=manager,
        limit=options.limit,
        num_fewshot=options.fewshot,
        apply_chat_template=has_template,
        log_samples=True,
    )
    assert results is not None
    metrics = {}
    for task, values in results["results"].items():  # {"acc,none": 0.5, "acc_stderr,none": 0.1, ...}
        rows = results["n-samples"].get(task, {}).get("effective", 0)  # a group has none of its own
        for key, value in values.items():
            metric, comma, picked = key.partition(",")
            if comma and not metric.endswith("_stderr") and isinstance(value, int | float):
                stderr = values.get(f"{metric}_stderr,{picked}")
                stderr = float(stderr) if isinstance(stderr, int | float) else None
                samples = [one for one in results["samples"].get(task, ()) if one["filter"] == picked]
                of_rows = {one["doc_id"]: one.get(metric) for one in samples}
                if not of_rows or not all(isinstance(one, int | float) for one in of_rows.values()):
                    of_rows = {}
                elif not math.isclose(math.fsum(of_rows.values()) / len(of_rows), value, abs_tol=1e-9):
                    of_rows = {}  # a metric of the corpus
                name = f"{task}/{metric}" + ("" if picked == "none" else f",{picked}")
                metrics[name] = TaskMetric(rows, float(value), stderr, of_rows)
    return metrics


@contextlib.contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    """Holds a run's lock, so that no other process writes its metrics. Raises UserError if a launch holds it."""
    if not (run_dir / "metrics.jsonl").is_file():
        yield
        return
    lock = FileLock(run_dir / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"{run_dir}: a launch is training there. Fix: evaluate it when it is done") from None
    try:
        yield
    finally:
        lock.release()


# --- output


def write_scores(
    run_dir: Path, recipe: Recipe | None, scores: dict[str, Score], how: dict[str, Any], checkpoint: int | None = None
) -> None:
    """Write evaluate.json, keeping other tasks and steps, and add the figures to metrics and trackers.

    A result has its scores under "task/metric", a checkpoint under "task/metric@step". how: settings of the
    evaluation; checkpoint: its step, None for a result. Raises RunFailure if the disk is full, which leaves both files
    old or complete.
    """
    try:
        path, suffix = run_dir / EVALUATED, "" if checkpoint is None else f"@{checkpoint}"
        before = json.loads(path.read_text(encoding="utf-8"))["scores"] if path.is_file() else {}
        again = {(name.partition("/")[0], suffix[1:]) for name in scores}
        kept = {k: score for k, score in before.items() if (k.partition("/")[0], k.partition("@")[2]) not in again}
        step = _step_of_result(run_dir, recipe) if checkpoint is None else checkpoint
        new = {}
        for name, score in scores.items():
            figures = {field: getattr(score, field) for field in ("rows", *_FIELDS)}
            new[f"{name}{suffix}"] = {"step": step, **figures, **how}
        write_atomically(path, json.dumps({"scores": kept | new}, indent=1) + "\n")
        if step is not None and recipe is not None:
            _log_scores(run_dir, recipe, scores, step, is_result=checkpoint is None)
        _add_to_card(run_dir, kept | new)  # the last, as people edit cards and may have damaged this one
    except OSError as error:
        raise RunFailure(
            f"{run_dir}: the scores above could not be written: {error}. Fix: free space and run the command again"
        ) from None


def _log_scores(run_dir: Path, recipe: Recipe, scores: dict[str, Score], step: int, *, is_result: bool) -> None:
    """Add scores to the line of a step, and to the trackers. Raises OSError."""
    values = {
        f"eval_tasks/{name}" + ("" if field == "trained" else f"/{field}"): value
        for name, score in scores.items()
        for field in _FIELDS
        if (value := getattr(score, field)) is not None
    }
    add_to_step(run_dir / "metrics.jsonl", step, values)
    wandb = run_dir / "wandb.json"
    ids = {"wandb": json.loads(wandb.read_text(encoding="utf-8"))["id"]} if wandb.is_file() else {}
    trackers = Trackers(recipe.tracking, recipe.run.name, run_dir, {}, ids)
    trackers.log(values, step)
    if is_result:
        trackers.summary(values)
    trackers.finish()


def _add_to_card(run_dir: Path, scores: dict[str, Any]) -> None:
    """Write the scores of the result into its card, as the hub shows them. Raises OSError."""
    path = run_dir / "model" / "README.md"
    # What a head drafts is said of the run's own rows, no data set that others have.
    of_result = {name: one["trained"] for name, one in scores.items() if "@" not in name and name != ACCEPTANCE}
    if not of_result or not path.is_file():
        return
    by_task: dict[str, list[tuple[str, float]]] = {}
    for name, value in of_result.items():
        task, _, metric = name.partition("/")
        by_task.setdefault(task, []).append((metric, value))
    results = [
        {
            "task": {"type": "text-generation"},
            "dataset": {"name": task, "type": task},
            "metrics": [{"type": metric, "value": value} for metric, value in metrics],
        }
        for task, metrics in by_task.items()
    ]
    card = path.read_text(encoding="utf-8")
    write_atomically(path, with_metadata(card, {"model-index": [{"name": run_dir.name, "results": results}]}))


def _step_of_result(run_dir: Path, recipe: Recipe | None) -> int | None:
    """Returns None without a run's metrics."""
    lines = read_metrics(run_dir / "metrics.jsonl").lines
    if recipe is not None and recipe.train.result == "best":
        best = best_checkpoint(run_dir / "checkpoints", recipe.checkpoint.best)
        return step_of(best) if best else None
    return lines[-1]["step"] if lines else None


def show_scores(console: Console, run_dirs: Sequence[Path], scores_of_runs: Sequence[dict[str, Score]]) -> None:
    several = len(run_dirs) > 1
    table = Table("task/metric", *["run"][:several], "rows", "base", "trained", "trained - base")
    if several:
        table.add_column(f"- {run_dirs[0].name}")
    for name in scores_of_runs[0]:
        for run_dir, score in zip(run_dirs, [scores[name] for scores in scores_of_runs], strict=True):
            pairs = [(score.base, score.base_stderr), (score.trained, score.trained_stderr)]
            differences = [(score.difference, score.difference_stderr)]
            differences += [(score.over_first, score.over_first_stderr)] if several else []
            cells = [*(_with_error(*one) for one in pairs), *(_with_error(*one, "+") for one in differences)]
            table.add_row(name, *[run_dir.name][:several], f"{score.rows:,}", *cells)
    console.print(table)


def _with_error(value: float | None, stderr: float | None, sign: str = "") -> str:
    if value is None:
        return "–"
    return f"{value:{sign}.4f}" + (f" ± {stderr:.4f}" if stderr is not None else "")
