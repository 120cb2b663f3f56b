"""Tensor parallel: the ranks of a group hold other columns of the same matrices and work on the same rows.

    x whole -> columns of a matrix (colwise) -> a part of the features -> rows of the next (rowwise) -> sum -> x whole

(Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, section 3.) Which matrices go in pairs is the model's own plan
(transformers' `base_model_tp_plan`). Everything else is whole: norms between layers, embeddings, the head.

Parameters stay plain tensors of the size that a rank holds, so that what is added to a matrix (adapters, 8-bit
optimizers, packed attention over the local heads) works on them as on a smaller model's; `Cut` says which part of the
whole each is. An adapter of a matrix is cut where it touches the cut side: B of a colwise one, A of a rowwise one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from finetune.engine.cut_linear import Entry, Group, drop_as_if_whole, make_colwise, make_rowwise
from finetune.engine.rules.asked import nearest, tensor_plan
from finetune.errors import UserError
from finetune.utils import unwrap_peft


@dataclass(frozen=True)
class Cut:
    """Of a parameter's dimension `dim`, the part `index` of `count`."""

    dim: int
    index: int
    count: int

    def whole(self, shape: torch.Size) -> torch.Size:
        """Of the whole, from that of a part."""
        return torch.Size(size * self.count if dim == self.dim else size for dim, size in enumerate(shape))

    def of(self, whole: Tensor) -> Tensor:
        return whole.chunk(self.count, self.dim)[self.index]


@dataclass(frozen=True)
class Style:
    """What the plan's word does to a linear layer."""

    dim: int  # of its weight that is cut: 0 the outputs, 1 the inputs
    whole: bool = False  # what comes in, of a rowwise, or goes out, of a colwise one, is whole all the same


STYLES = {
    "colwise": Style(0),
    "rowwise": Style(1),
    "colwise_gather_output": Style(0, whole=True),
    "rowwise_split_input": Style(1, whole=True),
}
PARTIAL = "replicated_with_grad_allreduce"  # whole weights, whose gradient comes from this rank's heads alone
WHOLE = {"replicate", "embedding_rowwise", "embedding_colwise"}  # on every rank, and so is what goes in and out


@dataclass(frozen=True)
class Divided:
    """Of a model that was cut, by parameter name."""

    cuts: Mapping[str, Cut]
    partial: frozenset[str]  # whole, but with a share of the gradient on each rank


def divide(model: Any, group: Group) -> Divided:
    """Cut the matrices of a model on `meta`, in place, and teach their modules to communicate.

    Raises UserError where the model's plan has what is not known here, or sizes do not divide.
    """
    causal = unwrap_peft(model)
    base, plan = causal.base_model, tensor_plan(causal.config)
    names = {id(module): name for name, module in model.named_modules()}
    cuts: dict[str, Cut] = {}
    partial: set[str] = set()
    entries: defaultdict[str, Entry] = defaultdict(lambda: Entry(group))  # by where an input comes in
    for pattern, style, path, found in _planned(base, plan):
        if style == PARTIAL:
            partial |= {f"{names[id(found)]}.{name}" for name, _ in found.named_parameters()}
        elif style not in WHOLE:
            if style not in STYLES or not isinstance(found, nn.Module):
                raise UserError(_unknown(causal, pattern, style))
            for module in _matrices(found, STYLES[style], group, path):
                own_input = names[id(module)] if "lora_" in names[id(module)] else path.rpartition(".")[0]
                made = _cut(module, STYLES[style], group, entries[own_input], path)
                cuts |= {f"{names[id(module)]}.{name}": cut for name, cut in made.items()}
    _check_nothing_is_left_out(base, plan)
    return Divided(cuts, frozenset(partial))


def _planned(base: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, str, str, Any]]:
    """(pattern, style, name, module or parameter) of all that the plan names."""
    named: dict[str, Any] = {**dict(base.named_parameters()), **dict(base.named_modules())}
    for pattern, style in plan.items():
        regex = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        yield from ((pattern, style, name, found) for name, found in named.items() if regex.fullmatch(name))


def _unknown(causal: Any, pattern: str, style: str) -> str:
    known = ", ".join([*STYLES, PARTIAL, *sorted(WHOLE)])
    return (
        f"tensor parallel: the plan of {type(causal).__name__} has `{pattern}: {style}`, which is not known here "
        f"(linear layers of {known} are): use fsdp2"
    )


def _check_nothing_is_left_out(base: nn.Module, plan: Mapping[str, str]) -> None:
    """A weight of which the plan says nothing, beside a matrix that passes on only some features, would see these alone
    and its gradient would be a share. Raises UserError."""
    planned = {name for _, _, name, _ in _planned(base, plan)}
    parents = {name.rpartition(".")[0] for _, style, name, _ in _planned(base, plan) if style == "colwise"}
    for parent in parents:
        module = base.get_submodule(parent)
        held = {name for name, child in module.named_children() if any(True for _ in child.parameters())}
        held |= {name for name, _ in module.named_parameters(recurse=False)}
        for name in sorted(held):
            if f"{parent}.{name}" not in planned:
                raise UserError(
                    f"tensor parallel: the plan of {type(base).__name__} says nothing of `{parent}.{name}`, which lies "
                    "beside matrices that it cuts: use fsdp2"
                )


def _matrices(module: nn.Module, style: Style, group: Group, path: str) -> Iterator[nn.Linear]:
    """Linear layers to cut for one of the plan: itself, or what peft has put in its place."""
    if type(module) is nn.Linear:
        yield module
    elif hasattr(module, "lora_A"):
        adapted: Any = module
        if style.dim == 1 and not style.whole:
            for drop in adapted.lora_dropout.values():
                if isinstance(drop, nn.Dropout):
                    drop_as_if_whole(drop, group)
        for each in (adapted.base_layer, *(adapted.lora_B if style.dim == 0 else adapted.lora_A).values()):
            yield from _matrices(each, style, group, path)
    else:
        raise UserError(
            f"tensor parallel: {path} is a {type(module).__name__}; only linear layers, with LoRA or without, can be "
            "cut: use fsdp2"
        )


def _cut(module: nn.Linear, style: Style, group: Group, entry: Entry, path: str) -> dict[str, Cut]:
    """By the name of the module's parameter. Raises UserError where its size does not divide."""
    size = module.weight.shape[style.dim]
    if size % group.size:
        raise UserError(
            f"tensor parallel: {path} has {size} {'outputs' if style.dim == 0 else 'inputs'}, which {group.size} ranks "
            f"cannot share: make the tensor size {nearest(group.size, size)}"
        )
    cut = Cut(style.dim, group.index, group.size)
    made = {name: cut for name, _ in module.named_parameters() if name == "weight" or style.dim == 0}
    for name in made:
        parameter = getattr(module, name)
        setattr(module, name, nn.Parameter(cut.of(parameter.detach()).clone(), parameter.requires_grad))
    if style.dim == 0:
        module.out_features //= group.size
        make_colwise(module, group, entry, style.whole)
    else:
        module.in_features //= group.size
        make_rowwise(module, group, style.whole)
    return made
