"""A sequence classification model that returns a score for each label at the end of each sequence.

Letters: T tokens of the flat row, D hidden size, d sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from finetune.models.activations import ActivationOffload
from finetune.models.moe import Routers
from finetune.models.wrapped import CrossEntropyChoice, Outputs, WrappedModel, output_head, trained_head


@dataclass(frozen=True)
class ScoredPositions:
    """Where a forward reads scores: the last token of each sequence."""

    positions: Tensor  # (d,) in the row


class ScoreModel(WrappedModel):
    """`forward(targets=ScoredPositions(...), **inputs)` returns `Outputs` with scores.

    transformers' own forward looks for the last token that is no padding, and takes an end token that is padding as
    well for padding. Here the ends of sequences are known.
    """

    def __init__(
        self,
        model: Any,
        device_type: str = "cpu",
        autocast: torch.dtype | None = None,
        offload: ActivationOffload | None = None,
        routers: Routers | None = None,
    ):
        super().__init__(model, device_type, autocast, offload, routers)
        self.choice = CrossEntropyChoice("none", "no LM head: one score for each label at the end of a sequence")
        _score_in_fp32(trained_head(model), autocast)

    def _read(self, targets: ScoredPositions, inputs: dict[str, Any]) -> Outputs:
        hidden = self._base(inputs)[:, targets.positions]  # (1, d, D)
        scores = output_head(self.causal_lm)(hidden)[0]
        nothing = scores.new_zeros(0)
        return Outputs(nothing.sum(), nothing, scores=scores)


class _InFp32:
    """Mixed into the class of the head: a score in 16 bits would have three digits, and of close pairs no difference.

    The weight is rounded to the compute type as everywhere else, which backends do at different places.
    """

    compute: torch.dtype | None

    def forward(self, hidden: Tensor) -> Tensor:  # (1, d, D) -> (1, d, labels)
        head: Any = self
        with torch.autocast(hidden.device.type, enabled=False):
            parameters = [None if p is None else p.to(self.compute or p.dtype) for p in (head.weight, head.bias)]
            weight, bias = (None if p is None else p.to(_at_least_fp32(p)) for p in parameters)
            assert weight is not None
            return linear(hidden.to(weight.dtype), weight, bias)


def _at_least_fp32(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _score_in_fp32(head: Any, compute: torch.dtype | None) -> None:
    """Change the class of one instance, as FSDP2 itself does: names of parameters and isinstance stay as they are."""
    head.compute = compute
    kind: type[nn.Module] = type(head)
    head.__class__ = type(kind.__name__, (_InFp32, kind), {})
