"""The commands and their printing. Nothing heavy is imported before a command needs it: `--help` stays instant."""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from finetune.errors import STOPPED_STATUS, RunFailure, Stopped, UserError
from finetune.startup import few_collections, import_transformers, large_pages, quiet_libraries

app = typer.Typer(
    help="Fine-tune language models: the recipe fixes the maths, the accelerate config only decides where it runs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

RecipePath = Annotated[Path, typer.Argument(help="Recipe file (YAML).", metavar="RECIPE")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="section.key=value, typed by the recipe's schema.", metavar="[KEY=VALUE]...")
]
RunDir = Annotated[Path, typer.Argument(help="Run directory, such as runs/quickstart-full.", metavar="RUN_DIR")]
_RANK_0_S = 30.0  # that it may take longer than another rank for its imports
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


def main() -> None:
    """Exit status: 0 success, 2 a mistake the user can mend, 1 a failure of the run or of ours, 75 stopped by a signal
    and saved."""
    atexit.register(gc.freeze)  # the interpreter would look for cycles in all of torch: 0.7 s at every exit
    try:
        app()
    except Stopped as stopped:
        if int(os.environ.get("RANK", "0")) == 0:
            print(stopped, file=sys.stderr, flush=True)
        raise SystemExit(STOPPED_STATUS) from None
    except UserError as error:
        _complain(str(error))
        raise SystemExit(2) from None
    except RunFailure as error:
        _complain(str(error))
        raise SystemExit(1) from None


def _complain(message: str) -> None:
    """Once, where every rank must have found the same: rank 0 says it, and its launcher ends the others, who wait for
    that. Would they leave first, the launcher would end rank 0 before it could speak."""
    rank = int(os.environ.get("RANK", "0"))
    torch = sys.modules.get("torch")
    in_group = torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()
    if rank and not in_group:
        time.sleep(_RANK_0_S)
    where = f"[rank {rank}] " if rank else ""
    print(f"{where}error: {message}", file=sys.stderr, flush=True)


@app.command()
def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    config_file: Annotated[Path | None, typer.Option(help="An accelerate config, where torchrun launched.")] = None,
) -> None:
    """Train a recipe where this process was launched.

    Example: [bold]accelerate launch --config_file accelerate_configs/ddp.yaml -m finetune train
    recipes/quickstart/full.yaml optimizer.lr=1e-3[/bold]
    """
    from finetune.training.stop import listening

    with listening() as stop:  # before the imports, which take long
        from finetune.recipe import load_recipe

        loaded = load_recipe(recipe, overrides or ())
        quiet_libraries()
        large_pages()
        with few_collections():
            import_transformers()
            from finetune.engine.start import leave_group, left_when_broken
            from finetune.training.run import train as run

        with left_when_broken():
            run(loaded, str(recipe), stop, Console(), str(config_file) if config_file else None)
        leave_group()


@app.command()
def check(
    recipe: Annotated[Path, typer.Argument(help="Recipe file, or a folder of them.", metavar="RECIPE|FOLDER")],
    overrides: Overrides = None,
    config_file: Annotated[Path | None, typer.Option(help="Check against this accelerate config as well.")] = None,
    num_processes: Annotated[int | None, typer.Option(help="World size, where it is not the config's.")] = None,
    recipe_only: Annotated[bool, typer.Option(help="Only the recipe itself: no tokenizer, no data.")] = False,
    as_json: AsJson = False,
) -> None:
    """Everything that can be known without training: schema, launch, template, masks, data.

    A folder is searched for recipes and each checked by itself, without its data.

    Example: [bold]python -m finetune check recipes/quickstart/full.yaml
    --config-file accelerate_configs/fsdp2.yaml --num-processes 4[/bold]
    """
    quiet_libraries()
    from finetune.planning.check import check_folder, check_recipe

    with few_collections():
        if recipe.is_dir():
            reports = check_folder(recipe, overrides or ())
        else:
            reports = [check_recipe(recipe, overrides or (), config_file, num_processes, recipe_only)]
    failed = [report for report in reports if report.error]
    if as_json:
        print(json.dumps([report.as_dict() for report in reports], indent=1))
    else:
        for report in reports:
            print(report.text(), file=sys.stderr if report.error else sys.stdout)
        if recipe.is_dir():
            print(f"{len(reports)} recipes, {len(failed)} with problems")
    if failed:
        raise SystemExit(2)


