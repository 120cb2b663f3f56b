"""This rank's part of a run's state, in the same form for every backend.

Every backend's shard is a range of a flattened parameter: all of it (replicas), some rows (FSDP2), a range of a flat
group (ZeRO), some columns of some rows (tensor parallel). A `ShardPart` names the range, and its position in the tensor
that the optimizer steps. The optimizer's own tensors have that tensor's shape, so the same place in them belongs to the
same part. State in 8 bits has blocks and scales in addition (last section).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

WEIGHT = "weight"  # field of the parameter itself
BLOCK = 256  # elements with one scale; bitsandbytes' Optimizer2State.init_state
_MAX_BLOCKS = 2**16  # rounded at once, 64 MB in fp32
Types = dict[str, torch.dtype]  # types of the optimizer's tensors as stored, by field
MakeRoom = Callable[[Optimizer, Tensor, Types], None]  # allocates the state of a stepped tensor


# --- ranges of a flattened parameter


@dataclass(frozen=True)
class Range:
    """Elements start + i * stride + j of the flattened parameter, for i < count and j < run.

        columns 2 and 3 of a (3, 4) matrix     . . 2 3  . . 6 7  . . 10 11     Range(start=2, run=2, stride=4, count=3)

    A range's own elements are numbered as they are in memory, one run after the other: 2 3 6 7 10 11 are 0 to 5.
    """

    start: int
    run: int
    stride: int = 0  # unused with one run
    count: int = 1

    @property
    def numel(self) -> int:
        return self.run * self.count

    @property
    def is_contiguous(self) -> bool:
        return self.count == 1 or self.run == self.stride


@dataclass(frozen=True)
class Overlap:
    """Elements that two ranges share, by position in each: for i < count and j < run,
    low + i * from_pitch + j of the first is at + i * to_pitch + j of the second."""

    low: int
    at: int
    run: int
    from_pitch: int = 0
    to_pitch: int = 0
    count: int = 1

    @property
    def numel(self) -> int:
        return self.run * self.count

    def joined(self) -> Overlap:
        """Returns the overlap as one run, if runs are adjacent in both ranges."""
        if self.count == 1 or self.run == self.from_pitch == self.to_pitch:
            return Overlap(self.low, self.at, self.numel)
        return self

    def within(self, start: int, end: int) -> Iterator[Overlap]:
        """Yields its parts in [start, end) of the second range, numbered from `start`."""
        if self.count == 1:
            low, high = max(self.at, start), min(self.at + self.run, end)
            if low < high:
                yield Overlap(self.low + low - self.at, low - start, high - low)
            return
        first = min(max(-(-(start - self.at) // self.to_pitch), 0), self.count)  # first run that begins in it
        last = min(
            max((end - self.run - self.at) // self.to_pitch + 1, first), self.count
        )  # after the runs that end there
        for i in (first - 1, *((last,) if last >= first else ())):
            if 0 <= i < self.count:
                yield from self._one_run(i).within(start, end)
        if first < last:
            full = self._one_run(first)
            yield Overlap(full.low, full.at - start, self.run, self.from_pitch, self.to_pitch, last - first)

    def _one_run(self, i: int) -> Overlap:
        return Overlap(self.low + i * self.from_pitch, self.at + i * self.to_pitch, self.run)


@dataclass(frozen=True)
class _Rectangle:
    """Rows and columns of a parameter seen as rows of some width; element (row, column) of it has position
    at + (row - top) * pitch + column - left in its range."""

    top: int
    bottom: int
    left: int
    right: int
    at: int
    pitch: int


def overlaps(first: Range, second: Range) -> Iterator[Overlap]:
    """Yields the elements that two ranges share, in as few overlaps as possible."""
    strides = {r.stride for r in (first, second) if not r.is_contiguous}
    if len(strides) == 2:  # sharded along other dimensions: run by run
        for i in range(first.count):
            one = Range(first.start + i * first.stride, first.run)
            for overlap in overlaps(one, second):
                yield replace(overlap, low=overlap.low + i * first.run)
        return
    # Both are rectangles of rows of this width; of one row if neither is strided.
    width = strides.pop() if strides else max(first.start + first.numel, second.start + second.numel)
    for a in _rectangles(first, width):
        for b in _rectangles(second, width):
            top, bottom = max(a.top, b.top), min(a.bottom, b.bottom)
            left, right = max(a.left, b.left), min(a.right, b.right)
            if top < bottom and left < right:
                low = a.at + (top - a.top) * a.pitch + left - a.left
                at = b.at + (top - b.top) * b.pitch + left - b.left
                yield Overlap(low, at, right - left, a.pitch, b.pitch, bottom - top).joined()


def _rectangles(r: Range, width: int) -> Iterator[_Rectangle]:
    """Yields one rectangle for a strided range; for a contiguous one a partial row, full rows and a partial row."""
    if not r.is_contiguous:
        top, left = divmod(r.start, width)
        yield _Rectangle(top, top + r.count, left, left + r.run, 0, r.run)
        return
    start, end = r.start, r.start + r.numel
    while start < end:
        top, left = divmod(start, width)
        if left or end - start < width:
            right = min(width, left + end - start)
            yield _Rectangle(top, top + 1, left, right, start - r.start, width)
            start += right - left
        else:
            rows = (end - start) // width
            yield _Rectangle(top, top + rows, 0, width, start - r.start, width)
            start += rows * width


# --- parts of parameters


@dataclass(frozen=True)
class ShardPart:
    """numel elements of the flattened parameter `name`: from `start` on, or runs of `run` each `stride` apart."""

    name: str
    shape: tuple[int, ...]  # shape of the unsharded parameter
    start: int
    numel: int
    stepped: Tensor  # tensor that the optimizer steps
    offset: int  # position of this part in `stepped`, flattened and contiguous
    run: int = 0  # 0: one run
    stride: int = 0

    @property
    def range(self) -> Range:
        if not self.run:
            return Range(self.start, self.numel)
        return Range(self.start, self.run, self.stride, self.numel // self.run)

    def view(self, tensor: Tensor) -> Tensor:  # (numel,)
        """Returns this part of `stepped`, or of a tensor of its shape; writing to it writes there."""
        return tensor.detach().view(-1)[self.offset : self.offset + self.numel]


def replica_parts(trained: Iterable[tuple[str, Tensor]], replica: int, replicas: int, reading: bool) -> list[ShardPart]:
    """Returns the parts of parameters that `replicas` ranks have in full: each writes a range and reads all."""
    parts = []
    for name, parameter in trained:
        per_replica = -(-parameter.numel() // replicas)
        start = 0 if reading else min(replica * per_replica, parameter.numel())
        numel = parameter.numel() if reading else min(per_replica, parameter.numel() - start)
        if numel:
            parts.append(ShardPart(name, tuple(parameter.shape), start, numel, parameter, start))
    return parts


def fields(part: ShardPart, optimizers: list[Optimizer]) -> Iterator[tuple[str, Tensor]]:
    """Yields (field, flat tensor): the weight, then the optimizer's state per element, or per block of elements.

    State in 8 bits has the fields `field`, `field:scales`, `field:book`, and `field:phase`, which is (1,) uint8.
    """
    yield WEIGHT, part.view(part.stepped)
    state = _state(part, optimizers)
    for field, value in state.items():
        if is_coded(value):
            blocks, end = _stepped_blocks(state, field), part.offset + part.numel
            yield field, blocks.codes[part.offset : end]
            yield f"{field}:scales", blocks.scales_of(part.offset, end)
            yield f"{field}:book", blocks.book
            yield f"{field}:phase", torch.tensor([part.offset % BLOCK], dtype=torch.uint8)
        elif not _is_scalar(value) and value.shape == part.stepped.shape:
            yield field, part.view(value)


def scalars(parts: list[ShardPart], optimizers: list[Optimizer]) -> dict[str, dict[str, float]]:
    """Returns, by parameter, the optimizer's state per tensor, such as its number of steps."""
    return {
        part.name: {field: float(value) for field, value in _state(part, optimizers).items() if _is_scalar(value)}
        for part in parts
    }


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.ndim == 0


