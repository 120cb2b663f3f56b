"""Memory over one micro-batch: a forward and a backward of the run's own code, on fake tensors.

    before | layer 0 | layer 1 | ... | head || head | ... | layer 1 | layer 0 | before
               forward                                backward

Every storage is weighed from its allocation to its release, so what a forward keeps, what a layer computes again, and
the largest moment of each part are counted, and what several operations keep is counted once. The model has one layer
more than it has kinds of layers; `phases.py` lays the parts end to end for all of them.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from transformers import PretrainedConfig

from finetune.data.batch import collate
from finetune.models.base_config import dtypes
from finetune.models.vision import decoder_layers
from finetune.plan.images import KnownIntegers, with_pictures
from finetune.plan.meter import Meter
from finetune.plan.micro_batch import (
    HeaviestBatch,
    How,
    NotEstimated,
    attention_at,
    examples_of,
    fill,
    model_at,
    short_model,
)
from finetune.plan.operators import NO_WORK, OperatorCounter, Work
from finetune.plan.shapes import shortened
from finetune.plan.stand_ins import stand_ins
from finetune.recipe import Recipe
from finetune.utils import unwrap_peft


@dataclass(frozen=True)
class Part:
    """Bytes above those at its begin."""

    peak: int
    kept: int  # at its end; less than nothing where it frees
    work: Work = NO_WORK


@dataclass(frozen=True)
class Timeline:
    """Parts of a micro-batch; layers by kind, as `shapes.shortened` tells them apart."""

    before: Part
    layers: tuple[Part, ...]
    head: Part
    head_backward: Part
    layers_backward: tuple[Part, ...]
    before_backward: Part


def timeline_of(recipe: Recipe, config: PretrainedConfig, batch: HeaviestBatch, how: How) -> Timeline:
    """Returns the parts of a micro-batch on one rank. Raises UserError where the model cannot be made."""
    return _timeline(_TimelineKey(recipe, config, batch, how))


class _TimelineKey:
    """What a timeline depends on, for a cache."""

    def __init__(self, recipe: Recipe, config: PretrainedConfig, batch: HeaviestBatch, how: How):
        self.recipe, self.config, self.batch, self.how = recipe, config, batch, how
        parts = {"model", "mode", "lora", "quantization", "tokens", "objective"}
        train = {"precision", "activation_checkpointing", "activation_offload"}
        text = recipe.model_dump_json(include={*parts}) + recipe.train.model_dump_json(include=train)
        self.parts = (text, config.to_json_string(), batch, how)

    def __hash__(self) -> int:
        return hash(self.parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _TimelineKey) and self.parts == other.parts


@functools.lru_cache(maxsize=256)
def _timeline(key: _TimelineKey) -> Timeline:
    recipe, how = key.recipe, key.how
    short, count = short_model(key.config), len(set(shortened(key.config)[1]))
    attention = attention_at(recipe, key.config, how)
    model, forward = model_at(recipe, short, attention, how)
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    marks = Marks()
    token = getattr(key.config, "image_token_id", 0)
    batch = with_pictures(collate(examples_of(recipe, key.batch, token)), short, key.batch.images, fakes)
    known = recipe.model.train is not None  # the forward reads masks of images, also where a row has none
    with contextlib.ExitStack() as stack:
        stack.enter_context(fakes)
        stack.enter_context(marks.meter)
        stack.enter_context(stand_ins(dtypes(recipe).compute, how.keeps_inputs_alone))
        fill(model, dtypes(recipe).compute if how.casts_weights else None)
        if how.gradients_there:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        for parameter in model.parameters() if how.drops_gradients else ():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_drop)
        marks.watch(_layers(model))
        marks.begin("before" if known else "ids")  # which are few bytes; pixels are many
        on_device = batch.map_tensors(partial(_moved, known))
        marks.begin("before")
        stack.enter_context(KnownIntegers() if known else contextlib.nullcontext())
        try:
            outputs = forward(model, on_device)
        except DynamicOutputShapeException as error:
            name = type(key.config).__name__
            raise NotEstimated(
                f"{name}: its layers choose how much they compute by what they read ({error}), so memory cannot be "
                "calculated from shapes: `check` and `train` with `batch.rows_per_device: auto` try it on the machine"
            ) from None
        loss = forward.objective.trial_loss(outputs, on_device)
        marks.backward = True
        marks.begin("head backward")
        loss.backward()
        marks.end()
    return _parts(marks, count, len(_layers(model)))


def _parts(marks: Marks, kinds: int, layers: int) -> Timeline:
    forward = [marks.part(f"layer {i}") for i in range(layers)]
    backward = [marks.part(f"layer {i} backward") for i in range(layers)]
    # The first layer's backward ends with that of the embedding where its input needs no gradient: a later one's is
    # taken for its kind where there is one.
    if layers > kinds:
        forward, backward = [forward[-1], *forward[1:kinds]], [backward[-1], *backward[1:kinds]]
    return Timeline(
        marks.part("before"),
        tuple(forward),
        marks.part("head"),
        marks.part("head backward"),
        tuple(backward),
        marks.part("before backward"),
    )


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def _moved(known: bool, tensor: Tensor) -> Tensor:
    """Returns a tensor on the device. known: integers keep their values."""
    return tensor if known and not tensor.is_floating_point() else torch.empty(tensor.shape, dtype=tensor.dtype)


def _layers(model: Any) -> list[Any]:
    return list(decoder_layers(unwrap_peft(model.causal_lm)))


class Marks:
    """Cuts what a meter weighs into parts, at the edges of layers."""

    def __init__(self) -> None:
        self.operators, self.backward = OperatorCounter(), False
        self.meter = Meter("cpu", count=self.operators.count)
        self._parts: dict[str, Part] = {}
        self._current, self._start = "", 0

    def begin(self, name: str) -> None:
        self.end()
        self._current, self._start = name, self.meter.now
        self.operators.part = name
        self.meter.begin(f"{name} {len(self._parts)}")

    def end(self) -> None:
        if self._current:
            part = Part(self.meter.peaks[self.meter.phase] - self._start, self.meter.now - self._start)
            before = self._parts.get(self._current, Part(0, 0))
            self._parts[self._current] = Part(max(before.peak, before.kept + part.peak), before.kept + part.kept)

    def part(self, name: str) -> Part:
        return replace(self._parts.get(name, Part(0, 0)), work=self.operators.work(name))

    def watch(self, layers: list[Any]) -> None:
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._enters, index), with_kwargs=True)
            layer.register_forward_hook(partial(self._leaves, index, len(layers)))

    def _enters(self, index: int, _layer: Any, inputs: Any, named: Any) -> None:
        if self.backward:  # computes again
            return
        hidden = inputs[0] if inputs else named["hidden_states"]
        if hidden.requires_grad:
            before = "before backward" if index == 0 else f"layer {index - 1} backward"
            hidden.register_hook(lambda _gradient: self.begin(before))
        self.begin(f"layer {index}")

    def _leaves(self, index: int, layers: int, _layer: Any, _inputs: Any, output: Any) -> None:
        if self.backward:
            return
        if index == layers - 1:
            self.begin("head")
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad:
                hidden.register_hook(lambda _gradient: self.begin(f"layer {index} backward"))
