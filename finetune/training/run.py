"""One run from recipe to result; read this file first.

    recipe -> tokenizer -> rows of tokens -> engine -> plan -> model -> steps -> result

Every room is entered once, in this order. Errors that the user can fix are raised before the model loads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.markup import escape
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from finetune.checkpoints.resume import check_finished, chosen, newest_good, resume, set_newer_aside
from finetune.data.batch import Batch, ImageInputs
from finetune.data.building import OpenedSources
from finetune.data.dataset import (
    Dataset,
    Stream,
    build_held_out,
    build_training,
    check_questions,
    data_notes,
    template_notes,
)
from finetune.data.examples import check_same_images, image_reader
from finetune.data.loader import Loader, OrderedRows, RunRows
from finetune.engine.base import Engine
from finetune.engine.compatibility import check_launch
from finetune.engine.context_parallel import apply_context_parallel
from finetune.engine.launch import collective_timeout, read_launch
from finetune.engine.start import set_group_timeouts, start_engine
from finetune.errors import Stopped, UserError
from finetune.models.activations import ActivationOffload
from finetune.models.attention import AttentionChoice, attention_for, check_rows_per_forward
from finetune.models.config import (
    check_no_dropout,
    check_same_vocabulary,
    check_sizes,
    check_token_ids,
    dtypes,
    load_tokenizer,
    model_config,
    training_config,
)
from finetune.models.loss_model import CausalLMWithLoss
from finetune.models.moe import adapts_experts, compute_experts_in, find_routers
from finetune.models.score_model import ScoreModel
from finetune.models.vision import ImagePart, part_sizes, row_positions
from finetune.models.weights import compute_in_fp8, fuse_adapters, keep_input_types, load_model, parameter_counts
from finetune.models.wrapped import CrossEntropyChoice, WrappedModel
from finetune.objectives import Objective, make_objective, score_labels
from finetune.objectives.forward import ForwardPass
from finetune.objectives.shared_prompts import sharing_summary, with_shared_prompts
from finetune.planning.estimate.comparison import predict_run
from finetune.planning.flops import ModelFlops, model_flops, peak_tflops
from finetune.planning.plan import Plan, git_commit, length_notes, processor, run_length, versions
from finetune.recipe import Recipe
from finetune.recipe.schema import Quantization
from finetune.tracking import check_trackers
from finetune.tracking.meters import Meters
from finetune.training.auto_batch import RowsPerDevice, find_rows, memory_of
from finetune.training.evaluation import Evaluator, end_ids
from finetune.training.optim import build_optimizers
from finetune.training.profile import Profiler
from finetune.training.reference import AdaptersOff, ReferenceColumns, recipe_of_reference
from finetune.training.run_dir import in_use, make_run_folder, run_folder
from finetune.training.signals import StopRequest
from finetune.training.teacher import TeacherPass, recipe_of_teacher, with_teacher
from finetune.training.trainer import Trainer, TrainingState
from finetune.utils import print_line

Data = Dataset | Stream


def train(
    recipe: Recipe, recipe_file: str, stop: StopRequest, console: Console | None = None, config_file: str | None = None
) -> Path:
    """Runs a recipe on this launch; returns the run directory.

    config_file: an accelerate config, if torchrun launched. Raises UserError for what the user can fix, RunFailure if
    the run cannot continue, Stopped if a signal requested a stop and all is saved.
    """
    with _started(recipe, recipe_file, stop, console or Console(), config_file) as trainer:
        try:
            trainer.run()
        except Stopped:
            trainer.engine.ranks.barrier()  # a launcher ends every process as soon as the first exits
            raise
    return trainer.folder


def compute_reference(
    recipe: Recipe, recipe_file: str, stop: StopRequest, console: Console, config_file: str | None = None
) -> None:
    """Computes the log-probabilities of `objective.reference_model`, or of the initial model, into the cache, unless
    they are there. Arguments and errors as of `train`; the run itself is not touched."""
    if recipe.objective.teacher is not None:
        compute_teacher(recipe, recipe_file, stop, console, config_file)
        return
    if not recipe.objective.reads_reference or recipe.objective.value("reference") != "precomputed":
        raise UserError(f"{recipe_file}: nothing to compute: no reference is read that is `precomputed`")
    tokenizer, name = load_tokenizer(recipe.model, recipe.tokens), recipe.objective.reference_model
    check_same_vocabulary("objective.reference_model", name, tokenizer, recipe.model)
    check_same_images("objective.reference_model", name, recipe, tokenizer)
    of_reference = recipe_of_reference(recipe)
    run = recipe.run.model_copy(update={"name": f"{recipe.run.name}-reference"})
    of_reference = of_reference.model_copy(update={"run": run})
    with _started(of_reference, recipe_file, stop, console, config_file) as trainer:
        trainer.say(f"reference of {escape(recipe_file)}: {escape(str(trainer.plan.reference))}")


def compute_teacher(
    recipe: Recipe, recipe_file: str, stop: StopRequest, console: Console, config_file: str | None
) -> None:
    """Computes what the model in `objective.teacher` predicts of the training data into the cache, unless it is
    there. Arguments and errors as of `train`."""
    vocabulary = model_config(recipe.model).get_text_config().vocab_size
    of_teacher = recipe_of_teacher(recipe)
    check_same_images("objective.teacher", recipe.objective.teacher, recipe, load_tokenizer(recipe.model))
    with _started(of_teacher, recipe_file, stop, console, config_file) as trainer:
        assert isinstance(trainer.data, Dataset)  # a rule refuses streams
        done = TeacherPass(recipe, trainer.data, vocabulary).compute(trainer)
        trainer.say(f"teacher of {escape(recipe_file)}: {done}")


@contextlib.contextmanager
def _started(
    recipe: Recipe, recipe_file: str, stop: StopRequest, console: Console, config_file: str | None
) -> Iterator[Trainer]:
    """Yields a trainer for this launch, ready to run. Raises UserError."""
    launch = read_launch(config_file)
    if launch.launched:
        stop.watch_launcher()
    config = training_config(recipe)
    check_sizes(recipe.model, config)
    micro_batches = check_launch(recipe, recipe_file, launch, config)
    check_trackers(recipe.tracking)
    tokenizer = load_tokenizer(recipe.model, recipe.tokens)
    check_token_ids(config, len(tokenizer), recipe.tokens)
    check_same_vocabulary("objective.reference_model", recipe.objective.reference_model, tokenizer, recipe.model)
    check_same_images("objective.reference_model", recipe.objective.reference_model, recipe, tokenizer)
    if recipe.batch.rows_per_device == "auto":
        check_no_dropout(config)
    opened = OpenedSources(recipe)
    notes = template_notes(recipe, tokenizer, opened)
    training = with_teacher(recipe, build_training(recipe, tokenizer, opened), tokenizer, config)
    held_out = build_held_out(recipe, tokenizer, opened)
    notes += check_questions(recipe.evaluate, held_out.examples, tokenizer) if held_out else []
    notes += data_notes(recipe, opened, training, held_out)
    engine = start_engine(recipe, launch)
    make_run_folder(recipe)
    with in_use(engine, run_folder(recipe)):
        predicted = predict_run(recipe, config, engine, micro_batches, training) if engine.is_main else {}
        trainer = build_trainer(recipe, engine, tokenizer, config, (training, held_out), micro_batches, stop, console)
        trainer.plan = replace(trainer.plan, predicted=predicted)
        for note in notes:
            trainer.say(f"note: {note}")
        try:
            yield trainer
        finally:
            engine.close()


def build_trainer(
    recipe: Recipe,
    engine: Engine,
    tokenizer: PreTrainedTokenizerFast,
    config: PretrainedConfig,
    datasets: tuple[Data, Dataset | None],
    micro_batches: int,
    stop: StopRequest,
    console: Console,
) -> Trainer:
    """Loads the model, wraps it by the engine, and resumes from the newest checkpoint. Collective.

    datasets: training and held-out; micro_batches: per step and process.
    """

    def say(text: str) -> None:
        if engine.is_main:
            print_line(console, text)

    within = attention_for(recipe, config, engine.device.type)
    attention = apply_context_parallel(within, engine.context_shard, engine.parallelism, engine.rank)
    training, held_out = _laid_out(recipe, attention, datasets, say)
    for note in length_notes(recipe, training, engine.parallelism.data):
        say(f"note: {escape(note)}")
    precomputed = None
    if recipe.objective.reads_reference and recipe.objective.value("reference") == "precomputed":
        precomputed = ReferenceColumns(recipe, engine, training, held_out, console)
    attention = with_shared_prompts(recipe.objective, attention)
    model, objective = _load(recipe, engine, config, attention, training, say)
    forward, facts = ForwardPass(attention, objective), _model_facts(recipe, model, within)
    engine.wrap(model, partial(build_optimizers, recipe.optimizer), micro_batches)
    set_group_timeouts(collective_timeout())
    rows = _rows_per_device(recipe, engine, config, forward, training, say)
    images, reference, with_reference = image_reader(recipe, tokenizer), None, None
    all_rows_of = partial(_evaluation_loader, recipe, engine, rows, attention, images)
    if precomputed is not None:
        training, held_out, reference = precomputed.columns(forward, all_rows_of)
    elif recipe.objective.reads_reference:
        reference = "the model without its adapters, in each step"
        with_reference = AdaptersOff(engine, forward).with_column
    plan = _plan(recipe, engine, training, facts, rows, micro_batches, attention, reference)
    loader = _loader(recipe, engine, rows, attention, images, training.in_order(recipe), plan.total_rows)
    ends, evaluator = end_ids(recipe, tokenizer, [training, held_out]), None
    if held_out:
        evaluator = _evaluator(
            recipe, engine, held_out, all_rows_of(held_out), attention, tokenizer, ends, with_reference
        )
    state, evaluation, tracker_ids = _resume(recipe, engine, training, plan, say)
    return Trainer(
        recipe=recipe,
        engine=engine,
        tokenizer=tokenizer,
        data=training,
        forward=forward,
        loader=replace(loader, alike=_alike(recipe, rows) if engine.forwards_alike else 0),
        evaluator=evaluator,
        end_ids=ends,
        plan=plan,
        state=state,
        evaluation=evaluation,
        meters=Meters(engine, facts.flops, _peak(recipe, engine, plan, say)),
        profiler=Profiler(recipe.profile, engine, run_folder(recipe), plan.steps) if recipe.profile else None,
        stop=stop,
        console=console,
        folder=run_folder(recipe),
        tracker_ids=tracker_ids,
        with_reference=with_reference,
    )


def _laid_out(
    recipe: Recipe, attention: AttentionChoice, datasets: tuple[Data, Dataset | None], say: Callable[[str], None]
) -> tuple[Data, Dataset | None]:
    """Returns training and held-out data, unpacked where the attention would let documents see each other. Raises
    UserError where a forward has to have one document, and the recipe asks for more."""
    training, held_out = datasets
    if attention.isolates_documents:
        return training, held_out
    check_rows_per_forward(recipe, attention)
    if recipe.data.packing:
        say(f"[yellow]{escape(attention.reason)}; packing is off[/yellow]")
    return training.unpacked(), held_out.unpacked() if held_out else None


def _load(
    recipe: Recipe,
    engine: Engine,
    config: PretrainedConfig,
    attention: AttentionChoice,
    training: Data,
    say: Callable[[str], None],
) -> tuple[WrappedModel, Objective]:
    """Returns the module that the engine wraps, and the objective; notes what a user may not expect of it."""
    labels = score_labels(recipe.objective)
    with engine.loading(recipe):
        model = load_model(recipe, config, attention, engine.placement(recipe), labels)
    if recipe.train.activation_offload and engine.device.type == "cpu":
        say("note: activation_offload has no use here: activations are in host memory already, it only copies them")
    if adapts_experts(model):
        say(
            "note: experts have adapters, which servers have loaded without effect (vLLM issue 41754): serve the "
            "merged model, by `finetune merge`"
        )
    types, parallelism = dtypes(recipe), engine.parallelism
    divided = parallelism.summary() if parallelism.tokens * parallelism.pipeline > 1 else None
    routers = find_routers(model)
    text_config = model.config.get_text_config()
    names, token_ranks = training.source_names, engine.token_ranks
    shares = attention.shares_prompts
    objective = make_objective(recipe.objective, names, False, text_config, routers, divided, token_ranks, shares)
    casts = types.compute != types.trained
    if casts:
        compute_experts_in(model, types.compute)
        keep_input_types(model)
    if recipe.train.precision == "fp8":
        compute_in_fp8(model, engine.device)
    fuse_adapters(model, recipe.train.activation_checkpointing, parallelism.schedule)
    surroundings: dict[str, Any] = {
        "device_type": engine.device.type,
        "autocast": types.compute if casts else None,
        "offload": ActivationOffload(engine.device) if recipe.train.activation_offload else None,
        "routers": routers if divided is None else None,
    }
    if objective.num_scores:
        return ScoreModel(model, **surroundings), objective
    if recipe.model.train is not None:
        surroundings["images"] = ImagePart(model, engine.gathers_in_forward)
    return CausalLMWithLoss(model, recipe.model.cross_entropy, only_sums=objective.only_sums, **surroundings), objective


class _ModelFacts(NamedTuple):
    """What the plan and the meters say of a model, known before an engine shards it."""

    parameters: tuple[int, int]  # all, and the trained ones
    parts: dict[str, tuple[int, int]]  # the same of a multimodal model's parts
    flops: ModelFlops
    cross_entropy: CrossEntropyChoice


def _model_facts(recipe: Recipe, model: WrappedModel, attention: AttentionChoice) -> _ModelFacts:
    """attention: as if a rank had full rows."""
    causal_lm = model.causal_lm
    flops = model_flops(causal_lm, attention.implementation, recipe.train.activation_checkpointing)
    return _ModelFacts(parameter_counts(causal_lm), part_sizes(causal_lm), flops, model.choice)


def _rows_per_device(
    recipe: Recipe,
    engine: Engine,
    config: PretrainedConfig,
    forward: ForwardPass,
    training: Data,
    say: Callable[[str], None],
) -> RowsPerDevice:
    """Returns the micro-batch size, measured if `auto`. Collective."""
    if recipe.batch.rows_per_device != "auto":
        return RowsPerDevice(recipe.batch.rows_per_device, "asked for in the recipe")
    if not forward.attention.isolates_documents:
        return RowsPerDevice(1, f"auto: {forward.attention.reason}")
    build = partial(build_optimizers, recipe.optimizer)
    return find_rows(engine, recipe, config, forward, training, build, memory_of(engine), say)


def _plan(
    recipe: Recipe,
    engine: Engine,
    training: Data,
    model: _ModelFacts,
    rows: RowsPerDevice,
    micro_batches: int,
    attention: AttentionChoice,
    reference: str | None,
) -> Plan:
    """reference: where its log-probabilities are from."""
    size = training.size(recipe.data.max_length)
    shared_share = size.shared_tokens / size.tokens if size else None
    steps, total_rows = run_length(recipe, size.rows, size.run_rows) if size else run_length(recipe, None)
    budget, precision = recipe.batch.tokens_per_device, recipe.train.precision
    if budget is None:
        micro_batches = recipe.batch.rows // (rows.rows * engine.parallelism.data)
    return Plan(
        where=engine.launch.where,
        world_size=engine.world_size,
        device=torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else engine.device.type,
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
        parameters=model.parameters[0],
        trainable_parameters=model.parameters[1],
        parts=model.parts,
        attention=f"{attention.implementation} ({attention.reason})",
        cross_entropy=f"{model.cross_entropy.implementation} ({model.cross_entropy.reason})",
        shared_prompts=sharing_summary(recipe.objective, attention, shared_share),
        shared_token_share=shared_share if attention.shares_prompts else None,
        reference=reference,
        precision=_precision_there(precision, engine.device.type, recipe.quantization),
        launch={
            "kind": engine.launch.kind,
            "config": engine.launch.config,
            "per_host": engine.local_processes,
        },
        division=engine.summary(micro_batches),
        versions=versions(),
        git_commit=git_commit(),
        processor=processor(),
    )


def _precision_there(precision: str, device_type: str, quantization: Quantization | None = None) -> str:
    """Returns `train.precision`, and how this device computes it and the products of packed layers."""
    if quantization is not None and quantization.compute == "scaled":
        return f"{precision}, packed layers in fp8" + (", emulated" if device_type != "cuda" else "")
    if device_type == "cuda" and precision == "fp32" and torch.get_float32_matmul_precision() == "highest":
        return "fp32 (TF32 is off: no tensor cores)"
    return "fp8, emulated" if device_type != "cuda" and precision == "fp8" else precision


def _peak(recipe: Recipe, engine: Engine, plan: Plan, say: Callable[[str], None]) -> float | None:
    """Returns the TFLOP/s of one device, the denominator of MFU; None if unknown."""
    if engine.device.type != "cuda":
        return None
    peak = peak_tflops(plan.device, dtypes(recipe).compute)
    if peak is None:
        say(f"note: no MFU: planning/flops.py has no peak for {plan.device}")
    return peak


def _loader(
    recipe: Recipe,
    engine: Engine,
    rows_per_device: RowsPerDevice,
    attention: AttentionChoice,
    images: ImageInputs | None,
    rows: RunRows,
    total_rows: int,
) -> Loader:
    """Returns a loader; under `train.compile` it pads every micro-batch to the length that layers are compiled for."""
    budget = recipe.batch.tokens_per_device
    longest = budget or rows_per_device.rows * recipe.data.max_length
    return Loader(
        rows,
        recipe.batch.rows,
        rows_per_device.rows,
        engine.data_rank,
        engine.parallelism.data,
        total_rows,
        budget and budget * engine.parallelism.tokens,
        longest if recipe.train.compile else None,
        engine.context_shard,
        shares_prompts=attention.shares_prompts,
        image_inputs=images,
        positions=None if recipe.model.train is None else row_positions(model_config(recipe.model)),
    )


def _alike(recipe: Recipe, rows_per_device: RowsPerDevice) -> int:
    """Returns the multiple that forwards of a pipeline are padded to: 3 % of the longest, so that packed steps nearly
    always have one length, and stages need not exchange shapes again."""
    longest = recipe.batch.tokens_per_device or rows_per_device.rows * recipe.data.max_length
    return max(1, int(longest) // 32)


def _evaluation_loader(
    recipe: Recipe,
    engine: Engine,
    rows_per_device: RowsPerDevice,
    attention: AttentionChoice,
    images: ImageInputs | None,
    data: Dataset,
) -> Loader:
    """Returns a loader of each row once, as they come."""
    rows = OrderedRows(data.examples, data.rows)
    return _loader(recipe, engine, rows_per_device, attention, images, rows, len(data.rows))


def _evaluator(
    recipe: Recipe,
    engine: Engine,
    held_out: Dataset,
    loader: Loader,
    attention: AttentionChoice,
    tokenizer: PreTrainedTokenizerFast,
    ends: set[int],
    with_reference: Callable[[list[Batch]], list[Batch]] | None,
) -> Evaluator:
    """loader: of all held-out rows; ends: tokens that end a generation; with_reference: see `Evaluator`."""
    names, shares = held_out.source_names, attention.shares_prompts
    objective = make_objective(recipe.objective, names, True, token_ranks=engine.token_ranks, shares_prompts=shares)
    forward = ForwardPass(attention, objective)
    return Evaluator(engine, loader, held_out.examples, forward, tokenizer, ends, recipe.evaluate, with_reference)


def _resume(
    recipe: Recipe, engine: Engine, training: Data, plan: Plan, say: Callable[[str], None]
) -> tuple[TrainingState, dict[str, float], dict[str, str]]:
    """Returns the state of the newest valid checkpoint, or of step 0, the evaluation in it, and the trackers' run
    ids."""
    checkpoints, wanted = run_folder(recipe) / "checkpoints", recipe.checkpoint.resume
    if wanted == "never":
        for folder in set_newer_aside(checkpoints) if engine.is_main else []:
            say(f"note: the checkpoint of an earlier run is now {folder}")
        return TrainingState(), {}, {}
    checkpoint = newest_good(engine, checkpoints) if wanted == "auto" else chosen(engine, checkpoints, wanted)
    if checkpoint is None:
        return TrainingState(), {}, {}
    resumed = resume(engine, recipe, checkpoint, training.summary())
    state = TrainingState(**resumed.progress)
    check_finished(checkpoint, resumed.changes, state.step, plan.steps)
    for folder in set_newer_aside(checkpoints, state.step) if engine.is_main else []:
        say(f"note: a checkpoint after the chosen one is now {folder}")
    say(f"resuming from {checkpoint}: step {state.step} of {plan.steps}")
    for change in resumed.changes:
        say(f"changed since then: {escape(change)}")
    return state, resumed.metrics, resumed.trackers
