"""The trained model as tensors of a Hugging Face folder, made one at a time from the base's files and what was trained.

    base's files ─┐
                  ├─ patch (merging.py) ─ the files' layout (weight_files.py) ─ cast ─ a tensor of the result
    adapter or checkpoint

Tensors that were not trained are the base's, bit for bit, and so are those that its files hold in addition to what
transformers loads (parts for prediction several tokens ahead, image towers).
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification

from finetune.errors import UserError
from finetune.export.adapter_files import FittingAdapter, check_shapes, read_lora
from finetune.export.merging import Patch, adapter_patches
from finetune.export.scoring import is_scoring, read_labels
from finetune.export.tensor_files import TensorFiles
from finetune.export.trained import Trained
from finetune.export.weight_files import INDEX, DiskLayout
from finetune.models.base_checkpoint import base_checkpoint
from finetune.models.base_config import dtypes, first_line, without_weights
from finetune.models.config import model_config
from finetune.models.damage import read_object, weight_map
from finetune.models.score_model import labelled
from finetune.models.text_part import TextPart, text_part_of
from finetune.models.vision import adapted_modules, family_of
from finetune.models.weights import add_adapters
from finetune.models.wrapped import has_scores
from finetune.objectives import score_labels
from finetune.recipe.schema import Model, Parts


@dataclass(frozen=True)
class Base:
    """The model that training started from, in files."""

    name: str
    revision: str | None  # the commit, where it is from the hub
    folder: Path
    files: TensorFiles

    def identity(self) -> dict[str, Any]:
        hub = None if Path(self.name).exists() else self.name
        return {"name": hub or Path(self.name).name, "revision": self.revision, "tensors": self.files.identity}


def find_base(name: str, revision: str | None) -> Base:
    """Returns the files of a hub id or a local folder. Raises UserError where it is gone or has no safetensors."""
    folder, commit = Path(name), None
    if not folder.is_dir():
        try:
            patterns = ["*.json", "*.safetensors", "*.py", "*.jinja", "*.model"]
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
            commit = folder.name
        except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
            raise UserError(
                f"the base model {name!r} is neither a folder here nor on the hub: {first_line(error)}; put it where "
                "the run found it, or give --base FOLDER"
            ) from None
    if (folder / INDEX).is_file():
        files = [folder / file for file in sorted(set(weight_map(folder / INDEX, whole=False).values()))]
    else:
        files = [folder / "model.safetensors"]
    if missing := [file.name for file in files if not file.is_file()]:
        raise UserError(
            f"the base model {name!r} has no {missing[0]}: tensors are read from safetensors only; load it in "
            "transformers and save it by `save_pretrained`, or download it again"
        )
    if (settings := read_object(folder / "config.json").get("quantization_config")) is not None:
        raise UserError(
            f"the base model {name!r} is stored in {settings.get('quant_method')}: an update added to quantised "
            "weights is lost in their rounding. Train and export from the unquantised model, and quantise the export"
        )
    return Base(name, commit, folder, TensorFiles(files))


@dataclass(frozen=True)
class _Group:
    """Parameters in memory that make some tensors of the files together."""

    names: list[str]
    shapes: dict[str, torch.Size]  # of the tensors of the files
    is_renaming: bool  # one tensor, under another name at most

    @property
    def on_disk(self) -> list[str]:
        return list(self.shapes)


class StreamedModel:
    """Shapes of all tensors of the result, and the values of one at a time.

    dtype: of floating-point tensors; None: as the base's files have them, or as the run writes its result. base: a
    folder or hub id in place of the one that the run names. Raises UserError where what was trained does not fit the
    base, or cannot be merged.
    """

    def __init__(self, trained: Trained, dtype: torch.dtype | None = None, base: str | None = None):
        self.trained, self.base = trained, _base_of(trained, base)
        self._elsewhere = base
        self.part = _part_of(trained, base)
        self.model = _skeleton(trained, base) if self.part is None else self.part.base_without_weights()
        self.is_scoring = has_scores(self.model)
        self._dtype = dtype
        self.result_dtype = dtype or _result_dtype(trained, self.base)
        self._patches = _patches(trained, base, self.part)
        shapes, self._aliases = own_tensors(self.model)
        # Of full training one name has the weights of both.
        differ = any(self._keys(alias) != self._keys(first) for alias, first in self._aliases.items())
        self.unties = differ and trained.is_adapter
        if self.unties:
            shapes |= {alias: torch.empty_like(shapes[first]) for alias, first in self._aliases.items()}
        self._groups = {name: group for group in _groups(self.model, shapes) for name in group.on_disk}
        self._disk_name = {g.names[0]: name for name, g in self._groups.items() if g.is_renaming}
        self._made: dict[str, Tensor] = {}
        self.shapes = {name: self._meta(name) for name in self._groups}
        self.shapes |= {name: self._cast_meta(self._base().files.meta(name)) for name in self._extras()}
        self._check()

    @cached_property
    def text_part(self) -> TextPart | None:
        """Returns the text part of a multimodal model, whatever of it was trained; None of a text model."""
        return self.part or _part_of(self.trained, self._elsewhere, alone=True)

    def name_in_files(self, parameter: str) -> str | None:
        """Returns the tensor of the result that a parameter is by itself; None where files have it otherwise."""
        name = self._disk_name.get(parameter)
        return name if name in self.shapes else None

    @property
    def added_rows(self) -> int | None:
        """Returns the rows of the embeddings where training added some, else None."""
        name = next((n for n, p in self.model.named_parameters() if p is self.model.get_input_embeddings().weight), "")
        disk_name = self._disk_name.get(name)
        rows = self.shapes[disk_name].shape[0] if disk_name else None
        return rows if rows != self.model.get_input_embeddings().weight.shape[0] else None

    def make(self, name: str) -> Tensor:
        """Returns the values of a tensor."""
        if name not in self._made:
            group = self._groups.get(name)
            if group is None or not any(n in self._patches for n in group.names):
                values = self._base().files.read(self._source(name))
                return values.to(self.shapes[name].dtype)
            self._made.update(self._make(group))
        return self._made.pop(name)

    def _make(self, group: _Group) -> dict[str, Tensor]:
        patches = [self._patches.get(name) for name in group.names]
        if group.is_renaming:
            name, patch, source = group.on_disk[0], patches[0], self._source(group.on_disk[0])
            assert patch is not None
            base = None if patch.kind == "full" else self._base().files.read(source)
            return {name: patch.apply(base, self.shapes[name].shape, self.shapes[name].dtype)}
        if all(patch is not None and patch.kind == "full" for patch in patches):
            state = {n: self._patches[n].full() for n in group.names}  # pyright: ignore[reportOptionalCall]
            return {name: t.to(self.shapes[name].dtype) for name, t in _converted(self.model, state).items()}
        updates = {}
        parameters = dict(self.model.named_parameters())
        for name, patch in zip(group.names, patches, strict=True):
            shape = parameters[name].shape
            updates[name] = torch.zeros(shape) if patch is None else patch.apply(None, shape, torch.float32)
        made = {}
        for name, update in _converted(self.model, updates).items():
            made[name] = (self._base().files.read(name).float() + update).to(self.shapes[name].dtype)
        return made

    def _base(self) -> Base:
        assert self.base is not None
        return self.base

    def _source(self, name: str) -> str:
        """Returns the base's tensor for one of the result: that of the twin, where both were tied and are no more."""
        if self.base is not None and name in self.base.files:
            return name
        group = self._groups[name]
        return self._disk_name.get(self._aliases.get(group.names[0], ""), name)

    def _keys(self, name: str) -> tuple[str, ...]:
        return self._patches[name].keys if name in self._patches else ()

    def _meta(self, name: str) -> Tensor:
        """Returns shape and type of a tensor of the result. Raises UserError where nothing has it."""
        group, source = self._groups[name], self._source(name)
        patch = self._patches.get(group.names[0]) if group.is_renaming else None
        in_base = self.base is not None and source in self.base.files
        if patch is not None and patch.kind == "full":
            shape: Any = self.trained.shapes[patch.keys[0]].shape
        elif in_base:
            shape, own = self._base().files.meta(source).shape, group.shapes[name]
            if shape[1:] != own[1:] or shape[:1] < own[:1]:  # rows of a vocabulary may be more
                raise UserError(
                    f"{self._base().folder}: {source} has the shape {list(shape)} in its file, but {list(own)} by "
                    "config.json: take both from one place"
                )
            if patch is not None and patch.kind == "rows":
                shape = (max(shape[0], max(patch.rows) + 1), *shape[1:])
        elif all(n in self._patches and self._patches[n].kind == "full" for n in group.names):
            shape = group.shapes[name]
        else:
            where = self.base.folder if self.base else self.trained.folder
            raise UserError(f"{where}: has no tensor {source}, which {type(self.model).__name__} needs")
        # A run's own result has one type; a base's tensors keep theirs.
        keeps = in_base and (self.trained.is_adapter or patch is None)
        dtype = self._base().files.meta(source).dtype if keeps else self.result_dtype
        return self._cast_meta(torch.empty(shape, dtype=dtype, device="meta"))

    def _cast_meta(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if self._dtype is not None and tensor.is_floating_point() else tensor

    def _extras(self) -> list[str]:
        """Returns what the base's files have in addition to the model, but for copies of tied tensors."""
        if self.base is None or self.is_scoring or not (self.trained.is_adapter or self.part):
            return []
        known = set(self._groups)
        if self._aliases and not self.unties:
            tied = {alias: torch.empty(0, device="meta") for alias in self._aliases}
            known |= {name for group in _groups(self.model, tied) for name in group.on_disk}
        return [name for name in self.base.files.names() if name not in known]

    def _check(self) -> None:
        """Raises UserError for what cannot be merged in the layout of the files."""
        names = {name for group in self._groups.values() for name in group.names}
        if unknown := sorted(set(self._patches) - names - set(self._aliases)):
            raise UserError(f"{self.trained.folder}: trains {unknown[0]}, which the model has not: another base?")
        for group in self._groups.values():
            kinds = {patch.kind for name in group.names if (patch := self._patches.get(name)) is not None}
            if not group.is_renaming and not kinds <= {"lora"} and not kinds <= {"full"}:
                raise UserError(
                    f"{group.names[0]}: {' and '.join(sorted(kinds))} of a tensor that files hold in another layout "
                    "than transformers is not merged tensor by tensor: merge it in memory by peft's `merge_and_unload`"
                )


def _part_of(trained: Trained, base: str | None, alone: bool = False) -> TextPart | None:
    """Returns the text part that was trained, of a multimodal base; None with a head of scores, which only it has, and
    where all of the base was loaded. alone: also there."""
    name, revision = (base, None) if base else name_of_base(trained)
    if name is None or _labels(trained):
        return None
    return text_part_of(Model(name=name, revision=revision, train=None if alone else _trained_parts(trained)))


def _trained_parts(trained: Trained) -> Parts | None:
    return trained.recipe.model.train if trained.recipe is not None else None


def _skeleton(trained: Trained, base: str | None) -> Any:
    """Returns transformers' model without weights, tied."""
    config, labels = _config(trained, base), _labels(trained)
    trusted = trained.recipe is not None and trained.recipe.model.trust_remote_code
    if labels:
        model = without_weights(labelled(config, labels), AutoModelForSequenceClassification, trusted)
    else:
        whole = _trained_parts(trained) is not None
        model = without_weights(config, AutoModelForImageTextToText if whole else AutoModelForCausalLM, trusted)
    model.tie_weights()
    return model


def _config(trained: Trained, base: str | None) -> Any:
    recipe = trained.recipe
    if recipe is not None and base is None:
        return model_config(recipe.model)
    if recipe is not None and recipe.model.config is not None:
        return model_config(recipe.model)
    name, revision = (base, None) if base else name_of_base(trained)
    assert name is not None  # a model from scratch has a recipe
    try:
        return model_config(Model(name=name, revision=revision, train=_trained_parts(trained)))
    except UserError as error:
        raise UserError(f"the base model {name!r} cannot be loaded: {error}; give --base FOLDER") from None


def name_of_base(trained: Trained) -> tuple[str | None, str | None]:
    """Returns name and revision of the base; None for a model from scratch."""
    if trained.recipe is not None:
        return trained.recipe.model.name, trained.recipe.model.revision
    settings = read_object(trained.folder / "adapter_config.json")
    return settings["base_model_name_or_path"], settings.get("revision")


def _base_of(trained: Trained, base: str | None) -> Base | None:
    name, revision = (base, None) if base else name_of_base(trained)
    if not (trained.is_adapter or trained.is_checkpoint):  # a result of full weights has all that is exported
        return replace(find_base(str(trained.folder), None), name=name or "")
    if name is None:
        return None
    found = find_base(name, revision)
    return _text_model(found, Model(name=name, revision=revision)) if _labels(trained) else found


def _text_model(base: Base, model: Model) -> Base:
    """Returns the text part of a multimodal base as a model of its own, by its names."""
    if (checkpoint := base_checkpoint(model)) is None:
        return base
    part, names = checkpoint.part, dict[str, str]()
    own = {part.in_base(name) for name in part.text.state_dict()}
    for name in base.files.names():
        if part.files[name] in own:
            renamed = name
            for pattern, target in checkpoint.renames.items():
                renamed = re.sub(pattern, target, renamed, count=1)
            names[renamed] = name
    return replace(base, files=base.files.renamed(names))


def _labels(trained: Trained) -> tuple[str, ...]:
    if trained.is_adapter and not trained.is_checkpoint:
        return read_labels(trained.folder) if is_scoring(trained.folder) else ()
    assert trained.recipe is not None
    return score_labels(trained.recipe.objective)


def _result_dtype(trained: Trained, base: Base | None) -> torch.dtype:
    if trained.recipe is not None and not (trained.is_adapter and base is not None):
        return dtypes(trained.recipe).frozen
    assert base is not None
    types = Counter(base.files.meta(name).dtype for name in base.files.names())
    return next(dtype for dtype, _ in types.most_common() if dtype.is_floating_point)


def _patches(trained: Trained, base: str | None, part: TextPart | None) -> dict[str, Patch]:
    """Returns what was trained, by names in the base's own class; nothing of a result that has it all."""
    if not (trained.is_adapter or trained.is_checkpoint):
        return {}
    in_base = part.in_base if part is not None else str
    if not trained.is_adapter:
        return {in_base(name): Patch("full", (name,), full=partial(trained.read, name)) for name in trained.shapes}
    if not trained.is_checkpoint:
        in_base = str  # a checkpoint has the names of the text part alone
    return {in_base(name): patch for name, patch in adapter_patches(adapted(trained, base, part), trained).items()}


def adapted(trained: Trained, base: str | None, part: TextPart | None) -> Any:
    """Returns peft's model of an adapter, without weights. Raises UserError for adapters that are not merged here."""
    from peft import get_peft_model

    model = _skeleton(trained, base) if part is None or trained.is_checkpoint else part.base_without_weights()
    with warnings.catch_warnings():
        # Of tied weights, patterns for experts and gradient checkpointing: what they warn of is handled or not done.
        warnings.simplefilter("ignore")
        if not trained.is_checkpoint:
            config = read_lora(trained.folder)
            if getattr(config, "bias", "none") != "none":
                raise UserError(f"{trained.folder}: only LoRA without trained biases is merged")
            with FittingAdapter(trained.folder):
                on_base = get_peft_model(model, config)
            check_shapes(trained, on_base)
            return on_base
        assert trained.recipe is not None
        assert trained.recipe.lora is not None
        lora, parts, paths = trained.recipe.lora, _trained_parts(trained), None
        if parts is not None:
            paths = adapted_modules(model, family_of(model.config), parts, lora)
        return add_adapters(model, lora, torch.float32, trained.recipe.tokens, paths)


def own_tensors(model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the tensors by their first name, and the first name of each further one."""
    shapes, aliases = dict[str, Tensor](), dict[str, str]()
    first: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in first:
            aliases[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
            shapes[name] = tensor.detach()
    return shapes, aliases


def _groups(model: Any, shapes: Mapping[str, Tensor]) -> Iterator[_Group]:
    layout, names = DiskLayout(model, dict(shapes)), list[str]()
    for name, tensor in shapes.items():
        names.append(name)
        if converted := layout.convert(name, tensor):
            is_renaming = len(names) == len(converted) == 1 and next(iter(converted.values())) is tensor
            yield _Group(names, {name: one.shape for name, one in converted.items()}, is_renaming)
            names = []


def _converted(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    layout, made = DiskLayout(model, {name: tensor.to("meta") for name, tensor in state.items()}), dict[str, Tensor]()
    for name in list(state):
        made |= layout.convert(name, state.pop(name))
    return made
