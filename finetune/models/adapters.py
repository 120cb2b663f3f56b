"""LoRA adapters through peft, which is imported where there are any: it takes a second, for it imports bitsandbytes."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from finetune.errors import UserError
from finetune.models.config import first_line
from finetune.models.wrapped import has_scores
from finetune.recipe.schema import Lora


def add_adapters(model: Any, lora: Lora, dtype: torch.dtype) -> Any:
    """Returns the model with its weights frozen and adapters in `dtype` that train.

    Raises UserError where `lora.targets` or `lora.modules_to_save` name nothing of the model, and where DoRA would
    divide by zero.
    """
    from peft import LoraConfig, get_peft_model

    _check_names(model, lora)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]  (peft says int; it only divides)
        lora_dropout=lora.dropout,
        target_modules=lora.targets if isinstance(lora.targets, str) else list(lora.targets),
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        modules_to_save=list(lora.modules_to_save) if lora.modules_to_save else None,
        ensure_weight_tying=bool(lora.modules_to_save) and bool(model.config.tie_word_embeddings),
        task_type="SEQ_CLS" if has_scores(model) else "CAUSAL_LM",  # the former trains the head of scores in full
    )
    try:
        with warnings.catch_warnings():
            # For patterns that peft 0.21 itself adds for stacked experts, and that do match: it looks for modules only.
            warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
            adapted = get_peft_model(model, config)
    except ValueError as error:
        raise UserError(f"lora: {first_line(error)}") from error
    _rename_tied(adapted.get_base_model())
    _check_magnitudes(adapted.get_base_model())
    for parameter in adapted.parameters():
        if parameter.requires_grad and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
    return adapted


def keep_input_types(model: Any) -> None:
    """Let adapters take their inputs as they come, for a forward under autocast.

    peft casts each input to the adapter's fp32, and autocast casts it back for the product: two passes over the hidden
    states for each adapted module, and a copy of them in the graph. Only where nothing but that product reads the
    input: dropout and DoRA compute in the type of their input.
    """
    if not hasattr(model, "peft_config"):
        return
    for module in model.modules():
        if not getattr(module, "lora_A", None) or module.lora_variant:
            continue
        if all(isinstance(dropout, torch.nn.Identity) for dropout in module.lora_dropout.values()):
            module.cast_input_dtype_enabled = False


def _rename_tied(model: Any) -> None:
    """Tell `tie_weights`, which FSDP2's wrapping calls again, where a tied weight lies that has an adapter now."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}

    def renamed(name: str) -> str:
        module, _, weight = name.rpartition(".")
        below = f"{module}.base_layer.{weight}"
        return below if below in names else name

    tied = model._tied_weights_keys
    if isinstance(tied, dict):  # a model's own code may have the list of older versions
        model._tied_weights_keys = {renamed(target): renamed(source) for target, source in tied.items()}


def _check_magnitudes(model: Any) -> None:
    """Raises UserError where DoRA would divide by zero, the norm of an output's weights: with tied weights the head has
    a padding token's embedding, which is zero, and every loss would be NaN."""
    for name, module in model.named_modules():
        for magnitude in getattr(module, "lora_magnitude_vector", {}).values():
            if magnitude.weight.is_meta:  # rank 0 has the values, and reports it
                continue
            if zeros := (magnitude.weight.flatten() == 0).nonzero().flatten().tolist():
                which = ", ".join(map(str, zeros[:5])) + (", ..." if len(zeros) > 5 else "")
                raise UserError(
                    f"lora.dora: all weights of {len(zeros):,} outputs of {name} are zero ({which}), and DoRA divides "
                    f"by their length: leave {name.rpartition('.')[2]!r} out of lora.targets, or set `lora.dora: false`"
                )


def _check_names(model: Any, lora: Lora) -> None:
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    paths = [name for name, _ in model.named_modules()]
    wanted = [("lora.targets", name) for name in (() if isinstance(lora.targets, str) else lora.targets)]
    wanted += [("lora.modules_to_save", name) for name in lora.modules_to_save or ()]
    for key, name in wanted:
        if not any(path == name or path.endswith(f".{name}") for path in paths):
            linear = sorted({n.rpartition(".")[2] for n, m in model.named_modules() if "Linear" in type(m).__name__})
            raise UserError(
                f"{key}: the model has no module {name!r}; its linear ones are {', '.join(linear or names)}"
            )
