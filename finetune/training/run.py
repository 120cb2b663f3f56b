"""One run from recipe to result: the corridor.

    recipe -> tokenizer -> rows of tokens -> engine -> plan -> model -> steps -> result

Every room is entered once, in this order. What can fail for a reason the user can mend fails before the model loads.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.markup import escape

from finetune.checkpoints.saver import Saver
from finetune.data.building import OpenedSources
from finetune.data.dataset import build_held_out, build_training, template_notes
from finetune.data.questions import check_questions
from finetune.engine.agreement import check_launch
from finetune.engine.launch import read_launch
from finetune.engine.start import start_engine
from finetune.errors import Stopped
from finetune.export.card import model_card
from finetune.export.result import save_result
from finetune.models.compiled import CompilationWatch, compilations
from finetune.models.config import check_token_ids, model_config
from finetune.models.dropout import check_nothing_random
from finetune.models.tokenizer import load_tokenizer
from finetune.models.weights import dtypes
from finetune.recipe import Recipe, dump_recipe
from finetune.tracking import (
    Status,
    Totals,
    TrainingProgress,
    check_trackers,
    read_steps,
    write_status,
)
from finetune.training.feed import fed_steps
from finetune.training.loop import Step, StepMetrics, Wishes, training_steps
from finetune.training.profile_summary import show_profile
from finetune.training.report import show_evaluation, show_plan, show_totals
from finetune.training.routing import ExpertLoad
from finetune.training.run_folder import in_use, make_run_folder, run_folder
from finetune.training.run_log import RunLog
from finetune.training.setup import Ready, set_up
from finetune.training.stop import StopRequest


def train(
    recipe: Recipe, recipe_file: str, stop: StopRequest, console: Console | None = None, config_file: str | None = None
) -> Path:
    """Run a recipe where this process was launched; returns the run directory.

    config_file: an accelerate config, where torchrun launched. Raises UserError for what the user can mend, RunFailure
    for a run that had to stop, Stopped for one that was asked to and saved.
    """
    launch = read_launch(config_file)
    if launch.launched:
        stop.watch_launcher()
    config = model_config(recipe.model)
    micro_batches = check_launch(recipe, recipe_file, launch, config)
    check_trackers(recipe.tracking)
    tokenizer = load_tokenizer(recipe.model)
    check_token_ids(config, len(tokenizer))
    if recipe.batch.rows_per_device == "auto":
        check_nothing_random(config)
    opened = OpenedSources(recipe)
    notes = template_notes(recipe, tokenizer, opened)
    training = build_training(recipe, tokenizer, opened)
    held_out = build_held_out(recipe, tokenizer, opened)
    notes += check_questions(recipe.evaluate, held_out.examples, tokenizer) if held_out else []
    engine = start_engine(recipe, launch)
    make_run_folder(recipe)
    with in_use(engine, run_folder(recipe)):
        ready = set_up(recipe, engine, tokenizer, config, training, held_out, micro_batches, console or Console())
        for note in notes:
            ready.say(f"note: {note}")
        try:
            Run(ready, stop).execute()
        except Stopped:
            engine.barrier()  # a launcher ends every process as soon as the first has left
            raise
        finally:
            engine.close()
    return ready.folder


class Run:
    """A run that is set up: `execute` trains, evaluates and saves."""

    def __init__(self, ready: Ready, stop: StopRequest):
        self.ready, self.stop = ready, stop
        # what nearly every line below speaks of
        self.recipe, self.engine, self.plan, self.state = ready.recipe, ready.engine, ready.plan, ready.state
        self.folder, self.say, self.console = ready.folder, ready.say, ready.console
        self.totals, self._expert_load = Totals(), ExpertLoad()
        self.evaluation: dict[str, float] = {}
        self.last: StepMetrics | None = None

    def execute(self) -> None:
        """Raises Stopped after a save where a signal asked for it."""
        if self.engine.is_main:
            (self.folder / "recipe.yaml").write_text(dump_recipe(self.recipe), encoding="utf-8")
            self.plan.write(self.folder / "plan.json")
            show_plan(self.console, self.recipe, self.plan)
        about = {"recipe": self.recipe.model_dump(mode="json"), "plan": asdict(self.plan)}
        self._run_log = RunLog(self.engine, self.recipe, self.folder, self.state.step + 1, about, self.ready.trackers)
        self._saver = Saver(self.engine, self.recipe, self.ready.checkpoints, self._about())
        self._saved_at, self._saved_before = time.monotonic(), False
        try:
            self._train()
            self._write_expert_load()
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
            "data": self.ready.training.summary(),
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
        names, coming = self.ready.training.source_names, range(self.state.step, self.plan.steps)
        self._profile({})
        with (
            fed_steps(self.ready.loader, coming, self.engine.device) as feed,
            TrainingProgress(self.console, self.plan.steps, self.state.step, self.engine.is_main) as progress,
        ):
            for step in training_steps(
                self.engine,
                feed,
                self.ready.attention,
                self.ready.head,
                self.recipe,
                self.plan,
                self.state,
                names,
                self._wishes,
                self.ready.meters,
                self.ready.routing,
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
        self._expert_load.add(step.metrics.step, step.expert_load)
        line = {**asdict(step.metrics), **step.measured, **step.by_source, **step.routing, **compiled}
        self._run_log.write(line, step.metrics.step)
        self.totals.add(line)
        self._run_log.rows(step.metrics.step, step.rows)

    def _between_steps(self, wishes: Wishes) -> None:
        """Evaluate, save, stop: what is due, the same on every rank."""
        if wishes.settle:
            with self.ready.meters.clock.stall("checkpoint"):
                self._saver.settle()
        measured = {}
        if self._evaluation_due() and not wishes.stop:  # one that is left out is made when the run goes on
            with self.ready.meters.clock.stall("evaluation"):
                measured = self._evaluate()
        if wishes.stop or self._save_due(measured, wishes):
            with self.ready.meters.clock.stall("checkpoint"):
                self._save_checkpoint(measured)
        if wishes.stop:
            self._leave()

    def _profile(self, line: dict[str, float]) -> None:
        """Begin and end what `profile` asks for. line: of the step that was just made; empty before the first."""
        if self.ready.profiler is None:
            return
        if not line and self.ready.profiler.misses(self.state.step):
            self.say(f"note: profile.steps: nothing is traced, this launch begins behind step {self.state.step}")
        turns = self.ready.profiler.turns(self.state.step)
        with self.ready.meters.clock.stall("profile") if turns else contextlib.nullcontext():
            found = self.ready.profiler.after(self.state.step, line)
        if found:
            show_profile(self.console, found)

    def _evaluation_due(self) -> bool:
        step, every = self.state.step, self.recipe.evaluate.every_steps
        if self.ready.evaluator is None:
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
        assert self.ready.evaluator is not None  # what is due has data
        self.evaluation, generations = self.ready.evaluator.run()
        self._compilations.evaluated()
        self._write_expert_load()
        self._run_log.write({"step": self.state.step, **self.evaluation}, self.state.step)
        if self.engine.is_main:
            show_evaluation(self.console, self.state.step, self.evaluation, generations)
        if generations:
            rows = [[g.prompt, g.output, g.reference] for g in generations]
            self._run_log.table("generations", ["prompt", "output", "reference"], rows, self.state.step)
        return self.evaluation

    def _write_expert_load(self) -> None:
        if self.engine.is_main:
            self._expert_load.write(self.folder)

    def _save_result(self) -> None:
        tokenizer, frozen = self.ready.tokenizer, dtypes(self.recipe).frozen
        loss = self.last.loss if self.last else None  # none where a finished run was only evaluated again
        card = model_card(self.recipe, asdict(self.plan), asdict(self.state), loss, self.evaluation)
        adapter = self.recipe.mode != "full"
        save_result(self.engine, tokenizer, self.ready.end_ids, adapter, frozen, card, self.folder / "model")
        self.say(f"saved [bold]{self.folder / 'model'}[/bold]")

    def _write_status(self, status: Status) -> None:
        if self.engine.is_main:
            write_status(self.folder, status, self.state.step, self.plan.steps)
