"""Which format a checkpoint is stored in, by its config, and what is refused: before anything but config.json is read.

A format is a class of stored_formats.py, and here a row of `FORMATS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers import PretrainedConfig

from finetune.errors import UserError
from finetune.models.stored_formats import Awq, Fp8Blocks, Gptq, Mxfp4, Nvfp4, PackedInt, StoredFormat

if TYPE_CHECKING:
    from finetune.recipe import Recipe


Settings = dict[str, Any]  # `quantization_config`
Ignored = tuple[str, ...] | None  # see `StoredFormat.ignored`


def stored_settings(config: PretrainedConfig) -> dict[str, Any] | None:
    """Returns `quantization_config` of a checkpoint; None for a plain one."""
    settings: Any = getattr(config, "quantization_config", None)
    return settings if settings is None or isinstance(settings, dict) else settings.to_dict()


def stored_format(config: PretrainedConfig, name: str | None = None) -> StoredFormat | None:
    """Returns the format of a checkpoint; None for a plain one, and for bitsandbytes', which transformers reads. name:
    of the model, for errors. Raises UserError for a format that is not read here."""
    settings = stored_settings(config)
    if settings is None or (method := settings.get("quant_method")) == "bitsandbytes":
        return None
    if not method:
        raise _refused(name, "a format without a name", "Its `quantization_config` has no `quant_method`")
    if (build := FORMATS.get(str(method))) is None:
        others = ", ".join(FORMATS)
        raise _refused(name, str(method), f"Nothing here unpacks it on GPUs and CPUs alike (but {others})")
    ignored = settings.get("modules_to_not_convert", settings.get("ignored_layers"))
    scales = getattr(config, "dtype", None) or torch.bfloat16
    return build(settings, None if ignored is None else tuple(ignored), scales, name)


def _refused(name: str | None, what: str, why: str) -> UserError:
    place = "model.name" if name is None else f"model.name: {name!r}"
    return UserError(f"{place} is stored as {what}. That is not read. {why}. Fix: name a copy in bfloat16")


def _fp8(settings: Settings, ignored: Ignored, _scales: torch.dtype, name: str | None) -> StoredFormat:
    block = settings.get("weight_block_size")
    if block is None:
        raise _refused(name, "fp8 without blocks", "Its config has no `weight_block_size`")
    if settings.get("expert_dtype", "fp8") != "fp8" or settings.get("modules_to_convert"):
        raise _refused(name, "fp8 with other parts in fp4", "Experts or tables are in another format")
    return Fp8Blocks(ignored, (int(block[0]), int(block[1])), settings.get("scale_fmt") == "ue8m0")


def _mxfp4(_settings: Settings, ignored: Ignored, _scales: torch.dtype, _name: str | None) -> StoredFormat:
    return Mxfp4(ignored)


def _compressed(settings: Settings, _ignored: Ignored, scales: torch.dtype, name: str | None) -> StoredFormat:
    groups = [*(settings.get("config_groups") or {}).values()]
    layout = settings.get("format")
    if len(groups) != 1 or groups[0].get("targets") != ["Linear"]:
        raise _refused(name, "compressed-tensors in several groups", "One format for all linear layers is read here")
    weights, ignored = groups[0].get("weights") or {}, tuple(settings.get("ignore") or ())
    layout = groups[0].get("format") or layout
    if settings.get("transform_config") or weights.get("actorder") in ("group", "activation"):
        raise _refused(name, "compressed-tensors", "Its layers are transformed, or reordered by activations")
    if layout == "nvfp4-pack-quantized" and weights.get("group_size") == 16:
        return Nvfp4(ignored)
    group = weights.get("group_size")
    if layout == "pack-quantized" and weights.get("num_bits") == 4 and weights.get("type") == "int":
        if weights.get("strategy") not in ("group", "channel"):
            raise _refused(name, f"four bits by {weights.get('strategy')}", "Groups and channels are read here")
        return PackedInt(ignored, group if group and group > 0 else None, not weights.get("symmetric", True), scales)
    bits = f"{weights.get('num_bits')} bits, {weights.get('type')}"
    raise _refused(name, f"compressed-tensors, {layout} ({bits})", "NVFP4 and four bits (W4A16) are read here")


def _gptq(settings: Settings, ignored: Ignored, scales: torch.dtype, name: str | None) -> StoredFormat:
    if settings.get("bits") != 4:
        raise _refused(name, f"gptq of {settings.get('bits')} bits", "Four bits are read here")
    if settings.get("dynamic"):
        raise _refused(name, "gptq with rules by layer (`dynamic`)", "One rule for all layers is read here")
    plus = {"gptq": 1, "gptq_v2": 0}.get(kind := str(settings.get("checkpoint_format", "gptq")))
    if plus is None:
        raise _refused(name, f"gptq, checkpoint_format {kind}", "gptq and gptq_v2 are read here")
    group = settings.get("group_size") or -1
    return Gptq(ignored, group if group > 0 else None, scales, plus)


def _awq(settings: Settings, ignored: Ignored, scales: torch.dtype, name: str | None) -> StoredFormat:
    bits, version = settings.get("bits", 4), str(settings.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise _refused(name, f"awq of {bits} bits, version {version}", "Four bits and version gemm are read here")
    group = settings.get("group_size") or -1
    return Awq(ignored, group if group > 0 else None, scales)


FORMATS: dict[str, Callable[[Settings, Ignored, torch.dtype, str | None], StoredFormat]] = {  # by `quant_method`
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
}


def stored_notes(recipe: Recipe, config: PretrainedConfig) -> list[str]:
    """Returns what becomes of a base that is stored in fewer bits, for the user; [] of a plain one."""
    if (form := stored_format(config)) is None:
        return []
    if recipe.model.stored == "unpack":
        return [f"the base is unpacked as it is read, from {form.name} (`model.stored`)"]
    stays = f"the base stays in {form.name}, as it is stored, and is unpacked for each product"
    return [f"{stays}; plain weights (`model.stored: unpack`) take more memory and less time"]


def check_stored(recipe: Recipe, config: PretrainedConfig) -> None:
    """Raises UserError for a base in a format that is not read, or that the recipe cannot train as it is stored."""
    if (form := stored_format(config, recipe.model.name)) is None or recipe.model.stored == "unpack":
        return
    name = recipe.model.name
    if recipe.mode != "lora":
        kept = "trains all weights" if recipe.mode == "full" else "would pack them again"
        raise UserError(
            f"mode: {recipe.mode}: {name!r} is stored as {form.name}, for frozen weights. The mode {kept}. Fix: use "
            "`mode: lora`, which computes with their exact values, or `model.stored: unpack`"
        )
    assert recipe.lora is not None
    if recipe.lora.dora:
        raise UserError(
            f"lora.dora: peft cannot unpack {name!r}, which is stored as {form.name}. It divides by the norms of the "
            "base's rows. Fix: set it to false, or `model.stored: unpack`"
        )
    if recipe.train.compile:
        raise UserError(
            f"train.compile: compiled layers unpack {name!r} wrongly. It is stored as {form.name}; the loss of such a "
            "base was not finite (torch 2.13, on a CPU). Fix: set it to false, or `model.stored: unpack`"
        )
