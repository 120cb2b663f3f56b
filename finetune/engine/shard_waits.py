"""When a rank under FSDP2 waits for shards: hooks around FSDP2's own, by torch's public ones.

    forward    | pre-hooks: begin, FSDP2 gathers the layer's weights, end |  layer  |
    backward   | hooks on the output's gradient: begin, FSDP2 gathers, end |  layer's backward  |
               | hook on the gradient of the input as FSDP2 passed it on: begin, FSDP2 reduces, end: of the input |
    at the end | begin: all is computed, FSDP2 waits for the last reductions, end: the backward returns |

On the CPU a collective is done when it returns, so this is its whole time; on CUDA it is what the compute stream stood
still, and the copy out of the gathered buffer. With offload to CPU memory also the way from there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from finetune.engine.base import wait_after_gradients
from finetune.engine.stopwatch import Stopwatch


class ShardWaits:
    """Tells a stopwatch; without effect where it does not count waits."""

    def __init__(self, model: nn.Module, stopwatch: Stopwatch):
        self._stopwatch = stopwatch
        self._in_backward = False
        self._inputs: list[Tensor] = []  # of the module whose weights are being gathered
        if not stopwatch.knows_waits:
            return
        for module in model.modules():
            if isinstance(module, FSDPModule):
                self._watch(module)

    def _watch(self, module: nn.Module) -> None:
        """FSDP2's hooks are there already: what is prepended runs before them, what is appended after."""
        module.register_forward_pre_hook(self._before_gather, prepend=True, with_kwargs=True)
        module.register_forward_pre_hook(self._after_gather, with_kwargs=True)
        module.register_forward_hook(self._before_backward_gather, prepend=True)
        module.register_forward_hook(self._after_backward_gather)

    @contextlib.contextmanager
    def backward(self, loss: Tensor) -> Iterator[None]:
        if self._stopwatch.knows_waits:
            wait_after_gradients(loss, self._stopwatch)
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False
            self._stopwatch.end_wait()

    # Hooks of a forward that is computed again in the backward put none on tensors: those get no gradient.

    def _before_gather(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inputs = list(_differentiable((args, kwargs)))
        self._stopwatch.begin_wait()

    def _after_gather(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        self._stopwatch.end_wait()
        if self._in_backward:
            return
        for own, passed_on in zip(self._inputs, _differentiable((args, kwargs)), strict=True):
            if passed_on is not own:  # else FSDP2 does nothing when its gradient comes
                passed_on.register_hook(self._stopwatch.begin_wait)
                own.register_hook(self._stopwatch.end_wait)
        self._inputs = []

    def _before_backward_gather(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self._hook(output, self._stopwatch.begin_wait)

    def _after_backward_gather(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self._hook(output, self._stopwatch.end_wait)

    def _hook(self, values: Any, what: Any) -> None:
        if not self._in_backward:
            for tensor in _differentiable(values):
                tensor.register_hook(what)


def _differentiable(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        if values.requires_grad:
            yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from _differentiable(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _differentiable(value)
