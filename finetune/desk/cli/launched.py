"""Commands on the processes of a launch: train, reference, launch itself, doctor."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from finetune.desk.cli.options import (
    AsJson,
    ConfigFile,
    NewColumns,
    NewData,
    NewFormat,
    NewMode,
    NewModel,
    NewName,
    NewObjective,
    NewRewards,
    Overrides,
    RecipePath,
)
from finetune.desk.cli.recipes import write_from_answers
from finetune.errors import UserError
from finetune.startup import growing_segments, large_pages

if TYPE_CHECKING:
    from finetune.recipe import Recipe
    from finetune.training.signals import StopRequest


@contextlib.contextmanager
def _launched(recipe: Path, overrides: list[str] | None) -> Iterator[tuple[Recipe, StopRequest]]:
    """Yields the recipe and the stop that signals request, after the imports of a run; leaves the process group."""
    from finetune.training.signals import listening

    with listening() as stop:  # before the slow imports
        from finetune.data.sources.hub import check_hub
        from finetune.features import load_recipe

        loaded = load_recipe(recipe, overrides or ())
        check_hub(loaded)
        large_pages()
        growing_segments()
        import finetune.training.run  # noqa: F401  (both commands import it)
        from finetune.engine.start import abort_on_crash, leave_group

        with abort_on_crash():
            yield loaded, stop
        leave_group()


def train(recipe: RecipePath, overrides: Overrides = None, config_file: ConfigFile = None) -> None:
    """Train a recipe on the launched processes.

    Example: [bold]accelerate launch --config_file accelerate_configs/ddp.yaml -m finetune train
    recipes/quickstart/full.yaml optimizer.lr=1e-3[/bold]
    """
    with _launched(recipe, overrides) as (loaded, stop):
        from finetune.features import all_features
        from finetune.plan.comparison import predict_run
        from finetune.training.run import train as run

        config = str(config_file) if config_file else None
        run(loaded, str(recipe), stop, Console(), config, predict_run, all_features())


def reference(recipe: RecipePath, overrides: Overrides = None, config_file: ConfigFile = None) -> None:
    """Compute the log-probabilities of a reference, or the predictions of a teacher, before the run, into the cache.

    The model is objective.reference_model (or the initial model), or objective.teacher; it runs on the launched
    processes. Runs with that model and data then begin at once, on any launch.

    Example: [bold]accelerate launch --config_file accelerate_configs/fsdp2.yaml -m finetune reference RECIPE[/bold]
    """
    with _launched(recipe, overrides) as (loaded, stop):
        from finetune.training.run import compute_reference

        compute_reference(loaded, str(recipe), stop, Console(), str(config_file) if config_file else None)


def _new_recipe(words: list[str], option: str, model: str | None, data: str | None, yes: bool) -> tuple[str, str]:
    """Returns model and data of a recipe that is still to be written. Raises UserError, before any work.

    words: of the command line; option: the first one that is given.
    """
    if recipes := [word for word in words if "=" not in word]:
        raise UserError(
            f"launch {recipes[0]}: {option} is not used with a recipe, which says it. Fix: leave out one of the two; "
            "`section.key=value` changes the recipe"
        )
    if model is None or data is None:
        raise UserError(f"launch {option}: no recipe, and no {'--data' if model else '--model'}. Fix: give it")
    if not yes and not sys.stdin.isatty():
        raise UserError(
            "launch: no terminal to ask on before the new recipe is trained. Fix: give --yes, or write it with `new`"
        )
    return model, data


def launch(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="Recipe to train, with overrides; or options of accelerate launch, then -m finetune COMMAND ...",
            metavar="RECIPE",
        ),
    ] = None,
    config_file: Annotated[
        Path | None, typer.Option(help="Use this accelerate config. Default: one process per device.")
    ] = None,
    num_processes: Annotated[
        int | None, typer.Option(min=1, help="Launch this many processes. Default: the config's.")
    ] = None,
    model: NewModel = None,
    data: NewData = None,
    mode: NewMode = None,
    name: NewName = None,
    format: NewFormat = None,
    columns: NewColumns = None,
    objective: NewObjective = None,
    reward: NewRewards = None,
    yes: Annotated[bool, typer.Option("--yes", help="Train the new recipe without asking.")] = False,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="slurm|kubeflow|skypilot|hf-jobs",
            help="Print the job of a cluster instead, filled from the plan of RECIPE.",
            rich_help_panel="On a cluster",
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="2x8xH100-80", help="Machines, GPUs of each, and their name.", rich_help_panel="On a cluster"
        ),
    ] = None,
    shared: Annotated[
        str | None,
        typer.Option(help="Volume that holds recipe, rows and runs.", rich_help_panel="On a cluster"),
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="Container image with finetune.", rich_help_panel="On a cluster")
    ] = None,
    secret: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Secret that the job gets, such as HF_TOKEN.", rich_help_panel="On a cluster"
        ),
    ] = None,
    hours: Annotated[
        float | None,
        typer.Option(help="Time limit. Default: 1.3 times what `plan` expects.", rich_help_panel="On a cluster"),
    ] = None,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the job there.", rich_help_panel="On a cluster")
    ] = None,
    submit: Annotated[
        bool, typer.Option("--submit", help="Write the job and submit it.", rich_help_panel="On a cluster")
    ] = False,
) -> None:
    """Train a recipe on one process or several: accelerate launch, but Ctrl-C saves, and an error is one line each.

    Other options are accelerate's: launch --num_machines 2 --machine_rank 0 ... -m finetune train RECIPE. A launch by
    torchrun begins with its name: launch torchrun --nnodes 1:4 ... -m finetune train RECIPE. The exit status is that
    of the training processes, 75 if they were stopped and have saved.

    Example: [bold]python -m finetune launch --config-file accelerate_configs/ddp.yaml --num-processes 2
    recipes/quickstart/full.yaml[/bold]

    Without a recipe, one that fits is written beside the run, as `new` does, and shown before it is trained:
    [bold]python -m finetune launch --model HuggingFaceTB/SmolLM2-135M --data faq.csv[/bold]

    A job for a cluster, with memory, hours and price from the plan; nothing is submitted without --submit:
    [bold]python -m finetune launch RECIPE --on slurm --devices 2x8xH100-80[/bold]
    """
    words = words or []
    new = {"model": model, "data": data, "mode": mode, "name": name, "format": format, "columns": columns}
    new |= {"objective": objective, "reward": reward, "yes": yes}
    if given := [f"--{option}" for option, value in new.items() if value]:
        if on is not None:
            raise UserError(f"launch --on {on}: {given[0]} is for this machine. Fix: write a recipe with `new` first")
        model, data = _new_recipe(words, given[0], model, data, yes)
        from finetune.desk.setup.new_options import NewOptions, parse_columns

        read = parse_columns(columns) if columns else None
        chosen = (format, read, tuple(words), objective, tuple(reward or ()))
        path = write_from_answers(NewOptions(model, data, mode or "lora", name, None, *chosen, launches=True))
        if not yes and not typer.confirm("Train it now?", default=True):
            print(f"left: python -m finetune launch {shlex.quote(str(path))} trains it")
            return
        words = [str(path)]
    if on is not None:
        if (
            not words
            or words[0].startswith("-")
            or words[0] == "torchrun"
            or devices is None
            or num_processes is not None
        ):
            raise UserError(
                f"launch --on {on}: expected a recipe and --devices alone. The launcher and its sizes follow from "
                "them. Fix: give RECIPE [KEY=VALUE]... --devices 2x8xH100-80 (machines, GPUs of each, and their name)"
            )
        from finetune.features import load_recipe

        load_recipe(Path(words[0]), words[1:])  # a mistake is told before seconds of imports
        from finetune.desk.cluster.job import JobOptions
        from finetune.desk.cluster.manifest import launch_on

        options = JobOptions(devices, shared, image, secret, hours, config_file)
        raise SystemExit(launch_on(on, Path(words[0]), words[1:], options, write, submit))
    given = {"--devices": devices, "--shared": shared, "--image": image, "--secret": secret, "--hours": hours}
    if useless := [name for name, value in {**given, "--write": write, "--submit": submit or None}.items() if value]:
        raise UserError(
            f"launch: {', '.join(useless)}: only for a job of a cluster. Fix: add --on, such as --on slurm, or leave "
            "it out"
        )
    from finetune.features import load_recipe
    from finetune.training.launcher import launch as run

    raise SystemExit(run(words, config_file, num_processes, load_recipe))


def doctor(
    folder: Annotated[
        list[Path] | None, typer.Option(help="Measure the disk of this folder; may be repeated. Default: runs.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Diagnose a launch: topology, bandwidth between ranks, clocks, disks, versions, and what to change.

    Example: [bold]accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 4
    -m finetune doctor[/bold]
    """
    from finetune.desk.doctor.advice import advice, show_diagnosis
    from finetune.desk.doctor.diagnosis import diagnose
    from finetune.desk.doctor.links import join_group
    from finetune.engine.start import leave_group

    group = join_group()
    diagnosis = diagnose(group, folder or [Path("runs")])
    if group.rank == 0 and as_json:
        print(json.dumps({**diagnosis.as_dict(), "advice": advice(diagnosis)}, indent=1))
    elif group.rank == 0:
        show_diagnosis(Console(), diagnosis, advice(diagnosis))
    leave_group()
