"""Optimizer state in 8 bits (bitsandbytes), carried as such wherever its blocks fall as they did.

Such a state is one code for each element and one scale for each 256 elements of the tensor that is stepped: element i
is book[codes[i]] * scales[i // 256]. A ZeRO group steps many parameters as one tensor, so a part of it may begin in
the middle of a block.

Codes and scales are taken as they are where they can be, which is exact, and rounded anew only where other elements
come to share a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from finetune.engine.ranges import Overlap

BLOCK = 256  # elements; bitsandbytes' Optimizer2State.init_state
RUN = 2**16  # blocks rounded at a time, 64 MB in fp32


@dataclass(frozen=True)
class Blocks:
    """A range of a stepped tensor's state in 8 bits."""

    codes: Any  # (numel,) uint8; of a file, what loads the elements that are asked for
    scales: Tensor  # (blocks that the range touches,) fp32
    book: Tensor  # (256,) fp32, ascending
    phase: int = 0  # of the range's first element in its block

    def scales_of(self, low: int, high: int) -> Tensor:
        """Of the blocks that elements [low, high) touch."""
        return self.scales[_touched(self.phase + low, self.phase + high)]

    def values(self, low: int, high: int) -> Tensor:  # (high - low,) fp32
        from bitsandbytes.functional import dequantize_blockwise

        lead = (self.phase + low) % BLOCK
        codes = torch.nn.functional.pad(self.codes[low:high], (lead, 0))
        return dequantize_blockwise(codes, absmax=self.scales_of(low, high), code=self.book, blocksize=BLOCK)[lead:]

    def at_full_scale(self) -> Blocks:
        """To be rounded again. The signed book begins at -0.993, but what set the scale of a block was -1 or 1 of it.

        Read as -0.993, -1 would set a smaller scale, to which its neighbours round with the codes they had: the whole
        block would shrink by 0.7 %.
        """
        book = self.book.clone()
        book[0] = book[0].sign()
        return replace(self, book=book)


@dataclass(frozen=True)
class Piece:
    """Elements of a stored range, and where they belong in a stepped tensor, flattened."""

    source: Any  # Blocks, or whatever gives a tensor when sliced
    overlap: Overlap  # of the stored range with the stepped tensor

    @property
    def is_contiguous(self) -> bool:
        return self.overlap.count == 1

    @property
    def end(self) -> int:
        """Behind its last element in the stored range."""
        return self.overlap.low + (self.overlap.count - 1) * self.overlap.from_pitch + self.overlap.run

    def values(self) -> Tensor:  # (count, run)
        low = self.overlap.low
        found = self.source.values(low, self.end) if isinstance(self.source, Blocks) else self.source[low : self.end]
        return found.as_strided((self.overlap.count, self.overlap.run), (self.overlap.from_pitch, 1))

    def at_full_scale(self) -> Piece:
        return replace(self, source=self.source.at_full_scale()) if isinstance(self.source, Blocks) else self

    def within(self, start: int, end: int) -> Iterator[Piece]:
        """What of it belongs to elements [start, end) of the stepped tensor, for a tensor of these alone."""
        for overlap in self.overlap.within(start, end):
            yield Piece(self.source, overlap)

    def place(self, flat: Tensor) -> Tensor:  # (count, run)
        shape, offset = (self.overlap.count, self.overlap.run), flat.storage_offset() + self.overlap.at
        return flat.as_strided(shape, (self.overlap.to_pitch, 1), offset)