def _state(part: ShardPart, optimizers: list[Optimizer]) -> dict[str, Any]:
    return next((o.state[part.stepped] for o in optimizers if part.stepped in o.state), {})


def by_stepped(parts: list[ShardPart]) -> list[list[ShardPart]]:
    """Returns the parts of each stepped tensor."""
    groups: dict[int, list[ShardPart]] = {}
    for part in parts:
        groups.setdefault(id(part.stepped), []).append(part)
    return list(groups.values())


def make_state(
    stepped: Tensor, optimizers: list[Optimizer], types: Types, numbers: dict[str, float], room: MakeRoom
) -> dict[str, Any]:
    """Returns a restored optimizer state: numbers are set, the tensors of `types` are allocated, to be filled."""
    # A single one is not searched: DeepSpeed's stage 3 empties its groups between steps.
    steps = (o for o in optimizers if any(stepped is p for group in o.param_groups for p in group["params"]))
    optimizer = optimizers[0] if len(optimizers) == 1 else next(steps)
    room(optimizer, stepped, types)
    state = optimizer.state[stepped]
    for field, number in numbers.items():
        if _is_bitsandbytes(optimizer):  # counts steps in an int
            state[field] = int(number)
        else:  # torch keeps the count with the parameter if the step is fused, else on the CPU
            device = stepped.device if optimizer.defaults.get("fused") else torch.device("cpu")
            state[field] = torch.tensor(number, device=device)
    return state


