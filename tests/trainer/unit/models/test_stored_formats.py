"""Formats of published checkpoints next to the libraries that unpack them, and rounding back into them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import stored
import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from finetune.models.stored_config import stored_format
from finetune.models.stored_formats import Fp8Blocks

ROWS, COLUMNS = 64, 96


def made(kind: str) -> tuple[Any, dict[str, Tensor], Tensor]:
    """Returns a format, the parts of a matrix as they are kept, and its values."""
    dtype = "float16" if kind in ("gptq", "awq") else "bfloat16"
    config = PretrainedConfig.from_dict({"quantization_config": stored.SETTINGS[kind], "dtype": dtype})
    form, draw = stored_format(config), torch.Generator().manual_seed(0)
    assert form is not None
    parts, values = stored.MAKE[kind](torch.randn(ROWS, COLUMNS, generator=draw) * 0.05, draw)
    kept = form.parts(ROWS, COLUMNS)
    return form, {name: parts[name].to(dtype).view(shape) for name, (dtype, shape) in kept.items()}, values


@pytest.mark.parametrize("kind", stored.MAKE)
def test_what_is_not_changed_keeps_its_values(kind: str) -> None:
    form, parts, values = made(kind)
    assert torch.equal(form.unpack(parts, ROWS, COLUMNS), values)
    packed = form.pack(values, parts, {name: one.dtype for name, one in parts.items()})
    assert packed.keys() == parts.keys()
    assert all(packed[name].dtype == one.dtype and packed[name].shape == one.shape for name, one in parts.items())
    assert torch.equal(form.unpack(packed, ROWS, COLUMNS), values)


@pytest.mark.parametrize("kind", stored.MAKE)
def test_rounding_loses_little_of_what_an_adapter_adds(kind: str) -> None:
    form, parts, values = made(kind)
    draw, kinds = torch.Generator().manual_seed(1), {name: one.dtype for name, one in parts.items()}
    inputs = torch.randn(4, COLUMNS, generator=draw)
    update = torch.randn(ROWS, 4, generator=draw) @ inputs
    update *= 0.03 * values.norm() / update.norm()
    lost = []
    for directions in (None, inputs):
        error = form.unpack(form.pack(values + update, parts, kinds, directions), ROWS, COLUMNS) - values - update
        lost.append(float((error @ inputs.t()).norm() / (update @ inputs.t()).norm()))
        assert error.norm() < 2 * update.norm()
    assert lost[0] > 0.2  # to nearest; of 4 bits over 0.7
    assert lost[1] < 0.16


@pytest.mark.parametrize("kind", stored.MAKE)
def test_a_value_beyond_the_base_gets_a_larger_scale(kind: str) -> None:
    form, parts, values = made(kind)
    larger = values.clone()
    larger[3, 5] = 3 * values.abs().max()
    packed = form.pack(larger, parts, {name: one.dtype for name, one in parts.items()})
    found = form.unpack(packed, ROWS, COLUMNS)
    assert found[3, 5] == pytest.approx(float(larger[3, 5]), rel=0.15)


# --- next to libraries


def test_fp8_is_unpacked_as_by_transformers() -> None:
    draw = torch.Generator().manual_seed(0)
    form = Fp8Blocks(None, (16, 32), powers=False)
    code = torch.randn(ROWS, COLUMNS, generator=draw).to(torch.float8_e4m3fn)
    scale = torch.rand(4, 3, generator=draw)
    theirs = Fp8Dequantize(SimpleNamespace(quantization_config=None))._dequantize_one(code, scale, torch.float32)
    assert torch.equal(form.unpack({"weight": code, "weight_scale_inv": scale}, ROWS, COLUMNS), theirs)


def test_mxfp4_is_unpacked_as_by_transformers() -> None:
    form, parts, _ = made("mxfp4")
    theirs = convert_moe_packed_tensors(parts["_blocks"][None], parts["_scales"][None], dtype=torch.float32)
    assert torch.equal(form.unpack(parts, ROWS, COLUMNS), theirs[0].t())


@pytest.mark.parametrize("kind", ["w4a16", "w4a16_zeros"])
def test_four_bits_are_unpacked_as_by_compressed_tensors(kind: str) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    form, parts, _ = made(kind)
    codes = helpers.unpack_from_int32(parts["weight_packed"], 4, torch.Size([ROWS, COLUMNS])).float()
    scale = parts["weight_scale"].float()
    groups = codes.view(*scale.shape, -1)
    if kind == "w4a16_zeros":
        zeros = helpers.unpack_from_int32(parts["weight_zero_point"], 4, scale.shape, packed_dim=0)
        groups = groups - zeros.float()[..., None]
    assert torch.equal(form.unpack(parts, ROWS, COLUMNS), (groups * scale[..., None]).view(ROWS, COLUMNS))


def test_nvfp4_is_unpacked_as_by_compressed_tensors() -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    form, parts, _ = made("nvfp4")
    codes = helpers.unpack_fp4_from_uint8(parts["weight_packed"], ROWS, COLUMNS, torch.float32)
    scale = parts["weight_scale"].float() / parts["weight_global_scale"]
    assert torch.equal(form.unpack(parts, ROWS, COLUMNS), codes * scale.repeat_interleave(16, 1))
