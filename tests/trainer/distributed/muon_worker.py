"""Inside a group of three: matrices stepped in parts by our Muon, against torch.optim.Muon with whole ones.

    torchrun --nproc_per_node 3 tests/trainer/distributed/muon_worker.py out

out/<rank>.json   by layout: {"worst": largest difference of this rank's parts of weights and momentum, "moved": whether
                  all parts moved, "products": matrix products of the last step}
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from finetune.engine.muon import Muon
from finetune.engine.state_shards import ShardPart
from finetune.engine.timing import Stopwatch

# Wide, tall and square ones; rows that three ranks do not divide, and fewer rows than ranks.
SHAPES = {"wide": (7, 33), "tall": (40, 6), "square": (12, 12), "two rows": (2, 18), "one more": (9, 24)}
UNUSED, STEPS = "one more", 3  # without a gradient in the second step
SETTINGS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
CPU = torch.device("cpu")
Group = tuple[Tensor | None, list[ShardPart]]


def rows(whole: dict[str, Tensor], rank: int) -> list[Group]:
    """As FSDP2: rows by torch.chunk, each a tensor of its own; the last ranks may have none."""
    parts = []
    for name, matrix in whole.items():
        chunks = matrix.chunk(dist.get_world_size())
        if rank < len(chunks):
            start = sum(chunk.numel() for chunk in chunks[:rank])
            parts.append(ShardPart(name, tuple(matrix.shape), start, chunks[rank].numel(), chunks[rank].clone(), 0))
    return [(None, parts)]


def columns(whole: dict[str, Tensor], rank: int) -> list[Group]:
    """As tensor parallel: columns of those that can be divided, all of the others on every rank."""
    parts = []
    for name, matrix in whole.items():
        width, left = divmod(matrix.shape[1], dist.get_world_size())
        if left:
            own, place = matrix.clone(), (0, 0)
        else:
            own, place = matrix[:, rank * width :][:, :width].clone(), (width, matrix.shape[1])
        start = 0 if left else rank * width
        parts.append(ShardPart(name, tuple(matrix.shape), start, own.numel(), own, 0, *place))
    return [(None, parts)]


def ranges(whole: dict[str, Tensor], rank: int) -> list[Group]:
    """As ZeRO-2: equal ranges of two flat tensors, padded at the end. The last rank has padding alone of the second."""
    groups: list[Group] = []
    for names in (["wide", "tall", "square", "one more"], ["two rows"]):
        total = sum(whole[name].numel() for name in names)
        each = -(-total // dist.get_world_size()) if len(names) > 1 else total // 2
        flat, low, parts, first = torch.zeros(each), rank * each, list[ShardPart](), 0
        for name in names:
            matrix, begin, end = whole[name], max(first, low), min(first + whole[name].numel(), low + each)
            if begin < end:
                part = ShardPart(name, tuple(matrix.shape), begin - first, end - begin, flat, begin - low)
                part.view(flat).copy_(matrix.view(-1)[begin - first : end - first])
                parts.append(part)
            first += matrix.numel()
        groups.append((flat, parts))
    return groups


LAYOUTS: dict[str, Callable[[dict[str, Tensor], int], list[Group]]] = {
    "rows": rows,
    "columns": columns,
    "ranges": ranges,
}


def compared(layout: str, rank: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    whole = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    before = {name: matrix.clone() for name, matrix in whole.items()}
    reference = torch.optim.Muon(whole.values(), **SETTINGS, adjust_lr_fn="match_rms_adamw")
    groups = LAYOUTS[layout](whole, rank)
    parts = [part for _, own in groups for part in own]
    stepped = list(
        {id(t): t for flat, own in groups for t in (flat, *(p.stepped for p in own)) if t is not None}.values()
    )
    muon = Muon([{"params": stepped}], frozenset(SHAPES), **SETTINGS)
    muon.share(groups, dist.group.WORLD, CPU, Stopwatch(CPU, False))
    turns = [[flat] for flat, _ in groups] if layout == "ranges" else [stepped]
    products = 0
    for step in range(STEPS):
        for name, matrix in whole.items():
            gradient = torch.randn(matrix.shape, generator=generator)
            # DeepSpeed has zeros for what was not used.
            matrix.grad = None if (name, step, layout != "ranges") == (UNUSED, 1, True) else gradient
        for tensor in stepped:
            tensor.grad = torch.zeros_like(tensor)
        for part in parts:
            gradient = whole[part.name].grad
            if gradient is None:
                part.stepped.grad = None
            else:
                part.view(part.stepped.grad).copy_(taken(gradient, part))
        reference.step()
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            for tensors in turns:
                muon.param_groups[0]["params"] = tensors
                muon.step()
        products = sum(event.count for event in profiled.key_averages() if event.key == "aten::mm")
    worst, moved = 0.0, True
    for part in parts:
        momentum = reference.state[whole[part.name]]["momentum_buffer"]
        pairs = (whole[part.name], part.stepped), (momentum, muon.state[part.stepped]["momentum_buffer"])
        worst = max(worst, *((taken(a, part) - part.view(b)).abs().max().item() for a, b in pairs))
        moved &= not torch.equal(taken(before[part.name], part), part.view(part.stepped))
    return {"worst": worst, "moved": moved, "products": products}


def taken(matrix: Tensor, part: ShardPart) -> Tensor:
    """The part's elements of a whole matrix, flat."""
    held = part.range
    return matrix.as_strided((held.count, held.run), (held.stride, 1), held.start).reshape(-1)


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = {layout: compared(layout, rank) for layout in LAYOUTS}
    (out / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
