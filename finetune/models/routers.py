"""What the routers of a mixture of experts decide in a forward: caught by hooks where transformers says they are.

The logits alone are kept, and what is made of them is made outside of the layers: a layer that is recomputed in the
backward calls its router again, but nothing listens then, so nothing counts twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from finetune.utils import unwrap_peft


class Routers:
    """Of a model, in the order of its layers. To be made before an engine wraps it."""

    def __init__(self, modules: list[nn.Module], index: int, experts: int, top_k: int):
        """index: of the logits in what a router returns."""
        self.layers, self.experts, self.top_k, self._index = len(modules), experts, top_k, index
        self._recorded: list[Tensor] | None = None
        for module in modules:
            module.register_forward_hook(self._record)

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """The logits (T, E) of every router that is called within, with their graph."""
        self._recorded = recorded = []
        try:
            yield recorded
        finally:
            self._recorded = None

    def _record(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._recorded is not None:
            self._recorded.append(output[self._index])


def find_routers(model: Any) -> Routers | None:
    """None where there are none whose choice is the `top_k` of a softmax, for which the balance loss is defined: where
    transformers records no router logits, or has no such loss of its own (`router_aux_loss_coef`)."""
    causal = unwrap_peft(model)
    config = causal.config.get_text_config()
    recorder = (getattr(causal, "_can_record_outputs", None) or {}).get("router_logits")
    kind, top_k = getattr(recorder, "target_class", None), getattr(config, "num_experts_per_tok", None)
    if kind is None or top_k is None or not hasattr(config, "router_aux_loss_coef"):
        return None
    modules = [module for module in causal.modules() if isinstance(module, kind)]
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    index = getattr(recorder, "index", 0)
    return Routers(modules, index, experts, top_k) if modules and experts else None
