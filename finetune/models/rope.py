"""Rotary positions of packed documents, where the frequencies depend on how long a sequence is.

transformers takes the longest position of a forward for it: with `dynamic` RoPE the frequencies of every document would
follow the longest one of its row, and of rows before it; with `longrope` a short document next to a long one would get
the long one's. Here each document has the angles that it would have alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig


def length_dependent_rope(config: PretrainedConfig) -> list[str]:
    """Returns the types of RoPE whose frequencies depend on the length of a document: `dynamic`, `longrope`."""
    types = rope_types(getattr(config.get_text_config(), "rope_parameters", None))
    return sorted(name for name in types if _depends_on_length(name))


def rope_types(parameters: dict[str, Any] | None) -> set[str]:
    """Returns the types of RoPE in a config's `rope_parameters`, which may be nested by kind of layer."""
    nested = [inner for inner in (parameters or {}).values() if isinstance(inner, dict)]
    return {str(one.get("rope_type")) for one in (parameters or {}, *nested)}


def rotate_per_document(model: Any) -> None:
    """Let the rotary modules of a model, in place, compute each document's angles as if it were alone."""
    for module in model.modules():
        if any(_depends_on_length(name) for _, name in _rotary_types(module)):
            # Replaced: it is called several times, once for each document, which hooks cannot do.
            module.forward = _per_document(module, module.forward)


def _depends_on_length(rope_type: str) -> bool:
    return "dynamic" in rope_type or rope_type == "longrope"


def _rotary_types(module: Any) -> Iterator[tuple[str, str]]:
    """Yields (prefix of its attributes, type of RoPE) of a rotary module, for each kind of layer that it serves."""
    rope_type = getattr(module, "rope_type", None)
    if isinstance(rope_type, str):
        yield "", rope_type
    elif isinstance(rope_type, dict):
        yield from ((f"{kind}_", name) for kind, name in rope_type.items())


def _per_document(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(
        x: Tensor,
        position_ids: Tensor,  # (1, T), or (axes, 1, T)
        *args: Any,
        **kwargs: Any,
    ) -> Any:  # (1, T, rotary size), or several of these
        if position_ids.shape[-2] > 1 or bool((position_ids[..., 0] != 0).any()):  # generation
            return original(x, position_ids, *args, **kwargs)
        angles = []
        for document in position_ids.split(_lengths(position_ids), dim=-1):
            _forget_lengths(module)
            angles.append(original(x, document, *args, **kwargs))
        if isinstance(angles[0], Tensor):
            return torch.cat(angles, dim=1)
        return tuple(torch.cat(parts, dim=1) for parts in zip(*angles, strict=True))

    return forward


def _lengths(position_ids: Tensor) -> list[int]:
    """Returns the tokens of each document, from where positions restart. Waits for the device, as transformers' own
    test of the longest position does."""
    positions = position_ids.reshape(-1, position_ids.shape[-1])[0]
    starts = (positions == 0).nonzero()[:, 0].tolist()
    return [end - start for start, end in zip(starts, [*starts[1:], len(positions)], strict=True)]


def _forget_lengths(module: Any) -> None:
    """Restore the frequencies of a new module: `dynamic` RoPE keeps those of the longest sequence so far."""
    for prefix, rope_type in _rotary_types(module):
        if "dynamic" in rope_type:
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
            setattr(module, f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq"))
