"""`finetune new`: looks at the rows, and writes a recipe whose lengths, batch, steps and evaluation fit them.

Letters: `N` examples that were looked at.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from finetune.data.building import num_characters, read_items
from finetune.data.chat.renderer import build_renderer
from finetune.data.chat.template_choice import resolve_template
from finetune.data.formats.converters import FIELDS
from finetune.data.formats.detect import Detected, detect_format, parse_row, question_and_answer
from finetune.data.objective_rows import objective_rows, trained_part
from finetune.data.packing import pack
from finetune.data.samples import BadRow, Conversation, Labelled, Preference, PromptCompletion, Ranked, Sample
from finetune.data.sources.source import SourceReader
from finetune.data.tokenizing import Item, RowSettings, tokenize_chunk
from finetune.errors import UserError
from finetune.models.config import NO_FOLDER, is_missing_folder, load_tokenizer, model_config
from finetune.recipe import load_recipe
from finetune.recipe.schema import MODES, RUN_NAME, Model, ObjectiveSettings, Source
from finetune.utils import write_atomically

LOOK_ROWS = 5_000  # that are read; of a larger source the rest is taken to be alike
CHARACTERS_PER_TOKEN = 4  # about, of English under vocabularies of today, where there is no tokenizer to ask
SLACK = 2  # times the longest estimate: other languages and vocabularies take twice the tokens, or more
TEMPLATE_TOKENS = 16  # about, of a chat template around an answer
LONGEST = 4096  # tokens of a packed sequence, as in recipes/base; or the model's context, if that is shorter
GOAL_STEPS = 100  # twice what `check` warns below
OBJECTIVES = {"preference": "dpo", "ranked": "dpo", "unpaired": "kto", "classification": "classify"}


@dataclass(frozen=True)
class Wanted:
    """What a person answers or gives as options."""

    model: str  # hub id or local folder
    data: str  # a path as in a recipe
    mode: str
    name: str | None  # of the run; None: of data and mode
    output: Path | None  # None: <name>.yaml in the current folder


@dataclass(frozen=True)
class RowsFound:
    """What was found in the data."""

    format: str
    columns: dict[str, str] | None
    reason: str  # how the format was told
    count: int  # rows, with bad ones
    bad: tuple[str, ...]
    is_all: bool  # every row was read; else `count` is an estimate
    samples: tuple[Sample, ...]
    items: tuple[Item, ...]

    @property
    def objective(self) -> str:
        return OBJECTIVES.get(self.format, "sft")

    @property
    def labels(self) -> list[str]:
        """Returns the classes that occur, in order; of indices all up to the highest."""
        found = {one.label for one in self.samples if isinstance(one, Labelled)}
        if all(isinstance(label, int) for label in found):
            return [str(i) for i in range(max(map(int, found), default=0) + 1)]
        return sorted(map(str, found))

    def check_labels(self) -> None:
        """Raises UserError where a classifier would have nothing to tell apart."""
        if self.objective == "classify" and len(self.labels) < 2:
            raise UserError(
                f"{self.items[0][0]}: `label` is {self.labels[0]} in every row, and a classifier needs two labels at "
                "least; to train on the texts themselves, rename or remove that column"
            )


@dataclass(frozen=True)
class ExampleLengths:
    """Tokens of the examples that were looked at."""

    examples: NDArray[np.int64]  # (N,)
    answers: NDArray[np.int64]  # (N,) supervised ones; of an estimate all
    is_estimate: bool
    scale: float  # examples of the source for each of these

    @property
    def longest(self) -> int:
        return int(self.examples.max())


@dataclass(frozen=True)
class Fit:
    """The settings that fit the rows."""

    max_length: int
    sequences: int  # packed ones of an epoch
    rows: int  # of them in a step
    epochs: int
    held_out: float  # share of the rows
    overlong: int  # examples above max_length, of those that were looked at

    @property
    def steps(self) -> int:
        return math.ceil(self.epochs * self.sequences / self.rows)

    @property
    def interval(self) -> int:
        """Steps between evaluations, and checkpoints: about five in a run."""
        return max(5, math.ceil(self.steps / 25) * 5)


@dataclass(frozen=True)
class NewRecipe:
    """What a recipe is written from."""

    wanted: Wanted
    name: str
    path: Path
    base: Path
    rows: RowsFound
    lengths: ExampleLengths
    fit: Fit
    template: str | None  # of chats, where the tokenizer brings none
    parameters: int | None  # of the model; None: not known

    @property
    def extends(self) -> str:
        """Returns the base as seen from the recipe; an absolute path where it is in another repository, or in none."""
        is_near = self.base.parents[2] in self.path.resolve().parents
        return Path(os.path.relpath(self.base, self.path.parent) if is_near else self.base).as_posix()


def write_new(wanted: Wanted, console: Console) -> Path:
    """Writes the recipe, shows what it rests on and which commands come next; returns its path. Raises UserError."""
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
    lengths = _token_lengths(rows, tokenizer, template) if tokenizer is not None else _estimated_lengths(rows)
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

    Raises UserError where there is none.
    """
    around = [*folder.resolve().parents, folder.resolve(), *Path.cwd().parents, Path.cwd()]
    for parent in (*reversed(around), Path(__file__).resolve().parents[2]):
        if (parent / "recipes" / "base" / "lora.yaml").is_file():
            return parent / "recipes" / "base"
    raise UserError("recipes/base is not here, which the recipe would extend: run this in a clone of the repository")


