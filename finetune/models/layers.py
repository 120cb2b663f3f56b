"""What is done to each decoder layer: recomputation in the backward."""

from __future__ import annotations

from typing import Any


def recompute_activations(model: Any) -> None:
    """Keep only each layer's input and run the layer again in the backward (Chen et al. 2016,
    https://arxiv.org/abs/1604.06174). Non-reentrant: it works with frozen inputs and under every backend, and draws
    the same dropout again."""
    arguments = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # transformers >= 5.20; the older name warns there
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=arguments)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
