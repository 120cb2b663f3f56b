"""One run from recipe to result: the corridor.

    recipe -> tokenizer -> rows of tokens -> engine -> plan -> model -> steps -> result

Every room is entered once, in this order. What can fail for a reason the user can mend fails before the model loads.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from finetune.checkpoints import newest_good, resume, save_checkpoint
from finetune.data import Dataset, Loader, RowOrder, build_dataset, template_notes
from finetune.engine import Engine, autocast_forward, check_launch, read_launch, start_engine
from finetune.errors import UserError
from finetune.export import model_card, save_result
from finetune.models import (
    attention_for,
    check_token_ids,
    dtypes,
    load_model,
    load_tokenizer,
    model_config,
    parameter_counts,
)
from finetune.planning.plan import Plan, git_commit, run_length, versions
from finetune.recipe import Recipe, dump_recipe
from finetune.tracking import (
    StepLog,
    Trackers,
    TrainingProgress,
    check_trackers,
    prepare_samples,
    sample_file,
)
from finetune.training.evaluation import Evaluator, end_ids
from finetune.training.loop import State, StepMetrics, training_steps
from finetune.training.optimizers import build_optimizers
from finetune.training.report import show_evaluation, show_plan


def train(recipe: Recipe, recipe_file: str, console: Console | None = None) -> Path:
    """Run a recipe where this process was launched; returns the run directory.

    Raises UserError for what the user can mend, RunFailure for a run that had to stop.
    """
    launch = read_launch()
    micro_batches = check_launch(recipe, recipe_file, launch)
    check_trackers(recipe.tracking)
    tokenizer = load_tokenizer(recipe.model)
    config = model_config(recipe.model)
    check_token_ids(config, len(tokenizer))
    notes = template_notes(recipe, tokenizer)
    training = build_dataset(recipe, recipe.data.train, tokenizer)
    held_out = build_dataset(recipe, recipe.data.eval, tokenizer) if recipe.data.eval else None
    engine = start_engine(recipe, launch)
    make_run_folder(recipe)
    run = Run(recipe, engine, tokenizer, config, training, held_out, micro_batches, console or Console())
    for note in notes:
        run.say(f"note: {note}")
    try:
        run.execute()
    finally:
        engine.close()
    return run.folder


def run_folder(recipe: Recipe) -> Path:
    return Path(recipe.run.dir) / recipe.run.name


def make_run_folder(recipe: Recipe) -> None:
    """Raises UserError where results could not be written, before hours are spent on them."""
    folder = run_folder(recipe)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run.dir: {folder} cannot be made: {error.strerror}; choose another `run.dir`") from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"run.dir: {folder} cannot be written to; choose another `run.dir`")


class Run:
    """A started run: engine, data and model in place; `execute` trains, evaluates and saves."""

    def __init__(
        self,
        recipe: Recipe,
        engine: Engine,
        tokenizer: PreTrainedTokenizerFast,
        config: PretrainedConfig,
        training: Dataset,
        held_out: Dataset | None,
        micro_batches: int,
        console: Console,
    ):
        self.recipe, self.engine, self.tokenizer, self.console = recipe, engine, tokenizer, console
        self.training, self.held_out = training, held_out
        self.folder = run_folder(recipe)
        self.state = State()
        self.attention = attention_for(recipe, config, engine.device.type)
        self._isolate_documents()
        model = self._load(config)
        self.plan = self._plan(model, micro_batches)
        engine.wrap(model, lambda named: build_optimizers(recipe.optimizer, named), micro_batches)
        self.loader = self._loader(self.training, self.plan.total_rows)
        self.evaluator = self._evaluator()
        self.checkpoints = self.folder / "checkpoints"
        self._resume()
        self.evaluation: dict[str, float] = {}
        self.last: StepMetrics | None = None

    def _isolate_documents(self) -> None:
        """Where an architecture cannot keep documents apart: one per forward, said aloud."""
        if self.attention.isolates_documents:
            return
        if self.recipe.batch.rows_per_device != 1:
            raise UserError(f"{self.attention.reason}: set batch.rows_per_device: 1")
        if self.recipe.data.packing:
            self.say(f"[yellow]{self.attention.reason}; packing is off[/yellow]")
        self.training = self.training.unpacked()
        self.held_out = self.held_out.unpacked() if self.held_out else None

    def _load(self, config: PretrainedConfig) -> Any:
        with self.engine.loading(self.recipe):
            model = load_model(self.recipe, config, self.attention, self.engine.placement(self.recipe))
        types = dtypes(self.recipe)
        if types.compute != types.trained:
            autocast_forward(model, types.compute, self.engine.device.type)
        return model

    def _plan(self, model: Any, micro_batches: int) -> Plan:
        recipe, data = self.recipe, self.training
        steps, total_rows = run_length(recipe, len(data.rows))
        parameters, trained = parameter_counts(model)
        return Plan(
            where=self.engine.launch.where,
            world_size=self.engine.world_size,
            device=device_name(self.engine),
            steps=steps,
            micro_batches=micro_batches,
            rows_per_epoch=len(data.rows),
            total_rows=total_rows,
            examples=len(data.examples),
            tokens_per_epoch=data.tokens,
            supervised_tokens_per_epoch=data.supervised_tokens,
            packing_efficiency=data.efficiency(recipe.data.max_length),
            parameters=parameters,
            trainable_parameters=trained,
            attention=f"{self.attention.implementation} ({self.attention.reason})",
            precision=recipe.train.precision,
            versions=versions(),
            git_commit=git_commit(),
        )

    def _loader(self, data: Dataset, total_rows: int) -> Loader:
        recipe, engine = self.recipe, self.engine
        order = RowOrder(len(data.rows), recipe.run.seed)
        batch = recipe.batch
        return Loader(
            data.examples,
            data.rows,
            order,
            batch.rows,
            batch.rows_per_device,
            engine.rank,
            engine.world_size,
            total_rows,
        )

    def _evaluator(self) -> Evaluator | None:
        if self.held_out is None:
            return None
        loader = self._loader(self.held_out, len(self.held_out.rows))
        return Evaluator(self.engine, loader, self.attention, self.tokenizer, self.recipe.evaluate)

    def _resume(self) -> None:
        """Go on from the newest checkpoint that verifies, or from step 0."""
        if self.recipe.checkpoint.resume == "never":
            return
        if (found := newest_good(self.engine, self.checkpoints)) is not None:
            self.state = State(**resume(self.engine, self.recipe, found))
            self.say(f"resuming from {found}: step {self.state.step} of {self.plan.steps}")

    # --- the run

    def execute(self) -> None:
        main = self.engine.is_main
        if main:
            (self.folder / "recipe.yaml").write_text(dump_recipe(self.recipe), encoding="utf-8")
            self.plan.write(self.folder / "plan.json")
            show_plan(self.console, self.recipe, self.plan)
        self._metrics = StepLog(self.folder / "metrics.jsonl", self.state.step + 1) if main else None
        self._samples = self._sample_log()
        configuration = {"recipe": self.recipe.model_dump(mode="json"), "plan": asdict(self.plan)}
        goes_on = self.state.step > 0
        self._trackers = Trackers(self.recipe, self.folder, configuration, goes_on) if main else None
        self._train()
        self._save()
        if self._trackers and self._metrics:
            self._trackers.summary(self.evaluation)
            self._trackers.finish()
            self._metrics.close()

    def _train(self) -> None:
        if self.state.step == 0 and self.recipe.evaluate.at_start:
            self._evaluate()
        every, save_every = self.recipe.evaluate.every_steps, self.recipe.checkpoint.every_steps
        with TrainingProgress(self.console, self.plan.steps, self.state.step, self.engine.is_main) as progress:
            for step in training_steps(self.engine, self.loader, self.attention, self.recipe, self.plan, self.state):
                self.last = metrics = step.metrics
                self._log(asdict(metrics), metrics.step)
                if self._samples:
                    self._samples.write({"step": metrics.step, "rows": step.rows})
                progress.update(metrics.step, metrics.loss, metrics.tokens_per_s)
                if every and metrics.step % every == 0 and metrics.step < self.plan.steps:
                    self._evaluate()
                if save_every and (metrics.step % save_every == 0 or metrics.step == self.plan.steps):
                    save_checkpoint(self.engine, self.recipe, asdict(self.state), self.checkpoints)
        self._evaluate()

    def _sample_log(self) -> StepLog | None:
        if not self.recipe.tracking.samples:
            return None
        folder, first_step = self.folder / "samples", self.state.step + 1
        if self.engine.is_main:
            prepare_samples(folder, first_step)
        self.engine.barrier()
        return StepLog(sample_file(folder, self.engine.rank), first_step)

    def _evaluate(self) -> None:
        if self.evaluator is None:
            return
        self.evaluation, generations = self.evaluator.run()
        self._log({"step": self.state.step, **self.evaluation}, self.state.step)
        if self.engine.is_main:
            show_evaluation(self.console, self.state.step, self.evaluation, generations)
        if self._trackers and generations:
            rows = [[g.prompt, g.output, g.reference] for g in generations]
            self._trackers.table("generations", ["prompt", "output", "reference"], rows, self.state.step)

    def _log(self, entry: dict[str, Any], step: int) -> None:
        if self._metrics and self._trackers:
            self._metrics.write(entry)
            self._trackers.log(entry, step)

    def _save(self) -> None:
        ends = end_ids(self.training.examples, self.tokenizer)
        loss = self.last.loss if self.last else None  # none where a finished run was only evaluated again
        card = model_card(self.recipe, asdict(self.plan), asdict(self.state), loss, self.evaluation)
        adapter = self.recipe.mode != "full"
        save_result(self.engine, self.tokenizer, ends, adapter, dtypes(self.recipe).frozen, card, self.folder / "model")
        self.say(f"saved [bold]{self.folder / 'model'}[/bold]")

    def say(self, text: str) -> None:
        if self.engine.is_main:
            self.console.print(text)


def device_name(engine: Engine) -> str:
    import torch

    return torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else engine.device.type
