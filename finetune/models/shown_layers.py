"""A base model that runs other layers than its own for a while, with the masks and rotations that it makes for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


class PassOn(nn.Module):
    """In place of a layer or a norm."""

    def forward(self, hidden: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        return hidden


@contextlib.contextmanager
def showing(base: Any, modules: dict[str, nn.Module]) -> Iterator[None]:
    """Puts modules in the place of a base model's children of these names."""
    children = base._modules  # as `setattr`, without its hooks, in each forward
    before = {name: children[name] for name in modules}
    children.update(modules)
    try:
        yield
    finally:
        children.update(before)
