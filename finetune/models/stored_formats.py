"""Formats in which checkpoints are published: a weight (O, I) as codes and scales. One class for each.

    fp8                  fp8 blocks      E4M3, a scale for a block of 128 x 128 (DeepSeek-V3, Qwen3 FP8)
    mxfp4                mxfp4           E2M1 and a power of two for 32 of a row, of experts alone (gpt-oss)
    compressed-tensors   nvfp4           E2M1, an E4M3 scale for 16 of a row, and a scale of all
                         w4a16           four bits and a scale for a group of a row
    gptq                 gptq            four bits, scale and zero for a group of inputs, codes packed along inputs
    awq                  awq             the same, codes packed along outputs

`unpack` is exact in fp32 and the same on every device: plain torch operators. Libraries unpack these for one device, or
for whole models: transformers' `Fp8Dequantize` takes no blocks that are cut at an edge, as those of DeepSeek's
`kv_a_proj_with_mqa` (576 rows) are; compressed-tensors rounds NVFP4 to bfloat16; GPTQ and AWQ are read by packages that
need their own kernels. Tests compare with each where it can.

`pack` rounds merged values in the same format. A block keeps the scale of the base wherever that rounds no worse than
one of its own, so that values which training left alone keep their codes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig

from finetune.errors import UserError

if TYPE_CHECKING:
    from finetune.recipe import Recipe

E4M3 = torch.float8_e4m3fn
_LARGEST = 448.0  # of E4M3
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # OCP Microscaling Formats (MX) v1.0, section 5.3.3


class Part(NamedTuple):
    """A tensor of a stored weight, as it is kept in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]


Parts = Mapping[str, Tensor]  # by the end of a tensor's name


