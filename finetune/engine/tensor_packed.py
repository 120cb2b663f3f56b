"""Packed weights of tensor parallel layers: each rank has the blocks of its rows or columns.

    (O, I) weights, row after row, in blocks of 64 that share a scale -> (O, I / 64) blocks -> some rows, or columns

The bytes and scales of a rank are those of one process, so that it computes with the same values. Scales that are
quantized themselves (`double_quant`) share a scale in blocks of 256, which would split other ranks' columns: each rank
keeps its scales in fp32, half a bit for a weight of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from finetune.engine.tensor_group import ParameterShard, TensorGroup
from finetune.errors import UserError
from finetune.models.packed_linear import Fp8Linear, is_4bit, scales_of
from finetune.utils import nearest_divisors


@dataclass(frozen=True)
class PackedShard(ParameterShard):
    """Part of a weight whose elements hold `per` weights each, as a column: (O * I / per, 1)."""

    across: int  # size of the weight's other dimension
    per: int

    def full_shape(self, shape: torch.Size) -> torch.Size:
        return torch.Size((-(-self.total * self.across // self.per), 1))

    def take(self, full: Tensor) -> Tensor:
        flat = full.flatten()
        if self.dim == 0:
            return flat.narrow(0, self.start * self.across // self.per, self.size * self.across // self.per)[:, None]
        elements = flat.narrow(0, 0, self.across * self.total // self.per).view(self.across, -1)
        return elements.narrow(1, self.start // self.per, self.size // self.per).reshape(-1, 1)


def packed_shard(layer: Any, dim: int, group: TensorGroup, path: str) -> PackedShard:
    """Returns this rank's shard of a packed layer's weight. dim: as in `Style`. Raises UserError if ranks would split
    what shares an element or a scale."""
    sizes = (layer.out_features, layer.in_features)
    total, across = sizes[dim], sizes[1 - dim]
    per = layer.weight.element_size() * (2 if is_4bit(layer) else 1)  # packed bytes are stored as floats
    together = layer.quant_state.blocksize if is_4bit(layer) else per
    shard = group.shard(dim, total)
    # Rows of full blocks: bitsandbytes 0.50 unpacks other matrices wrongly on CPUs, as if blocks began with rows.
    if (total if dim else across) % together or (dim == 1 and shard.size % together):
        fits = nearest_divisors(group.size, total // together) if total % together == 0 else "1"
        raise UserError(
            f"tensor parallel: the {total} {'inputs' if dim else 'outputs'} of {path} are packed in blocks of "
            f"{together}. {group.size} ranks would split a block. Fix: make the tensor size {fits}, or use fsdp2"
        )
    return PackedShard(dim, shard.start, shard.size, total, across, per)


def shard_scales(model: Any, shards: Mapping[str, ParameterShard]) -> None:
    """Leave each packed layer the scales of its shard, in place. Call it when all ranks have those of full weights."""
    for name, shard in shards.items():
        if not isinstance(shard, PackedShard):
            continue
        layer = model.get_submodule(name.rpartition(".")[0])
        if isinstance(layer, Fp8Linear):
            if shard.dim == 0:
                layer.scale = layer.scale.narrow(0, shard.start, shard.size).clone()
            continue
        state: Any = layer.quant_state
        state.absmax = replace(shard, per=state.blocksize).take(scales_of(state)).flatten().clone()
        state.nested, state.state2, state.offset = False, None, None
        state.shape = torch.Size((layer.out_features, layer.in_features))
