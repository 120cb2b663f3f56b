"""Frozen weights in few bits: linear layers whose matrices are packed, with scales.

    nf4, fp4    bitsandbytes' Linear4bit, a scale for 64 weights (Dettmers et al. 2023,
                https://arxiv.org/abs/2305.14314)
    as stored   StoredLinear: the bytes of a checkpoint's files (stored_layers.py)
    fp8         Fp8Linear: float8_e4m3fn, a power of two as the scale of each row; ScaledLinear multiplies in it, too

Weights are read unpacked, as every frozen base, and packed here one layer after another, so that a device has the
unpacked values of one layer at most. Ranks without values pack shapes. Packed bytes are stored as floats of the compute
type: FSDP2 shards floats only (bytes it would replicate).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from finetune.errors import UserError
from finetune.models.patches import replace_class, set_attribute
from finetune.models.stored_layers import StoredLinear, stored_weights
from finetune.recipe.schema import Quantization

META = torch.device("meta")


def is_stored_quantized(config: PretrainedConfig) -> bool:
    """Returns whether transformers unpacks or keeps packed weights of a checkpoint, by its own config."""
    return getattr(config, "quantization_config", None) is not None


def pack_linear_layers(
    model: Any,
    settings: Quantization,
    compute: torch.dtype,
    device: torch.device,
    kept_on: torch.device,
    whole: list[str] | None = None,
    layers: frozenset[int] | None = None,
) -> None:
    """Replace linear layers by packed ones, in place; those on `meta` get the shapes of packed ones.

    device: on which a layer is packed; kept_on: on which it stays. whole: names of modules left unpacked; None: the
    head, and those kept in fp32 by the model's code. layers: decoder layers that are packed; None: all.
    Raises UserError.
    """
    pack = pack_fp8 if settings.type == "fp8" else partial(_four_bit_layer, settings)
    # The attribute by which transformers' models declare such modules.
    skipped = HfQuantizer.get_modules_to_not_convert(model, whole, model._keep_in_fp32_modules)
    others = [] if layers is None else [layer for i, layer in enumerate(model.base_model.layers) if i not in layers]
    elsewhere = {module for layer in others for module in layer.modules()}
    for name, module in list(model.named_modules()):
        is_linear = (isinstance(module, Conv1D) or type(module) is nn.Linear) and module not in elsewhere
        if not is_linear or not should_convert_module(name, skipped):
            continue
        weight = module.weight.detach().T if isinstance(module, Conv1D) else module.weight.detach()
        bias = None if module.bias is None else module.bias.detach()
        packed = pack(weight if weight.is_meta else weight.to(device), bias, compute)
        packed.requires_grad_(False)
        if not weight.is_meta:
            move_states(packed.to(kept_on), kept_on)
        model.set_submodule(name, packed)
        if settings.compute == "scaled" and isinstance(packed, Fp8Linear) and multiplies_in_fp8(name, packed):
            replace_class(packed, ScaledLinear, "packed product")
    set_attribute(model, "is_loaded_in_4bit", settings.type != "fp8", "packed model")
    if settings.compute == "scaled" and not any(isinstance(module, ScaledLinear) for module in model.modules()):
        raise UserError(
            f"quantization.compute: {type(model).__name__} has no linear layers that 8-bit products take. Their sizes "
            f"must be multiples of {MULTIPLE}. Fix: use `dequantised`"
        )


def move_states(model: nn.Module, device: torch.device) -> None:
    """Move the unpacking tables of weights, and other buffers, to a device, in place; parameters are not moved."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and (state := getattr(module, "quant_state", None)) is not None:
            state.to(device)
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, buffer.to(device))


def linear_weights(model: nn.Module) -> Iterator[tuple[Tensor, int]]:
    """Yields each packed parameter, and the weights that it has."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and (isinstance(module, Fp8Linear) or hasattr(module, "quant_state")):
            yield module.weight, module.in_features * module.out_features
    yield from stored_weights(model)


def unpacked_weight(layer: Any, weight: Tensor) -> Tensor:  # (O, I)
    """Returns the values of a packed layer in the type that they are computed in. weight: its parameter, or the copy
    that a backend has gathered."""
    if isinstance(layer, StoredLinear):
        return layer.unpacked(weight)
    if isinstance(layer, Fp8Linear):
        return unpacked(weight, layer.scale, layer.in_features)
    from bitsandbytes.functional import dequantize_4bit

    state = getattr(layer, "quant_state", None) or layer.weight.quant_state
    return dequantize_4bit(weight.view(-1, 1), state)


def product(layer: Any, x: Tensor) -> Tensor:  # (..., I) -> (..., O)
    """Returns x W' of a linear layer that may be packed, without its bias."""
    if type(layer) is nn.Linear:
        return F.linear(x, layer.weight)
    compute = layer.compute_dtype or x.dtype if is_4bit(layer) else layer.weight.dtype
    return _UnpackedProduct.apply(x.to(compute), layer.weight, layer)  # pyright: ignore[reportReturnType]


