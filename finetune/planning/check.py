"""`check`: validates recipe, launch, tokenizer, template and data without training."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.errors import UserError
from finetune.recipe import Recipe, load_recipe
from finetune.startup import import_transformers
from finetune.utils import readable_bytes

if TYPE_CHECKING:
    from finetune.data.dataset import Dataset, Stream


@dataclass
class CheckReport:
    """Result for one recipe: `error` if it would not run, else facts by name, and notes."""

    recipe: str
    error: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {"recipe": self.recipe, "ok": self.error is None, "error": self.error, **self.facts, "notes": self.notes}

    def text(self) -> str:
        if self.error:
            return self.error
        facts = [
            f"  {name.replace('_', ' ')}: {f'{value:,}' if isinstance(value, int) else value}"
            for name, value in self.facts.items()
        ]
        return "\n".join([f"{self.recipe}: ok", *facts, *(f"  note: {note}" for note in self.notes)])


def check_folder(
    folder: Path, overrides: Sequence[str], config_file: Path | None = None, num_processes: int | None = None
) -> list[CheckReport]:
    """Check every recipe below a folder, without data; files in a folder named `base` are parts of others.

    Raises UserError where there is none.
    """
    paths = sorted(path for path in folder.rglob("*.yaml") if "base" not in path.relative_to(folder).parts[:-1])
    if not paths:
        raise UserError(f"{folder}: no recipes (*.yaml) in this folder")
    return [check_recipe(path, overrides, config_file, num_processes, recipe_only=True) for path in paths]


def check_recipe(
    path: Path,
    overrides: Sequence[str],
    config_file: Path | None = None,
    num_processes: int | None = None,
    recipe_only: bool = False,
) -> CheckReport:
    """Check schema and rules; with an accelerate config the launch; unless `recipe_only` tokenizer, template, data."""
    report, problems = CheckReport(str(path)), Problems()
    with problems:
        recipe = load_recipe(path, overrides)
        if not recipe_only:
            import_transformers(own_process=True)
        processes = 1
        with problems:
            if config_file or num_processes:
                processes = _check_launch(recipe, path, config_file, num_processes, recipe_only, report)
        if not recipe_only:
            with problems:
                _check_device(recipe)
            _check_data(recipe, processes, report, problems)
            if config_file and not problems.messages:
                _report_memory(recipe, path, config_file, num_processes, report)
    report.error = problems.text(path)
    return report


class Problems(contextlib.AbstractContextManager[None]):
    """Collects the UserErrors of the parts of a check, each a `with` block that ends at its first."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        if isinstance(error, UserError) and str(error) not in self.messages:
            self.messages.append(str(error))
        return isinstance(error, UserError)

    def text(self, path: Path) -> str | None:
        """Returns one message; None where there is no problem."""
        if len(self.messages) < 2:
            return self.messages[0] if self.messages else None
        indented = [message.replace("\n", "\n    ") for message in self.messages]
        return "\n  ".join([f"{path}: {len(indented)} problems", *indented])


def _check_launch(
    recipe: Recipe, path: Path, config_file: Path | None, processes: int | None, recipe_only: bool, report: CheckReport
) -> int:
    """Returns the number of data-parallel processes.

    recipe_only: without the rules that depend on the model's config.
    """
    from finetune.engine.compatibility import check_launch
    from finetune.engine.launch import Launch, read_config_file
    from finetune.models.config import training_config

    launch = read_config_file(str(config_file), processes) if config_file else Launch("replicated", processes or 1)
    config = None if recipe_only else training_config(recipe)
    micro_batches = check_launch(recipe, str(path), launch, config)
    automatic = recipe.batch.rows_per_device == "auto"
    at_most = "at most " if automatic or recipe.batch.tokens_per_device is not None else ""
    steps = f"{at_most}{micro_batches} micro-batches per process and step"
    if automatic:
        steps += " (batch.rows_per_device: auto, measured at the first run)"
    sizes = "" if launch.parallelism.is_plain else f" ({launch.parallelism.summary()})"
    report.facts["launch"] = f"{launch.where}, {launch.processes} processes{sizes}, {steps}"
    _note_balance(recipe, launch.parallelism.data, report)
    return launch.parallelism.data


def _check_device(recipe: Recipe) -> None:
    """Checks what a run on this machine's GPU would refuse, where there is one."""
    import torch

    from finetune.engine.compatibility import check_products

    if torch.cuda.is_available():
        check_products(recipe, torch.cuda.get_device_name(), torch.cuda.get_device_capability())


def _report_memory(recipe: Recipe, path: Path, config_file: Path, processes: int | None, report: CheckReport) -> None:
    """Adds the most that the recipe can take on a GPU of this launch, by formula."""
    from finetune.engine.compatibility import check_launch
    from finetune.engine.launch import read_config_file
    from finetune.models.config import training_config
    from finetune.planning.estimate.lengths import widest
    from finetune.planning.estimate.memory import Place, estimate_memory
    from finetune.planning.estimate.micro_batch import NotEstimated
    from finetune.planning.estimate.search import heaviest

    launch, config = read_config_file(str(config_file), processes), training_config(recipe)
    micro_batches = check_launch(recipe, str(path), launch, config)
    place, batch = Place(launch, launch.processes), heaviest(recipe, widest(recipe, "not asked", config))
    try:
        memory = estimate_memory(recipe, config, place, batch, micro_batches)
    except NotEstimated as reason:
        report.notes.append(f"memory is not estimated: {reason}")
        return
    phase = max(memory.phases, key=lambda name: memory.phases[name])
    host = f", {readable_bytes(memory.host)} of host memory" if memory.host else ""
    report.facts["memory"] = (
        f"at most {readable_bytes(memory.tensors)} of tensors on a GPU{host}, in {phase}, by formula; `plan` has more"
    )


