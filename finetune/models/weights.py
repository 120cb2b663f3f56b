"""The model of a recipe: weights from a hub id or folder, or from a config; quantized, frozen and with adapters by the
recipe. The engine decides where weights are placed in memory (`Placement`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from finetune.data.media.family_table import Family, family_of
from finetune.errors import UserError
from finetune.models.activations import recompute_activations
from finetune.models.added_tokens import start_rows, train_rows
from finetune.models.attention import AttentionChoice
from finetune.models.attention.mixers import recomputed_alike, run_per_document
from finetune.models.attention.per_document import rotate_per_document
from finetune.models.base_checkpoint import check_loaded_again, lost_to_scores
from finetune.models.base_config import dtypes, first_line, not_found_reason, without_weights
from finetune.models.base_model import Base, processor_settings
from finetune.models.checkpoint_files import check_names_kept, loaded_names, tensor_places, unread_tensors
from finetune.models.compiled import compile_layers
from finetune.models.damage import check_weights, mismatched_sizes, weights_problem
from finetune.models.lora_targets import (
    AdapterTargets,
    adapted_paths,
    check_adapted,
    describe_left_out,
    find_targets,
    names_as_given,
    peft_settings,
)
from finetune.models.moe import reach_experts, unpack_experts
from finetune.models.mtp import attach_head, attach_without_weights, head_of, is_of_head, places_by
from finetune.models.mtp import renames as renames_of
from finetune.models.mtp_files import share_tables, unread_by_base
from finetune.models.packed_linear import (
    MULTIPLE,
    is_stored_quantized,
    keep_weights_unpacked,
    linear_weights,
    pack_linear_layers,
)
from finetune.models.patches import replace_class, set_attribute
from finetune.models.remote_code import from_config
from finetune.models.score_model import labelled, score_head, start_score_head
from finetune.models.stored_config import check_stored, stored_format
from finetune.models.stored_formats import StoredFormat
from finetune.models.stored_loading import (
    StoredFiles,
    place_stacks,
    put_in,
    read_stored,
    stored_parameters,
    without_quantization,
)
from finetune.models.towers import attention_of_parts, freeze_parts, targets_in_parts
from finetune.models.wrapped import SCORE, has_scores
from finetune.recipe.schema import Lora, Model, Quantization, Recipe, Tokens
from finetune.utils import full_shape, pattern_of, unwrap_peft


@dataclass(frozen=True)
class Placement:
    """Placement of this rank's weights."""

    weights: Literal["load", "meta"]  # meta: shapes only, of buffers as well; the engine fills them in from rank 0
    device: torch.device | None  # on which weights are packed; None if ZeRO-3 shards each weight as it is read
    layers: frozenset[int] | None = None  # decoder layers that need weights; others may be left on `meta`
    # Each weight is read straight to `device`, as a copy in fp32 of a 16-bit checkpoint may not fit in host memory.
    direct: bool = False
    packed_on: torch.device | None = None  # on which packed weights wait for the engine to shard them; None: `device`


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
    model, missing = _base_model(base, config, attention, base_dtype, types.compute, placement, auto)
    family = None if recipe.model.train is None else family_of(config)
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
    if family is not None and recipe.model.train is not None:
        if placement.weights != "meta":  # rank 0 writes them, and a plan has the config alone
            model.processor_files = processor_settings(base)
        if recipe.lora is None:
            freeze_parts(model, family, recipe.model.train)
        else:
            adapted = targets_in_parts(model, family, recipe.model.train, recipe.lora)
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
        whole = ["lm_head", *(f"model.{path}" for path in (family.tower, *family.projector))]
    device = placement.device or torch.device("cpu")
    kept_on = placement.packed_on or device
    layers = placement.layers  # DoRA cannot copy packed weights without values
    pack_linear_layers(model, quantization, compute, device, kept_on, whole, layers)


def _check_complete(model: Model, config: PretrainedConfig, missing: set[str]) -> None:
    """Raises UserError if a checkpoint lacks weights: transformers only warns of them and draws them at random."""
    if is_read_packed(config):  # its tensors have other names than the weights
        return
    unused = None if model.train is None else family_of(config).unused
    absent = sorted(name for name in missing if unused is None or f".{unused}." not in f".{name}")
    if absent:
        raise UserError(
            f"model.name: {model.name!r} lacks {len(absent):,} weights of its model, such as `{absent[0]}`. They would "
            "begin at random. Fix: complete the folder, and check that its config.json is that of these weights"
        )


