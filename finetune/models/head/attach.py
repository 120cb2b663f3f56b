"""Losses instead of logits out of a model's own forward.

The forward of the causal model and that of its head each learn one more argument. Without `targets` both are what they
were; with them the base model runs, the supervised positions go to the head, and the head, inside its own forward,
gives losses. So whatever a backend does around these forwards to have the weights there (FSDP2 around the model, ZeRO-3
around every module, DDP around neither) is done once for all chunks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from finetune.models.head.architecture import Unknown, logit_map
from finetune.models.head.choice import CrossEntropyChoice, choose_cross_entropy
from finetune.models.head.chunked import Work, linear_losses, module_losses, rows_at_once
from finetune.models.head.formula import Formula, LogitMap, TokenLosses, at_least_fp32, token_losses
from finetune.models.head.fused import liger_losses, torch_losses

_OF_A_MATRIX = {"chunked": linear_losses, "torch": torch_losses, "liger": liger_losses}


@dataclass(frozen=True)
class LossHead:
    """How a model's losses are asked for."""

    choice: CrossEntropyChoice
    formula: Formula
    unasked: dict[str, bool]  # arguments of the model's forward: no balance loss of its own, which nothing reads here

    def for_evaluation(self) -> LossHead:
        """Without what only training adds: the negative log-likelihood alone, comparable between runs."""
        return replace(self, formula=Formula())

    def losses(
        self,
        model: Callable[..., Any],
        arguments: dict[str, Any],  # of the model's forward
        positions: Tensor,  # (S,) in the row
        targets: Tensor,  # (S,) the next token of each
    ) -> TokenLosses:
        if self.choice.implementation != "plain":
            return model(**arguments, logits_to_keep=positions, targets=targets, formula=self.formula)
        logits = at_least_fp32(model(**arguments, **self.unasked, logits_to_keep=positions).logits[0])  # (S, V)
        each = token_losses(logits, targets, self.formula)
        return TokenLosses(each.sum(), each.detach())


def attach_head(model: Any, asked: str, formula: Formula, device: str) -> LossHead:
    """Choose an implementation and let the model's forward give losses by it. To be called once, before an engine wraps
    the model. Raises UserError where the recipe asks for one that cannot be."""
    causal: Any = (
        model.get_base_model() if hasattr(model, "peft_config") else model
    )  # peft is imported only for adapters
    module = loss_module(causal)
    found = _found_map(causal)
    vocabulary = causal.config.get_text_config().vocab_size
    is_matrix = type(module) is nn.Linear
    choice = choose_cross_entropy(asked, found, is_matrix, vocabulary, device)
    if isinstance(found, LogitMap) and choice.implementation != "plain":
        _teach_head(module, choice.implementation, found, rows_at_once(vocabulary, device))
        _teach_model(causal)
    balances = getattr(causal.config.get_text_config(), "output_router_logits", False)
    return LossHead(choice, formula, {"output_router_logits": False} if balances else {})


def loss_module(model: Any) -> nn.Module:
    """The module whose forward gives the losses: the head, with its adapters if it has any."""
    head = model.get_output_embeddings()
    return head.modules_to_save[head.active_adapters[0]] if hasattr(head, "modules_to_save") else head


def _found_map(causal: Any) -> LogitMap | Unknown:
    try:
        return logit_map(causal)
    except Unknown as why:
        return why


def _teach_model(causal: Any) -> None:
    original = causal.forward
    takes = inspect.signature(causal.base_model.forward).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in takes.values())

    @functools.wraps(original)  # generate looks at the signature
    def forward(*args: Any, targets: Tensor | None = None, formula: Formula | None = None, **kwargs: Any) -> Any:
        if targets is None:
            return original(*args, **kwargs)
        positions = kwargs.pop("logits_to_keep")
        given = {
            name: value
            for name, value in kwargs.items()
            if value is not None and (takes_all or name in takes)  # peft passes on every name; some take no positions
        }
        hidden = causal.base_model(*args, **given)[0][:, positions]
        return causal.get_output_embeddings()(hidden, targets=targets, formula=formula)

    causal.forward = forward


def _teach_head(module: Any, implementation: str, found: LogitMap, rows: int) -> None:
    original = module.forward
    is_matrix = type(module) is nn.Linear

    @functools.wraps(original)
    def forward(
        hidden: Tensor,  # (1, S, D)
        *args: Any,
        targets: Tensor | None = None,
        formula: Formula | None = None,
        **kwargs: Any,
    ) -> Any:
        if targets is None:
            return original(hidden, *args, **kwargs)
        work = Work(targets, formula or Formula(), found, rows)
        if is_matrix:
            return _OF_A_MATRIX[implementation](hidden[0], module.weight, module.bias, work)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        return module_losses(hidden[0], original, trained, work)

    module.forward = forward
