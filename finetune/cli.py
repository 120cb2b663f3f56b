"""The command line. Heavy modules are imported by the command that needs them, so that `--help` is instant."""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from finetune.errors import STOPPED_STATUS, RunFailure, Stopped, UserError, unforeseen
from finetune.startup import (
    few_collections,
    growing_segments,
    import_transformers,
    is_verbose,
    large_pages,
    quiet_libraries,
    verbose_libraries,
)

app = typer.Typer(
    help="Fine-tune language models: the recipe fixes the maths, the accelerate config only decides where it runs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},  # both spellings of every option
)

_VERBOSE = ("-v", "--verbose")


class Command(TyperCommand):
    """A command that takes -v after its name as well, and whose help is filled to the terminal's width."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.help = re.sub(r"(?<!\n)\n(?!\n)", " ", self.help or "")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if set(_VERBOSE) & set(args):
            verbose_libraries()
        return super().parse_args(ctx, [word for word in args if word not in _VERBOSE])


def _show_version(is_asked: bool) -> None:
    if is_asked:
        packages = ("finetune", "torch", "transformers", "accelerate", "peft", "deepspeed")
        installed = {one.metadata["Name"].lower(): one.version for one in metadata.distributions()}
        known = [f"{name} {installed[name]}" for name in packages if name in installed]
        print(", ".join([*known, f"Python {sys.version.split()[0]}"]))
        raise typer.Exit


@app.callback()
def _every_command(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_show_version, is_eager=True, help="Show versions and exit.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option(*_VERBOSE, help="Also messages of the libraries, and the traceback of every error.")
    ] = False,
) -> None:
    if verbose:
        verbose_libraries()


def _recipe_keys(incomplete: str) -> Iterator[str]:
    """Yields keys of a recipe that begin like what was typed, for the completion of overrides."""
    from finetune.recipe.schema import Recipe

    schema = Recipe.model_json_schema()
    for section, described in schema["properties"].items():
        of_section = [part.get("$ref") for part in (described, *described.get("anyOf", ()))]
        fields = [name for ref in of_section if ref for name in schema["$defs"][ref.rpartition("/")[2]]["properties"]]
        for key in [f"{section}.{name}" for name in fields] or [section]:
            if key.startswith(incomplete):
                yield f"{key}="


RecipePath = Annotated[Path, typer.Argument(help="Recipe file (YAML).", metavar="RECIPE")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Override recipe keys: section.key=value.", metavar="KEY=VALUE", autocompletion=_recipe_keys),
]
RunDir = Annotated[Path, typer.Argument(help="Run directory, such as runs/quickstart-full.", metavar="RUN_DIR")]
_RANK_0_DELAY_S = 30.0  # by which its imports may take longer than another rank's
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


def main() -> None:
    """Exit status: 0 success, 2 an error the user can fix, 1 a failed run or an internal error, 75 stopped by a signal
    and saved."""
    atexit.register(gc.freeze)  # a garbage collection of all of torch takes 0.7 s at exit
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
    """Print an error once: before there is a process group all ranks have the same one, so the others wait until rank 0
    has printed it and the launcher ends them. If one exited first, the launcher would end rank 0 before it prints."""
    rank = int(os.environ.get("RANK", "0"))
    torch = sys.modules.get("torch")
    in_group = torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()
    if rank and not in_group:
        time.sleep(_RANK_0_DELAY_S)
    prefix = f"[rank {rank}] " if rank else ""
    if is_verbose():
        traceback.print_exc()
    print(f"{prefix}error: {message}", file=sys.stderr, flush=True)


@app.command(cls=Command)
def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    config_file: Annotated[Path | None, typer.Option(help="Accelerate config, when launched by torchrun.")] = None,
) -> None:
    """Train a recipe on the launched processes.

    Example: [bold]accelerate launch --config_file accelerate_configs/ddp.yaml -m finetune train
    recipes/quickstart/full.yaml optimizer.lr=1e-3[/bold]
    """
    from finetune.training.signals import listening

    with listening() as stop:  # before the slow imports
        from finetune.recipe import load_recipe

        loaded = load_recipe(recipe, overrides or ())
        quiet_libraries()
        large_pages()
        growing_segments()
        with few_collections():
            import_transformers()
            from finetune.engine.start import abort_on_crash, leave_group
            from finetune.training.run import train as run

        with abort_on_crash():
            run(loaded, str(recipe), stop, Console(), str(config_file) if config_file else None)
        leave_group()


@app.command(cls=Command)
def reference(
    recipe: RecipePath,
    overrides: Overrides = None,
    config_file: Annotated[Path | None, typer.Option(help="Accelerate config, when launched by torchrun.")] = None,
) -> None:
    """Compute the log-probabilities of a reference, or the predictions of a teacher, before the run, into the cache.

    Of objective.reference_model (or the initial model), or of objective.teacher, on the launched processes. Runs with
    that model and data then begin at once, on any launch.

    Example: [bold]accelerate launch --config_file accelerate_configs/fsdp2.yaml -m finetune reference RECIPE[/bold]
    """
    from finetune.training.signals import listening

    with listening() as stop:
        from finetune.recipe import load_recipe

        loaded = load_recipe(recipe, overrides or ())
        quiet_libraries()
        large_pages()
        growing_segments()
        with few_collections():
            import_transformers()
            from finetune.engine.start import abort_on_crash, leave_group
            from finetune.training.run import compute_reference

        with abort_on_crash():
            compute_reference(loaded, str(recipe), stop, Console(), str(config_file) if config_file else None)
        leave_group()


@app.command(cls=Command, context_settings={"ignore_unknown_options": True})
def launch(
    words: Annotated[
        list[str],
        typer.Argument(
            help="Recipe to train, with overrides; or options of accelerate launch, then -m finetune COMMAND ...",
            metavar="RECIPE",
        ),
    ],
    config_file: Annotated[Path | None, typer.Option(help="Accelerate config. Default: one process a device.")] = None,
    num_processes: Annotated[int | None, typer.Option(min=1, help="World size, if not that of the config.")] = None,
) -> None:
    """Train a recipe on one process or several: accelerate launch, but Ctrl-C saves, and an error is one message.

    Other options are accelerate's: launch --num_machines 2 --machine_rank 0 ... -m finetune train RECIPE. A launch by
    torchrun begins with its name: launch torchrun --nnodes 1:4 ... -m finetune train RECIPE. The exit status is that
    of the training processes, 75 where they were stopped and have saved.

    Example: [bold]python -m finetune launch --config-file accelerate_configs/ddp.yaml --num-processes 2
    recipes/quickstart/full.yaml[/bold]
    """
    from finetune.training.launcher import launch as run

    quiet_libraries()
    raise SystemExit(run(words, config_file, num_processes))


@app.command(cls=Command)
def new(
    model: Annotated[str | None, typer.Option(help="Hub id or local folder.")] = None,
    data: Annotated[str | None, typer.Option(help="File, folder, URL or dataset of the hub.")] = None,
    mode: Annotated[str | None, typer.Option(help="full, lora or qlora.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run. Default: of data and mode.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: NAME.yaml in this folder.")
    ] = None,
) -> None:
    """Write a recipe that fits a model and your rows; asks for what is not given.

    It looks at the rows and chooses format, objective, length, batch, steps, warm-up and evaluation by them, with the
    reasons as comments.

    Example: [bold]python -m finetune new --model HuggingFaceTB/SmolLM2-135M --data faq.csv --mode lora[/bold]
    """
    from finetune.recipe.schema import MODES  # light: an answer that is missing costs no imports

    model = model or _answer("--model", "Model (hub id or folder)")
    data = data or _answer("--data", "Data (file, folder, URL or dataset of the hub)")
    mode = mode or _answer("--mode", f"Mode ({', '.join(MODES)})", "lora")
    quiet_libraries()
    with few_collections():
        import_transformers()
        from finetune.planning.new import Wanted, write_new

    write_new(Wanted(model, data, mode, name, output), Console())


def _answer(option: str, question: str, default: str | None = None) -> str:
    """Asks a person. Raises UserError where there is no terminal to ask on."""
    if not sys.stdin.isatty():
        raise UserError(f"new: no {option}, and no terminal to ask on")
    return typer.prompt(question, default=default)


@app.command(cls=Command)
def check(
    recipe: Annotated[Path, typer.Argument(help="Recipe file, or a folder of them.", metavar="RECIPE|FOLDER")],
    overrides: Overrides = None,
    config_file: Annotated[Path | None, typer.Option(help="Also check against this accelerate config.")] = None,
    num_processes: Annotated[int | None, typer.Option(help="World size, if not that of the config.")] = None,
    recipe_only: Annotated[
        bool, typer.Option("--recipe-only", help="Check the recipe only: no tokenizer, no data.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Validate a recipe without training: schema, launch, chat template, loss masks, data.

    In a folder, every recipe is checked, without its data, and against the accelerate config, if one is given.

    Example: [bold]python -m finetune check recipes/quickstart/full.yaml
    --config-file accelerate_configs/fsdp2.yaml --num-processes 4[/bold]
    """
    quiet_libraries()
    from finetune.planning.check import check_folder, check_recipe

    with few_collections():
        if recipe.is_dir():
            reports = check_folder(recipe, overrides or (), config_file, num_processes)
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


