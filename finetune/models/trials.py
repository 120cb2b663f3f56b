"""Trials of tiny models: random weights, no trace after a trial, errors of the models' own code, outcomes remembered.

A trial computes a tiny copy of a model (`models.tiny_config`) in two ways on the CPU in fp32, and compares them:
documents packed and alone, with and without images (`models.attention.isolation`), layers with and without replaced
formulas (`models.fused_layers`), stages and the whole (`engine.stage_trial`).
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import PretrainedConfig
from transformers.integrations import deepspeed, hub_kernels
from transformers.utils import logging

from finetune.data.checksums import Damaged, sealed, unsealed
from finetune.data.sources.files import cache_root
from finetune.models.patches import attribute_set
from finetune.utils import write_atomically

_WITHOUT_EFFECT = ("_name_or_path", "transformers_version", "architectures", "dtype", "use_cache", "name_or_path")


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


def not_tried(error: BaseException) -> str:
    """Returns the reason for a copy that cannot be created, or whose own code fails."""
    return f"a tiny copy of the model could not be tried: {failure_text(error)}"


def tiny_problem(
    config: PretrainedConfig, shrink: Callable[[Any], Any], name: str, differ: Callable[[Any], str | None]
) -> str | None:
    """Returns why a tiny copy of a model is not the same in two ways, or could not be tried; None if it is the same.

    shrink: config -> that of the copy; differ: the copy's config -> the reason. A trial that has passed is not repeated
    with the same config, versions and code; one that has not may pass in another environment.
    """
    try:
        tiny = shrink(config)
        return cached(tiny, name, lambda: {"why": differ(tiny)}, may_keep=lambda outcome: outcome["why"] is None)["why"]
    except FAILURES as error:
        return not_tried(error)


def cached(
    tiny: PretrainedConfig,
    name: str | None,  # of the trial
    trial: Callable[[], dict[str, Any]],
    may_keep: Callable[[dict[str, Any]], bool] = lambda outcome: True,
) -> dict[str, Any]:
    """Returns the outcome of a trial from the cache, under all that it depends on: the tiny config, which is a function
    of the model's own, versions and our code. A trial that fails raises one of `FAILURES`, and leaves nothing."""
    models = Path(__file__).parent
    data = models.parent / "data"
    code = [*sorted((models / "attention").glob("*.py")), data / "batch.py", data / "media" / "family_table.py"]
    code += [data / "media" / "clip_shapes.py"]
    code += [
        models / f"{file}.py" for file in ("clips_alone", "fused_layers", "patches", "tiny_config", "towers", "trials")
    ]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in code)).hexdigest()
    settings = sorted((key, repr(value)) for key, value in tiny.to_dict().items() if key not in _WITHOUT_EFFECT)
    depends_on = (type(tiny).__qualname__, name, torch.__version__, transformers.__version__, digest, settings)
    path = cache_root() / "attention" / f"{hashlib.sha256(repr(depends_on).encode()).hexdigest()[:32]}.json"
    try:
        return unsealed(path)
    except (OSError, Damaged):
        with quietly():
            outcome = trial()
    if may_keep(outcome):
        with suppress(OSError):  # if the folder cannot be written, the next run tries again
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, sealed(outcome), shared=True)
    return outcome
