"""The gradient norm that clips: in fp64, whatever pieces the gradients come in.

The bound is fp64's own: the rounding of 50,000 partial sums adds up to some 1e-14.
"""

from __future__ import annotations

import math

import pytest
import torch

from finetune.engine import optimizer_step
from finetune.engine.optimizer_step import scale_gradients, squared_norm

CPU = torch.device("cpu")


def test_it_is_the_fp64_norm_however_gradients_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    whole = torch.randn(700, 500) * torch.logspace(-6, 3, 500)
    expected = math.fsum(whole.double().square().flatten().tolist())  # squares of fp32 are exact in fp64, so is fsum
    for piece in (optimizer_step._CHUNK, 1000, 7):
        monkeypatch.setattr(optimizer_step, "_CHUNK", piece)
        for gradients in ([whole], list(whole.split(33)), list(whole.split(33, dim=1))):
            assert squared_norm(gradients, CPU).item() == pytest.approx(expected, rel=1e-13)


def test_fp32_would_not_do() -> None:
    """One large value, and many small ones that fp32 sums lose."""
    gradient = torch.full((2**20,), 1e-3)
    gradient[0] = 1e4
    expected = gradient.double().square().sum().item()
    assert squared_norm([gradient], CPU).item() == pytest.approx(
        expected, rel=1e-11
    )  # a million sums, one after another, in fp64
    assert gradient.square().cumsum(0)[-1].item() != pytest.approx(expected, rel=1e-9)


def test_what_there_is_to_sum() -> None:
    assert squared_norm([], CPU).item() == 0.0
    assert squared_norm([torch.empty(0), torch.tensor(3.0), torch.tensor([[4.0]])], CPU).item() == 25.0
    assert squared_norm([torch.full((3,), 1e30)], CPU).item() == pytest.approx(3e60)  # its square is none in fp32
    assert squared_norm([torch.full((2,), 3e4, dtype=torch.float16)], CPU).item() == pytest.approx(1.8e9, rel=1e-3)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_so(value: float) -> None:
    gradient = torch.zeros(optimizer_step._CHUNK + 5)
    gradient[-1] = value
    assert not torch.isfinite(squared_norm([torch.ones(3), gradient], CPU))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_clipping_multiplies_as_torch_by_the_number(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gradients = [3 * torch.randn(size) for size in ((40, 30), (7,), (513,))]
    gradients = [*(gradient.to(dtype) for gradient in gradients), gradients[0].to(dtype).t()]
    for factor in (1 / 3, 0.9990001, 1e-5, 7.1234567891234, 0.3337 / 2**16):
        expected, scaled = ([gradient.clone() for gradient in gradients] for _ in range(2))
        torch._foreach_mul_(expected, factor)
        scale_gradients(scaled, factor)
        assert all(torch.equal(*pair) for pair in zip(scaled, expected, strict=True)), factor


def test_gradients_of_two_types_are_clipped() -> None:
    gradients = [torch.ones(3), torch.ones(3, dtype=torch.bfloat16)]
    scale_gradients(gradients, 0.5)
    assert [gradient.tolist() for gradient in gradients] == [[0.5] * 3] * 2