class _UnpackedProduct(torch.autograd.Function):
    """Unpacks in the forward and again in the backward, as a layer's own product does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Any) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.layer = layer
        return F.linear(x, unpacked_weight(layer, weight).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return grads[0] @ unpacked_weight(ctx.layer, weight).to(grads[0].dtype), None, None


def is_4bit(layer: Any) -> bool:
    return isinstance(layer, nn.Linear) and type(layer).__name__ == "Linear4bit"


# --- 4 bits


def _four_bit_layer(settings: Quantization, weight: Tensor, bias: Tensor | None, compute: torch.dtype) -> nn.Module:
    try:
        from bitsandbytes import functional
        from bitsandbytes.nn import Linear4bit
    except ImportError:
        raise UserError(
            f"`quantization.type: {settings.type}` needs bitsandbytes. Fix: pip install 'bitsandbytes>=0.49'"
        ) from None
    if "dynamic" not in functional.name2qmap:  # or the first use creates it on its own device, which may be `meta`
        functional.name2qmap["dynamic"] = functional.create_dynamic_map()
    layer = Linear4bit(
        weight.shape[1],
        weight.shape[0],
        bias is not None,
        compute,
        compress_statistics=settings.double_quant is not False,
        quant_type=settings.type,
        quant_storage=compute,
        device="meta",
    )
    pack_4bit(layer, weight)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def pack_4bit(layer: Any, weight: Tensor) -> None:
    """Pack `weight` on its own device, for a bitsandbytes layer."""
    from bitsandbytes.nn import Params4bit

    # As its public `to`, but also on `meta`.
    layer.weight = Params4bit(weight, requires_grad=False, **vars(layer.weight))._quantize(weight.device)


def keep_weights_unpacked(model: Any) -> None:
    """Forbid bitsandbytes to repack 4-bit weights for inference on CPUs with AVX512-BF16 (bitsandbytes 0.50,
    nn/modules.py, `Linear4bit.forward`)."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            set_attribute(module, "support_avx512bf16_for_cpu", False, "no repacking")


def make_plain(model: nn.Module) -> None:
    """Replace 4-bit parameters by plain ones over the same bytes, as those with a state add it to each state dict.
    Layers keep the states themselves, and their forward gives them back."""
    for module in model.modules():
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if weight is not None and type(weight).__name__ == "Params4bit":
            module.weight = nn.Parameter(weight.detach().as_subclass(Tensor), requires_grad=False)


