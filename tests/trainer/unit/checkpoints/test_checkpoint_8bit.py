"""8-bit optimizer state through a checkpoint: as such where blocks fall alike, within a rounding where they do not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from bitsandbytes.functional import dequantize_blockwise, quantize_blockwise
from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit
from safetensors import safe_open
from torch import Tensor

from finetune.checkpoints.shards import PartReader, part_tensors, shape_metadata, write_tensors
from finetune.engine.state_shards import ShardPart, scalars

N = 9000  # no multiple of a block
FIELDS = ("state1", "state2")


def trained(numel: int, used: Tensor | None = None) -> tuple[Tensor, AdamW8bit]:
    """A flat tensor after three steps; `used` (numel,) bool: elsewhere the gradient is 0, as in padding."""
    parameter = torch.nn.Parameter(torch.randn(numel))
    optimizer = AdamW8bit([parameter], lr=0.01)
    for _ in range(3):
        step(parameter, optimizer, torch.randn(numel) * (1 if used is None else used))
    return parameter, optimizer


def step(parameter: Tensor, optimizer: AdamW8bit, gradient: Tensor) -> None:
    parameter.grad = gradient.clone()
    optimizer.step()


def write(path: Path, parts: list[ShardPart], optimizer: AdamW8bit) -> dict[str, dict[str, float]]:
    write_tensors(path, part_tensors(parts, [optimizer]), shape_metadata(parts))
    return scalars(parts, [optimizer])


def in_ranges(parameter: Tensor, optimizer: AdamW8bit, folder: Path, *bounds: int) -> dict[str, dict[str, float]]:
    """Each range of one parameter in a file of its own, as replicas write it."""
    for rank, (start, end) in enumerate(pairwise(bounds)):
        numbers = write(folder / f"{rank}", [ShardPart("w", (N,), start, end - start, parameter, start)], optimizer)
    return numbers


def shard(
    folder: Path, start: int, end: int, numbers: dict[str, dict[str, float]], shape: tuple[int, ...] = (N,)
) -> tuple[Tensor, AdamW8bit]:
    """Elements [start, end) restored into a tensor of their own, as FSDP2 steps them."""
    parameter = torch.nn.Parameter(torch.zeros(end - start))
    optimizer = AdamW8bit([parameter], lr=0.01)
    PartReader(sorted(folder.iterdir())).restore(
        [ShardPart("w", shape, start, end - start, parameter, 0)], [optimizer], numbers
    )
    return parameter, optimizer


def values(parameter: Tensor, optimizer: AdamW8bit, field: str) -> Tensor:
    """(numel,) fp32: what the optimizer takes its state to be, by bitsandbytes' own reading."""
    state, number = optimizer.state[parameter], field[-1]
    if state[field].dtype == torch.float32:
        return state[field]
    return dequantize_blockwise(
        state[field], absmax=state[f"absmax{number}"], code=state[f"qmap{number}"], blocksize=256
    )


def rounding(parameter: Tensor, optimizer: AdamW8bit, field: str) -> Tensor:
    """(numel,): the most by which rounding moves an element, half the book's widest gap times its block's scale.

    Beyond the book's ends, -0.993 and 1.0, lies at most half a gap as well.
    """
    state, number = optimizer.state[parameter], field[-1]
    half = state[f"qmap{number}"].diff().max() / 2
    return half * state[f"absmax{number}"].repeat_interleave(256)[: parameter.numel()] * (1 + 1e-5)


def flat_group(parameter: Tensor) -> list[ShardPart]:
    """Three parameters in one stepped tensor, with a gap before the last and padding at the end, as under ZeRO.

    The second begins in the middle of a block and of its parameter, and shares blocks with both neighbours.
    """
    return [
        ShardPart("a", (50, 100), 0, 5000, parameter, 0),
        ShardPart("b", (3000,), 1000, 2000, parameter, 5000),
        ShardPart("c", (1200,), 0, 1200, parameter, 7037),
    ]


