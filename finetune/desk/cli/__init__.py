"""The command line: the table of commands, their shared behaviour, and the exit status of errors.

Commands are in `launched` (on the processes of a launch), `recipes` (before a run) and `finished` (on finished runs).
Heavy modules are imported by the command that needs them, so that `--help` is instant.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from finetune import __version__
from finetune.desk.cli import finished, launched, recipes
from finetune.errors import STOPPED_STATUS, RunFailure, Stopped, UserError, unforeseen, without_secrets
from finetune.startup import is_verbose, quiet_libraries, sleep_at_barriers, verbose_libraries
from finetune.training.signals import interruptible


def _without_type(params: list[Any]) -> list[Any]:
    """Returns parameters whose flags show no type in `--help`: they take no value."""
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


class Commands(TyperGroup):
    """The table of commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_type(super().get_params(ctx))


app = typer.Typer(
    cls=Commands,
    help="Fine-tune language models: the recipe fixes the maths, the accelerate config only decides where it runs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={
        "token_normalize_func": lambda name: name.replace("_", "-"),  # both spellings of every option
        "help_option_names": ["-h", "--help"],
    },
)

_VERBOSE = ("-v", "--verbose")


class Command(TyperCommand):
    """A command with quiet libraries, that takes -v after its name as well, and fills its help to the terminal's
    width."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.help = re.sub(r"(?<!\n)\n(?!\n)", " ", self.help or "")

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_type(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if set(_VERBOSE) & set(args):
            verbose_libraries()
        return super().parse_args(ctx, [word for word in args if word not in _VERBOSE])

    def invoke(self, ctx: Any) -> Any:
        interruptible()
        quiet_libraries()  # before the command imports them
        sleep_at_barriers()
        return super().invoke(ctx)


def _show_version(show: bool) -> None:
    if show:
        packages = ("torch", "transformers", "accelerate", "peft", "deepspeed")
        installed = {one.metadata["Name"].lower(): one.version for one in metadata.distributions()}
        versions = [f"{name} {installed[name]}" for name in packages if name in installed]
        print(", ".join([f"finetune {__version__}", *versions, f"Python {sys.version.split()[0]}"]))
        raise typer.Exit


@app.callback()
def _every_command(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_show_version, is_eager=True, help="Show versions and exit.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option(*_VERBOSE, help="Show messages of libraries, and the traceback of every error.")
    ] = False,
) -> None:
    if verbose:
        verbose_libraries()


GROUPS = {  # in the order of `--help`
    "Before a run": (recipes.new, recipes.check, recipes.inspect, recipes.plan, recipes.prepare, launched.doctor),
    "Train": (launched.launch, launched.train, launched.reference),
    "Use and compare": (
        *(finished.generate, finished.chat, finished.serve, finished.score, finished.evaluate),
        *(finished.runs, finished.logs, finished.report, finished.checkpoints),
    ),
    "Export": (finished.export, finished.merge, finished.verify, finished.upload),
    "More": (recipes.studio, recipes.schema),
}
for group, commands in GROUPS.items():
    for command in commands:  # the launcher has options of its own
        settings = {"ignore_unknown_options": True} if command is launched.launch else None
        app.command(cls=Command, context_settings=settings, rich_help_panel=group)(command)

cache_app = typer.Typer(
    cls=Commands,
    help="Manage the cache of tokenized examples.\n\nExample: [bold]python -m finetune cache list[/bold]",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
cache_app.command("list", cls=Command)(recipes.list_cache)
cache_app.command("clean", cls=Command)(recipes.clean_cache)
app.add_typer(cache_app, name="cache", rich_help_panel="More")


def main() -> None:
    """Raises SystemExit: 0 success, 2 an error the user can fix, 1 a failed run or an internal error, 75 stopped by a
    signal and saved."""
    try:
        app()
    except Stopped as stopped:
        if int(os.environ.get("RANK", "0")) == 0:
            print(stopped, file=sys.stderr, flush=True)
        raise SystemExit(STOPPED_STATUS) from None
    except UserError as error:
        _print_error(str(error))
        raise SystemExit(2) from None
    except RunFailure as error:
        _print_error(str(error))
        raise SystemExit(1) from None
    except Exception as error:  # noqa: BLE001 (the one place: one line for people, the traceback in a file)
        _print_error(unforeseen(error))
        raise SystemExit(1) from None


def _print_error(message: str) -> None:
    """Prints the error of this rank, with its number: a launcher ends all ranks as soon as one has exited, so none can
    rely on another to print it."""
    rank = int(os.environ.get("RANK", "0"))
    prefix = f"[rank {rank}] " if rank else ""
    if is_verbose():
        print(without_secrets(traceback.format_exc()), file=sys.stderr)
    print(f"{prefix}error: {without_secrets(message)}", file=sys.stderr, flush=True)
