"""The commands of the studio's buttons: a table, each row made from the fields of a form.

The same function writes the command that is shown next to a button and the one that is run.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from finetune.desk.studio.project_folder import (
    MOST_RECIPE,
    STUDIO,
    as_word,
    base_of,
    inside,
    inside_or_shipped,
    is_utf8,
)
from finetune.errors import UserError
from finetune.features import load_recipe
from finetune.recipe.schema import MODES
from finetune.release.export.formats import EXPORTS
from finetune.shipped import here_or_shipped

PAGES = f"{STUDIO}/pages"
_MODEL = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")  # an id of the hub
_DATASET = re.compile(r"[A-Za-z0-9][\w.:-]*(/[\w.:@-]+)?|https?://\S+")


@dataclass(frozen=True)
class Form:
    """Fields of a form, as the browser sends them, and the folder that they are about."""

    values: Mapping[str, Any]
    folder: Path

    def text(self, name: str, what: str = "") -> str:
        """Returns a field without spaces around it. what: of a field that must be filled in, for the message."""
        value = self.values.get(name) or ""
        if not isinstance(value, str) or "\0" in value or "\n" in value.strip() or not is_utf8(value):
            raise UserError(f"{name}: not one line of text. Fix: take out line breaks and characters that are no text")
        if what and not value.strip():
            raise UserError(f"{name}: nothing is chosen. Fix: choose {what}")
        return value.strip()

    def texts(self, name: str) -> list[str]:
        value = self.values.get(name) or []
        given = value if isinstance(value, list) else [value]
        return [Form({name: one}, self.folder).text(name) for one in given if one]

    def path(self, name: str, what: str) -> str:
        return as_word(inside(self.text(name, what), self.folder))

    def shipped_path(self, name: str, what: str) -> str:
        return as_word(inside_or_shipped(self.text(name, what), self.folder))

    def option(self, name: str, option: str) -> list[str]:
        return [option, value] if (value := self.text(name)) else []

    def number(self, name: str, option: str) -> list[str]:
        value = self.text(name)
        if value and not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value):
            raise UserError(f"{name}: {value} is not a number. Fix: give one in digits, such as 8 or 0.5")
        return [option, value] if value else []

    def overrides(self) -> list[str]:
        """Returns the words of `section.key=value`, quoted as in a shell."""
        try:
            words = shlex.split(self.text("overrides"))
        except ValueError as error:
            raise UserError(f"overrides: {error}. Fix: quote values as in a shell") from None
        if wrong := [word for word in words if not re.match(r"\w[\w.]*=", word)]:
            raise UserError(
                f"overrides: {wrong[0]} is not of the form section.key=value. Fix: write it like optimizer.lr=1e-4"
            )
        return words

    def named(self, name: str, what: str, remote: re.Pattern[str]) -> str:
        """Returns a path in the folder, or the name of something on the hub."""
        value = self.text(name, what)
        is_local = value.startswith((".", "/", "~")) or ".." in value.split("/") or not remote.fullmatch(value)
        return as_word(inside(value, self.folder)) if is_local or os.path.exists(self.folder / value) else value


@dataclass(frozen=True)
class Action:
    """A command. words: of `python`; page: the file that it writes to be shown, from the form; about: the run or recipe
    that it is for."""

    words: Callable[[Form], list[str]]
    page: Callable[[Form], str] | None = None
    about: Callable[[Form], str] = lambda form: form.text("recipe") or form.text("run")
    then: Callable[[Form], str] | None = None  # the page to go on with


def _finetune(*words: str) -> list[str]:
    return ["-m", "finetune", *words]


def _page(name: str) -> Callable[[Form], str]:
    def page(form: Form) -> str:
        subject = form.text("recipe") or "-".join(Path(run).name for run in form.texts("runs"))
        return f"{PAGES}/{name}-{re.sub(r'[^A-Za-z0-9]+', '-', subject).strip('-')[-80:]}.html"

    return page


_INSPECTED, _PLANNED = _page("inspect"), _page("plan")


def _new(form: Form) -> list[str]:
    mode = form.text("mode")
    if mode not in MODES:
        raise UserError(f"mode: no such mode. Fix: choose one of {', '.join(MODES)}")
    model, data = form.named("model", "a model", _MODEL), form.named("data", "data", _DATASET)
    words = [
        "new",
        "--model",
        model,
        "--data",
        data,
        "--mode",
        mode,
        "-o",
        form.path("output", "a name for the recipe"),
    ]
    return _finetune(*words, *form.option("format", "--format"), *form.option("columns", "--columns"))


def _inspect(form: Form) -> list[str]:
    recipe, held_out = form.shipped_path("recipe", "a recipe"), ["--eval"] if form.values.get("held_out") else []
    rows = [*form.number("rows", "--rows"), *form.number("packed", "--packed")]
    return _finetune("inspect", recipe, *form.overrides(), *rows, *held_out, "--html", _INSPECTED(form))


def _launch_options(form: Form) -> list[str]:
    config = ["--config-file", form.shipped_path("config", "a config")] if form.text("config") else []
    return [*config, *form.number("processes", "--num-processes")]


def _check(form: Form) -> list[str]:
    return _finetune("check", form.shipped_path("recipe", "a recipe"), *form.overrides(), *_launch_options(form))


def _plan(form: Form) -> list[str]:
    recipe, places = form.shipped_path("recipe", "a recipe"), form.texts("on")
    if not places:
        raise UserError("hardware: nothing is chosen. Fix: choose at least one")
    if wrong := [place for place in places if not re.fullmatch(r"\d{1,5}x[\w.-]+", place)]:
        raise UserError(
            f"hardware: {wrong[0]} is not a number and a device. Fix: write it like 8xH100-80, or 2xcpu for this "
            "machine"
        )
    on = [word for place in places for word in ("--on", place)]
    ranked = ["--by", "price"] if form.text("by") == "price" else []
    return _finetune("plan", recipe, *form.overrides(), *on, *ranked, "--html", _PLANNED(form))


def _launch(form: Form) -> list[str]:
    return _finetune("launch", *_launch_options(form), form.shipped_path("recipe", "a recipe"), *form.overrides())


def run_of(form: Form) -> str:
    """Returns the run directory of a recipe, relative to the folder; "" if it has problems or is elsewhere."""
    try:
        recipe = form.shipped_path("recipe", "a recipe")
        if here_or_shipped(Path(recipe)).stat().st_size > MOST_RECIPE:
            return ""
        run = load_recipe(recipe, form.overrides()).run
        return str(inside(f"{run.dir}/{run.name}", form.folder))
    except UserError:
        return ""


def _run_page(form: Form) -> str:
    return f"/run?{urlencode({'path': run})}" if (run := run_of(form)) else "/commands"


def _report(form: Form) -> list[str]:
    runs = [as_word(inside(run, form.folder)) for run in form.texts("runs")]
    if not runs:
        raise UserError("runs: nothing is chosen. Fix: choose at least one run")
    if not (output := form.path("output", "a file")).endswith(".html"):  # it replaces what is there
        raise UserError(f"{output}: not the name of a page. Fix: end it with .html")
    return _finetune("report", *runs, "-o", output)


def _export(form: Form) -> list[str]:
    run, to = form.path("run", "a run"), form.text("to")
    if to not in EXPORTS:
        raise UserError(f"format: no such format. Fix: choose one of {', '.join(EXPORTS)}")
    options = [*form.option("step", "--step"), *form.option("dtype", "--dtype"), *form.option("quantize", "--quantize")]
    out = ["-o", form.path("output", "a folder")] if form.text("output") else []
    return _finetune("export", run, "--to", to, *options, *out)


def _serve(form: Form) -> list[str]:
    run = form.path("run", "a run")
    base, why = base_of(form.folder / run, form.folder) if form.values.get("beside") else ("", "")
    if why:
        raise UserError(f"{run}: there is no base model to compare it with: {why}. Fix: load it without its base")
    return _finetune("serve", f"trained={run}", *([f"base={base}"] if base else []), "--port", "0")


ACTIONS = {
    "quickstart": Action(lambda form: ["-m", "finetune.quickstart"], then=lambda form: "/data"),
    "new": Action(_new, then=lambda form: f"/recipe?{urlencode({'path': form.text('output')})}"),
    "inspect": Action(_inspect, page=_INSPECTED),
    "check": Action(_check),
    "plan": Action(_plan, page=_PLANNED),
    "launch": Action(_launch, about=run_of, then=_run_page),
    "report": Action(_report, page=lambda form: form.path("output", "a file"), about=lambda form: ""),
    "checkpoints": Action(lambda form: _finetune("checkpoints", form.path("run", "a run"), "--verify")),
    "export": Action(_export),
    "serve": Action(_serve),
}
