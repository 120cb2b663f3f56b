"""The recipe's precision, meaning the same under every backend.

fp32, bf16 and fp16 hold what is trained in fp32 and let torch.autocast choose the compute type, inside the model's own
forward so that no backend's idea of mixed precision gets a say: accelerate is always told `no`, DeepSpeed runs its fp32
path, FSDP2 is given an explicit policy. bf16_true holds and computes everything in bf16.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch

from finetune.models.adapters import keep_input_types


def autocast_forward(model: Any, compute: torch.dtype, device_type: str) -> None:
    """Run the model's forward under autocast to `compute`, wherever it is called from."""
    keep_input_types(model)
    forward = model.forward

    @functools.wraps(forward)  # peft and generate look at the signature
    def with_autocast(*args: Any, **kwargs: Any) -> Any:
        with autocast_to(compute, device_type):
            return forward(*args, **kwargs)

    model.forward = with_autocast


def autocast_to(compute: torch.dtype, device_type: str, enabled: bool = True) -> torch.autocast:
    """Returns autocast that keeps no copies of fp32 weights: with its cache, one of each would be held until the
    forward ends, 2 bytes a parameter at the peak of memory. A forward uses each weight once."""
    return torch.autocast(device_type, dtype=compute, enabled=enabled, cache_enabled=False)


class NonFinite(Exception):
    """The loss or the gradient is not finite. Nothing was stepped, unless `stepped`."""

    def __init__(self, message: str, stepped: bool = False):
        super().__init__(message)
        self.stepped = stepped


@dataclass
class LossScale:
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2017, https://arxiv.org/abs/1710.03740); 1 and still
    elsewhere.

    One number on every rank: it changes with the global gradient norm, which all ranks know.
    """

    enabled: bool
    value: float = 1.0
    growth_interval: int = 2000  # good steps before doubling, as torch.amp.GradScaler
    good_steps: int = 0

    @classmethod
    def of(cls, precision: str) -> LossScale:
        return cls(enabled=True, value=2.0**16) if precision == "fp16" else cls(enabled=False)

    def update(self, grad_norm: float) -> bool:
        """After a step's norm: True where the step counts, False where it must be skipped for a smaller scale.

        Raises NonFinite where no scale is small enough: the gradient itself is not finite.
        """
        if not self.enabled:
            return True
        if math.isfinite(grad_norm):
            self.good_steps += 1
            if self.good_steps == self.growth_interval:
                self.value, self.good_steps = self.value * 2, 0
            return True
        if self.value < 1.0:
            raise NonFinite("the gradient is not finite at any loss scale")
        self.value, self.good_steps = self.value / 2, 0
        return False
