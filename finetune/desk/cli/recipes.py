"""Commands on a recipe, before its run: new, check, plan, inspect, prepare, the cache of tokens, the schema; and the
studio, a page over all commands."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from finetune.desk.cli.options import (
    AsJson,
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
from finetune.errors import UserError, without_secrets

if TYPE_CHECKING:
    from finetune.desk.setup.new_options import NewOptions


def new(
    overrides: Overrides = None,
    model: NewModel = None,
    data: NewData = None,
    mode: NewMode = None,
    name: NewName = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write this recipe. Default: NAME.yaml in this folder."),
    ] = None,
    format: NewFormat = None,
    columns: NewColumns = None,
    objective: NewObjective = None,
    reward: NewRewards = None,
    other: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="CONFIG",
            help="Convert a config of TRL, axolotl, LLaMA-Factory, Unsloth or torchtune, or a script with their calls.",
        ),
    ] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Devices that the config of --from ran on, for the rows of a step.")
    ] = None,
) -> None:
    """Write a recipe that fits a model and your rows; asks for missing options.

    Chooses format, columns, objective, length, batch, steps, warm-up and evaluation by the rows, with the reasons as
    comments, and shows one row. Columns that are a guess are asked about, or refused without a terminal.

    Example: [bold]python -m finetune new --model HuggingFaceTB/SmolLM2-135M --data faq.csv --mode lora[/bold]

    On the model's own answers: [bold]python -m finetune new --model org/model --data sums.jsonl --mode lora
    --objective grpo --reward number[/bold]

    From another tool: [bold]python -m finetune new --from axolotl.yaml --devices 4[/bold]
    """
    if other is not None:
        own: dict[str, object] = {"model": model, "data": data, "mode": mode, "format": format, "columns": columns}
        own |= {"objective": objective, "reward": reward}
        if given := [f"--{key}" for key, value in own.items() if value]:
            raise UserError(
                f"new: {given[0]} is not used with --from, which has its own config. Fix: leave it out; "
                "`section.key=value` changes what is converted"
            )
        from finetune.desk.setup.other_tools import write_converted

        write_converted(other, output, name, devices, tuple(overrides or ()), Console())
        return
    if devices is not None:
        raise UserError("new: --devices is only for --from. Fix: leave it out, or add --from")
    from finetune.recipe.schema import MODES  # light: an answer that is missing costs no imports

    model = model or _answer("--model", "Model (hub id or folder)")
    data = data or _answer("--data", "Data (file, folder, URL or dataset of the hub)")
    mode = mode or _answer("--mode", f"Mode ({', '.join(MODES)})", "lora")
    from finetune.desk.setup.new_options import NewOptions, parse_columns

    read = parse_columns(columns) if columns else None
    chosen = (format, read, tuple(overrides or ()), objective, tuple(reward or ()))
    write_from_answers(NewOptions(model, data, mode, name, output, *chosen))


def write_from_answers(options: NewOptions) -> Path:
    """Writes a recipe and returns its path; asks on a terminal about what is a guess. Raises UserError."""
    from finetune.data.sources.hub import is_hub_dataset, is_hub_model, offline_without_hub

    if is_hub_model(options.model) or is_hub_dataset(options.data):
        offline_without_hub()
    from finetune.desk.setup.new import write_new

    ask = (lambda question, default: typer.prompt(question, default=default)) if sys.stdin.isatty() else None
    return write_new(options, Console(), ask)


def _answer(option: str, question: str, default: str | None = None) -> str:
    """Asks the user. Raises UserError without a terminal."""
    if not sys.stdin.isatty():
        raise UserError(f"new: no {option}, and no terminal to ask on. Fix: give {option}")
    return typer.prompt(question, default=default)


def check(
    recipe: Annotated[Path, typer.Argument(help="Recipe file, or a folder of them.", metavar="RECIPE|FOLDER")],
    overrides: Overrides = None,
    config_file: Annotated[Path | None, typer.Option(help="Also check against this accelerate config.")] = None,
    num_processes: Annotated[
        int | None, typer.Option(help="Check for this many processes. Default: the config's.")
    ] = None,
    recipe_only: Annotated[
        bool, typer.Option("--recipe-only", help="Check the recipe only: no tokenizer, no data.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Validate a recipe without training: schema, launch, chat template, loss masks, data.

    Checks every recipe of a folder, without its data, and against the accelerate config, if one is given.

    Example: [bold]python -m finetune check recipes/quickstart/full.yaml
    --config-file accelerate_configs/fsdp2.yaml --num-processes 4[/bold]
    """
    from finetune.desk.setup.check import check_folder, check_recipe

    if recipe.is_dir():
        reports = check_folder(recipe, overrides or (), config_file, num_processes)
    else:
        reports = [check_recipe(recipe, overrides or (), config_file, num_processes, recipe_only)]
    failed = [report for report in reports if report.error]
    if as_json:
        print(without_secrets(json.dumps([report.as_dict() for report in reports], indent=1)))
    else:
        for report in reports:
            print(without_secrets(report.text()), file=sys.stderr if report.error else sys.stdout)
        if recipe.is_dir():
            print(f"{len(reports)} recipes, {len(failed)} with problems")
    if failed:
        raise SystemExit(2)


