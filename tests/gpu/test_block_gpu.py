"""Attention of stretches with their log-sum-exp: the CUDA kernel against the formula, alone and merged."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from finetune.models.attention.pieces import _kernel, attend, attend_backward, nothing_seen, pieces

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SCALE = 0.125
NEAR = {torch.bfloat16: 2e-2, torch.float16: 4e-3}


def made(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(query, keys and values): four heads on two."""
    generator = torch.Generator().manual_seed(0)
    query, key_value = (torch.randn(1, h, tokens, d, generator=generator) for h, d in ((4, 64), (2, 128)))
    return query.to("cuda", dtype), key_value.to("cuda", dtype)


def through_pieces(query: Tensor, key_value: Tensor, lengths: tuple[int, ...]) -> list[Tensor]:
    """Of the second of two halves, whose keys come in two: output and gradients."""
    half = query.shape[2] // 2
    mine = query[:, :, half:]
    whole, of_query = nothing_seen(mine, 64), torch.zeros_like(mine, dtype=torch.float32)
    of_key_value = torch.zeros_like(key_value, dtype=torch.float32)
    arrivals = [(slice(half, None), ((half, 2 * half),)), (slice(0, half), ((0, half),))]
    for here, theirs in arrivals:
        attend(mine, key_value[:, :, here], pieces(lengths, ((half, 2 * half),), theirs), SCALE, whole)
    for here, theirs in arrivals:
        found = pieces(lengths, ((half, 2 * half),), theirs)
        into = of_key_value[:, :, here]
        attend_backward(torch.ones_like(mine), mine, key_value[:, :, here], whole, found, SCALE, of_query, into)
    return [whole.out, of_query, of_key_value]


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("lengths", [(512,), (100, 300, 1, 111), (256, 256)])
def test_the_kernel_is_the_formula(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, lengths: tuple[int, ...]
) -> None:
    query, key_value = made(512, dtype)
    assert _kernel(query, key_value[..., 64:]) == "cuda"
    fused = through_pieces(query, key_value, lengths)
    monkeypatch.setattr("finetune.models.attention.pieces._kernel", lambda *_: None)
    exact = through_pieces(query.float(), key_value.float(), lengths)
    for ours, theirs in zip(fused, exact, strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=NEAR[dtype], atol=NEAR[dtype])
