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
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, AutoModelForSequenceClassification

from finetune.checkpoints.trained import Trained
from finetune.checkpoints.weight_files import INDEX, DiskLayout, TensorFiles
from finetune.data.sources.hub import offline_without_hub
from finetune.errors import UserError
from finetune.models.base_checkpoint import base_checkpoint
from finetune.models.base_config import dtypes, first_line, without_weights
from finetune.models.checkpoint_files import unread_names
from finetune.models.config import model_config
from finetune.models.damage import read_object, weight_map
from finetune.models.mtp import (
    attach_without_weights,
    copies_in,
    copies_in_result,
    head_of,
    in_head,
    is_of_head,
)
from finetune.models.score_model import labelled
from finetune.models.stored_config import FORMATS
from finetune.models.stored_loading import without_quantization
from finetune.models.text_part import TextPart, text_part_of
from finetune.models.towers import targets_in_parts, trained_parts
from finetune.models.weights import add_adapters
from finetune.recipe.schema import Model
from finetune.release.export.merging import FittingAdapter, Patch, adapter_patches, check_shapes, read_lora
from finetune.release.export.stored_base import DecodedFiles, decoded_of, format_of_folder


@dataclass(frozen=True)
class BaseFolder:
    """The model that training started from, in files."""

    name: str
    revision: str | None  # the commit, if it is from the hub
    folder: Path
    files: TensorFiles | DecodedFiles

    def identity(self) -> dict[str, Any]:
        hub = None if Path(self.name).exists() else self.name
        return {"name": hub or Path(self.name).name, "revision": self.revision, "tensors": self.files.identity}


def find_base(name: str, revision: str | None) -> BaseFolder:
    """Returns the files of a hub id or a local folder. Raises UserError if it is missing or has no safetensors."""
    folder, commit = Path(name), None
    if not folder.is_dir():
        offline_without_hub()
        try:
            patterns = ["*.json", "*.safetensors", "*.py", "*.jinja", "*.model"]
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
            commit = folder.name
        except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
            raise UserError(
                f"the base model {name!r} is neither a folder here nor on the hub: {first_line(error)}. Fix: put it "
                "where the run found it, or give --base FOLDER"
            ) from None
    if (folder / INDEX).is_file():
        files = [folder / file for file in sorted(set(weight_map(folder / INDEX, whole=False).values()))]
    else:
        files = [folder / "model.safetensors"]
    if missing := [file.name for file in files if not file.is_file()]:
        raise UserError(
            f"the base model {name!r} has no {missing[0]}. Tensors are read from safetensors only. Fix: load it in "
            "transformers and save it by `save_pretrained`, or download it again"
        )
    settings = read_object(folder / "config.json").get("quantization_config")
    if settings is not None and (method := settings.get("quant_method")) not in FORMATS:
        raise UserError(
            f"the base model {name!r} is stored in {method}, which nothing here packs again. An update added to such "
            "weights is lost in their rounding. Fix: train and export from the unquantized model, and quantize the "
            "export"
        )
    return BaseFolder(name, commit, folder, TensorFiles(files))


def base_model(trained: Trained, base: str | None) -> Model:
    """Returns the recipe's model, or the base of an adapter without a run. base: a folder or hub id in its place."""
    if trained.recipe is not None:
        model = trained.recipe.model
    else:
        settings = read_object(trained.folder / "adapter_config.json")
        mtp = "train" if any(map(in_head, trained.shapes)) else "keep"
        model = Model(name=settings["base_model_name_or_path"], revision=settings.get("revision"), mtp=mtp)
    return model.model_copy(update={"name": base, "revision": None}) if base else model


@dataclass(frozen=True)
class _Group:
    """Parameters in memory that together become some tensors of the files."""

    names: list[str]
    shapes: dict[str, torch.Size]  # of the tensors of the files
    is_renaming: bool  # one tensor, at most under another name