# --- rows


def read_source(path: str) -> RowsFound:
    """Returns the first rows of a source, with their format. Raises UserError where there is none that fits."""
    reader = SourceReader(Source(path=path))
    with closing(read_items(reader)) as items:
        read = tuple(islice(items, LOOK_ROWS))
        is_all = next(items, None) is None
    readable = [(label, number, row) for label, number, row in read if not isinstance(row, str)]
    if not readable:
        raise UserError(f"{path}: no row can be read" + (f": {read[0][0]}:{read[0][1]}: {read[0][2]}" if read else ""))
    detected = _detect(path, readable)
    samples, bad = [], []
    for label, number, row in read:
        try:
            if isinstance(row, str):
                raise BadRow(row)
            samples.append(parse_row(row, detected.format, detected.columns))
        except BadRow as error:
            bad.append(f"{label}:{number}: {error}")
    count = len(read) if is_all else max(len(read), reader.estimated_rows() or 0)
    columns = dict(detected.columns) if detected.columns else None
    return RowsFound(detected.format, columns, detected.reason, count, tuple(bad), is_all, tuple(samples), read)


def _detect(path: str, readable: Sequence[tuple[str, int, Any]]) -> Detected:
    rows = [row for _, _, row in readable]
    try:
        return detect_format(rows)
    except UserError as error:
        pair = question_and_answer(rows[0])
        if pair is None:
            raise UserError(f"{readable[0][0]}:{readable[0][1]}: {error}") from None
        asked, answer = pair
        reason = f"no format has these columns: `{asked}` is taken for the question, `{answer}` for the answer"
        return Detected("prompt_completion", {"prompt": asked, "completion": answer}, reason)


# --- the model


def _tokenizer(model: Model) -> tuple[PreTrainedTokenizerBase | None, str]:
    """Returns the tokenizer, or None and why. Raises UserError for a model that does not exist, or is of no use."""
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


