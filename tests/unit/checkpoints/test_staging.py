"""Copies that a checkpoint is written from: right, apart from the tensors, in memory that is used again."""

from __future__ import annotations

import torch
from torch import Tensor

from finetune.checkpoints.saver import Staging


def flat_tensors(scale: float) -> dict[str, Tensor]:
    """Of sizes that end between two aligned places."""
    return {
        "weight|0|a": torch.arange(13, dtype=torch.bfloat16) * scale,
        "exp_avg|0|a": torch.arange(13, dtype=torch.float32) * scale,
        "state|0|b": (torch.arange(7) * scale).to(torch.uint8),
        "weight|4|c": torch.arange(40, dtype=torch.float64)[4:21] * scale,
    }


def test_copies_are_equal_and_stay_while_steps_go_on() -> None:
    tensors = flat_tensors(1.0)
    copies = Staging().copies(tensors)
    for tensor in tensors.values():
        tensor.zero_()
    torch.testing.assert_close(copies, flat_tensors(1.0), rtol=0, atol=0)
    assert list(copies) == list(tensors)


def test_the_next_save_uses_the_same_memory() -> None:
    staging = Staging()
    first = {name: copy.data_ptr() for name, copy in staging.copies(flat_tensors(1.0)).items()}
    second = staging.copies(flat_tensors(2.0))
    assert {name: copy.data_ptr() for name, copy in second.items()} == first
    torch.testing.assert_close(second, flat_tensors(2.0), rtol=0, atol=0)


def test_more_to_write_finds_room() -> None:
    staging = Staging()
    staging.copies({"weight|0|a": torch.ones(3)})
    torch.testing.assert_close(staging.copies(flat_tensors(3.0)), flat_tensors(3.0), rtol=0, atol=0)


def test_released_memory_is_made_anew() -> None:
    staging = Staging()
    staging.copies(flat_tensors(1.0))
    staging.release()
    torch.testing.assert_close(staging.copies(flat_tensors(4.0)), flat_tensors(4.0), rtol=0, atol=0)


def test_nothing_to_write() -> None:
    assert Staging().copies({}) == {}
