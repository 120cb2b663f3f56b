"""The model of a recipe: weights from a hub id or folder, or from a config; quantized, frozen and with adapters by the
recipe. The engine decides where weights are placed in memory (`Placement`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from typing import Any, Literal

import torch
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from finetune.data.media.family_table import Family, family_of, rows_of
from finetune.errors import UserError
from finetune.models.activations import recompute_activations
from finetune.models.added_tokens import start_rows, train_rows
from finetune.models.attention import AttentionChoice
from finetune.models.attention.mixers import recomputed_alike, run_per_document
from finetune.models.attention.per_document import rotate_per_document
from finetune.models.base_checkpoint import check_loaded_again
from finetune.models.base_config import dtypes, first_line
from finetune.models.base_model import Base, processor_settings
from finetune.models.base_weights import Placement, is_read_packed, read_base
from finetune.models.checkpoint_files import check_names_kept
from finetune.models.compiled import compile_layers
from finetune.models.lora_targets import (
    AdapterTargets,
    adapted_paths,
    check_adapted,
    describe_left_out,
    find_targets,
    names_as_given,
    peft_settings,
)
from finetune.models.moe import reach_experts
from finetune.models.packed_linear import MULTIPLE, keep_weights_unpacked, linear_weights, pack_linear_layers
from finetune.models.patches import set_attribute
from finetune.models.score_model import labelled, score_head, start_score_head
from finetune.models.stored_config import check_stored
from finetune.models.stored_loading import place_stacks
from finetune.models.towers import freeze_parts, targets_in_parts, trained_parts
from finetune.models.wrapped import SCORE, has_scores
from finetune.recipe.schema import Lora, Model, Quantization, Recipe, Tokens
from finetune.utils import full_shape, pattern_of, unwrap_peft


def load_model(
    recipe: Recipe,
    base: Base,
    attention: AttentionChoice,
    placement: Placement,
    labels: tuple[str, ...] = (),
) -> PreTrainedModel:
    """Returns the model in train mode, with adapters, before an engine wraps it. Random weights are the same on every
    rank. labels: of a head of scores, in place of the LM head. Raises UserError if it cannot be loaded.
    """
    types, config = dtypes(recipe), base.config
    auto: Any = AutoModelForCausalLM if recipe.model.train is None else AutoModelForMultimodalLM
    if labels:
        auto, config = AutoModelForSequenceClassification, labelled(config, labels)
        if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
            raise UserError(
                f"{type(config).__name__} has no sequence classification model in transformers. Fix: choose another "
                "model"
            )
    torch.manual_seed(recipe.run.seed)
    base_dtype = types.trained if recipe.mode == "full" else types.frozen
    check_stored(recipe, config)
    model, missing = read_base(base, config, attention, base_dtype, types.compute, placement, auto)
    family = None if recipe.model.train is None else family_of(config, recipe.data.media_kinds)
    if recipe.quantization is not None and not is_read_packed(config):
        _pack(model, recipe.quantization, types.compute, placement, of_scores=bool(labels), family=family)
    if labels:
        score_head(model)
        if missing is None or any(name.startswith(f"{SCORE}.") for name in missing):
            start_score_head(model, types.trained, recipe.run.seed)
    else:
        _check_complete(recipe.model, config, missing or set())
        if model.get_output_embeddings() is None:
            raise UserError(f"{type(config).__name__} has no LM head to train. Fix: choose a causal language model")
    first_added = 0
    if recipe.tokens is not None:
        first_added = len(base.tokenizer) - len(base.pieces)
        start_rows(model, first_added, base.pieces)
    rotate_per_document(model)
    run_per_document(model, attention.mixers)
    reach_experts(model)
    keep_weights_unpacked(model)
    if placement.weights != "meta" and base.config is not base.published:
        model.base_config = base.published  # whose dropout the result has
    model.config.use_cache = False  # with a cache, transformers stops isolating packed documents
    adapted = None
    if family is not None and placement.weights != "meta":  # rank 0 writes them, and a plan has the config alone
        model.processor_files = processor_settings(base)
    if (parts := trained_parts(recipe, config)) is not None:
        if recipe.lora is None:
            freeze_parts(model, *parts)
        else:
            adapted = targets_in_parts(model, *parts, recipe.lora)
    if recipe.lora is not None:
        torch.manual_seed(recipe.run.seed + 1)  # the adapters do not depend on how many draws the base took
        # DoRA copies a packed weight, which bitsandbytes begins with an empty tensor on the default device.
        shapes_only = recipe.quantization is not None and placement.weights == "meta"
        with torch.device("meta") if shapes_only else contextlib.nullcontext():
            model = add_adapters(model, recipe.lora, types.trained, recipe.tokens, adapted)
        layers, stacked = adapted_paths(model)
        paths = [*layers, *(path.rpartition(".")[0] for path in stacked)]
        if (files := getattr(unwrap_peft(model), "base_checkpoint", None)) is not None:
            check_loaded_again(files.part, paths)
        else:
            check_names_kept(unwrap_peft(model), paths)
        place_stacks(model)
        if recipe.tokens is not None and recipe.tokens.train != "all":
            train_rows(model, first_added, len(recipe.tokens.add), types.trained)
    if types.compute != torch.float32:
        # Hidden states begin in the compute type: the embedding table may be in fp32, and then the full residual stream
        # would be fp32 on one backend and 16 bit on another.
        if family is not None and family.as_weights:
            language = unwrap_peft(model).base_model.get_submodule(family.language)
            language.register_forward_pre_hook(
                lambda _, inputs, named: (inputs, {**named, "inputs_embeds": named["inputs_embeds"].to(types.compute)}),
                with_kwargs=True,
            )
        else:
            model.get_input_embeddings().register_forward_hook(
                lambda _module, _inputs, output: output.to(types.compute)
            )
    if recipe.train.activation_checkpointing:
        around = recomputed_alike if attention.mixers else None
        recompute_activations(model, recipe.train.activation_checkpointing, around)
    if recipe.train.compile:
        compile_layers(model)
    return model.train()


def _pack(
    model: Any,
    quantization: Quantization,
    compute: torch.dtype,
    placement: Placement,
    *,
    of_scores: bool,
    family: Family | None,
) -> None:
    """Pack the weights of linear layers. The LM head is packed as well, but no head of scores, and no tower.

    family: of a model with its tower."""
    whole = [SCORE] if of_scores else None
    if family is not None:
        parts = [(row.tower, *row.projector, *family.others) for row in family.each]
        whole = ["lm_head", *(f"model.{path}" for path in dict.fromkeys(path for of_row in parts for path in of_row))]
    device = placement.device or torch.device("cpu")
    kept_on = placement.packed_on or device
    layers = placement.layers  # DoRA cannot copy packed weights without values
    pack_linear_layers(model, quantization, compute, device, kept_on, whole, layers)


def _check_complete(model: Model, config: PretrainedConfig, missing: set[str]) -> None:
    """Raises UserError if a checkpoint lacks weights: transformers only warns of them and draws them at random."""
    if is_read_packed(config):  # its tensors have other names than the weights
        return
    rows = () if model.train is None else rows_of(config.model_type).values()
    unused = {path for row in rows for path in row.unused}
    absent = sorted(name for name in missing if not any(f".{path}." in f".{name}" for path in unused))
    if absent:
        raise UserError(
            f"model.name: {model.name!r} lacks {len(absent):,} weights of its model, such as `{absent[0]}`. They would "
            "begin at random. Fix: complete the folder, and check that its config.json is that of these weights"
        )


def parameter_counts(model: Any) -> tuple[int, int]:
    """Returns (all, trained) parameters of the full model, even if this rank has a shard or 4-bit weights."""
    packed = {id(parameter): weights for parameter, weights in linear_weights(model)}
    counts = [(packed.get(id(p)) or full_shape(p).numel(), p.requires_grad) for p in model.parameters()]
    return sum(count for count, _ in counts), sum(count for count, is_trained in counts if is_trained)


# --- LoRA adapters through peft, imported only if there are any: it takes a second, as it imports bitsandbytes


def add_adapters(
    model: Any, lora: Lora, dtype: torch.dtype, tokens: Tokens | None = None, targets: AdapterTargets | None = None
) -> Any:
    """Returns the model with frozen weights and trained adapters in `dtype`. tokens: the added ones; targets: those in
    the trained parts of the model; None: in all of it. Raises UserError if a name is of no module."""
    from peft import LoraConfig, get_peft_model

    in_parts = targets is not None
    targets = targets or find_targets(model, lora)
    settings = peft_settings(model, targets, lora)
    if in_parts and not targets.stacked:
        settings["target_modules"] = pattern_of(targets.layers, [name for name, _ in model.named_modules()])
    whole = list(lora.modules_to_save or ())
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if tokens and tokens.train == "all":  # the embedding and an untied head
        tables = [embedding, *([head] if head is not None and head.weight is not embedding.weight else [])]
        names = [path.rpartition(".")[2] for path, module in model.named_modules() if any(module is t for t in tables)]
        whole += [name for name in names if name not in whole]
    is_tied = getattr(model.config, "tie_word_embeddings", False)
    tied = is_tied and any(_is_named(model, one, whole) for one in (embedding, head))
    if tied and not _is_named(model, head, whole):
        # By the head peft knows that both are one, whatever the embedding is called (GPT-2: `wte`).
        whole += [path for path, module in model.named_modules() if module is head]
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]  (peft says int; it only divides)
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        modules_to_save=whole or None,
        ensure_weight_tying=tied,
        task_type="SEQ_CLS" if has_scores(model) else "CAUSAL_LM",  # the former trains the head of scores in full
        **settings,
    )
    try:
        with warnings.catch_warnings(), names_as_given():
            # For patterns of stacked experts, which do match: peft 0.21 looks for modules only.
            warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
            adapted: Any = get_peft_model(model, config)
    except ValueError as error:
        raise UserError(f"lora: {first_line(error)}. Fix: change the setting of `lora` that this names") from error
    check_adapted(adapted, targets)
    adapted.left_out = describe_left_out(targets.left_out)
    _rename_tied(adapted.get_base_model())
    _check_magnitudes(adapted.get_base_model())
    for parameter in adapted.parameters():
        if parameter.requires_grad and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
    return adapted


def _is_named(model: Any, module: Any, names: list[str]) -> bool:
    """Returns whether one of peft's names is that of a module, by the end of its path."""
    paths = [path for path, one in model.named_modules() if one is module]
    return any(path == name or path.endswith(f".{name}") for path in paths for name in names)


