"""Products of 8 bits in full training, emulated: what a token gets is its own, and no more is rounded than said."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from finetune.errors import UserError
from finetune.models import weights
from finetune.models.packed_linear import fp8_rows

pytest.importorskip("torchao")
from finetune.models.fp8_linear import Fp8TrainedLinear, use_fp8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64, bias=False)
        self.gate, self.odd = nn.Linear(64, 16), nn.Linear(64, 24)


@pytest.fixture
def block() -> Any:
    torch.manual_seed(0)
    made = Block()
    assert use_fp8(made, emulated=True) == 2
    return made


def unpacked(rows: Tensor) -> Tensor:
    packed, scale = fp8_rows(rows)
    return packed.float() * scale


def test_routers_and_other_sizes_stay(block: Any) -> None:
    assert [type(m) is Fp8TrainedLinear for m in (block.up, block.down, block.gate, block.odd)] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("autocast", [False, True])
def test_each_product_is_of_the_operands_that_are_said(block: Any, autocast: bool) -> None:
    layer, bf16 = block.up, torch.bfloat16
    x = torch.randn(40, 64).mul_(torch.logspace(-3, 3, 40)[:, None]).to(bf16).requires_grad_()
    of_y = torch.randn(40, 96).to(bf16)
    with torch.autocast("cpu", bf16, enabled=autocast, cache_enabled=False):
        y = layer(x)
    y.backward(of_y)
    weight = layer.weight.detach().to(bf16)
    expected = unpacked(x.detach()) @ unpacked(weight).T + layer.bias.detach()
    torch.testing.assert_close(y.detach().float(), expected, rtol=2**-6, atol=2**-6)
    (whole, scale), (rows, of_x) = fp8_rows(weight.reshape(1, -1)), (unpacked(of_y), x.grad)
    assert of_x is not None
    assert y.dtype == of_x.dtype == bf16
    assert layer.weight.grad.dtype == torch.float32
    expected = rows @ (whole.float() * scale).view_as(weight)
    torch.testing.assert_close(of_x.float(), expected, rtol=2**-6, atol=2**-6)
    expected = of_y.float().T @ x.detach().float()
    torch.testing.assert_close(layer.weight.grad, expected, rtol=2**-7, atol=2**-7 * expected.abs().max().item())


def test_a_token_does_not_see_the_others(block: Any) -> None:
    x = torch.randn(40, 64)
    x[30] *= 1e4  # with one scale for all it would take the others' digits
    assert torch.equal(block.up(x)[:7], block.up(x[:7]))
    assert torch.equal(block.up(x[30:]), block.up(x)[30:])


def test_gradients_of_parts_add_up(block: Any) -> None:
    """Micro-batches of any size, on any number of processes: to the rounding of dW's product, not of 8 bits."""
    x = torch.randn(64, 64)
    parts, whole = copy.deepcopy(block.up), block.up
    whole(x).float().square().sum().backward()
    for part in x.split(16):
        parts(part).float().square().sum().backward()
    difference = (whole.weight.grad - parts.weight.grad).norm() / whole.weight.grad.norm()
    assert difference < 2**-8


def test_a_model_without_such_layers_is_refused() -> None:
    class Model(nn.Module):
        base_model = nn.Module()

    Model.base_model.layers = nn.ModuleList([nn.Linear(7, 7)])
    with pytest.raises(UserError, match="multiples of 16"):
        weights.compute_in_fp8(Model(), emulated=True)


def test_compiled_layers_are_the_same_as_one_graph(block: Any) -> None:
    """torchao is made for it; `use_fp8` goes through what works around Triton's fault in compiled backwards."""
    from torchao.float8 import _inductor_patch  # pyright: ignore[reportMissingImports]

    assert _inductor_patch._PATCHED
    x, results = torch.randn(40, 64), []
    for compiled in (False, True):
        layer = copy.deepcopy(block.up)
        y = (torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer)(x)
        y.sum().backward()
        results.append((y, layer.weight.grad, layer.bias.grad))
    assert all(map(torch.equal, *results))