def plan(
    recipe: RecipePath,
    overrides: Overrides = None,
    on: Annotated[
        list[str] | None,
        typer.Option(metavar="NxDEVICE", help="Plan for these devices, such as 8xH100-80; may be repeated."),
    ] = None,
    nodes: Annotated[int, typer.Option(help="Plan for this many machines, each with these devices.")] = 1,
    by: Annotated[str, typer.Option(help="Rank by time or by price.")] = "time",
    write: Annotated[bool, typer.Option("--write", help="Write the accelerate config of the best choice.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page: table, price, memory by phase.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Find changes that fit into this memory of a device: 24GB.")
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Count on this memory of each machine: 128GB. Default: of the tables."),
    ] = None,
    hardware: Annotated[
        Path | None, typer.Option(help="Read your own devices from here. Default: hardware.yaml, if it exists.")
    ] = None,
    prices: Annotated[
        Path | None, typer.Option(help="Read your own prices from here. Default: prices.yaml, if it exists.")
    ] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Compare predictions with runs; RECIPE ... are run directories.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show also what does not fit, and the rules that forbid places.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Plan a run before renting for it: whether it fits, its speed and price, and the best accelerate config.

    Compares every legal config on the given devices, by formula, without weights and without network.
    docs/reference/plan.md explains the numbers.

    Example: [bold]python -m finetune plan recipes/llama3.1-8b/lora.yaml --on 8xH100-80 --on 2x4090[/bold]

    Compare predictions with finished runs: [bold]python -m finetune plan --report runs/*[/bold]
    """
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")  # read when they are imported
    from finetune.features import load_recipe

    if not report:
        load_recipe(recipe, overrides or ())  # a mistake is told before seconds of imports
    from finetune.desk.view.memory_page import write_page
    from finetune.plan.command import PlanOptions, run

    if report:
        from finetune.plan.comparison import as_json as comparisons_json
        from finetune.plan.comparison import compare_runs, table

        comparisons = compare_runs([recipe, *map(Path, overrides or ())])
        print(comparisons_json(comparisons) if as_json else table(comparisons))
        return
    places = (tuple(on or ()), nodes, by, write, html, memory)
    options = PlanOptions(*places, hardware, prices, as_json, verbose, host_memory)
    run(recipe, overrides or (), options, Console(), load_recipe, write_page)


def inspect(
    recipe: RecipePath,
    overrides: Overrides = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Show this many examples, from all sources. Default: 3, with --html 20.")
    ] = None,
    row: Annotated[
        list[str] | None, typer.Option(metavar="PATH:NUMBER", help="Show this row instead; may be repeated.")
    ] = None,
    packed: Annotated[
        int | None, typer.Option(min=0, help="Show this many packed sequences. Default: 0, with --html 2.")
    ] = None,
    on_eval: Annotated[bool, typer.Option("--eval", help="Inspect data.eval instead of data.train.")] = False,
    totals: Annotated[bool, typer.Option("--totals", help="Show statistics only.")] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show token boundaries and ids.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Show long examples in full.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write an HTML page.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what the model sees: examples with supervised tokens coloured, and dropped rows with the reasons.

    Prints, with --json, one object per example: path, row, input_ids, labels (-100 if not supervised), before packing;
    with --json --totals, one object with all statistics.

    Example: [bold]python -m finetune inspect recipes/quickstart/full.yaml --rows 2[/bold]
    """
    from finetune.data.sources.hub import check_hub
    from finetune.features import load_recipe

    loaded = load_recipe(recipe, overrides or ())
    check_hub(loaded)
    from finetune.desk.view.inspect import InspectOptions, inspect

    options = InspectOptions(rows, tuple(row or ()), packed, on_eval, totals, tokens, full, html, as_json)
    inspect(loaded, recipe, options, Console())


def prepare(recipe: RecipePath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Tokenize a recipe's data into the cache before the run, without a GPU, on all cores.

    Refuses what `train` refuses. A run with the same data, tokenizer and template then starts in seconds.
    FINETUNE_CACHE sets the folder of the cache.

    Example: [bold]python -m finetune prepare recipes/quickstart/full.yaml[/bold]
    """
    from finetune.data.sources.hub import check_hub
    from finetune.features import load_recipe

    loaded = load_recipe(recipe, overrides or ())
    check_hub(loaded)
    from finetune.desk.setup.prepare_data import prepare as run
    from finetune.desk.setup.prepare_data import show_prepared

    sources, notes = run(loaded, str(recipe))
    if as_json:
        print(json.dumps({"sources": [one.as_dict() for one in sources], "notes": notes}, indent=1))
    else:
        show_prepared(Console(), sources, notes)


def list_cache(as_json: AsJson = False) -> None:
    """List cached datasets with source, size, last use and origin.

    Example: [bold]python -m finetune cache list[/bold]
    """
    from finetune.data.cache_entries import entries_folder, list_entries
    from finetune.desk.setup.prepare_data import show_entries

    entries = list_entries()
    if as_json:
        print(json.dumps([entry.as_dict() for entry in entries], indent=1))
    else:
        show_entries(Console(), entries_folder(), entries)


def clean_cache(
    older_than: Annotated[
        str, typer.Option(help="Remove what was not used for this long: 12h, 30d, 8w.", metavar="AGE")
    ] = "30d",
    everything: Annotated[bool, typer.Option("--all", help="Remove entries regardless of last use.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Remove entries that were not used recently, and remains of interrupted builds.

    Keeps entries that are being built; a running job keeps the files that it reads.

    Example: [bold]python -m finetune cache clean --older-than 14d[/bold]
    """
    from finetune.data.cache_entries import age_in_seconds, entries_folder, list_entries, not_used_for, remove
    from finetune.desk.setup.prepare_data import show_entries
    from finetune.utils import readable_bytes

    age = age_in_seconds(older_than)
    entries = not_used_for(list_entries(), 0 if everything else age)
    if not entries:
        print(f"{entries_folder()}: nothing to remove" + ("" if everything else f", all was used within {older_than}"))
        return
    show_entries(Console(), entries_folder(), entries)
    if not yes:
        if not sys.stdin.isatty():
            raise UserError(
                "cache clean: no terminal to ask for confirmation. Fix: give --yes to remove what is listed"
            )
        typer.confirm("Remove these entries?", abort=True)
    kept = remove(entries)
    removed = [entry for entry in entries if entry not in kept]
    print(f"removed {len(removed):,}, {readable_bytes(sum(entry.bytes for entry in removed))}")
    for entry in kept:
        print(f"kept, because it is being built: {entry.path}")


def schema() -> None:
    """Print the recipe's JSON Schema.

    Example: [bold]python -m finetune schema > recipes/recipe.schema.json[/bold]
    """
    from finetune.recipe import recipe_json_schema

    print(recipe_json_schema(), end="")


def studio(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Listen on this port; 0: any free one.")] = 8766,
    opens: Annotated[bool, typer.Option("--open", help="Open the page in the browser of this machine.")] = False,
) -> None:
    """Look instead of type: data, tokens and masks, recipes, plans, runs, chat and export as a page of this folder.

    For this machine alone: 127.0.0.1, with a token in the address. Each button shows the command that it runs; commands
    go on without the page and without the studio.

    Example: [bold]python -m finetune studio[/bold]
    """
    if find_spec("fastapi") is None or find_spec("uvicorn") is None:
        raise UserError(
            "studio: fastapi or uvicorn is not installed. Fix: pip install 'finetune-recipes[serve]', then run the "
            "same command again"
        )
    from finetune.desk.studio.app import run_studio

    run_studio(port, opens, lambda line: print(line, flush=True))