def state_tensors(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields (path of attributes, tensor) of a 4-bit layer's quantization state."""
    state = getattr(module, "quant_state", None) if isinstance(module, nn.Linear) else None
    for path, part in (("quant_state", state), ("quant_state.state2", getattr(state, "state2", None))):
        for name in ("absmax", "code", "offset"):
            if isinstance(value := getattr(part, name, None), Tensor):
                yield f"{path}.{name}", value


def scales_of(state: Any) -> Tensor:
    """Returns the fp32 scales of a 4-bit layer's blocks, from scales that may be quantized themselves."""
    if not state.nested:
        return state.absmax
    if state.absmax.is_meta:
        return torch.empty_like(state.absmax, dtype=torch.float32)
    from bitsandbytes.functional import dequantize_blockwise

    return (dequantize_blockwise(state.absmax, state.state2) + state.offset).float()  # as `dequantize_4bit`


# --- 8 bits

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of E4M3


def fp8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (O, I) E4M3 and (O, 1) fp32 scales: the smallest powers of two with which a row fits, so that weights are
    exact in bfloat16 and float32 on all devices."""
    largest = weight.abs().amax(1, keepdim=True).float()
    scale = torch.ldexp(torch.ones_like(largest), torch.frexp(largest / LARGEST).exponent)
    return (weight.float() / scale).to(E4M3), scale


class Fp8Linear(nn.Linear):
    """A frozen linear layer in 8 bits a weight. Unpacked in the forward and again in the backward, never kept."""

    scale: Tensor  # (O, 1) fp32

    def __init__(self, packed: Tensor, scale: Tensor, in_features: int, bias: Tensor | None):
        """packed: (ceil(O * I / size), 1) bytes as floats of the compute type, `size` bytes each."""
        super().__init__(in_features, len(scale), bias is not None, device="meta")
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.register_buffer("scale", scale, persistent=False)
        if bias is not None:
            self.bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:  # (..., I) -> (..., O) in the compute type
        return _Fp8Product.apply(x.to(self.weight.dtype), self.weight, self.scale, self.bias)  # pyright: ignore[reportReturnType]


def _values(weight: Tensor, scale: Tensor, in_features: int) -> Tensor:  # (O, I) E4M3
    return weight.view(-1).view(torch.uint8)[: len(scale) * in_features].view(E4M3).view(len(scale), in_features)


def unpacked(weight: Tensor, scale: Tensor, in_features: int) -> Tensor:
    """Returns (O, I) in the type that the bytes are stored as: exact, except for numbers too small for fp16."""
    return _values(weight, scale, in_features).to(weight.dtype) * scale.to(weight.dtype)


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, scale)
        ctx.in_features = x.shape[-1]
        return F.linear(x, unpacked(weight, scale, x.shape[-1]), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        weight, scale = ctx.saved_tensors
        return grads[0] @ unpacked(weight, scale, ctx.in_features), None, None, None


# --- products of 8 bits

MULTIPLE = 16  # of both sizes of a weight: torch._scaled_mm takes no other


def multiplies_in_fp8(name: str, layer: nn.Linear) -> bool:
    """Returns whether a linear layer may use FP8: not routers, whose choices depend on the finest of differences."""
    fits = layer.in_features % MULTIPLE == layer.out_features % MULTIPLE == 0
    return fits and not re.search(r"(^|\.)(\w*gate|\w*router)$", name)


class ScaledLinear(Fp8Linear):
    """An `Fp8Linear` whose products are of 8 bits as well, in bfloat16 on every backend:

    y  = q(x) (s w)'        W is s w: w in E4M3, s (O, 1)
    dx = q(dy s') w

    q rounds to E4M3 with a power of two as the scale of each token, so that a token's result depends neither on the
    others of its micro-batch nor on the number of processes. W's scales go to the gradient before it is rounded, as w
    is summed over its rows there: w itself is never rounded again.
    """

    def forward(self, x: Tensor) -> Tensor:  # (..., I) -> (..., O) in bfloat16
        return _ScaledProduct.apply(x.to(self.weight.dtype), self.weight, self.scale, self.bias)  # pyright: ignore[reportReturnType]


class _ScaledProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, scale)
        ctx.in_features = x.shape[-1]
        y = scaled_product(x, _values(weight, scale, x.shape[-1]).t(), scale.t())
        return y if bias is None else y + bias.to(y.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        weight, scale = ctx.saved_tensors
        values = _values(weight, scale, ctx.in_features)
        of_y = (grads[0] * scale.t()).to(grads[0].dtype)  # exact
        return scaled_product(of_y, values, scale.new_ones(1, ctx.in_features)), None, None, None


def scaled_product(x: Tensor, matrix: Tensor, scale: Tensor) -> Tensor:
    """Returns q(x) (matrix * scale) in the type of x, accumulated in fp32: (..., K) -> (..., N). matrix: (K, N) E4M3;
    scale: (1, N) fp32. On other devices than CUDA's by unpacked values: the same factors, all exact in bfloat16."""
    rows, of_rows = fp8_rows(x.reshape(-1, x.shape[-1]))  # (T, K), (T, 1)
    if x.is_cuda:
        by_column = matrix.t().contiguous().t()  # cuBLAS takes no other: a copy in the backward
        # The operator itself: another way to its kernels could round otherwise.
        y = torch._scaled_mm(rows, by_column, of_rows, scale.contiguous(), out_dtype=x.dtype)
    else:
        y = (rows.to(x.dtype) * of_rows.to(x.dtype)) @ (matrix.to(x.dtype) * scale.to(x.dtype))
    return y.view(*x.shape[:-1], y.shape[-1])


def pack_fp8(weight: Tensor, bias: Tensor | None, compute: torch.dtype) -> nn.Module:
    outputs, inputs = weight.shape
    size = -(-weight.numel() // compute.itemsize)
    if weight.is_meta:
        packed, scale = torch.empty(size, 1, dtype=compute, device=META), torch.empty(outputs, 1, device=META)
        return Fp8Linear(packed, scale, inputs, bias)
    values, scale = fp8_rows(weight)
    flat = values.view(torch.uint8).flatten()
    flat = F.pad(flat, (0, size * compute.itemsize - flat.numel()))
    return Fp8Linear(flat.view(compute)[:, None], scale, inputs, bias)
