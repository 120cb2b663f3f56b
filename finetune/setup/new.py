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
from finetune.models.base_config import NO_FOLDER, is_missing_folder
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
from finetune.utils import write_atomically


@dataclass(frozen=True)
class Wanted:
    """Options or answers of the user."""

    model: str  # hub id or local folder
    data: str  # path as in a recipe
    mode: str
    name: str | None  # run name; None: from data and mode
    output: Path | None  # None: <name>.yaml in the current folder


@dataclass(frozen=True)
class NewRecipe:
    """Contents of the new recipe."""

    wanted: Wanted
    name: str
    path: Path
    base: Path
    rows: RowsFound
    lengths: ExampleLengths
    fit: Fit
    template: str | None  # for chats, if the tokenizer has none
    parameters: int | None  # number of the model's parameters; None: unknown

    @property
    def extends(self) -> str:
        """Returns the base's path from the recipe; absolute if it is in another repository, or in none."""
        is_near = self.base.parents[2] in self.path.resolve().parents
        return Path(os.path.relpath(self.base, self.path.parent) if is_near else self.base).as_posix()


def write_new(wanted: Wanted, console: Console) -> Path:
    """Writes the recipe, shows its reasons and the next commands; returns its path. Raises UserError."""
    if wanted.mode not in MODES:
        raise UserError(f"--mode {wanted.mode}: expected {', '.join(MODES)}")
    name = wanted.name or _run_name(wanted)
    if not re.fullmatch(RUN_NAME.strip("^$"), name):
        raise UserError(f"--name {name}: expected letters, digits, `.`, `_` and `-`, and a letter or digit first")
    path = wanted.output or Path(f"{name}.yaml")
    if path.exists():
        raise UserError(f"{path} exists already and is left as it is: give another --output or --name, or remove it")
    base = _base_folder(path.parent) / f"{wanted.mode}.yaml"
    rows = read_source(wanted.data)
    rows.check_labels()
    model = Model(name=wanted.model)
    tokenizer, problem = _tokenizer(model)
    template = chat_template(rows, tokenizer)
    lengths = token_lengths(rows, tokenizer, template) if tokenizer is not None else estimated_lengths(rows)
    context, parameters = _model_facts(model) if tokenizer is not None else (None, None)
    fit = fit_rows(lengths, rows, min(context or LONGEST, LONGEST))
    recipe = NewRecipe(wanted, name, path, base, rows, lengths, fit, template, parameters)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, recipe_text(recipe))
    try:
        load_recipe(path)
    except UserError:
        path.unlink()
        raise
    _show(console, rows, lengths, fit)
    notes = (
        [
            f"{wanted.model}: {problem}; lengths are estimated from characters, {CHARACTERS_PER_TOKEN} a token. "
            "`check` counts them once the model is there"
        ]
        if problem
        else []
    )
    notes += [f"{len(rows.bad):,} rows cannot be read, such as {rows.bad[0]}"] if rows.bad else []
    for note in notes:
        console.print(f"note: {note}", soft_wrap=True, highlight=False, markup=False)
    console.print(f"\nwritten: {path}. Next:\n", soft_wrap=True, highlight=False, markup=False)
    for command in next_commands(path, name, rows):
        console.print(f"  {command}", soft_wrap=True, highlight=False, markup=False)
    return path


def _run_name(wanted: Wanted) -> str:
    """
    >>> _run_name(Wanted("m", "data/our faq.csv.gz", "lora", None, None))
    'our-faq-lora'
    """
    stem = Path(wanted.data.rstrip("/")).name.split(".")[0]
    return f"{re.sub('[^A-Za-z0-9]+', '-', stem).strip('-') or 'run'}-{wanted.mode}"


def _base_folder(folder: Path) -> Path:
    """Returns recipes/base of the repository around the recipe, around the current folder, or of this installation.

    Raises UserError if there is none.
    """
    around = [*folder.resolve().parents, folder.resolve(), *Path.cwd().parents, Path.cwd()]
    for parent in (*reversed(around), Path(__file__).resolve().parents[2]):
        if (parent / "recipes" / "base" / "lora.yaml").is_file():
            return parent / "recipes" / "base"
    raise UserError("recipes/base is not here, which the recipe would extend: run this in a clone of the repository")


