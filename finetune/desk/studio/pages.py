"""Values of the studio's pages: what `runs`, `check --recipe-only` and `logs` read from the folder's files."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from finetune.data.formats.converters import FORMATS
from finetune.desk.studio.actions import Form, run_of
from finetune.desk.studio.jobs import Jobs, StartedCommand, command_line
from finetune.desk.studio.project_folder import MOST_RECIPE, OF_A_RUN, Contents, inside_or_shipped
from finetune.desk.studio.run_state import STOPPED_EARLY, run_state
from finetune.desk.view import web_page
from finetune.desk.view.run_log import follow
from finetune.engine.hardware import read_hardware
from finetune.errors import RunFailure, UserError
from finetune.features import load_recipe
from finetune.plan.run_list import evaluation, evaluation_name, read_run
from finetune.plan.tables import Prices, read_prices
from finetune.recipe import RecipeError
from finetune.recipe.schema import MODES
from finetune.release.export.formats import EIGHT_BITS, EXPORTS
from finetune.shipped import here_or_shipped
from finetune.tracking.metrics import GENERATIONS
from finetune.utils import readable_bytes, readable_hours

_TEMPLATES = Path(__file__).parent / "templates"
PLACES = {  # the pages of the bar, in the order in which one works
    "/": "Runs",
    "/data": "Data",
    "/recipe": "Recipe",
    "/plan": "Plan",
    "/compare": "Compare",
    "/chat": "Chat",
    "/export": "Export",
    "/commands": "Commands",
}
_LOG_LINES = 14
_NEEDED = ("metrics.jsonl", "plan.json", "recipe.yaml")  # of a run that has begun
_KINDS = {0: "finished", 75: "stopped", 130: "stopped"}
_ENDS = {0: "done", 75: "stopped", 130: "interrupted", -1: "ended with the machine or was killed"}


@functools.cache
def _environment() -> Any:
    environment = web_page.environment(_TEMPLATES)
    environment.filters.update(bytes=readable_bytes, duration=readable_hours, command=command_line)
    return environment


def render(template: str, title: str, place: str, jobs: Jobs, **values: Any) -> str:
    """Returns a page. place: its entry in the bar."""
    head = Markup(
        '<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{escape(title)} · finetune studio</title>\n'
        '<link rel="stylesheet" href="/static/page.css"><link rel="stylesheet" href="/static/studio.css">\n'
        '<link rel="icon" href="data:,"><script src="/static/studio.js" defer></script>'
    )
    shown = {
        "heading": title,
        "eyebrow": "" if title == PLACES[place] else PLACES[place],
        "places": PLACES,
        "here": place,
    }
    shown |= {"folder": jobs.folder.name or "/", "num_running": len(jobs.running())}
    return _environment().get_template(template).render(head=head, **shown, **values)


def fragment(template: str, **values: Any) -> str:
    """Returns a part of a page, which the page asks for again and again."""
    return _environment().get_template(template).render(**values)


def run_rows(jobs: Jobs, runs: Sequence[str]) -> list[dict[str, Any]]:
    """Returns what `runs` says of each run."""
    launches, prices = jobs.last_launches(), read_prices()
    return [run_row(jobs, run, launches.get(run), prices) for run in runs]


def run_row(jobs: Jobs, run: str, launch: StartedCommand | None, prices: Prices) -> dict[str, Any]:
    """launch: the studio's last one of this run."""
    folder, state = jobs.folder / run, run_state(jobs, run, launch)
    info = read_run(folder, prices)
    is_silent = info.silent_s is not None and state.launch is None  # no process is known that could say more
    is_live = state.is_live and not is_silent
    has_begun = info.step > 0 or bool(info.evaluation)
    missing = [f"{name} is missing" for name in _NEEDED if not (folder / name).exists()]
    return {
        "path": run,
        "name": Path(run).name,
        "status": "running?" if is_silent else state.name,
        "kind": state.kind,
        "state": state,
        "is_live": is_live,
        "is_silent": is_silent,
        "has_begun": has_begun,
        "info": info,
        "share": info.step / info.steps if info.steps else None,
        "evaluation": evaluation(info),
        "evaluation_name": evaluation_name(info),
        "problems": [*(missing if state.has_steps and not is_live else ()), *info.problems],
        "has_result": any((folder / "model" / name).is_file() for name in ("config.json", "adapter_config.json")),
    }


