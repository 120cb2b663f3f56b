"""How far values of llama.cpp's block types may be off, as shares: what the gate holds a quantised tensor against.

These types search for the scales with the least error, weighted by an importance matrix if there is one, so no rule
says what a block has to hold. What can be said, of x in the file and e as trained:

    whole   |x - e| / |e| of a tensor
    block   the same of each 256 values, where a block of another row or expert has about 1.4
    scale   |<x, e> / <x, x> - 1|: a tensor that is too large or too small as a whole
    update  <x - e, d> / <d, d>, of what training changed, d: -1 if the file has the base's values, 0 if the run's

Each table's numbers are about 1.3 times the largest that ggml gave for normal, Laplace and Student's t (3) values, for
columns 20 times as large as others and for rows of other sizes, with an importance matrix and without one.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# ggml's types: whole, block, scale.
SHARES = {
    "Q4_0": (0.20, 0.45, 0.02),
    "Q4_1": (0.15, 0.27, 0.018),
    "Q5_0": (0.12, 0.22, 0.009),
    "Q5_1": (0.08, 0.14, 0.005),
    "Q2_K": (0.50, 1.20, 0.16),
    "Q3_K": (0.26, 0.52, 0.04),
    "Q4_K": (0.15, 0.26, 0.009),
    "Q5_K": (0.08, 0.13, 0.003),
    "Q6_K": (0.05, 0.27, 0.006),
    "MXFP4": (0.23, 0.33, 0.06),
    "NVFP4": (0.13, 0.19, 0.009),
    "IQ4_NL": (0.17, 0.43, 0.014),
    "IQ4_XS": (0.17, 0.31, 0.013),
    "IQ3_S": (0.40, 0.70, 0.15),
    "IQ3_XXS": (0.46, 0.80, 0.18),
    "IQ2_S": (0.72, 1.20, 0.26),
    "IQ2_XS": (0.75, 1.25, 0.30),
    "IQ2_XXS": (0.96, 1.70, 0.44),
    "IQ1_S": (0.87, 1.30, 0.37),
    "IQ1_M": (0.73, 1.20, 0.27),
}
_BLOCK = 256
_SMALLEST = 2.0**-10  # of a tensor's mean square root: blocks of smaller values are held against this size
_FEW, _ERRORS = 4096, 5.0  # values below which a tensor's scale says nothing; standard errors that it may be off
_CLEAR = 0.1  # the standard error of `update`, above which it says nothing


@dataclass
class Update:
    """The share of training's change that quantised tensors kept: sums over them, in fp64."""

    along: float = 0.0  # <x - e, d>
    size: float = 0.0  # <d, d>

    @property
    def share(self) -> float | None:
        """Returns 1 if the file has the run's values, 0 if it has the base's, both up to rounding."""
        return 1.0 + self.along / self.size if self.size else None


def block_problem(x: Tensor, e: Tensor, kind: str) -> str | None:
    """Returns how a tensor in a file differs from what it should be; None if it does not. kind: ggml's type."""
    whole, block, scale = SHARES[kind]
    x, e = x.double().reshape(-1, x.shape[-1]), e.double().reshape(-1, e.shape[-1])
    if not bool(x.isfinite().all()):
        return "has values that are not finite"
    total = float(e.square().sum())
    if total == 0:
        return None if not bool(x.any()) else "is not zero, as the run's is"
    share = (float((x - e).square().sum()) / total) ** 0.5
    if share > whole:
        return f"is off by {share:.0%} of its size, more than {kind} is ({whole:.0%})"
    width = _BLOCK if x.shape[1] % _BLOCK == 0 else x.shape[1]
    off, size = ((one).reshape(-1, width).square().sum(1) for one in (x - e, e))
    floor = width * total / e.numel() * _SMALLEST**2
    worst = float((off / size.clamp(min=floor)).max()) ** 0.5
    if worst > block:
        return f"has {width} values that are off by {worst:.0%} of their size, more than {kind} is ({block:.0%})"
    if x.numel() >= _FEW:
        ratio = float((x * e).sum() / x.square().sum())
        if abs(ratio - 1) > scale + _ERRORS * share / x.numel() ** 0.5:
            return f"is {1 / ratio - 1:+.1%} too large as a whole, more than {kind} is ({scale:.1%})"
    return None


def update_problem(x: Tensor, e: Tensor, base: Tensor, all_of_it: Update) -> str | None:
    """Returns whether a tensor in a file lacks what training changed; adds to the sums of all tensors. base: the
    tensor before training."""
    x, e = x.double(), e.double()
    d = e - base.double()
    size = float(d.square().sum())
    if size == 0:
        return None
    along = float(((x - e) * d).sum())
    all_of_it.along, all_of_it.size = all_of_it.along + along, all_of_it.size + size
    error = (float((x - e).square().mean()) / size) ** 0.5
    if error < _CLEAR and along / size < -0.5:
        return f"has {max(0.0, 1 + along / size):.0%} of what training changed"
    return None
