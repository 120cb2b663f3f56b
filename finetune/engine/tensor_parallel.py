"""Tensor parallel: the ranks of a group have different columns of the same matrices and work on the same rows.

    full x -> column parallel matrix -> some of the features -> row parallel matrix -> sum over the ranks -> full x

(Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, section 3.) The model's own plan says which matrices are paired
(transformers' `base_model_tp_plan`). Embedding and head are split by tokens (`vocabulary_parallel.py`), experts are
dealt to the ranks (`tensor_experts.py`). All other parameters are full on every rank, such as norms, and towers of
multimodal models, which compute the same on each. Between the matrices each rank has some of the tokens of a row
(`split_tokens.py`), if a trial has shown that the model is the same then (`split_trial.py`).

Parameters stay plain tensors of the size of a rank's shard, so adapters, 8-bit optimizers and packed attention
over the local heads work as on a smaller model; a `ParameterShard` gives the range of each in the full parameter, a
`PackedShard` the blocks of packed weights (`tensor_packed.py`). In an adapter, the matrix on the sharded side is
sharded: B of a column parallel matrix, A of a row parallel one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import dropout

from finetune.engine.split_tokens import RowTokens, gather_tokens, split_tokens, sum_of_columns
from finetune.engine.tensor_dora import MAGNITUDE, check_embeddings, shard_dora
from finetune.engine.tensor_experts import shard_experts
from finetune.engine.tensor_group import Communicate, ParameterShard, ShardedParameters, TensorGroup
from finetune.engine.tensor_packed import packed_shard
from finetune.engine.vocabulary_parallel import split_vocabulary
from finetune.errors import UserError
from finetune.models.config import tensor_plan
from finetune.models.moe import stacked_experts
from finetune.models.mtp import head_of
from finetune.models.packed_linear import Fp8Linear, is_4bit, product
from finetune.models.patches import replace_forward
from finetune.models.towers import language_part
from finetune.utils import nearest_divisors, unwrap_peft


@dataclass(frozen=True)
class Style:
    """Sharding of a linear layer, by the plan."""

    dim: int  # dimension of the weight: 0 the outputs (column parallel), 1 the inputs (row parallel)
    full: bool = False  # a column parallel layer gathers its output, a row parallel one scatters its input


STYLES = {
    "colwise": Style(0),
    "rowwise": Style(1),
    "colwise_gather_output": Style(0, full=True),
    "rowwise_split_input": Style(1, full=True),
}
PARTIAL = "replicated_with_grad_allreduce"  # full weights, with gradients from this rank's heads only
# Full on every rank, with full input and output, or split by tokens below.
REPLICATED = {"replicate", "embedding_rowwise", "embedding_colwise"}


def parallelize(
    model: Any, group: TensorGroup, here: Set[nn.Module] | None = None, splits_tokens: bool = False
) -> ShardedParameters:
    """Shard the matrices of a model on `meta`, in place, and make their modules communicate. Raises UserError.

    here: modules of this rank's pipeline stages; None: all. splits_tokens: between matrices each rank has some of the
    tokens.
    """
    causal = unwrap_peft(model)
    base, ahead, plan = language_part(causal), head_of(model), tensor_plan(causal.config)
    roots = [base] if ahead is None else [base, ahead]  # the plan's `layers.*` are in both
    of_experts = shard_experts(model, group)
    _check_adapted_tensors(model)
    names = {id(module): name for name, module in model.named_modules()}
    shards: dict[str, ParameterShard] = {}
    partial = set[str]()
    inputs: defaultdict[str, SharedInput] = defaultdict(lambda: SharedInput(group))  # by receiving module
    receiving, row = [module for root in roots for module in _receivers(root, plan)], None
    if splits_tokens:
        mine, row = set(causal.modules()) if here is None else here, RowTokens()
        for root in roots:  # each is a run of layers
            split_tokens(root.layers, mine, row, group)
        gather_tokens(receiving, row, group)
    for pattern, style, path, planned in (one for root in roots for one in _planned(root, plan)):
        if style == PARTIAL:
            partial |= {f"{names[id(planned)]}.{name}" for name, _ in planned.named_parameters()}
        elif style not in REPLICATED:
            if style not in STYLES or not isinstance(planned, nn.Module):
                known = ", ".join([*STYLES, PARTIAL, *sorted(REPLICATED)])
                raise UserError(
                    f"tensor parallel: the plan of {type(causal).__name__} has `{pattern}: {style}`, which is not "
                    f"supported. Linear layers of {known} are. Fix: use fsdp2"
                )
            for module in _linear_layers(planned, STYLES[style], group, path):
                whole = names[id(module)]
                receiver = whole if "lora_" in whole else names[id(planned)].rpartition(".")[0]
                sharded = _shard_linear(module, STYLES[style], group, inputs[receiver], row, path)
                shards |= {f"{names[id(module)]}.{name}": shard for name, shard in sharded.items()}
            of_magnitudes = shard_dora(planned, STYLES[style].dim, STYLES[style].full, group, row)
            shards |= {f"{names[id(module)]}.weight": shard for module, shard in of_magnitudes}
            if row is not None:  # of the adapter's other half: from this rank's columns of B, or its tokens; as a bias
                own = {f"{names[id(planned)]}.{name}" for name, _ in planned.named_parameters()}
                factors = {name for name in own if "lora_" in name and MAGNITUDE not in name}
                partial |= (own if STYLES[style].dim == 1 else factors) - set(shards)
    if row is not None:
        outside = {id(p) for root in roots for p in root.layers.parameters()}
        outside -= {id(p) for m in receiving for p in m.parameters()}
        partial |= {name for name, p in model.named_parameters() if id(p) in outside and name not in shards}
    for root in roots:
        _check_neighbours(root, plan)
    check_embeddings(model)
    ends = split_vocabulary(model, group)
    every = {**shards, **of_experts.shards, **ends.shards}
    return ShardedParameters(every, frozenset(partial) | of_experts.partial | ends.partial)


def _receivers(root: nn.Module, plan: Mapping[str, str]) -> list[nn.Module]:
    """Returns the modules whose matrices receive all features of their input, and have some of the outputs."""
    paths = {path.rpartition(".")[0] for _, style, path, _ in _planned(root, plan) if style.startswith("colwise")}
    return [root.get_submodule(path) for path in sorted(paths)]


def _check_adapted_tensors(model: Any) -> None:
    """Raises UserError for adapters on tensors of experts that `shard_experts` does not know."""
    of_experts = {name for path in stacked_experts(model) for name in _with_wrappers(path)}
    for path, module in model.named_modules():
        if hasattr(module, "parameter_name") and hasattr(module, "lora_A") and path not in of_experts:
            raise UserError(
                f"tensor parallel: adapters on {path}.{module.parameter_name} cannot be divided. Fix: leave it out of "
                "lora.targets, or use fsdp2"
            )


def _with_wrappers(path: str) -> set[str]:
    """Returns the paths of the wrappers around a module: a.base_layer.base_layer -> a, a.base_layer."""
    parents = {path}
    while path.endswith(".base_layer"):
        path = path.removesuffix(".base_layer")
        parents.add(path)
    return parents


def _check_neighbours(base: nn.Module, plan: Mapping[str, str]) -> None:
    """Raises UserError for a weight without a plan next to a column parallel matrix: it would receive some of the
    features, and each rank part of its gradient."""
    named = {name: style for _, style, name, _ in _planned(base, plan)}
    for parent in {name.rpartition(".")[0] for name, style in named.items() if style == "colwise"}:
        module = base.get_submodule(parent)
        weights = {name for name, child in module.named_children() if next(child.parameters(), None) is not None}
        weights |= {name for name, _ in module.named_parameters(recurse=False)}
        if missing := sorted(f"{parent}.{name}" for name in weights if f"{parent}.{name}" not in named):
            raise UserError(
                f"tensor parallel: the plan of {type(base).__name__} does not mention `{missing[0]}`. It is next to "
                "matrices that the plan shards. Fix: use fsdp2"
            )


def _planned(base: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, str, str, Any]]:
    """Yields (pattern, style, name, module or parameter) for every entry of the plan, but those of experts, which
    `shard_experts` has sharded."""
    experts = {
        re.sub(r"(\.base_layer)*$", ".", path, count=1) for path in stacked_experts(base)
    }  # with adapters, if any
    named: dict[str, Any] = {**dict(base.named_parameters()), **dict(base.named_modules())}
    named = {name: planned for name, planned in named.items() if not f"{name}.".startswith(tuple(experts))}
    for pattern, style in plan.items():
        regex = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        yield from ((pattern, style, name, planned) for name, planned in named.items() if regex.fullmatch(name))


def _linear_layers(module: nn.Module, style: Style, group: TensorGroup, path: str) -> Iterator[nn.Linear]:
    """Yields the linear layers to shard for a layer of the plan: itself, or those of the peft layer in its place."""
    if type(module) in (nn.Linear, Fp8Linear) or is_4bit(module):
        yield module  # pyright: ignore[reportReturnType]
    elif hasattr(module, "lora_A"):
        adapted: Any = module
        if style.dim == 1 and not style.full:
            for layer in adapted.lora_dropout.values():
                if isinstance(layer, nn.Dropout):
                    sharded_dropout(layer, group)
        for each in (adapted.base_layer, *(adapted.lora_B if style.dim == 0 else adapted.lora_A).values()):
            yield from _linear_layers(each, style, group, path)
    else:
        raise UserError(
            f"tensor parallel: {path} is a {type(module).__name__}, which cannot be sharded. Only linear layers can, "
            "with LoRA or without. Fix: use fsdp2"
        )


def _shard_linear(
    module: nn.Linear, style: Style, group: TensorGroup, shared_input: SharedInput, row: RowTokens | None, path: str
) -> dict[str, ParameterShard]:
    """Shard a linear layer, and make it communicate. Returns the shards by parameter. Raises UserError.

    row: the tokens of a model whose receiving modules gather them, so that its layers need not share their input."""
    size = (module.out_features, module.in_features)[style.dim]
    if size % group.size:
        raise UserError(
            f"tensor parallel: the {size} {'outputs' if style.dim == 0 else 'inputs'} of {path} are not divisible by "
            f"{group.size} ranks. Fix: make the tensor size {nearest_divisors(group.size, size)}"
        )
    shard = group.shard(style.dim, size)
    sharded = {name: shard for name, _ in module.named_parameters() if name == "weight" or style.dim == 0}
    if type(module) is not nn.Linear:
        sharded["weight"] = packed_shard(module, style.dim, group, path)
    for name, own in sharded.items():
        parameter = getattr(module, name)
        setattr(module, name, nn.Parameter(own.take(parameter.detach()).clone(), parameter.requires_grad))
    if style.dim == 0:  # it has this rank's rows of the weight, its outputs
        module.out_features //= group.size
        if row is None:
            shared_input.layers += 1
            module.register_forward_pre_hook(lambda _module, inputs: shared_input(*inputs))
        if style.full:
            module.register_forward_hook(
                lambda _module, _inputs, features: Communicate.apply(features, group, "gather")
            )
        return sharded

    def forward(x: Tensor) -> Tensor:  # with this rank's columns of the weight, its inputs
        features: Any = Communicate.apply(x, group, "scatter") if style.full else x
        output = sum_of_columns(product(module, features), group, row)
        return output if module.bias is None else output + module.bias.to(output.dtype)  # once, not on each rank

    module.in_features //= group.size
    replace_forward(module, forward, "row parallel")
    return sharded


# --- inputs of sharded linear layers


class SharedInput:
    """Input of several layers, copied to the ranks once, so that the backward sums its gradient once for all."""

    def __init__(self, group: TensorGroup):
        self.layers = 0
        self._group, self._remaining, self._x, self._copy = group, 0, None, None

    def __call__(self, x: Tensor) -> Tensor:
        if x is not self._x:
            self._x, self._copy, self._remaining = x, Communicate.apply(x, self._group, "copy"), self.layers
        copy: Any = self._copy
        self._remaining -= 1
        if self._remaining == 0:
            self._x = self._copy = None  # or an activation would stay until the next forward
        return copy


def sharded_dropout(module: Any, group: TensorGroup) -> None:
    """Draw the same mask for the full width on every rank, as one process does, and apply this rank's slice."""

    def forward(x: Tensor) -> Tensor:
        if not module.training:
            return x
        mask = dropout(x.new_ones(*x.shape[:-1], x.shape[-1] * group.size), module.p)
        return x * group.own(mask)

    replace_forward(module, forward, "sharded dropout")