# --- the model


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


def _model_facts(model: Model) -> tuple[int | None, int | None]:
    """Returns the model's context length in tokens, and its number of parameters."""
    from finetune.models.base_config import without_weights

    config = model_config(model)
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    return context, sum(parameter.numel() for parameter in without_weights(config).parameters())


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


# --- the recipe


def recipe_text(recipe: NewRecipe) -> str:
    """Returns the recipe with its reasons as comments."""
    wanted, rows, lengths, fit = recipe.wanted, recipe.rows, recipe.lengths, recipe.fit
    lr, reason = _learning_rate(wanted.mode, rows.objective, recipe.parameters)
    about = "about " if lengths.is_estimate or not rows.is_all else ""
    source: dict[str, Any] = {"path": wanted.data, "format": rows.format}
    source |= {"columns": rows.columns} if rows.columns else {}
    model = {"name": wanted.model} | ({"chat_template": recipe.template} if recipe.template else {})
    schema = Path(recipe.extends).parents[1] / "recipe.schema.json"
    median, few = int(np.median(lengths.examples)), fit.steps < GOAL_STEPS // 2
    most = f"at most {lengths.longest:,}" + (f" by estimate: {SLACK} x that fit" if lengths.is_estimate else "")
    counted = "" if rows.is_all else "about "
    lines = [
        f"# yaml-language-server: $schema={schema.as_posix()}",
        "#",
        f"# {wanted.model} on {wanted.data} ({wanted.mode}).",
        f"# Written by `python -m finetune new` for {counted}{rows.count:,} rows of {about}{lengths.total:,} tokens.",
        "#",
        f"# Launch:  python -m finetune launch {shlex.quote(str(recipe.path))}",
        f"# Format:  {rows.reason}",
        f"extends: {_flow(recipe.extends)}",
        f"run: {_flow({'name': recipe.name})}",
        f"model: {_flow(model)}" + ("  # the tokenizer brings no chat template" if recipe.template else ""),
        "data:",
        "  train:",
        f"    - {_flow(source)}",
        _eval_line(fit, rows),
        f"  max_length: {fit.max_length}  # tokens; examples have {about}{median:,} (median), {most}",
        *_overlong_lines(rows, fit, lengths),
        *_objective_lines(rows, wanted.mode),
        f"batch: {{rows: {fit.rows}, rows_per_device: 1}}  # of about {fit.sequences:,} sequences; {_divides(fit)}",
        f"optimizer: {{lr: {_scientific(lr)}}}" + (f"  # {reason}" if reason else ""),
        f"schedule: {{warmup_ratio: 0.1}}  # about {round(0.1 * fit.steps)} steps",
        f"train: {_flow(_train(fit, recipe.parameters))}  # about {fit.steps:,} steps"
        + ("; these are few, and more rows would help most" if few else ""),
        *_evaluation_lines(rows, fit, lengths),
    ]
    return "\n".join(lines) + "\n"


def _eval_line(fit: Fit, rows: RowsFound) -> str:
    if not fit.held_out:
        return "  eval: []  # too few rows to hold some out"
    about = "" if rows.is_all else "about "
    held = round(fit.held_out * rows.count)
    return f"  eval: {{share: {fit.held_out:g}}}  # {about}{held:,} of {rows.count:,} rows: evaluated, never trained on"


def _overlong_lines(rows: RowsFound, fit: Fit, lengths: ExampleLengths) -> list[str]:
    if not fit.overlong:
        return []
    share = f"{fit.overlong / len(lengths.examples):.1%} of the examples are longer"
    if rows.format in ("text", "tokens"):
        return [f"  overlong: split  # {share}: their pieces are kept"]
    return [f"  overlong: drop  # {share}, and are left out; max_length is as long as the model allows, or {LONGEST:,}"]


