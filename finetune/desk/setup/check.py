"""`check`: reports everything that `train` would refuse, without training: recipe, launch, tokenizer, data, model,
memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.data.sources.hub import check_hub
from finetune.errors import UserError
from finetune.features import load_recipe
from finetune.recipe import Recipe
from finetune.recipe.schema import BatchSettings
from finetune.utils import readable_bytes

if TYPE_CHECKING:
    from finetune.engine.launch import Launch
    from finetune.models.attention import AttentionChoice
    from finetune.training.prepare import Prepared


@dataclass
class CheckReport:
    """Result for one recipe: `error` if it would not run; facts by name; notes."""

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
    """Checks every recipe below a folder, without data. Folders named `base` (parts of other recipes) and `tasks`
    (lm_eval's) have none. Raises UserError if there is none at all."""
    others = {"base", "tasks"}
    paths = sorted(path for path in folder.rglob("*.yaml") if others.isdisjoint(path.relative_to(folder).parts[:-1]))
    if not paths:
        raise UserError(f"{folder}: no recipes (*.yaml) in this folder. Fix: give a recipe, or a folder of recipes")
    return [check_recipe(path, overrides, config_file, num_processes, recipe_only=True) for path in paths]


def check_recipe(
    path: Path,
    overrides: Sequence[str],
    config_file: Path | None = None,
    num_processes: int | None = None,
    recipe_only: bool = False,
) -> CheckReport:
    """Checks schema and rules, the launch, and, unless `recipe_only`, the preparation of a run. Without an accelerate
    config the launch is that of one process, or of `num_processes` replicas."""
    report = CheckReport(str(path))
    try:
        recipe = load_recipe(path, overrides)
        if recipe_only and not (config_file or num_processes):
            return report
        if not recipe_only:
            check_hub(recipe)
        from finetune.engine.compatibility import check_launch  # slow imports, after a recipe that loads
        from finetune.engine.launch import read_config_file

        launch = read_config_file(str(config_file) if config_file else None, num_processes)
        if recipe_only:  # rules that do not depend on the model
            micro_batches = check_launch(recipe, str(path), launch)
        else:
            prepared = _check_run(recipe, path, launch, report)
            micro_batches = prepared.micro_batches
            if config_file:
                _report_memory(prepared, report)
        if config_file or num_processes:
            _report_launch(recipe.batch, recipe.data.balance, launch, micro_batches, report)
    except UserError as error:
        report.error = str(error)
    return report


def _check_run(recipe: Recipe, path: Path, launch: Launch, report: CheckReport) -> Prepared:
    """Prepares the run as `train` does and builds its model without weights. Raises UserError with the problems of
    both."""
    import torch

    from finetune.desk.setup.sampling_trial import try_sampling
    from finetune.engine.product_speed import compute_device, emulation_note
    from finetune.engine.start import check_cuda
    from finetune.features import all_features
    from finetune.training.prepare import Problems, prepare
    from finetune.training.reference import find_reference, reads_columns
    from finetune.training.run_plan import training_length

    problems, length = Problems(collect=True), recipe.data.max_length
    if torch.cuda.is_available():
        problems.attempt(check_cuda, recipe, launch)
    prepared = prepare(recipe, str(path), launch, all_features(), problems)
    device = compute_device()
    on_device = problems.attempt(prepared.on, device.type)
    if on_device is not None:
        prepared, attention = on_device
        if reads_columns(recipe.objective):  # log-probabilities of another model, which must have been computed
            problems.attempt(find_reference, recipe, prepared.training, prepared.held_out)
        problems.attempt(_check_model, prepared, attention)
    facts, notes = try_sampling(prepared, problems) if recipe.rollouts is not None else ({}, ())
    if problems.messages:
        raise problems.error(str(path))
    size = prepared.training.size(length)
    report.facts |= prepared.training.facts("train", length)
    report.facts["steps"] = training_length(recipe.train, recipe.batch.rows, size)[0]
    if prepared.held_out is not None:
        report.facts |= prepared.held_out.facts("eval", length)
    report.facts |= facts
    emulated = emulation_note(recipe.train, recipe.quantization, device)
    report.notes += (*prepared.notes, *notes, *([emulated] if emulated else []))
    return prepared


def _check_model(prepared: Prepared, attention: AttentionChoice) -> None:
    """Builds the recipe's modules, head and losses, without weights."""
    import torch

    from finetune.models.assemble import skeleton
    from finetune.training.parts import with_objective

    model = skeleton(prepared.recipe, prepared.base, attention, prepared.recipe.objective.score_labels)
    with_objective(prepared, model, attention, torch.device("cpu"))


def _report_launch(batch: BatchSettings, balance: int, launch: Launch, micro_batches: int, report: CheckReport) -> None:
    """Adds processes and micro-batches, and a note if processes would wait for each other."""
    from finetune.data.packing import group_rows

    at_once = 0
    steps = f"{micro_batches} micro-batches per process and step"
    if batch.rows_per_device == "auto":
        steps = f"at most {steps} (batch.rows_per_device: auto, measured at the start)"
    elif batch.tokens_per_device is not None:
        steps = f"at most {steps}"
    else:
        at_once = launch.parallelism.data * batch.rows_per_device
    sizes = "" if launch.parallelism.is_plain else f" ({launch.parallelism.summary()})"
    report.facts = {"launch": f"{launch.where}, {launch.processes} processes{sizes}, {steps}", **report.facts}
    group = group_rows(balance, batch.rows)
    if at_once and launch.parallelism.data > 1 and group % at_once:
        report.notes.insert(
            0,
            f"{at_once} packed sequences are computed at once, and those of similar attention work are grouped by "
            f"{group}: processes wait less for each other with `data.balance: {at_once}`",
        )


def _report_memory(prepared: Prepared, report: CheckReport) -> None:
    """Adds the largest memory the recipe can need on a GPU of this launch, by formula."""
    from finetune.plan.lengths import widest
    from finetune.plan.memory import Place, estimate_memory
    from finetune.plan.micro_batch import NotEstimated
    from finetune.plan.search import heaviest

    recipe, config, launch = prepared.recipe, prepared.base.config, prepared.launch
    place, batch = Place(launch, launch.processes), heaviest(recipe.batch, widest(recipe, "the largest rows", config))
    try:
        memory = estimate_memory(recipe, config, place, batch, prepared.micro_batches)
    except NotEstimated as reason:
        report.notes.append(f"memory is not estimated: {reason}")
        return
    phase = max(memory.phases, key=lambda name: memory.phases[name])
    host = f", {readable_bytes(memory.host)} of host memory" if memory.host else ""
    report.facts["memory"] = (
        f"at most {readable_bytes(memory.tensors)} of tensors on a GPU{host}, in {phase}, by formula; `plan` has more"
    )