@app.command(cls=Command)
def plan(
    recipe: RecipePath,
    overrides: Overrides = None,
    on: Annotated[
        list[str] | None, typer.Option(metavar="NxDEVICE", help="Devices, such as 8xH100-80; may be repeated.")
    ] = None,
    nodes: Annotated[int, typer.Option(help="Machines, each with these devices.")] = 1,
    by: Annotated[str, typer.Option(help="Rank by time or by price.")] = "time",
    budget: Annotated[
        float | None, typer.Option(help="Most that the run may cost, in the currency of its price.")
    ] = None,
    deadline: Annotated[str | None, typer.Option(help="Longest that the run may take: 90m, 12h, 2d.")] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Machines that may be taken away.")] = False,
    probe: Annotated[bool, typer.Option("--probe", help="Measure this machine's speed, half a minute.")] = False,
    write: Annotated[bool, typer.Option("--write", help="Write the accelerate config of the best place.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with a picture of memory.")] = None,
    sweep: Annotated[
        str | None, typer.Option(metavar="KEY=FIRST..LAST", help="Other values of a key: data.max_length=2048..131072.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What must change to fit into as much a device: 24GB.")
    ] = None,
    hardware: Annotated[Path | None, typer.Option(help="Own devices. Default: hardware.yaml, if it is here.")] = None,
    prices: Annotated[Path | None, typer.Option(help="Own prices. Default: prices.yaml, if it is here.")] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Run steps of the best place on devices that are not there; minutes.")
    ] = False,
    report: Annotated[
        bool, typer.Option("--report", help="RECIPE ... are run directories: predicted beside measured memory.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Plan a run before renting for it: does it fit, how fast, at what price, with which accelerate config.

    Every legal config on the given devices, by formula, without weights and without network. docs/plan.md says what the
    numbers rest on.

    Example: [bold]python -m finetune plan recipes/llama3.1-8b/lora.yaml --on 8xH100-80 --on 2x4090[/bold]

    With --report, predicted memory beside what runs measured: [bold]python -m finetune plan --report runs/*[/bold]
    """
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")  # read when they are imported
    quiet_libraries()
    with few_collections():
        import_transformers()
        from finetune.planning.estimate.command import PlanOptions, run
        from finetune.planning.estimate.errors import compare_runs, table
        from finetune.training.exact import show_exact

    if report:
        print(table(compare_runs([recipe, *map(Path, overrides or ())])))
        return
    ranking = {"nodes": nodes, "by": by, "budget": budget, "deadline": deadline, "spot": spot, "measure": probe}
    wanted = {"write": write, "html": html, "sweep": sweep, "memory": memory, "as_json": as_json}
    options = PlanOptions(tuple(on or ()), **ranking, **wanted, hardware=hardware, prices=prices)
    places = run(recipe, overrides or (), options, Console())
    if exact:
        show_exact(recipe, overrides or (), places, Console(stderr=as_json))


@app.command(cls=Command)
def inspect(
    recipe: RecipePath,
    overrides: Overrides = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Number of examples, from all sources. Default: 3, with --html 20.")
    ] = None,
    row: Annotated[
        list[str] | None, typer.Option(metavar="PATH:NUMBER", help="Show this row instead; may be repeated.")
    ] = None,
    packed: Annotated[
        int | None, typer.Option(min=0, help="Number of packed sequences. Default: 0, with --html 2.")
    ] = None,
    on_eval: Annotated[bool, typer.Option("--eval", help="Inspect data.eval instead of data.train.")] = False,
    totals: Annotated[bool, typer.Option("--totals", help="Only statistics, no examples.")] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show token boundaries and ids.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Show long examples in full.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write an HTML page.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what the model sees: examples with supervised tokens coloured, and what was dropped and why.

    With --json one object per example: path, row, input_ids, labels (-100 where not supervised), before packing.
    With --json --totals one object with all statistics.

    Example: [bold]python -m finetune inspect recipes/quickstart/full.yaml --rows 2[/bold]
    """
    from finetune.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or ())
    quiet_libraries()
    with few_collections():
        import_transformers()
        from finetune.planning.inspect import InspectOptions, inspect

    options = InspectOptions(rows, tuple(row or ()), packed, on_eval, totals, tokens, full, html, as_json)
    inspect(loaded, recipe, options, Console())


@app.command(cls=Command)
def prepare(recipe: RecipePath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Tokenise a recipe's data into the cache before the run, without a GPU, on all cores.

    A run with the same data, tokenizer and template then starts in seconds. FINETUNE_CACHE sets the cache's folder.

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


@cache_app.command("list", cls=Command)
def list_cache(as_json: AsJson = False) -> None:
    """List cached datasets with source, size, last use and origin.

    Example: [bold]python -m finetune cache list[/bold]
    """
    quiet_libraries()
    from finetune.data.token_cache import entries_folder, list_entries
    from finetune.planning.prepare import show_entries

    entries = list_entries()
    if as_json:
        print(json.dumps([entry.as_dict() for entry in entries], indent=1))
    else:
        show_entries(Console(), entries_folder(), entries)


@cache_app.command("clean", cls=Command)
def clean_cache(
    older_than: Annotated[str, typer.Option(help="Minimum time since last use: 12h, 30d, 8w.", metavar="AGE")] = "30d",
    everything: Annotated[bool, typer.Option("--all", help="Regardless of last use.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Remove entries that were not used recently, and remains of interrupted builds.

    Entries that are being built are kept; a running job keeps what it reads.

    Example: [bold]python -m finetune cache clean --older-than 14d[/bold]
    """
    quiet_libraries()
    from finetune.data.token_cache import age_in_seconds, entries_folder, list_entries, not_used_for, remove
    from finetune.planning.prepare import show_entries
    from finetune.utils import readable_bytes

    age = age_in_seconds(older_than)
    entries = not_used_for(list_entries(), 0 if everything else age)
    if not entries:
        print(f"{entries_folder()}: nothing to remove" + ("" if everything else f", all was used within {older_than}"))
        return
    show_entries(Console(), entries_folder(), entries)
    if not yes:
        if not sys.stdin.isatty():
            raise UserError("cache clean: no terminal to ask for confirmation; give --yes to remove what is listed")
        typer.confirm("Remove these entries?", abort=True)
    kept = remove(entries)
    removed = [entry for entry in entries if entry not in kept]
    print(f"removed {len(removed):,}, {readable_bytes(sum(entry.bytes for entry in removed))}")
    for entry in kept:
        print(f"kept, because it is being built: {entry.path}")


MaxNewTokens = Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0: greedy.")]
TopP = Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Draw from the likeliest tokens of this mass.")]
TopK = Annotated[int | None, typer.Option(min=0, help="Draw from so many likeliest tokens; 0: all.")]
Penalty = Annotated[float | None, typer.Option(min=0.01, help="Above 1: tokens that occurred are less likely.")]
Seed = Annotated[int | None, typer.Option(min=0, help="The same seed draws the same answers.")]
Stop = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End an answer here; may be repeated.")]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt.")]


@app.command(cls=Command)
def generate(
    run_dir: RunDir,
    prompt: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="Prompts. Default: read from the terminal.")
    ] = None,
    rows: Annotated[
        Path | None, typer.Option("--input", metavar="FILE", help='JSONL of {"prompt": ...} or {"messages": [...]}.')
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Of --input: its rows with answers; resumes where it stopped.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of --input at once.")] = 8,
    system: System = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    top_k: TopK = None,
    repetition_penalty: Penalty = None,
    seed: Seed = None,
    stop: Stop = None,
    as_json: AsJson = False,
) -> None:
    """Generate answers with the trained model: to prompts, or to each row of a file.

    Example: [bold]python -m finetune generate runs/quickstart-full "the 3rd of March, 2021"[/bold]
    """
    if (rows is None) != (output is None):
        raise UserError("generate: --input and --output go together: a file of rows, and the file of their answers")
    if rows is not None and prompt:
        raise UserError("generate: give prompts, or --input with a file of them")
    quiet_libraries()
    with few_collections():
        import_transformers()
        from finetune.export.answering import Sampling, answer_file, answer_prompts

    sampling = Sampling(max_new_tokens, temperature, top_p, top_k, repetition_penalty, seed, tuple(stop or ()))
    if rows is None or output is None:
        answer_prompts(run_dir, prompt or [], sampling, system, as_json)
        return
    count = answer_file(run_dir, rows, output, sampling, system, batch_size, Console(stderr=True))
    print(json.dumps({"rows": count, "output": str(output)}) if as_json else f"{count:,} answers in {output}")


@app.command(cls=Command)
def chat(
    run_dir: RunDir,
    system: System = None,
    max_new_tokens: MaxNewTokens = 1024,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    top_k: TopK = None,
    repetition_penalty: Penalty = None,
    seed: Seed = None,
    stop: Stop = None,
) -> None:
    """Talk to the trained model, which sees the conversation so far.

    /clear begins again, /system TEXT sets a system prompt, /save FILE adds the conversation to a file of rows.

    Example: [bold]python -m finetune chat runs/quickstart-lora --temperature 0.7[/bold]
    """
    quiet_libraries()
    with few_collections():
        import_transformers()
        from finetune.export.answering import Sampling, chat_with

    chat_with(
        run_dir,
        Sampling(max_new_tokens, temperature, top_p, top_k, repetition_penalty, seed, tuple(stop or ())),
        system,
    )


@app.command(cls=Command)
def serve(
    runs: Annotated[
        list[str], typer.Argument(metavar="[NAME=]RUN_DIR...", help="Runs or model folders; adapters share their base.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on; requests need no key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    device: Annotated[str, typer.Option(help="auto: over all GPUs; or cpu, cuda:1, ...")] = "auto",
) -> None:
    """Serve trained models by their names, for OpenAI clients: transformers' own server, one request after the other.

    Example: [bold]python -m finetune serve runs/quickstart-lora other=runs/quickstart-full --port 8000[/bold]
    """
    named = [(name or Path(path).resolve().name, Path(path)) for name, _, path in (_name_and_path(run) for run in runs)]
    quiet_libraries()
    with few_collections():
        import_transformers()
        from transformers.utils.import_utils import is_serve_available

        if not is_serve_available():
            raise UserError("serve: pip install 'finetune[serve]' (fastapi, uvicorn and openai), then again")
        from finetune.export.serving import serve as run_server

    with contextlib.suppress(KeyboardInterrupt):
        run_server(named, host, port, device)


def _name_and_path(run: str) -> tuple[str, str, str]:
    """Returns NAME=RUN in three; a path may have `=` in it, but not in its first part."""
    name, sign, path = run.partition("=")
    return (name, sign, path) if sign and "/" not in name else ("", "", run)


@app.command(cls=Command)
def score(
    run_dir: RunDir,
    data: Annotated[str, typer.Option(help="File of pairs, answers or texts: a path as in a recipe's `data.train`.")],
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a JSON object for each row.")] = None,
    format: Annotated[str, typer.Option(help="Format of the rows. auto: detected.")] = "auto",
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows.")] = None,
    as_json: AsJson = False,
) -> None:
    """Score rows with a trained reward model or classifier: pairs, prompts with answers, or texts.

    Example: [bold]python -m finetune score runs/reward --data pairs.jsonl --output scores.jsonl[/bold]
    """
    quiet_libraries()
    with few_collections():
        import_transformers()
        from finetune.export.score import score_file, show_metrics, source_of

    metrics = score_file(run_dir, source_of(data, format, limit), output, Console(stderr=True))
    if as_json:
        print(json.dumps(metrics))
    else:
        show_metrics(Console(), metrics)


@app.command(cls=Command)
def merge(
    run_dirs: Annotated[list[Path], typer.Argument(help="Run directories.", metavar="RUN_DIR...")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Default, of one run: RUN_DIR/merged.")] = None,
    method: Annotated[str | None, typer.Option(help="Of several runs: linear, slerp, ties or dare.")] = None,
    weights: Annotated[
        str | None, typer.Option(metavar="W1,W2,...", help="Of each run's change. Default: equal, with sum 1.")
    ] = None,
    density: Annotated[
        float | None, typer.Option(help="Share of entries kept. Default: ties 0.2 (the largest), dare 0.5 (drawn).")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the entries that dare keeps. Default: 0.")] = None,
    base: Annotated[str | None, typer.Option(help="Base model, if it is no longer where the runs found it.")] = None,
) -> None:
    """Merge a run's adapter into its base model, or several runs of one base: a plain model folder.

    Of one run it is short for `export --to hf`, of the result. Of several, what each has changed of the base is
    combined by --method, tensor by tensor in fp32.

    Example: [bold]python -m finetune merge runs/quickstart-lora[/bold]
    """
    quiet_libraries()
    with few_collections():
        import_transformers()
        from finetune.export.combine import combination
        from finetune.export.commands import merge_adapter, merge_several

    if len(run_dirs) == 1:
        for name, value in {"method": method, "weights": weights, "density": density, "seed": seed}.items():
            if value is not None:
                raise UserError(f"--{name}: says how several runs are merged; give them all")
        print(f"merged into {merge_adapter(run_dirs[0], out or run_dirs[0] / 'merged', base)}")
        return
    if method is None or out is None:
        raise UserError("merge: several runs need --method linear, slerp, ties or dare, and a folder by -o")
    how = combination(method, len(run_dirs), weights, density, seed)
    merge_several(run_dirs, how, out, base, Console(stderr=True))
    print(f"merged into {out}")


@app.command(cls=Command)
def export(
    run_dir: RunDir,
    to: Annotated[
        str, typer.Option(help="hf or vllm (a plain model folder), gguf, or ollama; adapters merged.")
    ] = "hf",
    step: Annotated[
        str | None, typer.Option(metavar="N|best", help="A checkpoint. Default: the result, or the newest checkpoint.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Default: RUN_DIR/export-TO[-step-N].")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="hf: float32, bfloat16, float16; gguf: f32, bf16, f16, q8_0."),
    ] = None,
    quantize: Annotated[
        str | None, typer.Option(help="hf: weights in int8 or fp8, compressed-tensors' format, without calibration.")
    ] = None,
    base: Annotated[str | None, typer.Option(help="Base model, if it is no longer where the run found it.")] = None,
    average_checkpoints: Annotated[
        int | None,
        typer.Option(min=2, help="The mean of so many checkpoints: that of --step, or the newest, and before."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Of the server, for the command of vLLM. Default: this machine's.")
    ] = None,
    verify: Annotated[bool, typer.Option(help="Compare the export with what was trained.")] = True,
    as_json: AsJson = False,
) -> None:
    """Export a result or a checkpoint, also of a run that was stopped, tensor by tensor on any machine.

    Example: [bold]python -m finetune export runs/quickstart-lora --to hf --step best -o my-model[/bold]
    """
    quiet_libraries()
    with few_collections():
        import_transformers()
        from finetune.export.commands import ExportOptions, export_run

    exported = export_run(
        run_dir,
        ExportOptions(to, step, out, dtype, base, verify, average_checkpoints, quantize, gpus),
        Console(stderr=True),
    )
    print(json.dumps(exported) if as_json else f"exported to {exported['out']}")


@app.command(cls=Command)
def verify(
    against: Annotated[Path, typer.Option(help="Run directory that it is of.", metavar="RUN_DIR")],
    export: Annotated[Path | None, typer.Argument(help="Folder that was exported.", metavar="EXPORT")] = None,
    url: Annotated[
        str | None, typer.Option(metavar="http://HOST:PORT/v1", help="A live server, in place of a folder.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Its name on that server, if not the run's.")] = None,
    step: Annotated[str | None, typer.Option(metavar="N|best", help="Checkpoint. Default: as exported.")] = None,
    base: Annotated[str | None, typer.Option(help="Base model, if it is no longer where the run found it.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Held-out rows to compare on.")] = 32,
    as_json: AsJson = False,
) -> None:
    """Compare an export, or a live server of any make, with its run on held-out rows. Exit status 1 beyond the
    thresholds.

    An export: KL per trained token, likeliest tokens, greedy texts, rendered tokens, end tokens, names of tensors. A
    server: whether its greedy tokens are the run's likeliest, where answers end, how many tokens a prompt has.

    Example: [bold]python -m finetune verify my-model --against runs/quickstart-lora[/bold]
    """
    if (export is None) == (url is None):
        raise UserError("verify: give a folder that was exported, or --url of a server")
    if model is not None and url is None:
        raise UserError("verify: --model is of a server: give --url")
    quiet_libraries()
    with few_collections():
        import_transformers()
        from finetune.export.commands import verify_run
        from finetune.export.live import verify_url
        from finetune.export.trained import find_trained

    console = Console(stderr=as_json)
    if url is not None:
        figures = verify_url(url, find_trained(against, step), model, base, rows, console)
    else:
        assert export is not None
        figures = verify_run(export, against, step, base, rows, console)
    if as_json and figures is not None:
        print(json.dumps(figures.as_dict()))


@app.command(cls=Command)
def upload(
    run_dir: Annotated[Path, typer.Argument(help="Run directory, or a folder that was exported.", metavar="RUN_DIR")],
    to: Annotated[str | None, typer.Option(metavar="ORG/NAME", help="Default: your name and the folder's.")] = None,
    base_model: Annotated[
        str | None, typer.Option(metavar="ORG/NAME", help="The base's hub id, where it was trained from a local path.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="For all to see. Default: private.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Upload a result or an export to the Hugging Face Hub, private, after a list of its files.

    Example: [bold]python -m finetune upload runs/quickstart-lora --to my-org/my-model[/bold]
    """
    quiet_libraries()
    from finetune.export.upload import upload as send

    def agrees() -> None:
        if not yes:
            if not sys.stdin.isatty():
                raise UserError("upload: no terminal to ask for confirmation; give --yes to upload what is listed")
            typer.confirm("Upload these files?", abort=True)

    print(f"uploaded to {send(run_dir, to, base_model, public, Console(), agrees)}")


@app.command(cls=Command)
def evaluate(
    run_dir: RunDir,
    tasks: Annotated[str, typer.Option(metavar="NAME,...", help="Tasks of lm_eval, or of --task-folder.")],
    task_folder: Annotated[Path | None, typer.Option(help="Folder of tasks as lm_eval's YAML.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows of each task.")] = None,
    fewshot: Annotated[int | None, typer.Option(min=0, help="Examples in the prompt. Default: the task's.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows at a time.")] = 8,
    base: Annotated[bool, typer.Option(help="Ask the base model, too.")] = True,
    as_json: AsJson = False,
) -> None:
    """Evaluate a run's result and its base on tasks of lm_eval, side by side, through the run's chat template.

    Figures with standard errors go to RUN_DIR/evaluate.json, metrics.jsonl and the run's trackers.

    Example: [bold]python -m finetune evaluate runs/gsm8k-full --tasks gsm8k_local --task-folder tasks[/bold]
    """
    quiet_libraries()
    with few_collections():
        import_transformers()
        from finetune.export.evaluate import EvaluateOptions, evaluate_run

    options = EvaluateOptions(tuple(tasks.split(",")), task_folder, limit, fewshot, batch_size, base)
    scores = evaluate_run(run_dir, options, Console(stderr=as_json))
    if as_json:
        print(json.dumps({name: vars(score) for name, score in scores.items()}))


@app.command(cls=Command)
def report(
    run_dirs: Annotated[list[Path], typer.Argument(help="Run directories.", metavar="RUN_DIR...")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Page to write. Default: report.html.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Serve the page on 127.0.0.1 while runs go on.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of --watch; 0: any.")] = 8765,
) -> None:
    """Write runs as one HTML page: curves of all metrics, last values, plan, recipes' differences, compared exports.

    Example: [bold]python -m finetune report runs/a runs/b -o page.html[/bold]
    """
    from finetune.planning.report import watch as serve
    from finetune.planning.report import write_report

    if watch and out is not None:
        raise UserError("report: --watch serves the page and writes none: leave out -o, or --watch")
    if watch:
        serve(run_dirs, port, lambda url: print(f"{url} (Ctrl-C ends it)", flush=True))
    else:
        write_report(run_dirs, out or Path("report.html"))
        print(f"wrote {out or 'report.html'}")


@app.command(cls=Command)
def checkpoints(
    run_dir: RunDir,
    verify: Annotated[bool, typer.Option("--verify", help="Read every file and compare checksums.")] = False,
    as_json: AsJson = False,
) -> None:
    """List a run's checkpoints: step, metrics, size, when and where they were written.

    With --verify the exit status is 2 if a checkpoint is damaged.

    Example: [bold]python -m finetune checkpoints runs/quickstart-full --verify[/bold]
    """
    quiet_libraries()
    from finetune.checkpoints.folder import describe_checkpoints, show_checkpoints

    entries = describe_checkpoints(run_dir, verify)
    if as_json:
        print(json.dumps([entry.as_dict() for entry in entries], indent=1))
    else:
        show_checkpoints(Console(), run_dir, entries)
    if any(entry.problem for entry in entries):
        raise SystemExit(2)


@app.command(cls=Command)
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
    quiet_libraries()
    from finetune.engine.links import join_group
    from finetune.engine.start import leave_group
    from finetune.planning.doctor import diagnose
    from finetune.planning.doctor_advice import advice, show_diagnosis

    group = join_group()
    diagnosis = diagnose(group, folder or [Path("runs")])
    if group.rank == 0 and as_json:
        print(json.dumps({**diagnosis.as_dict(), "advice": advice(diagnosis)}, indent=1))
    elif group.rank == 0:
        show_diagnosis(Console(), diagnosis, advice(diagnosis))
    leave_group()


@app.command(cls=Command)
def schema() -> None:
    """Print the recipe's JSON Schema.

    Example: [bold]python -m finetune schema > recipes/recipe.schema.json[/bold]
    """
    from finetune.recipe import recipe_json_schema

    print(recipe_json_schema(), end="")
