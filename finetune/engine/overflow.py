"""fp16: a gradient overflows in the micro-batches in which it does on one process.

    one process      product over all tokens and columns -> fp16: infinite beyond 65,504 -> the step is skipped
    several ranks    product over some of them -> fp16, finite -> sum over ranks in fp32, finite: the step is taken

Ranks that share the tokens of a row (context and sequence parallel), or a matrix whose adapter all of them have (tensor
parallel), have summands of a micro-batch's gradient. So these are added up in fp16 as well, where they arrive, and are
infinite where their sum is; else they stay as they are. An all-reduce of each weight's gradient in 16 bits for every
micro-batch, in fp16 alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from finetune.models.wrapped import WrappedModel, has_scores, trained_head

Sum = Callable[[Tensor], Tensor]  # over some ranks


@dataclass(frozen=True)
class HalfProduct:
    """A trained parameter whose gradient is a product in fp16."""

    name: str  # in the transformers or peft model
    module: nn.Module
    attribute: str

    def parameter(self) -> Tensor | None:
        """Returns it as a forward uses it now; None if it is not on this rank, or not gathered."""
        parameter = getattr(self.module, self.attribute)
        return None if parameter.is_meta or isinstance(parameter, DTensor) else parameter


def half_products(model: WrappedModel) -> Iterator[HalfProduct]:
    """Yields the trained parameters that autocast casts to fp16: not embeddings and norms, nor a head that returns
    losses, whose gradient is made without the loss scale."""
    causal_lm: Any = model.causal_lm
    without_scale = has_scores(causal_lm) or model.choice.implementation != "plain"
    head = set(trained_head(causal_lm).modules()) if without_scale else set[nn.Module]()
    for path, module in causal_lm.named_modules():
        if isinstance(module, nn.Embedding) or module in head:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and (parameter.ndim > 1 or isinstance(module, nn.Linear)):
                yield HalfProduct(f"{path}.{name}", module, name)


def overflow_as_sum(parameter: Tensor, sums: Sequence[Sum]) -> None:
    """Make a leaf's gradient infinite where its sum over ranks is beyond fp16. Collective in each backward."""

    def checked(gradient: Tensor) -> Tensor:
        total = gradient.to(torch.float16)
        for over_ranks in sums:
            total = over_ranks(total)
        return gradient.masked_fill(~total.isfinite(), math.inf)

    parameter.register_hook(checked)
