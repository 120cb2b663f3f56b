"""The log-probabilities of a reference model, which preference objectives compare the policy's with; never a second
model in memory.

    precomputed     one pass over all rows by the run's own engine, before the first step and before a checkpoint is
                    read, so that the policy still is the reference; or another model's, from `finetune reference`
    adapters_off    in each step and evaluation, by the policy without its adapters

Both are the sums over the targets of each sequence, in fp32, of the same micro-batches that training has.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from finetune.checkpoints.folder import list_checkpoints
from finetune.data.batch import Batch
from finetune.data.dataset import Dataset, Stream
from finetune.data.loader import Loader, OrderedRows
from finetune.data.prefetch import fed_steps
from finetune.engine.base import Engine
from finetune.errors import RunFailure, UserError
from finetune.models.config import training_config
from finetune.objectives.forward import ForwardPass
from finetune.objectives.objective import Objective, TokenRanks, sequence_log_probs
from finetune.objectives.preference import REFERENCE
from finetune.recipe import Recipe
from finetune.training.display import PassProgress
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

Data = Dataset | Stream


# --- precomputed


def precomputes_reference(recipe: Recipe, objective: Objective) -> bool:
    return REFERENCE in objective.columns and recipe.objective.value("reference") == "precomputed"


@dataclass(frozen=True)
class Precomputation:
    """Finds the log-probabilities of a run's data, or computes them. Collective."""

    recipe: Recipe
    engine: Engine
    forward: ForwardPass
    loader: Callable[[Dataset], Loader]  # of each row once
    console: Console

    def columns(self, training: Data, held_out: Dataset | None) -> tuple[Dataset, Dataset | None, str]:
        """Returns the data with the column, and where that came from.

        Raises UserError where there is none, and the model at hand is not the reference.
        """
        assert isinstance(training, Dataset)  # a rule refuses streams
        model = self._on_main(self._dependencies)
        training, found = self._column("train", training, model)
        return training, self._column("eval", held_out, model)[0] if held_out else None, found

    @property
    def _folder(self) -> Path:
        return run_folder(self.recipe) / "reference"

    def _dependencies(self) -> Dependencies:
        """Raises UserError where a run goes on whose reference was another model."""
        reference = recipe_of_reference(self.recipe)
        now = model_dependencies(reference, training_config(reference))
        before = read_report(self._folder / "train").get("dependencies", now)
        goes_on = self.recipe.checkpoint.resume == "auto" and list_checkpoints(run_folder(self.recipe) / "checkpoints")
        if goes_on and before["model"] != now["model"]:
            raise UserError(
                f"the weights of {reference.model.name!r} are not those with which this run began, and its reference "
                f"is these: restore them, or start over with another `run.name` or `checkpoint.resume=never`; to go on "
                f"with another reference all the same, remove {self._folder}"
            )
        return now

    def _column(self, part: str, data: Dataset, model: Dependencies) -> tuple[Dataset, str]:
        """part: train | eval; model: what the reference's log-probabilities depend on."""
        key, count, own = key_of(model, data), len(data.examples.sizes.lengths), self._folder / part
        found = self._on_main(lambda: self._find(own, key, count))
        if found is None:
            if self.recipe.objective.reference_model is not None:
                raise UserError(_missing(self.recipe))
            begun = time.monotonic()
            self._compute(part, key, data, model)
            found = f"computed in {time.monotonic() - begun:,.1f} s"
        self.engine.ranks.barrier()  # no rank looks for the file before it is there
        values = load(own, key, count)
        if values is None:
            raise RunFailure(f"{own}: was written a moment ago and cannot be read; is the disk in order?")
        return replace(data, examples=data.examples.with_columns({REFERENCE: values})), found

    def _on_main(self, call: Callable[[], Any]) -> Any:
        """Returns on every rank what `call` returns on the main one; raises there what it raises."""
        return self.engine.ranks.gather(call() if self.engine.is_main else None)[0]

    def _find(self, own: Path, key: str, count: int) -> str | None:
        """Returns where the log-probabilities were found; those of the cache are copied into the run's folder."""
        if load(own, key, count) is not None:
            return f"from {own}"
        cached = cache_folder(key)
        if (values := load(cached, key, count)) is None:
            return None
        save(own, values, read_report(cached))
        return f"from the cache, {cached}"

    def _compute(self, part: str, key: str, data: Dataset, model: Dependencies) -> None:
        """Computes them in blocks that are kept as they come, and writes them to the run's folder and the cache."""
        begun, loader = time.monotonic(), self.loader(data)
        count, steps = len(data.examples.sizes.lengths), -(-loader.total_rows // loader.rows_per_step)
        unfinished = Unfinished(self._folder / f"{key}.npy", count) if self.engine.is_main else None
        done = self._on_main(lambda: _done(loader, data, steps, unfinished))
        with (
            fed_steps(loader, range(done, steps), self.engine.device) as feed,
            PassProgress(self.console, f"reference, {part}", steps, done, self.engine.is_main) as progress,
        ):
            for step in range(done, steps):
                places = _places(loader, step, data)
                values = self._block(next(feed).batches, [len(of_batch) for of_batch in places])
                _check_finite(values, np.concatenate(places), data)
                if unfinished:
                    unfinished.values[np.concatenate(places)] = values
                progress.update(step + 1)
        if unfinished:
            report = described(recipe_of_reference(self.recipe), model, data, key, time.monotonic() - begun)
            for folder in (cache_folder(key), self._folder / part):
                save(folder, np.array(unfinished.values), report)
            unfinished.remove()

    def _block(self, batches: list[Batch], sizes: list[int]) -> NDArray[np.float64]:
        """Returns the log-probabilities of every sequence of a step, on every rank, one micro-batch after the other.

        sizes: sequences of each micro-batch of all ranks, by `Batch.index`.
        """
        local = [torch.zeros(size, dtype=torch.float64, device=self.engine.device) for size in sizes]
        with self.engine.evaluating():
            for batch, outputs in self.engine.forwards(batches, self.forward):
                if batch.origins:  # not a dummy
                    # Ranks that share tokens have parts of each sum, which the reduction adds up.
                    local[batch.index] = sequence_log_probs(outputs, batch, TokenRanks()).double()
        return self.engine.ranks.total({REFERENCE: torch.cat(local)})[REFERENCE].numpy()


def _places(loader: Loader, step: int, data: Dataset) -> list[NDArray[np.int64]]:
    """Returns where the sequences of each micro-batch of a step, over all ranks, are among all sequences."""
    assert isinstance(loader.rows, OrderedRows)  # of a stream nothing is computed beforehand
    offsets, members = data.examples.sizes.offsets, loader.rows.members
    return [
        np.concatenate([np.arange(offsets[i], offsets[i + 1]) for position in positions for i in members(position)])
        for positions in loader.row_positions(step)
    ]


def _done(loader: Loader, data: Dataset, steps: int, unfinished: Unfinished | None) -> int:
    """Returns how many steps from the first on are in the file of a stopped pass."""
    assert unfinished is not None  # on the main rank
    there = np.isfinite(unfinished.values)
    missing = (i for i in range(steps) if not there[np.concatenate(_places(loader, i, data))].all())
    return next(missing, steps)


def _check_finite(values: NDArray[np.float64], places: NDArray[np.int64], data: Dataset) -> None:
    """Raises RunFailure with the rows whose log-probabilities are not numbers."""
    wrong = places[~np.isfinite(values)]
    if len(wrong):
        examples = [data.examples[int(i)] for i in np.searchsorted(data.examples.sizes.offsets, wrong, "right") - 1]
        shown = ", ".join(dict.fromkeys(f"{example.path}:{example.row}" for example in examples[:20]))
        raise RunFailure(
            f"the reference's log-probabilities are not finite. Rows in question: {shown}. Check these rows with "
            "`finetune inspect`, or use train.precision: bf16 instead of fp16"
        )


def recipe_of_reference(recipe: Recipe) -> Recipe:
    """Returns the recipe whose initial model is the reference: itself, or the one with `objective.reference_model`."""
    name = recipe.objective.reference_model
    if name is None:
        return recipe
    tokenizer = {"tokenizer": recipe.model.tokenizer or recipe.model.name}
    model = recipe.model.model_copy(update={"name": name, "config": None, "revision": None, **tokenizer})
    objective = recipe.objective.model_copy(update={"reference_model": None})
    return recipe.model_copy(update={"model": model, "objective": objective})


def _missing(recipe: Recipe) -> str:
    return (
        f"objective.reference_model: {recipe.objective.reference_model!r}: its log-probabilities of this data have not "
        "been computed, or were under other settings; run `python -m finetune reference` with this recipe, on any "
        "launch, then train again"
    )


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


@contextlib.contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """The model as it was without adapters.

    By the flag that peft's layers read, and not by its `disable_adapter`, which also changes what requires gradients
    and activates all adapters at its end: backends have hooks on these parameters.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
