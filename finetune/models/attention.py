"""Attention that keeps the documents of one packed row apart.

Letters: T tokens of the row, H query heads, K key/value heads, D head size.

Three ways, equal to fp32 rounding and equal to one document at a time:

- `documents`: scaled_dot_product_attention once per document. No mask, no work across documents. Any device.
- `sdpa`, `eager`: one call over the whole row under a block-diagonal mask that transformers derives from the restarting
  position_ids. It does so only without a cache and without an attention mask, hence `use_cache=False` in every
  training forward; with a cache the documents would silently see each other.
- `flash_attention_2`: where the flash-attn package is installed; documents from position_ids as well.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import PreTrainedModel

from finetune.errors import UserError

NAME = "finetune_documents"  # in transformers' table of attention functions


@dataclass(frozen=True)
class AttentionChoice:
    implementation: str  # transformers' name
    reason: str
    isolates_documents: bool  # False: one document per forward is the only safe layout
    needs_lengths: bool = False  # the forward takes `document_lengths`

    def forward_arguments(self, document_lengths: tuple[int, ...]) -> dict[str, Any]:
        return {"document_lengths": document_lengths} if self.needs_lengths else {}


def choose_attention(
    asked: str, model_class: type[PreTrainedModel], config: PretrainedConfig, device: str, half_precision: bool
) -> AttentionChoice:
    """The attention implementation for this architecture, device and precision, with the reason in words.

    Raises UserError where the recipe asks for one that cannot be.
    """
    if (why := _mixes_documents(model_class, config)) is not None:
        name = "eager" if asked in ("auto", "documents") else asked
        return AttentionChoice(name, f"{why}: one document per forward", isolates_documents=False)
    unsuited = _documents_unsuited(model_class, config)
    if asked == "documents" and unsuited:
        raise UserError(f"model.attention: `documents` does not fit {model_class.__name__}: {unsuited}; use `auto`")
    if asked == "flash_attention_2":
        _check_flash(device, half_precision)
        return AttentionChoice("flash_attention_2", "asked for in the recipe", True)
    if asked in ("sdpa", "eager"):
        return AttentionChoice(asked, "asked for in the recipe", True)
    if asked == "auto" and device == "cuda" and half_precision and importlib.util.find_spec("flash_attn"):
        return AttentionChoice("flash_attention_2", "CUDA, 16 bit, flash-attn is installed", True)
    if unsuited:
        return AttentionChoice("eager", unsuited, True)
    return AttentionChoice(NAME, "no mask and no work across documents", True, needs_lengths=True)


def _mixes_documents(model_class: type[PreTrainedModel], config: PretrainedConfig) -> str | None:
    """Why an architecture cannot keep documents apart, or None."""
    attends = {"full_attention", "sliding_attention"}
    other = sorted(set(getattr(config, "layer_types", None) or ()) - attends)
    if getattr(model_class, "_is_stateful", False) or other:
        return f"{model_class.__name__} carries state along the row ({', '.join(other) or 'recurrent layers'})"
    if not getattr(model_class, "_supports_attention_backend", False):
        return f"{model_class.__name__} does not take transformers' attention functions"
    return None


def _documents_unsuited(model_class: type[PreTrainedModel], config: PretrainedConfig) -> str | None:
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "its attention logits are soft-capped, which scaled_dot_product_attention cannot do"
    if not getattr(model_class, "_supports_sdpa", False):
        return "it does not support scaled_dot_product_attention"
    return None


def _check_flash(device: str, half_precision: bool) -> None:
    if device != "cuda" or not half_precision:
        raise UserError("model.attention: `flash_attention_2` needs a CUDA device and 16-bit precision; use `auto`")
    if importlib.util.find_spec("flash_attn") is None:
        raise UserError("model.attention: flash-attn is not installed: pip install flash-attn --no-build-isolation")


def documents_attention(
    module: torch.nn.Module,
    query: Tensor,  # (1, H, T, D)
    key: Tensor,  # (1, K, T, D)
    value: Tensor,  # (1, K, T, D)
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    document_lengths: tuple[int, ...] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # (1, T, H, D)
    """Causal attention within each document of the row; plain masked attention when generating."""
    if document_lengths is None:
        if attention_mask is None:
            raise ValueError("neither document_lengths nor an attention mask: documents could see each other")
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, is_causal=False)
    pieces = [
        scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=_band(length, sliding_window, q.device),
            dropout_p=dropout,
            is_causal=sliding_window is None or length <= sliding_window,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        for length, q, k, v in zip(
            document_lengths,
            query.split(document_lengths, dim=2),
            key.split(document_lengths, dim=2),
            value.split(document_lengths, dim=2),
            strict=True,
        )
    ]
    return torch.cat(pieces, dim=2).transpose(1, 2).contiguous(), None


def _band(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """(length, length), True where token i sees token j: i - window < j <= i. None where plain causal is the same."""
    if window is None or length <= window:
        return None
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None, :]
    return (distance >= 0) & (distance < window)


def _documents_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """No mask in training (the lengths say it all); with padding, when generating, sdpa's own."""
    if attention_mask is None:
        return None
    kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(*args, attention_mask=attention_mask, **kwargs)


# Python's list of lengths changes with every row: traced, each would compile anew.
AttentionInterface.register(NAME, torch.compiler.disable(documents_attention))
AttentionMaskInterface.register(NAME, _documents_mask)
