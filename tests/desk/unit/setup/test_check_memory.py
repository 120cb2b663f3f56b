"""What `check` says of memory and of the device it runs on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.desk.setup.check import check_recipe

SHORT = ("train.max_steps=60", "schedule.warmup_steps=6", "train.precision=bf16", "data.max_length=64", "batch.rows=4")


def test_check_prints_the_estimate_for_its_config(recipe: dict[str, Any], write_recipe: Any) -> None:
    report = check_recipe(write_recipe(recipe), SHORT, Path("accelerate_configs/fsdp2.yaml"), 2)
    assert report.error is None
    assert "of tensors on a GPU, in " in report.facts["memory"]


SCALED = ("mode=qlora", "lora={rank: 4, alpha: 8}", "quantization={type: fp8, compute: scaled}")


@pytest.mark.parametrize(("words", "other"), [(("train.precision=fp8",), "bf16"), (SCALED, "dequantised")])
def test_products_of_8_bits_are_refused_where_the_device_has_none(
    recipe: dict[str, Any], write_recipe: Any, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], other: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA L4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    error = (check_recipe(write_recipe(recipe), (*SHORT, *words)).error or "").replace("\n", " ")
    assert re.search(f"NVIDIA L4 has no products of 8 bits with a scale for each row.*: use {other}", error)
