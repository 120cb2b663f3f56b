"""Every replacement of a module's forward or class: the original, the order, and why a hook is not enough.

A forward or a class is changed on one instance. Names of parameters, `isinstance` and saved files stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

PatchName = Literal[
    "own class",
    "packed product",
    "rotations per document",
    "mixer per document",
    "added rows",
    "experts' type",
    "trained product in 8 bits",
    "fused adapter",
    "scores in fp32",
    "losses in the head",
    "row parallel",
    "sharded dropout",
    "experts of this rank",
    "adapters of all experts",
    "unpacked product",
]


@dataclass(frozen=True)
class ModulePatch:
    of: str  # the modules
    why: str  # it is replaced


# In the order of a run. A later one finds a module as the earlier ones left it.
PATCHES: dict[PatchName, ModulePatch] = {
    # --- load_model
    "own class": ModulePatch(
        "a model that was read in part, by a subclass that has only some layers before its weights are read",
        "it is saved, sharded and looked up by its class",
    ),
    "packed product": ModulePatch(
        "a linear layer of 8-bit weights, with `quantization.compute: scaled`",
        "the product itself is another; the layer was made by the code of `compute: dequantised`",
    ),
    "rotations per document": ModulePatch(
        "rotary modules whose frequencies depend on the length of a sequence",
        "it runs once for each document of a row, which hooks cannot do",
    ),
    "mixer per document": ModulePatch(
        "modules that mix tokens by something else than attention",
        "it runs once for each document of a row, or for several of like length",
    ),
    "added rows": ModulePatch(
        "embedding and head of a model with adapters, whose added tokens train",
        "the output is put together from two matrices; both stay the module's own, for backends that gather by module",
    ),
    # --- before the engine wraps the model, in this order
    "experts' type": ModulePatch(
        "stacked experts under autocast, which grouped products ignore",
        "its weights are cast inside of it, and no hook changes what a forward reads from `self`",
    ),
    "trained product in 8 bits": ModulePatch(
        "linear layers with `train.precision: fp8`, after torchao has converted them",
        "torchao's forward reads CUDA's autocast alone, and rounds weights otherwise than FSDP2",
    ),
    "fused adapter": ModulePatch(
        "peft's linear layers with LoRA; after the layers above, which it multiplies by",
        "the product with the weight and those with the adapter are one autograd function",
    ),
    "scores in fp32": ModulePatch(
        "the head of a sequence classification model",
        "the product runs in another type, outside of autocast",
    ),
    "losses in the head": ModulePatch(
        "the LM head, which then is given targets and returns their losses",
        "backends gather weights around a module's own forward, once for all chunks of the logits",
    ),
    # --- in the engine, before parameters are sharded
    "row parallel": ModulePatch(
        "linear layers with a rank's columns of their weight",
        "the bias is added after the sum over ranks, so no hook on the output will do",
    ),
    "sharded dropout": ModulePatch(
        "the dropout of an adapter with a rank's features",
        "the mask is drawn in another size than the input has",
    ),
    "experts of this rank": ModulePatch(
        "stacked experts under expert parallel, in place of `experts' type`: FSDP2 gathers weights in the compute type",
        "the model's own forward is called on the rows that arrive here, with other weights, not on its inputs",
    ),
    "adapters of all experts": ModulePatch(
        "peft's wrappers around those experts",
        "they would add the adapters of all experts to the weights of all",
    ),
    # --- of the planner
    "unpacked product": ModulePatch(
        "packed linear layers on `meta`",
        "kernels of packed products have no shapes without a device",
    ),
}


def replace_forward(module: Any, forward: Callable[..., Any], patch: PatchName) -> None:
    """Replace the forward of one module. patch: its row in `PATCHES`."""
    assert patch in PATCHES
    module.forward = forward


def replace_class(module: Any, kind: type, patch: PatchName) -> None:
    """Replace the class of one instance by another with the same state, as FSDP2 itself does. patch: its row in
    `PATCHES`."""
    assert patch in PATCHES
    module.__class__ = kind


def mix_in(module: Any, mixin: type, patch: PatchName) -> None:
    """Put a class before that of one instance, unless it has it already; the name of the class stays. patch: its row
    in `PATCHES`."""
    if not isinstance(module, mixin):
        kind = type(module)
        replace_class(module, type(kind.__name__, (mixin, kind), {}), patch)
