"""`finetune new`: writes a recipe whose lengths, batch, steps and evaluation fit the rows (`row_fit.py`)."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from finetune.data.samples import Conversation, Labelled, Preference, PromptCompletion, Ranked, Sample
from finetune.errors import UserError
from finetune.models.base_config import NO_FOLDER, is_missing_folder, without_weights
from finetune.models.config import model_config
from finetune.models.tokenizer import load_tokenizer
from finetune.recipe import load_recipe
from finetune.recipe.schema import MODES, RUN_NAME, Model
from finetune.setup.row_fit import (
    CHARACTERS_PER_TOKEN,
    GOAL_STEPS,
    LONGEST,
    SLACK,
    ExampleLengths,
    Fit,
    RowsFound,
    chat_template,
    estimated_lengths,
    fit_rows,
    read_source,
    token_lengths,
)
from finetune.shipped import SHIPPED
from finetune.utils import write_atomically


@dataclass(frozen=True)
class NewOptions:
    """Options or answers of the user."""

    model: str  # hub id or local folder
    data: str  # path as in a recipe
    mode: str
    name: str | None  # run name; None: from data and mode
    output: Path | None  # None: <name>.yaml in the current folder


@dataclass(frozen=True)
class NewRecipe:
    """Contents of the new recipe."""

    options: NewOptions
    name: str
    path: Path
    base: Path
    rows: RowsFound
    lengths: ExampleLengths
    fit: Fit
    template: str | None  # for chats, if the tokenizer has none
    parameters: int | None  # number of the model's parameters; None: unknown


def write_new(options: NewOptions, console: Console) -> Path:
    """Writes the recipe, shows its reasons and the next commands; returns its path. Raises UserError."""
    if options.mode not in MODES:
        raise UserError(f"--mode {options.mode}: expected {', '.join(MODES)}")
    stem = Path(options.data.rstrip("/")).name.split(".")[0]
    name = options.name or f"{re.sub('[^A-Za-z0-9]+', '-', stem).strip('-') or 'run'}-{options.mode}"
    if not re.fullmatch(RUN_NAME.strip("^$"), name):
        raise UserError(f"--name {name}: expected letters, digits, `.`, `_` and `-`, and a letter or digit first")
    path = options.output or Path(f"{name}.yaml")
    if path.exists():
        raise UserError(f"{path} exists already and is left as it is: give another --output or --name, or remove it")
    base = _base_folder(path.parent) / f"{options.mode}.yaml"
    rows = read_source(options.data)
    rows.check_labels()
    model = Model(name=options.model)
    tokenizer, problem = _tokenizer(model)
    template = chat_template(rows, tokenizer)
    context = parameters = None
    if tokenizer is None:
        lengths = estimated_lengths(rows)
    else:
        lengths, config = token_lengths(rows, tokenizer, template), model_config(model)
        context = getattr(config.get_text_config(), "max_position_embeddings", None)
        parameters = sum(parameter.numel() for parameter in without_weights(config).parameters())
    fit = fit_rows(lengths, rows, min(context or LONGEST, LONGEST))
    recipe = NewRecipe(options, name, path, base, rows, lengths, fit, template, parameters)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, recipe_text(recipe))
    try:
        load_recipe(path)
    except UserError:
        path.unlink()
        raise
    _show(recipe, problem, console)
    return path


def _base_folder(folder: Path) -> Path:
    """Returns recipes/base of the repository around the recipe or around the current folder, else of the package."""
    around = [*folder.resolve().parents, folder.resolve(), *Path.cwd().parents, Path.cwd()]
    bases = (parent / "recipes" / "base" for parent in (*reversed(around), SHIPPED))
    return next((base for base in bases if (base / "lora.yaml").is_file()), SHIPPED / "recipes" / "base")


def _tokenizer(model: Model) -> tuple[PreTrainedTokenizerBase | None, str]:
    """Returns the tokenizer, or None and the reason. Raises UserError for a missing or unsupported model."""
    if is_missing_folder(str(model.name)):
        raise UserError(f"--model {model.name}: {NO_FOLDER}")
    try:
        return load_tokenizer(model), ""
    except UserError as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, LocalEntryNotFoundError | OfflineModeIsEnabled):
                return None, "its tokenizer is not on this machine, and the hub cannot be reached"
            cause = cause.__cause__ or cause.__context__
        raise


# --- the recipe


def recipe_text(recipe: NewRecipe) -> str:
    """Returns the recipe with its reasons as comments."""
    options, rows, lengths, fit = recipe.options, recipe.rows, recipe.lengths, recipe.fit
    lr, reason = _learning_rate(options.mode, rows.objective, recipe.parameters)
    is_near = recipe.base.parents[2] in recipe.path.resolve().parents  # else it is in another repository, or in none
    extends = Path(os.path.relpath(recipe.base, recipe.path.parent) if is_near else recipe.base)
    schema = (extends.parents[1] / "recipe.schema.json").as_posix()
    about = "about " if lengths.is_estimate or not rows.is_all else ""
    model = {"name": options.model} | ({"chat_template": recipe.template} if recipe.template else {})
    train: dict[str, Any] = {"epochs": fit.epochs}
    if recipe.parameters is not None and recipe.parameters < 10**9:
        train["activation_checkpointing"] = False
    few = "; these are few, and more rows would help most" if fit.steps < GOAL_STEPS // 2 else ""
    rate = f"{lr:.1e}".replace("e-0", "e-")  # `1e-4` is text in YAML 1.1
    processes = {1: "1 process", 2: "1 or 2 processes", 4: "1, 2 or 4 processes"}
    lines = [
        f"# yaml-language-server: $schema={schema}",
        "#",
        f"# {options.model} on {options.data} ({options.mode}).",
        f"# Written by `python -m finetune new` for {'' if rows.is_all else 'about '}{rows.count:,} rows of "
        f"{about}{lengths.total:,} tokens.",
        "#",
        f"# Launch:  python -m finetune launch {shlex.quote(str(recipe.path))}",
        f"# Format:  {rows.reason}",
        f"extends: {_flow(extends.as_posix())}",
        f"run: {_flow({'name': recipe.name})}",
        f"model: {_flow(model)}" + ("  # the tokenizer has no chat template" if recipe.template else ""),
        *_data_lines(options, rows, lengths, fit, about),
        *_objective_lines(rows, options.mode),
        f"batch: {{rows: {fit.rows}, rows_per_device: 1}}  # of about {fit.sequences:,} sequences; for "
        + processes.get(fit.rows, "1, 2, 4 or 8 processes"),
        f"optimizer: {{lr: {rate}}}" + (f"  # {reason}" if reason else ""),
        f"schedule: {{warmup_ratio: 0.1}}  # about {round(0.1 * fit.steps)} steps",
        f"train: {_flow(train)}  # about {fit.steps:,} steps{few}",
    ]
    if fit.held_out:
        asks = _question(rows) is not None and rows.objective != "classify"
        evaluate: dict[str, Any] = {"every_steps": fit.interval, "generate": 4 if asks else 0}
        if asks:
            longest_answer = int(np.percentile(lengths.answers, 99))
            evaluate["max_new_tokens"] = min(512, max(32, 1 << (longest_answer - 1).bit_length()))
        lines.append(f"evaluate: {_flow(evaluate)}")
    return "\n".join([*lines, f"checkpoint: {{every_steps: {fit.interval}}}"]) + "\n"


def _learning_rate(mode: str, objective: str, parameters: int | None) -> tuple[float, str]:
    """Returns the rate and its source."""
    adapters = mode != "full"
    if objective in ("dpo", "kto"):
        return (5e-6, "of recipes/mistral-7b-v0.3/dpo-lora.yaml") if adapters else (5e-7, "of its dpo-full.yaml")
    if parameters is not None and parameters < 10**9:
        small = "a model below 1 B takes more than the 2e-5 of Llama 2"
        return (1e-3, "ten times that of full training") if adapters else (1e-4, small)
    if parameters is not None and parameters > 30 * 10**9:
        return (1e-4, "of QLoRA's 33 B and 65 B, https://arxiv.org/abs/2305.14314, table 9") if adapters else (1e-5, "")
    if adapters:
        return 2e-4, "ten times that of full training; also QLoRA's, https://arxiv.org/abs/2305.14314"
    return 2e-5, "Llama 2, section 3.1, https://arxiv.org/abs/2307.09288"


def _data_lines(options: NewOptions, rows: RowsFound, lengths: ExampleLengths, fit: Fit, about: str) -> list[str]:
    source: dict[str, Any] = {"path": options.data, "format": rows.format}
    source |= {"columns": rows.columns} if rows.columns else {}
    held_out = "  eval: []  # too few rows to hold some out"
    if fit.held_out:
        count = f"{'' if rows.is_all else 'about '}{round(fit.held_out * rows.count):,} of {rows.count:,} rows"
        held_out = f"  eval: {{share: {fit.held_out:g}}}  # {count}: evaluated, never trained on"
    most = f"at most {lengths.longest:,}" + (f" by estimate: {SLACK} x that fit" if lengths.is_estimate else "")
    median = int(np.median(lengths.examples))
    lines = [
        "data:",
        "  train:",
        f"    - {_flow(source)}",
        held_out,
        f"  max_length: {fit.max_length}  # tokens; examples have {about}{median:,} (median), {most}",
    ]
    share = f"{fit.overlong / len(lengths.examples):.1%} of the examples are longer"
    if fit.overlong and rows.format in ("text", "tokens"):
        lines.append(f"  overlong: split  # {share}: their pieces are kept")
    elif fit.overlong:
        reason = f"{share}, and are left out; max_length is as long as the model allows, or {LONGEST:,}"
        lines.append(f"  overlong: drop  # {reason}")
    return lines


def _objective_lines(rows: RowsFound, mode: str) -> list[str]:
    objective: dict[str, Any] = {"name": rows.objective}
    if rows.objective == "sft":
        return []
    if rows.objective == "classify":
        return [f"objective: {_flow({**objective, 'labels': rows.labels})}  # those that occur"]
    if mode == "full":
        return [f"objective: {_flow({**objective, 'beta': 0.1})}"]
    adapters = {**objective, "beta": 0.1, "reference": "adapters_off"}
    return [f"objective: {_flow(adapters)}  # the reference is the model without its adapters"]


def _flow(value: Any) -> str:
    """Returns a value as YAML in one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6)
    return text.removesuffix("...\n").strip()


