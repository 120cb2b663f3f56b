"""The base of a model with adapters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


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
