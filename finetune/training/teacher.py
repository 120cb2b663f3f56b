"""The teacher of a run that distils: what it predicts is there before the model loads."""

from __future__ import annotations

from dataclasses import replace

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from finetune.data.dataset import Dataset, Stream
from finetune.data.predictions import check_complete
from finetune.data.teacher_file import file_predictions, is_teacher_file
from finetune.recipe import Recipe


def with_teacher(
    recipe: Recipe, data: Dataset | Stream, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig
) -> Dataset | Stream:
    """Returns the data with a teacher's predictions, if the objective has a teacher. config: of the model that learns.

    Raises UserError where there are none, or none for some of the examples.
    """
    teacher = recipe.objective.teacher
    if teacher is None:
        return data
    assert isinstance(data, Dataset)  # a rule refuses streams
    assert is_teacher_file(teacher)
    predictions = file_predictions(recipe.objective, tokenizer, config.get_text_config().vocab_size)
    check_complete(data.examples, predictions, teacher)
    return replace(data, examples=data.examples.with_predictions(predictions))
