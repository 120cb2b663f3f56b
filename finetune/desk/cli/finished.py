"""Commands on finished runs: answers, servers, exports and their check, scores, reports, checkpoints."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from finetune.desk.cli.options import AsJson, BaseModel, RunDir, ServedModel, ServerUrl, System, with_sampling
from finetune.errors import UserError
from finetune.release.export.formats import EIGHT_BITS, EXPORTS, ExportOptions
from finetune.release.inference.sampling import Sampling

_ANSWER, _IN_CHAT = Sampling(), Sampling(max_new_tokens=1024)


@with_sampling
def generate(
    run_dir: RunDir,
    prompt: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="Prompts. Default: read from the terminal.")
    ] = None,
    images: Annotated[
        list[Path] | None,
        typer.Option("--image", metavar="FILE", help="Show this picture before each prompt; may be repeated."),
    ] = None,
    audio: Annotated[
        list[Path] | None,
        typer.Option("--audio", metavar="FILE", help="Play this sound before each prompt; may be repeated."),
    ] = None,
    videos: Annotated[
        list[Path] | None,
        typer.Option("--video", metavar="FILE", help="Show this video before each prompt; may be repeated."),
    ] = None,
    rows: Annotated[
        Path | None,
        typer.Option(
            "--input", metavar="FILE", help='Answer the rows of a JSONL: {"prompt": ...} or {"messages": [...]}.'
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the rows of --input with answers; continue an interrupted file."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Answer this many rows of --input at a time.")] = 8,
    system: System = None,
    sampling: Sampling = _ANSWER,
    as_json: AsJson = False,
) -> None:
    """Generate answers of a trained model to prompts, with pictures, sound or videos if it takes them, or to a file's
    rows.

    Example: [bold]python -m finetune generate runs/quickstart-full "the 3rd of March, 2021"[/bold]
    """
    files = ("--image", images), ("--audio", audio), ("--video", videos)
    if (rows is None) != (output is None):
        raise UserError(
            "generate: --input and --output go together. Fix: give both, a file of rows and the file of their answers"
        )
    if rows is not None and prompt:
        raise UserError(
            "generate: prompts and --input exclude each other. Fix: give prompts, or --input with a file of them"
        )
    if rows is not None and (given := [name for name, of_kind in files if of_kind]):
        raise UserError(
            f"generate: {given[0]} is only for prompts. Fix: name the files in the rows of --input, as rows of data do"
        )
    from finetune.release.inference.answering import Files, answer_file, answer_prompts

    if rows is None or output is None:
        answer_prompts(
            run_dir, prompt or [], sampling, system, Files(*(of_kind or () for _, of_kind in files)), as_json
        )
        return
    count = answer_file(run_dir, rows, output, sampling, system, batch_size, Console(stderr=True))
    print(json.dumps({"rows": count, "output": str(output)}) if as_json else f"{count:,} answers in {output}")


@with_sampling
def chat(
    run_dir: Annotated[
        Path | None, typer.Argument(help="Run directory, or an exported folder.", metavar="RUN_DIR")
    ] = None,
    url: ServerUrl = None,
    model: ServedModel = None,
    system: System = None,
    sampling: Sampling = _IN_CHAT,
) -> None:
    """Talk to a trained model, in this process or on a server (`serve`, vLLM, ...); it sees the conversation so far.

    /clear begins again, /system TEXT sets a system prompt, /image FILE, /audio FILE and /video FILE go with the next
    question, /save FILE adds the conversation to a file of rows.

    Example: [bold]python -m finetune chat runs/quickstart-lora --temperature 0.7[/bold]
    """
    if (run_dir is None) == (url is None):
        raise UserError(
            "chat: expected either a run directory or --url. Fix: give a run directory, or --url of a server"
        )
    if model is not None and url is None:
        raise UserError("chat: --model requires --url. Fix: add --url of the server, or leave out --model")
    if url is not None:
        from finetune.release.inference.chat import chat_with_server

        chat_with_server(url, model, sampling, system)
    else:
        assert run_dir is not None
        from finetune.release.inference.answering import chat_with

        chat_with(run_dir, sampling, system)


def serve(
    runs: Annotated[
        list[str], typer.Argument(metavar="[NAME=]RUN_DIR...", help="Runs or model folders; adapters share their base.")
    ],
    host: Annotated[str, typer.Option(help="Listen on this address; requests need no key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Listen on this port; 0: any free one.")] = 8000,
    device: Annotated[str, typer.Option(help="Load models on this device: auto (all GPUs), cpu, cuda:1, ...")] = "auto",
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Also answer requests to this host name; may be repeated. '*': any."),
    ] = None,
) -> None:
    """Serve trained models by their names, for OpenAI clients, one request after the other.

    Example: [bold]python -m finetune serve runs/quickstart-lora other=runs/quickstart-full --port 8000[/bold]
    """
    named: list[tuple[str, Path]] = []
    for run in runs:
        name, sign, path = run.partition("=")
        if not sign or "/" in name:  # a path with `=` in it
            name, path = Path(run).resolve().name, run
        named.append((name or Path(path).resolve().name, Path(path)))
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise UserError(
            "serve: fastapi, uvicorn or openai is not installed. Fix: pip install 'finetune-recipes[serve]', then run "
            "the same command again"
        )
    from finetune.release.inference.serve import serve as run_server

    with contextlib.suppress(KeyboardInterrupt):
        run_server(named, host, port, device, allow_host or ())


def score(
    run_dir: RunDir,
    data: Annotated[
        str, typer.Option(help="Score the pairs, answers or texts of a file: a path as in a recipe's `data.train`.")
    ],
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a JSON object for each row.")] = None,
    format: Annotated[str, typer.Option(help="Read rows of this format; auto: detected.")] = "auto",
    limit: Annotated[int | None, typer.Option(min=1, help="Score only the first rows.")] = None,
    as_json: AsJson = False,
) -> None:
    """Score rows with a trained reward model or classifier: pairs, prompts with answers, or texts.

    Example: [bold]python -m finetune score runs/reward --data pairs.jsonl --output scores.jsonl[/bold]
    """
    from finetune.release.inference.score import score_file, show_metrics, source_of

    metrics = score_file(run_dir, source_of(data, format, limit), output, Console(stderr=True))
    if as_json:
        print(json.dumps(metrics))
    else:
        show_metrics(Console(), metrics)


def merge(
    run_dirs: Annotated[list[Path], typer.Argument(help="Run directories.", metavar="RUN_DIR...")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write this folder. Default for one run: RUN_DIR/merged.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="Combine several runs by linear, slerp, ties or dare.")] = None,
    weights: Annotated[
        str | None, typer.Option(metavar="W1,W2,...", help="Weight the runs' changes. Default: equal, with sum 1.")
    ] = None,
    density: Annotated[
        float | None,
        typer.Option(help="Keep this share of entries. Default: ties 0.2 (the largest), dare 0.5 (drawn)."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Draw the entries that dare keeps by this seed. Default: 0.")] = None,
    base: Annotated[
        str | None, typer.Option(help="Read the base model from here, if it has moved since the runs.")
    ] = None,
) -> None:
    """Merge a run's adapter into its base model, or several runs of one base: a plain model folder.

    For one run it is short for `export --to hf` of the result. For several runs, --method combines their changes of
    the base, tensor by tensor in fp32.

    Example: [bold]python -m finetune merge runs/quickstart-lora[/bold]
    """
    from finetune.release.export.combine import combination
    from finetune.release.export.commands import merge_adapter, merge_several

    if len(run_dirs) == 1:
        for name, value in {"method": method, "weights": weights, "density": density, "seed": seed}.items():
            if value is not None:
                raise UserError(
                    f"--{name} applies only when merging several runs. Fix: leave it out, or give several runs"
                )
        print(f"merged into {merge_adapter(run_dirs[0], out or run_dirs[0] / 'merged', base)}")
        return
    if method is None or out is None:
        raise UserError(
            "merge: several runs need --method and -o. Fix: give --method linear, slerp, ties or dare, and "
            "a folder by -o"
        )
    how = combination(method, len(run_dirs), weights, density, seed)
    merge_several(run_dirs, how, out, base, Console(stderr=True))
    print(f"merged into {out}")


def _per_format(texts: dict[str, str]) -> str:
    """Returns the help of an option whose values depend on the format; formats of the same text are one entry."""
    names = {text: ", ".join(name for name, other in texts.items() if other == text) for text in texts.values()}
    return "; ".join(f"{name}: {text}" for text, name in names.items()) + "."


def export(
    run_dir: RunDir,
    to: Annotated[str, typer.Option(help=_per_format({name: one.about for name, one in EXPORTS.items()}))] = "hf",
    step: Annotated[
        str | None,
        typer.Option(metavar="N|best", help="Export this checkpoint. Default: the result, or the newest checkpoint."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write this folder. Default: RUN_DIR/export-TO[-step-N].")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help=_per_format({name: ", ".join(one.dtypes) for name, one in EXPORTS.items() if one.dtypes})),
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            help=f"hf, vllm: store {' or '.join(EIGHT_BITS)} weights in compressed-tensors' format, uncalibrated."
        ),
    ] = None,
    base: BaseModel = None,
    average_checkpoints: Annotated[
        int | None,
        typer.Option(
            min=2, help="Export the mean of this many checkpoints: that of --step, or the newest, and earlier ones."
        ),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Write vLLM's command for this many GPUs. Default: this machine's.")
    ] = None,
    llama_cpp: Annotated[
        Path | None,
        typer.Option(
            help="gguf, ollama: folder of llama.cpp's converter and tools. Default: LLAMA_CPP_DIR, then PATH.",
            metavar="DIR",
        ),
    ] = None,
    imatrix: Annotated[
        int | None,
        typer.Option(min=1, metavar="ROWS", help="gguf, ollama: weigh errors by this many rows of training."),
    ] = None,
    verify: Annotated[bool, typer.Option(help="Compare the export with what was trained.")] = True,
    as_json: AsJson = False,
) -> None:
    """Export a result or a checkpoint, also of a stopped run, tensor by tensor on any machine.

    Example: [bold]python -m finetune export runs/quickstart-lora --to hf --step best -o my-model[/bold]
    """
    from finetune.release.export.commands import export_run

    exported = export_run(
        run_dir,
        ExportOptions(to, step, out, dtype, base, verify, average_checkpoints, quantize, gpus, llama_cpp, imatrix),
        Console(stderr=True),
    )
    print(json.dumps(exported) if as_json else f"exported to {exported['out']}")


def verify(
    against: Annotated[Path, typer.Option(help="Compare with this run.", metavar="RUN_DIR")],
    export: Annotated[Path | None, typer.Argument(help="Exported folder.", metavar="EXPORT")] = None,
    url: ServerUrl = None,
    model: ServedModel = None,
    step: Annotated[
        str | None,
        typer.Option(metavar="N|best", help="Compare with this checkpoint of the run. Default: as exported."),
    ] = None,
    base: BaseModel = None,
    rows: Annotated[int, typer.Option(min=1, help="Compare on this many held-out rows.")] = 32,
    as_json: AsJson = False,
) -> None:
    """Compare an export, or any live server, with its run on held-out rows. Exit status 1 beyond the thresholds.

    Compares of an export the KL per trained token, likeliest tokens, greedy texts, rendered tokens, end tokens and
    names of tensors; of a server its greedy tokens, the ends of answers and the number of tokens of a prompt.

    Example: [bold]python -m finetune verify my-model --against runs/quickstart-lora[/bold]
    """
    if (export is None) == (url is None):
        raise UserError("verify: expected either a folder or --url. Fix: give an exported folder, or --url of a server")
    if model is not None and url is None:
        raise UserError("verify: --model requires --url. Fix: add --url of the server, or leave out --model")
    from finetune.checkpoints.trained import find_trained
    from finetune.release.export.commands import verify_run
    from finetune.release.inference.live import verify_url

    console = Console(stderr=as_json)
    if url is not None:
        figures = verify_url(url, find_trained(against, step), model, base, rows, console)
    else:
        assert export is not None
        figures = verify_run(export, against, step, base, rows, console)
    if as_json and figures is not None:
        print(json.dumps(figures.as_dict()))


def upload(
    run_dir: Annotated[Path, typer.Argument(help="Run directory, or an exported folder.", metavar="RUN_DIR")],
    to: Annotated[
        str | None, typer.Option(metavar="ORG/NAME", help="Write this repository. Default: your name and the folder's.")
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(metavar="ORG/NAME", help="Name this base on the hub, if it was trained from a local path."),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Make the repository public. Default: private.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Upload a result or an export to the Hugging Face Hub, private, after a list of its files.

    Example: [bold]python -m finetune upload runs/quickstart-lora --to my-org/my-model[/bold]
    """
    from finetune.release.export.upload import upload as send

    def agrees() -> None:
        if not yes:
            if not sys.stdin.isatty():
                raise UserError("upload: no terminal to ask for confirmation. Fix: give --yes to upload what is listed")
            typer.confirm("Upload these files?", abort=True)

    print(f"uploaded to {send(run_dir, to, base_model, public, Console(), agrees)}")