def _note_balance(recipe: Recipe, processes: int, report: CheckReport) -> None:
    """Note where more packed sequences are computed at once than are grouped by attention work."""
    from finetune.data.packing import group_rows

    if recipe.batch.rows_per_device == "auto":
        return
    at_once = processes * recipe.batch.rows_per_device
    group = group_rows(recipe.data.balance, recipe.batch.rows)
    if processes > 1 and group % at_once and recipe.batch.tokens_per_device is None:
        report.notes.append(
            f"{at_once} packed sequences are computed at once, and those of similar attention work are grouped by "
            f"{group}: processes wait less for each other with `data.balance: {at_once}`"
        )


def _check_data(recipe: Recipe, processes: int, report: CheckReport, problems: Problems) -> None:
    """Each part although another has a problem; what needs a part that has one is left out."""
    from finetune.data.building import OpenedSources
    from finetune.data.dataset import (
        Stream,
        build_held_out,
        build_training,
        check_questions,
        data_notes,
        template_notes,
    )
    from finetune.data.examples import check_same_images
    from finetune.models.config import (
        check_no_dropout,
        check_same_vocabulary,
        check_sizes,
        check_token_ids,
        load_tokenizer,
        training_config,
    )
    from finetune.planning.plan import length_notes
    from finetune.tracking import check_trackers

    with problems:
        check_trackers(recipe.tracking)
    opened, found = OpenedSources(recipe), len(problems.messages)
    for source in (*recipe.data.train, *recipe.data.eval_sources):
        with problems:
            opened.open(source)
    sources_are_good = len(problems.messages) == found
    with problems:
        tokenizer = load_tokenizer(recipe.model, recipe.tokens)
        check_token_ids(config := training_config(recipe), len(tokenizer), recipe.tokens)
        check_sizes(recipe.model, config)
        check_same_vocabulary("objective.reference_model", recipe.objective.reference_model, tokenizer, recipe.model)
        check_same_images("objective.reference_model", recipe.objective.reference_model, recipe, tokenizer)
        if recipe.batch.rows_per_device == "auto":
            check_no_dropout(config)
        _check_attention(recipe, config, report)
        if not sources_are_good:
            return
        report.notes += template_notes(recipe, tokenizer, opened)
        training = None
        with problems:
            training = build_training(recipe, tokenizer, opened)
            if not isinstance(training, Stream):
                _check_teacher(recipe, training, tokenizer, config, report)
            _report_data(recipe, "train", training, report)
            report.notes += length_notes(recipe, training, processes)
        held_out = build_held_out(recipe, tokenizer, opened)
        if held_out is not None:
            report.notes += check_questions(recipe.evaluate, held_out.examples, tokenizer)
            _report_data(recipe, "eval", held_out, report)
        if training is not None:
            report.notes += data_notes(recipe, opened, training, held_out)


def _check_teacher(recipe: Recipe, training: Dataset, tokenizer: Any, config: Any, report: CheckReport) -> None:
    """Reads a file of a teacher's predictions, which has to have those of every example."""
    from finetune.data.predictions import check_complete
    from finetune.data.teacher_file import file_predictions, is_teacher_file

    teacher = recipe.objective.teacher
    if teacher is not None and is_teacher_file(teacher):
        predictions = file_predictions(recipe.objective, tokenizer, config.get_text_config().vocab_size)
        check_complete(training.examples, predictions, teacher)
        report.facts["teacher"] = f"{predictions.per_target} ids for each supervised token"


def _report_data(recipe: Recipe, name: str, data: Dataset | Stream, report: CheckReport) -> None:
    """Adds sizes, and what became of the rows. name: train or eval."""
    from finetune.data.dataset import Stream
    from finetune.planning.plan import run_length

    if isinstance(data, Stream):
        window = data.rows.window(0)
        report.facts["train_data"] = f"a stream; its first window has {len(window.sizes):,} examples"
        report.facts["steps"] = run_length(recipe, None)[0]
        return
    share = data.supervised_tokens / data.tokens
    report.facts[f"{name}_data"] = f"{len(data.epoch_sizes):,} examples, {data.tokens:,} tokens, {share:.0%} supervised"
    full = data.efficiency(recipe.data.max_length)
    report.facts[f"{name}_rows"] = (
        f"{len(data.rows):,} sequences of up to {recipe.data.max_length:,} tokens, {full:.1%} full"
    )
    if name == "train":
        report.facts["steps"] = run_length(recipe, len(data.rows), len(data.epochs) if data.epochs else None)[0]


def _check_attention(recipe: Recipe, config: Any, report: CheckReport) -> None:
    """Checks the attention that a run on this machine would select."""
    import torch

    from finetune.models.attention import attention_for, check_rows_per_forward
    from finetune.objectives.shared_prompts import with_shared_prompts

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    attention = attention_for(recipe, config, device.type if device else "cpu")
    check_rows_per_forward(recipe, attention)
    with_shared_prompts(recipe.objective, attention)
    if not attention.isolates_documents and recipe.data.packing:
        report.notes.append(f"{attention.reason}; packing is off")
