"""The teacher of a run that distills on its own samples (`objective.name: distill` with `rollouts`): a second model on
each process, frozen, in full, whatever the launch does to the student.

It predicts on whole micro-batches of samples, so its values are the same on any launch. They are recorded with the
samples: a step that has them needs no teacher, and a run that only replays never loads it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import torch

from finetune.data.batch import UNSHARDED, Batch
from finetune.data.loader import Loader
from finetune.data.row_source import RunRows
from finetune.data.samples import Example
from finetune.engine.base import Engine
from finetune.models.assemble import assemble
from finetune.models.attention import attention_for
from finetune.models.head.prediction import Prediction
from finetune.models.weights import Placement, load_model
from finetune.models.wrapped import Outputs, WrappedModel
from finetune.objectives.forward import ForwardPass
from finetune.objectives.objective import Objective
from finetune.recipe import Recipe
from finetune.training.target_values import TargetPass, Values
from finetune.training.teacher import TeacherPass, recipe_of_teacher


def recipe_beside_student(recipe: Recipe) -> Recipe:
    """Returns the recipe of a student's teacher as it is loaded next to the student, for forwards alone."""
    frozen = recipe_of_teacher(recipe)
    train = frozen.train.model_copy(update={"activation_checkpointing": False, "activation_offload": False})
    # Weights that nothing trains are kept in the type of frozen ones, which `mode: full` has none of.
    return frozen.model_copy(update={"mode": "lora", "train": train})


def predictions(count: int, temperature: float, vocabulary: int) -> Objective:
    """Returns an objective without a loss, whose outputs have the likeliest ids of each target. Arguments: see
    `Prediction`."""
    return Objective(lambda outputs, batch: {}, token_loss=Prediction(count, temperature, vocabulary), num_details=2)


class SampleTeacher:
    """Predicts ids and log-probabilities at every token of samples; loads its model when it is first asked."""

    context_shard = UNSHARDED

    def __init__(self, teacher: TeacherPass, engine: Engine, rows_per_device: int):
        """teacher: of the student's recipe; engine: of the student, for its ranks and device."""
        self._pass, self._engine, self._rows_per_device = teacher, engine, rows_per_device
        self.device, self.ranks = engine.device, engine.ranks
        self._recipe = recipe_beside_student(teacher.recipe)

    @property
    def of(self) -> str:
        settings = self._pass.settings
        return json.dumps([settings.teacher, self._pass.count, settings.temperature])

    def __call__(self, examples: Sequence[Example]) -> list[list[Values]]:
        batch, shares = self._pass.recipe.batch, self._forward.attention.shares_prompts
        # Ranks that share the student's sequences compute the same ones.
        ranks = (self._engine.data_rank, self._engine.parallelism.data)

        def loader(rows: RunRows, total_rows: int) -> Loader:
            sizes = (batch.rows, self._rows_per_device, *ranks, total_rows, batch.tokens_per_device)
            return Loader(rows, *sizes, shares_prompts=shares)

        return TargetPass(self, self._forward, loader)(examples)

    @cached_property
    def _forward(self) -> ForwardPass:
        settings, config = self._pass.settings, self._pass.base.config
        objective = predictions(self._pass.count, settings.temperature, self._pass.common_ids(config))
        attention = attention_for(self._recipe, config, self.device.type)
        shares = settings.share_prompts is not False and attention.not_shared is None
        return ForwardPass(replace(attention, shares_prompts=shares), objective)

    @cached_property
    def model(self) -> WrappedModel:
        with self._engine.loading_whole():
            placement = Placement("load", self.device)
            model = load_model(self._recipe, self._pass.base, self._forward.attention, placement)
        wrapped = assemble(model, self._recipe, self.device, has_scores=False, only_sums=False)
        return wrapped.requires_grad_(False).eval().to(self.device)

    # --- as `TargetPass` takes an engine

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        with torch.no_grad():
            yield

    def forwards(self, batches: Iterable[Batch], forward: ForwardPass) -> Iterator[tuple[Batch, Outputs]]:
        for batch in batches:
            yield batch, forward(self.model, batch)
