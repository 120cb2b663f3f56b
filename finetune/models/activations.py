"""Activations of a forward: recomputed in the backward, or kept in the host's memory.

Recomputation runs a layer a second time in the backward (Chen et al. 2016, https://arxiv.org/abs/1604.06174):
non-reentrant, so that it works with frozen inputs and under every backend, and with the random numbers of the first
time, so that the same dropout is drawn. Offload copies activations to the host until the backward (second section).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from finetune.errors import UserError


def recompute_activations(
    model: Any, how: Literal["selective"] | bool, around: Callable[..., tuple[Any, Any]] | None = None
) -> None:
    """Let each decoder layer keep its input alone (True), or the results of matrix products and attention as well
    (selective): those are most of the work to repeat; norms, activation functions, rotations and casts are cheap.

    around: returns contexts of a forward and of its recomputation, given a function that returns further ones or None.
    Raises UserError for a class that transformers does not recompute (Granite Speech).
    """
    if not getattr(model, "supports_gradient_checkpointing", True):
        raise UserError(
            f"train.activation_checkpointing: transformers does not recompute layers of {type(model).__name__}. Fix: "
            "set `train.activation_checkpointing: false`"
        )
    arguments: dict[str, Any] = {"use_reentrant": False}
    contexts = functools.partial(create_selective_checkpoint_contexts, _policy) if how == "selective" else None
    if around is not None:
        contexts = functools.partial(around, contexts)
    if contexts is not None:
        arguments["context_fn"] = contexts
    if hasattr(model, "activation_checkpointing_enable"):  # transformers >= 5.20; the older name warns there
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=arguments)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)


def _policy(_context: Any, operator: Any, *values: Any, **named: Any) -> CheckpointPolicy:
    """Returns MUST_SAVE for operators that are not recomputed. Attention with dropout is: it draws random numbers, and
    later draws would differ if it were left out."""
    if operator not in _expensive("bitsandbytes" in sys.modules):
        return CheckpointPolicy.PREFER_RECOMPUTE
    schema = getattr(operator, "_schema", None)  # flex attention has no schema, and no dropout
    names = [argument.name for argument in schema.arguments] if schema else []
    has_dropout = {**dict(zip(names, values, strict=False)), **named}.get("dropout_p", 0.0)
    return CheckpointPolicy.PREFER_RECOMPUTE if has_dropout else CheckpointPolicy.MUST_SAVE


@functools.cache
def _expensive(packed: bool) -> frozenset[Any]:
    """Returns matrix products, and attention in every form that scaled_dot_product_attention, torch.nn.attention.varlen
    and FlexAttention reach, if this torch has them. packed: also bitsandbytes' product with 4-bit weights, if it is an
    operator of its own."""
    importlib.import_module("torch.nn.attention.varlen")  # registers its operator
    operators = {getattr(torch.ops.aten, name).default for name in _OPERATORS if hasattr(torch.ops.aten, name)}
    # Operators have no public names: selective checkpointing is asked by the operator itself.
    operators |= {torch.ops.torch_attn._varlen_attn.default, torch.ops.higher_order.flex_attention}
    if packed and hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
        operators.add(torch.ops.bitsandbytes.gemm_4bit.default)
    return frozenset(operators)


_OPERATORS = (
    *("mm", "addmm", "bmm", "baddbmm", "linear", "_grouped_mm", "_scaled_mm"),
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)


# --- offload
#
# On its way out a tensor is copied by a stream of its own next to the computation; on its way back it is requested
# while the backward still works on later ones. At most `AHEAD` bytes are under way in either direction, and
# the last tensors never leave, as the backward begins with them.
#
# Memory on the device is always taken and given back on the computing stream, which waits for a copy before it frees
# its source: so that memory can be used again at once, in the order of that stream, however far the CPU runs ahead.

SMALLEST = 2**20  # bytes; the copy of a smaller one costs its start, not its size
AHEAD = 2**28  # bytes under way: some milliseconds of a PCIe bus, a layer's input or a few


@dataclass(eq=False)
class Kept:
    """The bytes of one storage: on the device, on the host, or on both while `copied` has not happened."""

    index: int  # in the order of the forward
    host: Tensor  # (bytes,) uint8; pinned if there is a device
    device: Tensor | None  # (bytes,) uint8
    copied: Any = None  # torch.Event of the copy under way

    @property
    def size(self) -> int:
        return self.host.numel()


@dataclass(frozen=True)
class View:
    """A tensor without its storage."""

    kept: Kept
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int  # elements

    def over(self, storage: Tensor) -> Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage.untyped_storage(), self.offset, self.shape, self.stride)


class ActivationOffload:
    """Hooks `keep` and `bring` for torch.autograd.graph.saved_tensors_hooks. Parameters are not moved: this is up to
    their engine. On the CPU copies save no memory, but tests take the same path."""

    def __init__(self, device: torch.device, smallest: int | None = None, ahead: int = AHEAD):
        """smallest: bytes of a storage that is moved; None: SMALLEST, and on the CPU 1."""
        if smallest is None:
            smallest = SMALLEST if device.type != "cpu" else 1
        self.device, self.smallest, self.ahead = device, smallest, ahead
        self.away = weakref.WeakValueDictionary[int, Kept]()  # all that a backward may still ask for
        self.leaving = deque[tuple[tuple[int, int], Kept]]()  # copies out that were not waited for, oldest first
        self.here: dict[tuple[int, int], Kept] = {}  # the same, by identity of the storage and version
        self.returning: dict[int, Kept] = {}  # copies back that were not waited for
        self.count = self.next = 0
        self.copies = None if device.type == "cpu" else torch.Stream(device=device)

    @contextlib.contextmanager
    def saved_tensors(self) -> Iterator[None]:
        """A context for a training forward: tensors saved for its backward go to the host."""
        self.begin()
        with saved_tensors_hooks(self.keep, self.bring):
            yield

    def begin(self) -> None:
        """Prepare for a forward; another's backward may still be to come."""
        while self.leaving:
            self._release_oldest()
        for kept in list(self.returning.values()):
            self._wait(kept)
        if not self.away:
            self.count = 0
        self.next = -1

    # --- out

    def keep(self, tensor: Tensor) -> Tensor | View:
        if type(tensor) is not Tensor or tensor.device.type != self.device.type:
            return tensor
        # A view's parameter, which torch tells by no other attribute.
        storage, base = tensor.untyped_storage(), tensor if tensor._base is None else tensor._base
        # An engine that shards moves parameters, their views and parts itself.
        is_of_parameter = isinstance(base, torch.nn.Parameter) or getattr(storage, "of_parameter", False)
        if is_of_parameter or storage.nbytes() < self.smallest:
            return tensor
        key = (storage._cdata, tensor._version)  # not its address: one that is emptied gives that to another
        if (kept := self.here.get(key)) is None:
            source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            host = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=self.copies is not None)
            kept = Kept(self.count, host, source)
            self._copy(kept, host, source)
            self.away[self.count], self.here[key] = kept, kept
            self.leaving.append((key, kept))
            self.count += 1
            while sum(waiting.size for _, waiting in self.leaving) > self.ahead:
                self._release_oldest()
        self.next = self.count - 1
        return View(kept, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _release_oldest(self) -> None:
        """Free the device's copy of the tensor that began to leave first."""
        key, kept = self.leaving.popleft()
        del self.here[key]
        self._wait(kept)
        kept.device = None

    # --- back

    def bring(self, kept: Tensor | View) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        self.leaving.clear()  # tensors that have not left by now are referenced by the graph alone
        self.here.clear()
        self._fetch(kept.kept)
        self.next = min(self.next, kept.kept.index - 1)
        while self.next >= 0 and sum(other.size for other in self.returning.values()) < self.ahead:
            if (other := self.away.get(self.next)) is not None:
                self._fetch(other)
            self.next -= 1
        self._wait(kept.kept)
        assert kept.kept.device is not None  # fetched above
        return kept.over(kept.kept.device)

    def _fetch(self, kept: Kept) -> None:
        if kept.device is not None:
            return
        if self.copies is None:
            kept.device = kept.host
            return
        kept.device = torch.empty_like(kept.host, device=self.device)
        self._copy(kept, kept.device, kept.host)
        self.returning[kept.index] = kept  # its memory must not be used again while the copy writes to it

    # --- copies

    def _copy(self, kept: Kept, to: Tensor, source: Tensor) -> None:
        if self.copies is None:
            to.copy_(source)
            return
        self.copies.wait_stream(torch.accelerator.current_stream(self.device))
        with self.copies:
            to.copy_(source, non_blocking=True)
        kept.copied = self.copies.record_event()

    def _wait(self, kept: Kept) -> None:
        self.returning.pop(kept.index, None)
        if kept.copied is not None:
            torch.accelerator.current_stream(self.device).wait_event(kept.copied)
            kept.copied = None


def part_of_parameter(tensor: Tensor) -> Tensor:
    """Marks a plain tensor as part of a parameter, whose memory the engine may empty until the backward."""
    tensor.untyped_storage().of_parameter = True  # pyright: ignore[reportAttributeAccessIssue]  (kept with the storage)
    return tensor
