"""Costs of `engine/ddp.py`: every rank has all weights, and gradients are summed in permanent buckets."""

from __future__ import annotations

from collections.abc import Iterator

from finetune.engine.costs.common import Costs, ModelSize, Transfer


class ReplicatedCosts(Costs):
    def gradients_there(self, micro_batches: int) -> bool:
        return not self.recipe.optimizer.in_backward and (self.launch.processes > 1 or micro_batches > 1)

    def begins_with_gradients(self, micro_batches: int) -> bool:
        return self.gradients_there(micro_batches)

    def transfers_of_weights(self, model: ModelSize, micro_batches: int) -> Iterator[Transfer]:
        yield from self.replicas(model)
