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
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from finetune.models.stored_rounding import Fitted, rounded

E4M3 = torch.float8_e4m3fn
_LARGEST = 448.0  # of E4M3
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # OCP Microscaling Formats (MX) v1.0, section 5.3.3


class StoredPart(NamedTuple):
    """A tensor of a stored weight, as it is kept in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]


Parts = Mapping[str, Tensor]  # by the end of a tensor's name


@dataclass(frozen=True)
class StoredFormat(ABC):
    """How a weight is stored."""

    name: ClassVar[str]
    codes: ClassVar[tuple[str, ...]]  # parts that have the codes; others are scales and zeros
    unread: ClassVar[tuple[str, ...]] = ()  # parts in files that unpacking does not need
    ignored: tuple[str, ...] | None  # modules that are not stored so; None: the head
    of_experts: ClassVar[bool] = False  # stacked experts alone, which the files have stacked as well

    @abstractmethod
    def parts(self, rows: int, columns: int) -> dict[str, StoredPart]:
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
class Fp8Blocks(StoredFormat):
    name = "fp8 blocks"
    codes = ("weight",)
    unread = ("activation_scale",)
    block: tuple[int, int]
    powers: bool  # scales are powers of two

    def parts(self, rows: int, columns: int) -> dict[str, StoredPart]:
        grid = (-(-rows // self.block[0]), -(-columns // self.block[1]))
        # Files have bfloat16 or fp32, which config.json does not say: as little as one scale is for a block.
        return {"weight": StoredPart(E4M3, (rows, columns)), "weight_scale_inv": StoredPart(torch.float32, grid)}

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
class Mxfp4(StoredFormat):
    name = "mxfp4"
    codes = ("_blocks",)
    of_experts = True

    def parts(self, rows: int, columns: int) -> dict[str, StoredPart]:
        if columns % 32:
            raise ValueError(f"rows of {columns} are no multiple of 32, which share a scale")
        grid = (rows, columns // 32)
        return {"_blocks": StoredPart(torch.uint8, (*grid, 16)), "_scales": StoredPart(torch.uint8, grid)}

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
class Nvfp4(StoredFormat):
    name = "nvfp4"
    codes = ("weight_packed",)
    unread = ("input_global_scale", "input_scale")

    def parts(self, rows: int, columns: int) -> dict[str, StoredPart]:
        if columns % 16:
            raise ValueError(f"rows of {columns} are no multiple of 16, which share a scale")
        return {
            "weight_packed": StoredPart(torch.uint8, (rows, columns // 2)),
            "weight_scale": StoredPart(E4M3, (rows, columns // 16)),
            "weight_global_scale": StoredPart(torch.float32, (1,)),
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
class PackedInt(StoredFormat):
    name = "w4a16"
    codes = ("weight_packed",)
    unread = ("weight_shape",)
    group: int | None  # inputs that share a scale; None: all of a row
    zeros: bool
    scales: torch.dtype

    def parts(self, rows: int, columns: int) -> dict[str, StoredPart]:
        group = self.group or columns
        if columns % 8 or columns % group or (self.zeros and rows % 8):
            raise ValueError(f"({rows}, {columns}) is no multiple of a group of {group}, or of 8")
        parts = {
            "weight_packed": StoredPart(torch.int32, (rows, columns // 8)),
            "weight_scale": StoredPart(self.scales, (rows, columns // group)),
        }
        if self.zeros:
            parts["weight_zero_point"] = StoredPart(torch.int32, (rows // 8, columns // group))
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
class Gptq(StoredFormat):
    name = "gptq"
    codes = ("qweight",)
    group: int | None
    scales: torch.dtype
    plus: int  # that is added to stored zeros

    def parts(self, rows: int, columns: int) -> dict[str, StoredPart]:
        group = self.group or columns
        if rows % 8 or columns % 8:
            raise ValueError(f"({rows}, {columns}) is no multiple of 8")
        groups = -(-columns // group)
        return {
            "qweight": StoredPart(torch.int32, (columns // 8, rows)),
            "qzeros": StoredPart(torch.int32, (groups, rows // 8)),
            "scales": StoredPart(self.scales, (groups, rows)),
            "g_idx": StoredPart(torch.int32, (columns,)),
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
class Awq(StoredFormat):
    name = "awq"
    codes = ("qweight",)
    group: int | None
    scales: torch.dtype

    def parts(self, rows: int, columns: int) -> dict[str, StoredPart]:
        group = self.group or columns
        if rows % 8 or columns % group:
            raise ValueError(f"({rows}, {columns}) is no multiple of 8, or of a group of {group}")
        return {
            "qweight": StoredPart(torch.int32, (columns, rows // 8)),
            "qzeros": StoredPart(torch.int32, (columns // group, rows // 8)),
            "scales": StoredPart(self.scales, (columns // group, rows)),
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