def _objective_lines(rows: RowsFound, mode: str) -> list[str]:
    if rows.objective == "sft":
        return []
    objective: dict[str, Any] = {"name": rows.objective}
    if rows.objective == "classify":
        return [f"objective: {_flow({**objective, 'labels': rows.labels})}  # those that occur"]
    if mode == "full":
        return [f"objective: {_flow({**objective, 'beta': 0.1})}"]
    adapters = {**objective, "beta": 0.1, "reference": "adapters_off"}
    return [f"objective: {_flow(adapters)}  # the reference is the model without its adapters"]


def _train(fit: Fit, parameters: int | None) -> dict[str, Any]:
    small = parameters is not None and parameters < 10**9
    return {"epochs": fit.epochs, **({"activation_checkpointing": False} if small else {})}


def _evaluation_lines(rows: RowsFound, fit: Fit, lengths: ExampleLengths) -> list[str]:
    checkpoint = f"checkpoint: {{every_steps: {fit.interval}}}"
    if not fit.held_out:
        return [checkpoint]
    asks = _question(rows) is not None and rows.objective != "classify"
    evaluate: dict[str, Any] = {"every_steps": fit.interval, "generate": 4 if asks else 0}
    if asks:
        longest_answer = int(np.percentile(lengths.answers, 99))
        evaluate["max_new_tokens"] = min(512, max(32, 1 << (longest_answer - 1).bit_length()))
    return [f"evaluate: {_flow(evaluate)}", checkpoint]


def _divides(fit: Fit) -> str:
    """Returns the numbers of processes that divide a step."""
    return {1: "for 1 process", 2: "for 1 or 2 processes", 4: "for 1, 2 or 4 processes"}.get(
        fit.rows, "for 1, 2, 4 or 8 processes"
    )


def _flow(value: Any) -> str:
    """Returns a value as YAML in one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6)
    return text.removesuffix("...\n").strip()


def _scientific(value: float) -> str:
    """Returns a number for YAML, in which `1e-4` is text (YAML 1.1).

    >>> _scientific(2e-4)
    '2.0e-4'
    """
    return re.sub(r"e-0(\d)", r"e-\1", f"{value:.1e}")


# --- the terminal


def _show(console: Console, rows: RowsFound, lengths: ExampleLengths, fit: Fit) -> None:
    about = "about " if lengths.is_estimate else ""
    more = "" if rows.is_all else f", of which {len(rows.items):,} were looked at"
    lines = {
        "rows": f"{rows.count:,}{more}",
        "format": f"{rows.format}: {rows.reason}",
        "tokens": f"{about}{lengths.total:,}: an example has {about}{int(np.median(lengths.examples)):,} (median), "
        f"at most {lengths.longest:,}",
        "objective": rows.objective,
        "sequences": f"about {fit.sequences:,} of up to {fit.max_length:,} tokens",
        "training": f"{fit.epochs} epochs, about {fit.steps:,} steps x {fit.rows} sequences",
        "held out": f"{fit.held_out:.0%} of the rows" if fit.held_out else "nothing: too few rows",
    }
    table = Table(show_header=False)
    for name, value in lines.items():
        table.add_row(name, escape(value))
    console.print(table)


def next_commands(path: Path, name: str, rows: RowsFound) -> list[str]:
    """Returns commands to copy: check, train, try."""
    recipe, run_dir, question = shlex.quote(str(path)), f"runs/{name}", _question(rows)
    use = f"generate {run_dir} {shlex.quote(question or 'Once upon a time')}"
    if rows.objective == "classify":
        use = f"score {run_dir} --data {shlex.quote(rows.items[0][0])}"
    return [f"python -m finetune {command}" for command in (f"check {recipe}", f"launch {recipe}", use)]


def _question(rows: RowsFound) -> str | None:
    """Returns the first short question of the rows, else the shortest; None if they have none."""
    asked = [" ".join(text.split()) for sample in rows.samples[:100] if (text := _prompt(sample))]
    return next((text for text in asked if 10 <= len(text) <= 100), min(asked, key=len)[:200]) if asked else None


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