def keep_input_types(model: Any) -> None:
    """Let adapters take their inputs as they come, for a forward under autocast: those without dropout or DoRA, which
    compute in the type of their input."""
    if not hasattr(model, "peft_config"):
        return
    for module in model.modules():
        if not getattr(module, "lora_A", None) or module.lora_variant:
            continue
        if all(isinstance(dropout, torch.nn.Identity) for dropout in module.lora_dropout.values()):
            set_attribute(module, "cast_input_dtype_enabled", False, "input types")


def may_add_to_products(recomputed: Literal["selective"] | bool, schedule: str | None = None) -> bool:
    """Returns whether a product may be added to the result of another one, with one backward for both.

    recomputed: `train.activation_checkpointing`: selective keeps results of products, which no other may add to.
    schedule: of a pipeline: zero_bubble asks for gradients of inputs and of weights apart, and would have both twice.
    """
    return recomputed != "selective" and schedule != "zero_bubble"


def fuse_adapters(model: Any, recomputed: Literal["selective"] | bool, schedule: str | None = None) -> None:
    """Let adapted layers compute in fewer passes than peft's do (lora_linear.py), in place, if they may."""
    if hasattr(model, "peft_config") and may_add_to_products(recomputed, schedule):
        from finetune.models import lora_linear

        lora_linear.fuse_adapters(model)


