"""Tensors of a GGUF file of any architecture, as the folder has them: for files that are not written here.

Names are those of the `gguf` package's own map. llama.cpp's converter also changes values, differently by architecture;
which of these changes undoes a tensor is found by trying each on the first one of its kind:

    same         also without axes of one value (kernels of convolutions)
    transposed   Conv1D of GPT-2
    plus one     norms of Gemma, Nemotron, Qwen3-Next
    exp          A of state space models, as -exp(A_log)
    heads        rows of q and k in the order of llama.cpp's rotary embedding
    fused        q, k and v of all heads one after the other, in place of those of each head (GPT-NeoX, Bloom)
    stacked      the experts of a layer in one tensor, each of them by one of the above

A change that none of these is (a fused tensor that is split) leaves the tensor out: it is named, and not compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetune.errors import UserError
from finetune.release.export.gguf_settings import open_gguf, package

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
_NUMBER = re.compile(r"\d+")
# llama.cpp's own, made of the config: frequency factors.
_MADE = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight|blk\.\d+\.rope_(freqs|factors_\w+)\.weight")
_FITS = 1.0  # |x - e| / |e|: another order of rows has about 1.4, the coarsest type 0.7
_CLEAR = 2.0  # how many times further off the second change is, for all tensors of a kind to be taken as the first
_SLIP = 2.0**-22  # of adding and subtracting 1, and of a logarithm of an exponential, in fp32
Change = tuple[Callable[[Tensor], Tensor], float]  # what undoes it, and by how much values are off then


@dataclass(frozen=True)
class TensorPlace:
    """A tensor of a file, and the folder's tensors in it: one, or those of experts, which are stacked. undo: makes one
    of the folder's of it; slip: by how much that is off."""

    name: str
    names: tuple[str, ...]
    undo: Callable[[Tensor], Tensor]
    slip: float = 0.0


@dataclass
class Places:
    """Where a folder's tensors are in a file. unplaced: the folder's that were not found; extra: the file's that no
    tensor of the folder belongs to."""

    places: list[TensorPlace] = field(default_factory=list)
    unplaced: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)


def turned(values: Tensor, heads: int, inner: int, outer: int) -> Tensor:
    """Returns rows of heads in the other order of rotary embeddings: halves of a head, or pairs."""
    return values.reshape(heads, inner, outer, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def by_head(values: Tensor, heads: int) -> Tensor:
    """Returns rows of q, k and v, each of all heads, as those of each head."""
    return values.reshape(3, heads, -1, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)


def map_of_names(architecture: str, layers: int) -> Any:
    """Returns gguf's map of names. Raises UserError for an architecture that the package does not know."""
    gguf = package()
    number = next((one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), None)
    if number is None:
        raise UserError(
            f"the package gguf has no architecture {architecture!r}. Fix: pip install -U gguf, or, for the newest, "
            "pip install DIR/gguf-py of the checkout of llama.cpp"
        )
    return gguf.get_tensor_name_map(number, layers)


def find_places(
    path: Path,
    config: Any,
    shapes: Mapping[str, Tensor],
    kept: list[str],
    values_of: Callable[[str], Tensor],
    read: Callable[[str, int], Tensor],
) -> Places:
    """Returns where a folder's tensors are in a file.

    shapes: of the folder's tensors; kept: further ones, that transformers does not load; values_of: those of the
    folder, of which the first of each kind is read; read: values of a file's tensor, or of the n-th of a stack, fp32.
    """
    reader = open_gguf(path)
    held = {tensor.name: tuple(int(size) for size in reversed(tensor.shape)) for tensor in reader.tensors}
    names = map_of_names(str(reader.fields["general.architecture"].contents()), config.num_hidden_layers + 1)  # a head
    stacks, found = dict[str, list[str]](), Places()
    for name in shapes:
        match = _EXPERT.fullmatch(name)
        stacks.setdefault(f"{match[1]}.{match[3]}.weight" if match else name, []).append(name)
    taken, known = set[str](), dict[Any, tuple[Change, ...]]()
    for stacked, members in stacks.items():
        short = names.get_name(stacked, try_suffixes=(".weight", ".bias"))
        undo = None
        if short in held:
            own = held[short][1:] if members != [stacked] else held[short]
            kind = (_NUMBER.sub("#", short), own, tuple(shapes[members[0]].shape))
            choices = known.get(kind) or _changes(own, tuple(shapes[members[0]].shape), config)
            undo, is_clear = _fitting(choices, lambda one=short: read(one, 0), lambda one=members[0]: values_of(one))
            if undo is not None and is_clear:
                known[kind] = (undo,)
            taken.add(short)
        if short is None or undo is None:
            found.unplaced += members
        else:
            found.places.append(TensorPlace(short, tuple(members), *undo))
    others = {names.get_name(name, try_suffixes=(".weight", ".bias")) for name in kept}
    found.extra = sorted(name for name in held.keys() - taken - others if not _MADE.fullmatch(name))
    return found


def _changes(own: tuple[int, ...], shape: tuple[int, ...], config: Any) -> tuple[Change, ...]:
    """Returns what may have been done to a tensor of a shape, undone; the likeliest first."""

    def reshaped(x: Tensor) -> Tensor:
        return x.reshape(shape)

    changes = list[Change]()
    if [size for size in own if size != 1] == [size for size in shape if size != 1]:
        changes += [(reshaped, 0.0), (lambda x: reshaped(x) - 1, _SLIP), (lambda x: torch.log(-reshaped(x)), _SLIP)]
        counts = {getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
        for heads in sorted(one for one in counts if isinstance(one, int) and one):
            if 1 <= len(own) <= 2 and own[0] % (2 * heads) == 0:
                half = own[0] // heads // 2
                changes.append((lambda x, heads=heads, half=half: turned(x, heads, half, 2).reshape(shape), 0.0))
            if 1 <= len(own) <= 2 and own[0] % (3 * heads) == 0:
                changes.append((lambda x, heads=heads: by_head(x, heads).reshape(shape), 0.0))
    if len(own) == 2 and own == shape[::-1]:
        changes.append((lambda x: x.T.contiguous(), 0.0))
    return tuple(changes)


def _fitting(
    changes: tuple[Change, ...], theirs: Callable[[], Tensor], ours: Callable[[], Tensor]
) -> tuple[Change | None, bool]:
    """Returns the change that fits best, and whether no other one nearly does; None if none fits. A single one is taken
    as it is."""
    if not changes:
        return None, False
    if len(changes) == 1:
        return changes[0], False
    x, e = theirs(), ours().float()
    size = float(e.norm())
    off = [_distance(change(x), e, size) for change, _ in changes]
    (best, i), (second, _) = sorted((one, i) for i, one in enumerate(off))[:2]
    return (changes[i], second > _CLEAR * best + 0.1) if best <= _FITS else (None, False)


def _distance(x: Tensor, e: Tensor, size: float) -> float:
    off = float((x - e).norm())
    return off / size if size and off == off else (0.0 if not off else float("inf"))
