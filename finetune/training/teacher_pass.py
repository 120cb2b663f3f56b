"""Computes a teacher's predictions for a student's training data, into the cache: `finetune reference`.

The teacher is the model of a trainer that runs no steps, on any launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from finetune.data.loader import Loader
from finetune.data.predictions import (
    PredictionsWriter,
    example_key,
    key_of_sequence,
    load_predictions,
    media_digest,
    write_predictions,
)
from finetune.data.prefetch import fed_steps
from finetune.data.samples import Example
from finetune.engine.base import Engine
from finetune.models.head.prediction import UNIFORM, Prediction
from finetune.objectives.forward import ForwardPass
from finetune.objectives.objective import Objective
from finetune.training.target_values import values_of_targets
from finetune.training.teacher import TeacherPass
from finetune.training.trainer import Trainer
from finetune.utils import ProgressBar


def compute_predictions(teacher: TeacherPass, trainer: Trainer) -> str:
    """Writes the predictions to the cache unless it has them; returns a summary. Collective.

    trainer: for `recipe_of_teacher`.
    """
    engine, key = trainer.engine, teacher.key
    if engine.ranks.gather(engine.is_main and load_predictions(key) is not None)[0]:
        return "in the cache already"
    settings, config = teacher.settings, engine.unwrapped.config
    prediction = Prediction(teacher.count, settings.temperature, teacher.common_ids(config))
    objective = Objective(lambda outputs, batch: {}, token_loss=prediction, num_details=2)
    forward = ForwardPass(trainer.forward.attention, objective)
    data = teacher.data.once()
    examples = data.examples
    if settings.samples:
        examples = examples.with_predictions(Draws(settings.samples))
    loader = replace(trainer.loader, rows=replace(data, examples=examples), total_rows=len(data.rows))
    rows = _rows(engine, forward, loader, trainer.console)
    if not engine.is_main:
        for _ in rows:
            pass
    else:
        of = {"source": ", ".join(teacher.data.source_names), "format": "teacher", "tokenizer": settings.teacher}

        def write(writer: PredictionsWriter) -> None:
            written = set()  # each example once: sources may repeat, and ranks that share layers have the same
            for row in rows:
                if (example := example_key(row[0], row[1], row[-1])) not in written:
                    written.add(example)
                    writer.append(*row)

        write_predictions(key, teacher.count, of, write)
    engine.ranks.barrier()
    return f"computed for {len(examples):,} examples"


Row = tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.int32], NDArray[np.float32], bytes]


def _rows(engine: Engine, forward: ForwardPass, loader: Loader, console: Console) -> Iterator[Row]:
    """Yields (tokens, which are trained, ids (n, k), log-probabilities (n, k), images) of the sequences of all ranks,
    on every rank, step by step. Collective."""
    steps = -(-loader.total_rows // loader.rows_per_step)
    with (
        fed_steps(loader, range(steps), engine.device) as feed,
        ProgressBar(console, "teacher", steps, shown=engine.is_main) as progress,
    ):
        for step in range(steps):
            positions = loader.row_positions(step)
            for index, of_sequences in values_of_targets(engine, forward, next(feed).batches).items():
                examples = [one for position in positions[index] for one in loader.rows.row(position)]
                sequences = [sequence for example in examples for sequence in example.sequences]
                for sequence, (_, ids, log_probs) in zip(sequences, of_sequences, strict=True):
                    images = media_digest(one.source for one in sequence.media)
                    yield sequence.input_ids, sequence.loss_mask, ids.astype(np.int32), log_probs, images
            progress.update(step + 1)


@dataclass(frozen=True)
class Draws:
    """Uniform numbers for draws at every target, the same for an example on any rank and in any order."""

    count: int
    identity: str = "draws"

    def of(self, example: Example) -> dict[str, NDArray[np.float64]]:
        """Returns the numbers for an example by column, (n, count)."""
        (sequence,) = example.sequences
        generator = np.random.Generator(np.random.Philox(key_of_sequence(sequence)))
        return {UNIFORM: generator.random((sequence.num_targets, self.count))}
