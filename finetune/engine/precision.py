"""The recipe's precision, meaning the same under every backend.

fp32, bf16 and fp16 hold what is trained in fp32 and let torch.autocast choose the compute type, inside the model's own
forward so that no backend's idea of mixed precision gets a say: accelerate is always told `no`, DeepSpeed runs its fp32
path, FSDP2 is given an explicit policy. bf16_true holds and computes everything in bf16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


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