def compute_in_fp8(model: Any, emulated: bool) -> None:
    """Let linear layers of the decoder layers multiply in 8 bits (fp8_linear.py), in place. emulated: see `use_fp8`.

    Raises UserError if torchao is missing, or no layer has sizes that such products take.
    """
    if importlib.util.find_spec("torchao") is None:
        raise UserError("`train.precision: fp8` needs torchao. Fix: pip install 'torchao>=0.18'")
    from finetune.models import fp8_linear

    if not fp8_linear.use_fp8(unwrap_peft(model).base_model.layers, emulated=emulated):
        raise UserError(
            f"train.precision: {type(model).__name__} has no linear layers that 8-bit products take. Their sizes must "
            f"be multiples of {MULTIPLE}. Fix: use bf16"
        )


def _rename_tied(model: Any) -> None:
    """Tell `tie_weights` where peft has put a tied weight: below a layer with an adapter, or into a frozen and a
    trained copy, both of which are tied."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}

    def places(name: str) -> list[str]:
        module, _, weight = name.rpartition(".")
        inside = ("", "base_layer.", "original_module.", "modules_to_save.default.")
        return [place for below in inside if (place := f"{module}.{below}{weight}") in names] or [name]

    tied = model._tied_weights_keys  # in which transformers' models declare their ties
    if isinstance(tied, dict):  # a model's own code may have the list of older versions
        pairs = [zip(places(target), places(source), strict=False) for target, source in tied.items()]
        keys = {target: source for of_weight in pairs for target, source in of_weight}
        set_attribute(model, "_tied_weights_keys", keys, "tied adapters")


def _check_magnitudes(model: Any) -> None:
    """Raises UserError if DoRA would divide by zero, the norm of an output's weights: a tied head has a padding token's
    embedding, which is zero."""
    for name, module in model.named_modules():
        for magnitude in getattr(module, "lora_magnitude_vector", {}).values():
            if magnitude.weight.is_meta:  # rank 0 has the values, and reports it
                continue
            if zeros := (magnitude.weight.flatten() == 0).nonzero().flatten().tolist():
                which = ", ".join(map(str, zeros[:5])) + (", ..." if len(zeros) > 5 else "")
                raise UserError(
                    f"lora.dora: all weights of {len(zeros):,} outputs of {name} are zero ({which}). DoRA divides by "
                    f"their length. Fix: leave {name.rpartition('.')[2]!r} out of lora.targets, or set `lora.dora: "
                    "false`"
                )