@app.command()
def inspect(
    recipe: RecipePath,
    overrides: Overrides = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Examples to show: 3, on a page 20, each source in turn.")
    ] = None,
    row: Annotated[
        list[str] | None, typer.Option(metavar="PATH:NUMBER", help="This row instead; again for more of them.")
    ] = None,
    packed: Annotated[int | None, typer.Option(min=0, help="Packed rows to show: 0, on a page 2.")] = None,
    on_eval: Annotated[bool, typer.Option("--eval", help="data.eval instead of data.train.")] = False,
    totals: Annotated[bool, typer.Option("--totals", help="No examples, only what they add up to.")] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="Borders between tokens, and their ids.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Long examples without leaving out their middle.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page to read in a browser.")] = None,
    as_json: AsJson = False,
) -> None:
    """What the model will see: examples with the trained tokens coloured, and what was dropped.

    With --json one object per example: path, row, input_ids, labels (-100 where not trained), before packing.
    With --json --totals one object with every count.

    Example: [bold]python -m finetune inspect recipes/quickstart/full.yaml --rows 2[/bold]
    """
    from finetune.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or ())
    quiet_libraries()
    with few_collections():
        import_transformers()
        from finetune.planning.inspect import Asked, inspect

    asked = Asked(rows, tuple(row or ()), packed, on_eval, totals, tokens, full, html, as_json)
    inspect(loaded, recipe, asked, Console())


