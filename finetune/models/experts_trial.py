"""Chooses how stacked experts are computed, by a trial on a tiny layer of them, on the run's device and in its type.

    grouped_mm      all experts in one product (transformers' default); adapters on them likewise (grouped_experts.py)
    eager           one expert after the other: if the trial shows that grouped products are not the same, or fail

The layer has the class, switches and activation of the model's own, small random weights, and an expert that no token
chose, whose gradient is zero: torch's grouped product once had another one there
(https://github.com/pytorch/pytorch/issues/172439). Both ways are compared with one expert after the other in fp64.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from finetune.models.grouped_experts import Adapter, adapted_experts
from finetune.models.moe import WithWeights, adapters_of, group_adapters, stacked_experts, unpack_experts
from finetune.models.trials import FAILURES, failure_text
from finetune.utils import full_shape, unwrap_peft

_EXPERTS, _IDLE, _TOKENS, _TOP_K, _RANK = 4, 1, 24, 2, 3
_HIDDEN, _INNER = 32, 48  # sizes of the tiny layer
_TIMES = 4.0  # as large may an error be as that of one expert after the other in the same type, and two roundings more
_ALIGNMENT = 16  # bytes of a stride in torch's kernels for GPUs


def choose_experts(
    model: nn.Module,
    kernels: Literal["auto", "plain", "liger"],
    device: torch.device,
    dtype: torch.dtype,
    *,
    device_type: str,
    may_group_adapters: bool,
) -> str | None:
    """Set the implementation of a model's experts, in place; returns it with the reason, None if it has none to choose.

    device, dtype: of the trial, in which they compute; device_type: of the run, if `device` is that of a plan.
    may_group_adapters: see `may_add_to_products`.
    """
    if unpack_experts(model):
        return "experts one by one, each unpacked for its product"
    layers = {name: one for name, one in stacked_experts(model).items() if hasattr(one, "is_transposed")}
    if not layers:
        return None
    if kernels == "plain":
        return "experts by transformers' default (asked for in the recipe)"
    name, experts = next(iter(layers.items()))
    adapted = bool(adapters_of(model, name))
    groups = adapted and may_group_adapters
    trained = any(weight.requires_grad for weight in experts.parameters()) or (adapted and not groups)
    try:
        if device_type == "cuda" and (why := alignment_problem(experts, dtype)) is not None:
            why_not_adapted = why
        else:
            why, why_not_adapted = verdict(experts, device, dtype, trained, groups)
    except FAILURES as error:  # in the plainest way
        return f"experts by transformers' default (a tiny layer could not be tried: {failure_text(error)})"
    if why is not None:
        unwrap_peft(model).set_experts_implementation("eager")
        return f"experts one by one ({why})"
    if not groups:
        return "experts as grouped products (as one by one, in a trial)"
    if why_not_adapted is not None:
        return f"experts as grouped products, their adapters by peft ({why_not_adapted})"
    group_adapters(model)
    return "experts and their adapters as grouped products (as one by one, in a trial)"


def alignment_problem(experts: nn.Module, dtype: torch.dtype) -> str | None:
    """Returns why torch's grouped products do not take the sizes of these weights on a GPU; None if they do."""
    sizes = [size for weight in experts.parameters(recurse=False) for size in full_shape(weight)[1:]]
    if all(size * dtype.itemsize % _ALIGNMENT == 0 for size in sizes):
        return None
    return f"sizes are no multiples of {_ALIGNMENT} bytes, which grouped products need"


def verdict(
    experts: Any, device: torch.device, dtype: torch.dtype, trained: bool, adapted: bool
) -> tuple[str | None, str | None]:
    """Returns why grouped products are not the same, and those of adapters; None if they are. trained: weights have
    gradients. Raises the error of one expert after the other, if that fails."""
    trial = _TinyExperts(experts, device, dtype)
    why = trial.problem("grouped_mm", trained, False)
    return why, trial.problem("adapters", False, True) if adapted and why is None else None


