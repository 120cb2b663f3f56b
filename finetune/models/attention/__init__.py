"""Attention that keeps the documents of one packed row apart: a file for each implementation, one for the choice.

All are equal to fp32 rounding, and equal to one document at a time.
"""

from finetune.models.attention.choice import (
    AttentionChoice,
    Kernels,
    attention_for,
    check_rows_per_forward,
    choose_attention,
)
from finetune.models.attention.kernels import FLEX, VARLEN, with_unread_mask
from finetune.models.attention.per_document import DOCUMENTS

__all__ = [
    "DOCUMENTS",
    "FLEX",
    "VARLEN",
    "AttentionChoice",
    "Kernels",
    "attention_for",
    "check_rows_per_forward",
    "choose_attention",
    "with_unread_mask",
]
