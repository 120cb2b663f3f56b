"""Greedy generation through the wrapped model, on any backend.

`generate` of transformers calls the inner module and so bypasses the hooks with which FSDP2 and ZeRO-3 gather sharded
weights. This loop calls the wrapper, as training does, and runs on all ranks until every one has finished.

Letters: B prompts, P longest prompt, N new tokens so far.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache

from finetune.data.dataset import until_end
from finetune.engine.base import Engine


@torch.no_grad()
def greedy(
    engine: Engine, prompts: list[list[int]], end_ids: set[int], pad_id: int, max_new_tokens: int
) -> list[list[int]]:
    """Returns the new tokens of each prompt, without its end token. Collective; prompts may differ between ranks.

    A rank without prompts takes part with a dummy one and returns an empty list.
    """
    num_prompts = len(prompts)
    input_ids, mask = _left_padded(prompts or [[pad_id]], pad_id, engine.device)  # (B, P), (B, P)
    finished = torch.tensor([i >= num_prompts for i in range(len(input_ids))], device=engine.device)
    ends = torch.tensor(sorted(end_ids), device=engine.device)
    cache = DynamicCache(config=engine.unwrapped.config) if engine.caches else None
    new_tokens: list[Tensor] = []  # (B,) each
    for _ in range(max_new_tokens):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
        output = engine.model(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
            logits_to_keep=1,
        )
        next_token = output.logits[:, -1].argmax(-1)  # (B,)
        new_tokens.append(torch.where(finished, pad_id, next_token))
        finished = finished | torch.isin(next_token, ends)
        if engine.ranks.sum((~finished).sum())[0] == 0:
            break
        input_ids = next_token[:, None] if cache is not None else torch.cat([input_ids, next_token[:, None]], dim=1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    rows = torch.stack(new_tokens, dim=1).tolist() if new_tokens else [[] for _ in range(num_prompts)]
    return [until_end(row, end_ids) for row in rows[:num_prompts]]


def _left_padded(prompts: list[list[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    longest = max(len(prompt) for prompt in prompts)
    ids = [[pad_id] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
