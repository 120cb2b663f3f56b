"""The LM head's losses on a CUDA device: every implementation against the plain one in fp64."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from finetune.models.head import TokenLoss
from finetune.models.head.chunked import HeadTask, liger_losses, matrix_losses
from finetune.models.head.token_loss import LogitMap

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_liger = pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel")
CHUNKED = (matrix_losses, TokenLoss(0.01, 0.1), LogitMap(scale=2.0, cap=5.0))
WAYS = [
    pytest.param(*CHUNKED, torch.float32, id="chunked fp32"),
    pytest.param(*CHUNKED, torch.bfloat16, id="chunked bf16"),
    pytest.param(liger_losses, TokenLoss(0.01, 0.1), LogitMap(2.0, 5.0), torch.float32, id="liger", marks=needs_liger),
    pytest.param(liger_losses, TokenLoss(), LogitMap(), torch.bfloat16, id="liger bf16", marks=needs_liger),
]


@pytest.mark.parametrize(("way", "token_loss", "logit_map", "compute"), WAYS)
def test_equal_to_the_formula(way, token_loss, logit_map, compute) -> None:  # type: ignore[no-untyped-def]
    """fp32 to rounding; bf16 no further from fp64 than the plain way in bf16."""
    torch.manual_seed(0)
    hidden = torch.randn(1_000, 256, device="cuda")
    weight = torch.randn(5_000, 256, device="cuda") * 0.1
    targets = torch.randint(0, 5_000, (1_000,), device="cuda")
    task = HeadTask(targets, token_loss, logit_map, rows=96)

    def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.linear(x, w)
        upcast = logits if logits.dtype == torch.float64 else logits.float()
        return token_loss.losses(logit_map(upcast), targets, {}).each

    def result(losses, dtype):  # type: ignore[no-untyped-def]
        x, w = (tensor.to(dtype, copy=True).requires_grad_() for tensor in (hidden, weight))
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=compute == torch.bfloat16 and dtype != torch.float64):
            each, total = losses(x, w)
        (total * 0.01).backward()
        return each.double(), x.grad.double(), w.grad.double()

    def ours(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        losses = way(x, w, None, task)
        return losses.each, losses.total

    def theirs(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        each = plain(x, w)
        return each.detach(), each.sum()

    truth = result(theirs, torch.float64)
    for found, usual, wanted in zip(result(ours, torch.float32), result(theirs, torch.float32), truth, strict=True):
        distance, usually = ((a - wanted).norm() / wanted.norm() for a in (found, usual))
        assert distance < (1e-5 if compute == torch.float32 else 1.1 * usually + 1e-6)


def test_memory_does_not_grow_with_the_tokens() -> None:
    """16,000 tokens, 32,000 words: all logits would be 2 GB."""
    hidden = torch.randn(16_000, 256, device="cuda", requires_grad=True)
    weight = torch.randn(32_000, 256, device="cuda", requires_grad=True)
    task = HeadTask(torch.randint(0, 32_000, (16_000,), device="cuda"), TokenLoss(), LogitMap(), rows=512)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    matrix_losses(hidden, weight, None, task).total.backward()
    assert torch.cuda.max_memory_allocated() - before < 400 * 2**20
