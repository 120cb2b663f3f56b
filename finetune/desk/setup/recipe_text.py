"""The text of a new recipe: settings with their reasons as comments, and `# TODO` for what the rows do not tell."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from finetune.data.chat.template_choice import built_in_templates
from finetune.data.samples import FILE, Conversation, Labelled, MediaKind, Preference, PromptCompletion, Ranked, Sample
from finetune.desk.setup.new_objective import SampledRun, sampled_lines
from finetune.desk.setup.new_options import NewOptions
from finetune.desk.setup.own_objective import OwnObjective
from finetune.desk.setup.row_fit import GOAL_STEPS, LONGEST, SLACK, ExampleLengths, Fit
from finetune.desk.setup.rows import RowsFound, conversation_of
from finetune.desk.setup.template_fit import TemplateChoice
from finetune.engine.product_speed import NativePrecision
from finetune.recipe import Recipe
from finetune.recipe.objective_settings import OBJECTIVE_SECTIONS, AgainstReference
from finetune.recipe.yaml_tree import flow
from finetune.shipped import SHIPPED

_OF_FILES: dict[MediaKind, list[str]] = {
    "image": ["  image: {}  # the rows have images; `max_pixels` limits the tokens of one"],
    "audio": ["  audio: {}  # the rows have sound; `max_seconds` limits a clip"],
    "video": ["  video: {}  # the rows have videos; `fps`, `max_frames` and `max_pixels` limit the tokens of one"],
}
LARGEST_BAD_SHARE = 0.1  # more bad rows are more likely a mistake than a few that can be spared


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
    template: TemplateChoice  # for chats, if the tokenizer has none that renders them
    parameters: int | None  # number of the model's parameters; None: unknown
    precision: NativePrecision  # of this machine
    sampled: SampledRun | None = None  # of an objective on samples of the model
    own: OwnObjective | None = None  # a loss of the user's


def recipe_text(recipe: NewRecipe) -> str:
    """Returns the recipe with its reasons as comments."""
    options, rows, lengths, fit = recipe.options, recipe.rows, recipe.lengths, recipe.fit
    extends, schema = base_paths(recipe.base, recipe.path)
    about = "about " if lengths.is_estimate or not rows.is_all else ""
    template = recipe.template
    model = {"name": options.model} | ({"chat_template": template.name} if template.name else {})
    if recipe.template.name:
        comment = f"  # {recipe.template.reason}"
    elif recipe.lengths.is_estimate and any(conversation_of(sample) for sample in recipe.rows.samples[:100]):
        names = ", ".join(built_in_templates())
        comment = f"  # TODO: a base model without a chat template needs `chat_template`: {names}"
    else:
        comment = ""
    lines = [
        f"# yaml-language-server: $schema={schema}",
        "#",
        f"# {options.model} on {options.data} ({options.mode}).",
        f"# Written by `python -m finetune new` for {'' if rows.is_all else 'about '}{rows.count:,} rows of "
        f"{about}{lengths.total:,} tokens.",
        "#",
        f"# Launch:  python -m finetune launch {shlex.quote(str(recipe.path))}",
        f"# Format:  {' '.join(rows.reason.split())}",
        f"extends: {flow(extends)}",
        f"run: {flow({'name': recipe.name})}",
        f"model: {flow(model)}" + comment,
        *_data_lines(options, rows, lengths, fit, about),
        *(_step_lines(recipe) if recipe.sampled is None else _sampled_step_lines(recipe, recipe.sampled)),
    ]
    return "\n".join(lines) + "\n"


def _step_lines(recipe: NewRecipe) -> list[str]:
    """Returns the sections from the objective on, for a run on the rows themselves."""
    options, rows, lengths, fit = recipe.options, recipe.rows, recipe.lengths, recipe.fit
    few = "; these are few, and more rows would help most" if fit.steps < GOAL_STEPS // 2 else ""
    processes = {1: "1 process", 2: "1 or 2 processes", 4: "1, 2 or 4 processes"}
    lines = [
        *_objective_lines(rows, options.mode, recipe.own),
        f"batch: {{rows: {fit.rows}, rows_per_device: 1}}  # of about {fit.sequences:,} sequences; for "
        + processes.get(fit.rows, "1, 2, 4 or 8 processes"),
        _optimizer_line(recipe),
        f"schedule: {{warmup_ratio: 0.1}}  # about {round(0.1 * fit.steps)} steps",
        *_train_lines(recipe, f"epochs: {fit.epochs}  # about {fit.steps:,} steps{few}"),
    ]
    if fit.held_out:
        asks = question(rows) is not None and OBJECTIVE_SECTIONS[rows.objective].score_model is None
        evaluate: dict[str, Any] = {"every_steps": fit.interval, "generate": 4 if asks else 0}
        if asks:
            longest_answer = int(np.percentile(lengths.answers, 99))
            evaluate["max_new_tokens"] = min(512, max(32, 1 << (longest_answer - 1).bit_length()))
        lines.append(f"evaluate: {flow(evaluate)}")
    return [*lines, f"checkpoint: {{every_steps: {fit.interval}}}"]


def _sampled_step_lines(recipe: NewRecipe, run: SampledRun) -> list[str]:
    """Returns the sections from the mode on, for a run on samples of the model."""
    lines = [
        *sampled_lines(recipe.rows.objective, recipe.options.mode, run),
        _optimizer_line(recipe),
        f"schedule: {{warmup_steps: {run.steps // 10}}}",
        *_train_lines(recipe, f"max_steps: {run.steps}  # of {run.prompts} prompts"),
    ]
    if not run.held_out:
        return [*lines, "evaluate: {prompts: null}", f"checkpoint: {{every_steps: {run.interval}, best: null}}"]
    evaluate = {"every_steps": run.interval, "generate": 4, "max_new_tokens": run.max_new_tokens, "prompts": 64}
    return [*lines, f"evaluate: {flow(evaluate)}", f"checkpoint: {{every_steps: {run.interval}}}"]


def _optimizer_line(recipe: NewRecipe) -> str:
    lr, reason = _learning_rate(recipe.options.mode, recipe.rows.objective, recipe.parameters)
    rate = f"{lr:.1e}".replace("e-0", "e-")  # `1e-4` is text in YAML 1.1
    return f"optimizer: {{lr: {rate}}}" + (f"  # {reason}" if reason else "")


def _train_lines(recipe: NewRecipe, length: str) -> list[str]:
    """length: the line that ends the run."""
    lines = ["train:", f"  {length}", f"  precision: {recipe.precision.name}  # {recipe.precision.reason}"]
    if recipe.parameters is not None and recipe.parameters < 10**9:
        lines.append("  activation_checkpointing: false")
    return lines


def base_paths(base: Path, path: Path) -> tuple[str, str]:
    """Returns `extends` and `$schema`: relative if the recipe is in the base's project, or beside it, so that both can
    move. Elsewhere `extends` names what ships by its place there; an editor needs the schema's whole path."""
    project = base.parents[2]
    near = {folder for folder in (project, project.parent) if folder != Path(folder.anchor)}
    if near & set(path.resolve().parents):
        base = Path(os.path.relpath(base, path.parent.resolve()))
        return base.as_posix(), (base.parents[1] / "recipe.schema.json").as_posix()
    extends = base.relative_to(project) if project == SHIPPED else base
    return extends.as_posix(), (base.parents[1] / "recipe.schema.json").as_posix()


