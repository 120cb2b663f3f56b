"""The head of a sequence classification model: its labels, and its first weights where a base model has none."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from finetune.errors import UserError
from finetune.models.wrapped import SCORE


def labelled(config: PretrainedConfig, labels: tuple[str, ...]) -> PretrainedConfig:
    """Returns the config of a model with a score for each label; one label: a score that is used as it is.

    Raises UserError where a checkpoint of such a model has other labels.
    """
    if any("ForSequenceClassification" in name for name in config.architectures or ()):
        _check_labels(tuple(dict(config.id2label or {}).values()), labels)
    own: Any = copy.deepcopy(config)
    own.id2label = dict(enumerate(labels))
    own.label2id = {name: i for i, name in own.id2label.items()}
    # `regression`: pipelines give the score, and not its sigmoid
    own.problem_type = "regression" if len(labels) == 1 else "single_label_classification"
    return own


def _check_labels(of_checkpoint: tuple[str, ...], labels: tuple[str, ...]) -> None:
    unnamed = all(name == f"LABEL_{i}" for i, name in enumerate(of_checkpoint))
    same = of_checkpoint == labels or unnamed or len(labels) == 1
    if len(of_checkpoint) != len(labels) or not same:
        raise UserError(
            f"model.name: its labels are {', '.join(of_checkpoint)}, and this run's are {', '.join(labels)}: set "
            f"`objective.labels: [{', '.join(of_checkpoint)}]`, or begin with a model that has no labels yet"
        )


def score_head(model: Any) -> nn.Linear:
    """Returns the head of a model before adapters. Raises UserError where it is not one matrix of this name."""
    head = getattr(model, SCORE, None)
    if not isinstance(head, nn.Linear):
        raise UserError(f"{type(model).__name__} has no linear head `{SCORE}` over its last hidden state")
    return head


def start_score_head(model: Any, dtype: torch.dtype, seed: int) -> None:
    """Replace the head by one with random weights, which depend on nothing but the seed.

    transformers draws its own from a generator that the rest of the load has used, in shards under ZeRO-3, and leaves
    it on `meta` where a rank has no weights.
    """
    head = score_head(model)
    new = nn.Linear(head.in_features, head.out_features, head.bias is not None, head.weight.device, dtype)
    if not new.weight.is_meta:
        generator = torch.Generator().manual_seed(seed)
        values = torch.empty(new.weight.shape).normal_(0, _deviation(model.config), generator=generator)
        new.weight.data.copy_(values)
        if new.bias is not None:
            new.bias.data.zero_()
    setattr(model, SCORE, new)


def _deviation(config: Any) -> float:
    return getattr(config.get_text_config(), "initializer_range", 0.02)
