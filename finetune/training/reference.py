"""The log-probabilities of a reference model, which preference objectives compare the policy's with; never a second
model in memory.

    precomputed     one pass over all rows by the run's own engine, before the first step and before a checkpoint is
                    read, so that the policy still is the reference; or another model's, from `finetune reference`
    adapters_off    in each step and evaluation, by the policy without its adapters

Both are the sums over the targets of each sequence, in fp32, of the same micro-batches that training has.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from finetune.checkpoints.folder import list_checkpoints
from finetune.checkpoints.inputs import on_main
from finetune.data.batch import Batch
from finetune.data.dataset import Dataset, on_disk
from finetune.data.loader import Loader
from finetune.data.prefetch import fed_steps
from finetune.data.row_source import RowSource
from finetune.engine.base import Engine
from finetune.errors import RunFailure, UserError
from finetune.models.adapters import adapters_off
from finetune.models.base_model import Base
from finetune.objectives.forward import ForwardPass
from finetune.objectives.objective import ONE_RANK, sequence_log_probs
from finetune.objectives.preference import REFERENCE
from finetune.recipe import Recipe
from finetune.recipe.objective_settings import ObjectiveSettings
from finetune.training.reference_files import (
    Dependencies,
    Unfinished,
    cache_folder,
    described,
    key_of,
    load,
    model_dependencies,
    read_report,
    save,
)
from finetune.training.run_dir import run_folder
from finetune.utils import ProgressBar

# --- precomputed


@dataclass(frozen=True)
class ReferenceOnDisk:
    """Dependencies of the log-probabilities of a run's reference, and the folders that have them."""

    model: Dependencies
    keys: dict[str, str]  # by part of the data, train and eval
    places: dict[str, Path | None]  # None: still to compute


def find_reference(recipe: Recipe, training: RowSource, held_out: Dataset | None) -> ReferenceOnDisk:
    """Looks for a run's reference in its own folder, then in the cache; needs no model.

    Raises UserError if another model's are missing, which a run does not compute, and if a run resumes that began with
    another reference.
    """
    reference, parts = recipe_of_reference(recipe), _parts(on_disk(training), held_out)
    own, model = run_folder(recipe.run) / "reference", model_dependencies(reference, Base.of(reference).config)
    before = read_report(own / "train").get("dependencies", model)
    resume, checkpoints = recipe.checkpoint.resume, run_folder(recipe.run) / "checkpoints"
    resumes = resume != "never" and (resume != "auto" or list_checkpoints(checkpoints))
    if resumes and before["model"] != model["model"]:
        raise UserError(
            f"the weights of {reference.model.name!r} are not those that this run began with. The run is compared with "
            "them. Fix: restore them, or start over with another `run.name` or `checkpoint.resume=never`; to continue "
            f"with another reference all the same, remove {own}"
        )
    keys = {part: key_of(model, data) for part, data in parts.items()}
    places: dict[str, Path | None] = {}
    for part, data in parts.items():
        folders = (own / part, cache_folder(keys[part]))
        complete = (folder for folder in folders if load(folder, keys[part], _count(data)) is not None)
        places[part] = next(complete, None)
    other = recipe.objective.other_models.get("reference_model")
    if other is not None and None in places.values():
        raise UserError(
            f"objective.reference_model: {other!r} has no log-probabilities of this data under these settings. Fix: "
            "run `python -m finetune reference` with this recipe, on any launch, then train again"
        )
    return ReferenceOnDisk(model, keys, places)


def _parts(training: Dataset, held_out: Dataset | None) -> dict[str, Dataset]:
    return {"train": training.once(), **({"eval": held_out} if held_out else {})}


