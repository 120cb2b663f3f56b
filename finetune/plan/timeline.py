"""Memory over one micro-batch: a forward and a backward of the run's own code, on fake tensors.

    before | layer 0 | layer 1 | ... | head || head | ... | layer 1 | layer 0 | before
               forward                                backward

Every storage is weighed from its allocation to its release: saved and recomputed activations and the largest moment of
each part are counted, and a tensor that several operations save is counted once. The model has one layer more than it
has kinds of layers; `memory.py` lays the parts end to end for all layers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

# torch documents this mode, and has it under no other name.
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from transformers import PretrainedConfig

from finetune.data.batch import collate, with_ahead
from finetune.data.media.family_table import file_tokens
from finetune.data.samples import MediaKind
from finetune.models.base_config import dtypes
from finetune.models.casts import cast_once
from finetune.models.shown_layers import PassOn
from finetune.models.towers import decoder_layers
from finetune.plan.images import KnownIntegers, with_pictures
from finetune.plan.meter import Meter, OperatorCounter, Work
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
from finetune.plan.shapes import CacheKey, shortened, standing_for
from finetune.plan.stand_ins import stand_ins
from finetune.recipe import Recipe
from finetune.utils import unwrap_peft

NO_WORK = Work()


@dataclass(frozen=True)
class Part:
    """Bytes above those at its begin."""

    peak: int
    kept: int  # at its end; negative if it frees memory
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
    """Returns the parts of a micro-batch on one rank. Raises UserError if the model cannot be made."""
    train = {"precision", "activation_checkpointing", "activation_offload"}
    one_stage = replace(how, pipeline=1)  # a stage's layers are added up from one timeline of all kinds
    return _timeline(CacheKey(recipe, config, train, batch, one_stage))


@functools.lru_cache(maxsize=256)
def _timeline(key: CacheKey) -> Timeline:
    return weigh(key.recipe, key.config, *key.others)


def weigh(
    recipe: Recipe, config: PretrainedConfig, heaviest: HeaviestBatch, how: How, standing: Sequence[int] | None = None
) -> Timeline:
    """Runs the micro-batch. standing: the layer that runs in place of each; None: as `standing_for`. Raises UserError
    if the model cannot be made."""
    short, kinds = short_model(config), len(set(shortened(config)[1]))
    attention = attention_at(recipe, config, how)
    model, forward = model_at(recipe, short, attention, how)
    fakes, marks = FakeTensorMode(allow_non_fake_inputs=True), Marks()
    of_files: tuple[MediaKind, ...] = tuple(
        dict.fromkeys(one.as_still for of_document in heaviest.images for one in of_document)
    )
    rows = collate(examples_of(recipe.objective, heaviest, file_tokens(config, of_files)))
    rows = rows if recipe.mtp_weight is None else with_ahead(rows)
    batch = with_pictures(rows, short, heaviest.images, fakes)
    sees_images = recipe.model.train is not None  # the forward reads masks of images even if a row has none
    layers, standing = decoder_layers(unwrap_peft(model.causal_lm)), [*(standing or standing_for(short))]
    standing += range(len(standing), len(layers))  # those that the config does not count
    for i in set(range(len(layers))) - set(standing):
        layers[i] = PassOn()

    def on_device(tensor: Tensor) -> Tensor:
        keeps_values = sees_images and not tensor.is_floating_point()
        return tensor if keeps_values else torch.empty(tensor.shape, dtype=tensor.dtype)

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    with contextlib.ExitStack() as stack:
        stack.enter_context(fakes)
        stack.enter_context(cast_once())
        stack.enter_context(marks.meter)
        stack.enter_context(stand_ins(dtypes(recipe).compute, how.keeps_inputs_alone, how.device != "cpu"))
        fill(model, dtypes(recipe).compute if how.casts_weights else None)
        for parameter in model.parameters():
            if how.gradients_there:
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            if how.drops_gradients and parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(drop)
        marks.watch(list(layers))
        marks.begin("before" if sees_images else "ids")  # ids are few bytes; pixels are many
        inputs = batch.map_tensors(on_device)
        marks.begin("before")
        stack.enter_context(KnownIntegers() if sees_images else contextlib.nullcontext())
        try:
            outputs = forward(model, inputs)
        except DynamicOutputShapeException as error:
            raise NotEstimated(
                f"{type(config).__name__}: the values that its layers read decide how much they compute ({error}), so "
                "memory cannot be calculated from shapes: `check` and `train` with `batch.rows_per_device: auto` try "
                "it on the machine"
            ) from None
        loss = forward.objective.trial_loss(outputs, inputs)
        marks.backward = True
        marks.begin("head backward")
        loss.backward()
        marks.end()
    # The first layer's backward ends with that of the embedding if its input needs no gradient: a later layer of the
    # same kind stands for it if there is one.
    indices = [len(layers) - 1, *range(1, kinds)] if len(layers) > kinds else list(range(len(layers)))
    return Timeline(
        marks.part("before"),
        tuple(marks.part(f"layer {standing[i]}") for i in indices),
        marks.part("head"),
        marks.part("head backward"),
        tuple(marks.part(f"layer {standing[i]} backward") for i in indices),
        marks.part("before backward"),
    )


class Marks:
    """Divides the bytes of a meter into parts, at the edges of layers."""

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
        """What is done for a layer in whose place `PassOn` is, such as a slice of its inputs, is no part of another."""
        run = [index for index, layer in enumerate(layers) if not isinstance(layer, PassOn)]

        def passes(*_: object) -> None:
            if not self.backward:
                self.begin("passed on")

        def enters(index: int, earlier: int | None, _layer: Any, inputs: Any, named: Any) -> None:
            if self.backward:  # a layer that is computed again
                return
            hidden = inputs[0] if inputs else named["hidden_states"]
            if hidden.requires_grad:
                before = "before backward" if earlier is None else f"layer {earlier} backward"
                hidden.register_hook(lambda _gradient: self.begin(before))
            self.begin(f"layer {index}")

        def leaves_last(_layer: Any, _inputs: Any, output: Any) -> None:
            if self.backward:
                return
            self.begin("head")
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad:
                hidden.register_hook(lambda _gradient: self.begin(f"layer {run[-1]} backward"))

        for index, earlier in zip(run, [None, *run], strict=False):
            layers[index].register_forward_pre_hook(partial(enters, index, earlier), with_kwargs=True)
        for index in set(range(len(layers))) - set(run):
            layers[index].register_forward_pre_hook(passes)
        layers[-1].register_forward_hook(leaves_last)
