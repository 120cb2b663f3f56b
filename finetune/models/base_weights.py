"""Weights of a base: read by transformers, or as its files store them (stored_loading.py); or their shapes alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig

from finetune.data.media.family_table import SPEECH
from finetune.errors import UserError
from finetune.models.attention import AttentionChoice
from finetune.models.base_checkpoint import lost_to_scores
from finetune.models.base_config import not_found_reason, without_weights
from finetune.models.base_model import Base
from finetune.models.checkpoint_files import loaded_names, tensor_places, unread_tensors
from finetune.models.damage import check_weights, mismatched_sizes, weights_problem
from finetune.models.moe import unpack_experts
from finetune.models.mtp import (
    attach_head,
    attach_without_weights,
    head_of,
    is_of_head,
    places_by,
    places_of_head,
)
from finetune.models.mtp import renames as renames_of
from finetune.models.mtp_files import share_tables, unread_by_base
from finetune.models.packed_linear import is_stored_quantized
from finetune.models.patches import replace_class, set_attribute
from finetune.models.remote_code import from_config
from finetune.models.stored_config import stored_format
from finetune.models.stored_formats import StoredFormat
from finetune.models.stored_loading import (
    StoredFiles,
    place_stacks,
    put_in,
    read_stored,
    stored_parameters,
    without_quantization,
)
from finetune.models.towers import attention_of_parts
from finetune.recipe.schema import Model


@dataclass(frozen=True)
class Placement:
    """Placement of this rank's weights."""

    weights: Literal["load", "meta"]  # meta: shapes only, of buffers as well; the engine fills them in from rank 0
    device: torch.device | None  # on which weights are packed; None if ZeRO-3 shards each weight as it is read
    layers: frozenset[int] | None = None  # decoder layers that need weights; others may be left on `meta`
    # Each weight is read straight to `device`, as a copy in fp32 of a 16-bit checkpoint may not fit in host memory.
    direct: bool = False
    packed_on: torch.device | None = None  # on which packed weights wait for the engine to shard them; None: `device`


def read_base(
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
        if settings.mtp == "train":
            attach_without_weights(model, dtype)
        if form is not None and settings.stored == "keep":
            put_in(model, stored_parameters(model, form), {}, compute)
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
    _leave_conversions(model, renames)
    return model, report


def _leave_conversions(model: Any, renames: dict[str, str]) -> None:
    """Leave on a model what transformers did to names and shapes, which it undoes as it saves it, but for our own
    renames."""
    # Where transformers keeps them; there is no public name.
    if conversions := getattr(model, "_weight_conversions", None):
        used = [one for one in conversions if one.was_used()]
        # transformers changes the public lists as it reads a model; these are as they were given.
        used = [one for one in used if one._original_source_patterns[0] not in renames]
        set_attribute(model, "_weight_conversions", used, "read conversions")


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
        if settings.train is not None:  # config.json of a thinker does not declare them
            kept = {name: file for name, file in kept.items() if not name.startswith(SPEECH)}
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
    base = _StoredBase(about.model_copy(update={"mtp": "keep"}), auto, plain, form)
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
        if settings.mtp == "train":
            attach_without_weights(self.skeleton, torch.float32)
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
        own, what = type(self.skeleton), (self._plain, self._stored, self._files, stored_in, kept_on, self._settings)
        if head_of(self.skeleton) is None:
            return read_stored(own, *what, unpacks, **common)
        renames = renames_of(places_of_head(self.skeleton))
        named = {"key_mapping": renames} if renames else {}
        model, report = read_stored(_partly(own, None, "", has_head=True), *what, unpacks, **named, **common)
        replace_class(model, own, "own class")
        _leave_conversions(model, renames)
        return model, report


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