class ReferenceColumns:
    """The reference's log-probabilities of a run's data, read from the disk or computed. Collective."""

    def __init__(self, recipe: Recipe, engine: Engine, training: RowSource, held_out: Dataset | None, console: Console):
        """Looks for them on the disk; copies those of the cache to the run's folder, as it resumes without the cache.

        Raises UserError as `find_reference`.
        """
        self._recipe, self._engine, self._console = recipe, engine, console
        self._training = on_disk(training)
        self._folder, self._parts = run_folder(recipe.run) / "reference", _parts(self._training, held_out)
        self._disk: ReferenceOnDisk = on_main(engine, partial(find_reference, recipe, training, held_out))
        self._sources = {
            part: f"from {place}" if place == self._folder / part else f"from the cache, {place}"
            for part, place in self._disk.places.items()
            if place is not None
        }

        def copy_from_cache() -> None:
            for part, place in self._disk.places.items():
                if place is not None and place != self._folder / part:
                    values = load(place, self._disk.keys[part], _count(self._parts[part]))
                    if values is not None:
                        save(self._folder / part, values, read_report(place))

        on_main(self._engine, copy_from_cache)

    @property
    def weights_identity(self) -> str:
        """Returns a digest of the weights of the reference."""
        return hashlib.sha256(json.dumps(self._disk.model["model"], sort_keys=True).encode()).hexdigest()[:16]

    def columns(self, forward: ForwardPass, loader: Callable[[Dataset], Loader]) -> tuple[Dataset, Dataset | None, str]:
        """Returns training and held-out data with the column, and the source of the training data's.

        forward: the run's, whose initial model is the reference; loader: makes one for each row once.
        """
        computed: dict[str, Dataset] = {}
        for part, data in self._parts.items():
            if part not in self._sources:
                seconds = self._compute(part, data, forward, loader(data))
                self._sources[part] = f"computed in {seconds:,.1f} s"
            values = load(self._folder / part, self._disk.keys[part], _count(data))
            if values is None:
                raise RunFailure(
                    f"{self._folder / part}: was written and cannot be read. Fix: check the disk, and run the same "
                    "command again"
                )
            computed[part] = replace(data, examples=data.examples.with_columns({REFERENCE: values}))
        training = replace(self._training, examples=computed["train"].examples)
        return training, computed.get("eval"), self._sources["train"]

    def _compute(self, part: str, data: Dataset, forward: ForwardPass, loader: Loader) -> float:
        """Computes them in blocks that are kept as they come, and writes them to the run's folder and the cache.

        Returns the seconds. Raises RunFailure with the rows whose log-probabilities are not finite.
        """
        begun, steps, key = time.monotonic(), -(-loader.total_rows // loader.rows_per_step), self._disk.keys[part]
        unfinished = Unfinished(self._folder / f"{key}.npy", _count(data))

        def begin() -> int:
            """Returns the number of steps that a stopped pass has computed."""
            computed = unfinished.open()  # (M,)
            missing = (i for i in range(steps) if not computed[np.concatenate(_places(loader, i, data))].all())
            return next(missing, steps)

        def keep() -> None:
            model, seconds = self._disk.model, time.monotonic() - begun
            name, max_length = recipe_of_reference(self._recipe).model.name, self._recipe.data.max_length
            report = described(name, max_length, model, data, key, seconds)
            for folder in (cache_folder(key), self._folder / part):
                save(folder, unfinished.values(), report)
            unfinished.remove()

        done = on_main(self._engine, begin)
        with (
            fed_steps(loader, range(done, steps), self._engine.device) as feed,
            ProgressBar(self._console, f"reference, {part}", steps, done, self._engine.is_main) as progress,
        ):
            for step in range(done, steps):
                of_batches = _places(loader, step, data)
                places = np.concatenate(of_batches)
                values = self._block(forward, next(feed).batches, [len(of_batch) for of_batch in of_batches])
                if len(wrong := places[~np.isfinite(values)]):
                    raise _not_finite(wrong, data)
                if self._engine.is_main:
                    unfinished.put(places, values)
                progress.update(step + 1)
        on_main(self._engine, keep)
        return time.monotonic() - begun

    def _block(self, forward: ForwardPass, batches: list[Batch], sizes: list[int]) -> NDArray[np.float64]:
        """Returns the log-probabilities of every sequence of a step, on every rank, one micro-batch after the other.

        sizes: sequences of each micro-batch of all ranks, by `Batch.index`.
        """
        local = [torch.zeros(size, dtype=torch.float64, device=self._engine.device) for size in sizes]
        with self._engine.evaluating():
            for batch, outputs in self._engine.forwards(batches, forward):
                if batch.origins:  # not a dummy
                    # Ranks that share tokens have parts of each sum, which the reduction adds up.
                    local[batch.index] = sequence_log_probs(outputs, batch, ONE_RANK).double()
        return self._engine.ranks.total({REFERENCE: torch.cat(local)})[REFERENCE].numpy()


def _count(data: Dataset) -> int:
    """Returns the number of sequences."""
    return len(data.examples.sizes.lengths)


def _places(loader: Loader, step: int, data: Dataset) -> list[NDArray[np.int64]]:
    """Returns the indices of the sequences of each micro-batch of a step, over all ranks, among all sequences."""
    offsets, members = data.examples.sizes.offsets, data.members
    return [
        np.concatenate([np.arange(offsets[i], offsets[i + 1]) for position in positions for i in members(position)])
        for positions in loader.row_positions(step)
    ]


def _not_finite(wrong: NDArray[np.int64], data: Dataset) -> RunFailure:
    """Returns an error with the rows of these sequences."""
    examples = [data.examples[int(i)] for i in np.searchsorted(data.examples.sizes.offsets, wrong, "right") - 1]
    shown = ", ".join(dict.fromkeys(f"{example.path}:{example.row}" for example in examples[:20]))
    return RunFailure(
        f"the reference's log-probabilities are not finite. Rows in question: {shown}. Fix: check these rows with "
        "`finetune inspect`, or use train.precision: bf16 instead of fp16"
    )


def reads_columns(objective: ObjectiveSettings) -> bool:
    """Returns whether the objective reads log-probabilities that are computed before the first step."""
    return objective.precomputes_reference


def recipe_of_reference(recipe: Recipe) -> Recipe:
    """Returns the recipe whose initial model is the reference: itself, or the one with `objective.reference_model`."""
    name = recipe.objective.other_models.get("reference_model")
    if name is None:
        return recipe
    tokenizer = {"tokenizer": recipe.model.tokenizer or recipe.model.name}
    model = recipe.model.model_copy(update={"name": name, "config": None, "revision": None, **tokenizer})
    objective = recipe.objective.model_copy(update={"reference_model": None})
    return recipe.model_copy(update={"model": model, "objective": objective})


# --- adapters off


@dataclass(frozen=True)
class AdaptersOff:
    """The policy without its adapters as the reference, in every step."""

    engine: Engine
    forward: ForwardPass

    def with_column(self, batches: Iterable[Batch]) -> list[Batch]:
        """Returns the batches with the column, on the ranks that have outputs. Collective, while `evaluating`."""
        batches, computed = list(batches), {}
        with adapters_off(self.engine.unwrapped):
            for batch, outputs in self.engine.forwards(batches, self.forward):
                log_probs = sequence_log_probs(outputs, batch, self.engine.token_ranks)
                computed[batch.index] = replace(batch, columns={**batch.columns, REFERENCE: log_probs})
        return [computed.get(batch.index, batch) for batch in batches]
