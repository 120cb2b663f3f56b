"""The precision that this machine computes, by the time of a product."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from finetune.engine.product_speed import TimesSlower, emulation_note, native_precision, times_slower
from finetune.recipe.schema import Quantization, Train

CPU = torch.device("cpu")
SCALED = Quantization(type="fp8", compute="scaled")


def slower_by(times: float) -> TimesSlower:
    """A device on which products of 16 bits take so many times as long, whatever this machine has."""
    return lambda dtype, _: 1.0 if dtype == torch.float32 else times


@pytest.mark.parametrize(
    ("precision", "quantization", "said"),
    [
        ("bf16", None, "bf16 is emulated here: 7.6 times slower than fp32. Measured by one product. Fix: "),
        ("bf16_true", None, "bf16 is emulated here"),
        ("fp8", None, "bf16 is emulated here"),
        ("fp16", None, "fp16 is emulated here"),
        ("bf16", SCALED, "Fix: train.precision=fp32 and quantization.compute=dequantised"),
        ("fp32", None, None),
    ],
)
def test_an_emulated_precision_is_told(precision: Any, quantization: Quantization | None, said: str | None) -> None:
    train = Train(epochs=1, precision=precision)
    assert emulation_note(train, quantization, CPU, slower_by(0.5)) is None
    note = emulation_note(train, quantization, CPU, slower_by(7.6))
    assert note is None if said is None else said in str(note)


@pytest.mark.parametrize(
    ("device", "has_bf16", "times", "name", "reason"),
    [
        ("cpu", False, 7.6, "fp32", "bf16 is emulated here, 7.6 times slower; use bf16 on a GPU that has it"),
        ("cpu", False, 0.5, "bf16", "this machine computes it, by the time of a product"),
        ("mps", False, 7.6, "fp32", "bf16 is emulated here, 7.6 times slower"),
        ("cuda", True, 0.1, "bf16", "this GPU computes it"),
        ("cuda", False, 0.2, "fp16", "this GPU has no bf16"),
        ("cuda", False, 9.0, "fp32", "this GPU has no bf16"),
    ],
)
def test_a_new_recipe_has_what_is_computed(
    monkeypatch: pytest.MonkeyPatch, device: str, has_bf16: bool, times: float, name: str, reason: str
) -> None:
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or has_bf16
    )
    found = native_precision(torch.device(device), slower_by(times))
    assert (found.name, found.reason[: len(reason)]) == (name, reason)


def test_a_product_of_fp32_takes_its_own_time_and_draws_nothing() -> None:
    """The measurement leaves the random numbers of a run alone."""
    state = torch.get_rng_state()
    assert times_slower(torch.float32, CPU) == 1.0
    assert times_slower(torch.bfloat16, CPU) > 0
    assert torch.equal(torch.get_rng_state(), state)
