"""`launch --on TARGET`: writes the manifest of a job, and submits it only if asked to."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from finetune.desk.cluster.job import STOP_BEFORE_S, ClusterJob, JobOptions, plan_job
from finetune.desk.cluster.targets import SHARED, Target, target_of
from finetune.errors import UserError
from finetune.shipped import SHIPPED
from finetune.utils import write_atomically

_TEMPLATES = Path(__file__).parent / "templates"


def launch_on(
    name: str, path: Path, overrides: Sequence[str], options: JobOptions, write: Path | None, submit: bool
) -> int:
    """Prints the manifest, or writes and submits it; returns the exit status. Raises UserError.

    write: file of the manifest; without one it goes to standard output, or if it is submitted into the current folder.
    """
    target = target_of(name)
    _check_options(name, target, options)
    job, recipe = plan_job(path, overrides, target, options)
    manifest = render(name, job)
    notes = list(job.expects)
    if target.has_containers:
        own = [] if (SHIPPED / job.recipe).is_file() else [job.recipe]
        held_out = recipe.data.eval if isinstance(recipe.data.eval, tuple) else ()
        sources = [source.path for source in (*recipe.data.train, *held_out)]
        paths = dict.fromkeys([*own, recipe.model.name or "", *sources])
        if read := [path for path in paths if Path(path).exists()]:
            notes.append(f"the volume {job.options.shared} must hold, as here: {', '.join(read)}")
    if job.options.secret is None and not Path(recipe.model.name or "").exists():
        notes.append(f"{recipe.model.name}: if it is gated, add --secret HF_TOKEN")
    if job.gpus and (faster := job.machines.device.faster_precision(recipe.train.precision)):
        notes.append(faster)
    if write is None and not submit:
        print(manifest, end="")
    else:
        write = write or Path(f"{job.name}{target.suffix}")
        write_atomically(write, manifest)
        notes.append(f"wrote {write}")
    for note in notes:
        print(note, file=sys.stderr)
    if not submit:
        return 0
    assert write is not None
    secret = ["--secret", job.options.secret] if name == "skypilot" and job.options.secret else []
    command = [*target.submit, *secret, str(write)]
    if shutil.which(command[0]) is None:
        raise UserError(
            f"--submit: `{command[0]}` is not installed here. {write} is written. Fix: run `{shlex.join(command)}` "
            "where it is installed"
        )
    print(f"running {shlex.join(command)}", file=sys.stderr, flush=True)
    return subprocess.run(command).returncode


def render(name: str, job: ClusterJob) -> str:
    """Returns the manifest of a job."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # `text`: a string of JSON, which YAML and Python read as well
    environment.filters.update(sh=shlex.quote, text=lambda value: json.dumps(str(value)))
    values: dict[str, Any] = {"job": job, "shared": SHARED, "stop_before_s": STOP_BEFORE_S, "options": job.options}
    return environment.get_template(f"{name}.jinja").render(values)


def _check_options(name: str, target: Target, options: JobOptions) -> None:
    if target.has_containers and options.image is None:
        raise UserError(
            f"launch --on {name}: --image is required. Fix: give a container image with finetune (Dockerfile)"
        )
    if target.has_containers and options.shared is None:
        raise UserError(
            f"launch --on {name}: --shared is required. Recipe, rows and runs lie there, it outlives the job, and "
            f"containers see it as {SHARED}. Fix: give --shared the name of {target.shared}"
        )
    if not target.has_containers:
        for option, value in (("--image", options.image), ("--shared", options.shared)):
            if value is not None:
                raise UserError(
                    f"launch --on {name}: {option} has no effect there. Jobs run in the folder and environment in "
                    "which they are submitted. Fix: leave it out"
                )
    if options.secret is not None and not options.secret.replace("_", "").isalnum():
        raise UserError(
            f"--secret {options.secret}: not the name of a variable. Fix: give a name, such as HF_TOKEN, not its value"
        )
