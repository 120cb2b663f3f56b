"""Properties of a parameter, other than its shape, that an optimizer needs, by the names of the model itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from finetune.data.media.family_table import rows_of
from finetune.data.samples import MediaKind
from finetune.models.towers import part_at, tower_modules
from finetune.models.wrapped import output_head
from finetune.utils import unwrap_peft


@dataclass(frozen=True)
class ParameterRoles:
    """Names of parameters, as `named_parameters()` of transformers' or peft's model has them."""

    # Rows that tokens or positions look up, and the head: a matrix by shape, but not a map of hidden states.
    tables: frozenset[str] = frozenset()
    # Of towers and projectors the kinds of their files: a step without any of these does not use them.
    of_media: Mapping[str, tuple[MediaKind, ...]] = field(default_factory=dict)


def parameter_roles(model: Any) -> ParameterRoles:
    """Returns the roles of a model's parameters. A tied head has the name of the embedding."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    # With adapters or a trained copy, these are peft's modules around an embedding or a linear layer.
    tables += [module for module in (model.get_input_embeddings(), output_head(model)) if module is not None]
    in_tables = {id(parameter) for module in tables for parameter in module.parameters()}
    of_media = _kinds_of(model)
    named = list(model.named_parameters(remove_duplicate=False))
    return ParameterRoles(
        # A tower's patches and positions are embeddings by name alone: plain parameters, convolutions.
        tables=frozenset(name for name, p in named if id(p) in in_tables or "embed" in name),
        of_media={name: of_media[id(p)] for name, p in named if id(p) in of_media},
    )


def _kinds_of(model: Any) -> dict[int, tuple[MediaKind, ...]]:
    """Returns the kinds of files of each parameter of towers and projectors, by its `id`."""
    found: dict[int, tuple[MediaKind, ...]] = {
        id(p): () for module in tower_modules(model) for p in module.parameters()
    }
    if found:
        base = unwrap_peft(model).base_model
        for kind, row in rows_of(unwrap_peft(model).config.model_type).items():
            parts = [part for path in (row.tower, *row.projector) if (part := part_at(base, path)) is not None]
            for each in {id(p) for part in parts for p in part.parameters()}:
                found[each] = (*found[each], kind)
    return found
