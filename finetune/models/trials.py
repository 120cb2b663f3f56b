"""Trials of tiny models: the errors of their own code, random weights, and no trace after the trial."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers.integrations import deepspeed, hub_kernels
from transformers.utils import logging

from finetune.models.patches import attribute_set


class NoMixers(Exception):
    """Documents see each other in a way that no module can be blamed for, or in one that takes the model as a whole."""


FAILURES = (  # of a model's own code, with a config or arguments that it does not know
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NotImplementedError, RuntimeError),
    *(TypeError, ValueError, StrictDataclassError, NoMixers),
)


def failure_text(error: BaseException) -> str:
    """Returns the class of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


@contextmanager
def quietly() -> Iterator[None]:
    """Restores random numbers, warnings and the log after a trial; leaves ZeRO-3 and GPU kernels out of it."""
    verbosity = logging.get_verbosity()
    no_zero_3 = attribute_set(deepspeed, "_hf_deepspeed_config_weak_ref", None, "no ZeRO-3")
    no_kernels = attribute_set(hub_kernels, "is_torchdynamo_exporting", lambda: True, "no GPU kernels")
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), no_zero_3, no_kernels:
        warnings.simplefilter("ignore")
        logging.set_verbosity_error()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)


def randomize(model: Any) -> None:
    """Set random weights, in place: with those of a new model, attention is near a mean and an error near rounding."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32).to(parameter.dtype)
            if parameter.dim() < 2:
                parameter.add_(noise * 0.1)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
