"""Computes a teacher's predictions for a student's training data, into the cache: `finetune reference`.

The teacher is the model of a trainer that runs no steps, on any launch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from finetune.data.batch import Batch, TokenShare
from finetune.data.loader import Loader
from finetune.data.predictions import (
    PredictionsWriter,
    example_key,
    images_digest,
    key_of_sequence,
    load_predictions,
    write_predictions,
)
from finetune.data.prefetch import fed_steps
from finetune.data.samples import Example
from finetune.engine.base import Engine
from finetune.models.head.prediction import UNIFORM, Prediction
from finetune.models.loss_model import Outputs
from finetune.objectives.forward import ForwardPass
from finetune.objectives.objective import Objective
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
    settings, config = teacher.recipe.objective, engine.unwrapped.config
    prediction = Prediction(teacher.count, settings.value("temperature"), teacher.common_ids(config))
    objective = Objective(lambda outputs, batch: {}, token_loss=prediction, num_details=2)
    forward = ForwardPass(trainer.forward.attention, objective)
    data = teacher.data.once()
    examples = data.examples
    if settings.samples:
        examples = examples.with_predictions(Draws(settings.samples))
    loader = replace(trainer.loader, rows=replace(data, examples=examples), total_rows=len(data.rows), alike=0)
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
    """Yields the predictions of all ranks, on every rank, step by step. Collective."""
    steps = -(-loader.total_rows // loader.rows_per_step)
    with (
        fed_steps(loader, range(steps), engine.device) as feed,
        ProgressBar(console, "teacher", steps, shown=engine.is_main) as progress,
    ):
        for step in range(steps):
            batches = next(feed).batches
            with engine.evaluating():
                outputs = engine.forwards(batches, forward)
                local = [_piece(batch, of_batch, engine.context_shard) for batch, of_batch in outputs if batch.origins]
            micro_batches = defaultdict[int, list[RankPredictions]](list)
            for of_rank in engine.ranks.gather(local):
                for piece in of_rank:
                    micro_batches[piece.index].append(piece)
            for pieces in micro_batches.values():
                yield from _rows_of(pieces)
            progress.update(step + 1)


class RankPredictions(NamedTuple):
    """One rank's predictions for a micro-batch of T tokens: for all of them, or for this rank's t."""

    index: int  # position of the micro-batch in the step
    sequence_lengths: tuple[int, ...]  # tokens of examples; their sum is T, without padding
    places: NDArray[np.int64]  # (t,) positions of its tokens in the row
    tokens: NDArray[np.int32]  # (t,)
    predicting: NDArray[np.int64]  # (s,) places whose next token is trained
    ids: NDArray[np.int32]  # (s, k)
    log_probs: NDArray[np.float32]  # (s, k)
    images: tuple[bytes, ...]  # `images_digest` of each sequence


def _piece(batch: Batch, outputs: Outputs, share: TokenShare) -> RankPredictions:
    tokens = _numpy(batch.inputs["input_ids"][0]).astype(np.int32)
    places = share.places(len(tokens) * share.context * share.sequence)
    ids, log_probs = (_numpy(values) for values in outputs.details)
    lengths = batch.sequence_lengths[: len(batch.sequence_tokens)]
    predicting = places[_numpy(batch.targets.positions)]
    images = tuple(images_digest(one.source for one in batch.images if one.sequence == i) for i in range(len(lengths)))
    return RankPredictions(batch.index, lengths, places, tokens, predicting, ids.astype(np.int32), log_probs, images)


def _rows_of(pieces: list[RankPredictions]) -> Iterator[Row]:
    """Yields (tokens, which are trained, ids (n, k), log-probabilities (n, k), images) of each sequence of a
    micro-batch.

    pieces: of all ranks that share it; ranks that share layers have equal ones.
    """
    _, first = np.unique(np.concatenate([piece.places for piece in pieces]), return_index=True)
    tokens = np.concatenate([piece.tokens for piece in pieces])[first]
    predicting, first = np.unique(np.concatenate([piece.predicting for piece in pieces]), return_index=True)
    ids = np.concatenate([piece.ids for piece in pieces])[first]
    log_probs = np.concatenate([piece.log_probs for piece in pieces])[first]
    trained = np.zeros(len(tokens), np.bool_)
    trained[predicting + 1] = True
    ends = np.cumsum(pieces[0].sequence_lengths)
    for begin, end, images in zip(ends - pieces[0].sequence_lengths, ends, pieces[0].images, strict=True):
        of_sequence = slice(*np.searchsorted(predicting, (begin, end)))
        yield tokens[begin:end], trained[begin:end], ids[of_sequence], log_probs[of_sequence], images


def _numpy(tensor: Tensor) -> NDArray[Any]:
    return tensor.cpu().numpy()


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
