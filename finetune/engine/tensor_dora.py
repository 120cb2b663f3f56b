"""DoRA on the matrices of a tensor parallel group (Liu et al. 2024, https://arxiv.org/abs/2402.09353, section 4.3).

    y = m / |W + s B A| (x W' + s x A' B')        the norm of each output's row, without a gradient

A column parallel rank has whole rows, so their norms and its part of m. A row parallel one has some of the columns:
squares are summed over the ranks, and each has all of m, with the same gradient. So it is for layers that gather their
output, whose ranks exchange norms.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from finetune.engine.split_tokens import RowTokens, sum_of_columns
from finetune.engine.tensor_group import Communicate, ParameterShard, TensorGroup, all_gathered
from finetune.errors import UserError
from finetune.models.packed_linear import unpacked_weight
from finetune.models.patches import replace_forward

MAGNITUDE = "lora_magnitude_vector"  # peft's name of m


def shard_dora(
    layer: Any, dim: int, full: bool, group: TensorGroup, row: RowTokens | None
) -> Iterator[tuple[Any, ParameterShard]]:
    """Make the magnitudes of a peft layer whose matrices are sharded compute with shards, in place.

    dim, full: as in `Style`; row: as in `parallelize`. Yields (module of a magnitude, shard of its weight), those that
    are sharded.
    """
    for magnitude in getattr(layer, MAGNITUDE, {}).values():
        if dim == 0 and not full:
            shard = group.shard(0, len(magnitude.weight))
            own = shard.take(magnitude.weight.detach()).clone()
            magnitude.weight = torch.nn.Parameter(own, magnitude.weight.requires_grad)
            yield magnitude, shard
        replace_forward(magnitude, ShardedDora(magnitude, dim, full, group, row), "DoRA of shards")


def check_embeddings(model: Any) -> None:
    """Raises UserError if DoRA adapts an embedding, whose rows the ranks share: its norms are over all tokens."""
    for name, module in model.named_modules():
        if type(module).__name__ == "DoraEmbeddingLayer":
            embedding = name.partition(f".{MAGNITUDE}")[0].rpartition(".")[2]
            raise UserError(
                f"tensor parallel: `lora.dora: true` cannot adapt the embedding {embedding!r}. The ranks share its "
                "tokens. Fix: leave it out of lora.targets, or use fsdp2"
            )


class ShardedDora:
    """What DoRA adds to the output of a layer, as peft's `DoraLinearLayer.forward`."""

    def __init__(self, magnitude: Any, dim: int, full: bool, group: TensorGroup, row: RowTokens | None):
        self._magnitude, self._dim, self._full, self._group, self._row = magnitude, dim, full, group, row

    def __call__(
        self, x: Tensor, *, lora_A: Any, lora_B: Any, scaling: float, base_layer: Any, base_result: Any = None, **_: Any
    ) -> Tensor:  # (..., I) -> (..., O)
        dim, full, group = self._dim, self._full, self._group
        weight = base_layer.weight
        if weight.shape != (base_layer.out_features, base_layer.in_features):
            weight = unpacked_weight(base_layer, weight)
        weight = weight.to(x.dtype)
        with torch.no_grad():
            # Not by calls of the layers, which communicate.
            update = linear(lora_A.weight.t(), lora_B.weight).t().to(x.dtype)
            norm = row_norms(weight + scaling * update, dim, full, group).to(x.dtype)
        scale = (self._magnitude.weight / norm).view(1, -1)
        adapted = lora_B(lora_A(x))
        if base_result is None:  # with dropout, which the base's input has here, too
            features: Any = x
            if dim == 1 and full:
                features = Communicate.apply(x, group, "scatter")
            elif dim == 0 and self._row is None:  # else the module around has gathered the tokens of x
                features = Communicate.apply(x, group, "copy")
            base_result = linear(features, weight)
            if dim == 1:
                base_result = sum_of_columns(base_result, group, self._row)
            elif full:
                base_result = Communicate.apply(base_result, group, "gather")
        elif base_layer.bias is not None:
            bias = base_layer.bias
            base_result = base_result - (all_gathered(bias, group) if full and dim == 0 else bias)
        return (scale - 1) * base_result + scale * adapted * scaling


def row_norms(own: Tensor, dim: int, full: bool, group: TensorGroup) -> Tensor:
    """Returns the norms of outputs, those of this rank or all, as the layer's output has. own: (O, I) of this rank."""
    norms = torch.linalg.vector_norm(own, dim=1, dtype=torch.promote_types(own.dtype, torch.float32))
    if dim == 1:
        return group.sum(norms.square()).sqrt()
    return all_gathered(norms, group) if full else norms