def chat_template(rows: RowsFound, tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    """Returns the built-in template that a tokenizer without its own needs for these rows; None where it needs none."""
    if tokenizer is None or tokenizer.chat_template or not any(_is_chat(sample) for sample in rows.samples[:100]):
        plain = rows.columns is None or rows.format != "prompt_completion"
        if plain or tokenizer is None or tokenizer.chat_template:
            return None
    return "chatml" if {"<|im_start|>", "<|im_end|>"} <= tokenizer.get_vocab().keys() else "plain"


def _is_chat(sample: Sample) -> bool:
    parts = {Preference: "chosen", Labelled: "sample"}
    if isinstance(sample, Ranked):
        return _is_chat(sample.answers[0])
    inner = parts.get(type(sample))
    return _is_chat(getattr(sample, inner)) if inner else isinstance(sample, Conversation)


def _model_facts(model: Model) -> tuple[int | None, int | None]:
    """Returns the tokens of the model's context, and its number of parameters."""
    from finetune.models.weights import without_weights

    config = model_config(model)
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    return context, sum(parameter.numel() for parameter in without_weights(config).parameters())


def _token_lengths(rows: RowsFound, tokenizer: PreTrainedTokenizerBase, template: str | None) -> ExampleLengths:
    """Tokenises the rows that were read as a run would. Raises UserError."""
    labels = tuple(rows.labels) if rows.objective == "classify" else None
    objective = ObjectiveSettings(name=rows.objective, labels=labels)  # pyright: ignore[reportArgumentType]
    is_text = objective.name == "classify"
    renderer = build_renderer(tokenizer, resolve_template(template, tokenizer), trained_part(objective), is_text)
    settings = RowSettings(
        renderer, rows.format, rows.columns, 10**9, "drop", skips_bad=True, objective=objective_rows(objective)
    )
    result = tokenize_chunk(settings, rows.items)
    if result.failed:
        raise UserError(result.failed)
    if not len(result.arrays.sizes):
        raise UserError(f"no row can be trained on: {result.bad_rows[0] if result.bad_rows else 'no supervised token'}")
    begins = np.concatenate([[0], np.cumsum(result.arrays.sizes)[:-1]])
    examples = np.add.reduceat(result.arrays.lengths, begins)
    answers = np.maximum.reduceat(result.arrays.targets, begins)
    several = 2 if objective.name == "kto" else 1  # an answer of another row is next to each
    return ExampleLengths(several * examples, answers, False, rows.count / len(rows.items))


def _estimated_lengths(rows: RowsFound) -> ExampleLengths:
    """Counts characters of the fields that the format reads."""
    fields = [(rows.columns or {}).get(field, field) for field in FIELDS[rows.format].all]
    readable = [row for _, _, row in rows.items if not isinstance(row, str)]
    texts = [sum(num_characters(row[name]) for name in fields if row.get(name) is not None) for row in readable]
    tokens = np.array([text // CHARACTERS_PER_TOKEN + TEMPLATE_TOKENS for text in texts], np.int64)
    return ExampleLengths(tokens, tokens, True, rows.count / len(rows.items))


# --- the settings


def fit_rows(lengths: ExampleLengths, rows: RowsFound, longest: int) -> Fit:
    """Returns settings that make `GOAL_STEPS`, or come near: first shorter sequences, then fewer of them in a step,
    then more epochs. longest: most tokens of a sequence."""
    count = len(lengths.examples) * lengths.scale
    # Enough rows that their mean tells two checkpoints apart, and few enough to be quick; none of a handful.
    held_out = 0.0 if count < 20 else 0.1 if count < 1000 else 0.05 if count < 10_000 else 0.01
    room = lengths.longest * (SLACK if lengths.is_estimate else 1)
    needed = min(longest, 1 << max(5, (room - 1).bit_length()))  # a power of two that the longest fits in
    kept = lengths.examples[lengths.examples <= longest]
    if not len(kept):
        kept = np.full(1, longest)

    def fit(max_length: int, in_step: int, epochs: int) -> Fit:
        sequences = len(pack(kept, max_length)) * lengths.scale * (1 - held_out)
        overlong = int((lengths.examples > max_length).sum())
        return Fit(max_length, max(1, round(sequences)), in_step, epochs, held_out, overlong)

    for max_length, in_step, epochs in _choices(needed, min(longest, max(2048, needed))):
        best = fit(max_length, in_step, epochs)
        if best.steps >= GOAL_STEPS:
            break
    return best


def _choices(shortest: int, longest: int) -> Iterator[tuple[int, int, int]]:
    """Yields (max_length, sequences in a step, epochs), from what suits much data to what suits little."""
    length = longest
    yield length, 8, 2
    while length > shortest:
        length = max(length // 2, shortest)
        yield length, 8, 2
    yield from ((length, in_step, epochs) for in_step, epochs in ((4, 2), (4, 3), (4, 4), (4, 5), (2, 5), (1, 5)))


def _learning_rate(mode: str, objective: str, parameters: int | None) -> tuple[float, str]:
    """Returns the rate and where it is from."""
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
        f"# Written by `python -m finetune new` for {counted}{rows.count:,} rows of {about}{_total(lengths):,} tokens.",
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
    """Returns the numbers of processes that a step divides by."""
    return {1: "for 1 process", 2: "for 1 or 2 processes", 4: "for 1, 2 or 4 processes"}.get(
        fit.rows, "for 1, 2, 4 or 8 processes"
    )


def _flow(value: Any) -> str:
    """Returns a value as YAML in one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6)
    return text.removesuffix("...\n").strip()


def _scientific(value: float) -> str:
    """YAML 1.1 takes `1e-4` for text.

    >>> _scientific(2e-4)
    '2.0e-4'
    """
    return re.sub(r"e-0(\d)", r"e-\1", f"{value:.1e}")


def _total(lengths: ExampleLengths) -> int:
    return round(lengths.examples.sum() * lengths.scale)


# --- the terminal


def _show(console: Console, rows: RowsFound, lengths: ExampleLengths, fit: Fit) -> None:
    about = "about " if lengths.is_estimate else ""
    more = "" if rows.is_all else f", of which {len(rows.items):,} were looked at"
    lines = {
        "rows": f"{rows.count:,}{more}",
        "format": f"{rows.format}: {rows.reason}",
        "tokens": f"{about}{_total(lengths):,}: an example has {about}{int(np.median(lengths.examples)):,} (median), "
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
    """Returns the first short question of the rows, else the shortest; None where they ask nothing."""
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
