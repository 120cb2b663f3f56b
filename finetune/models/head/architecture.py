"""What an architecture does between its base model, its head and its logits: found by running its own forward with the
base model and the head replaced by known values."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from finetune.models.head.token_loss import LogitMap

_KEPT = (0, 2)  # of three positions


class UnknownHead(Exception):
    """Why losses cannot be made in this architecture's head."""


class _Outputs:
    """Of a base model: the hidden states, and None for all else that a forward may pass on."""

    def __init__(self, hidden: Tensor):
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Base(nn.Module):
    def __init__(self, hidden: Tensor):
        super().__init__()
        self.hidden = hidden

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _Outputs(self.hidden)


class _Head(nn.Module):
    def __init__(self, output: Tensor):
        super().__init__()
        self.output, self.seen = output, None
        self.weight = torch.empty(0)  # some cast to its type

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen = hidden
        return self.output.clone()


def logit_map(model: PreTrainedModel) -> LogitMap:
    """From the head's output to the logits of this model; nothing is computed with its weights, which may be `meta`.

    Raises UnknownHead with the reason where that is not a scale and a soft cap, or where what reaches the head is not
    the base model's last hidden state.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    heads = [key for key, module in model.named_children() if module is model.get_output_embeddings()]
    if not heads or model.base_model_prefix not in model._modules:
        raise UnknownHead(f"{name} does not hold a base model and a head side by side")
    hidden = torch.linspace(-1, 1, 3 * config.hidden_size).reshape(1, 3, -1)
    raw = torch.linspace(-60, 60, len(_KEPT) * config.vocab_size).reshape(1, len(_KEPT), -1)
    probe, head = copy.copy(model), _Head(raw)
    probe._modules = {**model._modules, model.base_model_prefix: _Base(hidden), heads[0]: head}
    try:
        with torch.no_grad():
            output = type(model).forward(probe, input_ids=torch.zeros(1, 3).long(), logits_to_keep=torch.tensor(_KEPT))
            logits = output.logits
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise UnknownHead(f"the forward of {name} does not run in parts ({type(error).__name__})") from error
    if head.seen is None or not torch.equal(head.seen, hidden[:, _KEPT]):
        raise UnknownHead(f"{name} changes the hidden states before its head")
    ratio = (logits.flatten()[-1] / raw.flatten()[-1]).item()
    for found in (LogitMap(), LogitMap(scale=ratio), LogitMap(cap=getattr(config, "final_logit_softcapping", None))):
        if logits.shape == raw.shape and torch.allclose(logits, found(raw), rtol=1e-6, atol=1e-6):
            return found
    raise UnknownHead(f"what {name} does to its logits is neither a scale nor a soft cap")