def make_room(owner: Optimizer, stepped: Tensor, types: Types) -> None:
    """Allocate state if the optimizer has none yet. bitsandbytes chooses its own types."""
    state = owner.state[stepped]
    if types and not state and _is_bitsandbytes(owner):
        # Its own method chooses 8 bits or fp32 by size, shares the books and pages large buffers. It searches the
        # tensor in the group; DeepSpeed's groups are empty between steps.
        group: dict[str, Any] = owner.param_groups[0]
        params, group["params"] = group["params"], [stepped]
        try:
            owner.init_state(group, stepped, 0, 0)  # pyright: ignore[reportAttributeAccessIssue]  (bnb's)
        finally:
            group["params"] = params
    for field, dtype in types.items():
        if field not in state:
            state[field] = torch.zeros_like(stepped, dtype=dtype)


def _is_bitsandbytes(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("bitsandbytes")


# --- state in 8 bits (bitsandbytes)
#
# One code for each element and one scale for each 256 elements of the stepped tensor: element i is
# book[codes[i]] * scales[i // 256]. A ZeRO group steps many parameters as one tensor, so a part of it may begin in the
# middle of a block. Codes and scales are copied if blocks of the file and of this rank coincide, which is exact, and
# rounded again only if other elements share a block.


@dataclass(frozen=True)
class Blocks:
    """A range of a stepped tensor's state in 8 bits."""

    codes: Any  # (numel,) uint8; from a file, an object that loads slices
    scales: Tensor  # (blocks that the range touches,) fp32
    book: Tensor  # (256,) fp32, ascending
    phase: int = 0  # offset of the range's first element in its block

    def scales_of(self, low: int, high: int) -> Tensor:
        """Returns the scales of the blocks that contain elements [low, high)."""
        return self.scales[_blocks_of_elements(self.phase + low, self.phase + high)]

    def values(self, low: int, high: int) -> Tensor:  # (high - low,) fp32
        from bitsandbytes.functional import dequantize_blockwise

        lead = (self.phase + low) % BLOCK
        codes = torch.nn.functional.pad(self.codes[low:high], (lead, 0))
        return dequantize_blockwise(codes, absmax=self.scales_of(low, high), code=self.book, blocksize=BLOCK)[lead:]

    def at_full_scale(self) -> Blocks:
        """Returns the blocks prepared for rounding again. The signed book begins at -0.993, but the element that set
        the scale of a block was -1 or 1 of it: each rounding would shrink the block by 0.7 %."""
        book = self.book.clone()
        book[0] = book[0].sign()
        return replace(self, book=book)


@dataclass(frozen=True)
class StoredPiece:
    """Elements of a stored range, and their place in a flattened stepped tensor."""

    source: Any  # Blocks, or any object whose slices are tensors
    overlap: Overlap  # between stored range and stepped tensor

    @property
    def is_contiguous(self) -> bool:
        return self.overlap.count == 1

    @property
    def end(self) -> int:
        """Position after its last element in the stored range."""
        return self.overlap.low + (self.overlap.count - 1) * self.overlap.from_pitch + self.overlap.run

    def values(self) -> Tensor:  # (count, run)
        low = self.overlap.low
        flat = self.source.values(low, self.end) if isinstance(self.source, Blocks) else self.source[low : self.end]
        return flat.as_strided((self.overlap.count, self.overlap.run), (self.overlap.from_pitch, 1))

    def at_full_scale(self) -> StoredPiece:
        return replace(self, source=self.source.at_full_scale()) if isinstance(self.source, Blocks) else self

    def within(self, start: int, end: int) -> Iterator[StoredPiece]:
        """Yields the parts for elements [start, end) of the stepped tensor, numbered from `start`."""
        for overlap in self.overlap.within(start, end):
            yield StoredPiece(self.source, overlap)

    def place(self, flat: Tensor) -> Tensor:  # (count, run)
        """Returns the view of a flat tensor for the values."""
        shape, offset = (self.overlap.count, self.overlap.run), flat.storage_offset() + self.overlap.at
        return flat.as_strided(shape, (self.overlap.to_pitch, 1), offset)


def is_coded(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.uint8


@torch.no_grad()
def fill_coded(state: dict[str, Any], field: str, pieces: list[StoredPiece]) -> None:
    """Fill a coded field of a stepped tensor: blocks that coincide with stored ones are copied, the others rounded.

    Elements outside all pieces, the padding of a flat group, become 0: other values could set their block's scale.
    """
    blocks = _stepped_blocks(state, field)
    # Scales of blocks stored as needed, with one scale at a border of pieces; else NaN.
    book, unknown = blocks.book.cpu(), -1.0
    common = torch.full(blocks.scales.shape, unknown)
    for piece in pieces:
        stored, low, at = piece.source, piece.overlap.low, piece.overlap.at
        last = at + (piece.overlap.count - 1) * piece.overlap.to_pitch + piece.overlap.run
        ours = common[_blocks_of_elements(at, last)]  # also blocks between runs, unchanged by another rounding
        alike = isinstance(stored, Blocks) and torch.equal(stored.book, book) and piece.is_contiguous
        if alike and (stored.phase + low - at) % BLOCK == 0:
            scales = stored.scales_of(low, piece.end)
            ours.copy_(torch.where((ours == unknown) | (ours == scales), scales, torch.nan))
        else:
            ours.fill_(torch.nan)
    scales = torch.where(common == unknown, 0.0, common)
    blocks.scales.copy_(scales)
    blocks.codes.fill_(int(blocks.book.abs().argmin()))
    for piece in pieces:
        if isinstance(piece.source, Blocks) and piece.is_contiguous:
            piece.place(blocks.codes).copy_(piece.source.codes[piece.overlap.low : piece.end])
    edges = torch.nn.functional.pad(scales.isnan().int(), (1, 1)).diff().nonzero().flatten().tolist()
    for low, high in zip(edges[::2], edges[1::2], strict=True):  # consecutive blocks without a common scale
        for first in range(low, high, _MAX_BLOCKS):
            _round_again(blocks, pieces, first, min(first + _MAX_BLOCKS, high))


def _round_again(blocks: Blocks, pieces: list[StoredPiece], first: int, last: int) -> None:
    """Fill blocks [first, last) with the nearest codes.

    Not by bitsandbytes' quantize_blockwise: on CPUs (0.50.2) it has steps of 2^-15 and returns 2e-5 of the scale
    instead of 0, which padding must keep.
    """
    start, end = first * BLOCK, min(last * BLOCK, blocks.codes.numel())
    values = torch.zeros((last - first) * BLOCK, device=blocks.scales.device)
    for piece in pieces:
        for inside in piece.within(start, end):
            inside.place(values).copy_(inside.at_full_scale().values())
    rows = values.view(-1, BLOCK)
    scales = rows.abs().amax(dim=1)
    rows /= scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    codes = torch.bucketize(values, (blocks.book[1:] + blocks.book[:-1]) / 2, out_int32=True)
    blocks.codes[start:end].copy_(codes[: end - start])
    blocks.scales[first:last].copy_(scales)


def _stepped_blocks(state: dict[str, Any], field: str) -> Blocks:
    """Returns the blocks, named state1, absmax1 and qmap1 by bitsandbytes."""
    suffix = field.removeprefix("state")
    return Blocks(state[field].view(-1), state[f"absmax{suffix}"], state[f"qmap{suffix}"])


def _blocks_of_elements(low: int, high: int) -> slice:
    return slice(low // BLOCK, -(-high // BLOCK))
