"""Decoding with a cache through the wrapped model, on all ranks until every one has finished.

`generate` of transformers calls the inner module and so bypasses the hooks with which FSDP2 and ZeRO-3 gather sharded
weights. `decode` calls the wrapper, as training does.

Letters: B prompts, P longest prompt, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PretrainedConfig

from finetune.data.batch import MediaInputs
from finetune.data.samples import MediaKind, Medium, kind_of
from finetune.engine.base import Engine
from finetune.models.towers import document_positions, grids_of, whole_image_types

Choose = Callable[[Tensor, int], Tensor]  # (logits (B, V), position of the new token, from 0) -> ids (B,)


@dataclass(frozen=True)
class PromptMedia:
    """Inputs of a forward for the files of left-padded prompts."""

    inputs: dict[str, Tensor]
    positions: Tensor | None = None  # (3, B, P) in time, height and width; None: places suffice
    beyond: Tensor | None = None  # (B,) offset after a prompt, from place to position

    def positions_at(self, places: Tensor) -> Tensor:
        """Returns positions of the tokens of a forward, from their places (B, tokens): consecutive after a prompt."""
        if self.positions is None or self.beyond is None:
            return places
        if places.shape[1] == self.positions.shape[2]:
            return self.positions.to(places.device)
        return (places + self.beyond.to(places.device)[:, None]).expand(3, -1, -1)


def prompt_media(
    reader: MediaInputs | None,
    config: PretrainedConfig,
    prompts: Sequence[list[int]],
    media: Sequence[Sequence[Medium]],
    pad_id: int,
) -> PromptMedia | None:
    """Returns the files of a batch of prompts; None if there are none. media: of each prompt. Raises UserError."""
    if reader is None or not any(media):
        return None
    ids, _ = left_padded(list(prompts), pad_id, torch.device("cpu"))
    kinds: list[list[MediaKind]] = [[kind_of(one) for one in of_prompt] for of_prompt in media]
    inputs = reader([one for of_prompt in media for one in of_prompt], ids) | whole_image_types(config, ids, kinds)
    grids = grids_of(inputs, kinds)
    if (positions_of := document_positions(config)) is None or not any(grids):
        return PromptMedia(inputs)
    documents = [positions_of(torch.tensor([prompt]), mine) for prompt, mine in zip(prompts, grids, strict=True)]
    padded = [pad(document[:, 0], (ids.shape[1] - document.shape[2], 0)) for document in documents]
    beyond = torch.stack([document.max() + 1 - document.shape[2] for document in documents])
    return PromptMedia(inputs, torch.stack(padded, dim=1), beyond)


@torch.no_grad()
def decode(
    engine: Engine,
    prompts: list[list[int]],
    end_ids: set[int],
    pad_id: int,
    max_new_tokens: int,
    choose: Choose,
    media: PromptMedia | None = None,
    rooms: Sequence[int] | None = None,
) -> list[list[int]]:
    """Returns the new tokens of each prompt, up to and with its end token. Collective; prompts of ranks may differ.

    A rank without prompts runs a dummy prompt and returns an empty list. rooms: most new tokens of each prompt, at most
    `max_new_tokens`.
    """
    num_prompts = len(prompts)
    input_ids, mask = left_padded(prompts or [[pad_id]], pad_id, engine.device)  # (B, P), (B, P)
    finished = torch.tensor([i >= num_prompts for i in range(len(input_ids))], device=engine.device)
    ends = torch.tensor(sorted(end_ids), device=engine.device)
    rooms = rooms or [max_new_tokens] * len(input_ids)
    room = torch.tensor(rooms, device=engine.device)  # (B,)
    cache = engine.new_cache()
    new_tokens: list[Tensor] = []  # (B,) each
    for position in range(max_new_tokens):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
        media_inputs: dict[str, Tensor] = {}
        if media is not None:
            positions = media.positions_at(positions)
            if not new_tokens:
                media_inputs = {name: value.to(engine.device) for name, value in media.inputs.items()}
        output = engine.model(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            **media_inputs,
        )
        next_token = choose(output.logits[:, -1], position)  # (B,)
        new_tokens.append(torch.where(finished, pad_id, next_token))
        finished = finished | torch.isin(next_token, ends) | (room <= position + 1)
        if engine.ranks.sum((~finished).sum())[0] == 0:
            break
        input_ids = next_token[:, None]
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    rows = torch.stack(new_tokens, dim=1).tolist() if new_tokens else [[] for _ in range(num_prompts)]
    return [through_end(row[: rooms[i]], end_ids) for i, row in enumerate(rows[:num_prompts])]


def through_end(ids: list[int], end_ids: set[int]) -> list[int]:
    """Returns ids up to and with the first end token; all if there is none."""
    return next((ids[: i + 1] for i, token in enumerate(ids) if token in end_ids), ids)


def left_padded(prompts: list[list[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns ids and attention mask, (B, P) each, of prompts that all end at the last position."""
    longest = max(len(prompt) for prompt in prompts)
    ids = [[pad_id] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
