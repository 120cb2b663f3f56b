"""A sequence classification model that returns a score for each label at the end of each sequence.

Letters: T tokens of the flat row, D hidden size, d sequences.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PretrainedConfig

from finetune.errors import UserError
from finetune.models.patches import mix_in
from finetune.models.wrapped import SCORE, CrossEntropyChoice, Outputs, WrappedModel, output_head, trained_head


@dataclass(frozen=True)
class ScoredPositions:
    """Positions at which a forward reads scores: the last token of each sequence."""

    positions: Tensor  # (d,) in the row


class ScoreModel(WrappedModel):
    """`forward(targets=ScoredPositions(...), **inputs)` returns `Outputs` with scores.

    transformers' own forward looks for the last token that is not padding, and takes an end token that is padding as
    well for padding. Here the ends of sequences are given.
    """

    def __init__(self, model: Any, **surroundings: Any):
        super().__init__(model, **surroundings)
        self.choice = CrossEntropyChoice("none", "no LM head: one score for each label at the end of a sequence")
        head: Any = trained_head(model)
        head.compute = self._autocast
        mix_in(head, _InFp32, "scores in fp32")

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
            weight, bias = (
                None if p is None else p.to(torch.promote_types(p.dtype, torch.float32)) for p in parameters
            )
            assert weight is not None
            return linear(hidden.to(weight.dtype), weight, bias)


# --- the labels of the head, and its initial weights if a base model has none


def labelled(config: PretrainedConfig, labels: tuple[str, ...]) -> PretrainedConfig:
    """Returns the config of a model with a score for each label; one label: a score that is used as it is.

    Raises UserError if a checkpoint of such a model has other labels.
    """
    if any("ForSequenceClassification" in name for name in config.architectures or ()):
        present = tuple(dict(config.id2label or {}).values())
        unnamed = all(name == f"LABEL_{i}" for i, name in enumerate(present))
        same = present == labels or unnamed or len(labels) == 1
        if len(present) != len(labels) or not same:
            raise UserError(
                f"model.name: its labels are {', '.join(present)}, and this run's are {', '.join(labels)}. Fix: set "
                f"`objective.labels: [{', '.join(present)}]`, or begin with a model that has no labels yet"
            )
    own: Any = copy.deepcopy(config)
    own.id2label = dict(enumerate(labels))
    own.label2id = {name: i for i, name in own.id2label.items()}
    # `regression`: pipelines give the score, and not its sigmoid
    own.problem_type = "regression" if len(labels) == 1 else "single_label_classification"
    return own


def score_head(model: Any) -> nn.Linear:
    """Returns the head of a model before adapters. Raises UserError if it is not one matrix of this name."""
    head = getattr(model, SCORE, None)
    if not isinstance(head, nn.Linear):
        raise UserError(
            f"{type(model).__name__} has no linear head `{SCORE}` over its last hidden state. Fix: choose a model that "
            "has one"
        )
    return head


def start_score_head(model: Any, dtype: torch.dtype, seed: int) -> None:
    """Replace the head by one with random weights, which depend only on the seed.

    transformers draws its own from a generator that the rest of the load has used, in shards under ZeRO-3, and leaves
    it on `meta` on ranks without weights.
    """
    head = score_head(model)
    new = nn.Linear(head.in_features, head.out_features, head.bias is not None, head.weight.device, dtype)
    if not new.weight.is_meta:
        generator = torch.Generator().manual_seed(seed)
        deviation = getattr(model.config.get_text_config(), "initializer_range", 0.02)
        values = torch.empty(new.weight.shape).normal_(0, deviation, generator=generator)
        new.weight.data.copy_(values)
        if new.bias is not None:
            new.bias.data.zero_()
    setattr(model, SCORE, new)
