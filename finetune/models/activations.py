"""What each decoder layer keeps of its forward for the backward; the rest is computed again.

Recomputation runs a layer a second time in the backward (Chen et al. 2016, https://arxiv.org/abs/1604.06174):
non-reentrant, so that it works with frozen inputs and under every backend, and with the random numbers of the first
time, so that the same dropout is drawn.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


def recompute_activations(model: Any, how: Literal["selective"] | bool) -> None:
    """True: each layer keeps its input alone. selective: the results of matrix products and attention as well, which
    are most of the work to make again; norms, activation functions, rotations and casts are cheap."""
    arguments: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        arguments["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _kept)
    if hasattr(model, "activation_checkpointing_enable"):  # transformers >= 5.20; the older name warns there
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=arguments)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)


def _kept(_context: Any, operator: Any, *values: Any, **named: Any) -> CheckpointPolicy:
    """MUST_SAVE for what is not computed again.

    An attention that drops out is: it draws random numbers, and what draws after it would get others if it were left
    out.
    """
    if operator not in _expensive() or _drops_out(operator, values, named):
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


def _drops_out(operator: Any, values: tuple[Any, ...], named: dict[str, Any]) -> bool:
    schema = getattr(operator, "_schema", None)  # flex attention has none, and no dropout
    names = [argument.name for argument in schema.arguments] if schema else []
    return bool({**dict(zip(names, values, strict=False)), **named}.get("dropout_p", 0.0))


@functools.cache
def _expensive() -> frozenset[Any]:
    """Matrix products, and attention in every form that scaled_dot_product_attention, torch.nn.attention.varlen and
    FlexAttention reach; those that this torch has."""
    aten, found = torch.ops.aten, set[Any]()
    for name in _PRODUCTS + _ATTENTION:
        if hasattr(aten, name):
            found.add(getattr(aten, name).default)
    if importlib.util.find_spec("torch.nn.attention.varlen"):  # torch >= 2.10
        importlib.import_module("torch.nn.attention.varlen")  # registers its operator
        found.add(torch.ops.torch_attn._varlen_attn.default)
    found.add(torch.ops.higher_order.flex_attention)
    return frozenset(found)


_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "_grouped_mm")
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)
