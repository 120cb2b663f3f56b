"""The teacher of a run that distils: its predictions are there before the student's model loads.

They are from a parquet file, or of a model: `finetune reference` runs that alone, on any launch, and writes what it
predicts of the student's training data to the cache.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from finetune.data.batch import Batch, TokenShare
from finetune.data.dataset import Dataset, Stream
from finetune.data.examples import check_same_images
from finetune.data.loader import Loader, OrderedRows
from finetune.data.predictions import (
    CODE_VERSION,
    Predictions,
    PredictionsWriter,
    check_complete,
    example_key,
    images_digest,
    key_of_sequence,
    load_predictions,
    write_entry,
)
from finetune.data.prefetch import fed_steps
from finetune.data.samples import Example
from finetune.data.teacher_file import file_predictions, is_teacher_file
from finetune.data.token_cache import entries_folder
from finetune.engine.base import Engine
from finetune.errors import UserError
from finetune.models.config import check_same_vocabulary, model_config
from finetune.models.head.prediction import UNIFORM, Prediction
from finetune.models.loss_model import Outputs
from finetune.objectives.forward import ForwardPass
from finetune.objectives.objective import Objective
from finetune.recipe import Recipe
from finetune.recipe.schema import Evaluate, HeldOut
from finetune.training.display import PassProgress
from finetune.training.reference_files import image_states, model_dependencies
from finetune.training.trainer import Trainer


def with_teacher(
    recipe: Recipe, data: Dataset | Stream, tokenizer: PreTrainedTokenizerFast, config: PretrainedConfig
) -> Dataset | Stream:
    """Returns the data with a teacher's predictions, if the objective has a teacher. config: of the model that learns.

    Raises UserError where there are none, or none for some of the examples.
    """
    teacher = recipe.objective.teacher
    if teacher is None:
        return data
    assert isinstance(data, Dataset)  # a rule refuses streams
    vocabulary = config.get_text_config().vocab_size
    if is_teacher_file(teacher):
        predictions = file_predictions(recipe.objective, tokenizer, vocabulary)
    else:
        check_same_vocabulary("objective.teacher", teacher, tokenizer, recipe.model)
        check_same_images("objective.teacher", teacher, recipe, tokenizer)
        predictions = _of_model(recipe, data, vocabulary)
    check_complete(data.examples, predictions, teacher)
    return replace(data, examples=data.examples.with_predictions(predictions))


def _of_model(recipe: Recipe, data: Dataset, vocabulary: int) -> Predictions:
    predictions = load_predictions(TeacherPass(recipe, data, vocabulary).key)
    if predictions is None:
        raise UserError(
            f"objective.teacher: {recipe.objective.teacher!r}: its predictions of this data have not been computed, or "
            "were under other settings; run `python -m finetune reference` with this recipe, on any launch, then train "
            "again"
        )
    return predictions


def recipe_of_teacher(recipe: Recipe) -> Recipe:
    """Returns a recipe whose model is the teacher, and whose training data are the student's, token by token. Raises
    UserError where the teacher is a file."""
    own, teacher = recipe.model, recipe.objective.teacher
    if teacher is None or is_teacher_file(teacher):
        raise UserError(f"objective.teacher: {teacher} is a file: there is nothing to compute, train at once")
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
            "objective": type(recipe.objective)(train_on=recipe.objective.train_on),
            "evaluate": Evaluate(),
            "profile": None,
        }
    )


@dataclass(frozen=True)
class TeacherPass:
    """A teacher's predictions for a student's data, in the cache or still to compute."""

    recipe: Recipe  # of the student
    data: Dataset
    vocabulary: int  # of the student

    @property
    def count(self) -> int:
        """Returns the ids of each target."""
        return self.recipe.objective.samples or self.recipe.objective.value("top_k")

    @property
    def key(self) -> str:
        """Raises UserError where the teacher cannot be read, or has too few tokens."""
        of_teacher = recipe_of_teacher(self.recipe)
        config = model_config(of_teacher.model)
        if self.recipe.objective.samples is None and self.count >= self._tokens(config):
            raise UserError(f"objective.top_k: {self.count} of a vocabulary of {self._tokens(config)}: set a lower one")
        objective = self.recipe.objective
        parts = {
            **model_dependencies(of_teacher, config),
            "predictions": CODE_VERSION,
            "ids": [self._tokens(config), objective.samples, self.count, objective.value("temperature")],
            "data": self.data.examples.identity(),
        }
        if files := self.data.examples.image_files():  # whose paths are in `example_key`
            parts |= {**image_states(self.data.examples), "files": files}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def _tokens(self, teacher: PretrainedConfig) -> int:
        """Returns how many ids both know; embeddings that are padded to a rounder number differ in their last rows."""
        return min(self.vocabulary, teacher.get_text_config().vocab_size)

    def compute(self, trainer: Trainer) -> str:
        """Fills the cache, unless it has them; returns what was done. Collective. trainer: of `recipe_of_teacher`."""
        engine, key = trainer.engine, self.key
        if engine.ranks.gather(engine.is_main and load_predictions(key) is not None)[0]:
            return "in the cache already"
        settings, config = self.recipe.objective, engine.unwrapped.config
        prediction = Prediction(self.count, settings.value("temperature"), self._tokens(config))
        objective = Objective(lambda outputs, batch: {}, token_loss=prediction, num_details=2)
        forward = ForwardPass(trainer.forward.attention, objective)
        data = self.data.once()
        examples = data.examples
        if settings.samples:
            examples = examples.with_predictions(Draws(settings.samples))
        in_order = OrderedRows(examples, data.rows)
        loader = replace(trainer.loader, rows=in_order, total_rows=len(data.rows), alike=0)
        rows = _rows(engine, forward, loader, trainer.console)
        if not engine.is_main:
            for _ in rows:
                pass
        else:
            of = {"source": ", ".join(self.data.source_names), "format": "teacher", "tokenizer": settings.teacher}
            write_entry(entries_folder() / key, self.count, of, lambda writer: _write(writer, rows))
        engine.ranks.barrier()
        return f"computed for {len(examples):,} examples"


Row = tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.int32], NDArray[np.float32], bytes]


def _rows(engine: Engine, forward: ForwardPass, loader: Loader, console: Console) -> Iterator[Row]:
    """Yields the predictions of all ranks, on every rank, step by step. Collective."""
    steps = -(-loader.total_rows // loader.rows_per_step)
    with (
        fed_steps(loader, range(steps), engine.device) as feed,
        PassProgress(console, "teacher", steps, 0, engine.is_main) as progress,
    ):
        for step in range(steps):
            batches = next(feed).batches
            with engine.evaluating():
                outputs = engine.forwards(batches, forward)
                mine = [_piece(batch, of_batch, engine.context_shard) for batch, of_batch in outputs if batch.origins]
            micro_batches = defaultdict[int, list[RankPredictions]](list)
            for of_rank in engine.ranks.gather(mine):
                for piece in of_rank:
                    micro_batches[piece.index].append(piece)
            for pieces in micro_batches.values():
                yield from _rows_of(pieces)
            progress.update(step + 1)


class RankPredictions(NamedTuple):
    """One rank's predictions for a micro-batch of T tokens: for all of them, or for its own t."""

    index: int  # of the micro-batch in its step
    sequence_lengths: tuple[int, ...]  # of examples; their sum is T, without padding
    places: NDArray[np.int64]  # (t,) of its tokens in the row
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

    pieces: of all ranks that have some of it; ranks that share layers have the same ones.
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


def _write(writer: PredictionsWriter, rows: Iterator[Row]) -> None:
    """Each example once: sources may repeat, and ranks that share layers have the same."""
    written = set()
    for row in rows:
        if (key := example_key(row[0], row[1], row[-1])) not in written:
            written.add(key)
            writer.append(*row)


@dataclass(frozen=True)
class Draws:
    """Uniform numbers for draws at every target, the same for an example wherever it is computed."""

    count: int
    identity: str = "draws"

    def of(self, example: Example) -> dict[str, NDArray[np.float64]]:
        """Returns the column (n, count)."""
        (sequence,) = example.sequences
        generator = np.random.Generator(np.random.Philox(key_of_sequence(sequence)))
        return {UNIFORM: generator.random((sequence.num_targets, self.count))}
