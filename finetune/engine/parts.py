"""What of a run's state lies on this rank, said in a way that no backend owns.

Every backend's shard is a range of a flattened parameter: whole (replicas), some rows (FSDP2), a range of a flat group
(ZeRO), some columns of some rows (tensor parallel). A `Part` says which range of which parameter, and where in the
tensor that the optimizer steps it lies; the optimizer's own tensors have that tensor's shape, so the same place in them
belongs to the same part. State in 8 bits has blocks of its own (`blockwise.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from finetune.engine.blockwise import coded_fields, init_state, is_coded
from finetune.engine.ranges import Range

WEIGHT = "weight"  # the field that is the parameter itself
Types = dict[str, torch.dtype]  # of the optimizer's tensors as they were stored, by field
MakeRoom = Callable[[Optimizer, Tensor, Types], None]  # for the state of a stepped tensor


@dataclass(frozen=True)
class Part:
    """numel elements of the flattened parameter `name`: from `start` on, or runs of `run` each `stride` apart."""

    name: str
    shape: tuple[int, ...]  # of the whole parameter
    start: int
    numel: int
    stepped: Tensor  # what the optimizer steps
    offset: int  # of this part in it, flattened and in one piece
    run: int = 0  # 0: all in one
    stride: int = 0

    @property
    def range(self) -> Range:
        if not self.run:
            return Range(self.start, self.numel)
        return Range(self.start, self.run, self.stride, self.numel // self.run)

    def view(self, tensor: Tensor) -> Tensor:  # (numel,)
        """This part of `stepped`, or of a tensor of its shape; writing to it writes there."""
        return tensor.detach().view(-1)[self.offset : self.offset + self.numel]


def fields(part: Part, optimizers: list[Optimizer]) -> Iterator[tuple[str, Tensor]]:
    """(field, flat tensor): the weight, then whatever the optimizer keeps element by element, or in blocks of them."""
    yield WEIGHT, part.view(part.stepped)
    state = _state(part, optimizers)
    for field, value in state.items():
        if is_coded(value):
            yield from coded_fields(state, field, part.offset, part.numel)
        elif not _is_scalar(value) and value.shape == part.stepped.shape:
            yield field, part.view(value)


def scalars(parts: list[Part], optimizers: list[Optimizer]) -> dict[str, dict[str, float]]:
    """By parameter: what the optimizer keeps once a tensor, such as its count of steps."""
    return {
        part.name: {field: float(value) for field, value in _state(part, optimizers).items() if _is_scalar(value)}
        for part in parts
    }


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.ndim == 0


def _state(part: Part, optimizers: list[Optimizer]) -> dict[str, Any]:
    for optimizer in optimizers:
        if part.stepped in optimizer.state:
            return optimizer.state[part.stepped]
    return {}


def by_stepped(parts: list[Part]) -> list[list[Part]]:
    """Parts of the same stepped tensor together."""
    found: dict[int, list[Part]] = {}
    for part in parts:
        found.setdefault(id(part.stepped), []).append(part)
    return list(found.values())


def make_state(
    stepped: Tensor, optimizers: list[Optimizer], types: Types, numbers: dict[str, float], room: MakeRoom
) -> dict[str, Any]:
    """A restored optimizer state: numbers are set, the tensors of `types` are left to fill."""
    owner = _owner(stepped, optimizers)
    room(owner, stepped, types)
    state = owner.state[stepped]
    for field, number in numbers.items():
        state[field] = (
            int(number) if _is_bitsandbytes(owner) else torch.tensor(number, device=_step_device(owner, stepped))
        )
    return state


def make_room(owner: Optimizer, stepped: Tensor, types: Types) -> None:
    """Tensors of state where the optimizer has none yet. bitsandbytes chooses its own types."""
    state = owner.state[stepped]
    if types and not state and _is_bitsandbytes(owner):
        init_state(owner, stepped)
    for field, dtype in types.items():
        if field not in state:
            state[field] = torch.zeros_like(stepped, dtype=dtype)


def _owner(stepped: Tensor, optimizers: list[Optimizer]) -> Optimizer:
    """A single one is not asked: DeepSpeed's stage 3 empties its groups between steps."""
    if len(optimizers) == 1:
        return optimizers[0]
    return next(o for o in optimizers if any(stepped is p for g in o.param_groups for p in g["params"]))


def _is_bitsandbytes(optimizer: Optimizer) -> bool:
    """It counts steps in an int, torch in a tensor."""
    return type(optimizer).__module__.startswith("bitsandbytes")


def _step_device(optimizer: Optimizer, stepped: Tensor) -> torch.device:
    """torch keeps the count beside the parameter where the step is fused, on the CPU elsewhere."""
    return stepped.device if optimizer.defaults.get("fused") else torch.device("cpu")