@dataclass(frozen=True)
class Format(ABC):
    """How a weight is stored."""

    name: ClassVar[str]
    codes: ClassVar[tuple[str, ...]]  # parts that have the codes; others are scales and zeros
    unread: ClassVar[tuple[str, ...]] = ()  # parts in files that unpacking does not need
    ignored: tuple[str, ...] | None  # modules that are not stored so; None: the head
    of_experts: ClassVar[bool] = False  # stacked experts alone, which the files have stacked as well

    @abstractmethod
    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        """Returns the tensors of a weight (rows, columns). Raises ValueError for sizes that the format has not."""

    @abstractmethod
    def unpack(self, parts: Parts, rows: int, columns: int) -> Tensor:
        """Returns the values (rows, columns) in fp32."""

    @abstractmethod
    def fit(self, values: Tensor, base: Parts, kinds: Mapping[str, torch.dtype]) -> Fitted:
        """Returns values (rows, columns), fp32, in units of their scales. base: the parts that they had; kinds: the
        types of parts in files."""

    def pack(
        self, values: Tensor, base: Parts, kinds: Mapping[str, torch.dtype], inputs: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Returns the parts of values, rounded, see `rounded`; arguments as of `fit`."""
        fitted = self.fit(values, base, kinds)
        return fitted.encode(rounded(fitted, inputs))

    def file_name(self, weight: str, part: str) -> str:
        """Returns the name in files of a part. weight: the name that the weight has in a plain checkpoint."""
        return weight.removesuffix("weight") + part


# --- rounding


class Fitted(NamedTuple):
    """Values (rows, columns) that are to be rounded. encode: returns the parts of numbers that are in the table."""

    units: Tensor  # in which a scale is 1
    scale: Tensor  # of each value
    table: Tensor  # numbers that the format has, in order
    encode: Callable[[Tensor], dict[str, Tensor]]


def nearest(units: Tensor, table: Tensor) -> Tensor:
    return table[torch.bucketize(units, (table[1:] + table[:-1]) / 2)]


def rounded(fitted: Fitted, inputs: Tensor | None) -> Tensor:  # (rows, columns)
    """Returns numbers of the table near to the values. inputs: (r, columns), directions of inputs in which the sum of
    a row's errors is to be small, as those of an adapter; None: the nearest ones.

    An update W + B A is smaller than half a step of 4 or 8 bits almost everywhere: rounded to nearest it is lost, and
    with it what training did to inputs along A. So what a column loses along A is added to the next ones, as in GPTQ
    (https://arxiv.org/abs/2210.17323) with the Hessian 1 + m A'A of orthonormal A: one pass, without data.
    """
    units, scale, table, _ = fitted
    if inputs is None:
        return nearest(units, table)
    directions = torch.linalg.qr(inputs.float().t()).Q  # (columns, r)
    weight = directions.shape[0] / directions.shape[1]  # with which both terms weigh the same
    factors = weight / (1 + weight * directions.square().sum(1))
    lost, chosen = units.new_zeros(len(units), directions.shape[1]), torch.empty_like(units)
    for i, (direction, factor) in enumerate(zip(directions, factors.tolist(), strict=True)):
        wanted = units[:, i] - torch.mv(lost, direction).mul_(factor) / scale[:, i]
        chosen[:, i] = nearest(wanted, table)
        lost.addr_((chosen[:, i] - units[:, i]) * scale[:, i], direction)
    return chosen


# --- a block of values that share a scale


def _e2m1(device: torch.device) -> Tensor:  # (256, 2) fp32
    """Returns the two values of each byte, the lower four bits first."""
    values = torch.tensor([*_E2M1, *(-one for one in _E2M1)], device=device)
    return torch.stack([values.repeat(16), values.repeat_interleave(16)], 1)


@cache
def _table(device: torch.device) -> Tensor:
    return _e2m1(device)


def _unpack_e2m1(codes: Tensor) -> Tensor:  # (..., n) uint8 -> (..., 2 n) fp32
    table = _e2m1(codes.device) if type(codes) is not Tensor else _table(codes.device)
    return table.index_select(0, codes.reshape(-1).int()).view(*codes.shape[:-1], -1)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Returns 2^(e - 127) in fp32, by its bits: exact on every device. exponent: uint8."""
    bits = exponent.int() << 23
    return torch.where(exponent == 0, 1 << 22, bits).to(torch.int32).view(torch.float32)


def _pack_e2m1(values: Tensor) -> Tensor:  # (..., 2 n) -> (..., n) uint8
    """Returns the codes of the nearest values, ties to the even code."""
    code = _nearest_e2m1(values.abs()).to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 3)
    return code[..., ::2] | (code[..., 1::2] << 4)


def _signed_e2m1(device: torch.device) -> Tensor:  # (15,)
    return torch.tensor([*(-one for one in reversed(_E2M1)), *_E2M1[1:]], device=device)


def _nearest_e2m1(sizes: Tensor) -> Tensor:
    """Returns the indices in the table of E2M1 of the values nearest to sizes >= 0."""
    table = torch.tensor(_E2M1, device=sizes.device)
    between = (table[1:] + table[:-1]) / 2
    up, down = torch.bucketize(sizes, between, right=True), torch.bucketize(sizes, between)
    return torch.where(up % 2 == 0, up, down)  # both differ at a tie alone


def _rounded_e2m1(values: Tensor) -> Tensor:
    return torch.tensor(_E2M1, device=values.device)[_nearest_e2m1(values.abs())] * values.sign()


def _rounded_least(values: Tensor, scales: list[Tensor], rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns, for groups of values (..., g), the one of the scales (..., 1) with the least square error; the first of
    equal ones. rounded: values divided by a scale, rounded."""
    best, least = scales[0], None
    for scale in scales:
        error = (rounded(values / scale) * scale - values).square_().sum(-1, keepdim=True)
        if least is None:
            least = error
        else:
            is_less = error < least
            best, least = torch.where(is_less, scale, best), torch.where(is_less, error, least)
    return best


def _fitted(
    values: Tensor,
    groups: Tensor,  # (..., g), the values
    scale: Tensor,  # (..., 1)
    table: Tensor,
    encode: Callable[[Tensor], dict[str, Tensor]],
    zero: Tensor | float = 0.0,
) -> Fitted:
    units = (groups / scale + zero).view(values.shape)
    return Fitted(units, scale.expand(groups.shape).reshape(values.shape), table, encode)


# --- E4M3 in blocks


@dataclass(frozen=True)
class Fp8Blocks(Format):
    name = "fp8 blocks"
    codes = ("weight",)
    unread = ("activation_scale",)
    block: tuple[int, int]
    powers: bool  # scales are powers of two

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        grid = (-(-rows // self.block[0]), -(-columns // self.block[1]))
        # Files have bfloat16 or fp32, which config.json does not say: as little as one scale is for a block.
        return {"weight": Part(E4M3, (rows, columns)), "weight_scale_inv": Part(torch.float32, grid)}

    def _each(self, scale: Tensor, rows: int, columns: int) -> Tensor:
        """Returns a scale for each row and value, (rows, columns), which blocks at the edges cut."""
        return scale.repeat_interleave(self.block[1], 1)[:, :columns].repeat_interleave(self.block[0], 0)[:rows]

    def unpack(self, parts: Parts, rows: int, columns: int) -> Tensor:
        values, scale = parts["weight"].float(), parts["weight_scale_inv"]
        if rows % self.block[0] == columns % self.block[1] == 0:
            blocks = values.view(scale.shape[0], self.block[0], scale.shape[1], self.block[1])
            return blocks.mul_(scale[:, None, :, None]).view(rows, columns)
        return values.mul_(self._each(scale, rows, columns))

    def fit(self, values: Tensor, base: Parts, kinds: Mapping[str, torch.dtype]) -> Fitted:
        rows, columns = values.shape
        (high, wide), scale = self.block, base["weight_scale_inv"]
        padded = values.new_zeros(scale.shape[0] * high, scale.shape[1] * wide)
        padded[:rows, :columns] = values
        largest = padded.view(scale.shape[0], high, scale.shape[1], wide).abs().amax((1, 3))
        own = largest / _LARGEST
        if self.powers:
            own = torch.exp2(torch.ceil(torch.log2(own.clamp_min(2.0**-126))))
        if (kind := kinds["weight_scale_inv"]) in (torch.bfloat16, torch.float16):
            own = (own * (1 + 2.0**-7)).to(kind).float()  # rounded, it is not below the largest value's
        # E4M3 keeps as many digits at every scale: the base's do until a value is beyond them.
        scale = torch.where(largest <= _LARGEST * scale, scale, own)
        each = self._each(scale.clamp_min(2.0**-126), rows, columns)
        table = torch.arange(256, dtype=torch.uint8, device=values.device).view(E4M3).float()
        table = table[table.isfinite()].unique()
        return Fitted(values / each, each, table, lambda n: {"weight": n.to(E4M3), "weight_scale_inv": scale})


# --- E2M1 with a power of two for 32


@dataclass(frozen=True)
class Mxfp4(Format):
    name = "mxfp4"
    codes = ("_blocks",)
    of_experts = True

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        if columns % 32:
            raise ValueError(f"rows of {columns} are no multiple of 32, which share a scale")
        grid = (rows, columns // 32)
        return {"_blocks": Part(torch.uint8, (*grid, 16)), "_scales": Part(torch.uint8, grid)}

    def file_name(self, weight: str, part: str) -> str:
        return weight + part

    def unpack(self, parts: Parts, rows: int, columns: int) -> Tensor:
        values = _unpack_e2m1(parts["_blocks"])  # (rows, n, 32)
        return values.mul_(_power_of_two(parts["_scales"])[..., None]).view(rows, columns)

    def fit(self, values: Tensor, base: Parts, kinds: Mapping[str, torch.dtype]) -> Fitted:
        exponent = base["_scales"]
        groups = values.view(*exponent.shape, 32)
        # That of the largest value, by the standard, and one that leaves it whole.
        own = torch.frexp(groups.abs().amax(-1)).exponent - 3 + 127
        near = [exponent.int(), exponent.int() + 1, exponent.int() - 1, own, own + 1]
        near = [one.clamp(0, 254).to(torch.uint8)[..., None] for one in near]
        scale = _rounded_least(groups, [_power_of_two(one) for one in near], _rounded_e2m1)
        scales = (scale[..., 0].log2().round() + 127).to(torch.uint8)

        def encode(numbers: Tensor) -> dict[str, Tensor]:
            return {"_blocks": _pack_e2m1(numbers.view(groups.shape)), "_scales": scales}

        return _fitted(values, groups, scale, _signed_e2m1(values.device), encode)


# --- compressed-tensors


@dataclass(frozen=True)
class Nvfp4(Format):
    name = "nvfp4"
    codes = ("weight_packed",)
    unread = ("input_global_scale", "input_scale")

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        if columns % 16:
            raise ValueError(f"rows of {columns} are no multiple of 16, which share a scale")
        return {
            "weight_packed": Part(torch.uint8, (rows, columns // 2)),
            "weight_scale": Part(E4M3, (rows, columns // 16)),
            "weight_global_scale": Part(torch.float32, (1,)),
        }

    def _scale(self, parts: Parts) -> Tensor:  # (rows, n, 1)
        return (parts["weight_scale"].float() / parts["weight_global_scale"])[..., None]

    def unpack(self, parts: Parts, rows: int, columns: int) -> Tensor:
        values = _unpack_e2m1(parts["weight_packed"]).view(rows, -1, 16)
        return values.mul_(self._scale(parts)).view(rows, columns)

    def fit(self, values: Tensor, base: Parts, kinds: Mapping[str, torch.dtype]) -> Fitted:
        groups, of_all = values.view(len(values), -1, 16), base["weight_global_scale"]
        own = (groups.abs().amax(-1, keepdim=True) / 6 * of_all).clamp(2.0**-9, _LARGEST).to(E4M3).float()
        first = base["weight_scale"].float().clamp_min(2.0**-9)[..., None]
        scale = _rounded_least(groups, [first / of_all, own / of_all], _rounded_e2m1)
        code = (scale * of_all).to(E4M3)[..., 0]
        scales = {"weight_scale": code, "weight_global_scale": of_all}
        scale = (code.float() / of_all)[..., None]
        table = _signed_e2m1(values.device)
        return _fitted(values, groups, scale, table, lambda n: {"weight_packed": _pack_e2m1(n), **scales})


def _bits(code: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:  # (..., n) int32 -> (..., 8 n) fp32
    """Returns the fours of bits of each number. order: the place in the number of each of the eight values."""
    shifts = torch.tensor([4 * place for place in order], dtype=torch.int32, device=code.device)
    return ((code[..., None] >> shifts) & 15).flatten(-2).float()


def _from_bits(values: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:  # (..., 8 n) -> (..., n) int32
    eights, code = values.to(torch.int32).unflatten(-1, (-1, 8)), 0
    for i, place in enumerate(order):
        code = code | (eights[..., i] << (4 * place))
    return code  # pyright: ignore[reportReturnType]


def _above_zero(scale: Tensor) -> Tensor:  # fp32
    """Returns scales to divide by: of a group of zeros a file may have 0."""
    return scale.float().clamp_min(torch.finfo(scale.dtype).tiny)


def _grown(groups: Tensor, scale: Tensor, zero: Tensor | float) -> Tensor:
    """Returns the scales with which all values of groups (..., g) are within four bits: the given ones, or larger."""
    codes = groups / scale
    above, below = codes.amax(-1, keepdim=True), codes.amin(-1, keepdim=True)
    room = 15 - zero + 0.5, zero + 0.5
    needed = torch.maximum(above / room[0], -below / room[1])
    return scale * needed.clamp_min(1)


def _rounded_bits(zero: Tensor | float) -> Callable[[Tensor], Tensor]:
    return lambda codes: (codes + zero).round().clamp(0, 15) - zero


@dataclass(frozen=True)
class PackedInt(Format):
    name = "w4a16"
    codes = ("weight_packed",)
    unread = ("weight_shape",)
    group: int | None  # inputs that share a scale; None: all of a row
    zeros: bool
    scales: torch.dtype

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        group = self.group or columns
        if columns % 8 or columns % group or (self.zeros and rows % 8):
            raise ValueError(f"({rows}, {columns}) is no multiple of a group of {group}, or of 8")
        parts = {
            "weight_packed": Part(torch.int32, (rows, columns // 8)),
            "weight_scale": Part(self.scales, (rows, columns // group)),
        }
        if self.zeros:
            parts["weight_zero_point"] = Part(torch.int32, (rows // 8, columns // group))
        return parts

    def _zero(self, parts: Parts) -> Tensor | float:  # (rows, n, 1)
        # Signed numbers are stored with 8 added, and so are their zeros.
        return _bits(parts["weight_zero_point"].t()).t()[..., None] if self.zeros else 8.0

    def unpack(self, parts: Parts, rows: int, columns: int) -> Tensor:
        codes, scale = _bits(parts["weight_packed"]), parts["weight_scale"].float()
        groups = codes.view(*scale.shape, -1).sub_(self._zero(parts))
        return groups.mul_(scale[..., None]).view(rows, columns)

    def fit(self, values: Tensor, base: Parts, kinds: Mapping[str, torch.dtype]) -> Fitted:
        groups, zero = values.view(*base["weight_scale"].shape, -1), self._zero(base)
        first = _above_zero(base["weight_scale"])[..., None]
        near = [first, _grown(groups, first, zero).to(self.scales).float()]
        scale = _rounded_least(groups, near, _rounded_bits(zero))
        scales = {**base, "weight_scale": scale[..., 0].to(self.scales)}
        table = torch.arange(16.0, device=values.device)
        return _fitted(values, groups, scale, table, lambda n: {**scales, "weight_packed": _from_bits(n)}, zero)


# --- GPTQ, AWQ: matrices are (in, out) there


@dataclass(frozen=True)
class Gptq(Format):
    name = "gptq"
    codes = ("qweight",)
    group: int | None
    scales: torch.dtype
    plus: int  # that is added to stored zeros

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        group = self.group or columns
        if rows % 8 or columns % 8:
            raise ValueError(f"({rows}, {columns}) is no multiple of 8")
        groups = -(-columns // group)
        return {
            "qweight": Part(torch.int32, (columns // 8, rows)),
            "qzeros": Part(torch.int32, (groups, rows // 8)),
            "scales": Part(self.scales, (groups, rows)),
            "g_idx": Part(torch.int32, (columns,)),
        }

    def unpack(self, parts: Parts, rows: int, columns: int) -> Tensor:
        codes = _bits(parts["qweight"].t())  # (out, in)
        zeros, group = (_bits(parts["qzeros"]) + self.plus).t(), parts["g_idx"].int()  # (out, groups), (in,)
        codes.sub_(zeros.index_select(1, group))
        return codes.mul_(parts["scales"].float().t().index_select(1, group))

    def fit(self, values: Tensor, base: Parts, kinds: Mapping[str, torch.dtype]) -> Fitted:
        zeros, group = (_bits(base["qzeros"]) + self.plus).t(), base["g_idx"].long()
        scale = _above_zero(base["scales"]).t().clone()
        for i in range(scale.shape[1]):  # with act-order, the inputs of a group are not neighbours
            chosen, zero, first = values[:, group == i], zeros[:, i : i + 1], scale[:, i : i + 1].clone()
            near = [first, _grown(chosen, first, zero).to(self.scales).float()]
            scale[:, i : i + 1] = _rounded_least(chosen, near, _rounded_bits(zero))
        each, scales = scale[:, group], scale.t().contiguous().to(self.scales)

        def encode(numbers: Tensor) -> dict[str, Tensor]:
            return {**base, "qweight": _from_bits(numbers).t().contiguous(), "scales": scales}

        return Fitted(values / each + zeros[:, group], each, torch.arange(16.0, device=values.device), encode)


_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # of the eight outputs in a number (AutoAWQ, `gemm`)


@dataclass(frozen=True)
class Awq(Format):
    name = "awq"
    codes = ("qweight",)
    group: int | None
    scales: torch.dtype

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        group = self.group or columns
        if rows % 8 or columns % group:
            raise ValueError(f"({rows}, {columns}) is no multiple of 8, or of a group of {group}")
        return {
            "qweight": Part(torch.int32, (columns, rows // 8)),
            "qzeros": Part(torch.int32, (columns // group, rows // 8)),
            "scales": Part(self.scales, (columns // group, rows)),
        }

    def unpack(self, parts: Parts, rows: int, columns: int) -> Tensor:
        scale, zero = parts["scales"].float(), _bits(parts["qzeros"], _AWQ_ORDER)  # (groups, out)
        groups = _bits(parts["qweight"], _AWQ_ORDER).view(len(scale), -1, rows)
        return groups.sub_(zero[:, None]).mul_(scale[:, None]).view(columns, rows).t()

    def fit(self, values: Tensor, base: Parts, kinds: Mapping[str, torch.dtype]) -> Fitted:
        groups = values.view(len(values), len(base["scales"]), -1)  # (out, groups, g)
        zero = _bits(base["qzeros"], _AWQ_ORDER).t()[..., None]
        first = _above_zero(base["scales"]).t()[..., None]
        near = [first, _grown(groups, first, zero).to(self.scales).float()]
        scale = _rounded_least(groups, near, _rounded_bits(zero))
        scales = {**base, "scales": scale[..., 0].t().contiguous().to(self.scales)}
        table = torch.arange(16.0, device=values.device)

        def encode(numbers: Tensor) -> dict[str, Tensor]:
            return {**scales, "qweight": _from_bits(numbers.t().contiguous(), _AWQ_ORDER)}

        return _fitted(values, groups, scale, table, encode, zero)


# --- the format that a config names


def stored_settings(config: PretrainedConfig) -> dict[str, Any] | None:
    """Returns `quantization_config` of a checkpoint; None for a plain one."""
    settings: Any = getattr(config, "quantization_config", None)
    return settings if settings is None or isinstance(settings, dict) else settings.to_dict()


def stored_format(config: PretrainedConfig, name: str | None = None) -> Format | None:
    """Returns the format of a checkpoint; None for a plain one, and for bitsandbytes', which transformers reads. name:
    of the model, for errors. Raises UserError for a format that is not read here."""
    settings = stored_settings(config)
    if settings is None or (method := str(settings.get("quant_method", ""))) == "bitsandbytes":
        return None
    if (build := FORMATS.get(method)) is None:
        others = ", ".join(FORMATS)
        raise _refused(name, method, f"nothing here unpacks it on GPUs and CPUs alike (but {others})")
    ignored = settings.get("modules_to_not_convert", settings.get("ignored_layers"))
    scales = getattr(config, "dtype", None) or torch.bfloat16
    return build(settings, None if ignored is None else tuple(ignored), scales, name)


def _refused(name: str | None, what: str, why: str) -> UserError:
    place = "model.name" if name is None else f"model.name: {name!r}"
    return UserError(f"{place} is stored as {what}, which is not read. {why}. Fix: name a copy in bfloat16")


def _fp8(settings: dict[str, Any], ignored: tuple[str, ...] | None, _scales: torch.dtype, name: str | None) -> Format:
    block = settings.get("weight_block_size")
    if block is None:
        raise _refused(name, "fp8 without blocks", "Its config has no `weight_block_size`")
    if settings.get("expert_dtype", "fp8") != "fp8" or settings.get("modules_to_convert"):
        raise _refused(name, "fp8 with other parts in fp4", "Experts or tables are in another format")
    return Fp8Blocks(ignored, (int(block[0]), int(block[1])), settings.get("scale_fmt") == "ue8m0")


def _mxfp4(_settings: Any, ignored: tuple[str, ...] | None, _scales: torch.dtype, _name: str | None) -> Format:
    return Mxfp4(ignored)


def _compressed(settings: dict[str, Any], _i: Any, scales: torch.dtype, name: str | None) -> Format:
    groups = [*(settings.get("config_groups") or {}).values()]
    layout = settings.get("format")
    if len(groups) != 1 or groups[0].get("targets") != ["Linear"]:
        raise _refused(name, "compressed-tensors in several groups", "One format for all linear layers is read here")
    weights, ignored = groups[0].get("weights") or {}, tuple(settings.get("ignore") or ())
    layout = groups[0].get("format") or layout
    if settings.get("transform_config") or weights.get("actorder") in ("group", "activation"):
        raise _refused(name, "compressed-tensors", "Its layers are transformed, or reordered by activations")
    if layout == "nvfp4-pack-quantized" and weights.get("group_size") == 16:
        return Nvfp4(ignored)
    group = weights.get("group_size")
    if layout == "pack-quantized" and weights.get("num_bits") == 4 and weights.get("type") == "int":
        if weights.get("strategy") not in ("group", "channel"):
            raise _refused(name, f"four bits by {weights.get('strategy')}", "Groups and channels are read here")
        return PackedInt(ignored, group if group and group > 0 else None, not weights.get("symmetric", True), scales)
    bits = f"{weights.get('num_bits')} bits, {weights.get('type')}"
    raise _refused(name, f"compressed-tensors, {layout} ({bits})", "NVFP4 and four bits (W4A16) are read here")


def _gptq(settings: dict[str, Any], ignored: tuple[str, ...] | None, scales: torch.dtype, name: str | None) -> Format:
    if settings.get("bits") != 4:
        raise _refused(name, f"gptq of {settings.get('bits')} bits", "Four bits are read here")
    if settings.get("dynamic"):
        raise _refused(name, "gptq with rules by layer (`dynamic`)", "One rule for all layers is read here")
    plus = {"gptq": 1, "gptq_v2": 0}.get(kind := str(settings.get("checkpoint_format", "gptq")))
    if plus is None:
        raise _refused(name, f"gptq, checkpoint_format {kind}", "gptq and gptq_v2 are read here")
    group = settings.get("group_size") or -1
    return Gptq(ignored, group if group > 0 else None, scales, plus)


def _awq(settings: dict[str, Any], ignored: tuple[str, ...] | None, scales: torch.dtype, name: str | None) -> Format:
    bits, version = settings.get("bits", 4), str(settings.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise _refused(name, f"awq of {bits} bits, version {version}", "Four bits and version gemm are read here")
    group = settings.get("group_size") or -1
    return Awq(ignored, group if group > 0 else None, scales)


FORMATS: dict[str, Callable[[dict[str, Any], Any, torch.dtype, str | None], Format]] = {  # by `quant_method`
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
}


def stored_notes(recipe: Recipe, config: PretrainedConfig) -> list[str]:
    """Returns what becomes of a base that is stored in fewer bits, for the user; [] of a plain one."""
    if (form := stored_format(config)) is None:
        return []
    if recipe.model.stored == "unpack":
        return [f"the base is unpacked as it is read, from {form.name} (`model.stored`)"]
    return [f"the base stays in {form.name}, as it is stored, and is unpacked for each product"]


def check_stored(recipe: Recipe, config: PretrainedConfig) -> None:
    """Raises UserError for a base in a format that is not read, or that the recipe cannot train as it is stored."""
    if (form := stored_format(config, recipe.model.name)) is None or recipe.model.stored == "unpack":
        return
    name = recipe.model.name
    if recipe.mode != "lora":
        kept = "trains all weights" if recipe.mode == "full" else "would pack them again"
        raise UserError(
            f"mode: {recipe.mode}: {name!r} is stored as {form.name}, for frozen weights. The mode {kept}. Fix: use "
            "`mode: lora`, which computes with their exact values, or `model.stored: unpack`"
        )
    assert recipe.lora is not None
    if recipe.lora.dora:
        raise UserError(
            f"lora.dora: peft cannot unpack {name!r}, which is stored as {form.name}. It divides by the norms of the "
            "base's rows. Fix: set it to false, or `model.stored: unpack`"
        )
    experts = getattr(config.get_text_config(), "num_local_experts", 0) or getattr(config, "num_experts", 0)
    if recipe.train.compile and (form.of_experts or experts):
        raise UserError(
            f"train.compile: the experts of {name!r} are unpacked one by one, by how many tokens chose each. They are "
            f"stored as {form.name}. Fix: set it to false, or `model.stored: unpack`"
        )
