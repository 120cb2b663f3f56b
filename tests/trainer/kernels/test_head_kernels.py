"""The LM head's losses by Liger's kernel, in Triton's interpreter, against the plain computation."""

from __future__ import annotations

import pytest
import torch
from interpreted import needs_interpreter
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.models.head import TokenLoss, chunked
from finetune.models.head.chunked import HeadTask, MatrixHead, liger_losses, matrix_losses
from finetune.models.head.token_loss import HeadLosses, LogitMap

pytestmark = needs_interpreter
TARGETS, VOCABULARY, HIDDEN = 13, 70, 16
CASES = {
    "plain": (TokenLoss(), LogitMap(), False),
    "bias": (TokenLoss(), LogitMap(), True),
    "z-loss and smoothing": (TokenLoss(0.01, 0.1), LogitMap(), True),
    "cap": (TokenLoss(), LogitMap(cap=2.0), True),
    "scale": (TokenLoss(), LogitMap(scale=0.5), False),
    "scale and bias": (TokenLoss(), LogitMap(scale=0.5), True),
    "all": (TokenLoss(0.02, 0.2), LogitMap(scale=3.0, cap=2.0), True),
}


def inputs(dtype: torch.dtype, bias: bool, targets: int = TARGETS) -> tuple[list[torch.Tensor | None], torch.Tensor]:
    """Returns hidden states, weight and bias as leaves, and the targets' ids."""
    torch.manual_seed(0)
    shapes = [(targets, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,)]
    leaves = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    return [*leaves[:2], leaves[2] if bias else None], torch.randint(0, VOCABULARY, (targets,))


def gradients(losses: HeadLosses, leaves: list[torch.Tensor | None]) -> list[torch.Tensor]:
    (losses.total * 0.37).backward()
    found = [leaf.grad.double() for leaf in leaves if leaf is not None and leaf.grad is not None]
    assert len(found) == sum(leaf is not None for leaf in leaves)
    return found


@pytest.mark.parametrize("case", CASES)
def test_equal_to_the_plain_way(case: str) -> None:
    token_loss, logit_map, bias = CASES[case]
    leaves, ids = inputs(torch.float32, bias)
    found = liger_losses(*leaves, HeadTask(ids, token_loss, logit_map, rows=4))  # type: ignore[arg-type]
    exact = [None if leaf is None else leaf.detach().double().requires_grad_() for leaf in leaves]
    logits = logit_map(torch.nn.functional.linear(*exact))  # type: ignore[arg-type]
    each = token_loss.losses(logits, ids, {}).each
    torch.testing.assert_close(found.each.double(), each.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.total.double(), each.sum(), rtol=1e-5, atol=1e-5)
    ours, theirs = gradients(found, leaves), gradients(HeadLosses(each.sum(), each), exact)
    for mine, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-5 * wanted.abs().max().item())


@pytest.mark.parametrize("case", ["plain", "all"])
def test_a_vocabulary_of_several_blocks(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """As most have: a block has 32,768 columns."""
    monkeypatch.setattr(chunked, "_LIGER_BLOCK", 16)
    test_equal_to_the_plain_way(case)


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32], ids=["frozen types", "autocast"])
def test_bf16_is_no_further_from_the_truth_than_our_own(weights: torch.dtype) -> None:
    """With autocast over fp32 weights, as trained ones have."""
    results = {}
    for name, dtype in (("liger", weights), ("chunked", weights), ("exact", torch.float64)):
        leaves, ids = inputs(torch.bfloat16, bias=False)
        leaves = [None if leaf is None else leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
        losses_of = liger_losses if name == "liger" else matrix_losses
        with torch.autocast("cpu", torch.bfloat16, enabled=name != "exact"):
            losses = losses_of(*leaves, HeadTask(ids, TokenLoss(0.01), LogitMap(), rows=4))  # type: ignore[arg-type]
        results[name] = [losses.each.double(), *gradients(losses, leaves)]
    for found, usual, exact in zip(*(results[name] for name in ("liger", "chunked", "exact")), strict=True):
        distance, usually = ((one - exact).norm() / exact.norm() for one in (found, usual))
        assert distance < 1.2 * usually + 1e-6


def test_without_targets_there_is_a_graph_and_no_gradient() -> None:
    """On ranks whose share of a micro-batch has none: DDP waits for gradients of every parameter."""
    leaves, ids = inputs(torch.float32, bias=True, targets=0)
    losses = liger_losses(*leaves, HeadTask(ids, TokenLoss(), LogitMap(), rows=4))  # type: ignore[arg-type]
    assert (losses.total.item(), losses.each.shape) == (0.0, (0,))
    assert not any(gradient.any() for gradient in gradients(losses, leaves))


def test_nothing_is_read_off_the_device() -> None:
    class Waits(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            assert func.name() not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero")
            return func(*args, **(kwargs or {}))

    leaves, ids = inputs(torch.float32, bias=True)
    with Waits():
        liger_losses(*leaves, HeadTask(ids, TokenLoss(0.01), LogitMap(), rows=4)).total.backward()  # type: ignore[arg-type]


def test_logits_are_there_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient takes their place; `chunked` keeps two copies in fp32 beside them."""
    kept = []
    scratch = MatrixHead._scratch
    monkeypatch.setattr(MatrixHead, "_scratch", lambda *arguments: kept.append(1) or scratch(*arguments))
    leaves, ids = inputs(torch.bfloat16, bias=False)
    liger_losses(*leaves, HeadTask(ids, TokenLoss(), LogitMap(), rows=4))  # type: ignore[arg-type]
    assert not kept
