"""Tokenizer and weights, quantisation, adapters, attention for packed rows."""

from finetune.models.attention import AttentionChoice
from finetune.models.tokenizer import load_tokenizer
from finetune.models.weights import (
    Dtypes,
    Placement,
    attention_for,
    check_token_ids,
    dtypes,
    load_model,
    model_config,
    parameter_counts,
)

__all__ = [
    "AttentionChoice",
    "Dtypes",
    "Placement",
    "attention_for",
    "check_token_ids",
    "dtypes",
    "load_model",
    "load_tokenizer",
    "model_config",
    "parameter_counts",
]