def run_values(jobs: Jobs, run: str) -> dict[str, Any]:
    """Returns what the page of a run shows."""
    job = jobs.last_launches().get(run)
    row = run_row(jobs, run, job, read_prices())
    again = launch_fields(job.words if job else ())
    if (jobs.folder / run / "recipe.yaml").is_file():
        again |= {"recipe": f"{run}/recipe.yaml", "overrides": ""}  # that of the run has them all
    return {
        "row": row,
        "log": run_log(jobs.folder / run),
        "job": job_row(jobs, job) if job else None,
        "again": again,
        "first_recipe": _first_recipe(jobs, run),
        "is_early": row["state"].name in (STOPPED_EARLY, "failed before its first step", "not begun"),
        "shows_report": row["has_begun"] or (not row["is_live"] and has_files(jobs.folder / run)),
        "stamp": stamp(jobs, [run]),
    }


def _first_recipe(jobs: Jobs, run: str) -> str:
    """Returns the recipe that a run was begun from, by the studio: it is resumed from its own copy. "": not known."""
    launches = [job for job in jobs.all() if job.action == "launch" and job.about == run]
    recipes = (launch_fields(job.words)["recipe"] for job in launches)
    return next((recipe for recipe in recipes if not recipe.startswith(f"{run}/")), "")


def has_files(run: Path) -> bool:
    return any((run / name).is_file() for name in OF_A_RUN)


def launch_fields(words: Sequence[str]) -> dict[str, str]:
    """Returns the fields of the form whose command these are; all are "" if it is another.

    >>> launch_fields(["-m", "finetune", "launch", "--num-processes", "2", "my.yaml", "run.seed=7"])
    {'config': '', 'processes': '2', 'recipe': 'my.yaml', 'overrides': 'run.seed=7'}
    """
    fields: dict[str, str] = dict.fromkeys(("config", "processes", "recipe", "overrides"), "")
    left = list(words[3:])
    if tuple(words[:3]) != ("-m", "finetune", "launch"):
        return fields
    names = {"--config-file": "config", "--num-processes": "processes"}
    while len(left) > 2 and left[0] in names:
        fields[names[left[0]]] = left[1]
        left = left[2:]
    return {**fields, "recipe": left[0], "overrides": shlex.join(left[1:])} if left else fields


def stamp(jobs: Jobs, runs: Sequence[str]) -> str:
    """Returns a text that changes when the report of runs does."""
    seen = []
    for run in runs:
        for name in (*OF_A_RUN, GENERATIONS, "evaluate.json"):
            try:
                status = (jobs.folder / run / name).stat()
                seen.append(f"{name} {status.st_mtime_ns} {status.st_size}")
            except OSError:
                continue
    return hashlib.sha256("\n".join(seen).encode()).hexdigest()[:16]


def run_log(run: Path) -> list[str]:
    """Returns the last lines of `logs`."""
    try:
        return list(follow(run, _LOG_LINES, False))
    except UserError:
        return []


def recipe_problems(path: str, text: str) -> list[dict[str, Any]]:
    """Returns the problems of a recipe that may not be saved yet, as `check --recipe-only` does. Raises UserError if it
    is too long."""
    check_length(path, text)
    try:
        load_recipe(path, text=text)
    except RecipeError as error:
        own = str(here_or_shipped(Path(path)))
        return [
            {
                "line": problem.place.line if problem.place.file in (path, own) else None,
                "place": str(problem.place),
                "text": str(problem).removeprefix(f"{problem.place}: "),
            }
            for problem in error.problems
        ]
    except UserError as error:
        return [{"line": None, "place": path, "text": str(error)}]
    return []


