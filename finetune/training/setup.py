"""What a run needs before its first step: data, model and engine together.

attention -> model -> engine -> rows per device -> plan -> loader -> evaluator -> checkpoint to go on from
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from finetune.checkpoints.resume import newest_good, resume, start_anew
from finetune.data.dataset import Dataset, Stream
from finetune.data.loader import Loader, OrderedRows, RunRows
from finetune.engine.base import Engine
from finetune.engine.precision import autocast_forward
from finetune.engine.shared_tokens import share_tokens
from finetune.engine.timeout import collective_timeout, limit_groups
from finetune.errors import UserError
from finetune.models.attention import AttentionChoice
from finetune.models.experts import compute_experts_in
from finetune.models.head import Formula, LossHead, attach_head
from finetune.models.offload import offload_activations
from finetune.models.weights import attention_for, dtypes, load_model, parameter_counts
from finetune.planning.flops import model_flops
from finetune.planning.hardware import peak_tflops
from finetune.planning.plan import Plan, git_commit, run_length, versions
from finetune.recipe import Recipe
from finetune.tracking.meters import Meters
from finetune.training.ends import end_ids
from finetune.training.evaluation import Evaluator
from finetune.training.fit import FoundRows, find_rows, memory_of
from finetune.training.loop import State
from finetune.training.optimizers import build_optimizers
from finetune.training.profile import Profiler
from finetune.training.routing import Routing
from finetune.training.run_folder import run_folder

Say = Callable[[str], None]  # a line to the console, from the main rank alone


@dataclass(frozen=True)
class Ready:
    """A run with everything in its place, at the step it begins with. `state` alone moves on."""

    recipe: Recipe
    engine: Engine
    tokenizer: PreTrainedTokenizerFast
    end_ids: set[int]  # that end a generation
    console: Console
    say: Say
    folder: Path
    training: Dataset | Stream
    attention: AttentionChoice
    head: LossHead
    routing: Routing
    plan: Plan
    profiler: Profiler | None
    meters: Meters
    loader: Loader
    evaluator: Evaluator | None
    state: State
    trackers: dict[str, str]  # run ids that a checkpoint knows

    @property
    def checkpoints(self) -> Path:
        return checkpoint_folder(self.recipe)


def checkpoint_folder(recipe: Recipe) -> Path:
    return run_folder(recipe) / "checkpoints"


def set_up(
    recipe: Recipe,
    engine: Engine,
    tokenizer: PreTrainedTokenizerFast,
    config: PretrainedConfig,
    training: Dataset | Stream,
    held_out: Dataset | None,
    micro_batches: int,
    console: Console,
) -> Ready:
    """Load the model, hand it to the engine, and go on from the newest checkpoint. Collective."""
    say = partial(_say, engine, console)
    within = attention_for(recipe, config, engine.device.type)
    attention = share_tokens(within, engine.token_share, engine.parallelism, engine.rank)
    if not attention.isolates_documents:
        _check_isolated(recipe, attention, say)
        training, held_out = training.unpacked(), held_out.unpacked() if held_out else None
    model, head = _load(recipe, engine, config, attention, say)
    routing, counts = Routing.of(model, recipe.objective, engine.parallelism), parameter_counts(model)
    flops = model_flops(model, within.implementation, recipe.train.activation_checkpointing)
    engine.wrap(model, partial(build_optimizers, recipe.optimizer), micro_batches)
    limit_groups(collective_timeout())
    rows = _rows_per_device(recipe, engine, config, attention, head, training, say)
    plan = _plan(recipe, engine, training, counts, rows, micro_batches, attention, head)
    profiler = Profiler(recipe.profile, engine, run_folder(recipe), plan.steps) if recipe.profile else None
    meters = Meters(engine, flops, _peak(recipe, engine, plan, say))
    loader = _loader(recipe, engine, rows, training.in_order(recipe), plan.total_rows)
    loader = replace(loader, alike=engine.forwards_alike)
    ends = end_ids(recipe, tokenizer, [training, held_out])
    evaluator = _evaluator(recipe, engine, rows, held_out, attention, head, tokenizer, ends)
    state, trackers = _resume(recipe, engine, training, plan, say)
    return Ready(
        recipe,
        engine,
        tokenizer,
        ends,
        console,
        say,
        run_folder(recipe),
        training,
        attention,
        head,
        routing,
        plan,
        profiler,
        meters,
        loader,
        evaluator,
        state,
        trackers,
    )


def _say(engine: Engine, console: Console, text: str) -> None:
    if engine.is_main:
        console.print(text)


def _check_isolated(recipe: Recipe, attention: AttentionChoice, say: Say) -> None:
    """Where an architecture cannot keep documents apart: one per forward, said aloud."""
    if recipe.batch.rows_per_device not in (1, "auto") or recipe.batch.tokens_per_device is not None:
        raise UserError(f"{attention.reason}: set batch.rows_per_device: 1, and no tokens_per_device")
    if recipe.data.packing:
        say(f"[yellow]{attention.reason}; packing is off[/yellow]")


def _load(
    recipe: Recipe, engine: Engine, config: PretrainedConfig, attention: AttentionChoice, say: Say
) -> tuple[Any, LossHead]:
    with engine.loading(recipe):
        model = load_model(recipe, config, attention, engine.placement(recipe))
    formula = Formula(recipe.objective.z_loss, recipe.objective.label_smoothing)
    head = attach_head(model, recipe.model.cross_entropy, formula, engine.device.type)
    types = dtypes(recipe)
    if types.compute != types.trained:
        autocast_forward(model, types.compute, engine.device.type)
        compute_experts_in(model, types.compute)
    if recipe.train.activation_offload:
        offload_activations(model, engine.device)
        if engine.device.type == "cpu":
            say("note: activation_offload: this run is in the host's memory already; it only makes copies")
    return model, head


def _rows_per_device(
    recipe: Recipe,
    engine: Engine,
    config: PretrainedConfig,
    attention: AttentionChoice,
    head: LossHead,
    training: Dataset | Stream,
    say: Say,
) -> FoundRows:
    """In one forward. Collective where they are to be found."""
    if recipe.batch.rows_per_device != "auto":
        return FoundRows(recipe.batch.rows_per_device, "asked for in the recipe")
    if not attention.isolates_documents:
        return FoundRows(1, f"auto: {attention.reason}")
    build = partial(build_optimizers, recipe.optimizer)
    return find_rows(engine, recipe, config, attention, head, training, build, memory_of(engine), say)


def _plan(
    recipe: Recipe,
    engine: Engine,
    training: Dataset | Stream,
    counts: tuple[int, int],
    rows: FoundRows,
    micro_batches: int,
    attention: AttentionChoice,
    head: LossHead,
) -> Plan:
    size = training.size(recipe.data.max_length)
    steps, total_rows = run_length(recipe, size.rows if size else None)
    (parameters, trained), budget = counts, recipe.batch.tokens_per_device
    if budget is None:
        micro_batches = recipe.batch.rows // (rows.rows * engine.parallelism.data)
    return Plan(
        where=engine.launch.where,
        world_size=engine.world_size,
        device=device_name(engine),
        steps=steps,
        micro_batches=micro_batches,
        rows_per_device=rows.rows if budget is None else None,
        rows_per_device_reason=rows.reason if budget is None else "batch.tokens_per_device",
        rows_per_epoch=size.rows if size else None,
        total_rows=total_rows,
        examples=size.examples if size else None,
        tokens_per_epoch=size.tokens if size else None,
        supervised_tokens_per_epoch=size.supervised_tokens if size else None,
        packing_efficiency=size.packing_efficiency if size else None,
        parameters=parameters,
        trainable_parameters=trained,
        attention=f"{attention.implementation} ({attention.reason})",
        cross_entropy=f"{head.choice.implementation} ({head.choice.reason})",
        precision=recipe.train.precision,
        division=engine.facts(micro_batches),
        versions=versions(),
        git_commit=git_commit(),
    )


def _peak(recipe: Recipe, engine: Engine, plan: Plan, say: Say) -> float | None:
    """TFLOP/s of one device, the denominator of MFU."""
    if engine.device.type != "cuda":
        return None
    peak = peak_tflops(plan.device, dtypes(recipe).compute)
    if peak is None:
        say(f"note: no peak of {plan.device} in planning/hardware.py, so no MFU")
    return peak


def _loader(recipe: Recipe, engine: Engine, found: FoundRows, rows: RunRows, total_rows: int) -> Loader:
    budget = recipe.batch.tokens_per_device
    return Loader(
        rows,
        recipe.batch.rows,
        found.rows,
        engine.data_rank,
        engine.parallelism.data,
        total_rows,
        budget and budget * engine.parallelism.tokens,
        _forward_tokens(recipe, found),
        engine.token_share,
    )


def _forward_tokens(recipe: Recipe, found: FoundRows) -> int | None:
    """Tokens that every forward is padded to: compiled layers are compiled for one length."""
    if not recipe.train.compile:
        return None
    return recipe.batch.tokens_per_device or found.rows * recipe.data.max_length


def _evaluator(
    recipe: Recipe,
    engine: Engine,
    found: FoundRows,
    held_out: Dataset | None,
    attention: AttentionChoice,
    head: LossHead,
    tokenizer: PreTrainedTokenizerFast,
    ends: set[int],
) -> Evaluator | None:
    if held_out is None:
        return None
    examples, rows = held_out.examples, held_out.rows
    loader = _loader(recipe, engine, found, OrderedRows(examples, rows), len(rows))
    names = held_out.source_names
    return Evaluator(engine, loader, examples, attention, head, tokenizer, ends, recipe.evaluate, names)


def _resume(
    recipe: Recipe, engine: Engine, training: Dataset | Stream, plan: Plan, say: Say
) -> tuple[State, dict[str, str]]:
    """From the newest checkpoint that verifies, or step 0; and the trackers' run ids that it knows."""
    checkpoints = checkpoint_folder(recipe)
    if recipe.checkpoint.resume == "never":
        for folder in start_anew(checkpoints) if engine.is_main else []:
            say(f"note: the checkpoint of an earlier run is now {folder}")
        return State(), {}
    if (found := newest_good(engine, checkpoints)) is None:
        return State(), {}
    resumed = resume(engine, recipe, found, training.summary())
    state = State(**resumed.progress)
    say(f"resuming from {found}: step {state.step} of {plan.steps}")
    for change in resumed.changes:
        say(f"changed since then: {escape(change)}")
    return state, resumed.trackers


def device_name(engine: Engine) -> str:
    return torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else engine.device.type
