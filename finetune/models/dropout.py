"""Whether a model drops at random in training."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PretrainedConfig

from finetune.errors import UserError

_OF_OTHER_HEADS = ("classifier", "summary")


def check_nothing_random(config: PretrainedConfig) -> None:
    """For `batch.rows_per_device: auto`: each forward draws anew, so its number of rows would move the losses.

    Raises UserError.
    """
    for name, value in drops(config):
        raise UserError(
            "batch.rows_per_device: dropout is drawn for each forward, so under `auto` losses would depend on the "
            f"hardware (the model's `{name}` is {value}): give a number"
        )


def drops(config: PretrainedConfig) -> Iterator[tuple[str, float]]:
    """Settings by which a model drops at random."""
    for name, value in config.to_dict().items():
        if not isinstance(value, float) or value <= 0 or name.startswith(_OF_OTHER_HEADS):
            continue
        if "drop" in name or "jitter" in name:
            yield name, value