class _TinyExperts:
    """A tiny layer of experts, with inputs."""

    def __init__(self, experts: Any, device: torch.device, dtype: torch.dtype):
        self.experts, self.device, self.dtype = experts, device, dtype
        shapes = {name: tuple(full_shape(weight)) for name, weight in experts.named_parameters(recurse=False)}
        _, *ends = shapes["down_proj"]
        hidden, inner = reversed(ends) if experts.is_transposed else ends
        small = {  # sizes that are equal stay so
            inner: {hidden: _HIDDEN, hidden // 2: _HIDDEN // 2}.get(inner, _INNER)
        }
        small |= {2 * inner: 2 * small[inner], hidden: _HIDDEN}
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

        self.weights = {name: random(_EXPERTS, *(small[n] for n in shape[1:])) for name, shape in shapes.items()}
        others = torch.tensor([expert for expert in range(_EXPERTS) if expert != _IDLE])
        choices = [others[torch.randperm(len(others), generator=generator)][:_TOP_K] for _ in range(_TOKENS)]
        self.index = torch.stack(choices)  # (T, K)
        self.inputs = {"hidden": random(_TOKENS, _HIDDEN) * _HIDDEN**0.5, "routing": random(_TOKENS, _TOP_K)}
        self.halves = {}
        for name in (name for name, weight in self.weights.items() if weight.dim() == 3):
            _, width, height = self.weights[name].shape if experts.is_transposed else self.weights[name].mT.shape
            self.halves |= {f"{name} A": random(_EXPERTS * _RANK, width), f"{name} B": random(height, _RANK * _EXPERTS)}

    def problem(self, implementation: str, trained: bool, adapted: bool) -> str | None:
        exact = self._results("eager", trained, adapted, torch.device("cpu"), torch.float64)
        plain = self._results("eager", trained, adapted, self.device, self.dtype)
        try:
            other = self._results(implementation, trained, adapted, self.device, self.dtype)
        except FAILURES as error:
            return failure_text(error)
        bound = _TIMES * max(_distance(plain[name], exact[name]) for name in exact) + 2 * torch.finfo(self.dtype).eps
        distances = {name: _distance(other[name], exact[name]) for name in exact}
        worst = max(distances, key=lambda name: distances[name])
        if distances[worst] <= bound:
            return None
        return f"in a trial, {worst} differs from one by one by {distances[worst]:.0e}"

    def _results(
        self, implementation: str, trained: bool, adapted: bool, device: torch.device, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Returns the output and the gradients, by name."""

        def leaves(tensors: dict[str, Tensor], needs: bool) -> dict[str, Tensor]:
            return {name: one.to(device, dtype).clone().requires_grad_(needs) for name, one in tensors.items()}

        weights, halves, inputs = leaves(self.weights, trained), leaves(self.halves, adapted), leaves(self.inputs, True)
        routed = (inputs["hidden"], self.index.to(device), inputs["routing"])
        adapters = {
            name: Adapter(halves[f"{name} A"], halves[f"{name} B"], 2.0, _EXPERTS)
            for name in (weights if adapted else ())
            if f"{name} A" in halves
        }
        if implementation == "adapters":
            output = adapted_experts(self.experts, weights, adapters, *routed)
        else:
            whole = {}  # W + s B A of each expert
            for name, (down, up, scaling, *_) in adapters.items():
                a, b = down.view(_EXPERTS, _RANK, -1), up.view(len(up), _RANK, _EXPERTS).permute(2, 0, 1)
                delta = a.mT @ b.mT if self.experts.is_transposed else b @ a
                whole[name] = weights[name] + scaling * delta
            config = SimpleNamespace(_experts_implementation=implementation)
            layer = WithWeights(self.experts, {**weights, **whole}, config=config)
            output = type(self.experts).forward(layer, *routed)
        # Memory that a kernel takes for a gradient, and leaves as it was, is not zero.
        stale = [torch.full_like(one, float("nan")) for one in (*weights.values(), *halves.values())]
        del stale
        output.backward(torch.linspace(-1, 1, output.numel()).view(output.shape).to(output))
        named = {**inputs, **(weights if trained else {}), **(halves if adapted else {})}
        gradients = {f"the gradient of {name}": one.grad for name, one in named.items()}
        results = {"the output": output.detach(), **gradients}
        return {name: torch.zeros(1) if one is None else one.cpu().double() for name, one in results.items()}


def _distance(other: Tensor, exact: Tensor) -> float:
    distance = ((other - exact).norm() / exact.norm().clamp_min(1e-30)).item()
    return float("inf") if distance != distance else distance