def _learning_rate(mode: str, objective: str, parameters: int | None) -> tuple[float, str]:
    """Returns the rate and its source."""
    adapters = mode != "full"
    if OBJECTIVE_SECTIONS[objective].takes_rewards:
        return (1e-5, "of recipes/llama3.2-1b/grpo-lora.yaml") if adapters else (1e-6, "of its grpo-full.yaml")
    if issubclass(OBJECTIVE_SECTIONS[objective], AgainstReference):
        return (5e-6, "of recipes/mistral-7b-v0.3/dpo-lora.yaml") if adapters else (5e-7, "of its dpo-full.yaml")
    if parameters is not None and parameters < 10**9:
        small = "a model below 1 B takes more than the 2e-5 of Llama 2"
        return (1e-3, "ten times that of full training") if adapters else (1e-4, small)
    if parameters is not None and parameters > 30 * 10**9:
        return (1e-4, "of QLoRA's 33 B and 65 B, https://arxiv.org/abs/2305.14314, table 9") if adapters else (1e-5, "")
    if adapters:
        return 2e-4, "ten times that of full training; also QLoRA's, https://arxiv.org/abs/2305.14314"
    return 2e-5, "Llama 2, section 3.1, https://arxiv.org/abs/2307.09288"


def not_held_out(lengths: ExampleLengths) -> str:
    """Returns why a recipe holds no rows out."""
    return "too few rows to hold some out" if lengths.answers.any() else "no row has an answer to evaluate"


