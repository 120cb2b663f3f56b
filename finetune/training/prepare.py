"""The way into a run: everything that precedes process groups and weights.

    recipe, launch -> config -> tokenizer -> sources -> rows of tokens      `prepare`
                   -> attention on a device -> packed or not                `Prepared.on`

`train`, `reference` and `check` enter here, so `check` refuses what `train` refuses, in the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Literal, ParamSpec, Protocol, TypeVar

from rich.console import Console
from transformers import PretrainedConfig

from finetune.data.building import OpenedSources
from finetune.data.chat.renderer import Renderer
from finetune.data.dataset import (
    Dataset,
    build_held_out,
    build_training,
    check_questions,
    data_notes,
    on_disk,
    template_notes,
)
from finetune.data.row_source import RowSource, RunRows
from finetune.engine.base import Engine
from finetune.engine.compatibility import check_launch
from finetune.engine.context_parallel import divided
from finetune.engine.launch import Launch
from finetune.errors import UserError
from finetune.models.attention import AttentionChoice, attention_for, check_rows_per_forward
from finetune.models.base_model import Base, check_same_media, check_same_vocabulary
from finetune.models.config import check_adapter_base, check_no_dropout, check_sizes
from finetune.models.mtp_files import check_base_has_head
from finetune.models.stored_config import check_stored, stored_notes
from finetune.models.tokenizer import check_token_ids
from finetune.objectives.shared_prompts import with_shared_prompts
from finetune.objectives.table import OBJECTIVES, ObjectiveRow
from finetune.recipe import Recipe
from finetune.recipe.schema import Source
from finetune.tracking.trackers import check_trackers
from finetune.training.run_plan import length_notes
from finetune.training.signals import StopRequest
from finetune.training.target_values import MakeLoader
from finetune.training.teacher import with_teacher

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class PromptNotes(Protocol):
    def __call__(self, recipe: Recipe, data: Dataset, part: Literal["train", "eval"]) -> list[str]:
        """Returns notes on rows that give no prompt. Raises UserError if none does."""
        ...


class MakeRows(Protocol):
    def __call__(
        self,
        prepared: Prepared,
        engine: Engine,
        end_ids: set[int],
        attention: AttentionChoice,
        loader: MakeLoader,
        rows_per_device: int,
    ) -> RunRows:
        """Returns rows that each step makes of samples. Collective; the engine has the initial weights."""
        ...


class Push(Protocol):
    """Copies of a run elsewhere, made by a thread of the main process."""

    def checkpoint(self, folder: Path) -> None:
        """Queues a complete checkpoint in place of one that still waits; returns at once."""
        ...

    def result(self, folder: Path) -> None:
        """Queues the result; returns at once."""
        ...

    def finish(self) -> str | None:
        """Waits for what is queued, with a last try of what has failed, and says what is there. Returns what is not."""
        ...

    def abandon(self) -> None:
        """Says what is there, and drops the rest: the run was asked to stop."""
        ...


class MakePush(Protocol):
    def __call__(self, recipe: Recipe, stop: StopRequest, say: Callable[[str], None]) -> Push: ...


@dataclass(frozen=True)
class Features:
    """What the wings add to the trainer, which imports none of them; `finetune/features.py` has all of it."""

    objectives: Mapping[str, ObjectiveRow]  # by `objective.name`
    prompt_notes: PromptNotes | None = None  # of `rollouts`, as `make_rows`
    make_rows: MakeRows | None = None
    check_push: Callable[[Recipe], None] | None = None  # of `run.push`: raises UserError for what can never be sent
    make_push: MakePush | None = None


TRAINER = Features(OBJECTIVES)  # alone


@dataclass(frozen=True)
class Prepared:
    """A recipe on a launch, with its data as tokens; the same in every process."""

    recipe: Recipe
    recipe_file: str
    launch: Launch
    features: Features
    base: Base
    micro_batches: int  # per step and process, see `check_launch`
    renderer: Renderer  # of the data's rows
    training: RowSource
    held_out: Dataset | None
    notes: tuple[str, ...]  # for the user

    def on(self, device_type: str) -> tuple[Prepared, AttentionChoice]:
        """Returns itself for a kind of device, with the attention there: unpacked, if that attention would let
        documents see each other, and with notes on the run's length. Raises UserError."""
        attention = attention_for(self.recipe, self.base.config, device_type)
        parallelism = self.launch.parallelism
        samples = self.recipe.rollouts is not None
        with_shared_prompts(self.recipe.objective, samples, divided(attention, parallelism))
        check_rows_per_forward(self.recipe.batch, attention)
        training, held_out, notes = self.training, self.held_out, list[str]()
        if not attention.isolates_documents:
            training, held_out = training.unpacked(), held_out.unpacked() if held_out else None
            if self.recipe.data.packing:
                notes.append(f"{attention.reason}; packing is off")
        notes += length_notes(self.recipe, training, parallelism.data)
        return replace(self, training=training, held_out=held_out, notes=(*self.notes, *notes)), attention


