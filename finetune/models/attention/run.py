"""The attention of a run."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from finetune.errors import UserError
from finetune.models.attention import AttentionChoice, choose_attention
from finetune.models.dtypes import dtypes
from finetune.recipe.schema import Recipe


def attention_for(recipe: Recipe, config: PretrainedConfig, device: str) -> AttentionChoice:
    """The attention of this run; see `choose_attention`."""
    try:
        model_class: Any = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        raise UserError(f"{type(config).__name__} is not a causal language model that transformers knows") from None
    half = dtypes(recipe).compute != torch.float32
    longest = recipe.data.max_length if recipe.train.compile else None
    return choose_attention(recipe.model.attention, model_class, config, device, half, longest=longest)


def check_rows_per_forward(recipe: Recipe, attention: AttentionChoice) -> None:
    """Raises UserError where a forward is to have several documents, and attention cannot keep them apart."""
    if attention.isolates_documents:
        return
    if recipe.batch.rows_per_device not in (1, "auto") or recipe.batch.tokens_per_device is not None:
        raise UserError(f"{attention.reason}: set batch.rows_per_device: 1, and no tokens_per_device")
