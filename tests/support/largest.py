"""What the operations of a computation give, seen by torch's dispatch."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """The largest tensor that any operation gives, in elements, and the shapes that were added to or made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel, self.operations = 0, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
                self.operations.add(f"{func.__name__} {tuple(tensor.shape)}")
        return result
