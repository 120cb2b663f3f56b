"""Generation settings of a base, as transformers writes them: it refuses to save some that it reads."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig

# How a model generates; the other settings belong to one of these ways.
_MODES = ("do_sample", "num_beams", "num_beam_groups", "penalty_alpha")


def valid_generation_config(model: Any) -> tuple[GenerationConfig, list[str]]:
    """Returns a model's generation settings without those that transformers refuses to save beside the others, and
    their names: `temperature` without `do_sample`, as of Vicuna, which `generate` ignores."""
    config = getattr(model, "generation_config", None)
    settings = config.to_diff_dict() if config is not None else {}
    kept: dict[str, Any] = {}
    for name in sorted(settings, key=lambda name: name not in _MODES):
        try:
            GenerationConfig(**kept, **{name: settings[name]}).validate(strict=True)
        except ValueError:
            continue
        kept[name] = settings[name]
    return GenerationConfig(**kept), [name for name in settings if name not in kept]
