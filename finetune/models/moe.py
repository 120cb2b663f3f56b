"""Mixtures of experts: the choices of their routers, the type that experts compute in, and expert parallel.

Expert parallel: each rank of a group has some experts of every layer, and tokens travel to the experts they chose.

    tokens of this rank, K experts chosen for each      0: a c    1: b c    2: a d      (a, b on rank 0; c, d on rank 1)
    rows in the order of experts, sent to their ranks   a: 0 2  b: 1  |  c: 0 1  d: 2
    arriving rows, computed by transformers' own forward, go back the same way and are added up as in one process

Letters: T tokens of this rank, K experts chosen for each, E experts of a layer, P ranks of the group, R rows that
arrive on this one, D hidden. GShard (Lepikhin et al. 2020, https://arxiv.org/abs/2006.16668), without capacity: no
token is dropped. Adapters on experts act on the rows that arrive, or are added to the weights of the experts here.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from finetune.errors import UserError
from finetune.models.activations import part_of_parameter
from finetune.models.grouped_experts import GroupedWrapper, adapted_experts, adapters_in, with_adapters
from finetune.models.patches import mix_in, replace_forward
from finetune.models.stored_layers import stored_matrices, stored_stacks
from finetune.utils import full_shape, unwrap_peft

_ARGUMENTS = (  # of transformers' experts, >= 5.17
    ("self", "hidden_states", "top_k_index", "top_k_weights"),
    ("self", "hidden_states", "router_indices", "routing_weights"),  # gpt-oss
)


class Exchange(Protocol):
    """Communication of the P ranks of a group that holds every expert once. All call it equally often."""

    size: int  # P

    def weight(self, stacked: Tensor) -> Tensor:
        """Returns the rows (E/P, ...) of a parameter (E, ...) that are here, as a plain tensor."""
        ...

    def counts(self, leaving: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """Returns the rows (P, E/P) from every rank for every expert that is here, from those (P, E/P) for every expert
        of every rank; rows that leave for each rank; rows that arrive from each."""
        ...

    def rows(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Returns (sum(received), D) for (sum(sent), D), in the order of ranks. Gradients take the way back."""
        ...


def experts_of(model: nn.Module) -> dict[str, Any]:
    """Returns, by name, the modules with all experts of a layer, stacked along the first dimension of each parameter.

    Raises UserError if there are none: transformers stores this architecture's experts in another way.
    """
    experts = stacked_experts(model)
    if not experts:
        raise UserError(
            f"{type(model).__name__} has no experts that can be divided over ranks. Fix: remove "
            "`parallelism_config_ep_size`"
        )
    return experts


def adapters_of(model: nn.Module, name: str) -> dict[str, Any]:
    """Returns peft's wrappers around the module of experts of that name, by the parameter that each adapts."""
    wrappers: dict[str, Any] = {}
    while name.endswith(".base_layer"):
        name = name.removesuffix(".base_layer")
        wrapper: Any = model.get_submodule(name)
        wrappers[wrapper.parameter_name] = wrapper
    return wrappers


def adapts_experts(model: nn.Module) -> bool:
    """Returns whether adapters are on the stacked weights of experts, by the class that peft has for it."""
    return any(type(module).__name__ == "ParamWrapper" for module in model.modules())


def stacked_experts(model: nn.Module) -> dict[str, Any]:
    """Returns `experts_of`, {} if there are none."""

    def is_stacked(module: nn.Module) -> bool:
        num_experts, weights = getattr(module, "num_experts", None), list(module.parameters(recurse=False))
        takes = tuple(inspect.signature(type(module).forward).parameters)
        return bool(weights) and takes in _ARGUMENTS and all(full_shape(w)[0] == num_experts for w in weights)

    return {name: module for name, module in model.named_modules() if is_stacked(module)}


