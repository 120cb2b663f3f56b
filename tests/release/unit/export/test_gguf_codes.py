"""Block types of llama.cpp: what the gate sees in a quantised tensor, and what it lets pass."""

from __future__ import annotations

import pytest
import torch

from finetune.release.export.gguf_codes import SHARES, Update, block_problem, update_problem

gguf = pytest.importorskip("gguf")


def rounded(values: torch.Tensor, kind: str) -> torch.Tensor:
    own = gguf.GGMLQuantizationType[kind]
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(values.numpy(), own), own))


def trained() -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix before and after training: a change of rank 2, a hundredth of its size."""
    make = torch.Generator().manual_seed(0)
    base = torch.randn(256, 512, generator=make) * 0.02
    change = torch.randn(256, 2, generator=make) @ torch.randn(2, 512, generator=make)
    return base, base + change * 0.01 * base.norm() / change.norm()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_what_a_type_costs_passes(kind: str) -> None:
    base, run = trained()
    update = Update()
    assert block_problem(rounded(run, kind), run, kind) is None
    assert update_problem(rounded(run, kind), run, base, update) is None
    assert update.share == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (lambda x: x * 1.03, "too large as a whole"),
        (lambda x: x * 0.97, "too large as a whole"),
        (lambda x: torch.cat([x[:, 32:64], x[:, :32], x[:, 64:]], 1), "is off by"),
        (lambda x: torch.cat([x[1:2], x[:1], x[2:]]), "is off by"),
        (lambda x: torch.cat([x[:1] * 0, x[1:]]), "values that are off by"),
        (lambda x: x.roll(1, 0), "is off by 14"),
        (lambda x: x * float("nan"), "not finite"),
    ],
)
def test_planted_errors_are_seen(plant, says: str) -> None:
    _, run = trained()
    assert says in (block_problem(plant(rounded(run, "Q5_0")), run, "Q5_0") or "")


def test_a_lost_update_is_seen_although_it_is_smaller_than_a_step() -> None:
    """A stale tensor is within every bound of its type: only the direction of what is off tells."""
    base, run = trained()
    update, stale = Update(), rounded(base, "Q4_0")
    assert block_problem(stale, run, "Q4_0") is None
    assert update_problem(stale, run, base, update) is not None
    assert update.share == pytest.approx(0.0, abs=0.2)
    tiny = base + (run - base) * 1e-3  # below what the rounding of so many values lets see: it says nothing
    assert update_problem(stale, tiny, base, Update()) is None


def test_every_type_of_the_package_that_exports_have_is_bounded() -> None:
    assert {*SHARES} <= {one.name for one in gguf.GGMLQuantizationType}
    assert all(block > whole > scale for whole, block, scale in SHARES.values())