def _base_model(
    base: Base,
    config: PretrainedConfig,
    attention: AttentionChoice,
    dtype: torch.dtype,
    compute: torch.dtype,
    placement: Placement,
    auto: Any,  # transformers' auto class
) -> tuple[Any, set[str] | None]:
    """Returns the model, and the weights that its checkpoint lacks; None: all, it is built from a config."""
    settings, trusted = base.model, base.model.trust_remote_code
    common: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention.implementation}
    if settings.train is not None:
        common["attn_implementation"] = attention_of_parts(config, attention.implementation)
    form = stored_format(config, settings.name)
    plain = config if form is None else without_quantization(config)
    if placement.weights == "meta":
        model = without_weights(plain, auto, trusted=trusted, **common)
        model.tie_weights()  # no_init_weights leaves them apart
        if form is not None and settings.stored == "keep":
            put_in(model, stored_parameters(model, form), {}, compute)
        if settings.mtp == "train":
            attach_without_weights(model, dtype)
        return model, None
    if settings.config is not None:
        return from_config(auto, config, trusted, **common), None
    if placement.device is not None and (is_read_packed(config) or placement.direct):
        common["device_map"] = {"": placement.device}
    stored = None if form is None else _StoredBase(settings, auto, plain, form)
    if stored is not None:
        model, report = _stored_model(stored, settings, dtype, compute, placement, common)
    else:
        model, report = _plain_model(base, config, auto, placement, common)
    if (
        base.files is not None and auto is AutoModelForCausalLM
    ):  # with a head of scores it becomes a text model by itself
        model.base_checkpoint = base.files
    _list_unread(model, base, config, stored, of_scores=auto is AutoModelForSequenceClassification)
    return model, set(report["missing_keys"])


def _stored_model(
    stored: _StoredBase,
    settings: Model,
    dtype: torch.dtype,
    compute: torch.dtype,
    placement: Placement,
    common: dict[str, Any],
) -> tuple[Any, Any]:
    """Returns a model whose weights stay as they are stored, or are unpacked; and transformers' report."""
    kept_on = placement.packed_on or placement.device or torch.device("cpu")
    unpacks = settings.stored == "unpack"
    with _Reading(settings):
        return stored.read(dtype if unpacks else compute, kept_on, unpacks, **common)


def _plain_model(
    base: Base, config: PretrainedConfig, auto: Any, placement: Placement, common: dict[str, Any]
) -> tuple[Any, Any]:
    """Returns the model that transformers reads, and its report."""
    settings, files, has_head = base.model, base.files, base.model.mtp == "train"
    layers = None if is_stored_quantized(config) else placement.layers
    renames = {**(renames_of(places_by(config)) if has_head else {}), **(files.renames if files is not None else {})}
    named = {"key_mapping": renames} if renames else {}
    load: Any = auto
    if layers is not None or files is not None or has_head:
        ignored = r"\.layers\.\d+\." if files is None and not has_head else ""
        # The class that the auto class would choose; it has no public attribute for it.
        load = _partly(auto._model_mapping[type(config)], layers, ignored, has_head)
    with _Reading(settings):
        model, report = load.from_pretrained(
            settings.name,
            config=config,
            use_safetensors=True,
            revision=settings.revision or "main",
            trust_remote_code=settings.trust_remote_code,
            output_loading_info=True,
            **named,
            **common,
        )
    if load is not auto:
        replace_class(model, load.__mro__[1], "own class")
    if layers is not None:
        how = {name: common[name] for name in ("dtype", "attn_implementation")}
        skeleton = without_weights(config, auto, trusted=settings.trust_remote_code, **how)
        for i, layer in enumerate(model.base_model.layers):
            if isinstance(layer, torch.nn.Identity):
                model.base_model.layers[i] = skeleton.base_model.layers[i]
    # transformers keeps here what it did to names and shapes, to undo it as it saves the model.
    if conversions := getattr(model, "_weight_conversions", None):
        used = [one for one in conversions if one.was_used()]
        # transformers changes the public lists as it reads a model; these are as they were given.
        used = [one for one in used if one._original_source_patterns[0] not in renames]
        set_attribute(model, "_weight_conversions", used, "read conversions")
    return model, report


class _Reading:
    """Turns errors of reading a checkpoint into a UserError."""

    def __init__(self, settings: Model):
        assert settings.name is not None  # the schema requires it if there is no config
        self._name = settings.name

    def __enter__(self) -> None:
        check_weights(Path(self._name).expanduser())

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        if isinstance(error, (OSError, ValueError, SafetensorError)):
            unreadable = f"{weights_problem(error)}. Fix: name a model whose safetensors files are complete"
            reason = not_found_reason(self._name, error) or unreadable
            raise UserError(f"model.name: {self._name!r} cannot be loaded: {reason}") from error
        if isinstance(error, RuntimeError) and mismatched_sizes(error):
            raise UserError(
                f"model.name: the weights of {self._name!r} contradict the shapes of its config.json. The differences "
                "are listed above. Fix: take both from one place"
            ) from error


