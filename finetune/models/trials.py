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


class NoMixers(Exception):
    """Documents see each other in a way that no module can be blamed for, or in one that takes the model as a whole."""


FAILURES = (  # of a model's own code, with a config or arguments that it does not know
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NoMixers,
    NotImplementedError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)


@contextmanager
def quietly() -> Iterator[None]:
    """Restores random numbers, warnings and the log after a trial."""
    verbosity = logging.get_verbosity()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), _without_sharding(), without_gpu_kernels():
        warnings.simplefilter("ignore")
        logging.set_verbosity_error()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)


@contextmanager
def _without_sharding() -> Iterator[None]:
    """Disables ZeRO-3's sharding: transformers would shard the tiny model over the ranks when it is built."""
    config = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = config


@contextmanager
def without_gpu_kernels() -> Iterator[None]:
    """Uses the plain torch versions of code that installed packages (fla, causal_conv1d, mamba_ssm) run on GPUs alone,
    as transformers does in an export."""
    module: Any = hub_kernels
    before = getattr(module, "is_torchdynamo_exporting", None)
    module.is_torchdynamo_exporting = lambda: True
    try:
        yield
    finally:
        module.is_torchdynamo_exporting = before


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