def is_coded(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.uint8


def coded_fields(state: dict[str, Any], field: str, offset: int, numel: int) -> Iterator[tuple[str, Tensor]]:
    """(name, flat tensor): all that tells elements [offset, offset + numel) of a coded field.

    Names are `field`, `field:scales`, `field:book`, `field:phase`; the last is (1,) uint8.
    """
    whole = _blocks_of(state, field)
    yield field, whole.codes[offset : offset + numel]
    yield f"{field}:scales", whole.scales_of(offset, offset + numel)
    yield f"{field}:book", whole.book
    yield f"{field}:phase", torch.tensor([offset % BLOCK], dtype=torch.uint8)


def init_state(optimizer: Optimizer, stepped: Tensor) -> None:
    """bitsandbytes' own, which chooses 8 bits or fp32 by size, shares the books and pages large buffers."""
    group = optimizer.param_groups[0]
    held = group["params"]
    group["params"] = [stepped]  # it looks the tensor up there; DeepSpeed's groups are empty between steps
    try:
        optimizer.init_state(group, stepped, 0, 0)  # pyright: ignore[reportAttributeAccessIssue]  (bnb's)
    finally:
        group["params"] = held


@torch.no_grad()
def fill_coded(state: dict[str, Any], field: str, pieces: list[Piece]) -> None:
    """Fill a coded field of a stepped tensor: blocks as stored where they say the same, the others rounded anew.

    What no piece covers, padding of a flat group, becomes 0: anything else could set the scale of its block.
    """
    whole = _blocks_of(state, field)
    scales = _common_scales(whole, pieces)
    whole.scales.copy_(scales)
    whole.codes.fill_(int(whole.book.abs().argmin()))
    for piece in pieces:
        if isinstance(piece.source, Blocks) and piece.is_contiguous:
            piece.place(whole.codes).copy_(piece.source.codes[piece.overlap.low : piece.end])
    for first, last in _runs(scales.isnan()):
        _round_anew(whole, pieces, first, last)


def _common_scales(whole: Blocks, pieces: list[Piece]) -> Tensor:  # (blocks,) fp32 on the CPU
    """Of blocks that are stored as they are needed, with one scale wherever several pieces meet; NaN for the others."""
    book, unknown = whole.book.cpu(), -1.0
    found = torch.full(whole.scales.shape, unknown)
    for piece in pieces:
        stored, low, at = piece.source, piece.overlap.low, piece.overlap.at
        last = at + (piece.overlap.count - 1) * piece.overlap.to_pitch + piece.overlap.run
        ours = found[_touched(at, last)]  # of runs, blocks between them as well: rounded anew they say the same
        alike = isinstance(stored, Blocks) and torch.equal(stored.book, book) and piece.is_contiguous
        if alike and (stored.phase + low - at) % BLOCK == 0:
            scales = stored.scales_of(low, piece.end)
            ours.copy_(torch.where((ours == unknown) | (ours == scales), scales, torch.nan))
        else:
            ours.fill_(torch.nan)
    return torch.where(found == unknown, 0.0, found)


def _runs(chosen: Tensor) -> Iterator[tuple[int, int]]:
    """[first, last) of consecutive chosen blocks, none longer than RUN."""
    edges = torch.nn.functional.pad(chosen.int(), (1, 1)).diff().nonzero().flatten().tolist()
    for low, high in zip(edges[::2], edges[1::2], strict=True):
        for first in range(low, high, RUN):
            yield first, min(first + RUN, high)


def _round_anew(whole: Blocks, pieces: list[Piece], first: int, last: int) -> None:
    """Blocks [first, last), to the nearest in the book.

    Not by bitsandbytes' quantize_blockwise: on CPUs (0.50.2) it goes in steps of 2^-15 and makes 2e-5 of the scale out
    of 0, which padding must stay.
    """
    start, end = first * BLOCK, min(last * BLOCK, whole.codes.numel())
    values = torch.zeros((last - first) * BLOCK, device=whole.scales.device)
    for piece in pieces:
        for inside in piece.within(start, end):
            inside.place(values).copy_(inside.at_full_scale().values())
    blocks = values.view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1)
    blocks /= scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    codes = torch.bucketize(values, (whole.book[1:] + whole.book[:-1]) / 2, out_int32=True)
    whole.codes[start:end].copy_(codes[: end - start])
    whole.scales[first:last].copy_(scales)


def _blocks_of(state: dict[str, Any], field: str) -> Blocks:
    """bitsandbytes calls them state1, absmax1 and qmap1."""
    number = field.removeprefix("state")
    return Blocks(state[field].view(-1), state[f"absmax{number}"], state[f"qmap{number}"])


def _touched(low: int, high: int) -> slice:
    """Blocks that elements [low, high) touch."""
    return slice(low // BLOCK, -(-high // BLOCK))
