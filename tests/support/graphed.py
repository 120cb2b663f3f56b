"""CUDA graphs without CUDA: a run's own parts on the CPU, with the attention of a GPU, where a replay runs the captured
functions again on the graph's buffers. What it finds: buffers that are not filled, gradients that are not where they
are added to, shapes that should have fallen back, order. What it cannot find: what CUDA refuses to capture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from finetune.models import casts

H100 = (9, 0)


_OLD = "of an earlier forward"


class Again:
    """In place of `CudaRecorder`. A capture computes nothing: results have values after the first replay, and sums are
    as they were. What it starts is fixed: a replay runs under the autocast of the capture."""

    def __init__(self, model: Any):
        self._model = model
        self.captures = self.replays = 0

    def mark_nodes(self) -> None:
        for parameter in self._trained():
            torch.autograd.graph.get_gradient_edge(parameter).node.metadata[_OLD] = True

    def _trained(self) -> list[Tensor]:
        return [parameter for parameter in self._model.parameters() if parameter.requires_grad]

    def warm_up(self, run: Callable[[], object]) -> None:
        """A node that adds up a gradient belongs to the stream of the forward that made it, as long as its graph
        lives."""
        nodes = [torch.autograd.graph.get_gradient_edge(parameter).node for parameter in self._trained()]
        assert not any(_OLD in node.metadata for node in nodes), "the graph of an earlier forward lives"
        del nodes
        run()

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        before = [(p.grad, p.grad.clone()) for p in self._model.parameters() if p.grad is not None]
        casts_before = dict(casts._kept or {})
        autocast = torch.autocast("cpu", torch.get_autocast_dtype("cpu"), enabled=torch.is_autocast_enabled("cpu"))
        result = run()
        assert (casts._kept or {}) == casts_before, "a later forward would use casts that have no values"
        for gradient, values in before:
            gradient.copy_(values)
        static = [torch.full_like(one, torch.nan) for one in tensors(result)]
        self.captures += 1

        def replay() -> None:
            with torch.enable_grad(), autocast:
                again = run()
            for buffer, value in zip(static, tensors(again), strict=True):
                buffer.copy_(value)
            self.replays += 1

        return replay, static[0] if isinstance(result, Tensor) else static


def tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else result


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    key_ends: Tensor,
    longest: int,
    longest_keys: int,
    **how: Any,
) -> Tensor:
    """torch's kernel, (T, H, D) -> (T, H, D), as `documents` computes it; a document may be empty."""
    assert ends is key_ends
    assert longest == longest_keys >= max(b - a for a, b in pairwise(ends.tolist()))
    pieces = []
    for a, b in pairwise(ends.tolist()):
        if a < b:
            q, k, v = (tensor[a:b].transpose(0, 1)[None] for tensor in (query, key, value))
            grouped = q.shape[1] != k.shape[1]
            piece = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=how["scale"], enable_gqa=grouped
            )
            pieces.append(piece.transpose(1, 2))
    return torch.cat(pieces, dim=1)[0]


class Trained(NamedTuple):
    losses: list[float]
    norms: list[float | None]
    weights: dict[str, Tensor]
    shares: list[float]  # of replays, by step
    captures: int


def trained(
    recipe_file: str,
    overrides: list[str],
    graphed: bool,
    padded: Literal["some"] | bool = True,
    attention: str = "varlen",
    config_file: str | None = None,
) -> Trained:
    """Runs all steps with the trainer's parts, on this rank; on a GPU with its own graphs and kernels.

    padded: rows of training, some: those of every second micro-batch; attention: `documents`, or `varlen`, in whose
    place `varlen_attn` has to be put.
    """
    import trainers

    from finetune.engine.graphs import CudaRecorder, Graphs
    from finetune.models.attention import Kernels, attention_for
    from finetune.models.attention.kernels import prepare_varlen
    from finetune.models.casts import cast_once
    from finetune.models.parameter_roles import parameter_roles
    from finetune.objectives.forward import ForwardPass
    from finetune.training import parts
    from finetune.training.auto_batch import RowsPerDevice
    from finetune.training.optim import build_optimizers

    prepared = trainers.prepared_run(recipe_file, overrides, config_file)
    recipe = prepared.recipe
    engine = trainers.started_engine(prepared)
    on_gpu = engine.device.type == "cuda"
    choice = attention_for(recipe, prepared.base.config, engine.device.type)
    if attention == "varlen" and not on_gpu:
        kernels = Kernels(H100, flash_kernels=True)
        choice = attention_for(recipe, prepared.base.config, "cuda", kernels)
        choice = replace(choice, prepare=partial(prepare_varlen, device="cpu"))
    model, objective = parts.load(prepared, engine, choice, print)
    engine.keeps_gradients = graphed
    build = partial(build_optimizers, recipe.optimizer, parameter_roles(model.causal_lm))
    engine.wrap(model, build, prepared.micro_batches)
    rows = RowsPerDevice(recipe.batch.rows_per_device, "")
    loaders = parts.Loaders(recipe, prepared.base, engine, rows, choice, None, pads=bool(padded))
    loader = loaders.training(prepared.training.in_order(recipe), 10**6)
    forward, nodes = ForwardPass(choice, objective), Again(model)
    recorder = CudaRecorder() if on_gpu else nodes
    graphs = Graphs(model, loaders.longest, recipe.data.max_length, recorder, print)
    model.graphs = graphs if graphed else None
    losses, norms, shares = [], [], []
    for number in range(recipe.train.max_steps or 0):
        step, total = loader.step(number), []
        if padded == "some":
            step.batches[::2] = replace(loader, padded_to=None).step(number).batches[::2]

        def loss(outputs: Any, batch: Any, step: Any = step, total: list[Tensor] = total) -> Tensor:
            nodes.mark_nodes()
            value = objective.loss(objective.terms(outputs, batch), step.counts)
            total.append(value.detach())
            return value

        step = step.map_tensors(lambda tensor: tensor.to(engine.device))
        engine.prepare_groups(1.0, ())
        with cast_once():
            engine.accumulate(step.batches, forward, loss)
        losses.append(torch.stack(total).sum().item())
        norms.append(engine.step())
        shares.append(graphs.share())
    weights = {name: p.detach().clone() for name, p in model.causal_lm.named_parameters() if p.requires_grad}
    engine.close()
    return Trained(losses, norms, weights, shares, nodes.captures)
