"""Parts of a trainer that follow from a prepared recipe and an engine: model and objective, their sizes, micro-batch
size, loaders, plan and rows.

`Trainer.__init__` makes each once, in this order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from finetune.data.batch import MediaInputs
from finetune.data.dataset import Dataset
from finetune.data.loader import Loader
from finetune.data.row_source import RowSource, RunRows
from finetune.engine.base import Engine
from finetune.errors import UserError
from finetune.models.assemble import assemble
from finetune.models.attention import AttentionChoice
from finetune.models.base_config import dtypes
from finetune.models.base_model import Base
from finetune.models.checkpoint_files import kept_tensors, kept_words, lost_tensors, tensors_text
from finetune.models.flops import ModelFlops, model_flops
from finetune.models.generation_config import valid_generation_config
from finetune.models.moe import adapts_experts, find_routers
from finetune.models.towers import part_sizes, row_positions
from finetune.models.weights import load_model, parameter_counts
from finetune.models.wrapped import CrossEntropyChoice, WrappedModel
from finetune.objectives import Objective, make_objective
from finetune.objectives.forward import ForwardPass
from finetune.objectives.objective import ONE_RANK, TokenRanks
from finetune.objectives.shared_prompts import sharing_summary
from finetune.recipe import Recipe
from finetune.recipe.schema import Quantization
from finetune.training.auto_batch import RowsPerDevice, find_rows, memory_of
from finetune.training.prepare import Prepared
from finetune.training.run_plan import Plan, git_commit, processor, training_length, versions

Say = Callable[[str], None]  # prints a line, on the main rank only


def load(prepared: Prepared, engine: Engine, attention: AttentionChoice, say: Say) -> tuple[WrappedModel, Objective]:
    """Returns the module that the engine wraps, and the objective; prints notes on what a user may not expect."""
    recipe, labels = prepared.recipe, prepared.recipe.objective.score_labels
    with engine.loading(recipe):
        model = load_model(recipe, prepared.base, attention, engine.placement(recipe), labels)
    if recipe.train.activation_offload and engine.device.type == "cpu":
        say("note: activation_offload has no use here: activations are in host memory already, it only copies them")
    if kept := kept_tensors(model):
        say(f"note: {kept_words(list(kept), model.config)}")
    if lost := lost_tensors(model):
        say(f"note: a model of scores has no use for {tensors_text(lost)} of the base: the result leaves them out")
    if left_out := valid_generation_config(model)[1]:
        say(
            f"note: the result leaves out {', '.join(left_out)} of the base's generation_config.json: transformers "
            "ignores them beside its other settings, and does not save them"
        )
    for kind in getattr(model, "left_out", ()):
        say(f"note: lora.targets: all-linear leaves out {kind}")
    if adapts_experts(model):
        say(
            "note: experts have adapters, which servers have loaded without effect (vLLM issue 41754): serve the "
            "merged model, by `finetune merge`"
        )
    return with_objective(prepared, model, attention, engine.device, engine.token_ranks, engine.gathers_in_forward)


def with_objective(
    prepared: Prepared,
    model: Any,
    attention: AttentionChoice,
    device: torch.device,
    token_ranks: TokenRanks = ONE_RANK,
    gathers_in_forward: bool = False,
) -> tuple[WrappedModel, Objective]:
    """Returns a loaded model as the module that returns losses, and the objective that reads them. Raises UserError."""
    recipe, parallelism = prepared.recipe, prepared.launch.parallelism
    divided = parallelism.summary() if parallelism.tokens * parallelism.pipeline > 1 else None
    routers = find_routers(model)
    objective = make_objective(
        recipe.objective,
        prepared.training.source_names,
        config=model.config.get_text_config(),
        routers=routers,
        divided=divided,
        token_ranks=token_ranks,
        shares_prompts=attention.shares_prompts,
        rollouts=recipe.rollouts,
        compute=dtypes(recipe).compute,
        objectives=prepared.features.objectives,
        mtp_weight=recipe.mtp_weight,
    )
    wrapped = assemble(
        model,
        recipe,
        device,
        has_scores=bool(objective.num_scores),
        only_sums=objective.only_sums and recipe.mtp_weight is None,  # an evaluation asks for guesses
        routers=routers if divided is None else None,
        schedule=parallelism.schedule,
        gathers_in_forward=gathers_in_forward,
        vocabulary_ranks=parallelism.tensor,
    )
    if recipe.mtp_weight is not None and wrapped.choice.implementation == "plain":
        raise UserError(
            f"model.mtp: train: the LM head gives no losses of its own here ({wrapped.choice.reason}). Fix: use "
            "`model.mtp: keep`"
        )
    return wrapped, objective


class ModelFacts(NamedTuple):
    """Sizes of a model that the plan and the meters report, counted before an engine shards it."""

    parameters: tuple[int, int]  # all, and the trained ones
    parts: dict[str, tuple[int, int]]  # the same of a multimodal model's parts
    flops: ModelFlops
    cross_entropy: CrossEntropyChoice
    kernels: str


def model_facts(model: WrappedModel, attention: AttentionChoice, recomputed: Literal["selective"] | bool) -> ModelFacts:
    """Returns the sizes of a model. attention: as if a rank had full rows; recomputed: of
    `train.activation_checkpointing`."""
    causal_lm = model.causal_lm
    flops = model_flops(causal_lm, attention.implementation, recomputed)
    return ModelFacts(parameter_counts(causal_lm), part_sizes(causal_lm), flops, model.choice, model.kernels)


def run_rows(
    prepared: Prepared,
    training: RowSource,
    engine: Engine,
    end_ids: set[int],
    attention: AttentionChoice,
    loaders: Loaders,
) -> RunRows:
    """Returns the rows of the run in order: those of the data, or samples of the wrapped model, which has its initial
    weights. Collective. training: of `prepared`, with the columns of a reference, which no run of samples has."""
    if prepared.recipe.rollouts is None:
        return training.in_order(prepared.recipe)
    assert prepared.features.make_rows is not None  # `check_features`
    rows = loaders.rows_per_device.rows
    return prepared.features.make_rows(prepared, engine, end_ids, attention, loaders.training, rows)


def rows_per_device(
    prepared: Prepared, engine: Engine, forward: ForwardPass, estimate: int | None, say: Say
) -> RowsPerDevice:
    """Returns the micro-batch size, measured if `auto`. Collective. estimate: size that is expected to fit."""
    recipe = prepared.recipe
    if recipe.batch.rows_per_device != "auto":
        return RowsPerDevice(recipe.batch.rows_per_device, "asked for in the recipe")
    if not forward.attention.isolates_documents:
        return RowsPerDevice(1, f"auto: {forward.attention.reason}")
    return find_rows(engine, recipe, forward, prepared.training, memory_of(engine), estimate, say)


def make_plan(
    prepared: Prepared,
    engine: Engine,
    model: ModelFacts,
    rows: RowsPerDevice,
    attention: AttentionChoice,
    reference: str | None,
    predicted: dict[str, Any],
    graphless: str | None,
) -> Plan:
    """Returns the plan of the run. reference: source of its log-probabilities; predicted: the entry of plan.json;
    graphless: why nothing runs by CUDA graphs."""
    recipe, training, micro_batches = prepared.recipe, prepared.training, prepared.micro_batches
    size = training.size(recipe.data.max_length)
    shared_share = size.shared_tokens / size.tokens if size else None
    steps, total_rows = training_length(recipe.train, recipe.batch.rows, size)
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
        kernels=model.kernels,
        graphs="of the decoder layers, rows padded" if graphless is None else f"off ({graphless})",
        shared_prompts=sharing_summary(recipe.objective, recipe.rollouts is not None, attention, shared_share),
        shared_token_share=shared_share if attention.shares_prompts else None,
        reference=reference,
        precision=precision_there(precision, engine.device.type, recipe.quantization),
        launch={
            "kind": engine.launch.kind,
            "config": engine.launch.config,
            "per_host": engine.local_processes,
        },
        division=engine.summary(micro_batches),
        versions=versions(),
        git_commit=git_commit(),
        processor=processor(),
        predicted=predicted,
    )


def precision_there(precision: str, device_type: str, quantization: Quantization | None = None) -> str:
    """Returns `train.precision`, and how this device computes it and the products of packed layers."""
    if quantization is not None and quantization.compute == "scaled":
        return f"{precision}, packed layers in fp8" + (", emulated" if device_type != "cuda" else "")
    if device_type == "cuda" and precision == "fp32" and torch.get_float32_matmul_precision() == "highest":
        return "fp32 (TF32 is off: no tensor cores)"
    return "fp8, emulated" if device_type != "cuda" and precision == "fp8" else precision


class Loaders(NamedTuple):
    """Makes the loaders of a run: for its training rows in their order, or for any rows once, as they come."""

    recipe: Recipe
    base: Base
    engine: Engine
    rows_per_device: RowsPerDevice
    attention: AttentionChoice
    media: MediaInputs | None
    pads: bool = False  # rows of training, for CUDA graphs

    @property
    def longest(self) -> int:
        """Returns the tokens that a micro-batch may have."""
        return self.recipe.batch.tokens_per_device or self.rows_per_device.rows * self.recipe.data.max_length

    def each_once(self, data: Dataset) -> Loader:
        return self._replace(pads=False).training(data, len(data.rows))

    def training(self, rows: RunRows, total_rows: int) -> Loader:
        """Returns a loader. With `train.compile` or CUDA graphs it pads every micro-batch to one length."""
        recipe, engine = self.recipe, self.engine
        budget = recipe.batch.tokens_per_device
        return Loader(
            rows,
            recipe.batch.rows,
            self.rows_per_device.rows,
            engine.data_rank,
            engine.parallelism.data,
            total_rows,
            budget and budget * engine.parallelism.tokens,
            self.longest if recipe.train.compile or self.pads else None,
            engine.context_shard,
            shares_prompts=self.attention.shares_prompts,
            media_inputs=self.media,
            positions=None if recipe.model.train is None else row_positions(self.base.config),
            ahead=recipe.mtp_weight is not None,
            kinds=recipe.data.media_kinds,
        )
