"""Properties of a parameter, other than its shape, that an optimizer needs, by the names of the model itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from finetune.models.towers import tower_modules
from finetune.models.wrapped import output_head


@dataclass(frozen=True)
class ParameterRoles:
    """Names of parameters, as `named_parameters()` of transformers' or peft's model has them."""

    # Rows that tokens or positions look up, and the head: a matrix by shape, but not a map of hidden states.
    tables: frozenset[str] = frozenset()
    # Tower and projector: a step without an image does not use them.
    of_media: frozenset[str] = frozenset()


def parameter_roles(model: Any) -> ParameterRoles:
    """Returns the roles of a model's parameters. A tied head has the name of the embedding."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    # With adapters or a trained copy, these are peft's modules around an embedding or a linear layer.
    tables += [module for module in (model.get_input_embeddings(), output_head(model)) if module is not None]
    in_tables = {id(parameter) for module in tables for parameter in module.parameters()}
    of_media = {id(parameter) for module in tower_modules(model) for parameter in module.parameters()}
    named = list(model.named_parameters(remove_duplicate=False))
    return ParameterRoles(
        # A tower's patches and positions are embeddings by name alone: plain parameters, convolutions.
        tables=frozenset(name for name, p in named if id(p) in in_tables or "embed" in name),
        of_media=frozenset(name for name, p in named if id(p) in of_media),
    )