def _list_unread(
    model: Any, base: Base, config: PretrainedConfig, stored: _StoredBase | None, *, of_scores: bool
) -> None:
    """Leave on the model what its checkpoint has and it does not: tensors that a result keeps, drops or loses."""
    settings, files, is_packed = base.model, base.files, is_read_packed(config)
    if of_scores:
        if stored is not None:
            model.lost_tensors = list(stored.unread)
        else:
            model.lost_tensors = lost_to_scores(files) if files else list(unread_tensors(model, settings, is_packed))
        return
    if stored is not None:
        kept = stored.unread
    else:
        kept = unread_by_base(model, files) if files is not None else unread_tensors(model, settings, is_packed)
    layers = config.get_text_config().num_hidden_layers
    if settings.mtp == "train":
        share_tables(model, settings)
        of_copies = {copy.name.format(n=layers) for copy in head_of(model).copies}
        kept = {name: file for name, file in kept.items() if name not in of_copies}
    elif settings.mtp == "drop":
        model.dropped_tensors = {name for name in kept if is_of_head(name, layers)}
        kept = {name: file for name, file in kept.items() if name not in model.dropped_tensors}
    model.kept_tensors = kept


def is_read_packed(config: PretrainedConfig) -> bool:
    """Returns whether transformers reads the packed weights of a checkpoint, and keeps them so."""
    return is_stored_quantized(config) and stored_format(config) is None


def load_stored(about: Model, config: PretrainedConfig, dtype: torch.dtype, auto: Any = AutoModelForCausalLM) -> Any:
    """Returns a model on the CPU, in `dtype`, whose weights stay as they are stored, for adapters that are trained;
    call `compute_stored` once it has them. auto: transformers' auto class. Raises UserError as `load_model`."""
    form = stored_format(config, about.name)
    assert form is not None
    plain = without_quantization(config)
    base = _StoredBase(about, auto, plain, form)
    return base.read(dtype, torch.device("cpu"), unpacks=False, dtype=dtype)[0].eval()


def compute_stored(model: Any) -> Any:
    """Returns the model of `load_stored`, ready to compute, in place."""
    place_stacks(model)
    unpack_experts(model)
    return model


class _StoredBase:
    """A checkpoint whose weights are stored in a format of `stored_formats`. Raises UserError if its files or sizes are
    not of the format. unread: the file of each tensor that becomes nothing, see `unread_tensors`."""

    def __init__(self, settings: Model, auto: Any, plain: PretrainedConfig, form: StoredFormat):
        self._settings, self._plain = settings, plain
        self.skeleton = without_weights(plain, auto, settings.trust_remote_code)
        self.skeleton.tie_weights()
        self._places = tensor_places(settings)
        self._stored = stored_parameters(self.skeleton, form)
        loaded, own = loaded_names(self.skeleton, self._places)[0], {*self.skeleton.state_dict()}
        stored = {f"{one.path}.{one.name}" for one in self._stored}
        read_plain = {name for name, target in loaded.items() if target is not None and target not in stored}
        self._files = StoredFiles(form, self._stored, self._places, settings.name or "", read_plain)
        unread = (name for name, target in loaded.items() if target is None and name not in own)
        self.unread = {name: self._places[name] for name in unread if name not in self._files.own}

    def read(self, stored_in: torch.dtype, kept_on: torch.device, unpacks: bool, **common: Any) -> tuple[Any, Any]:
        """Returns the model, and transformers' report; arguments as of `read_stored`."""
        what = type(self.skeleton), self._plain, self._stored, self._files
        return read_stored(*what, stored_in, kept_on, self._settings, unpacks, **common)


def _partly(model_class: Any, layers: frozenset[int] | None, ignored: str, has_head: bool) -> Any:
    """Returns the class of a model that is another part of its files than transformers'. layers: decoder layers whose
    weights are read; None: all. ignored: the pattern of names in files that do not belong to this part; has_head:
    whether the one that predicts ahead does."""

    class Partly(model_class):
        _keys_to_ignore_on_load_unexpected = [ignored]  # noqa: RUF012 (transformers' name and type)

        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            if has_head:
                attach_head(self)
            for i in range(len(self.base_model.layers)):
                if layers is not None and i not in layers:
                    self.base_model.layers[i] = torch.nn.Identity()

    # transformers finds conversions by the names of class and module.
    Partly.__name__, Partly.__module__ = model_class.__name__, model_class.__module__
    return Partly


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