@app.command()
def prepare(recipe: RecipePath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Tokenise a recipe's data into the cache, ahead of the run: needs no GPU, uses all cores.

    A run with the same data, tokenizer and template then starts in seconds; FINETUNE_CACHE says where the cache lies.

    Example: [bold]python -m finetune prepare recipes/quickstart/full.yaml[/bold]
    """
    from finetune.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or ())
    quiet_libraries()
    with few_collections():
        import_transformers()
        from finetune.planning.prepare import prepare as run
        from finetune.planning.prepare import show_prepared

    prepared, notes = run(loaded)
    if as_json:
        print(json.dumps({"sources": [one.as_dict() for one in prepared], "notes": notes}, indent=1))
    else:
        show_prepared(Console(), prepared, notes)


cache_app = typer.Typer(
    help="The cache of tokenised examples.\n\nExample: [bold]python -m finetune cache list[/bold]",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.add_typer(cache_app, name="cache")


@cache_app.command("list")
def list_cache(as_json: AsJson = False) -> None:
    """What is cached: of which source, how large, when it was last used, what made it.

    Example: [bold]python -m finetune cache list[/bold]
    """
    quiet_libraries()
    from finetune.data.token_cache import entries_folder, list_entries
    from finetune.planning.cache import show_entries

    entries = list_entries()
    if as_json:
        print(json.dumps([entry.as_dict() for entry in entries], indent=1))
    else:
        show_entries(Console(), entries_folder(), entries)


@cache_app.command("clean")
def clean_cache(
    older_than: Annotated[str, typer.Option(help="Not used for so long: 12h, 30d, 8w.", metavar="AGE")] = "30d",
    everything: Annotated[bool, typer.Option("--all", help="Whenever it was used.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove entries that have not been used for a while, and what killed builds left behind.

    What is being built is left. A run that has started keeps what it reads.

    Example: [bold]python -m finetune cache clean --older-than 14d[/bold]
    """
    quiet_libraries()
    from finetune.data.token_cache import age_in_seconds, entries_folder, list_entries, not_used_for, remove
    from finetune.planning.cache import readable_bytes, show_entries

    age = age_in_seconds(older_than)
    entries = not_used_for(list_entries(), 0 if everything else age)
    if not entries:
        print(f"{entries_folder()}: nothing to remove" + ("" if everything else f", all was used within {older_than}"))
        return
    show_entries(Console(), entries_folder(), entries)
    if not yes:
        if not sys.stdin.isatty():
            raise UserError("cache clean: nobody can be asked here; give --yes to remove what is listed")
        typer.confirm("Remove these?", abort=True)
    left = remove(entries)
    gone = [entry for entry in entries if entry not in left]
    print(f"removed {len(gone):,}, {readable_bytes(sum(entry.bytes for entry in gone))}")
    for entry in left:
        print(f"left, because it is being built: {entry.path}")


@app.command()
def generate(
    run_dir: RunDir,
    prompt: Annotated[list[str] | None, typer.Argument(help="What to ask; without it, asks you.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: greedy.")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Answer with a run's result.

    Example: [bold]python -m finetune generate runs/quickstart-full "the 3rd of March, 2021"[/bold]
    """
    quiet_libraries()
    with few_collections():
        import_transformers()
        from finetune.export.generate import answer_prompts

    answer_prompts(run_dir, prompt or [], max_new_tokens, temperature, as_json)


@app.command()
def merge(
    run_dir: RunDir,
    out: Annotated[Path | None, typer.Option(help="Default: RUN_DIR/merged.")] = None,
) -> None:
    """Merge a run's adapter into its base: one plain model folder, for servers without adapters.

    Example: [bold]python -m finetune merge runs/quickstart-lora[/bold]
    """
    quiet_libraries()
    with few_collections():
        import_transformers()
        from finetune.export.merge import merge_adapter

    print(f"merged into {merge_adapter(run_dir, out or run_dir / 'merged')}")


@app.command()
def checkpoints(
    run_dir: RunDir,
    verify: Annotated[bool, typer.Option("--verify", help="Read every file and compare checksums.")] = False,
    as_json: AsJson = False,
) -> None:
    """What a run can go on from: step, metric, size, where and when it was written.

    With --verify the exit status is 2 where a checkpoint is damaged.

    Example: [bold]python -m finetune checkpoints runs/quickstart-full --verify[/bold]
    """
    quiet_libraries()
    from finetune.checkpoints.listing import found_checkpoints, show_checkpoints

    found = found_checkpoints(run_dir, verify)
    if as_json:
        print(json.dumps([entry.as_dict() for entry in found], indent=1))
    else:
        show_checkpoints(Console(), run_dir, found)
    if any(entry.problem for entry in found):
        raise SystemExit(2)


@app.command()
def doctor(
    folder: Annotated[
        list[Path] | None, typer.Option(help="Measure the disk under this folder; may be repeated. Default: runs.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What this launch runs on: topology, speed between the ranks, clocks, disks, versions, and what to change.

    Example: [bold]accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 4
    -m finetune doctor[/bold]
    """
    quiet_libraries()
    from finetune.engine.links import join_group
    from finetune.engine.start import leave_group
    from finetune.planning.doctor.advice import advice
    from finetune.planning.doctor.diagnosis import diagnose
    from finetune.planning.doctor.show import show_diagnosis

    group = join_group()
    found = diagnose(group, folder or [Path("runs")])
    if group.rank == 0 and as_json:
        print(json.dumps({**found.as_dict(), "advice": advice(found)}, indent=1))
    elif group.rank == 0:
        show_diagnosis(Console(), found, advice(found))
    leave_group()


@app.command()
def schema() -> None:
    """Print the recipe's JSON Schema.

    Example: [bold]python -m finetune schema > recipes/recipe.schema.json[/bold]
    """
    from finetune.recipe import recipe_json_schema

    print(recipe_json_schema(), end="")
