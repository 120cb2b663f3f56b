"""Adapters of a model: disabled, and their layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """Disables the adapters of a model meanwhile.

    Sets the flag that peft's layers read. peft's own `disable_adapter` also changes which parameters require gradients
    and activates all adapters at its end, and backends have hooks on these parameters.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True  # see above for why not by peft's own method
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def is_plain(layer: Any) -> bool:
    """Returns whether a linear layer of an adapter is torch's own, without hooks or another forward: whether its weight
    may be multiplied by without calling it."""
    return type(layer) is nn.Linear and not has_hooks(layer) and "forward" not in vars(layer)


def has_hooks(layer: Any) -> bool:
    # torch calls a layer's hooks only in `__call__`, which is passed over, and has no list of them.
    return bool(layer._forward_pre_hooks or layer._forward_hooks or layer._backward_hooks or layer._backward_pre_hooks)