class StreamedModel:
    """Shapes of all tensors of the result, and the values of one at a time.

    dtype: of floating-point tensors; None: as the base's files have them, or as the run writes its result. base: a
    folder or hub id in place of the one that the run names; is_exact: of weights that the base stores in fewer bits, in
    fp32 rather than as the run writes its result. Raises UserError if what was trained does not fit the
    base, or cannot be merged.
    """

    def __init__(
        self, trained: Trained, dtype: torch.dtype | None = None, base: str | None = None, is_exact: bool = False
    ):
        self.trained, self._dtype, self._is_exact = trained, dtype, is_exact
        self.about = about = base_model(trained, base)
        self.is_scoring = bool(trained.labels)
        self.base = _find_files(trained, about)
        self.part = None if self.is_scoring else text_part_of(about)  # a head of scores is on a text model
        self.model = _skeleton(trained, about) if self.part is None else _whole(self.part, about)
        if self.base is not None and (form := format_of_folder(self.base.folder)) is not None:
            raw = self.base.files
            assert isinstance(raw, TensorFiles)
            self.base = replace(self.base, files=DecodedFiles(raw, form, self.model, self.base.name))
        if (head := head_of(self.model)) is not None and self.base is not None:
            head.copies = copies_in(self.model.config, self._files.names())
        self._copies = copies_in_result(self.model)  # of tables, by the names of these
        if trained.recipe is not None and not (trained.is_adapter and self.base is not None):
            self.result_dtype = dtype or dtypes(trained.recipe).frozen
        else:
            decoded = decoded_of(self)
            plain = (name for name in self._files.names() if decoded is None or not decoded.is_stored(name))
            types = Counter(self._files.meta(name).dtype for name in plain)
            self.result_dtype = dtype or next(one for one, _ in types.most_common() if one.is_floating_point)
        self.patches = self._find_patches()  # by names in the base's own class
        shapes, self._aliases = own_tensors(self.model)
        # Full fine-tuning stores tied weights once.
        patches = self.patches
        self.unties = trained.is_adapter and any(
            (patches[alias].keys if alias in patches else ()) != (patches[first].keys if first in patches else ())
            for alias, first in self._aliases.items()
        )
        if self.unties:
            shapes |= {alias: torch.empty_like(shapes[first]) for alias, first in self._aliases.items()}
        self._groups = {name: group for group in _groups(self.model, shapes) for name in group.shapes}
        self._disk_name = {group.names[0]: name for name, group in self._groups.items() if group.is_renaming}
        self._ready: dict[str, Tensor] = {}
        self.shapes = {name: self._shape(name) for name in self._groups}
        self.shapes |= {copy: self.shapes[table] for copy, table in self._copies.items()}
        self.kept = list[str]()  # tensors of the base's files that its class does not read
        if self.base is not None and not self.is_scoring:
            tied = {} if self.unties else {alias: torch.empty(0, device="meta") for alias in self._aliases}
            copies = {name for group in _groups(self.model, tied) for name in group.shapes} if tied else set()
            extra = [name for name in self._files.names() if name not in self.shapes and name not in copies]
            if about.mtp == "drop":
                layers = self.model.config.get_text_config().num_hidden_layers
                heads = {name for name in unread_names(self.model, extra) if is_of_head(name, layers)}
                extra = [name for name in extra if name not in heads]
            self.kept = unread_names(self.model, extra)
            if not (trained.is_adapter or self.part):  # a class may read others under names of its own
                extra = self.kept
            self.shapes |= {name: self._cast(self._files.meta(name)) for name in extra}
        # What cannot be merged in the layout of the files is refused.
        names = {name for group in self._groups.values() for name in group.names}
        if unknown := sorted(set(self.patches) - names - set(self._aliases)):
            raise UserError(
                f"{self.trained.folder}: {unknown[0]} was trained but is not in this base model. Fix: give --base the "
                "model that was trained"
            )
        for group in self._groups.values():
            kinds = {self.patches[name].kind for name in group.names if name in self.patches}
            if not group.is_renaming and not kinds <= {"lora"} and not kinds <= {"full"}:
                raise UserError(
                    f"{group.names[0]}: {' and '.join(sorted(kinds))} of this tensor cannot be merged here. The files "
                    "hold it in another layout than transformers. Fix: merge it in memory by peft's `merge_and_unload`"
                )

    @cached_property
    def text_part(self) -> TextPart | None:
        """The text part of a multimodal model, even if other parts were trained; None for a text model."""
        if self.part is not None or self.is_scoring:
            return self.part
        return text_part_of(self.about.model_copy(update={"train": None}))

    def name_in_files(self, parameter: str) -> str | None:
        """Returns the tensor of the result that is a parameter by itself; None if files hold it in another layout."""
        name = self._disk_name.get(parameter)
        return name if name in self.shapes else None

    @property
    def added_rows(self) -> int | None:
        """The rows of the embeddings if training added some, else None."""
        table = self.model.get_input_embeddings().weight
        name = next((name for name, parameter in self.model.named_parameters() if parameter is table), "")
        rows = self.shapes[self._disk_name[name]].shape[0] if name in self._disk_name else len(table)
        return rows if rows != len(table) else None

    def is_trained(self, name: str) -> bool:
        """Returns whether training has changed a tensor of the result."""
        group = self._groups.get(name)
        return group is not None and any(one in self.patches for one in group.names)

    def make(self, name: str) -> Tensor:
        """Returns the values of a tensor."""
        if name in self._copies:
            return self.make(self._copies[name])
        if name in self._ready:
            return self._ready.pop(name)
        group = self._groups.get(name)
        patches = {one: self.patches[one] for one in group.names if one in self.patches} if group else {}
        if group is None or not patches:
            return self._files.read(self._source(name)).to(self.shapes[name].dtype)
        if group.is_renaming:
            (patch,) = patches.values()
            base = None if patch.kind == "full" else self._files.read(self._source(name))
            return patch.apply(base, self.shapes[name].shape, self.shapes[name].dtype)
        if is_full := all(one in patches and patches[one].kind == "full" for one in group.names):
            state = {one: patches[one].values() for one in group.names}  # pyright: ignore[reportOptionalCall]
        else:
            state, own = {}, dict(self.model.named_parameters())
            for one in group.names:
                shape = own[one].shape
                has_update = one in patches
                state[one] = patches[one].apply(None, shape, torch.float32) if has_update else torch.zeros(shape)
        layout = DiskLayout(self.model, {one: tensor.to("meta") for one, tensor in state.items()})
        for one in list(state):
            for on_disk, tensor in layout.convert(one, state.pop(one)).items():
                values = tensor if is_full else self._files.read(on_disk).float() + tensor
                self._ready[on_disk] = values.to(self.shapes[on_disk].dtype)
        return self._ready.pop(name)

    @property
    def _files(self) -> TensorFiles | DecodedFiles:
        assert self.base is not None
        return self.base.files

    def _source(self, name: str) -> str:
        """Returns the base's tensor for one of the result: its twin's, if both were tied and no longer are."""
        if self.base is not None and name in self._files:
            return name
        return self._disk_name.get(self._aliases.get(self._groups[name].names[0], ""), name)

    def _find_patches(self) -> dict[str, Patch]:
        """Returns what was trained; {} for a full result, which has all that is exported. Raises UserError for adapters
        that are not merged here."""
        trained, part = self.trained, self.part
        if not (trained.is_adapter or trained.is_checkpoint):
            return {}
        # A checkpoint has the names of the text part alone.
        in_base = part.in_base if part is not None and trained.is_checkpoint else str
        if not trained.is_adapter:
            return {in_base(name): Patch("full", (name,), partial(trained.read, name)) for name in trained.shapes}
        if part is not None and not trained.is_checkpoint:
            model = _whole(part, self.about)
        else:
            model = _skeleton(trained, self.about)
        from peft import get_peft_model

        with warnings.catch_warnings():
            # About tied weights, patterns for experts and gradient checkpointing: handled, or not done here.
            warnings.simplefilter("ignore")
            if trained.is_checkpoint:
                assert trained.recipe is not None
                assert trained.recipe.lora is not None
                lora, parts = trained.recipe.lora, trained_parts(trained.recipe, model.config)
                targets = targets_in_parts(model, *parts, lora) if parts is not None else None
                adapted = add_adapters(model, lora, torch.float32, trained.recipe.tokens, targets)
            else:
                config = read_lora(trained.folder)
                if getattr(config, "bias", "none") != "none":
                    raise UserError(
                        f"{trained.folder}: only LoRA without trained biases is merged here. Fix: merge it in memory "
                        "by peft's `merge_and_unload`"
                    )
                with FittingAdapter(trained.folder):
                    adapted = get_peft_model(model, config)
                check_shapes(trained, adapted, self.about.name)
        return {in_base(name): one for name, one in adapter_patches(adapted, trained).items()}

    def _shape(self, name: str) -> Tensor:
        """Returns shape and type of a tensor of the result. Raises UserError if nothing has it."""
        group, source = self._groups[name], self._source(name)
        patch = self.patches.get(group.names[0]) if group.is_renaming else None
        in_base = self.base is not None and source in self._files
        folder = self.base.folder if self.base else self.trained.folder
        if patch is not None and patch.kind == "full":
            shape: Any = self.trained.shapes[patch.keys[0]].shape
        elif in_base:
            shape, own = self._files.meta(source).shape, group.shapes[name]
            if shape[1:] != own[1:] or shape[:1] < own[:1]:  # rows of a vocabulary may be more
                raise UserError(
                    f"{folder}: {source} has the shape {list(shape)} in its file, but {list(own)} by config.json. Fix: "
                    "take both from one place"
                )
            if patch is not None and patch.kind == "rows":
                shape = (max(shape[0], max(patch.rows) + 1), *shape[1:])
        elif all(one in self.patches and self.patches[one].kind == "full" for one in group.names):
            shape = group.shapes[name]
        else:
            raise UserError(
                f"{folder}: has no tensor {source}, which {type(self.model).__name__} needs. Fix: complete the folder"
            )
        # A run's own result has one type; a base's tensors keep theirs.
        is_trained = any(one in self.patches for one in group.names)
        keeps = in_base and (self.trained.is_adapter or not is_trained)
        if in_base and not self._is_exact and (files := decoded_of(self)) is not None:
            keeps = keeps and not files.is_stored(source)
        dtype = self._files.meta(source).dtype if keeps else self.result_dtype
        return self._cast(torch.empty(shape, dtype=dtype, device="meta"))

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if self._dtype is not None and tensor.is_floating_point() else tensor


