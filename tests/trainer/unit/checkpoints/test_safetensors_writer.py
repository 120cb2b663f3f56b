"""The writer of safetensors files next to the library's."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from finetune.checkpoints.safetensors_writer import DTYPES, save_tensors, write_safetensors


def test_a_file_is_the_library_s_byte_for_byte(tmp_path: Path) -> None:
    tensors = {f"{'zab'[i % 3]}.{name}": torch.arange(6).to(dtype).view(2, 3) for i, (name, dtype) in
               enumerate(DTYPES.items())}  # fmt: skip
    tensors |= {"é": torch.ones(3), "empty": torch.empty(0, 4), "one": torch.tensor(3.0, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    save_tensors(tmp_path / "ours", tensors)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_values_are_made_one_at_a_time_in_the_order_given(tmp_path: Path) -> None:
    values = {"b": torch.arange(6.0).view(3, 2).T, "a": torch.ones(2, requires_grad=True)}
    order, digest = list[str](), hashlib.sha256()
    size = write_safetensors(
        tmp_path / "file",
        {name: tensor.to("meta") for name, tensor in values.items()},
        lambda name: order.append(name) or values[name],
        {"step": "3"},
        digest.update,
    )
    content = (tmp_path / "file").read_bytes()
    assert order == ["b", "a"]
    assert (size, digest.digest()) == (len(content), hashlib.sha256(content).digest())
    loaded = load_file(tmp_path / "file")
    assert all(torch.equal(loaded[name], values[name]) for name in values)