def reach_experts(model: nn.Module) -> None:
    """Let experts with weights take part in every forward, if all tokens of a layer may choose experts without weights
    (LongCat-Flash's zero experts, https://arxiv.org/abs/2509.01322).

    Without a gradient on one rank, FSDP2 would reduce less there, and an optimizer would not decay these weights.
    """

    def add_row_of_zeros(experts: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> Tensor | None:
        hidden_states, chosen, _ = inputs  # (T, D), (T, K)
        if bool((chosen < experts.num_routed_experts).any()):
            return None
        row, weights = hidden_states.new_zeros(1, hidden_states.shape[1]), hidden_states.new_zeros(1, chosen.shape[1])
        return output + type(experts).forward(experts, row, chosen.new_zeros(weights.shape), weights)  # (T, D)

    for module in model.modules():
        if getattr(module, "zero_expert_num", 0) and getattr(module, "gate_up_proj", None) is not None:
            module.register_forward_hook(add_row_of_zeros)


def compute_experts_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Let stacked experts compute in autocast's type and return it, as other matrices do: grouped products ignore it
    (https://github.com/pytorch/pytorch/issues/174763)."""
    for experts in stacked_experts(model).values():
        names = [name for name, _ in experts.named_parameters(recurse=False)]
        forward = partial(_forward_in, experts, type(experts).forward, names, dtype)
        replace_forward(experts, forward, "experts' type")


def group_adapters(model: nn.Module) -> None:
    """Let adapters on stacked experts compute as grouped products (grouped_experts.py), in place. Call after
    `compute_experts_in`."""
    for name, experts in stacked_experts(model).items():
        if wrappers := adapters_of(model, name):
            for wrapper in wrappers.values():
                mix_in(wrapper, GroupedWrapper, "grouped adapter")
                wrapper.group = wrappers
            forward = partial(with_adapters, experts, experts.forward, wrappers)
            replace_forward(experts, forward, "grouped adapter")


def unpack_experts(model: nn.Module) -> bool:
    """Let experts whose weights stay as they are stored compute, with their adapters, in place; returns whether there
    are any. Call after `compute_experts_in`."""
    for name, experts in (stacks := stored_stacks(model)).items():
        wrappers = adapters_of(model, name)
        for wrapper in wrappers.values():
            mix_in(wrapper, GroupedWrapper, "grouped adapter")
            wrapper.group = wrappers
        replace_forward(
            experts, partial(with_adapters, experts, partial(_unadapted, experts), wrappers), "stored experts"
        )
    return bool(stacks)


def _unadapted(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    weights = dict(experts.named_parameters(recurse=False))
    inputs = hidden_states.to(next(weights[name] for name in stored_matrices(experts)).dtype)
    return adapted_experts(experts, weights, {}, inputs, top_k_index, top_k_weights).to(hidden_states.dtype)


def _forward_in(
    experts: Any,
    forward: Any,
    names: list[str],
    dtype: torch.dtype,
    hidden_states: Tensor,  # (T, D)
    *args: Any,
    **kwargs: Any,
) -> Tensor:  # (T, D)
    weights = {name: getattr(experts, name).to(dtype) for name in names}  # with adapters, if they have any
    return forward(WithWeights(experts, weights), hidden_states.to(dtype), *args, **kwargs)


def dispatch_tokens(experts: Any, exchange: Exchange, adapters: Mapping[str, Any], first: int) -> None:
    """Let the module compute the experts of this rank for the tokens of all ranks of the group.

    Its parameters still have the shape (E, ...). adapters: peft's wrappers by parameter, with the adapters of all
    experts; first: number of the first expert of this rank.
    """
    forward = partial(_forward, experts, type(experts).forward, exchange, adapters, first)
    replace_forward(experts, forward, "experts of this rank")
    for wrapper in adapters.values():
        replace_forward(wrapper, wrapper.base_layer.__call__, "adapters of all experts")


def _forward(
    experts: Any,
    forward: Any,  # the module's own, called as if each row had chosen one expert with weight 1
    exchange: Exchange,
    adapters: Mapping[str, Any],
    first: int,
    hidden_states: Tensor,  # (T, D)
    top_k_index: Tensor,  # (T, K)
    top_k_weights: Tensor,  # (T, K)
) -> Tensor:  # (T, D)
    chosen = top_k_index.reshape(-1)  # (T*K,)
    local_experts = experts.num_experts // exchange.size
    order = chosen.argsort(stable=True)  # by expert, and with it by rank
    counts = chosen.new_zeros(experts.num_experts).scatter_add_(0, chosen, torch.ones_like(chosen))
    arriving, sent, received = exchange.counts(counts.view(exchange.size, local_experts))
    rows = exchange.rows(hidden_states[order // top_k_index.shape[1]], sent, received)  # (R, D)
    expert = torch.arange(local_experts, device=chosen.device).repeat(exchange.size)
    expert = expert.repeat_interleave(arriving.flatten(), output_size=len(rows))  # (R,)
    weights = {name: exchange.weight(stacked) for name, stacked in experts.named_parameters(recurse=False)}
    computed = outputs_of_rows(experts, forward, weights, adapters, first, rows, expert)
    outputs = exchange.rows(computed, received, sent)  # (T*K, D), in `order`
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    weighted = outputs[place].view(*top_k_index.shape, -1) * top_k_weights[..., None]  # (T, K, D)
    return weighted.sum(1).to(hidden_states.dtype)


def outputs_of_rows(
    experts: Any,
    forward: Any,  # the module's own
    weights: dict[str, Tensor],  # of the H experts that are here, (H, ...) each
    adapters: Mapping[str, Any],  # peft's wrappers by parameter, with the adapters of all experts
    first: int,  # number of the first expert that is here
    rows: Tensor,  # (R, D)
    expert: Tensor,  # (R,), which of those here each row goes to
) -> Tensor:  # (R, D)
    """Returns the output of one expert for each row."""
    count = len(rows)
    if count == 0:  # one of zeros: weights without a gradient would leave out a reduction that others wait in
        rows, expert = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), expert.new_zeros(1)
    grouped = adapters_in(adapters, first) if all(isinstance(w, GroupedWrapper) for w in adapters.values()) else {}
    weights = {name: part_of_parameter(weight) for name, weight in weights.items()}
    if not grouped and not stored_matrices(experts):
        # W[e] + s B[e] A[e] of the experts from `first` on, by peft's layout: A (E*r, in), B (out, r*E).
        for name, wrapper in ((name, one) for name, one in adapters.items() if not one.disable_adapters):
            weight, number, adapter = weights[name], wrapper.num_experts, wrapper.active_adapters[0]
            a, b = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
            right = a.view(number, -1, a.shape[1])[first : first + len(weight)]  # (E/P, r, in)
            left = b.view(len(b), -1, number)[..., first : first + len(weight)].permute(2, 0, 1)  # (E/P, out, r)
            if getattr(experts, "is_transposed", False):  # (in, out)
                left, right = right.transpose(1, 2), left.transpose(1, 2)
            left, right = left.to(weight.dtype), right.to(weight.dtype)
            weights[name] = torch.baddbmm(weight, left, right, alpha=wrapper.scaling[adapter])
    routed = (rows, expert[:, None], rows.new_ones(len(rows), 1))
    if grouped or stored_matrices(experts):
        return adapted_experts(experts, weights, grouped, *routed)[:count]
    return forward(WithWeights(experts, weights), *routed)[:count]


class WithWeights:
    """The `self` of a forward of a module of experts, with other weights, and as many experts as these have."""

    def __init__(self, experts: nn.Module, weights: Mapping[str, Tensor], **settings: Any):
        self.__dict__.update(weights, **settings)
        self._experts, self.num_experts = experts, len(next(iter(weights.values())))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)


# --- routers: their logits, caught by hooks on the modules that transformers names
#
# The logits alone are kept, and the loss is computed from them outside of the layers: a layer that is recomputed in the
# backward calls its router again, but recording is off then, so no logits count twice.


class Routers:
    """The routers of a model, in the order of its layers. To be created before an engine wraps it."""

    def __init__(self, modules: list[nn.Module], index: int, experts: int, top_k: int):
        """index: of the logits in a router's result."""
        self.layers, self.experts, self.top_k, self._index = len(modules), experts, top_k, index
        self._recorded: list[Tensor] | None = None
        for module in modules:
            module.register_forward_hook(self._record)

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Yields the logits (T, E) of every router that is called within, with their graph."""
        self._recorded = recorded = []
        try:
            yield recorded
        finally:
            self._recorded = None

    def _record(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._recorded is not None:
            self._recorded.append(output[self._index])


def find_routers(model: Any) -> Routers | None:
    """Returns the routers of a model whose choice is the `top_k` of a softmax, for which the balance loss is defined:
    transformers records their logits and has such a loss itself (`router_aux_loss_coef`). None for others."""
    causal = unwrap_peft(model)
    config = causal.config.get_text_config()
    # transformers' models declare in it which modules give the logits of routers.
    recorder = (getattr(causal, "_can_record_outputs", None) or {}).get("router_logits")
    kind, top_k = getattr(recorder, "target_class", None), getattr(config, "num_experts_per_tok", None)
    if kind is None or top_k is None or not hasattr(config, "router_aux_loss_coef"):
        return None
    modules = [module for module in causal.base_model.modules() if isinstance(module, kind)]
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    index = getattr(recorder, "index", 0)
    return Routers(modules, index, experts, top_k) if modules and experts else None
