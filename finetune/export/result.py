"""runs/<name>/model/: a plain Hugging Face folder, whole or absent."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast

from finetune.engine import Engine


def save_result(
    engine: Engine,
    tokenizer: PreTrainedTokenizerFast,
    end_ids: set[int],
    adapter: bool,
    dtype: torch.dtype,
    card: str,
    folder: Path,
) -> None:
    """Weights (or the adapter), tokenizer with chat template, generation config and card. Collective.

    dtype: of the saved full weights; adapters stay as they were trained. Written beside `folder`, then renamed.
    """
    state = whole_state(engine, adapter)
    if engine.is_main:
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        write_folder(engine.unwrapped, state, tokenizer, end_ids, None if adapter else dtype, partial)
        (partial / "README.md").write_text(card, encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    engine.barrier()


def whole_state(engine: Engine, trainable_only: bool) -> dict[str, Tensor]:
    """The result's tensors by name: on rank 0 in CPU memory, empty elsewhere. Collective."""
    tensors = engine.full_tensors(trainable_only)
    return {name: tensor for name, tensor in tensors if tensor is not None}


def write_folder(
    model: Any,
    state: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerFast,
    end_ids: set[int],
    dtype: torch.dtype | None,
    folder: Path,
) -> None:
    """Everything but the card, through transformers' and peft's own writers."""
    if dtype is not None:
        state = {name: t.to(dtype) if t.is_floating_point() else t for name, t in state.items()}
        model.config.dtype = dtype
    model.config.use_cache = True  # off in training only
    model.generation_config = generation_config(model, tokenizer, end_ids)
    model.save_pretrained(folder, state_dict=state)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def generation_config(model: Any, tokenizer: PreTrainedTokenizerFast, end_ids: set[int]) -> GenerationConfig:
    """The model's own, ending where this training taught it to end."""
    config = GenerationConfig(**(model.generation_config.to_diff_dict() if model.generation_config else {}))
    ends = sorted(end_ids)
    config.eos_token_id = ends[0] if len(ends) == 1 else ends
    config.pad_token_id = tokenizer.pad_token_id
    config.bos_token_id = tokenizer.bos_token_id
    return config
