"""W&B, TensorBoard and trackio through accelerate's trackers, and MLflow, on the main process only."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import netrc
import os
import re
import secrets
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from finetune.errors import UserError
from finetune.recipe.schema import METRICS, Tracking, Wandb, metric_direction
from finetune.tracking.metrics import is_shown, read_metrics
from finetune.tracking.mlflow_run import MlflowRun, mlflow_problem

Metrics = dict[str, Any]
# Keys and tokens by their public shapes (Hugging Face, W&B's 40 hex digits, cloud keys) and user:password in a URL.
_SECRET = re.compile(
    r"hf_[A-Za-z0-9]{20,}|\b[0-9a-f]{40}\b|AKIA[0-9A-Z]{16}|sk-[A-Za-z0-9_-]{20,}|(?<=://)[^/@\s]+:[^/@\s]+(?=@)"
)
# Values that are commits, which look like W&B's keys.
_COMMIT_KEYS, _COMMIT = ("git_commit", "revision"), re.compile(r"[0-9a-f]{40}\+?")


def enabled_trackers(tracking: Tracking) -> list[str]:
    """Returns the names of the trackers that a recipe enables."""
    switches = {
        "wandb": tracking.wandb is not None,
        "mlflow": tracking.mlflow is not None,
        "tensorboard": tracking.tensorboard,
        "trackio": bool(tracking.trackio),
    }
    return [name for name, on in switches.items() if on]


_PACKAGES = {"mlflow": "mlflow-skinny"}  # others are called as their module


def check_trackers(tracking: Tracking) -> None:
    """Raises UserError if an enabled tracker is not installed, W&B has no API key, or MLflow no store."""
    missing = [name for name in enabled_trackers(tracking) if importlib.util.find_spec(name) is None]
    if missing:
        listed = ", ".join(missing)
        packages = " ".join(_PACKAGES.get(name, name) for name in missing)
        fix = f"pip install {packages}, or remove {listed} from the recipe"
        raise UserError(f"tracking: not installed: {listed}. Fix: {fix}")
    if tracking.mlflow and (problem := mlflow_problem(tracking.mlflow)):
        raise UserError(problem)
    if not tracking.wandb or _wandb_mode(tracking.wandb) != "online" or os.environ.get("WANDB_API_KEY"):
        return
    login, host = None, urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        login = netrc.netrc(os.environ.get("NETRC")).authenticators(host)
    if login is None:
        raise UserError(
            "tracking.wandb: no API key. Fix: run `wandb login`, set WANDB_API_KEY, or use tracking.wandb.mode=offline"
        )


def _wandb_mode(settings: Wandb) -> str:
    """Returns W&B's mode; its own environment variable takes precedence."""
    return os.environ.get("WANDB_MODE") or settings.mode


class Trackers:
    """All trackers of a run. A resumed run keeps its ids at W&B and MLflow."""

    def __init__(self, tracking: Tracking, run_name: str, run_dir: Path, config: Metrics, ids: dict[str, str]):
        """config: empty to add to a run that has stored it. ids: run ids by tracker, from the checkpoint; empty for a
        new run."""
        # W&B's may be enabled later; MLflow gives its own.
        self._ids = {**ids, "wandb": ids.get("wandb") or secrets.token_hex(4)}
        names = enabled_trackers(tracking)
        self._all = [_START[name](tracking, run_name, run_dir, self._ids) for name in names]
        self._run_dir = run_dir
        self._shown: set[tuple[str, int, Path]] = set()
        self._last_step = 0
        flat = _flatten(redact(config))
        texts = {key: "null" if value is None else value for key, value in flat.items()}
        for tracker in self._all if config else ():
            values = flat if tracker.name == "wandb" else texts  # others take no null
            if tracker.name == "tensorboard":  # in the run itself; torch's `add_hparams` makes another, empty run
                from torch.utils.tensorboard.summary import hparams

                for part in hparams(values, {}):
                    tracker.writer.file_writer.add_summary(part)
                tracker.writer.flush()
            else:
                tracker.store_init_configuration(values)

    def run_ids(self) -> dict[str, str]:
        """Returns the state that a checkpoint stores so that a resumed run keeps its ids."""
        return self._ids | {tracker.name: tracker.id for tracker in self._all if isinstance(tracker, MlflowRun)}

    def log(self, metrics: Metrics, step: int) -> None:
        shown = {key: value for key, value in metrics.items() if is_shown(key)}
        numbers = {grouped(key): value for key, value in shown.items() if isinstance(value, int | float)}
        self._last_step = step
        for tracker in self._all:
            tracker.log(numbers, step=step)

    def table(
        self, name: str, columns: list[str], rows: list[list[str]], step: int, pictures: Sequence[Path | None] = ()
    ) -> None:
        """Logs a table: as a table to W&B and MLflow, as text to TensorBoard.

        pictures: of each row, if any. W&B gets them in a column of their own; TensorBoard once, by the row's number.
        """
        for tracker in self._all:
            if tracker.name == "wandb":
                head, data = columns, list[list[Any]](rows)
                if pictures:
                    import wandb

                    cells = [path and wandb.Image(str(path)) for path in pictures]
                    head, data = [*columns, "pictures"], [[*row, cell] for row, cell in zip(rows, cells, strict=True)]
                tracker.log_table(name, columns=head, data=data, step=step)
            elif isinstance(tracker, MlflowRun):
                tracker.log_table(name, columns, rows, step)
            elif tracker.name == "tensorboard":
                cells = [[" ↵ ".join(text.replace("|", "\\|").splitlines()) for text in row] for row in rows]
                lines = [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *cells)]
                tracker.writer.add_text(name, "\n".join(lines), step)
                for i, path in enumerate(pictures, start=1):
                    if path is not None and (name, i, path) not in self._shown:
                        import numpy as np
                        from PIL import Image

                        self._shown.add((name, i, path))
                        pixels = np.asarray(Image.open(path))  # (H, W, 3) uint8
                        tracker.writer.add_image(f"{name}/{i}", pixels, step, dataformats="HWC")

    def summary(self, values: Metrics) -> None:
        """Stores the last evaluation and the best of each metric, of all launches of the run."""
        best = {f"best/{grouped(name)}": value for name, value in best_values(self._run_dir).items()}
        for tracker in self._all:
            if tracker.name == "wandb":
                tracker.run.summary.update({**{grouped(name): value for name, value in values.items()}, **best})
            elif isinstance(tracker, MlflowRun):
                tracker.log(best, self._last_step)

    def artifacts(self, folders: dict[str, Path]) -> None:
        """Gives W&B folders as versions of the run's model, by alias. It reads them in place."""
        for tracker in self._all:
            if tracker.name == "wandb":
                import wandb

                for alias, folder in folders.items():
                    kind = "model" if alias == "result" else "checkpoint"
                    artifact = wandb.Artifact(f"{tracker.run.id}-{kind}", kind)
                    artifact.add_dir(str(folder), policy="immutable")
                    tracker.run.log_artifact(artifact, aliases=[alias])

    def finish(self) -> None:
        for tracker in self._all:
            tracker.finish()

    def finish_preempted(self, exit_status: int) -> None:
        """Finishes a run that will resume: W&B shows it as preempted instead of finished or crashed."""
        for tracker in self._all:
            if tracker.name == "wandb":
                tracker.run.mark_preempting()
                tracker.run.finish(exit_code=exit_status)
            elif isinstance(tracker, MlflowRun):
                tracker.finish("KILLED")
            else:
                tracker.finish()


