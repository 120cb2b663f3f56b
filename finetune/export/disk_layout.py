"""From a model's tensors in memory to those of a checkpoint folder.

transformers may hold weights under other names and in other shapes than checkpoints do. Of Mixtral's experts, for
example, it makes one tensor a layer:

    model.layers.0.mlp.experts.gate_up_proj (8, 28672, 4096)
    model.layers.0.block_sparse_moe.experts.0.w1.weight (14336, 4096), ...experts.0.w3.weight, ...experts.1.w1.weight

Its own function turns them back, as in its `save_pretrained`; here it gets as few tensors at a time as it can do with.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

log = logging.getLogger(__name__)

State = dict[str, Tensor]

_LAYER = re.compile(r".*?\.\d+(?=\.)")  # model.layers.0 of model.layers.0.mlp.experts.0.weight


def as_transformers_knows_it(model: Any) -> Any:
    """The model under its own class, sharing everything.

    FSDP2 has put a class of torch's before it; transformers finds architecture, conversions and custom code by class.
    """
    own: Any = next(cls for cls in type(model).__mro__ if not cls.__module__.startswith("torch."))
    if own is type(model):
        return model
    same = own.__new__(own)
    same.__dict__.update(model.__dict__)
    return same


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights take the result's type; counters and masks keep their own."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


class DiskLayout:
    """Tensors come in as memory has them and leave as the folder has them.

    Holds one group at most: a single tensor for most architectures, a decoder layer where transformers needs several
    tensors to make one.
    """

    def __init__(self, model: Any, in_memory: State):
        """in_memory: every tensor that will come, in order; values are not needed (device `meta`)."""
        self._model = model
        self.expected = _reverted(model, in_memory)  # what the folder must hold
        self._last_of_group = {group[-1] for group in _groups(model, in_memory, self.expected)}
        self._group: State = {}

    def convert(self, name: str, tensor: Tensor) -> State:
        """The folder's tensors that this one completes; none until its group is whole."""
        self._group[name] = tensor
        if name not in self._last_of_group:
            return {}
        group, self._group = self._group, {}
        return _reverted(self._model, group)


def _reverted(model: Any, state: State) -> State:
    ignored = set(model._keys_to_ignore_on_save or ())
    return revert_weight_conversion(model, {name: t for name, t in state.items() if name not in ignored})


def _groups(model: Any, state: State, expected: State) -> list[list[str]]:
    """The smallest groups, in order, that one by one give what all at once would."""
    for key in (_itself, _layer):
        groups = list(_runs(state, key))
        if _same([_reverted(model, {name: state[name] for name in group}) for group in groups], expected):
            return groups
    log.warning("%s needs the whole model in memory of rank 0 to be saved", type(model).__name__)
    return [list(state)]


def _itself(name: str) -> str:
    return name


def _layer(name: str) -> str:
    found = _LAYER.match(name)
    return found.group() if found else name


def _runs(state: State, key: Callable[[str], str]) -> Iterator[list[str]]:
    """Neighbours with the same key; modules list their tensors together."""
    run: list[str] = []
    for name in state:
        if run and key(name) != key(run[-1]):
            yield run
            run = []
        run.append(name)
    yield run


def _same(parts: list[State], whole: State) -> bool:
    """Whether the parts make up the whole, each name from one of them."""
    made = {name: tensor for part in parts for name, tensor in part.items()}
    return sum(map(len, parts)) == len(whole) and _shapes(made) == _shapes(whole)


def _shapes(state: State) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in state.items()}
