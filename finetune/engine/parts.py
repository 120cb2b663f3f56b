"""What of a run's state lies on this rank, said in a way that no backend owns.

Every backend's shard is a contiguous range of a flattened parameter: whole (replicas), some rows (FSDP2), a range of a
flat group (ZeRO). A `Part` says which range of which parameter, and where in the tensor that the optimizer steps it
lies; the optimizer's own tensors have that tensor's shape, so the same range of them belongs to the same part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from finetune.errors import UserError

WEIGHT = "weight"  # the field that is the parameter itself


@dataclass(frozen=True)
class Part:
    """Elements [start, start + numel) of the flattened parameter `name`."""

    name: str
    shape: tuple[int, ...]  # of the whole parameter
    start: int
    numel: int
    stepped: Tensor  # what the optimizer steps
    offset: int  # of this part in it, flattened

    def view(self, tensor: Tensor) -> Tensor:  # (numel,)
        """This part of `stepped`, or of a tensor of its shape; writing to it writes there."""
        return tensor.detach().view(-1)[self.offset : self.offset + self.numel]


def fields(part: Part, optimizers: list[Optimizer]) -> Iterator[tuple[str, Tensor]]:
    """(field, (numel,) view): the weight, then whatever the optimizer keeps element by element.

    Raises UserError for state in blocks of its own (8-bit optimizers), which belongs to no range of a parameter.
    """
    yield WEIGHT, part.view(part.stepped)
    for field, value in _state(part, optimizers).items():
        if _is_scalar(value):
            continue
        if value.shape != part.stepped.shape or value.dtype == torch.uint8:
            raise UserError(
                "checkpoint.every_steps: the state of an 8-bit optimizer cannot be carried between backends yet; "
                "use `optimizer.name: adamw` or `paged_adamw`, or leave checkpoint.every_steps out"
            )
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


def make_state(
    part: Part, optimizers: list[Optimizer], tensors: dict[str, torch.dtype], numbers: dict[str, float]
) -> dict[str, Tensor]:
    """Room for a restored optimizer state where the optimizer has none yet; (numel,) views to fill, by field."""
    owner = next(o for o in optimizers if any(part.stepped is p for g in o.param_groups for p in g["params"]))
    state = owner.state[part.stepped]
    for field, dtype in tensors.items():
        if field not in state:
            state[field] = torch.zeros_like(part.stepped, dtype=dtype)
    for field, number in numbers.items():
        state[field] = (
            int(number) if _counts_in_python(owner) else torch.tensor(number, device=_step_device(owner, part))
        )
    return {field: part.view(state[field]) for field in tensors}


def _counts_in_python(optimizer: Optimizer) -> bool:
    """bitsandbytes counts steps in an int, torch in a tensor."""
    return type(optimizer).__module__.startswith("bitsandbytes")


def _step_device(optimizer: Optimizer, part: Part) -> torch.device:
    """torch keeps the count beside the parameter where the step is fused, on the CPU elsewhere."""
    return part.stepped.device if optimizer.defaults.get("fused") else torch.device("cpu")
