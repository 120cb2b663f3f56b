"""The training loop, from top to bottom: every step, and what is due between steps.

    batches -> forward -> terms of the objective -> backward -> one reduction of all sums -> optimizer -> one line

It knows no objective by name and nothing of how tensors lie on devices; the engine knows nothing of steps.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from torch import Tensor

from finetune.checkpoints.folder import best_checkpoint
from finetune.checkpoints.inputs import read_inputs
from finetune.checkpoints.model_card import model_card
from finetune.checkpoints.result import save_result, write_tokenizer
from finetune.checkpoints.resume import resume_own
from finetune.checkpoints.saver import Saver
from finetune.data.batch import Batch
from finetune.data.examples import media_reader
from finetune.data.loader import StepBatches
from finetune.data.prefetch import Feed, fed_steps
from finetune.data.token_text import RECORDED, recorded
from finetune.engine.base import Engine
from finetune.engine.context_parallel import apply_context_parallel
from finetune.engine.graphs import CudaRecorder, Graphs, graph_problem
from finetune.engine.hardware import peak_tflops
from finetune.engine.launch import collective_timeout
from finetune.engine.optimizer_step import NonFinite
from finetune.engine.product_speed import emulation_note
from finetune.engine.start import set_group_timeouts
from finetune.errors import RunFailure, Stopped, UserError
from finetune.models.base_config import dtypes
from finetune.models.casts import cast_once
from finetune.models.compiled import CompilationWatch, compilations
from finetune.models.dropout import seed_micro_batch
from finetune.models.parameter_roles import parameter_roles
from finetune.models.wrapped import Outputs
from finetune.objectives import make_objective
from finetune.objectives.forward import ForwardPass
from finetune.objectives.objective import Sums, TermSums
from finetune.objectives.shared_prompts import with_shared_prompts
from finetune.recipe import dump_recipe
from finetune.recipe.schema import is_better
from finetune.tracking.headline import progress_text
from finetune.tracking.meters import Meters
from finetune.tracking.metrics import EXAMPLES, Status, Totals, read_metrics, read_status, write_status
from finetune.tracking.watches import CoresWatch, PaceWatch, VarianceWatch
from finetune.training import parts
from finetune.training.display import next_command, show_evaluation, show_plan, show_totals
from finetune.training.evaluation import Evaluator, as_columns, end_ids, sum_terms
from finetune.training.optim import build_optimizers, lr_factor
from finetune.training.prepare import Prepared, Push
from finetune.training.profile import Profiler, show_profile
from finetune.training.reference import AdaptersOff, ReferenceColumns, reads_columns
from finetune.training.run_dir import ExpertLoad, RunLog, disk_failure, run_folder
from finetune.training.run_lock import RunLock
from finetune.training.run_plan import measure_run
from finetune.training.signals import StopRequest
from finetune.training.state import TrainingState, resumed_state
from finetune.utils import ProgressBar, print_line, write_atomically

Line = dict[str, Any]  # of metrics.jsonl


@dataclass(frozen=True)
class StepFlags:
    """Requests of a rank at the end of a step; summed over the ranks with the loss, so that all act alike."""

    stop: bool  # a signal was received
    save: bool  # `checkpoint.every_minutes` have passed
    settle: bool  # a checkpoint that was being written has failed
    lost: bool  # another launch has taken the run's folder


class Trainer:
    """A run, ready to start: `run` trains, evaluates and saves."""

    def __init__(
        self,
        prepared: Prepared,
        engine: Engine,
        stop: StopRequest,
        console: Console,
        predicted: dict[str, Any] | None = None,
        run_lock: RunLock | None = None,
    ):
        """Loads the model, wraps it by the engine, and resumes from the newest checkpoint. Collective.

        predicted: entry of plan.json, on the main rank; run_lock: lock of the run's folder. Raises UserError.
        """
        self.recipe, self.engine, self.stop, self.console = prepared.recipe, engine, stop, console
        self.features = prepared.features
        self.push: Push | None = None  # of `run.push`, on the main rank
        self.tokenizer, self.folder, self.run_lock = prepared.base.tokenizer, run_folder(prepared.recipe.run), run_lock
        prepared, full_rows = prepared.on(engine.device.type)
        for note in prepared.notes:
            self.say(f"note: {escape(note)}")
        if engine.is_main and (slow := emulation_note(self.recipe.train, self.recipe.quantization, engine.device)):
            self.say(f"[yellow]warning: {escape(slow)}[/yellow]")
        recipe, training, held_out = prepared.recipe, prepared.training, prepared.held_out
        attention = apply_context_parallel(full_rows, engine.context_shard, engine.parallelism, engine.rank)
        columns = None
        if reads_columns(recipe.objective):
            columns = ReferenceColumns(recipe, engine, training, held_out, console)
        attention = with_shared_prompts(recipe.objective, recipe.rollouts is not None, attention)
        config = copy.deepcopy(prepared.base.config)
        model, objective = parts.load(prepared, engine, attention, self.say)
        recomputed = recipe.train.activation_checkpointing
        self.forward, facts = ForwardPass(attention, objective), parts.model_facts(model, full_rows, recomputed)
        size = training.size(recipe.data.max_length)
        fullness = size.packing_efficiency if size else None
        graphless = graph_problem(recipe, engine.launch, engine.device.type, model, attention, fullness)
        engine.keeps_gradients = graphless is None
        build = partial(build_optimizers, recipe.optimizer, parameter_roles(model.causal_lm))
        engine.wrap(model, build, prepared.micro_batches)
        set_group_timeouts(collective_timeout())
        rows = parts.rows_per_device(prepared, engine, self.forward, (predicted or {}).get("rows_per_device"), self.say)
        loaders = parts.Loaders(
            recipe, prepared.base, engine, rows, attention, media_reader(prepared.base.media), graphless is None
        )
        reference, self.with_reference = None, None
        if columns is not None:
            training, held_out, reference = columns.columns(self.forward, loaders.each_once)
        elif recipe.objective.reads_reference:
            reference = "the model without its adapters, in each step"
            self.with_reference = AdaptersOff(engine, self.forward).with_column  # adds what is computed in each step
        self.data = training
        self.plan = parts.make_plan(prepared, engine, facts, rows, attention, reference, predicted or {}, graphless)
        self.end_ids = end_ids(recipe.model, self.tokenizer, [training, held_out])
        run_rows = parts.run_rows(prepared, training, engine, self.end_ids, attention, loaders)
        self.loader = loaders.training(run_rows, self.plan.total_rows)
        self.graphs: Graphs | None = None
        if graphless is None:  # not before: sizes are tried without
            self.graphs = Graphs(model, loaders.longest, recipe.data.max_length, CudaRecorder(), self.say)
            model.graphs = self.graphs
        self.evaluator = None
        if held_out:
            names, shares = held_out.source_names, attention.shares_prompts and recipe.rollouts is None
            measured = make_objective(
                recipe.objective,
                names,
                evaluating=True,
                token_ranks=engine.token_ranks,
                shares_prompts=shares,
                compute=dtypes(recipe).compute,
                objectives=prepared.features.objectives,
                mtp_weight=recipe.mtp_weight,
            )
            self.evaluator = Evaluator(
                engine,
                loaders.each_once(held_out),
                held_out.examples,
                ForwardPass(attention, measured),
                self.tokenizer,
                self.end_ids,
                recipe.evaluate,
                self.with_reference,
            )
        weights = columns.weights_identity if columns is not None else None
        # All that this run reads, as checkpoints keep it. config: before the load, which changes it.
        self.inputs = read_inputs(engine, recipe, self.tokenizer, config, (training, held_out), weights)
        # evaluation: finite metrics of the last one; tracker_ids: ids of the runs in a checkpoint
        self.state, self.evaluation, self.tracker_ids = resumed_state(
            recipe, engine, training, self.inputs, self.plan.steps, self.say
        )
        on_gpu = engine.device.type == "cuda"
        peak = peak_tflops(self.plan.device, dtypes(recipe).compute) if on_gpu else None
        if on_gpu and peak is None:
            self.say(f"note: no MFU: engine/hardware.yaml has no peak for {self.plan.device}")
        self.meters = Meters(engine, facts.flops, peak)
        self.profiler = Profiler(recipe.profile, engine, self.folder, self.plan.steps) if recipe.profile else None
        self.totals, self.expert_load, self.compilations = Totals(), ExpertLoad(), CompilationWatch()
        self.watches = VarianceWatch(), PaceWatch(), CoresWatch()
        self.last_loss: float | None = None
        self.status: Status | None = None
        self.first_step: int | None = None  # of this launch; None before it logs
        self.log: RunLog  # opened by `run`, as the saver: a pass of a reference writes neither
        self.saver: Saver
        self.saved_at, self.saved_before = time.monotonic(), False

    def say(self, text: str) -> None:
        """Prints a line, on the main rank only."""
        if self.engine.is_main:
            print_line(self.console, text)

    # --- the run

    def run(self) -> None:
        """Trains and writes the result. Raises Stopped after a save that a signal requested."""
        finished = self.engine.is_main and read_status(self.folder) == "finished" and (self.folder / "model").is_dir()
        if self.engine.ranks.gather(finished)[0] and self.state.step >= self.plan.steps:
            self.say(
                f"{self.folder} is finished: step {self.state.step} of {self.plan.steps}, nothing to do. Train further "
                "with more steps (train.max_steps, train.epochs), or start again under another run.name"
            )
            if self.push is not None:  # the last launch may have failed to
                self.push.result(self.folder / "model")
            return
        try:
            self._run()
        except OSError as error:
            raise disk_failure(self.folder, error) from error
        finally:
            if self.status in (None, "running") and self._holds_folder():
                with contextlib.suppress(OSError):  # the disk may be what has failed
                    self._write_status("failed")
                    self._write_measured()

    def _run(self) -> None:
        if self.engine.is_main:
            write_atomically(self.folder / "recipe.yaml", dump_recipe(self.recipe))
            self.plan.write(self.folder / "plan.json")
            write_atomically(self.folder / "inputs.json", json.dumps(self.inputs, indent=1) + "\n")
            write_tokenizer(self.engine.unwrapped, self.tokenizer, self.end_ids, self.folder / "tokenizer")
            firsts = [self.data.first_examples(i, RECORDED) for i in range(len(self.data.source_names))]
            examples = json.dumps(recorded(firsts, self.tokenizer), ensure_ascii=False)
            write_atomically(self.folder / EXAMPLES, examples + "\n")
            show_plan(self.console, self.recipe, self.plan)
        config = {"recipe": self.recipe.model_dump(mode="json"), "plan": asdict(self.plan)}
        self.log = RunLog(self.engine, self.recipe, self.folder, self.state.step + 1, config, self.tracker_ids)
        self.first_step = self.state.step + 1
        metadata = {
            "steps": self.plan.steps,
            "data": self.data.summary(),
            "inputs": self.inputs,
            "trackers": self.log.run_ids(),
            "versions": self.plan.versions,
            "git_commit": self.plan.git_commit,
        }
        sealed = (lambda _: None) if self.push is None else self.push.checkpoint
        root = self.folder / "checkpoints"
        self.saver = Saver(self.engine, self.recipe, root, metadata, self._holds_folder, sealed)
        self.saved_at = time.monotonic()
        try:
            with self.loader.rows.opened():
                self.train()
            self._write_expert_load()
            self.saver.settle()
            if self.engine.is_main:
                show_totals(self.console, self.totals)
            self.saver.tidy()
            self.saver.close()  # frees its host memory for the result
            self.log.finish(self.evaluation, self._save_result())
            self._write_measured()
            self._write_status("finished")
        finally:
            self.saver.close()
            self.log.close()

    def train(self) -> None:
        """Runs all steps from `state.step` to the end, with what is due between them."""
        self._catch_up_on_evaluation()
        self._write_status("running")  # a signal before this leaves nothing to save: 75 at once
        self.stop.steps_begun = True
        self._profile({})
        with (
            fed_steps(self.loader, range(self.state.step, self.plan.steps), self.engine.device) as feed,
            ProgressBar(
                self.console, "step", self.plan.steps, self.state.step, self.engine.is_main, keeps=True
            ) as progress,
        ):
            for step_batches in self.steps(feed):
                line, flags = self.train_step(step_batches)
                self._check_folder(flags.lost)
                self.last_loss = line["loss"]
                if self.recipe.train.compile:
                    line["compilations"] = compilations()
                    if (warning := self.compilations.step_done()) is not None:
                        self.say(f"[yellow]{escape(warning)}[/yellow]")
                if self.graphs is not None:
                    line["graphs_share"] = self.graphs.share()
                self.log.write(line, line["step"])
                self.log.rows(line["step"], row_ids(step_batches.batches))
                self.totals.add(line)
                progress.update(int(line["step"]), progress_text(line))
                for watch in self.watches:
                    if (warning := watch.step_done(line)) is not None:
                        self.say(f"[yellow]{escape(warning)}[/yellow]")
                self._profile(line)
                self._between_steps(flags)
        if (stop_when := self.recipe.train.stop_when) is not None and self.state.step < self.plan.steps:
            self.say(
                f"stopped early after step {self.state.step} of {self.plan.steps}: no {stop_when.metric} better than "
                f"{self.state.best:.4g} in {stop_when.patience} evaluations in a row"
            )

    def steps(self, feed: Feed[StepBatches]) -> Iterator[StepBatches]:
        """Yields the batches of each remaining step, and meters the wait for them.

        Warms up before, which leaves weights, optimizer and the random numbers of the steps as they were.
        """
        if not self._is_over:
            batch, objective = feed.peek().batches[0], self.forward.objective
            for _ in range(self.engine.warm_ups):
                with self.engine.micro_batch(last=True):
                    self.engine.backward(objective.trial_loss(self.forward(self.engine.model, batch), batch))
                self.engine.drop_gradients()
        self.engine.stopwatch.restart()
        while not self._is_over:
            with self.engine.stopwatch.phase("data"):
                step_batches = next(feed)
            yield step_batches

    # --- one step

    def train_step(self, step: StepBatches) -> tuple[Line, StepFlags]:
        """Makes one optimizer step; returns its line of metrics.jsonl and the flags of all ranks. Collective.

        Raises RunFailure on all ranks before the optimizer step if loss or gradient is not finite.
        """
        factor = lr_factor(self.recipe.schedule, self.state.step, self.plan.steps)
        self.engine.prepare_groups(factor, step.kinds)
        step = self._completed(step)
        micro_batches = _MicroBatches(self, step)
        with cast_once():
            self.engine.accumulate(step.batches, micro_batches.forward, micro_batches.loss)
        sums, flags = self._reduce(micro_batches)
        loss = sums.loss()
        if not math.isfinite(loss):
            raise micro_batches.not_finite("loss")
        self.meters.measure_gradients()
        try:
            with self.engine.stopwatch.phase("optimizer"):
                grad_norm = self.engine.step()
        except NonFinite as error:
            raise micro_batches.not_finite("gradient", error.stepped) from None
        self._advance(step, sums)
        measured = self.meters.step(step.batches, step.counts["tokens"], step.counts["target_tokens"])
        line = {
            "step": self.state.step,
            "epoch": step.epoch,
            "loss": loss,  # the optimized one, including all terms
            "grad_norm": grad_norm,  # before clipping; None if fp16 skipped the step
            "lr": self.recipe.optimizer.lr * factor,
            "tokens": self.state.tokens,
            "supervised_tokens": self.state.supervised_tokens,
            "padding_tokens": self.state.padding_tokens,
            "tokens_per_s": step.counts["tokens"] / measured.seconds,
            "step_s": measured.seconds,
            **measured.line,
            **self.forward.objective.metrics(sums),
            **step.measured,
            **{f"tokens/{name}": count for name, count in self.state.tokens_by_source.items()},
        }
        return line, flags

    def _completed(self, step: StepBatches) -> StepBatches:
        """Returns the step with the reference's log-probabilities, if they are computed step by step, and with the
        objective's statistics of the whole step. Collective."""
        statistics, batches = self.forward.objective.statistics, step.batches
        if self.with_reference is None and statistics is None:
            return step
        with self.engine.stopwatch.phase("forward"), self.engine.evaluating():
            if self.with_reference is not None:
                batches = self.with_reference(batches)
            if statistics is not None:
                sums = sum_terms(self.engine, self.forward, statistics, batches, batches[0], step.counts)
                columns = as_columns(sums, self.engine.device)
                batches = [batch.with_columns(columns) for batch in batches]
        return replace(step, batches=batches)

    def _reduce(self, micro_batches: _MicroBatches) -> tuple[Sums, StepFlags]:
        """Returns the step's sums and flags over all ranks, by one reduction."""
        minutes = self.recipe.checkpoint.every_minutes
        overdue = minutes is not None and time.monotonic() - self.saved_at >= minutes * 60
        flags = [self.stop.reason is not None, overdue and self.engine.is_main, self.saver.failed]  # by one clock
        flags.append(not self._holds_folder())
        sums = micro_batches.sums
        own = {**sums.totals, "flags": torch.tensor(flags, dtype=torch.float64)}
        totals = self.engine.ranks.total(own, sums.largest)
        stop, save, settle, lost = (flag > 0 for flag in totals.pop("flags").tolist())
        return Sums(totals, sums.terms, micro_batches.counts), StepFlags(stop, save, settle, lost)

    def _advance(self, step: StepBatches, sums: Sums) -> None:
        state = self.state
        state.step += 1
        state.tokens += step.counts["tokens"]
        state.supervised_tokens += step.counts["target_tokens"]
        state.padding_tokens += step.padding
        if "tokens_by_source" in sums.totals:
            for name, count in zip(self.data.source_names, sums.totals["tokens_by_source"].tolist(), strict=True):
                state.tokens_by_source[name] = state.tokens_by_source.get(name, 0) + int(count)
        if "expert_load" in sums.totals:
            self.expert_load.add(state.step, sums.totals["expert_load"])

    # --- between steps

    def _between_steps(self, flags: StepFlags) -> None:
        """Evaluates, saves and stops as is due, the same on every rank. Raises Stopped with everything on the disk."""
        stopwatch, settings, step, measured = self.engine.stopwatch, self.recipe.checkpoint, self.state.step, {}
        stops = flags.stop
        if flags.settle:
            with stopwatch.stall("checkpoint"):
                self.saver.settle()
        if self._evaluation_due() and not flags.stop:  # else it runs after the resume
            with stopwatch.stall("evaluation"):
                measured = self.evaluate()
            stops = any(self.engine.ranks.gather(self.stop.reason is not None))  # meanwhile: not one step more
        every_steps = settings.every_steps and step % settings.every_steps == 0
        at_the_end = (settings.every_steps or settings.every_minutes or settings.best) and self._is_over
        if stops or flags.save or every_steps or at_the_end or self.saver.improves(measured):
            with stopwatch.stall("checkpoint"):
                self._save_checkpoint(measured)
        if stops:
            self.saver.settle(must=True)
            reasons = sorted({reason for reason in self.engine.ranks.gather(self.stop.reason) if reason})
            self.log.finish_preempted()
            self._write_measured()
            self._write_status("stopped")
            raise Stopped(
                f"stopped by {', '.join(reasons)} after step {step} of {self.plan.steps}; "
                "the same command resumes from there"
            )

    def evaluate(self) -> dict[str, float]:
        """Evaluates on held-out data, logs and prints the results; returns the metrics. Collective."""
        assert self.evaluator is not None  # only called with evaluation data
        self.evaluation, generations = self.evaluator.run()
        self.evaluation |= self.loader.rows.evaluated(self.state.step)
        stop_when = self.recipe.train.stop_when
        metrics = {"checkpoint.best": self.recipe.checkpoint.best, "train.stop_when": stop_when and stop_when.metric}
        for key, metric in metrics.items():
            if metric is not None and metric not in self.evaluation:
                measured = ", ".join(self.evaluation)
                raise UserError(f"{key}: this run's evaluations do not measure {metric!r}. Fix: use one of {measured}")
        if stop_when is not None:
            self._note_improvement(self.evaluation[stop_when.metric], stop_when.metric)
        self.compilations.evaluated()
        self._write_expert_load()
        measured = self.evaluation
        self.evaluation = {name: value for name, value in measured.items() if math.isfinite(value)}
        line = {name: self.evaluation.get(name) for name in measured}
        self.log.write({"step": self.state.step, **line}, self.state.step)
        if self.engine.is_main:
            show_evaluation(self.console, self.state.step, measured, generations)
        if not_finite := ", ".join(name for name, value in line.items() if value is None):
            self.say(
                f"[yellow]{escape(not_finite)} is not finite: the weights have diverged (lower optimizer.lr), or a row "
                "of data.eval overflows. It is null in metrics.jsonl, and makes no checkpoint the best[/yellow]"
            )
        if generations:
            rows = [[g.prompt, g.output, g.reference] for g in generations]
            images, questions = [g.media for g in generations], [g.question for g in generations]
            columns = ["prompt", "output", "reference"]
            self.log.table("generations", columns, rows, self.state.step, images, questions)
        return self.evaluation

    def _catch_up_on_evaluation(self) -> None:
        """Makes the evaluation that is due before the first step, or that a stop came before; from then on both the log
        and the checkpoint of this step have it. Collective."""
        step, stop_when = self.state.step, self.recipe.train.stop_when
        lines = read_metrics(self.folder / "metrics.jsonl").lines if self.engine.is_main else []
        logged = [line for line in lines if line["step"] == step and "eval_loss" in line]
        of_log: dict[str, float] | None = self.engine.ranks.gather(logged[-1] if logged else None)[0]
        if self.evaluation and of_log is None:  # of the checkpoint; the log was damaged
            self.log.write({"step": step, **self.evaluation}, step)
        if self.evaluation or not self._evaluation_due():
            return
        if of_log is None:
            self.evaluate()
        else:  # by a launch that was killed before it had saved it
            self.evaluation = {name: value for name, value in of_log.items() if name != "step" and value is not None}
            if stop_when is not None:
                self._note_improvement(self.evaluation.get(stop_when.metric, math.nan), stop_when.metric)
        if step:
            self._save_checkpoint(self.evaluation)

    def _note_improvement(self, value: float, metric: str) -> None:
        """Counts the evaluations since the best finite one, for `train.stop_when`."""
        state = self.state
        if math.isfinite(value) and (state.best is None or is_better(metric, value, state.best)):
            state.best, state.evaluations_since_best = value, 0
        else:
            state.evaluations_since_best += 1

    @property
    def _is_over(self) -> bool:
        """Returns whether all steps are done, or evaluations no longer improve."""
        stop_when = self.recipe.train.stop_when
        stopped_early = stop_when is not None and self.state.evaluations_since_best >= stop_when.patience
        return stopped_early or self.state.step >= self.plan.steps

    def _evaluation_due(self) -> bool:
        step, every = self.state.step, self.recipe.evaluate.every_steps
        if self.evaluator is None:
            return False
        if step == 0:
            return self.recipe.evaluate.at_start
        return step == self.plan.steps or bool(every and step % every == 0)

    def _save_checkpoint(self, measured: dict[str, float]) -> None:
        self.log.flush()
        extra = self.data.extra_state(self.state.step * self.recipe.batch.rows)
        size = self.saver.save(asdict(self.state) | extra, measured)
        self.saved_at = time.monotonic()
        if not self.saved_before:
            how = ", copied to CPU memory and written while training continues" if self.saver.asynchronous else ""
            self.say(f"step {self.state.step}: first checkpoint, {size / 2**20:,.1f} MiB of each process{how}")
        self.saved_before = True

    def _profile(self, line: Line) -> None:
        """Begins or ends the trace of `profile`. line: the last step's; empty before the first."""
        if self.profiler is None:
            return
        if not line and self.state.step >= self.profiler.first:
            self.say(f"note: profile.steps: nothing is traced, this launch begins after step {self.state.step}")
        due = self.state.step in (self.profiler.first - 1, self.profiler.last)
        with self.engine.stopwatch.stall("profile") if due else contextlib.nullcontext():
            summary = self.profiler.after(self.state.step, line)
        if summary:
            show_profile(self.console, summary, self.profiler.folder)

    # --- files

    def _holds_folder(self) -> bool:
        """Returns False if another launch has taken the run's folder, which only the main rank knows."""
        return self.run_lock is None or not self.engine.is_main or not self.run_lock.is_lost()

    def _check_folder(self, lost: bool) -> None:
        """Raises RunFailure on all ranks if one of them knows that the folder is `lost` to another launch."""
        if lost:
            assert self.run_lock is not None  # it says so
            raise self.run_lock.failure()

    def _write_expert_load(self) -> None:
        if self.engine.is_main:
            self.expert_load.write(self.folder)

    def _save_result(self) -> dict[str, Path]:
        """Writes <run>/model; returns the folders that `tracking.wandb.log_model` uploads, by alias. Collective."""
        self._check_folder(any(self.engine.ranks.gather(not self._holds_folder())))
        root, metric, wandb = self.folder / "checkpoints", self.recipe.checkpoint.best, self.recipe.tracking.wandb
        best = self.engine.ranks.gather(best_checkpoint(root, metric) if self.engine.is_main else None)[0]
        # `last_loss` is None if a finished run was only evaluated again.
        state, loss, evaluation = self.state, self.last_loss, self.evaluation
        if self.recipe.train.result == "best":
            if best is None:
                raise RunFailure(
                    f"train.result: best: no checkpoint in {root} was measured by {metric}. Fix: use `last`"
                )
            resumed = resume_own(self.engine, best)
            state, evaluation = TrainingState(**resumed.progress), resumed.metrics
            value = resumed.metrics[str(metric)]
            self.say(f"the result is that of step {state.step}, the best by {metric} ({value:.4g})")
            loss = loss if state.step == self.state.step else None
        about = {**asdict(state), "inputs": self.inputs}
        card = model_card(self.recipe, asdict(self.plan), about, loss, evaluation)
        adapter, frozen = self.recipe.mode != "full", dtypes(self.recipe).frozen
        save_result(self.engine, self.tokenizer, self.end_ids, adapter, frozen, card, self.folder / "model")
        if self.push is not None:
            self.push.result(self.folder / "model")
        command = next_command(self.recipe.objective, self.recipe.data, self.folder)
        self.say(f"saved [bold]{self.folder / 'model'}[/bold]; try it: {escape(command)}")
        if wandb is None or wandb.log_model == "none":
            return {}
        return {"result": self.folder / "model", **({"best": best} if best and wandb.log_model == "best" else {})}

    def _write_status(self, status: Status) -> None:
        self.status = status
        if self.engine.is_main:
            write_status(self.folder, status, self.state.step, self.plan.steps)

    def _write_measured(self) -> None:
        """Adds the time and memory of this launch's steps to plan.json, next to the predicted ones."""
        first = self.first_step
        if self.engine.is_main and first is not None:
            lines = read_metrics(self.folder / "metrics.jsonl").lines
            measured = measure_run(line for line in lines if line["step"] >= first)
            replace(self.plan, measured=measured).write(self.folder / "plan.json")