_GROUPS = {
    "data": ("epoch", "tokens", "supervised_tokens", "padding_tokens"),
    "time": ("step_s", "rank_spread", "straggler"),
    "eval": ("exact_match", "word_error_rate", "normalized_word_error_rate", "character_error_rate"),
}


def grouped(key: str) -> str:
    """Returns a tracker's name for a key of metrics.jsonl: one of train/, eval/, time/, memory/ and data/.

    >>> [grouped(key) for key in ("loss", "eval_loss/chat", "memory_peak_gib", "tokens/chat", "time/data")]
    ['train/loss', 'eval/loss/chat', 'memory/peak_gib', 'data/tokens/chat', 'time/data']
    """
    for group in ("eval", "memory"):
        if key.startswith(f"{group}_"):
            return f"{group}/{key.removeprefix(f'{group}_')}"
    if key.startswith(("time/", "memory/")):
        return key
    group = next((group for group, names in _GROUPS.items() if key.split("/")[0] in names), "train")
    return f"{group}/{key}"


def best_values(run_dir: Path) -> dict[str, float]:
    """Returns the best value of each metric of the run's evaluations, by key of metrics.jsonl."""
    best: dict[str, float] = {}
    for line in read_metrics(run_dir / "metrics.jsonl").lines:
        for name, value in line.items():
            if value is not None and any(fnmatchcase(name, pattern) for pattern in METRICS):
                choose = min if metric_direction(name) == "lower" else max
                best[name] = choose(value, best.get(name, value))
    return best


def _wandb(tracking: Tracking, run_name: str, run_dir: Path, ids: dict[str, str]) -> Any:
    from accelerate.tracking import WandBTracker

    settings = tracking.wandb
    assert settings is not None
    run_id = ids["wandb"]
    (run_dir / "wandb.json").write_text(json.dumps({"id": run_id}), encoding="utf-8")  # for people
    tracker = WandBTracker(
        settings.project,
        entity=settings.entity,
        group=settings.group,
        tags=settings.tags,
        mode=_wandb_mode(settings),
        name=run_name,
        id=run_id,
        resume="allow",
        dir=str(run_dir),
    )
    tracker.start()
    for name, direction in METRICS.items():
        tracker.run.define_metric(grouped(name), summary="min" if direction == "lower" else "max")
    return tracker


def _mlflow(tracking: Tracking, run_name: str, _run_dir: Path, ids: dict[str, str]) -> MlflowRun:
    assert tracking.mlflow is not None
    return MlflowRun(tracking.mlflow, run_name, ids.get("mlflow"))


def _tensorboard(_tracking: Tracking, _run_name: str, run_dir: Path, _ids: dict[str, str]) -> Any:
    from accelerate.tracking import TensorBoardTracker

    tracker = TensorBoardTracker("tensorboard", logging_dir=str(run_dir))
    tracker.start()
    return tracker


def _trackio(tracking: Tracking, run_name: str, _run_dir: Path, _ids: dict[str, str]) -> Any:
    from accelerate.tracking import TrackioTracker

    tracker = TrackioTracker(str(tracking.trackio), name=run_name, resume="allow")
    tracker.start()
    return tracker


_START = {"wandb": _wandb, "mlflow": _mlflow, "tensorboard": _tensorboard, "trackio": _trackio}


def redact(value: Any) -> Any:
    """Returns the same structure with anything that looks like a key or password replaced."""
    if isinstance(value, dict):
        commits = {key for key in _COMMIT_KEYS if isinstance(value.get(key), str) and _COMMIT.fullmatch(value[key])}
        return {key: inner if key in commits else redact(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redact(inner) for inner in value]
    return _SECRET.sub("[redacted]", value) if isinstance(value, str) else value


def _flatten(config: Metrics, prefix: str = "") -> Metrics:
    """Returns one level of dotted keys with numbers, texts and nulls, and the rest as JSON."""
    flat: Metrics = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value if isinstance(value, int | float | str | None) else json.dumps(value)
    return flat
