"""Stages of a pipeline: layers and rank of each, order of micro-batches, and a stage's model.

A stage is a run of consecutive decoder layers; the first also has the embedding, the last the final norm and the head.
Bounds make the largest stage as small as possible, by parameters: these determine its memory (16 bytes each if they
train in fp32 with AdamW) and, except for the embedding, its time (6 FLOPs per token). The embedding costs no time, but
with schedules that start backwards early the first stage holds the most activations.

Schedules                                                     source

gpipe         every forward, then every backward              Huang et al. 2018, https://arxiv.org/abs/1811.06965
1f1b          a backward as soon as one can run               Narayanan et al. 2021, https://arxiv.org/abs/2104.04473
interleaved   the same, with several stages on each rank      the same, section 2.2
zero_bubble   gradients of weights when a rank would wait     Qi et al. 2023, https://arxiv.org/abs/2401.10241 (ZB-H1)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from finetune.engine.parallelism import Schedule
from finetune.errors import UserError
from finetune.models.mtp import head_of
from finetune.models.shown_layers import PassOn, showing
from finetune.models.text_part import name_body
from finetune.models.wrapped import WrappedModel, output_head
from finetune.utils import divisors, unwrap_peft

SINGLE_STAGE_SCHEDULES = ("gpipe", "1f1b")  # one stage on each rank


@dataclass(frozen=True)
class Layout:
    """Stage s has layers [bounds[s], bounds[s + 1]) and is run by pipeline rank s modulo `ranks`."""

    bounds: tuple[int, ...]
    ranks: int

    @property
    def stages(self) -> int:
        return len(self.bounds) - 1

    def layers(self, stage: int) -> range:
        return range(self.bounds[stage], self.bounds[stage + 1])

    def rank_of(self, stage: int) -> int:
        return stage % self.ranks

    def stages_of(self, rank: int) -> range:
        return range(rank, self.stages, self.ranks)

    def layers_of(self, rank: int) -> frozenset[int]:
        return frozenset(layer for stage in self.stages_of(rank) for layer in self.layers(stage))


def lay_out(model: Any, stages: int, ranks: int, scores: bool = False) -> Layout:
    """Returns the layout of a model that may be on `meta`. scores: a small score head replaces the LM head."""
    name_body(model)
    base = model.base_model
    layers = [_numel(layer) for layer in base.layers]
    head = 0 if scores else _numel(model.get_output_embeddings())
    last = head + sum(_numel(getattr(base, name)) for name in final_norms(base))
    last += 0 if (ahead := head_of(model)) is None else _numel(ahead)
    return Layout(stage_bounds(tuple(layers), stages, _numel(model.get_input_embeddings()), last), ranks)


def _numel(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@cache
def stage_bounds(layers: tuple[int, ...], stages: int, first: int, last: int) -> tuple[int, ...]:
    """Returns bounds with the smallest possible maximum cost of a stage, then the smallest sum of squared costs.

    layers: cost of each layer; first, last: additional costs of the first and the last stage. No stage is empty.

    >>> stage_bounds((1,) * 32, 4, 2, 3)
    (0, 7, 16, 25, 32)
    """
    sums = [0]
    for layer in layers:
        sums.append(sums[-1] + layer)

    def cost(stage: int, begin: int, end: int) -> int:
        return sums[end] - sums[begin] + (first if stage == 0 else 0) + (last if stage == stages - 1 else 0)

    @cache
    def smallest_maximum(stage: int, begin: int) -> float:
        """Returns the smallest maximum cost of the stages from this one on."""
        if stage == stages - 1:
            return cost(stage, begin, len(layers))
        ends = range(begin + 1, len(layers) - (stages - 2 - stage))
        return min((max(cost(stage, begin, end), smallest_maximum(stage + 1, end)) for end in ends), default=math.inf)

    limit = smallest_maximum(0, 0)

    @cache
    def most_even(stage: int, begin: int) -> tuple[float, tuple[int, ...]]:
        """Returns (sum of squared costs, ends) of the stages from this one on, none of which exceeds `limit`."""
        if stage == stages - 1:
            own = cost(stage, begin, len(layers))
            return (own**2 if own <= limit else math.inf), (len(layers),)
        best: tuple[float, tuple[int, ...]] = (math.inf, ())
        for end in range(begin + 1, len(layers) - (stages - 2 - stage)):
            own = cost(stage, begin, end)
            if own > limit:
                break
            rest, ends = most_even(stage + 1, end)
            best = min(best, (own**2 + rest, (end, *ends)))
        return best

    return (0, *most_even(0, 0)[1])


def bubble_share(schedule: Schedule, ranks: int, stages_per_rank: int, micro_batches: int) -> float:
    """Returns the share of a step in which a rank is idle, if stages are equal and backwards take twice a forward.

    With p ranks, m micro-batches and v stages on a rank, in units of one stage's forward and backward of one
    micro-batch: it works for v m and waits for p - 1 (Narayanan et al. 2021, section 2.2). Under ZB-H1 it waits for a
    third of that: forward, gradient of the input and gradient of the weights take a third each, and the wait is for
    the first two less the third (Qi et al. 2023, table 2).
    """
    waits = (ranks - 1) / (3 if schedule == "zero_bubble" else 1)
    return waits / (stages_per_rank * micro_batches + waits)


def schedulable_micro_batches(schedule: Schedule, ranks: int, micro_batches: int) -> int:
    """Returns the smallest number of micro-batches, at least `micro_batches`, that a schedule can run.

    1F1B needs one per stage. Schedules with several stages per rank run rounds of about `ranks` micro-batches, all of
    the same size.

    >>> [schedulable_micro_batches("1f1b", 4, n) for n in (1, 4, 5)]
    [4, 4, 5]
    >>> [schedulable_micro_batches("interleaved", 4, n) for n in (3, 7, 9)]
    [3, 7, 10]
    """
    if schedule == "gpipe":
        return micro_batches
    if schedule == "1f1b":
        return max(micro_batches, ranks)
    while micro_batches % max(1, micro_batches // ranks):
        micro_batches += 1
    return micro_batches


_SMALL_BUBBLE = 0.2  # of a step: four micro-batches for each rank, when Huang et al. 2018 call it negligible (2.3)


def micro_batch_sizes(schedule: Schedule, ranks: int, stages_per_rank: int, rows: int) -> list[int]:
    """Returns sizes of micro-batches, ascending, that a schedule runs with a small bubble; the one with the smallest if
    there is none. rows: of a step, in each pipeline.

    >>> micro_batch_sizes("1f1b", 2, 1, 32), micro_batch_sizes("1f1b", 2, 1, 6)
    ([1, 2, 4], [1])
    """
    sizes = [n for n in divisors(rows) if schedulable_micro_batches(schedule, ranks, rows // n) == rows // n]
    small = [n for n in sizes if bubble_share(schedule, ranks, stages_per_rank, rows // n) < _SMALL_BUBBLE]
    return small or sizes[:1]


# --- one stage of a model
#
# The modules of other stages are on `meta`, without memory, so parameters have the same names as on every other
# backend. While a stage runs, the base model has that stage's layers, and in place of the others modules that
# return the hidden states unchanged; transformers computes embeddings, masks and rotations from
# `inputs_embeds` and `position_ids`. What it does to hidden states before its first layer and after its last one is
# part of the first and the last stage alone: others begin and end in the place of a layer.


class _OtherLayer(nn.Module):
    """In place of another stage's layer, whose attributes base models read."""

    received: Tensor | None = None  # what it returns, in place of what comes
    returned: Tensor | None = None

    def __init__(self, layer: nn.Module):
        super().__init__()
        self._layer = [layer]  # in a list, so that it is no submodule

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._layer[0], name)

    def forward(self, hidden: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        self.returned = hidden if self.received is None else self.received
        return self.returned


class StageModel(nn.Module):
    """Model of a stage with the stage's parameters, called with the previous stage's hidden states."""

    def __init__(self, model: WrappedModel, layout: Layout, index: int, compute: torch.dtype):
        """compute: type of the hidden states passed between stages."""
        super().__init__()
        self.index, self.is_last = index, index == layout.stages - 1
        self._model = [model]  # in a list, so that it is no submodule
        self._compute = compute
        base = unwrap_peft(model.causal_lm).base_model
        mine = layout.layers(index)
        layers = nn.ModuleList(layer if i in mine else _OtherLayer(layer) for i, layer in enumerate(base.layers))
        norms: dict[str, nn.Module] = {} if self.is_last else {name: PassOn() for name in final_norms(base)}
        self._shown: dict[str, nn.Module] = {"layers": layers, **norms}
        self.own_modules = nn.ModuleList(parts_of(model.causal_lm, layout, index))

    def run(self, arguments: dict[str, Any], received: Tensor | None) -> Any:
        """Returns the model's output; before the last stage hidden states (B, T, D), as `received`."""
        (model,), layers = self._model, self._shown["layers"]
        assert isinstance(layers, nn.ModuleList)
        first, last = layers[0], layers[-1]  # of the whole model; of other stages, unless this one has them
        if (caches := arguments.get("past_key_values")) is not None:
            arguments = {**arguments, "past_key_values": caches[self.index]}
        if received is not None:
            arguments = {**arguments, "inputs_embeds": received}
            del arguments["input_ids"]
        try:
            with showing(unwrap_peft(model.causal_lm).base_model, self._shown):
                if isinstance(first, _OtherLayer):
                    first.received = received
                if self.is_last:
                    return model(**arguments)
                inputs = {name: value for name, value in arguments.items() if name not in ("logits_to_keep", "targets")}
                model.hidden_states(**inputs)
                hidden = last.returned
        finally:
            for layer in (first, last):  # hidden states are the schedule's
                if isinstance(layer, _OtherLayer):
                    layer.received = layer.returned = None
        if hidden.dtype != self._compute:
            name = type(unwrap_peft(model.causal_lm)).__name__
            raise UserError(
                f"pipeline: hidden states between the layers of {name} are {hidden.dtype}, not {self._compute}. Fix: "
                "use train.precision: fp32, or another accelerate config"
            )
        if torch.is_grad_enabled() and not hidden.requires_grad:
            hidden.requires_grad_()  # no parameter up to here trains, but the schedule sends a gradient
        return hidden


def parts_of(model: Any, layout: Layout, stage: int) -> list[nn.Module]:
    """Returns the modules of a stage."""
    causal = unwrap_peft(model)
    base = causal.base_model
    parts = [base.layers[i] for i in layout.layers(stage)]
    if stage == 0:
        parts.append(causal.get_input_embeddings())
    if stage == layout.stages - 1:
        if (ahead := head_of(model)) is not None:  # it embeds the next tokens
            parts += [causal.get_input_embeddings(), ahead]
        parts += [*(getattr(base, name) for name in final_norms(base)), output_head(model)]
    return parts


def final_norms(base: Any) -> list[str]:
    """Returns the names of a base model's parts that have weights and are neither embedding nor layers: of one that can
    be divided its final norm, or none."""
    others = ((name, part) for name, part in base.named_children() if part is not base.layers)
    embedding = base.get_input_embeddings()
    return [name for name, part in others if part is not embedding and next(part.parameters(), None) is not None]


def holders(model: Any, layout: Layout) -> dict[str, list[int]]:
    """Returns the pipeline ranks that have each parameter, by all of its names; two for a tied embedding and head, and
    for an embedding that a head reads which predicts ahead."""
    ranks = _ranks_of_tensors(model, layout)
    named = model.named_parameters(remove_duplicate=False)
    return {name: sorted(ranks[id(parameter)]) for name, parameter in named}


def buffer_holders(model: Any, layout: Layout) -> dict[str, list[int]]:
    """Returns the pipeline ranks that have each buffer, by all of its names; every rank has those outside of stages, as
    of rotary embeddings."""
    ranks, everywhere = _ranks_of_tensors(model, layout), set(range(layout.ranks))
    named = model.named_buffers(remove_duplicate=False)
    return {name: sorted(ranks.get(id(buffer), everywhere)) for name, buffer in named}


def _ranks_of_tensors(model: Any, layout: Layout) -> dict[int, set[int]]:
    ranks: dict[int, set[int]] = {}
    for stage in range(layout.stages):
        for part in parts_of(model, layout, stage):
            for tensor in (*part.parameters(), *part.buffers()):
                ranks.setdefault(id(tensor), set()).add(layout.rank_of(stage))
    return ranks


def keep_only(model: nn.Module, keeps: Callable[[str], bool], device: torch.device) -> None:
    """Move parameters whose names `keeps` accepts to the device, others to `meta`; tied ones stay tied."""
    named = list(model.named_parameters(remove_duplicate=False))  # kept alive, so that ids are unique
    elsewhere: dict[int, nn.Parameter] = {}
    for name, parameter in named:
        if keeps(name):
            if parameter.device != device and not parameter.is_meta:
                parameter.data = parameter.data.to(device)
            continue
        if id(parameter) not in elsewhere:
            without = torch.empty_like(parameter.data, device="meta")
            elsewhere[id(parameter)] = nn.Parameter(without, parameter.requires_grad)
        module, _, own = name.rpartition(".")
        model.get_submodule(module)._parameters[own] = elsewhere[id(parameter)]
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)
