"""The cache of a pipeline stage: keys, values and states of the stage's own layers."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache

from finetune.engine.stages import Layout


def stage_cache(config: Any, layout: Layout, stage: int) -> DynamicCache:
    """Returns an empty cache for the layers of one stage. config: of transformers.

    A base model sizes masks by the first layer of each kind (`get_mask_sizes` in transformers' cache_utils.py), which
    may lie in another stage. So each other layer's place holds the stage's own first layer of the same kind, which
    has seen as many tokens; if the stage has none of a kind, it reads no mask of it.
    """
    cache, layers = DynamicCache(config=config), layout.layers(stage)
    each = len(cache.layers) // layout.bounds[-1]  # caches of a layer: LongCat's have two attentions
    mine = range(layers.start * each, layers.stop * each)
    own = {type(cache.layers[i]): cache.layers[i] for i in reversed(mine)}
    cache.layers = [layer if i in mine else own.get(type(layer), layer) for i, layer in enumerate(cache.layers)]
    return cache
