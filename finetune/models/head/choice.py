"""Which implementation makes the losses, and why."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.errors import UserError
from finetune.models.head.architecture import Unknown
from finetune.models.head.chunked import rows_at_once
from finetune.models.head.formula import LogitMap
from finetune.models.head.fused import liger_unfit, torch_unfit


@dataclass(frozen=True)
class CrossEntropyChoice:
    implementation: str  # plain | chunked | torch | liger
    reason: str


def choose_cross_entropy(
    asked: str,
    found: LogitMap | Unknown,  # what the architecture does to its logits
    is_matrix: bool,  # the head is a linear layer, without adapters
    vocabulary: int,
    device: str,
) -> CrossEntropyChoice:
    """Raises UserError where the recipe asks for one that cannot be."""
    if asked == "plain":
        return CrossEntropyChoice("plain", "asked for in the recipe")
    if isinstance(found, Unknown):
        if asked == "auto":
            return CrossEntropyChoice("plain", str(found))
        raise UserError(f"model.cross_entropy: `{asked}` is not possible: {found}; use `auto`")
    if asked in ("torch", "liger"):
        unfit = torch_unfit(found) if asked == "torch" else liger_unfit(device)
        if not is_matrix:
            unfit = "it takes a head that is one matrix, and this one has adapters or quantised weights"
        if unfit:
            raise UserError(f"model.cross_entropy: `{asked}` is not possible: {unfit}; use `auto`")
        return CrossEntropyChoice(asked, "asked for in the recipe")
    rows = rows_at_once(vocabulary, device)
    size = f"logits of {rows:,} tokens at a time, {rows * vocabulary * 4 / 2**20:,.0f} MiB"
    return CrossEntropyChoice("chunked", size if asked == "auto" else f"asked for in the recipe; {size}")