def covered(parts: list[ShardPart]) -> Tensor:
    used = torch.zeros(N, dtype=torch.bool)
    for part in parts:
        part.view(used)[:] = True
    return used


def test_the_same_layout_is_bitwise(tmp_path: Path) -> None:
    used = covered(flat_group(torch.zeros(N)))
    parameter, optimizer = trained(N, used)
    spike = torch.zeros(N)
    spike[5300] = -1e4  # in the block that the second parameter has to itself: its largest element is negative
    step(parameter, optimizer, spike)
    numbers = write(tmp_path / "0", flat_group(parameter), optimizer)
    with safe_open(tmp_path / "0", "pt") as file:
        assert file.get_tensor("state1|1000|b").dtype == torch.uint8
        assert file.get_tensor("state1:phase|1000|b").tolist() == [5000 % 256]
    rounded, _ = quantize_blockwise(values(parameter, optimizer, "state1"), blocksize=256)
    assert not torch.equal(rounded, optimizer.state[parameter]["state1"]), "rounding again would move codes"

    other = torch.nn.Parameter(torch.full((N,), 7.0))
    fresh = AdamW8bit([other], lr=0.01)
    PartReader([tmp_path / "0"]).restore(flat_group(other), [fresh], numbers)
    ours, theirs = optimizer.state[parameter], fresh.state[other]
    assert theirs["step"] == ours["step"] == 4
    for field in FIELDS:
        assert torch.equal(theirs[field][used], ours[field][used])
        assert torch.equal(theirs[f"absmax{field[-1]}"], ours[f"absmax{field[-1]}"])
        assert not values(other, fresh, field)[~used].any(), "padding is 0"
    gradient = torch.randn(N) * used
    step(parameter, optimizer, gradient)
    step(other, fresh, gradient)
    assert torch.equal(other[used], parameter[used])


@pytest.mark.parametrize("writers", [(0, N), (0, 4500, N), (0, 1, 300, 8999, N)])
@pytest.mark.parametrize("readers", [(0, N), (0, 4608, N), (0, 4500)])
def test_exact_wherever_blocks_begin_where_they_did(
    tmp_path: Path, writers: tuple[int, ...], readers: tuple[int, ...]
) -> None:
    """However replicas divided the writing, and where a shard ends within a block that another element scales."""
    parameter, optimizer = trained(N)
    numbers = in_ranges(parameter, optimizer, tmp_path, *writers)
    for start, end in pairwise(readers):
        restored, fresh = shard(tmp_path, start, end, numbers)
        for field in FIELDS:
            assert fresh.state[restored][field].dtype == torch.uint8
            assert torch.equal(fresh.state[restored][field], optimizer.state[parameter][field][start:end])
            assert torch.equal(values(restored, fresh, field), values(parameter, optimizer, field)[start:end])


@pytest.mark.parametrize("cut", [4500, 4501])
def test_other_blocks_are_within_a_rounding(tmp_path: Path, cut: int) -> None:
    parameter, optimizer = trained(N)
    numbers = in_ranges(parameter, optimizer, tmp_path, 0, N)
    restored, fresh = shard(tmp_path, cut, N, numbers)
    for field in FIELDS:
        stored, bound = values(parameter, optimizer, field)[cut:], rounding(restored, fresh, field)
        # An element at the lowest code, -0.993 of its scale, is taken for -1 of it: half a gap more.
        lowest = (optimizer.state[parameter][field][cut:] == 0) & (stored < 0)
        error = (values(restored, fresh, field) - stored).abs()
        assert error.max() > 0
        assert torch.all(error <= torch.where(lowest, 2 * bound, bound))


