"""`finetune new`: writes a recipe whose lengths, batch, steps and evaluation fit the rows (`row_fit.py`)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from finetune.data.chat.renderer import Renderer
from finetune.data.chat.template_check import joined_texts_note
from finetune.desk.setup.first_row import show_first_row
from finetune.desk.setup.new_objective import (
    BASE_OF_SAMPLES,
    SAMPLES,
    check_objective,
    chosen_rewards,
    fit_samples,
)
from finetune.desk.setup.new_options import NewOptions, parse_columns
from finetune.desk.setup.own_objective import objective_name, own_objective, write_starter
from finetune.desk.setup.recipe_text import NewRecipe, not_held_out, question, recipe_text, with_overrides
from finetune.desk.setup.roles import RoleChoice, as_prompts, choose_columns, columns_shown, refusal
from finetune.desk.setup.row_fit import (
    CHARACTERS_PER_TOKEN,
    LONGEST,
    estimated_lengths,
    fit_rows,
    row_renderer,
    token_lengths,
)
from finetune.desk.setup.rows import RowsFound, parse_sample, read_sample
from finetune.desk.setup.template_fit import fitting_template
from finetune.engine.product_speed import compute_device, native_precision
from finetune.errors import UserError
from finetune.features import load_recipe
from finetune.models.base_config import NO_FOLDER, is_missing_folder, without_weights
from finetune.models.config import model_config
from finetune.models.tokenizer import load_tokenizer
from finetune.recipe import Recipe
from finetune.recipe.objective_settings import OBJECTIVE_SECTIONS
from finetune.recipe.schema import MODES, RUN_NAME, Model, Run
from finetune.shipped import SHIPPED
from finetune.utils import write_atomically

Ask = Callable[[str, str], str]  # (question, default) -> answer


def write_new(options: NewOptions, console: Console, ask: Ask | None = None) -> Path:
    """Writes the recipe, shows its reasons and the next commands; returns its path.

    ask: None without a terminal; a guess is then refused. Raises UserError.
    """
    if options.mode not in MODES:
        raise UserError(f"--mode {options.mode}: no such mode. Fix: use one of {', '.join(MODES)}")
    loss, options = options.objective or "", replace(options, objective=objective_name(options.objective))
    if options.objective is not None and options.objective not in OBJECTIVE_SECTIONS:
        raise UserError(
            f"--objective {options.objective}: no such objective. Fix: use one of {', '.join(OBJECTIVE_SECTIONS)}, or "
            "FILE.py:FUNCTION"
        )
    stem = Path(options.data.rstrip("/")).name.split(".")[0]
    parts = (re.sub("[^A-Za-z0-9]+", "-", stem).strip("-") or "run", options.objective, options.mode)
    name = options.name or "-".join(filter(None, parts))
    if not re.fullmatch(RUN_NAME.strip("^$"), name):
        raise UserError(
            f"--name {name}: not a name of a run. Fix: use letters, digits, `.`, `_` and `-`, and begin with a "
            "letter or digit"
        )
    path = options.output or _folder(options) / f"{name}.yaml"
    if path.exists():
        fix = f"python -m finetune launch {shlex.quote(str(path))} trains or resumes it; or give another --name"
        fix = fix if options.launches else "give another --output or --name, or remove it"
        raise UserError(f"{path} exists already and is left as it is. Fix: {fix}")
    # recipes/base of the repository around the recipe or around the current folder, else of the package.
    inner, cwd = path.parent.resolve(), Path.cwd()
    bases = (parent / "recipes" / "base" for parent in (inner, *inner.parents, cwd, *cwd.parents, SHIPPED))
    folder = next((base for base in bases if (base / "lora.yaml").is_file()), SHIPPED / "recipes" / "base")
    rows = _rows(options, console, ask)
    rewards = chosen_rewards(rows.objective, options.rewards, ask)
    own = own_objective(loss, options.overrides, ask) if options.objective == "own" else None
    base = folder / (BASE_OF_SAMPLES if rewards else f"{options.mode}.yaml")
    rows.check_labels()
    model = Model(name=options.model)
    tokenizer, problem = _tokenizer(model)
    template = fitting_template(rows, tokenizer)
    context = parameters = renderer = None
    if tokenizer is None:
        lengths = estimated_lengths(rows)
    else:
        renderer, config = row_renderer(rows, tokenizer, template.name, model), model_config(model)
        lengths = token_lengths(rows, renderer)
        context = getattr(config.get_text_config(), "max_position_embeddings", None)
        parameters = sum(parameter.numel() for parameter in without_weights(config).parameters())
    given = {key.strip(): value.strip() for key, _, value in (text.partition("=") for text in options.overrides)}
    packs = given.get("data.packing", "true").lower() not in ("false", "off", "no")
    fit = fit_rows(lengths, min(context or LONGEST, LONGEST), packs)
    sampled = None
    if rewards:
        sampled = fit_samples(lengths, rewards, fit.held_out, context)
        fit = replace(fit, max_length=sampled.max_length, overlong=sampled.overlong, held_out=sampled.held_out)
    precision = native_precision(compute_device())
    recipe = NewRecipe(options, name, path, base, rows, lengths, fit, template, parameters, precision, sampled, own)
    if fit.overlong == len(lengths.examples) and fit.overlong and not rows.can_split:
        raise UserError(
            f"{options.data}: every example is longer than {fit.max_length:,} tokens. The shortest has "
            f"{int(lengths.examples.min()):,}. Fix: use a model with a longer context, or shorter rows"
        )
    loaded = _write(recipe)
    if own is not None and own.is_new:
        write_starter(own)
    _show(recipe, loaded, problem, renderer, console)
    return path


def _folder(options: NewOptions) -> Path:
    """Returns where the recipe goes: into this folder, or that of runs if it is launched."""
    given = {key.strip(): value.strip() for key, _, value in (text.partition("=") for text in options.overrides)}
    return Path(given.get("run.dir", str(Run.model_fields["dir"].default))) if options.launches else Path()


def _rows(options: NewOptions, console: Console, ask: Ask | None) -> RowsFound:
    """Reads the rows under the format and columns that are given, certain, or confirmed. Raises UserError."""
    sample = read_sample(options.data)
    if sample.note:
        console.print(f"note: {sample.note}", soft_wrap=True, highlight=False, markup=False)
    try:
        choice = choose_columns(sample.rows, options.format, options.columns)
        if options.objective is not None and OBJECTIVE_SECTIONS[options.objective].takes_rewards:
            choice = as_prompts(choice)
        if choice.doubts and ask is None:
            raise UserError(refusal(sample.rows, choice))
        if choice.doubts and ask is not None:
            lines = [f"{sample.path}: which columns to train on is a guess: {'; '.join(choice.doubts)}"]
            for line in [*lines, *columns_shown(sample.rows)]:
                console.print(line, soft_wrap=True, highlight=False, markup=False)
            guess = ",".join(f"{field}={column}" for field, column in choice.fields.items())
            answer = ask("Columns (field=column,...)", guess)
            if answer.strip() == guess:
                choice = RoleChoice(choice.format, choice.columns, f"{choice.reason}, confirmed")
            else:
                choice = choose_columns(sample.rows, None, parse_columns(answer))
    except UserError as error:
        raise UserError(f"{sample.place}: {error}") from None
    if options.objective is not None:
        check_objective(options.objective, choice.format, options.data)
    return parse_sample(sample, choice, options.objective)


def _write(recipe: NewRecipe) -> Recipe:
    """Writes the recipe and loads it. Raises UserError, and then leaves no file."""
    path, overrides = recipe.path, recipe.options.overrides
    path.parent.mkdir(parents=True, exist_ok=True)
    text = recipe_text(recipe)
    write_atomically(path, text)
    try:
        loaded = load_recipe(path, overrides)
        if overrides:
            write_atomically(path, with_overrides(text, loaded, overrides))
            loaded = load_recipe(path)
    except UserError:
        path.unlink()
        raise
    return loaded


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


# --- the terminal


def _training_shown(recipe: NewRecipe) -> dict[str, str]:
    fit, run = recipe.fit, recipe.sampled
    if run is not None:
        rewards = ", ".join(str(one.get("name") or one.get("function") or next(iter(one))) for one in run.rewards)
        return {
            "rewards": rewards,
            "samples": f"{run.prompts} prompts x {SAMPLES} samples of up to {run.max_new_tokens:,} tokens a step",
            "training": f"{run.steps:,} steps",
        }
    return {
        "sequences": f"about {fit.sequences:,} of up to {fit.max_length:,} tokens",
        "training": f"{fit.epochs} epochs, about {fit.steps:,} steps x {fit.rows} sequences",
    }


def _show(recipe: NewRecipe, loaded: Recipe, problem: str, renderer: Renderer | None, console: Console) -> None:
    """Prints the reasons, one row, notes and the next commands. problem: why the tokenizer is missing."""
    rows, lengths, fit = recipe.rows, recipe.lengths, recipe.fit
    about = "about " if lengths.is_estimate else ""
    table = Table(show_header=False)
    for name, value in {
        "rows": f"{rows.count:,}" + ("" if rows.is_all else f", of which {len(rows.items):,} were read"),
        "format": f"{rows.format}: {rows.reason}",
        "not used": ", ".join(rows.unused) or "no column",
        "tokens": f"{about}{lengths.total:,}: an example has {about}{int(np.median(lengths.examples)):,} (median), "
        f"at most {lengths.longest:,}",
        "objective": rows.objective,
        **_training_shown(recipe),
        "held out": f"{fit.held_out:.0%} of the rows" if fit.held_out else f"nothing: {not_held_out(lengths)}",
    }.items():
        table.add_row(name, escape(value))
    console.print(table)
    show_first_row(rows, renderer, console)
    bad = lengths.bad
    notes = [f"{len(bad):,} rows cannot be used and are skipped, such as {bad[0]}"] if bad else []
    if renderer is not None and renderer.chat is None:
        notes += joined_texts_note(rows.samples[:100])
    if problem:
        estimate = f"lengths are estimated from characters, {CHARACTERS_PER_TOKEN} a token"
        notes.insert(0, f"{recipe.options.model}: {problem}; {estimate}. `check` counts them once the model is there")
    if recipe.own is not None and recipe.own.is_new:
        notes.append(f"{recipe.own.file} is written too, with the loss of sft: edit `{recipe.own.function}`")
    for note in notes:
        console.print(f"note: {note}", soft_wrap=True, highlight=False, markup=False)
    if recipe.options.launches:
        text = recipe.path.read_text(encoding="utf-8").rstrip("\n")
        console.print(f"\nwritten: {recipe.path}\n\n{text}\n", soft_wrap=True, highlight=False, markup=False)
        return
    path, asked = shlex.quote(str(recipe.path)), question(rows)
    run = shlex.quote(f"{loaded.run.dir}/{loaded.run.name}")
    use = f"generate {run} {shlex.quote(asked or 'Once upon a time')}" + (
        f" --{rows.media_kind} FILE" if rows.media_kind else ""
    )
    if OBJECTIVE_SECTIONS[rows.objective].score_model is not None:
        use = f"score {run} --data {shlex.quote(rows.items[0][0])}"
    commands = [f"  python -m finetune {command}" for command in (f"check {path}", f"launch {path}", use)]
    for line in (f"\nwritten: {recipe.path}. Next:\n", *commands):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