def evaluate(
    run_dirs: Annotated[list[Path], typer.Argument(help="Run directories.", metavar="RUN_DIR...")],
    tasks: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Evaluate on these tasks of lm_eval, or of --task-folder.")
    ] = None,
    rows: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Answer the questions of these rows, and compare with their answers."),
    ] = None,
    task_folder: Annotated[Path | None, typer.Option(help="Read tasks in lm_eval's YAML from this folder.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Evaluate only the first rows of each task, or of --head.")
    ] = None,
    fewshot: Annotated[
        int | None, typer.Option(min=0, help="Put this many examples into the prompt. Default: the task's.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Evaluate this many rows at a time.")] = 8,
    base: Annotated[bool, typer.Option(help="Evaluate the base model, too.")] = True,
    step: Annotated[
        str | None,
        typer.Option(metavar="N|best", help="Evaluate this checkpoint. Default: the result, or the newest checkpoint."),
    ] = None,
    head: Annotated[
        bool,
        typer.Option("--head", help="Measure how many drafts of the head that predicts ahead the model accepts."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate runs and their base on tasks of lm_eval or rows of a file, side by side, by each run's chat template.

    Of --rows it measures exact matches, and of a model that hears word error rates; answers are greedy, with the run's
    `evaluate.max_new_tokens` and `evaluate.answer`. Writes figures, with standard errors of paired differences, to
    RUN_DIR/evaluate.json, metrics.jsonl and trackers.

    Example: [bold]python -m finetune evaluate runs/gsm8k-full --tasks gsm8k_local --task-folder recipes/tasks[/bold]
    """
    from finetune.release.inference.evaluate import EvaluateOptions, evaluate_runs

    for name, value in {"--task-folder": task_folder, "--fewshot": fewshot}.items():
        if tasks is None and value is not None:
            raise UserError(f"evaluate: {name} is of --tasks alone. Fix: leave it out, or give --tasks")
    names = tuple(tasks.split(",")) if tasks is not None else ()
    options = EvaluateOptions(names, task_folder, limit, fewshot, batch_size, base, step, head, rows)
    every = evaluate_runs(run_dirs, options, Console(stderr=as_json))
    if as_json:
        of_runs = [{name: score.as_dict() for name, score in scores.items()} for scores in every]
        several = {str(run_dir): scores for run_dir, scores in zip(run_dirs, of_runs, strict=True)}
        print(json.dumps(several if len(run_dirs) > 1 else of_runs[0]))


def report(
    run_dirs: Annotated[list[Path], typer.Argument(help="Run directories.", metavar="RUN_DIR...")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write this page. Default: report.html.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Serve the page on 127.0.0.1 while runs go on.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Serve --watch on this port; 0: any free one.")] = 8765,
) -> None:
    """Write runs as one HTML page: a summary, what differs, curves of all metrics, answers, compared exports, plans.

    Example: [bold]python -m finetune report runs/a runs/b -o page.html[/bold]
    """
    from finetune.desk.view.report import watch as serve
    from finetune.desk.view.report import write_report
    from finetune.plan.run_list import price_so_far

    if watch and out is not None:
        raise UserError("report: --watch serves the page and writes none. Fix: leave out -o, or --watch")
    if watch:
        serve(run_dirs, port, lambda url: print(f"{url} (Ctrl-C ends it)", flush=True), price_so_far)
    else:
        write_report(run_dirs, out or Path("report.html"), price_so_far)
        print(f"wrote {out or 'report.html'}")


def runs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of runs, or a run.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List runs with status, step, loss, speed, hours left and price so far; also those on a shared folder.

    A run that was killed cannot say so: `running?` has written nothing for a long time.

    Example: [bold]python -m finetune runs runs[/bold]
    """
    from finetune.plan.run_list import list_runs, runs_as_json, show_runs

    found = list_runs(folder)
    if as_json:
        print(runs_as_json(found))
    else:
        show_runs(Console(), folder, found)


def logs(
    run_dir: RunDir,
    lines: Annotated[
        int | None, typer.Option("--lines", "-n", min=0, metavar="N", help="Show only the last lines.")
    ] = None,
    goes_on: Annotated[bool, typer.Option("--follow", "-f", help="Show new lines until the run has ended.")] = False,
) -> None:
    """Show the steps and evaluations of a run, also while it goes on.

    Example: [bold]python -m finetune logs runs/quickstart-full --follow[/bold]
    """
    from finetune.desk.view.run_log import follow

    with contextlib.suppress(KeyboardInterrupt):
        for line in follow(run_dir, lines, goes_on):
            print(line, flush=True)


def checkpoints(
    run_dir: RunDir,
    verify: Annotated[bool, typer.Option("--verify", help="Read every file and compare checksums.")] = False,
    as_json: AsJson = False,
) -> None:
    """List a run's checkpoints: step, metrics, size, time and machine.

    Exits with status 2 if --verify finds a damaged checkpoint.

    Example: [bold]python -m finetune checkpoints runs/quickstart-full --verify[/bold]
    """
    from finetune.checkpoints.folder import describe_checkpoints, show_checkpoints

    entries = describe_checkpoints(run_dir, verify)
    if as_json:
        print(json.dumps([entry.as_dict() for entry in entries], indent=1))
    else:
        show_checkpoints(Console(), run_dir, entries)
    if any(entry.problem for entry in entries):
        raise SystemExit(2)
