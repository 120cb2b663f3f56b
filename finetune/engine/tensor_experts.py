"""Experts of a tensor parallel model: each rank has some experts of every layer, and all tokens.

    all tokens, routed alike on each rank -> this rank's experts, for the tokens that chose them -> sum over the ranks

Whole experts, not columns of each as in transformers' plan (`moe_tp_experts`): as many bytes, products of full size,
and one range of each stacked parameter; ranks wait for the one whose experts are chosen most. Megatron does so with
experts in a tensor group (`MoEAllGatherTokenDispatcher`,
https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/transformer/moe/token_dispatcher.py).
Adapters on experts are full on every rank, which has gradients for its own experts only.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from finetune.engine.tensor_group import Communicate, ParameterShard, ShardedParameters, TensorGroup
from finetune.errors import UserError
from finetune.models.moe import adapters_of, outputs_of_rows, stacked_experts
from finetune.models.patches import replace_forward
from finetune.utils import nearest_divisors


def shard_experts(model: nn.Module, group: TensorGroup) -> ShardedParameters:
    """Keep this rank's experts of each layer, in place, and sum their outputs over the ranks. Raises UserError."""
    shards, partial_gradients = {}, set[str]()
    for path, experts in stacked_experts(model).items():
        total = experts.num_experts
        if total % group.size:
            raise UserError(
                f"tensor parallel: the {total} experts of {path} are not divisible by {group.size} ranks. Fix: make "
                f"the tensor size {nearest_divisors(group.size, total)}"
            )
        shard, adapters = group.shard(0, total), adapters_of(model, path)
        for name, weight in list(experts.named_parameters(recurse=False)):
            own = nn.Parameter(shard.take(weight.detach()).clone(), weight.requires_grad)
            experts.register_parameter(name, own)
            shards[f"{path}.{name}"] = shard
        experts.num_experts = shard.size
        forward = partial(_forward, experts, type(experts).forward, group, adapters, shard)
        replace_forward(experts, forward, "experts of this rank")
        for wrapper in adapters.values():
            replace_forward(wrapper, wrapper.base_layer.__call__, "adapters of all experts")
        halves = [half for wrapper in adapters.values() for half in (wrapper.lora_A, wrapper.lora_B)]
        of_adapters = {id(weight) for half in halves for weight in half.parameters()}
        partial_gradients |= {name for name, weight in model.named_parameters() if id(weight) in of_adapters}
    return ShardedParameters(shards, frozenset(partial_gradients))


def _forward(
    experts: Any,
    forward: Any,  # the module's own
    group: TensorGroup,
    adapters: Mapping[str, Any],
    shard: ParameterShard,  # of the layer's experts
    hidden_states: Tensor,  # (T, D)
    top_k_index: Tensor,  # (T, K)
    top_k_weights: Tensor,  # (T, K)
) -> Tensor:  # (T, D)
    hidden: Any = Communicate.apply(hidden_states, group, "copy")
    routing: Any = Communicate.apply(top_k_weights, group, "copy")
    choices, top_k = top_k_index.reshape(-1), top_k_index.shape[1]  # (T*K,)
    places = places_here(choices, shard)
    rows, expert = hidden[places // top_k], choices[places] - shard.start  # (R, D), (R,)
    weights = dict(experts.named_parameters(recurse=False))
    outputs = outputs_of_rows(experts, forward, weights, adapters, shard.start, rows, expert)
    weighted = outputs * routing.reshape(-1)[places, None]
    of_choices = weighted.new_zeros(len(choices), weighted.shape[1]).index_copy(0, places, weighted)  # (T*K, D)
    summand = of_choices.view(-1, top_k, weighted.shape[1]).sum(1).to(hidden_states.dtype)
    total: Any = Communicate.apply(summand, group, "reduce")
    return total


def places_here(choices: Tensor, shard: ParameterShard) -> Tensor:
    """Returns the places (R,) of the choices (T*K,) that are experts of this rank. A plan replaces it."""
    return ((choices >= shard.start) & (choices < shard.start + shard.size)).nonzero()[:, 0]  # waits, once