def test_a_block_that_had_two_scales_gets_one(tmp_path: Path) -> None:
    """Two ZeRO shards of a parameter, the second of which began in its group as far into a block as the first ended."""
    first, optimizer = trained(4500)
    second, other = trained(148 + 4500)
    step(first, optimizer, 100 * torch.ones(4500))
    step(second, other, torch.ones(4648))
    numbers = write(tmp_path / "0", [ShardPart("w", (N,), 0, 4500, first, 0)], optimizer)
    write(tmp_path / "1", [ShardPart("w", (N,), 4500, 4500, second, 148)], other)
    restored, fresh = shard(tmp_path, 0, N, numbers)
    shared = slice(4500 // 256 * 256, (4500 // 256 + 1) * 256)
    for field in FIELDS:
        stored = torch.cat([values(first, optimizer, field), values(second, other, field)[148:]])
        error = (values(restored, fresh, field) - stored).abs()
        assert error[shared].max() > 0
        assert torch.all(error[shared] <= rounding(restored, fresh, field)[shared])
        error[shared] = 0
        assert not error.any()


def test_a_neighbour_that_comes_to_share_a_block_changes_nothing_in_it(tmp_path: Path) -> None:
    """A small parameter's fp32 state joins a flat group, in a block whose largest element is negative.

    Read as the -0.993 of its scale that it stands for, that element would shrink the block.
    """
    large, optimizer = trained(8300)
    spike = torch.zeros(8300)
    spike[8200] = -20
    step(large, optimizer, spike)
    small, other = trained(800)
    numbers = write(tmp_path / "0", [ShardPart("a", (8300,), 0, 8300, large, 0)], optimizer)
    numbers |= write(tmp_path / "1", [ShardPart("b", (800,), 0, 800, small, 0)], other)
    flat = torch.nn.Parameter(torch.zeros(9300))
    fresh = AdamW8bit([flat], lr=0.01)
    parts = [ShardPart("a", (8300,), 0, 8300, flat, 0), ShardPart("b", (800,), 0, 800, flat, 8300)]
    PartReader([tmp_path / "0", tmp_path / "1"]).restore(parts, [fresh], numbers)
    for field in FIELDS:
        restored = values(flat, fresh, field)
        assert torch.equal(restored[:8300], values(large, optimizer, field))
        error = (restored[8300:9100] - values(small, other, field)).abs()
        assert error.max() > 0
        assert torch.all(error <= rounding(flat, fresh, field)[8300:9100])
        assert not restored[9100:].any(), "padding is 0"


def test_shards_too_small_for_8_bits_get_the_values(tmp_path: Path) -> None:
    parameter, optimizer = trained(N)
    numbers = in_ranges(parameter, optimizer, tmp_path, 0, 4500, N)
    for start, end in pairwise((0, 3000, 5700, N)):
        restored, fresh = shard(tmp_path, start, end, numbers)
        for field in FIELDS:
            assert fresh.state[restored][field].dtype == torch.float32
            assert torch.equal(values(restored, fresh, field), values(parameter, optimizer, field)[start:end])


def test_small_shards_in_fp32_become_8_bits(tmp_path: Path) -> None:
    parts, wanted = [], {field: [] for field in FIELDS}
    for rank, (start, end) in enumerate(pairwise((0, 3000, 6001, N))):
        parameter, optimizer = trained(end - start)
        parts = [ShardPart("w", (N,), start, end - start, parameter, 0)]
        numbers = write(tmp_path / f"{rank}", parts, optimizer)
        for field in FIELDS:
            wanted[field].append(values(parameter, optimizer, field))
    restored, fresh = shard(tmp_path, 0, N, numbers)
    for field in FIELDS:
        assert fresh.state[restored][field].dtype == torch.uint8
        error = (values(restored, fresh, field) - torch.cat(wanted[field])).abs()
        assert torch.all(error <= rounding(restored, fresh, field))


@pytest.mark.filterwarnings("ignore:Paged optimizers:UserWarning")  # bitsandbytes: no unified memory without a GPU
def test_room_is_what_bitsandbytes_makes(tmp_path: Path) -> None:
    """DeepSpeed's stage 3 leaves the groups empty between steps."""
    parameter, optimizer = trained(N)
    numbers = in_ranges(parameter, optimizer, tmp_path, 0, N)
    restored = torch.nn.Parameter(torch.zeros(N))
    fresh = PagedAdamW8bit([restored], lr=0.01)
    fresh.param_groups[0]["params"] = []
    PartReader([tmp_path / "0"]).restore([ShardPart("w", (N,), 0, N, restored, 0)], [fresh], numbers)
    assert fresh.param_groups[0]["params"] == []
    ours, theirs = optimizer.state[parameter], fresh.state[restored]
    assert {k: (v.dtype, v.shape) for k, v in ours.items() if k != "step"} == {
        k: (v.dtype, v.shape) for k, v in theirs.items() if k != "step"
    }
    assert type(theirs["step"]) is int


def lowest(parameter: Tensor, optimizer: AdamW8bit, field: str) -> Tensor:
    """(numel,) bool: at the lowest code, -0.993 of its scale, which is taken for -1 of it: half a gap more."""
    return (optimizer.state[parameter][field] == 0) & (values(parameter, optimizer, field) < 0)


@pytest.mark.parametrize("field", FIELDS)
def test_columns_are_read_as_a_matrix_within_a_rounding(tmp_path: Path, field: str) -> None:
    """Two ranks' columns, as tensor parallel steps them, read as the whole of ZeRO or replicas."""
    shape, halves = (90, 100), [trained(N // 2) for _ in range(2)]
    for rank, (half, optimizer) in enumerate(halves):
        part = ShardPart("w", shape, 50 * rank, N // 2, half, 0, 50, 100)
        numbers = write(tmp_path / f"{rank}", [part], optimizer)
    whole, fresh = shard(tmp_path, 0, N, numbers, shape)

    def side_by_side(of: Callable[[Tensor, AdamW8bit, str], Tensor]) -> Tensor:
        return torch.cat([of(*half, field).view(90, 50) for half in halves], 1).flatten()

    assert torch.equal(whole, side_by_side(lambda half, _optimizer, _field: half.detach()))
    bound, error = rounding(whole, fresh, field), (values(whole, fresh, field) - side_by_side(values)).abs()
    assert error.max() > 0
    assert torch.all(error <= torch.where(side_by_side(lowest), 2 * bound, bound))


@pytest.mark.parametrize("field", FIELDS)
def test_columns_of_a_stored_matrix_are_within_a_rounding(tmp_path: Path, field: str) -> None:
    parameter, optimizer = trained(N)
    numbers = write(tmp_path / "0", [ShardPart("w", (90, 100), 0, N, parameter, 0)], optimizer)
    right = torch.nn.Parameter(torch.zeros(N // 2))
    fresh = AdamW8bit([right], lr=0.01)
    part = ShardPart("w", (90, 100), 50, N // 2, right, 0, 50, 100)
    PartReader([tmp_path / "0"]).restore([part], [fresh], numbers)

    def columns(whole: Tensor) -> Tensor:
        return whole.view(90, 100)[:, 50:].flatten()

    assert torch.equal(right, columns(parameter.detach()))
    bound, stored = rounding(right, fresh, field), columns(values(parameter, optimizer, field))
    error = values(right, fresh, field) - stored
    wide = columns(lowest(parameter, optimizer, field))
    assert torch.all(error.abs() <= torch.where(wide, 2 * bound, bound))


def test_the_same_columns_of_other_shards_are_bitwise(tmp_path: Path) -> None:
    """Rows of columns whose blocks fall as they did."""
    parameter, optimizer = trained(10_240)
    shape, together = (160, 128), ShardPart("w", (160, 128), 64, 10_240, parameter, 0, 64, 128)
    numbers = write(tmp_path / "0", [together], optimizer)
    lower = torch.nn.Parameter(torch.zeros(6144))
    fresh = AdamW8bit([lower], lr=0.01)
    PartReader([tmp_path / "0"]).restore(
        [ShardPart("w", shape, 64 * 128 + 64, 6144, lower, 0, 64, 128)], [fresh], numbers
    )
    assert torch.equal(lower, parameter[4096:])
    for field in FIELDS:
        assert torch.equal(fresh.state[lower][field], optimizer.state[parameter][field][4096:])
        assert torch.equal(values(lower, fresh, field), values(parameter, optimizer, field)[4096:])