class _MicroBatches:
    """Forward and loss of each micro-batch of a step, as the engine calls them, and their sums on this rank."""

    def __init__(self, trainer: Trainer, step: StepBatches):
        self._engine, self._forward, self._stopwatch = trainer.engine, trainer.forward, trainer.engine.stopwatch
        self._seed, self._step, self._batches = trainer.recipe.run.seed, trainer.state.step, step.batches
        self.counts = step.counts
        self._terms = TermSums()
        self._losses: list[tuple[Batch, Tensor]] = []  # () of each micro-batch

    def forward(self, model: Any, batch: Batch) -> Any:
        seed_micro_batch(self._seed, self._step, batch.index)
        with self._stopwatch.phase("forward"):
            return self._forward(model, batch)

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:  # ()
        """Returns a micro-batch's part of the step's loss."""
        with self._stopwatch.phase("forward"):
            terms = self._forward.objective.terms(outputs, batch)
            loss = self._forward.objective.loss(terms, self.counts)
        self._terms.add(terms)
        self._losses.append((batch, loss.detach()))
        if self._engine.steps_in_backward and not math.isfinite(*self._engine.ranks.sum(loss.detach())):
            raise self.not_finite("loss")
        return loss

    @property
    def sums(self) -> TermSums:
        """Zeros of the same names and shapes on a rank without outputs (a pipeline's early stages)."""
        if not self._losses:
            self._terms.add(self._forward.objective.no_terms(self._batches[0]))
        return self._terms

    def not_finite(self, what: str, stepped: bool = False) -> RunFailure:
        """Returns an error with the step and the rows of non-finite micro-batches, over all ranks. Collective."""
        batches = [batch for batch, _ in self._losses]
        non_finite = [batch for batch, loss in self._losses if not torch.isfinite(loss)]
        rows = row_ids(non_finite or batches) if non_finite or what == "gradient" else []
        all_rows = list(dict.fromkeys(row for ranks_rows in self._engine.ranks.gather(rows) for row in ranks_rows))
        shown = ", ".join(all_rows[:20]) + (f" and {len(all_rows) - 20} more" if len(all_rows) > 20 else "")
        state = "The weights in memory are invalid, the last checkpoint is not" if stepped else "Nothing was stepped"
        return RunFailure(
            f"the {what} is not finite at step {self._step + 1}. {state}. Rows in question: {shown}. Fix: check these "
            "rows with `finetune inspect`, lower optimizer.lr, or use train.precision: bf16 instead of fp16"
        )


def row_ids(batches: list[Batch]) -> list[str]:
    return [f"{path}:{row}" for batch in batches for path, row, _ in batch.origins]
