"""Pipeline parallel: each rank has some of the decoder layers and sends hidden states to the next (Huang et al. 2018,
https://arxiv.org/abs/1811.06965). In addition, replicas of the full pipeline on other rows.

    stage   0            1            2            3
    rank    0            1            0            1          of a pipeline of two ranks with two stages each
            embedding    layers 7-15  layers 16-24 layers 25-31
            layers 0-6                             norm, head, loss

Every rank of a pipeline has the same micro-batches from the loader, so only hidden states and their gradients travel:
positions, documents and masks are computed on the rank that uses them. The forward is the same function as everywhere,
called in every stage with that stage as its model; the last stage computes the loss.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from torch.nn.functional import pad
from transformers import DynamicCache, PretrainedConfig

from finetune.engine.base import BuildOptimizers, Engine, Forward, Loss, NamedTensors, T, detached
from finetune.engine.launch import Launch
from finetune.engine.parallelism import Schedule
from finetune.engine.ranks import group_along, group_over, sum_gradients
from finetune.engine.stage_cache import stage_cache
from finetune.engine.stages import (
    SINGLE_STAGE_SCHEDULES,
    StageModel,
    bubble_share,
    buffer_holders,
    holders,
    keep_only,
    lay_out,
    micro_batch_sizes,
    schedulable_micro_batches,
)
from finetune.engine.state_shards import ShardPart, replica_parts
from finetune.models.base_config import dtypes, without_weights
from finetune.models.mtp import attach_without_weights
from finetune.models.weights import Placement
from finetune.models.wrapped import Outputs, WrappedModel
from finetune.recipe.schema import Recipe


@dataclass(frozen=True)
class _RunningStep:
    """Step that the schedule is running."""

    batches: Sequence[Any]
    counted: int  # the batches after these only fill the schedule up
    forward: Forward[Any]
    loss: Loss[Any]


class Pipeline(Engine):
    def __init__(self, accelerator: Accelerator, launch: Launch, recipe: Recipe, config: PretrainedConfig):
        super().__init__(accelerator, launch, recipe, config)
        sizes, place = self.parallelism, self.parallelism.coordinates(self.rank)
        self.place = place["pipeline"]
        # From the model's own weights alone, so that the layout is the same in every mode.
        skeleton = without_weights(copy.deepcopy(config), trusted=recipe.model.trust_remote_code)
        if recipe.model.mtp == "train":
            attach_without_weights(skeleton, torch.float32)
        stages = sizes.pipeline * sizes.stages_per_rank
        self._layout = lay_out(skeleton, stages, sizes.pipeline, recipe.objective.scores_sequences)
        self._compute = dtypes(recipe).compute
        self._prepared: tuple[tuple[int, int], Any] | None = None  # a schedule, for (micro-batches, tokens of each)
        self._stages: list[CalledStage] = []
        self._ends: Any = None  # group of the first and the last stage, if these share a matrix

    def placement(self, recipe: Recipe) -> Placement:
        return Placement("load", self.device, self._layout.layers_of(self.place))

    def wrap(self, model: WrappedModel, build: BuildOptimizers, micro_batches: int) -> None:
        self.keep_stages(model, self.device)
        self.find_overflows(model)
        self._replicas = group_over(("replicate", "context", "sequence"), self.parallelism, self.rank)
        self.optimizers = build(trained) if (trained := self._trained()) else []

    def keep_stages(self, model: WrappedModel, device: torch.device) -> None:
        """Keep the weights of this rank's stages, on `device`, and connect the stages."""
        self.unwrapped, self.model = model.causal_lm, _FullPipeline(self, model)
        self._holders = holders(self.unwrapped, self._layout)
        self._savers = {  # of each tensor of the result
            name: ranks[0] for name, ranks in {**self._holders, **buffer_holders(self.unwrapped, self._layout)}.items()
        }
        keep_only(self.unwrapped, lambda name: self.place in self._holders[name], device)
        stages = self._layout.stages_of(self.place)
        self._stages = [CalledStage(self, StageModel(model, self._layout, index, self._compute)) for index in stages]
        self._width = model.config.get_text_config().hidden_size
        self._pipeline = group_along("pipeline", self.parallelism, self.rank)
        if any(len(ranks) > 1 for ranks in self._holders.values()):  # a matrix is embedding and head
            for first in range(self.ranks_of_stage):  # every rank creates all groups
                ends = [first, self.world_size - self.ranks_of_stage + first]
                group = dist.new_group(ends)
                self._ends = group if self.rank in ends else self._ends

    def _trained(self) -> NamedTensors:
        """Returns the parameters that this rank has and trains."""
        return [(name, p) for name, p in self.unwrapped.named_parameters() if p.requires_grad and not p.is_meta]

    # --- a step

    def accumulate(self, batches: Sequence[T], forward: Forward[T], loss: Loss[T]) -> None:
        count = schedulable_micro_batches(self.parallelism.schedule, self.parallelism.pipeline, len(batches))
        filled = [*batches, *[batches[-1]] * (count - len(batches))]
        self._step = _RunningStep(filled, len(batches), forward, loss)
        shape = count, sent_tokens(max(_tokens(batch) for batch in batches))
        if self._prepared is None or self._prepared[0] != shape:
            self._sent_tokens = shape[1]
            hidden = torch.empty(1, shape[1], self._width, dtype=self._compute, device="meta", requires_grad=True)
            shared = self._layout.stages, self._pipeline, hidden, self.device, self._computing_backward
            stages: list[PipelineStage] = [
                TimedStage(self.scheduled_module(one), one.stage.index, *shared) for one in self._stages
            ]
            self._prepared = shape, make_schedule(self.parallelism.schedule, stages, count)
        indices = torch.arange(count)  # micro-batch indices: torch passes one to each forward
        with self.stopwatch.waiting():
            self._prepared[1].step(*[indices] * (self.place == 0), of=indices, target=indices, return_outputs=False)
            self.reduce_gradients()

    def reduce_gradients(self) -> None:
        """Add up a step's gradients over replicas, and those of a matrix that is embedding and head."""
        for _, parameter in self._trained():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [(name, p.grad) for name, p in self._trained() if p.grad is not None]
        if self._replicas is not None:
            sum_gradients([gradient for _, gradient in gradients], self._replicas, self.device)
        self.sum_ends(gradients)

    def sum_ends(self, gradients: NamedTensors) -> None:
        if self._ends is not None:
            shared = [gradient for name, gradient in gradients if len(self._holders[name]) > 1]
            sum_gradients(shared, self._ends, self.device)

    def scheduled_module(self, stage: CalledStage) -> nn.Module:
        """Returns the module that torch's schedule calls for a stage."""
        return stage

    def run_scheduled(self, stage: StageModel, received: Tensor | None, index: int) -> Tensor:
        """Returns a scheduled forward's hidden states, in the last stage the loss. index: of the micro-batch."""
        step, batch = self._step, self._step.batches[index]
        with self._computing():
            if stage.is_last and received is not None and index >= step.counted:
                return received.sum() * 0.0
            own = None if received is None else received[:, : _tokens(batch)]
            output = step.forward(lambda **arguments: stage.run(arguments, own), batch)
            if stage.is_last:
                return step.loss(output, batch) * self.loss_factor
            missing = self._sent_tokens - output.shape[1]
            return pad(output, (0, 0, 0, missing)) if missing else output

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """Context manager for computation in a schedule; the rest is waiting, for other stages and in the bubble."""
        self.stopwatch.end_wait()
        try:
            yield
        finally:
            self.stopwatch.begin_wait()

    @contextlib.contextmanager
    def _computing_backward(self) -> Iterator[None]:
        with self._computing(), self.stopwatch.phase("backward"):
            yield

    def micro_batch_sizes(self, rows: int) -> list[int]:
        sizes = self.parallelism
        return micro_batch_sizes(sizes.schedule, sizes.pipeline, sizes.stages_per_rank, rows)

    def trial(self, batches: Sequence[T], forward: Forward[T], loss: Loss[T]) -> None:
        """Runs the schedule of a step: a stage keeps the activations of several micro-batches."""
        self.accumulate(batches, forward, loss)

    def backward(self, loss: Tensor) -> None:
        raise NotImplementedError("a pipeline's backwards are its schedule's: see accumulate")

    def drop_gradients(self) -> None:
        for _, parameter in self._trained():
            parameter.grad = None

    def step(self) -> float | None:
        trained = [(name, p.grad) for name, p in self._trained() if p.grad is not None]
        counted = [gradient for name, gradient in trained if self._holders[name][0] == self.place]
        copies = self.ranks_of_stage
        return self.clip_and_step([g for _, g in trained], lambda local: self.ranks.sum(local)[0] / copies, counted)

    def knows_waits(self, compiles: bool) -> bool:
        """True: all time of the schedule outside computation is a wait, the bubble included."""
        return True

    # --- forwards alone

    def forwards(self, batches: Iterable[T], forward: Forward[T]) -> Iterator[tuple[T, Outputs]]:
        """Runs the stages in turn, each on its rank; only the last one's rank has outputs."""
        for batch in batches:
            outputs = self._relay(lambda model, batch=batch: forward(model, batch))
            if outputs is not None:
                yield batch, outputs

    def _relay(self, call: Callable[[Any], Any]) -> Any:
        """Returns the last stage's output, on its rank; None on the others."""
        for called in self._stages:
            output = call(partial(self._run_received, called))
            if called.stage.is_last:
                return output
            dist.send(output.contiguous(), self._rank_of(called.stage.index + 1), group=self._pipeline)
        return None

    def _run_received(self, called: CalledStage, /, **arguments: Any) -> Any:
        shape = (*arguments["input_ids"].shape, self._width) if called.stage.index else (0,)
        hidden = torch.empty(shape, dtype=self._compute, device=self.device)
        if called.stage.index:
            dist.recv(hidden, self._rank_of(called.stage.index - 1), group=self._pipeline)
        return called(hidden, arguments)

    @property
    def ranks_of_stage(self) -> int:
        return self.world_size // self.parallelism.pipeline

    def _rank_of(self, stage: int) -> int:
        """Returns the rank that runs a stage of this pipeline."""
        return self._layout.rank_of(stage) * self.ranks_of_stage + self.rank % self.ranks_of_stage

    def new_cache(self) -> dict[int, DynamicCache]:
        """Returns an empty cache for each stage of this rank."""
        config, layout = self.unwrapped.config, self._layout
        return {stage: stage_cache(config, layout, stage) for stage in layout.stages_of(self.place)}

    def answer(self, arguments: dict[str, Any]) -> Any:
        """Returns the logits of the last stage, on every rank of the pipeline."""
        output = self._relay(lambda model: model(**arguments))
        vocabulary = self.unwrapped.config.get_text_config().vocab_size
        rows, tokens = arguments["input_ids"].shape
        shape = (rows, arguments.get("logits_to_keep", tokens), vocabulary)
        logits = torch.empty(shape, device=self.device) if output is None else output.logits.float().contiguous()
        dist.broadcast(logits, self._rank_of(self._layout.stages - 1), group=self._pipeline)
        return SimpleNamespace(logits=logits)

    def summary(self, micro_batches: int) -> dict[str, Any]:
        sizes, layout = self.parallelism, self._layout
        share = bubble_share(sizes.schedule, sizes.pipeline, sizes.stages_per_rank, micro_batches)
        layers = [len(layout.layers(stage)) for stage in range(layout.stages)]
        return {"schedule": sizes.schedule, "layers_of_stages": layers, "bubble_share": share}

    # --- checkpoints and the result

    def parts(self, reading: bool) -> list[ShardPart]:
        """Returns the stage's parameters: each replica writes a range; the first stage writes shared ones."""
        trained = [(name, p) for name, p in self._trained() if reading or self._holders[name][0] == self.place]
        return replica_parts(trained, self.rank % self.ranks_of_stage, self.ranks_of_stage, reading)

    def full_on_main(self, name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor | None:
        """Returns the tensor on rank 0, sent by the first replica of its stage."""
        full, source = detached(tensor, dtype), self._savers[name] * self.ranks_of_stage
        if self.is_main and source != 0:
            full = torch.empty_like(full, device=self.device)
            dist.recv(full, source)
        elif self.rank == source != 0:
            dist.send(full.contiguous(), 0)
        return full.cpu() if self.is_main else None

    def close(self) -> None:
        if self._ends is not None:
            dist.destroy_process_group(self._ends)
        self._prepared, self._stages = None, []
        self._ends = None
        super().close()


class CalledStage(nn.Module):
    """Stage with one call for schedules and for forwards alone: FSDP2 gathers weights for calls of one root."""

    def __init__(self, engine: Pipeline, stage: StageModel):
        super().__init__()
        self.stage, self._engine = stage, engine

    def forward(self, received: Tensor, of: Tensor | dict[str, Any]) -> Any:
        """received: hidden states, unused in the first stage; of: index of a scheduled micro-batch, or arguments."""
        hidden = received if self.stage.index else None
        if isinstance(of, dict):
            return self.stage.run(of, hidden)
        return self._engine.run_scheduled(self.stage, hidden, int(of))


class _FullPipeline:
    """The pipeline as one model, forwards only, for generation."""

    def __init__(self, engine: Pipeline, model: WrappedModel):
        self._engine, self._model = engine, model

    def __call__(self, **arguments: Any) -> Any:
        return self._engine.answer(arguments)

    def train(self, mode: bool = True) -> None:
        self._model.train(mode)

    def eval(self) -> None:
        self.train(False)


def _tokens(batch: Any) -> int:
    return batch.inputs["input_ids"].shape[1]


def sent_tokens(longest: int) -> int:
    """Returns the tokens of hidden states that stages send, of a step's longest micro-batch: others are padded on the
    way. Of few different lengths, as stages prepare buffers for each; at most 1/16 more.

    >>> [sent_tokens(n) for n in (15, 100, 1000, 1025)]
    [15, 100, 1024, 1088]
    """
    unit = max(1, 1 << longest.bit_length() >> 5)
    return -(-longest // unit) * unit


# --- torch's schedules, with stages that report when they compute

_CLASSES: dict[Schedule, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}


class TimedStage(PipelineStage):
    """Stage that reports when it computes backwards; its own module reports forwards."""

    def __init__(
        self,
        module: torch.nn.Module,
        index: int,
        count: int,
        group: Any,
        hidden: Tensor,  # (1, T, D) on `meta`: the output of a stage
        device: torch.device,
        computing: Callable[[], AbstractContextManager[None]],
    ):
        """With all of its shapes, so that torch does not infer them by a trial forward."""
        micro_batch = torch.empty(1, dtype=torch.int64, device="meta")
        loss = torch.empty((), device="meta", requires_grad=True)
        inputs, outputs = hidden if index else micro_batch, loss if index == count - 1 else hidden
        super().__init__(module, index, count, device, input_args=inputs, output_args=outputs, group=group)
        self._computing = computing

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._computing():
            return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._computing():
            return super().backward_weight_one_chunk(*args, **kwargs)


def make_schedule(schedule: Schedule, stages: list[PipelineStage], micro_batches: int) -> Any:
    """Returns the schedule of one step. The last stage returns normalized losses: nothing is scaled here."""
    own = stages[0] if schedule in SINGLE_STAGE_SCHEDULES else stages
    return _CLASSES[schedule](own, micro_batches, loss_fn=lambda loss, _target: loss, scale_grads=False)
