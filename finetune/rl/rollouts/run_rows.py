"""Rows of a run that samples them, as the trainer asks for them: notes while it is prepared, then the rows."""

from __future__ import annotations

from typing import Literal

from finetune.data.dataset import Dataset, on_disk
from finetune.data.examples import media_reader
from finetune.data.row_source import RunRows
from finetune.engine.base import Engine
from finetune.models.attention import AttentionChoice
from finetune.recipe import Recipe
from finetune.rl.rollouts.prompts import RunPrompts
from finetune.rl.rollouts.step_rows import RolloutRows
from finetune.rl.sample_teacher import SampleTeacher
from finetune.training.prepare import Prepared
from finetune.training.run_dir import run_folder
from finetune.training.target_values import MakeLoader
from finetune.training.teacher import TeacherPass


def prompt_notes(recipe: Recipe, data: Dataset, part: Literal["train", "eval"]) -> list[str]:
    """Returns notes on rows that give no prompt. Raises UserError if none does."""
    return RunPrompts(recipe, data, part).notes


def make_rows(
    prepared: Prepared,
    engine: Engine,
    end_ids: set[int],
    attention: AttentionChoice,
    loader: MakeLoader,
    rows_per_device: int,
) -> RunRows:
    """Returns rows that are samples of the wrapped model, which has its initial weights. Collective."""
    recipe, data, teacher, questions = prepared.recipe, on_disk(prepared.training), None, None
    if "teacher" in recipe.objective.other_models:
        vocabulary = prepared.base.config.get_text_config().vocab_size
        teacher = SampleTeacher(TeacherPass(recipe, data, vocabulary), engine, rows_per_device)
    if prepared.held_out is not None and recipe.samples_held_out:
        questions = RunPrompts(recipe, prepared.held_out, "eval")
    prompts, renderer = RunPrompts(recipe, data), prepared.renderer
    of_run = (prompts, data.content(), prepared.base.tokenizer, renderer, end_ids, run_folder(recipe.run))
    reader = media_reader(prepared.base.media)
    return RolloutRows(recipe, engine, *of_run, attention, loader, teacher, questions, reader)
