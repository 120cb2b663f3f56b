"""The teacher of a run that distills: its predictions exist before the student's model loads.

They are from a parquet file or from a model, which `finetune reference` runs alone, on any launch, to write its
predictions for the student's training data to the cache. On the student's own samples (`rollouts`) a model predicts in
each step, see finetune/rl/sample_teacher.py.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property

from transformers import PretrainedConfig

from finetune.data.dataset import Dataset, on_disk
from finetune.data.predictions import CODE_VERSION, check_complete, load_predictions
from finetune.data.row_source import RowSource
from finetune.data.teacher_file import file_predictions, is_teacher_file
from finetune.errors import UserError
from finetune.models.base_model import Base, check_same_media, check_same_vocabulary
from finetune.recipe import Recipe
from finetune.recipe.objective_settings import Distill, Sft
from finetune.recipe.schema import Evaluate, HeldOut
from finetune.training.reference_files import media_states, model_dependencies


def with_teacher(recipe: Recipe, training: RowSource, base: Base) -> RowSource:
    """Returns the data with a teacher's predictions, if the objective has a teacher. base: the student's.

    Raises UserError if some of the examples have none.
    """
    settings = recipe.objective
    if not isinstance(settings, Distill) or (teacher := settings.teacher) is None:
        return training
    data, is_online = on_disk(training), recipe.rollouts is not None
    vocabulary = base.config.get_text_config().vocab_size
    if is_teacher_file(teacher):
        predictions = file_predictions(settings, base.tokenizer, vocabulary)
    else:
        check_same_vocabulary("objective.teacher", teacher, base)
        check_same_media("objective.teacher", teacher, base)
        if is_online:
            _ = TeacherPass(recipe, data, vocabulary).base  # raises
            return training
        predictions = load_predictions(TeacherPass(recipe, data, vocabulary).key)
        if predictions is None:
            raise UserError(
                f"objective.teacher: {teacher!r} has no predictions of this data under these settings. Fix: run "
                "`python -m finetune reference` with this recipe, on any launch, then train again"
            )
    check_complete(data.examples, predictions, teacher)
    return replace(data, examples=data.examples.with_predictions(predictions))


def recipe_of_teacher(recipe: Recipe) -> Recipe:
    """Returns a recipe whose model is the teacher, and whose training data are the student's, token by token.

    Raises UserError if the teacher is a file.
    """
    own, teacher = recipe.model, recipe.objective.other_models.get("teacher")
    if teacher is None or is_teacher_file(teacher):
        raise UserError(
            f"objective.teacher: {teacher} is a file, so there is nothing to compute. Fix: train without this step"
        )
    tokenizer = own.tokenizer or own.name
    held_out = recipe.data.eval if isinstance(recipe.data.eval, HeldOut) else ()  # rows that a student does not learn
    changes = {"name": teacher, "config": None, "revision": None, "tokenizer": tokenizer, "cross_entropy": "auto"}
    return recipe.model_copy(
        update={
            "run": recipe.run.model_copy(update={"name": f"{recipe.run.name}-teacher"}),
            "model": own.model_copy(update=changes),
            "mode": "full",
            "lora": None,
            "quantization": None,
            "data": recipe.data.model_copy(update={"eval": held_out}),
            "objective": Sft(train_on=recipe.objective.train_on),
            "rollouts": None,
            "rewards": (),
            "evaluate": Evaluate(),
            "profile": None,
        }
    )


@dataclass(frozen=True)
class TeacherPass:
    """A teacher's predictions for a student's data, in the cache or still to compute."""

    recipe: Recipe  # the student's
    data: Dataset
    vocabulary: int  # the student's

    @property
    def settings(self) -> Distill:
        assert isinstance(self.recipe.objective, Distill)  # as the recipe has a teacher
        return self.recipe.objective

    @property
    def count(self) -> int:
        """Returns the number of ids for each target."""
        return self.settings.samples or self.settings.kept_ids

    @cached_property
    def base(self) -> Base:
        """Returns the teacher's base. Raises UserError if its config cannot be read, or has too few tokens."""
        base = Base.of(recipe_of_teacher(self.recipe))
        common = self.common_ids(base.config)
        if self.settings.samples is None and self.count >= common:
            raise UserError(
                f"objective.top_k: {self.count} is not below the vocabulary of {common}. Fix: set a lower one"
            )
        return base

    @property
    def key(self) -> str:
        """Raises UserError as `base`."""
        config, objective = self.base.config, self.settings
        parts = {
            **model_dependencies(recipe_of_teacher(self.recipe), config),
            "predictions": CODE_VERSION,
            "ids": [self.common_ids(config), objective.samples, self.count, objective.temperature],
            "data": self.data.examples.identity(),
        }
        if files := self.data.examples.media_files():  # whose paths are in `example_key`
            parts |= {**media_states(self.data.examples), "files": files}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def common_ids(self, teacher: PretrainedConfig) -> int:
        """Returns the number of ids that both have; embeddings padded to a rounder number differ in their last rows."""
        return min(self.vocabulary, teacher.get_text_config().vocab_size)
