"""CPU copies of what a rank writes, in one piece of memory that is kept from save to save.

Memory fresh from the system is handed over page by page as it is first written to, which takes several times as long
as the copy itself, and a GPU copies at full speed only to pinned memory, which takes longer still to come by. What
torch pins it rounds up to a power of two (https://github.com/pytorch/pytorch/issues/150517), up to twice what is
needed; so ordinary memory is registered with the driver instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from finetune.errors import RunFailure

_ALIGNMENT = 64  # bytes; a view of any type may begin there
_PORTABLE = 1  # cudaHostRegisterPortable


class Staging:
    """Room for one set of copies at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    def copies(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of flat tensors on any device, complete on return. The copies of the call before are overwritten.

        Raises RunFailure where memory cannot be pinned.
        """
        self._make_room(sum(map(_room, tensors.values())), any(tensor.is_cuda for tensor in tensors.values()))
        copies, end = {}, 0
        for name, tensor in tensors.items():
            start, end = end, end + _room(tensor)
            copy = self._memory[start : start + tensor.nbytes].view(tensor.dtype)  # (numel,)
            copies[name] = copy.copy_(tensor.detach(), non_blocking=self._pinned)
        if self._pinned:
            torch.cuda.synchronize()
        return copies

    def release(self) -> None:
        """Give the memory back; when nobody reads the copies any more."""
        if self._pinned:
            _driver().cudaHostUnregister(self._memory.data_ptr())  # fails only after what failed before it
        self._memory, self._pinned = torch.empty(0, dtype=torch.uint8), False

    def _make_room(self, size: int, pinned: bool) -> None:
        if size <= self._memory.numel() and pinned == self._pinned:
            return
        self.release()
        self._memory = torch.empty(size, dtype=torch.uint8)
        if pinned:
            _pin(self._memory)
            self._pinned = True


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _driver() -> Any:
    """CUDA's runtime, or HIP's."""
    return torch.cuda.cudart()


def _pin(memory: Tensor) -> None:
    error = int(_driver().cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE))
    if error:
        raise RunFailure(
            f"{memory.nbytes / 1e9:.1f} GB of CPU memory for the copy that a checkpoint is written from cannot be "
            f"pinned (CUDA error {error}): set checkpoint.asynchronous: false, which needs none"
        )
