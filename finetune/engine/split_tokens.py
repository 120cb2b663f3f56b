"""Tokens of a tensor parallel model between its matrices: each rank has some of them (Megatron's sequence parallelism:
Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198, section 4.2.2).

    all tokens | own tokens: norm | all tokens: column parallel, row parallel | own tokens: residual, norm | ...
               take             gather                                  reduce-scatter

An all-reduce is a reduce-scatter and an all-gather: these two, apart, send the same. What lies between them, such as
norms and residual sums, then takes a rank's share of the memory and time. Embedding and final norm have all tokens, as
base models make masks and rotations from their number, and so have the ends of a pipeline's stages.

Only forwards with a graph are divided: without one nothing is kept, and generation has one token at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

import torch
from torch import Tensor, nn

from finetune.engine.tensor_group import Communicate, TensorGroup
from finetune.models.patches import mix_in


class RowTokens:
    """How many tokens the row of a forward has on all ranks; None: each rank has all of them."""

    total: int | None = None


def sum_of_columns(output: Tensor, group: TensorGroup, row: RowTokens | None) -> Any:
    """Returns the output of a row parallel matrix, from each rank's summand (B, T, D): its tokens, or all."""
    if row is None or row.total is None:
        return Communicate.apply(output, group, "reduce")
    return Communicate.apply(output, group, "reduce tokens", row.total)


def split_tokens(layers: nn.ModuleList, here: Set[nn.Module], row: RowTokens, group: TensorGroup) -> None:
    """Let decoder layers work on this rank's tokens.

    here: modules of this rank. A run of layers takes its tokens in the first, and gathers them after the last.
    """
    mine = [layer in here for layer in layers]
    for i, layer in enumerate(layers):
        mix_in(layer, LayerOfOwnTokens, "own tokens")
        own: Any = layer
        own.row_tokens, own.tensor_group = row, group
        own.takes_own = i == 0 or not mine[i - 1]
        own.gathers_all = i == len(layers) - 1 or not mine[i + 1]


def gather_tokens(receivers: Iterable[nn.Module], row: RowTokens, group: TensorGroup) -> None:
    """Let modules of column parallel matrices gather all tokens."""

    def gather(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if row.total is None:
            return args, kwargs
        if args:
            return (Communicate.apply(args[0], group, "gather tokens", row.total), *args[1:]), kwargs
        whole = Communicate.apply(kwargs["hidden_states"], group, "gather tokens", row.total)
        return args, {**kwargs, "hidden_states": whole}

    for receiver in receivers:
        receiver.register_forward_pre_hook(gather, with_kwargs=True)


class LayerOfOwnTokens:
    """Mixed into the class of a decoder layer. `__call__` is outside of its recomputation and compilation, `forward`
    inside: a layer that is computed again, after other rows, gets the number of its row's tokens again."""

    row_tokens: RowTokens
    tensor_group: TensorGroup
    takes_own: bool
    gathers_all: bool

    def __call__(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        row, call = self.row_tokens, super().__call__  # pyright: ignore[reportAttributeAccessIssue]  (mixed into)
        if self.takes_own:
            row.total = hidden.shape[1] if torch.is_grad_enabled() else None
            if row.total is not None:
                hidden = Communicate.apply(hidden, self.tensor_group, "own tokens", row.total)
        if (total := row.total) is None:
            return call(hidden, *args, **kwargs)
        hidden = call(hidden, *args, tokens_of_row=total, **kwargs)
        if self.gathers_all:
            row.total = None
            hidden = Communicate.apply(hidden, self.tensor_group, "all tokens", total)
        return hidden

    def forward(self, hidden: Any, *args: Any, tokens_of_row: int | None = None, **kwargs: Any) -> Any:
        if self.row_tokens.total != tokens_of_row:
            self.row_tokens.total = tokens_of_row
        return super().forward(hidden, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]  (mixed into)
