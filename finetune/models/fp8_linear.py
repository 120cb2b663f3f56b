"""Products of decoder layers in 8 bits, for full training. Importing this imports torchao.

    y  = q(x) q(W)'          a scale for each row of x and of W
    dx = q(dy) q(W)          a scale for each row of dy, one for W
    dW = dy' x               in bfloat16

All in float8_e4m3fn, with powers of two as scales (torchao's `rowwise_with_gw_hp`,
https://github.com/pytorch/ao/tree/main/torchao/float8). No scale is shared by tokens, so that a token's result depends
neither on the others of its micro-batch nor on the number of processes; with a scale for a whole tensor, or products of
8 bits in dW, it would. Weights, reductions and the optimizer stay as with `precision: bf16`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # pyright: ignore[reportMissingImports]
from torchao.float8.float8_linear import (  # pyright: ignore[reportMissingImports]
    Float8Linear,
    matmul_with_hp_or_float8_args,
)

from finetune.models.packed_linear import multiplies_in_fp8
from finetune.models.patches import replace_class


class Fp8TrainedLinear(Float8Linear):
    """torchao's layer in one type on every backend: its own forward reads CUDA's autocast alone, and rounds fp32
    weights otherwise than FSDP2 does."""

    compute = torch.bfloat16

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            weight = self.weight.to(self.compute).t()
            y = matmul_with_hp_or_float8_args.apply(x.to(self.compute), weight, self.linear_mm_config, self.config)
            return y if self.bias is None else y + self.bias.to(y.dtype)


def use_fp8(layers: nn.Module, emulated: bool) -> int:
    """Replace linear layers of decoder layers, in place; returns their number. Routers and layers of other sizes than
    multiples of 16 stay as they are. emulated: the same values by products of packed and unpacked operands."""
    config = replace(Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp"), emulate=emulated)
    # Not layer by layer: if layers are compiled, this works around a fault of Triton by which gradients are NaN.
    convert_to_float8_training(
        layers,
        config=config,
        module_filter_fn=lambda module, name: type(module) is nn.Linear and multiplies_in_fp8(name, module),
    )
    converted: list[Any] = [module for module in layers.modules() if type(module) is Float8Linear]
    for module in converted:
        replace_class(module, Fp8TrainedLinear, "trained product in 8 bits")
    return len(converted)
