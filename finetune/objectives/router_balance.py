"""The loss that keeps the experts of a layer equally busy (Fedus et al. 2021, https://arxiv.org/abs/2101.03961, 4-6).

    of a row and a layer   E * sum over experts of (choices of the expert per token) * (its mean probability)
    of a step              the mean over layers, and over the step's rows, each by its tokens

It is `top_k` where all experts are equally busy, as in transformers, which however puts all layers together first.

The row of the recipe is the unit: a product of means is not additive, so over whatever tokens the means are taken, the
loss depends on. Micro-batches are no such unit, they differ from launch to launch. The whole global batch would be one,
and a milder one (Qiu et al. 2025, https://arxiv.org/abs/2501.11873), but its means are known after the last forward of
a step, and the backward of the first comes before.

Letters: L layers, T tokens of a forward, N rows in it, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RouterBalance:
    """Of the rows of a forward."""

    loss: Tensor  # (): of its rows, each times its tokens, fp32
    chosen: Tensor  # (L, E) int64: tokens that chose each expert


def router_balance(logits: Sequence[Tensor], row_lengths: Sequence[int], top_k: int) -> RouterBalance:
    """logits: (T, E) of each layer. row_lengths: tokens of each row; what lies behind them is padding and left out."""
    layers = [_of_layer(of_layer, row_lengths, top_k) for of_layer in logits]
    return RouterBalance(
        loss=torch.stack([loss for loss, _ in layers]).mean(), chosen=torch.stack([chosen for _, chosen in layers])
    )


def _of_layer(logits: Tensor, row_lengths: Sequence[int], top_k: int) -> tuple[Tensor, Tensor]:  # (), (E,)
    probabilities = logits[: sum(row_lengths)].float().softmax(-1)  # (tokens, E)
    choices = probabilities.detach().topk(top_k, dim=-1).indices  # (tokens, K)
    chosen = logits.new_zeros(len(row_lengths), logits.shape[-1], dtype=torch.int64)
    for row, of_row in enumerate(choices.split(list(row_lengths))):
        chosen[row].scatter_add_(0, of_row.flatten(), torch.ones_like(of_row).flatten())
    if not row_lengths:
        return probabilities.sum(), chosen.sum(0)
    summed = torch.stack([of_row.sum(0) for of_row in probabilities.split(list(row_lengths))])  # (N, E)
    tokens = torch.tensor(row_lengths, device=logits.device, dtype=summed.dtype)  # (N,)
    return logits.shape[-1] * ((chosen * summed).sum(1) / tokens).sum(), chosen.sum(0)