def recipe_text(path: str, folder: Path) -> tuple[str, str]:
    """Returns the text of a recipe and its version. Raises UserError."""
    file = here_or_shipped(inside_or_shipped(path, folder))
    try:
        content = file.read_bytes() if file.stat().st_size <= MOST_RECIPE else b""
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UserError(f"{path}: cannot be read: {reason}. Fix: check its permissions, and that it is UTF-8") from None
    if not content and file.stat().st_size:
        raise UserError(_too_long(path))
    return text, _digest(content) if (folder / path).exists() else ""


def version(file: Path) -> str:
    """Returns what another text of this file does not have; "" if there is no file."""
    try:
        return _digest(file.read_bytes())
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise UserError(f"{file.name}: cannot be read: {error.strerror}. Fix: check the path") from None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def check_length(path: str, text: str) -> None:
    """Raises UserError for a text that is no recipe: YAML of megabytes takes minutes."""
    if len(text) > MOST_RECIPE:
        raise UserError(_too_long(path))


def _too_long(path: str) -> str:
    return (
        f"{path}: longer than the studio reads ({MOST_RECIPE:,} characters). Fix: shorten it; a recipe names its rows "
        "in files of their own"
    )


def job_row(jobs: Jobs, job: StartedCommand) -> dict[str, Any]:
    status = jobs.status(job)
    return {
        "job": job,
        "status": status,
        "state": "running" if status is None else _ENDS.get(status, f"failed, status {status}"),
        "kind": "running" if status is None else _KINDS.get(status, "failed"),
    }


def job_answer(jobs: Jobs, job: StartedCommand, start: int) -> dict[str, Any]:
    """Returns what a page that follows a command needs next."""
    row = job_row(jobs, job)  # before the output: what it prints at its end is not missed
    text, end = jobs.output(job, start)
    page = job.page if row["status"] == 0 and job.page and (jobs.folder / job.page).is_file() else None
    return {"number": job.number, "running": row["status"] is None, "kind": row["kind"], "state": row["state"]} | {
        "seconds": max(0, round(time.time() - job.begun)),  # the clock may have been set
        "text": text,
        "next": end,
        "page": f"/jobs/{job.number}/page" if page else None,
    }


def devices() -> list[tuple[str, str]]:
    """Returns the names of devices for `plan --on`, each with what it is."""
    listed = [(key, f"{device.name}, {device.memory_gb:g} GB") for key, device in read_hardware().devices.items()]
    return [("cpu", "this machine's processors"), *listed]


def served_url(jobs: Jobs, job: StartedCommand) -> str | None:
    """Returns the address that `serve` has printed; None before."""
    match = re.search(r"^serving .+ at (http://127\.0\.0\.1:\d+/v1) ", jobs.output(job)[0], re.MULTILINE)
    return match[1] if match and job.action == "serve" else None


def choices(contents: Contents) -> dict[str, Any]:
    """Returns what the fields of forms can be filled with."""
    return {
        "recipes": contents.recipes,
        "has_own_recipes": contents.has_own_recipes,
        "configs": contents.configs,
        "models": contents.models,
        "data": contents.data,
        "modes": MODES,
        "formats": sorted(FORMATS),
        "exports": {name: (one.about, one.dtypes) for name, one in EXPORTS.items()},
        "eight_bits": EIGHT_BITS,
    }


def free_run_name(path: str, folder: Path) -> str:
    """Returns a name for another run of a recipe, `try-2` after `try`; "" if its own is free, or it has problems."""
    if not (taken := run_of(Form({"recipe": path}, folder))) or not has_files(folder / taken):
        return ""
    stem = re.sub(r"-\d{1,6}$", "", Path(taken).name)
    names = (f"{stem}-{number}" for number in itertools.count(2))
    return next(name for name in names if not (folder / taken).with_name(name).exists())


def as_events(pieces: Any) -> Any:
    """Yields pieces of an answer as lines of JSON; a line with `error` at its end if it broke off."""
    try:
        for text, is_thought in pieces:
            yield json.dumps({"thought" if is_thought else "text": text}) + "\n"
    except (UserError, RunFailure) as error:
        yield json.dumps({"error": str(error)}) + "\n"
