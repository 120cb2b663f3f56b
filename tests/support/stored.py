"""Tiny checkpoints in the formats in which models are published, and the plain ones that they stand for.

Codes and scales are drawn here, and their values computed one by one, by the formats' definitions: no code of the
project, nor a library's, has a part in what is expected.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

BLOCK = (32, 48)  # of fp8, which does not divide all sizes
GROUP = 32
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that each four bits of a number have, the lowest first
Made = tuple[dict[str, Tensor], Tensor]  # parts by the end of their name, and the values (out, in) in fp32


def fp8(weight: Tensor, draw: torch.Generator) -> Made:
    scale = torch.empty(-(-weight.shape[0] // BLOCK[0]), -(-weight.shape[1] // BLOCK[1]))
    code = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    values = torch.empty(weight.shape)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            own = slice(i * BLOCK[0], (i + 1) * BLOCK[0]), slice(j * BLOCK[1], (j + 1) * BLOCK[1])
            scale[i, j] = weight[own].abs().max() / 448 * (1 + torch.rand((), generator=draw))
            code[own] = (weight[own] / scale[i, j]).to(torch.float8_e4m3fn)
            values[own] = code[own].float() * scale[i, j]
    return {"weight": code, "weight_scale_inv": scale}, values


def _four_bits(shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
    return torch.randint(0, 16, shape, generator=draw)


def _bytes(codes: Tensor) -> Tensor:
    return (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)


def _numbers(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:  # along the last dimension
    eights = codes.unflatten(-1, (-1, 8))[..., list(order)]
    return (eights << (4 * torch.arange(8))).sum(-1).to(torch.int32)


def mxfp4(weight: Tensor, draw: torch.Generator) -> Made:
    out, columns = weight.shape
    codes = _four_bits((out, columns // 32, 32), draw)
    exponent = torch.randint(121, 124, (out, columns // 32), generator=draw)
    values = E2M1[codes] * torch.exp2(exponent.float() - 127)[..., None]
    return {"_blocks": _bytes(codes), "_scales": exponent.to(torch.uint8)}, values.flatten(1)


def nvfp4(weight: Tensor, draw: torch.Generator) -> Made:
    out, columns = weight.shape
    codes, of_all = _four_bits((out, columns // 16, 16), draw), torch.tensor([2048.0 * 1.1])
    scale = (torch.rand(out, columns // 16, generator=draw) * 60 + 20).to(torch.float8_e4m3fn)
    values = E2M1[codes] * (scale.float() / of_all)[..., None]
    parts = {"weight_packed": _bytes(codes.flatten(1)), "weight_scale": scale, "weight_global_scale": of_all}
    return {**parts, "input_global_scale": torch.tensor([3.0])}, values.flatten(1)


def w4a16(weight: Tensor, draw: torch.Generator, zeros: bool = False) -> Made:
    out, columns = weight.shape
    codes = _four_bits((out, columns // GROUP, GROUP), draw)
    scale = (torch.rand(out, columns // GROUP, generator=draw) * 0.02 + 0.01).to(torch.bfloat16)
    zero = torch.randint(5, 11, scale.shape, generator=draw) if zeros else torch.full(scale.shape, 8)
    values = (codes - zero[..., None]) * scale.float()[..., None]
    parts = {"weight_packed": _numbers(codes.flatten(1)), "weight_scale": scale}
    parts["weight_shape"] = torch.tensor(weight.shape)
    if zeros:
        parts["weight_zero_point"] = _numbers(zero.t()).t().contiguous()
    return parts, values.flatten(1)


def gptq(weight: Tensor, draw: torch.Generator) -> Made:
    out, columns = weight.shape
    group = torch.arange(columns)[torch.randperm(columns, generator=draw)] // GROUP  # by activation order
    codes = _four_bits((out, columns), draw)
    scale = (torch.rand(columns // GROUP, out, generator=draw) * 0.02 + 0.01).to(torch.float16)
    zero = torch.randint(5, 11, scale.shape, generator=draw)
    values = torch.stack([(codes[:, i] - zero[g] - 1) * scale[g].float() for i, g in enumerate(group.tolist())], 1)
    parts = {"qweight": _numbers(codes).t().contiguous(), "qzeros": _numbers(zero), "scales": scale}
    return {**parts, "g_idx": group.to(torch.int32)}, values


def awq(weight: Tensor, draw: torch.Generator) -> Made:
    out, columns = weight.shape
    codes = _four_bits((columns, out), draw)
    scale = (torch.rand(columns // GROUP, out, generator=draw) * 0.02 + 0.01).to(torch.float16)
    zero = torch.randint(5, 11, scale.shape, generator=draw)
    values = torch.stack([(codes[i] - zero[i // GROUP]) * scale[i // GROUP].float() for i in range(columns)], 1)
    return {"qweight": _numbers(codes, AWQ_ORDER), "qzeros": _numbers(zero, AWQ_ORDER), "scales": scale}, values


def _compressed(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "symmetric": True, **weights}}
    settings = {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}
    return {**settings, "ignore": ["lm_head", "re:.*mlp.gate$"]}


SETTINGS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"}
    | {"modules_to_not_convert": ["lm_head", "shared_expert_gate"]},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
    "nvfp4": _compressed("nvfp4-pack-quantized", type="float", group_size=16, strategy="tensor_group"),
    "w4a16": _compressed("pack-quantized", type="int", group_size=GROUP, strategy="group"),
    "w4a16_zeros": _compressed("pack-quantized", type="int", group_size=GROUP, strategy="group", symmetric=False),
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
}
MAKE: dict[str, Callable[[Tensor, torch.Generator], Made]] = {
    "fp8": fp8,
    "mxfp4": mxfp4,
    "nvfp4": nvfp4,
    "w4a16": w4a16,
    "w4a16_zeros": lambda weight, draw: w4a16(weight, draw, zeros=True),
    "gptq": gptq,
    "awq": awq,
}
KEPT = ("lm_head.weight", "embed_tokens.weight", ".gate.weight", "router.weight", "shared_expert_gate.weight")
KEPT += ("eh_proj.weight", "mtp.fc.weight", "shared_head.head.weight")  # of heads that predict ahead


def store(plain: Path, folder: Path, kind: str) -> tuple[Path, Path]:
    """Writes a checkpoint in a format, and its values as a plain one in fp32; returns both folders. plain: a model
    folder, which says names and sizes."""
    stored, unpacked = folder / f"{kind}-stored", folder / f"{kind}-unpacked"
    state, draw = load_file(plain / "model.safetensors"), torch.Generator().manual_seed(0)
    parts, values = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in state.items():
        if kind == "mxfp4" and tensor.ndim == 3:  # (experts, in, out)
            made = [mxfp4(one.t(), draw) for one in tensor]
            parts |= {name + end: torch.stack([one[end] for one, _ in made]) for end in made[0][0]}
            values[name] = torch.stack([one for _, one in made]).mT.contiguous()
        elif kind != "mxfp4" and tensor.ndim == 2 and not name.endswith(KEPT):
            made_parts, values[name] = MAKE[kind](tensor.float(), draw)
            parts |= {name.removesuffix("weight") + end: one.contiguous() for end, one in made_parts.items()}
        else:
            parts[name] = values[name] = tensor.float()
    for path, tensors in ((stored, parts), (unpacked, values)):
        shutil.copytree(plain, path)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((stored / "config.json").read_text())
    # Scales of 16 bits are of the type that config.json says.
    config |= {"quantization_config": SETTINGS[kind], "dtype": "float16" if kind in ("gptq", "awq") else "bfloat16"}
    (stored / "config.json").write_text(json.dumps(config))
    return stored, unpacked