def auto_class(about: Model, labels: tuple[str, ...]) -> Any:
    """Returns transformers' auto class of the model that a run trains."""
    if labels:
        return AutoModelForSequenceClassification
    return AutoModelForMultimodalLM if about.train is not None else AutoModelForCausalLM


def _skeleton(trained: Trained, about: Model) -> Any:
    """Returns transformers' model without weights, tied."""
    try:
        config = model_config(about)
    except UserError as error:
        if about.config is not None or (trained.recipe is not None and about.name == trained.recipe.model.name):
            raise
        raise UserError(f"the base model {about.name!r} cannot be loaded: {error}, or give --base FOLDER") from None
    config = labelled(config, trained.labels) if trained.labels else config
    plain = without_quantization(config)
    model = without_weights(plain, auto_class(about, trained.labels), about.trust_remote_code)
    model.tie_weights()
    if about.mtp == "train":
        attach_without_weights(model, torch.float32)
    return model


def _whole(part: TextPart, about: Model) -> Any:
    """Returns a multimodal base without weights, with the head of its text part if that was trained."""
    model = part.base_without_weights()
    if about.mtp == "train":
        attach_without_weights(model, torch.float32, part.text)
    return model


def _find_files(trained: Trained, about: Model) -> BaseFolder | None:
    """Returns the files that untrained tensors are read from; None for a checkpoint of a model from scratch."""
    if not (trained.is_adapter or trained.is_checkpoint):  # a full result has all that is exported
        return _of_thinker(replace(find_base(str(trained.folder), None), name=about.name or ""), about)
    if about.name is None:
        return None
    base = _of_thinker(find_base(about.name, about.revision), about)
    if not trained.labels or (checkpoint := base_checkpoint(about)) is None:
        return base
    # A head of scores is on the text part of a multimodal base, as a model of its own.
    part, names = checkpoint.part, dict[str, str]()
    own = {part.in_base(name) for name in part.text.state_dict()}
    for name in base.files.names():
        if part.files[name] in own:
            renamed = name
            for pattern, target in checkpoint.renames.items():
                renamed = re.sub(pattern, target, renamed, count=1)
            names[renamed] = name
    assert isinstance(base.files, TensorFiles)  # a multimodal base is plain
    return replace(base, files=base.files.renamed(names))