# --- the terminal


def _show(recipe: NewRecipe, problem: str, console: Console) -> None:
    """Prints the reasons, notes and the next commands. problem: why the tokenizer is missing."""
    rows, lengths, fit = recipe.rows, recipe.lengths, recipe.fit
    about = "about " if lengths.is_estimate else ""
    table = Table(show_header=False)
    for name, value in {
        "rows": f"{rows.count:,}" + ("" if rows.is_all else f", of which {len(rows.items):,} were read"),
        "format": f"{rows.format}: {rows.reason}",
        "tokens": f"{about}{lengths.total:,}: an example has {about}{int(np.median(lengths.examples)):,} (median), "
        f"at most {lengths.longest:,}",
        "objective": rows.objective,
        "sequences": f"about {fit.sequences:,} of up to {fit.max_length:,} tokens",
        "training": f"{fit.epochs} epochs, about {fit.steps:,} steps x {fit.rows} sequences",
        "held out": f"{fit.held_out:.0%} of the rows" if fit.held_out else "nothing: too few rows",
    }.items():
        table.add_row(name, escape(value))
    console.print(table)
    notes = [f"{len(rows.bad):,} rows cannot be read, such as {rows.bad[0]}"] if rows.bad else []
    if problem:
        estimate = f"lengths are estimated from characters, {CHARACTERS_PER_TOKEN} a token"
        notes.insert(0, f"{recipe.options.model}: {problem}; {estimate}. `check` counts them once the model is there")
    path, question = shlex.quote(str(recipe.path)), _question(rows)
    use = f"generate runs/{recipe.name} {shlex.quote(question or 'Once upon a time')}"
    if rows.objective == "classify":
        use = f"score runs/{recipe.name} --data {shlex.quote(rows.items[0][0])}"
    commands = [f"  python -m finetune {command}" for command in (f"check {path}", f"launch {path}", use)]
    for line in (*(f"note: {note}" for note in notes), f"\nwritten: {recipe.path}. Next:\n", *commands):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _question(rows: RowsFound) -> str | None:
    """Returns the first short question of the rows, else the shortest; None if they have none."""
    questions = [" ".join(text.split()) for sample in rows.samples[:100] if (text := _prompt(sample))]
    short = (text for text in questions if 10 <= len(text) <= 100)
    return next(short, min(questions, key=len)[:200]) if questions else None


def _prompt(sample: Sample) -> str | None:
    if isinstance(sample, Preference):
        return _prompt(sample.chosen)
    if isinstance(sample, Labelled):
        return _prompt(sample.sample)
    if isinstance(sample, Ranked):
        return _prompt(sample.answers[0])
    if isinstance(sample, PromptCompletion):
        return sample.prompt
    if isinstance(sample, Conversation):
        return next((message.content for message in sample.messages if message.role == "user"), None)
    return None
