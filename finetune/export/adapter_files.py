"""An adapter's files, checked against each other and against the model that it is put on."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from finetune.errors import UserError
from finetune.export.trained import ADAPTER, Trained
from finetune.models.damage import ADAPTER_CONFIG, short

# What peft raises for settings of another type, targets that are not there and weights of other shapes.
_REFUSED = (ValueError, TypeError, LookupError, AttributeError)


def read_lora(folder: Path) -> Any:
    """Returns peft's config of an adapter. Raises UserError if it is damaged or of another kind than LoRA."""
    from peft import PeftConfig

    with FittingAdapter(folder):
        config = PeftConfig.from_pretrained(str(folder))
    if config.peft_type != "LORA":
        raise UserError(f"{folder / ADAPTER_CONFIG}: only LoRA is loaded, not {config.peft_type}")
    rank: Any = config
    if type(rank.r) is not int or rank.r < 1 or not isinstance(rank.target_modules, str | set):
        raise UserError(f"{folder / ADAPTER_CONFIG}: `r` is no rank, or `target_modules` no names; restore the file")
    return config


class FittingAdapter(contextlib.AbstractContextManager[None]):
    """Turns what peft raises for an adapter that does not fit its base, or whose files differ, into a UserError."""

    def __init__(self, folder: Path):
        self._folder = folder

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, _REFUSED) or (isinstance(error, RuntimeError) and "size mismatch" in str(error)):
            raise UserError(
                f"{self._folder}: the adapter does not fit its settings or its base: {short(error)}; restore its files"
            ) from error


def check_shapes(trained: Trained, adapted: Any) -> None:
    """Raises UserError for weights of an adapter that have other shapes than its settings make on this base.

    adapted: peft's model, of shapes. Trained tables may have more rows than the base's: those of added tokens.
    """
    tables = [adapted.get_input_embeddings(), adapted.get_output_embeddings()]
    in_tables = {id(p) for table in tables if table is not None for p in table.parameters()}
    for name, parameter in adapted.named_parameters():
        if (key := trained.key(name)) is None:
            continue
        made, shape = tuple(parameter.shape), tuple(trained.shapes[key].shape)
        grown = id(parameter) in in_tables and name.endswith(".weight") and shape[0] > made[0]
        if shape[grown:] != made[grown:]:
            raise UserError(
                f"{trained.folder / ADAPTER}: {key} has the shape {list(shape)}, but {ADAPTER_CONFIG} and the base "
                f"make {list(made)}: the files are not of one run, or the base is another; restore them"
            )
