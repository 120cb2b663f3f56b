"""One run from recipe to result: the corridor.

    recipe -> tokenizer -> rows of tokens -> engine -> plan -> model -> steps -> result

Every room is entered once, in this order. What can fail for a reason the user can mend fails before the model loads.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.markup import escape
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from finetune.checkpoints.resume import newest_good, resume, start_anew
from finetune.checkpoints.saver import Saver
from finetune.data.batch import Loader, OrderedRows, RunRows
from finetune.data.dataset import Dataset, Stream, build_dataset, build_training, template_notes
from finetune.engine.base import Engine
from finetune.engine.launch import check_launch, read_launch
from finetune.engine.precision import autocast_forward
from finetune.engine.start import start_engine
from finetune.errors import Stopped, UserError
from finetune.export.card import model_card
from finetune.export.result import save_result
from finetune.models.compiled import CompilationWatch, compilations
from finetune.models.config import check_token_ids, model_config
from finetune.models.dropout import check_nothing_random
from finetune.models.head import Formula, attach_head
from finetune.models.offload import offload_activations
from finetune.models.tokenizer import load_tokenizer
from finetune.models.weights import attention_for, dtypes, load_model, parameter_counts
from finetune.planning.flops import model_flops
from finetune.planning.hardware import peak_tflops
from finetune.planning.plan import Plan, git_commit, run_length, versions
from finetune.recipe import Recipe, dump_recipe
from finetune.tracking import (
    Meters,
    Status,
    Totals,
    TrainingProgress,
    check_trackers,
    read_steps,
    write_status,
)
from finetune.training.evaluation import Evaluator, end_ids
from finetune.training.feed import fed_steps
from finetune.training.fit import FoundRows, find_rows, memory_of
from finetune.training.loop import State, Step, StepMetrics, Wishes, training_steps
from finetune.training.optimizers import build_optimizers
from finetune.training.profile import Profiler
from finetune.training.profile_summary import show_profile
from finetune.training.report import show_evaluation, show_plan, show_totals
from finetune.training.run_folder import in_use, make_run_folder, run_folder
from finetune.training.run_log import RunLog
from finetune.training.stop import StopRequest


def train(recipe: Recipe, recipe_file: str, stop: StopRequest, console: Console | None = None) -> Path:
    """Run a recipe where this process was launched; returns the run directory.

    Raises UserError for what the user can mend, RunFailure for a run that had to stop, Stopped for one that was asked
    to and saved.
    """
    launch = read_launch()
    if launch.launched:
        stop.watch_launcher()
    config = model_config(recipe.model)
    micro_batches = check_launch(recipe, recipe_file, launch, config)
    check_trackers(recipe.tracking)
    tokenizer = load_tokenizer(recipe.model)
    check_token_ids(config, len(tokenizer))
    if recipe.batch.rows_per_device == "auto":
        check_nothing_random(config)
    notes = template_notes(recipe, tokenizer)
    training = build_training(recipe, tokenizer)
    held_out = build_dataset(recipe, recipe.data.eval, tokenizer) if recipe.data.eval else None
    engine = start_engine(recipe, launch)
    make_run_folder(recipe)
    with in_use(engine, run_folder(recipe)):
        run = Run(recipe, engine, tokenizer, config, training, held_out, micro_batches, console or Console(), stop)
        for note in notes:
            run.say(f"note: {note}")
        try:
            run.execute()
        except Stopped:
            engine.barrier()  # a launcher ends every process as soon as the first has left
            raise
        finally:
            engine.close()
    return run.folder


class Run:
    """A started run: engine, data and model in place; `execute` trains, evaluates and saves."""

    def __init__(
        self,
        recipe: Recipe,
        engine: Engine,
        tokenizer: PreTrainedTokenizerFast,
        config: PretrainedConfig,
        training: Dataset | Stream,
        held_out: Dataset | None,
        micro_batches: int,
        console: Console,
        stop: StopRequest,
    ):
        self.recipe, self.engine, self.tokenizer, self.console = recipe, engine, tokenizer, console
        self.stop = stop
        self.training, self.held_out = training, held_out
        self.folder = run_folder(recipe)
        self.state = State()
        self.attention = attention_for(recipe, config, engine.device.type)
        self._isolate_documents()
        model = self._load(config)
        counts = parameter_counts(model)
        flops = model_flops(model, self.attention.implementation, recipe.train.activation_checkpointing)
        engine.wrap(model, partial(build_optimizers, recipe.optimizer), micro_batches)
        self.rows = self._rows_per_device(config)
        self.plan = self._plan(counts, micro_batches)
        self.profiler = Profiler(recipe.profile, engine, self.folder, self.plan.steps) if recipe.profile else None
        self.meters, self.totals = Meters(engine, flops, self._peak()), Totals()
        self.loader = self._loader(self.training.in_order(recipe), self.plan.total_rows)
        self.evaluator = self._evaluator()
        self.checkpoints = self.folder / "checkpoints"
        self.trackers: dict[str, str] = {}  # run ids that a checkpoint knows
        self._resume()
        self.evaluation: dict[str, float] = {}
        self.last: StepMetrics | None = None

    def _isolate_documents(self) -> None:
        """Where an architecture cannot keep documents apart: one per forward, said aloud."""
        if self.attention.isolates_documents:
            return
        if self.recipe.batch.rows_per_device not in (1, "auto") or self.recipe.batch.tokens_per_device is not None:
            raise UserError(f"{self.attention.reason}: set batch.rows_per_device: 1, and no tokens_per_device")
        if self.recipe.data.packing:
            self.say(f"[yellow]{self.attention.reason}; packing is off[/yellow]")
        self.training = self.training.unpacked()
        self.held_out = self.held_out.unpacked() if self.held_out else None

    def _load(self, config: PretrainedConfig) -> Any:
        with self.engine.loading(self.recipe):
            model = load_model(self.recipe, config, self.attention, self.engine.placement(self.recipe))
        objective = self.recipe.objective
        formula = Formula(objective.z_loss, objective.label_smoothing)
        self.head = attach_head(model, self.recipe.model.cross_entropy, formula, self.engine.device.type)
        types = dtypes(self.recipe)
        if types.compute != types.trained:
            autocast_forward(model, types.compute, self.engine.device.type)
        if self.recipe.train.activation_offload:
            offload_activations(model, self.engine.device)
            if self.engine.device.type == "cpu":
                self.say("note: activation_offload: this run is in the host's memory already; it only makes copies")
        return model

    def _rows_per_device(self, config: PretrainedConfig) -> FoundRows:
        """In one forward. Collective where they are to be found."""
        recipe, engine = self.recipe, self.engine
        if recipe.batch.rows_per_device != "auto":
            return FoundRows(recipe.batch.rows_per_device, "asked for in the recipe")
        if not self.attention.isolates_documents:
            return FoundRows(1, f"auto: {self.attention.reason}")
        build = partial(build_optimizers, recipe.optimizer)
        memory = memory_of(engine)
        return find_rows(engine, recipe, config, self.attention, self.head, self.training, build, memory, self.say)

    def _plan(self, counts: tuple[int, int], micro_batches: int) -> Plan:
        recipe, size = self.recipe, self.training.size(self.recipe.data.max_length)
        steps, total_rows = run_length(recipe, size.rows if size else None)
        (parameters, trained), budget = counts, recipe.batch.tokens_per_device
        if budget is None:
            micro_batches = recipe.batch.rows // (self.rows.rows * self.engine.parallelism.data)
        return Plan(
            where=self.engine.launch.where,
            world_size=self.engine.world_size,
            device=device_name(self.engine),
            steps=steps,
            micro_batches=micro_batches,
            rows_per_device=self.rows.rows if budget is None else None,
            rows_per_device_reason=self.rows.reason if budget is None else "batch.tokens_per_device",
            rows_per_epoch=size.rows if size else None,
            total_rows=total_rows,
            examples=size.examples if size else None,
            tokens_per_epoch=size.tokens if size else None,
            supervised_tokens_per_epoch=size.supervised_tokens if size else None,
            packing_efficiency=size.packing_efficiency if size else None,
            parameters=parameters,
            trainable_parameters=trained,
            attention=f"{self.attention.implementation} ({self.attention.reason})",
            cross_entropy=f"{self.head.choice.implementation} ({self.head.choice.reason})",
            precision=recipe.train.precision,
            versions=versions(),
            git_commit=git_commit(),
        )

    def _peak(self) -> float | None:
        """TFLOP/s of one device, the denominator of MFU."""
        if self.engine.device.type != "cuda":
            return None
        peak = peak_tflops(self.plan.device, dtypes(self.recipe).compute)
        if peak is None:
            self.say(f"note: no peak of {self.plan.device} in planning/hardware.py, so no MFU")
        return peak

    def _loader(self, rows: RunRows, total_rows: int) -> Loader:
        batch, engine = self.recipe.batch, self.engine
        return Loader(
            rows,
            batch.rows,
            self.rows.rows,
            engine.data_rank,
            engine.parallelism.data,
            total_rows,
            batch.tokens_per_device,
            self._forward_tokens(),
        )

    def _forward_tokens(self) -> int | None:
        """Tokens that every forward is padded to: compiled layers are compiled for one length."""
        batch = self.recipe.batch
        if not self.recipe.train.compile:
            return None
        return batch.tokens_per_device or self.rows.rows * self.recipe.data.max_length

    def _evaluator(self) -> Evaluator | None:
        if self.held_out is None:
            return None
        examples, rows = self.held_out.examples, self.held_out.rows
        loader = self._loader(OrderedRows(examples, rows), len(rows))
        names = self.held_out.source_names
        evaluate = self.recipe.evaluate
        return Evaluator(self.engine, loader, examples, self.attention, self.head, self.tokenizer, evaluate, names)

    def _resume(self) -> None:
        """Go on from the newest checkpoint that verifies, or from step 0."""
        if self.recipe.checkpoint.resume == "never":
            for folder in start_anew(self.checkpoints) if self.engine.is_main else []:
                self.say(f"note: the checkpoint of an earlier run is now {folder}")
            return
        if (found := newest_good(self.engine, self.checkpoints)) is None:
            return
        resumed = resume(self.engine, self.recipe, found, self.training.facts())
        self.state, self.trackers = State(**resumed.progress), resumed.trackers
        self.say(f"resuming from {found}: step {self.state.step} of {self.plan.steps}")
        for change in resumed.changes:
            self.say(f"changed since then: {escape(change)}")

    # --- the run

    def execute(self) -> None:
        """Raises Stopped after a save where a signal asked for it."""
        if self.engine.is_main:
            (self.folder / "recipe.yaml").write_text(dump_recipe(self.recipe), encoding="utf-8")
            self.plan.write(self.folder / "plan.json")
            show_plan(self.console, self.recipe, self.plan)
        about = {"recipe": self.recipe.model_dump(mode="json"), "plan": asdict(self.plan)}
        self._run_log = RunLog(self.engine, self.recipe, self.folder, self.state.step + 1, about, self.trackers)
        self._saver = Saver(self.engine, self.recipe, self.checkpoints, self._about())
        self._saved_at, self._saved_before = time.monotonic(), False
        try:
            self._train()
            self._saver.settle()
            if self.engine.is_main:
                show_totals(self.console, self.totals)
            self._saver.tidy()
            self._saver.close()  # its memory makes room for the result's
            self._save_result()
            self._run_log.finish(self.evaluation)
            self._write_status("finished")
        finally:
            self._saver.close()
            self._run_log.close()

    def _about(self) -> dict[str, Any]:
        """What a checkpoint says of the run beside its progress."""
        return {
            "steps": self.plan.steps,
            "data": self.training.facts(),
            "trackers": self._run_log.run_ids(),
            "versions": self.plan.versions,
            "git_commit": self.plan.git_commit,
        }

    def _train(self) -> None:
        self._compilations = CompilationWatch()
        self.evaluation = self._recorded_evaluation()
        if not self.evaluation and self._evaluation_due():
            self._evaluate()
        self._write_status("running")  # a signal before this leaves nothing to save: 75 at once
        self.stop.steps_begun = True
        names, coming = self.training.source_names, range(self.state.step, self.plan.steps)
        self._profile({})
        with (
            fed_steps(self.loader, coming, self.engine.device) as feed,
            TrainingProgress(self.console, self.plan.steps, self.state.step, self.engine.is_main) as progress,
        ):
            for step in training_steps(
                self.engine,
                feed,
                self.attention,
                self.head,
                self.recipe,
                self.plan,
                self.state,
                names,
                self._wishes,
                self.meters,
            ):
                self._record(step)
                progress.update(
                    step.metrics.step, step.metrics.loss, step.metrics.tokens_per_s, step.measured.get("mfu")
                )
                self._profile({"step_s": step.metrics.step_s, **step.measured})
                self._between_steps(step.wishes)

    def _wishes(self) -> Wishes:
        minutes = self.recipe.checkpoint.every_minutes
        overdue = minutes is not None and time.monotonic() - self._saved_at >= minutes * 60
        return Wishes(
            stop=float(self.stop.reason is not None),
            save=float(overdue and self.engine.is_main),  # one clock decides
            settle=float(self._saver.failed),
        )

    def _record(self, step: Step) -> None:
        self.last = step.metrics
        compiled: dict[str, int] = {}
        if self.recipe.train.compile:
            compiled["compilations"] = compilations()
            if (warning := self._compilations.step_done()) is not None:
                self.say(f"[yellow]{escape(warning)}[/yellow]")
        line = {**asdict(step.metrics), **step.measured, **step.by_source, **compiled}
        self._run_log.write(line, step.metrics.step)
        self.totals.add(line)
        self._run_log.rows(step.metrics.step, step.rows)

    def _between_steps(self, wishes: Wishes) -> None:
        """Evaluate, save, stop: what is due, the same on every rank."""
        if wishes.settle:
            with self.meters.clock.stall("checkpoint"):
                self._saver.settle()
        measured = {}
        if self._evaluation_due() and not wishes.stop:  # one that is left out is made when the run goes on
            with self.meters.clock.stall("evaluation"):
                measured = self._evaluate()
        if wishes.stop or self._save_due(measured, wishes):
            with self.meters.clock.stall("checkpoint"):
                self._save_checkpoint(measured)
        if wishes.stop:
            self._leave()

    def _profile(self, line: dict[str, float]) -> None:
        """Begin and end what `profile` asks for. line: of the step that was just made; empty before the first."""
        if self.profiler is None:
            return
        if not line and self.profiler.misses(self.state.step):
            self.say(f"note: profile.steps: nothing is traced, this launch begins behind step {self.state.step}")
        turns = self.profiler.turns(self.state.step)
        with self.meters.clock.stall("profile") if turns else contextlib.nullcontext():
            found = self.profiler.after(self.state.step, line)
        if found:
            show_profile(self.console, found)

    def _evaluation_due(self) -> bool:
        step, every = self.state.step, self.recipe.evaluate.every_steps
        if self.evaluator is None:
            return False
        if step == 0:
            return self.recipe.evaluate.at_start
        return step == self.plan.steps or bool(every and step % every == 0)

    def _save_due(self, measured: dict[str, float], wishes: Wishes) -> bool:
        settings, step = self.recipe.checkpoint, self.state.step
        if settings.every_steps and step % settings.every_steps == 0:
            return True
        asked_for = settings.every_steps or settings.every_minutes or settings.best
        at_the_end = asked_for and step == self.plan.steps
        return bool(wishes.save or at_the_end or self._saver.improves(measured))

    def _save_checkpoint(self, measured: dict[str, float]) -> None:
        self._run_log.flush()
        size = self._saver.save(asdict(self.state), measured)
        self._saved_at = time.monotonic()
        if not self._saved_before:
            beside = ", copied to CPU memory and written beside the steps" if self._saver.asynchronous else ""
            self.say(f"step {self.state.step}: first checkpoint, {size / 2**20:,.1f} MiB of each process{beside}")
        self._saved_before = True

    def _leave(self) -> NoReturn:
        """After a signal, with everything on the disk."""
        self._saver.settle(must=True)
        reasons = sorted({reason for reason in self.engine.gather(self.stop.reason) if reason})
        self._run_log.finish_preempted()
        self._write_status("stopped")
        raise Stopped(
            f"stopped by {', '.join(reasons)} after step {self.state.step} of {self.plan.steps}; "
            "the same command goes on from there"
        )

    def _recorded_evaluation(self) -> dict[str, float]:
        """Of this step, where an earlier launch of this run made it; empty elsewhere. Collective."""
        lines = read_steps(self.folder / "metrics.jsonl") if self.engine.is_main else []
        found = [line for line in lines if line["step"] == self.state.step and "eval_loss" in line]
        recorded = {key: value for key, value in found[-1].items() if key != "step"} if found else {}
        return self.engine.gather(recorded)[0]

    def _evaluate(self) -> dict[str, float]:
        assert self.evaluator is not None  # what is due has data
        self.evaluation, generations = self.evaluator.run()
        self._compilations.evaluated()
        self._run_log.write({"step": self.state.step, **self.evaluation}, self.state.step)
        if self.engine.is_main:
            show_evaluation(self.console, self.state.step, self.evaluation, generations)
        if generations:
            rows = [[g.prompt, g.output, g.reference] for g in generations]
            self._run_log.table("generations", ["prompt", "output", "reference"], rows, self.state.step)
        return self.evaluation

    def _save_result(self) -> None:
        ends = end_ids(self.training.first_example(), self.tokenizer)
        loss = self.last.loss if self.last else None  # none where a finished run was only evaluated again
        card = model_card(self.recipe, asdict(self.plan), asdict(self.state), loss, self.evaluation)
        adapter = self.recipe.mode != "full"
        save_result(self.engine, self.tokenizer, ends, adapter, dtypes(self.recipe).frozen, card, self.folder / "model")
        self.say(f"saved [bold]{self.folder / 'model'}[/bold]")

    def _write_status(self, status: Status) -> None:
        if self.engine.is_main:
            write_status(self.folder, status, self.state.step, self.plan.steps)

    def say(self, text: str) -> None:
        if self.engine.is_main:
            self.console.print(text)


def device_name(engine: Engine) -> str:
    import torch

    return torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else engine.device.type
