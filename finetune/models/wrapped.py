"""The model that a backend wraps: transformers' with its surroundings (autocast, offload of activations, routers); its
forward returns the inputs of an objective.

Letters: T tokens of the flat row, S targets, D hidden size, d sequences.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from finetune.models.activations import ActivationOffload
from finetune.models.head.token_loss import HeadLosses
from finetune.models.moe import Routers
from finetune.models.towers import TowerPart
from finetune.utils import unwrap_peft

SCORE = "score"  # transformers' name of the head of a sequence classification model


class Outputs(NamedTuple):
    """Results of a forward that an objective may use."""

    total: Tensor  # (), weighted sum of the token losses, with a graph; fp32, nats
    token_losses: Tensor  # (S,), of the targets in their order; with a graph if requested
    details: tuple[Tensor, ...] = ()  # (S, ...) each: additional results of a target's loss, without a graph
    router_logits: tuple[Tensor, ...] = ()  # (T, experts) of each layer of a mixture of experts
    scores: Tensor | None = None  # (d, labels) of sequences at their ends, with a graph; fp32; in place of losses
    ahead: HeadLosses | None = None  # (A,) of the targets of a head that predicts ahead


@dataclass(frozen=True)
class CrossEntropyChoice:
    implementation: str  # plain | chunked | torch | liger; none: a reward model or classifier
    reason: str


class WrappedModel(nn.Module):
    """`forward(targets=..., **inputs)` returns `Outputs`; without targets it is the model's own forward."""

    choice: CrossEntropyChoice

    def __init__(
        self,
        model: Any,
        device_type: str = "cpu",
        autocast: torch.dtype | None = None,
        offload: ActivationOffload | None = None,
        routers: Routers | None = None,
        images: TowerPart | None = None,
        kernels: str = "plain",
    ):
        """model: transformers' or peft's; autocast: the compute type, if it is not the parameters'; kernels: those of
        its layers, for people."""
        super().__init__()
        self.kernels = kernels
        self.causal_lm, self._images = model, images
        self._device_type, self._autocast, self._offload, self._routers = device_type, autocast, offload, routers
        self._base_takes = accepted_names(unwrap_peft(model).base_model)
        # Runs the base model in training, given it and its inputs: by CUDA graphs; None: it is called.
        self.graphs: Callable[[Callable[[dict[str, Any]], Tensor], dict[str, Any]], Tensor] | None = None

    @property
    def config(self) -> Any:
        return self.causal_lm.config

    def forward(self, targets: Any = None, **inputs: Any) -> Any:
        images = self._images.forward(self.causal_lm, inputs) if self._images else contextlib.nullcontext()
        with self._surroundings(), images:
            if targets is None:
                return self.causal_lm(**inputs)
            with self._routers.recording() if self._routers else contextlib.nullcontext([]) as logits:
                outputs = self._read(targets, inputs)
            return outputs._replace(router_logits=tuple(logits))

    def train(self, mode: bool = True) -> WrappedModel:
        super().train(mode)
        if self._images is not None:
            self._images.evaluate_frozen()
        return self

    def hidden_states(self, **inputs: Any) -> Tensor:  # (1, T, D)
        """Returns the base model's output, in the surroundings of a forward: the input of the next pipeline stage."""
        with self._surroundings():
            return self._base(inputs)

    def _read(self, targets: Any, inputs: dict[str, Any]) -> Outputs:
        """Returns the outputs that are read at the targets, without the routers' logits."""
        raise NotImplementedError

    def _base(self, inputs: dict[str, Any]) -> Tensor:
        if self.graphs is not None and self.training and torch.is_grad_enabled():
            return self.graphs(self._called_base, inputs)
        return self._called_base(inputs)

    def _called_base(self, inputs: dict[str, Any]) -> Tensor:
        return unwrap_peft(self.causal_lm).base_model(**accepted(inputs, self._base_takes))[0]

    @contextlib.contextmanager
    def _surroundings(self) -> Iterator[None]:
        """Enters autocast and offload. No cache of casts: each weight is used once, and copies would stay until the end
        of the forward."""
        with contextlib.ExitStack() as stack:
            if self._autocast is not None:
                stack.enter_context(torch.autocast(self._device_type, dtype=self._autocast, cache_enabled=False))
            if self._offload is not None and self.training and torch.is_grad_enabled():
                stack.enter_context(self._offload.saved_tensors())
            yield


def accepted_names(module: nn.Module) -> frozenset[str] | None:
    """Returns the arguments of a module's forward; None: it takes any keyword. Some models take no positions."""
    parameters = inspect.signature(module.forward).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return None if takes_any else frozenset(parameters)


def accepted(inputs: dict[str, Any], names: frozenset[str] | None) -> dict[str, Any]:
    return {k: v for k, v in inputs.items() if v is not None and (names is None or k in names)}


def has_scores(model: Any) -> bool:
    """Returns whether a transformers or peft model has a head of scores, in place of an LM head."""
    return hasattr(unwrap_peft(model), SCORE)


def output_head(model: Any) -> Any:
    """Returns the head of scores, or the LM head, with peft's layers around it; None if there is neither."""
    return getattr(unwrap_peft(model), SCORE) if has_scores(model) else unwrap_peft(model).get_output_embeddings()


def trained_head(model: Any) -> nn.Module:
    """Returns the module whose forward gives losses or scores: the head, with its adapters or as their full copy."""
    head = output_head(model)
    return head.modules_to_save[head.active_adapters[0]] if hasattr(head, "modules_to_save") else head
