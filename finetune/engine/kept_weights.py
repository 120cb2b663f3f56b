"""The trained weights of one moment, kept to run the model with them later: the initial ones, as a reference."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from finetune.engine.base import Engine


class KeptWeights:
    """This rank's part of all trained weights, in host memory, as they are when this is made."""

    def __init__(self, engine: Engine):
        """engine: has wrapped its model."""
        self._engine = engine
        self.weights = [part.view(part.stepped).to("cpu", copy=True) for part in engine.parts(reading=True)]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Context manager in which the model has these weights, between steps. Collective."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Exchanges the model's and the kept weights, so that there is never a third copy of all."""
        for part, kept in zip(self._engine.parts(reading=True), self.weights, strict=True):
            present = part.view(part.stepped)
            others = present.to("cpu", copy=True)
            present.copy_(kept)
            kept.copy_(others)
        self._engine.restored()