def _data_lines(options: NewOptions, rows: RowsFound, lengths: ExampleLengths, fit: Fit, about: str) -> list[str]:
    source: dict[str, Any] = {"path": options.data, "format": rows.format}
    source |= {"columns": rows.columns} if rows.columns else {}
    held_out = f"  eval: []  # {not_held_out(lengths)}"
    if fit.held_out:
        count = f"{'' if rows.is_all else 'about '}{round(fit.held_out * rows.count):,} of {rows.count:,} rows"
        held_out = f"  eval: {{share: {fit.held_out:g}}}  # {count}: evaluated, never trained on"
    most = f"at most {lengths.longest:,}" + (f" by estimate: {SLACK} x that fit" if lengths.is_estimate else "")
    median = int(np.median(lengths.examples))
    # Bad rows are skipped, up to a share with room for those that were not read.
    bad: list[str] = []
    if lengths.bad:
        bad_share = len(lengths.bad) / len(rows.items)
        allowed = math.ceil(bad_share * (1 if rows.is_all else 1.5) * 1000) / 1000
        first = " ".join(lengths.bad[0].split())
        bad.append(f"  on_bad_row: skip  # {len(lengths.bad):,} of {len(rows.items):,} rows, such as {first[:160]}")
        if bad_share > LARGEST_BAD_SHARE:
            bad.append(f"  max_bad_share: {allowed:g}  # TODO: these are many; is this the right format?")
        elif allowed > 0.01:
            bad.append(f"  max_bad_share: {allowed:g}")
    lines = [
        "data:",
        "  train:",
        f"    - {flow(source)}",
        held_out,
        f"  max_length: {fit.max_length}  # tokens; examples have {about}{median:,} (median), {most}"
        + ("; TODO: `check` counts them" if lengths.is_estimate else ""),
        *(line for kind in rows.media_kinds for line in _OF_FILES[kind]),
        *bad,
    ]
    share = f"{fit.overlong / len(lengths.examples):.1%} of the examples are longer"
    if fit.overlong and rows.can_split:
        lines.append(f"  overlong: split  # {share}: their pieces are kept")
    elif fit.overlong:
        reason = f"{share}, and are left out; max_length is as long as the model allows, or {LONGEST:,}"
        lines.append(f"  overlong: drop  # {reason}")
    return lines


def _objective_lines(rows: RowsFound, mode: str, own: OwnObjective | None) -> list[str]:
    objective: dict[str, Any] = {"name": rows.objective}
    if own is not None:
        return [f"objective: {flow({'file': own.file, 'function': own.function})}  # `check` tries the function"]
    if rows.objective == "sft":
        return []
    if rows.objective == "classify":
        return [f"objective: {flow({**objective, 'labels': rows.labels})}  # those that occur"]
    if not issubclass(OBJECTIVE_SECTIONS[rows.objective], AgainstReference):
        return [f"objective: {flow(objective)}"]
    if mode == "full":
        return [f"objective: {flow({**objective, 'beta': 0.1})}"]
    adapters = {**objective, "beta": 0.1, "reference": "adapters_off"}
    return [f"objective: {flow(adapters)}  # the reference is the model without its adapters"]


# --- overrides


def with_overrides(text: str, recipe: Recipe, overrides: Sequence[str]) -> str:
    """Returns a recipe's text with the values of overrides in place of its own.

    recipe: the text, loaded with them; keys that gave way to an override are left out.
    """
    given, values = yaml.safe_load(text), recipe.model_dump(mode="json", exclude_unset=True)
    wanted = {section: value for section, value in given.items() if section != "extends"}
    for section, value in wanted.items():
        if isinstance(value, dict):
            wanted[section] = {key: one for key, one in value.items() if key in values[section]}
    for override in overrides:
        section, *keys = override.partition("=")[0].strip().split(".")
        if keys:
            value = values[section].get(keys[0])  # none: null, which stands for the default
            wanted.setdefault(section, {})[keys[0]] = value
        else:
            wanted[section] = values[section]
    lines = text.splitlines()
    for section, value in wanted.items():
        if given.get(section) != value:
            lines = _replaced(lines, section, given.get(section), value)
    return "\n".join(lines) + "\n"


def _replaced(lines: list[str], section: str, before: Any, value: Any) -> list[str]:
    """Returns the lines with another value of a section; of one with a line for each key, those of changed keys."""
    comment = "  # from the command line"
    begin = next((i for i, line in enumerate(lines) if line.startswith(f"{section}:")), len(lines))
    if begin == len(lines) or lines[begin] != f"{section}:":
        return [*lines[:begin], f"{section}: {flow(value)}{comment}", *lines[begin + 1 :]]
    end = next((i for i in range(begin + 1, len(lines)) if not lines[i].startswith(" ")), len(lines))
    kept: list[str] = []
    same = {key for key in before if key in value and before[key] == value[key]}
    key = ""
    for line in lines[begin + 1 : end]:
        if not line.startswith("   "):
            key = line.strip().partition(":")[0]
        kept += [line] if key in same else []
    changed = [f"  {key}: {flow(value[key])}{comment}" for key in value if key not in same]
    return [*lines[: begin + 1], *kept, *changed, *lines[end:]]


# --- the rows' questions


def question(rows: RowsFound) -> str | None:
    """Returns the first short question of the rows, else the shortest; None if they have none."""
    prompts = (text.replace(FILE, "") for sample in rows.samples[:100] if (text := _prompt(sample)))
    questions = [" ".join(text.split()) for text in prompts if text.strip()]
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