def _of_thinker(base: BaseFolder, about: Model) -> BaseFolder:
    """Returns the files of a model that also talks, or of a result of its thinker, with the thinker's tensors alone, by
    the names of their own class; those of other models as they are."""
    names = {name.removeprefix(_THINKER): name for name in base.files.names() if name.startswith(_THINKER)}
    if about.train is None or not names:
        return base
    assert isinstance(base.files, TensorFiles)  # a multimodal base is plain
    return replace(base, files=base.files.renamed(names))


_THINKER = "thinker."  # before its tensors in the files of Qwen2.5-Omni and Qwen3-Omni


def own_tensors(model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the tensors by their first name, and the first name of each further one."""
    shapes, aliases = dict[str, Tensor](), dict[str, str]()
    first: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if first.setdefault(id(tensor), name) == name:
            shapes[name] = tensor.detach()
        else:
            aliases[name] = first[id(tensor)]
    return shapes, aliases


def _groups(model: Any, shapes: Mapping[str, Tensor]) -> Iterator[_Group]:
    layout, names = DiskLayout(model, dict(shapes)), list[str]()
    for name, tensor in shapes.items():
        names.append(name)
        if converted := layout.convert(name, tensor):
            is_renaming = len(names) == len(converted) == 1 and next(iter(converted.values())) is tensor
            yield _Group(names, {name: one.shape for name, one in converted.items()}, is_renaming)
            names = []