class Problems:
    """Raises a problem at once, as a run does, or collects it with all others, as `check` does."""

    def __init__(self, collect: bool = False):
        self._collect = collect
        self.messages: list[str] = []

    def attempt(
        self, call: Callable[Arguments, Result], *args: Arguments.args, **named: Arguments.kwargs
    ) -> Result | None:
        """Returns the result of a call; None if it raised a problem that was collected."""
        try:
            return call(*args, **named)
        except UserError as error:
            if not self._collect:
                raise
            if str(error) not in self.messages:
                self.messages.append(str(error))
            return None

    def error(self, recipe_file: str) -> UserError:
        """Returns one error of all collected problems."""
        if len(self.messages) == 1:
            return UserError(self.messages[0])
        indented = [message.replace("\n", "\n    ") for message in self.messages]
        return UserError("\n  ".join([f"{recipe_file}: {len(indented)} problems", *indented]))


def prepare(
    recipe: Recipe,
    recipe_file: str,
    launch: Launch,
    features: Features = TRAINER,
    problems: Problems | None = None,
) -> Prepared:
    """Returns the recipe ready for a launch, with its tokens in the cache.

    If problems are collected, each part is checked unless it needs a part that has one. Raises UserError.
    """
    check_features(recipe, features)
    problems = problems or Problems()
    base = Base.of(recipe)
    config = problems.attempt(_checked_config, base, recipe)
    micro_batches = problems.attempt(check_launch, recipe, recipe_file, launch, config)
    if (check := features.objectives[recipe.objective.name].check) is not None:
        problems.attempt(check, recipe.objective)
    problems.attempt(check_trackers, recipe.tracking)
    if recipe.run.push is not None and features.check_push is not None:
        problems.attempt(features.check_push, recipe)
    tokenizer = problems.attempt(lambda: base.tokenizer)
    if config is not None and tokenizer is not None:
        problems.attempt(_check_models, base, recipe.objective.other_models.get("reference_model"))
    opened = OpenedSources(recipe)
    sources: tuple[Source, ...] = (*recipe.data.train, *recipe.data.eval_sources)
    sources_open = None not in [problems.attempt(opened.open, source) for source in sources]
    if config is None or tokenizer is None or not sources_open:
        raise problems.error(recipe_file)
    notes = problems.attempt(template_notes, recipe, tokenizer, opened)
    if notes is None:
        raise problems.error(recipe_file)
    renderer = problems.attempt(base.renderer, recipe.objective)
    if renderer is None:
        raise problems.error(recipe_file)
    training = problems.attempt(lambda: with_teacher(recipe, build_training(recipe, renderer, opened), base))
    prompt_notes = features.prompt_notes if recipe.rollouts is not None else None
    if training is not None and prompt_notes is not None:
        notes += problems.attempt(lambda: prompt_notes(recipe, on_disk(training), "train")) or []
    held_out = problems.attempt(build_held_out, recipe, renderer, opened)
    if held_out is not None:
        notes += problems.attempt(check_questions, recipe.evaluate, held_out.examples, tokenizer) or []
        if prompt_notes is not None and recipe.samples_held_out:
            notes += problems.attempt(prompt_notes, recipe, held_out, "eval") or []
    if problems.messages or micro_batches is None or training is None:
        raise problems.error(recipe_file)
    notes += [*data_notes(recipe.data, opened, training, held_out), *stored_notes(recipe, config)]
    read = (base, micro_batches, renderer, training, held_out)
    return Prepared(recipe, recipe_file, launch, features, *read, tuple(notes))


def make_file_features(prepared: Prepared) -> list[str]:
    """Computes the features of a run's clips and videos into the cache, under `cache` of `data.audio` and `data.video`,
    and returns their counts. Uses no process group: the first process works, the others wait. Raises UserError."""
    kept = [rules for rules in (prepared.recipe.data.audio, prepared.recipe.data.video) if rules and rules.cache]
    if not kept or prepared.base.media is None:
        return []
    from finetune.data.media.feature_cache import FeatureCache, make_features

    of_run = [data.examples for data in (prepared.training, prepared.held_out) if isinstance(data, Dataset)]
    files = list(chain.from_iterable(examples.media() for examples in of_run))
    caches = [FeatureCache.of(one) for one in prepared.base.media.families.values() if one.rules in kept]
    return [str(make_features(cache, files, Console(stderr=True))) for cache in caches]


def check_features(recipe: Recipe, features: Features) -> None:
    """Raises UserError if the recipe needs a feature that was not handed in."""
    if recipe.objective.name not in features.objectives:
        raise _lacking(f"objective.name: `{recipe.objective.name}`")
    needs_samples = "rollouts" if recipe.rollouts is not None else "rewards" if recipe.rewards else None
    if needs_samples is not None and None in (features.prompt_notes, features.make_rows):
        raise _lacking(f"{needs_samples}: sampling")
    if recipe.run.push is not None and None in (features.check_push, features.make_push):
        raise _lacking("run.push")


def _lacking(needed: str) -> UserError:
    return UserError(
        f"{needed} is not a feature of the trainer alone. Fix: use `finetune.train` or the command line, or hand in "
        "`features` (finetune/features.py)"
    )


def _checked_config(base: Base, recipe: Recipe) -> PretrainedConfig:
    check_stored(recipe, base.config)
    check_adapter_base(recipe)
    check_sizes(base.model, base.config)
    check_base_has_head(base.model, base.config)
    if recipe.batch.rows_per_device == "auto":
        check_no_dropout(base.config)
    return base.config


def _check_models(base: Base, reference: str | None) -> None:
    """Raises UserError unless tokenizer and model, and a reference model, belong together."""
    check_token_ids(base.config, len(base.tokenizer), base.tokens)
    check_same_vocabulary("objective.reference_model", reference, base)
    check_same_media("objective.reference_model", reference, base)
